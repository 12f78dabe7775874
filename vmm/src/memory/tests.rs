//! Tests of this module.
use std::fs::File;
use std::os::fd::AsFd;

use super::*;

const MIB: u64 = 1 << 20;

fn scratch(name: &str, len: u64) -> (File, std::path::PathBuf) {
    let path = std::env::temp_dir().join(format!("bartizan-{name}-{}", std::process::id()));
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.set_len(len).unwrap();
    (file, path)
}

#[test]
fn a_fall_is_told_once_until_memory_is_given_back() {
    let m = GuestMemory::without_vm(64 * MIB).unwrap();
    let take = |pages| {
        let mut runs = Vec::new();
        m.alloc_many(pages, &mut runs).unwrap();
        let page = |(pa, n): (PhysAddr, usize)| (0..n).map(move |i| PhysAddr(pa.0 + i as u64 * 4096));
        runs.into_iter().flat_map(page).collect::<Vec<_>>()
    };
    m.release(&take(100));
    assert!(!m.take_surplus());
    for _ in 0..2 {
        m.release(&take(2000));
        assert!(m.take_surplus());
        m.release(&take(2000));
        assert!(!m.take_surplus());
        m.trim();
        assert!(!m.take_surplus());
    }
    m.charge(KernelMemory::Task, 8 << 20).unwrap();
    m.uncharge(KernelMemory::Task, 8 << 20);
    assert!(m.take_surplus());
}

#[test]
fn frames_are_zeroed_counted_and_limited() {
    let m = GuestMemory::without_vm(4 * MIB).unwrap();
    let a = m.alloc().unwrap();
    m.write(a, &[7; 4096]).unwrap();
    m.share(a);
    m.release(&[a]);
    assert_eq!((m.references(a), m.used()), (1, 4096));
    m.release(&[a]);
    assert_eq!((m.references(a), m.used()), (0, 0));
    let b = m.alloc().unwrap();
    assert_eq!(a, b, "a freed frame is used first");
    let mut buf = [1; 4096];
    m.read(b, &mut buf).unwrap();
    assert_eq!(buf, [0; 4096]);
    let mut runs = Vec::new();
    assert_eq!(m.alloc_many(1024, &mut runs), Err(Errno::ENOMEM));
    assert!(runs.is_empty());
    m.alloc_many(1023, &mut runs).unwrap();
    assert_eq!(runs.iter().map(|r| r.1).sum::<usize>(), 1023);
    assert!(runs.len() <= 3, "{runs:?}");
    assert_eq!(m.alloc(), Err(Errno::ENOMEM));
    assert_eq!(m.alloc_table_page(), Err(Errno::ENOMEM));
    assert_eq!(m.peak(), 4 * MIB);
    let all: Vec<_> = runs.iter().flat_map(|r| (0..r.1 as u64).map(|i| PhysAddr(r.0.0 + i * 4096))).collect();
    m.release(&all);
    assert_eq!(m.used(), 4096);
}

#[test]
fn freed_memory_goes_back_to_the_host() {
    let m = GuestMemory::without_vm(1024 * MIB).unwrap();
    for round in 0..3u8 {
        let mut runs = Vec::new();
        m.alloc_many(200 * 256, &mut runs).unwrap();
        assert!(runs.len() <= 60, "{} runs", runs.len());
        let all: Vec<_> = runs.iter().flat_map(|r| (0..r.1 as u64).map(|i| PhysAddr(r.0.0 + i * 4096))).collect();
        for pa in all.iter().step_by(100) {
            m.write(*pa, &[round + 1; 100]).unwrap();
        }
        m.release(&all);
        assert!(m.upkeep().0 <= 64 * 256, "{:?}", m.upkeep());
    }
    m.trim();
    assert_eq!(m.upkeep().0, 0);
    let mut runs = Vec::new();
    m.alloc_many(200 * 256, &mut runs).unwrap();
    for r in &runs {
        let mut buf = vec![1; r.1 * 4096];
        m.read(r.0, &mut buf).unwrap();
        assert!(buf.iter().all(|b| *b == 0));
    }
}

#[test]
fn random_allocation_keeps_frames_apart() {
    let m = GuestMemory::without_vm(64 * MIB).unwrap();
    let mut seed = 12345u64;
    let mut random = move |n: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % n
    };
    let mut held: Vec<(PhysAddr, u64)> = Vec::new();
    for step in 0..20_000u64 {
        if random(2) == 0 {
            let mut runs = Vec::new();
            match random(3) {
                0 => runs.push((m.alloc().unwrap(), 1)),
                _ => m.alloc_many(1 + random(40), &mut runs).unwrap(),
            }
            for (pa, n) in runs {
                for i in 0..n as u64 {
                    let pa = PhysAddr(pa.0 + i * 4096);
                    let mut old = [1; 8];
                    m.read(pa, &mut old).unwrap();
                    assert_eq!(old, [0; 8]);
                    m.write(pa, &step.to_le_bytes()).unwrap();
                    held.push((pa, step));
                }
            }
        }
        while held.len() > 8000 || (!held.is_empty() && random(3) != 0) {
            let (pa, value) = held.swap_remove(random(held.len()));
            let mut now = [0; 8];
            m.read(pa, &mut now).unwrap();
            assert_eq!(u64::from_le_bytes(now), value);
            m.release(&[pa]);
        }
        if step % 5000 == 0 {
            m.trim();
        }
    }
    assert_eq!(m.used(), held.len() as u64 * 4096);
}

#[test]
fn copies_of_every_length() {
    let m = GuestMemory::without_vm(4 * MIB).unwrap();
    let a = m.alloc().unwrap();
    let data: Vec<u8> = (0..2000).map(|i| (i * 7 + i / 256) as u8).collect();
    for len in (0..70).chain([127, 128, 129, 500, 511, 512, 513, 600, 2000]) {
        m.zero(a, 4096).unwrap();
        m.write(PhysAddr(a.0 + 3), &data[..len]).unwrap();
        let mut back = vec![0xee; len + 2];
        m.read(PhysAddr(a.0 + 2), &mut back).unwrap();
        assert_eq!(back[0], 0);
        assert_eq!(&back[1..=len], &data[..len], "length {len}");
        assert_eq!(back[len + 1], 0);
    }
    assert_eq!(m.compare_exchange_u32(a, 0, 5), Ok(0));
    assert_eq!(m.compare_exchange_u32(a, 0, 6), Ok(5));
    assert_eq!(m.load_u32(a), Ok(5));
}

#[test]
fn what_is_not_there_is_efault() {
    let m = GuestMemory::without_vm(4 * MIB).unwrap();
    for pa in [0, 4096, slots::FRAMES.base + 300 * MIB * 1024, region::SPAN - 4, region::SPAN, u64::MAX - 2, u64::MAX] {
        let pa = PhysAddr(pa);
        assert_eq!(m.read(pa, &mut [0; 16]), Err(Errno::EFAULT));
        assert_eq!(m.write(pa, &[0; 5000]), Err(Errno::EFAULT));
        assert_eq!(m.zero(pa, 8), Err(Errno::EFAULT));
    }
    assert_eq!(m.load_u32(PhysAddr(4096)), Err(Errno::EFAULT));
    assert_eq!(m.compare_exchange_u32(PhysAddr(region::SPAN - 4), 0, 1), Err(Errno::EFAULT));
}

#[test]
fn a_truncated_file_is_efault() {
    let (file, path) = scratch("truncated", 3 * MIB);
    let m = GuestMemory::without_vm(4 * MIB).unwrap();
    let w = m.window(file.as_fd(), (1, 2), 0, false).unwrap();
    let mut buf = [1; 8192];
    m.read(PhysAddr(w.base().0 + MIB), &mut buf).unwrap();
    assert_eq!(buf, [0; 8192]);
    assert_eq!(m.write(w.base(), &[1]), Err(Errno::EFAULT), "read-only");
    file.set_len(4096).unwrap();
    assert_eq!(m.read(PhysAddr(w.base().0 + MIB), &mut buf), Err(Errno::EFAULT));
    assert_eq!(m.read(w.base(), &mut buf), Err(Errno::EFAULT));
    assert_eq!(m.read(w.base(), &mut buf[..4096]), Ok(()));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn windows_are_shared_and_unmapped() {
    let (file, path) = scratch("windows", 8 * MIB);
    let m = GuestMemory::without_vm(4 * MIB).unwrap();
    let a = m.window(file.as_fd(), (1, 2), 0, true).unwrap();
    let b = m.window(file.as_fd(), (1, 2), 0, true).unwrap();
    let c = m.window(file.as_fd(), (1, 2), 1, true).unwrap();
    assert_eq!(a.base(), b.base());
    assert_ne!(a.base(), c.base());
    m.write(a.base(), b"hello").unwrap();
    use std::os::unix::fs::FileExt;
    let mut buf = [0; 5];
    file.read_exact_at(&mut buf, 0).unwrap();
    assert_eq!(&buf, b"hello");
    m.zap(&[PhysRange { addr: a.base(), len: 8192 }]);
    m.read(a.base(), &mut buf).unwrap();
    assert_eq!(&buf, b"hello");
    let base = a.base();
    drop(a);
    assert_eq!(m.upkeep().2, 2);
    drop(b);
    assert_eq!(m.upkeep().2, 1);
    assert_eq!(m.read(base, &mut buf), Err(Errno::EFAULT));
    assert_eq!(m.window(file.as_fd(), (1, 2), 3, true).unwrap().base(), base, "places are used again");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn many_windows_of_one_file_are_few_host_mappings() {
    let (file, path) = scratch("many", 1 << 40);
    let m = GuestMemory::without_vm(4 * MIB).unwrap();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let before = mappings();
    let mut all = Vec::new();
    let error = loop {
        match m.window(file.as_fd(), (1, 2), all.len() as u64, false) {
            Ok(w) => all.push(w),
            Err(e) => break e,
        }
    };
    assert_eq!((error, all.len()), (Errno::ENOMEM, 32768));
    assert!(mappings() < before + 200, "{}", mappings());
    // Every second one gone: as many mappings as there are pieces, and a bound on them.
    let mut keep = true;
    all.retain(|_| {
        keep = !keep;
        keep
    });
    let mut others = Vec::new();
    let error = loop {
        match m.window(file.as_fd(), (1, 3), others.len() as u64 * 7, false) {
            Ok(w) => others.push(w),
            Err(e) => break e,
        }
    };
    assert_eq!(error, Errno::ENOMEM);
    assert!(mappings() < 50_000);
    drop((all, others));
    assert!(mappings() < before + 200, "{}", mappings());
    std::fs::remove_file(path).unwrap();
}

#[test]
fn private_windows_copy_what_is_expected() {
    let (file, path) = scratch("private", 100_000);
    use std::os::unix::fs::FileExt;
    file.write_all_at(&vec![1; 100_000], 0).unwrap();
    let m = GuestMemory::without_vm(4 * MIB).unwrap();
    let a = m.private_window(file.as_fd(), (1, 2), 0, 7).unwrap();
    let b = m.private_window(file.as_fd(), (1, 2), 0, 7).unwrap();
    let c = m.private_window(file.as_fd(), (1, 2), 0, 8).unwrap();
    assert_eq!(a.base(), b.base());
    assert_ne!(a.base(), c.base());
    a.expect(PhysAddr(a.base().0 + 4096), 10);
    a.expect(PhysAddr(a.base().0 + 4096), 511);
    file.write_all_at(&vec![2; 100_000], 0).unwrap();
    let byte = |pa: PhysAddr| {
        let mut buf = [0];
        m.read(pa, &mut buf).map(|()| buf[0])
    };
    assert_eq!(byte(a.base()), Ok(1));
    assert_eq!(byte(PhysAddr(a.base().0 + 99_999)), Ok(1));
    assert_eq!(byte(PhysAddr(a.base().0 + 102_400)), Err(Errno::EFAULT));
    assert_eq!(byte(c.base()), Ok(2));
    m.zap(&[PhysRange { addr: a.base(), len: 8192 }]);
    assert_eq!(byte(a.base()), Ok(1));
    let mut back = [0];
    file.read_exact_at(&mut back, 0).unwrap();
    assert_eq!(back, [2]);
    drop((a, b, c));
    assert_eq!(m.upkeep().2, 0);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn table_pages_wait_for_the_shadows() {
    let m = GuestMemory::without_vm(64 * MIB).unwrap();
    let pages: Vec<_> = (0..2047).map(|_| m.alloc_table_page().unwrap()).collect();
    m.table_write(pages[0], 511, 42);
    assert_eq!(m.table_read(pages[0], 511), 42);
    assert_eq!(m.table_exchange(pages[0], 511, 42, 43), 42);
    m.retire_table_pages(pages.clone());
    // What waits is nobody's: it makes nobody fail.
    assert_eq!((m.upkeep().1, m.used()), (2047, 0));
    let last = m.alloc_table_page().unwrap();
    assert!(!pages.contains(&last));
    m.retire_table_pages(vec![last]);
    assert_eq!((m.upkeep().1, m.used()), (0, 0));
    for _ in 0..2048 {
        let p = m.alloc_table_page().unwrap();
        assert!(m.table(p).iter().all(|e| e.load(Ordering::Relaxed) == 0));
    }
    m.set_shadow_paging(false);
    let p = m.alloc_table_page().unwrap();
    m.retire_table_pages(vec![p]);
    assert_eq!(m.upkeep().1, 0);
}

#[test]
fn zap_keeps_contents() {
    let m = GuestMemory::without_vm(64 * MIB).unwrap();
    let a = m.alloc().unwrap();
    let b = m.alloc().unwrap();
    m.write(a, b"abc").unwrap();
    m.zap(&[PhysRange { addr: b, len: 4096 }, PhysRange { addr: a, len: 4096 }]);
    let mut buf = [0; 3];
    m.read(a, &mut buf).unwrap();
    assert_eq!(&buf, b"abc");
    assert_eq!(m.settle(), 1);
}
