//! Address spaces on the simulated platform, against a naive model that keeps one record a page.
use std::collections::BTreeMap;
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};

use super::advise::Advice;
use super::backing::MappedPage;
use super::remap::RemapFlags;
use super::space::MAX_MAP_COUNT;
use super::*;
use crate::lock::{Mutex, Rank};
use crate::platform::host::Window;
use crate::platform::sim::{SimMemory, SimPlatform, SimSpace, SimWindow};
use crate::platform::{KernelMemory, PhysAddr, Platform};
use crate::{Errno, Result};

const P: u64 = 4096;

/// A file whose contents lie in one window.
struct WindowFile {
    window: Arc<SimWindow>,
    size: Mutex<u64>,
}

impl WindowFile {
    fn new(memory: &Arc<SimMemory>, content: &[u8]) -> Arc<WindowFile> {
        let size = Mutex::new(Rank::Mapping, content.len() as u64);
        Arc::new(WindowFile { window: memory.window(content), size })
    }
}

impl Mappable for WindowFile {
    fn key(&self) -> (u64, u64) {
        (7, self.window.base().0)
    }
    fn page(&self, offset: u64, _write: bool) -> Result<MappedPage> {
        let size = *self.size.lock();
        if offset >= size {
            return Err(Errno::EFAULT);
        }
        let base = self.window.base();
        let run = (0, base, size.div_ceil(P) as usize);
        Ok(MappedPage::Window { pa: PhysAddr(base.0 + offset), run, keep: self.window.clone() })
    }
    fn size(&self) -> u64 {
        *self.size.lock()
    }
    fn add_mapper(&self, _space: &Arc<AddressSpace>) {}
}

fn platform() -> (Arc<SimPlatform>, Arc<dyn Platform>) {
    let sim = SimPlatform::new(1);
    (sim.clone(), sim)
}

fn request(addr: u64, pages: u64, prot: Prot, flags: MapFlags) -> MapRequest {
    MapRequest { addr: UserAddr(addr), len: pages * P, prot, flags, source: MapSource::Anonymous }
}

fn rw() -> Prot {
    Prot::READ | Prot::WRITE
}

fn put(space: &Arc<AddressSpace>, addr: u64, value: u64) -> Result<()> {
    space.write(UserPtr::new(UserAddr(addr)), &value)
}

fn get(space: &Arc<AddressSpace>, addr: u64) -> Result<u64> {
    space.read(UserPtr::new(UserAddr(addr)))
}

/// Bytes in frames: what is charged for VMAs is left out.
fn frames_used(sim: &SimPlatform) -> u64 {
    sim.memory().used() - sim.memory().charged(KernelMemory::Slab)
}

#[test]
fn anonymous_memory_is_zero_and_private_to_each_side_of_a_fork() {
    let (sim, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    let at = space.map(request(0, 100, rw(), MapFlags::empty())).unwrap().0;
    assert_eq!(get(&space, at + 8), Ok(0));
    put(&space, at, 1).unwrap();
    let child = space.fork().unwrap();
    assert_eq!(get(&child, at), Ok(1));
    put(&child, at, 2).unwrap();
    put(&space, at + P, 3).unwrap();
    assert_eq!((get(&space, at), get(&child, at)), (Ok(1), Ok(2)));
    assert_eq!((get(&space, at + P), get(&child, at + P)), (Ok(3), Ok(0)));
    drop(space);
    put(&child, at + 2 * P, 4).unwrap();
    drop(child);
    assert_eq!(frames_used(&sim), 0);
}

#[test]
fn shared_anonymous_memory_is_one_for_both_sides() {
    let (sim, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    let at = space.map(request(0, 10, rw(), MapFlags::SHARED)).unwrap();
    let child = space.fork().unwrap();
    put(&child, at.0 + 3 * P, 5).unwrap();
    assert_eq!(get(&space, at.0 + 3 * P), Ok(5));
    let word = UserAddr(at.0 + 16);
    assert_eq!(space.futex_key(word, true), child.futex_key(word, true));
    assert_ne!(space.futex_key(word, false), child.futex_key(word, false));
    assert_eq!(space.compare_exchange_u32(word, 0, 9), Ok(0));
    assert_eq!(child.load_u32(word), Ok(9));
    drop((space, child));
    assert_eq!(frames_used(&sim), 0);
}

#[test]
fn private_file_pages_are_shown_then_copied_and_end_with_the_file() {
    let (sim, platform) = platform();
    let content: Vec<u8> = (0..6 * P + 10).map(|i| (i / P) as u8 + 1).collect();
    let object = WindowFile::new(sim.sim_memory(), &content);
    let before = frames_used(&sim);
    let space = AddressSpace::new(&platform).unwrap();
    let source = MapSource::File { object: object.clone(), offset: P, file: None, may_write: false };
    let wanted = MapRequest { addr: UserAddr(0), len: 10 * P, prot: rw(), flags: MapFlags::LIBRARY, source };
    let at = space.map(wanted).unwrap().0;
    assert_eq!(get(&space, at), Ok(0x0202_0202_0202_0202));
    assert_eq!(frames_used(&sim), before);
    put(&space, at + P, 77).unwrap();
    assert_eq!((get(&space, at + P), get(&space, at + P + 8)), (Ok(77), Ok(0x0303_0303_0303_0303)));
    let mut original = [0; 8];
    sim.memory().read(PhysAddr(object.window.base().0 + 2 * P), &mut original).unwrap();
    assert_eq!(original, [3; 8]);
    assert_eq!(get(&space, at + 6 * P), Err(Errno::EFAULT));
    assert_eq!(space.fault(UserAddr(at + 6 * P), false, false), Err(FaultSignal::Bus));
    // Truncation takes private copies with it.
    *object.size.lock() = 2 * P;
    space.unmap_object(&*object, 2 * P, u64::MAX);
    assert_eq!(get(&space, at + P), Err(Errno::EFAULT));
    assert_eq!(get(&space, at), Ok(0x0202_0202_0202_0202));
    assert_eq!(Arc::strong_count(&object.window), 2);
    space.unmap(UserAddr(at), 10 * P).unwrap();
    assert_eq!(Arc::strong_count(&object.window), 1);
    assert_eq!(frames_used(&sim), before);
}

#[test]
fn rights_are_kept_and_forced_access_ignores_them() {
    let (_, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    let at = space.map(request(0, 4, rw(), MapFlags::empty())).unwrap().0;
    put(&space, at, 1).unwrap();
    space.protect(UserAddr(at), P, Prot::READ, false).unwrap();
    assert_eq!(put(&space, at, 2), Err(Errno::EFAULT));
    assert_eq!(space.fault(UserAddr(at), true, false), Err(FaultSignal::Access));
    space.write_forced(UserAddr(at), &[7]).unwrap();
    assert_eq!(get(&space, at), Ok(7));
    space.protect(UserAddr(at), P, Prot::empty(), false).unwrap();
    assert_eq!(get(&space, at), Err(Errno::EFAULT));
    let mut byte = [0];
    space.read_forced(UserAddr(at), &mut byte).unwrap();
    space.write_forced(UserAddr(at + 1), &[1]).unwrap();
    space.protect(UserAddr(at), P, Prot::WRITE, false).unwrap();
    assert_eq!((byte, get(&space, at)), ([7], Ok(0x107)));
    assert_eq!(space.fault(UserAddr(at), false, true), Err(FaultSignal::Access));
    assert_eq!(space.fault(UserAddr(0x10_0000), false, false), Err(FaultSignal::NotMapped));
    assert_eq!(space.maps(false).len(), 2);
}

#[test]
fn a_stack_grows_down_to_its_limit_and_keeps_its_guard() {
    let (_, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    let flags = MapFlags::FIXED | MapFlags::GROWSDOWN | MapFlags::STACK;
    let top = 0x7000_0000_0000;
    space.map(request(top - 4 * P, 4, rw(), flags)).unwrap();
    put(&space, top - 100 * P, 1).unwrap();
    assert_eq!(space.maps(false)[0].start, top - 100 * P);
    assert_eq!(put(&space, top - (8 << 20) - P, 1), Err(Errno::EFAULT));
    // A neighbour within the guard gap stops it, one further away does not.
    space.map(request(top - 500 * P, 4, rw(), MapFlags::FIXED)).unwrap();
    assert_eq!(put(&space, top - 240 * P - 8, 1), Err(Errno::EFAULT));
    put(&space, top - 240 * P, 1).unwrap();
}

#[test]
fn brk_moves_within_its_bounds() {
    let (_, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    let base = 0x5555_0000_0000;
    space.set_brk_base(UserAddr(base));
    assert_eq!(space.brk(UserAddr(0)).0, base);
    assert_eq!(space.brk(UserAddr(base + 5000)).0, base + 5000);
    put(&space, base + 8184, 1).unwrap();
    assert_eq!(space.maps(false)[0].name, b"[heap]");
    assert_eq!(space.brk(UserAddr(base + 100)).0, base + 100);
    assert_eq!(get(&space, base + 8184), Err(Errno::EFAULT));
    space.map(request(base + 10 * P, 1, rw(), MapFlags::FIXED)).unwrap();
    assert_eq!(space.brk(UserAddr(base + 10 * P)).0, base + 100);
    assert_eq!(space.brk(UserAddr(base + 9 * P)).0, base + 9 * P);
    assert_eq!(space.brk(UserAddr(base - 1)).0, base + 9 * P);
}

#[test]
fn pinned_pages_outlive_their_mapping() {
    let (sim, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    let at = space.map(request(0, 8, rw(), MapFlags::empty())).unwrap();
    let mut dest = IoDest::user_vec(space.clone(), vec![(UserAddr(at.0 + 10), 100), (UserAddr(at.0 + 2 * P), 9000)]);
    let pinned = dest.pin(1 << 20).unwrap().unwrap();
    assert_eq!(pinned.len(), 9100);
    space.unmap(at, 8 * P).unwrap();
    sim.memory().write(pinned.ranges()[0].addr, &[1; 100]).unwrap();
    drop((pinned, dest));
    assert_eq!(frames_used(&sim), 0);
}

#[test]
fn transfers_stop_at_the_first_bad_page() {
    let (_, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    let at = space.map(request(0x100_0000, 2, rw(), MapFlags::FIXED)).unwrap();
    let mut dest = IoDest::user(space.clone(), UserAddr(at.0 + P), 3 * P as usize);
    assert_eq!(dest.put(&[1; 10_000]), Ok(P as usize));
    assert_eq!(dest.put(&[1; 10]), Err(Errno::EFAULT));
    let mut source = IoSource::user_vec(space.clone(), vec![(UserAddr(at.0 + P), 4), (UserAddr(0), 0), (at, 4)]);
    let mut buf = [9; 16];
    assert_eq!(source.take(&mut buf), Ok(8));
    assert_eq!(buf[..9], [1, 1, 1, 1, 0, 0, 0, 0, 9]);
    space.write_bytes(UserAddr(at.0 + P - 3), b"abc").unwrap();
    assert_eq!(space.read_cstr(UserAddr(at.0 + P - 3), 3, Errno::ENAMETOOLONG), Err(Errno::ENAMETOOLONG));
    space.write_bytes(UserAddr(at.0 + 2 * P - 3), b"abc").unwrap();
    assert_eq!(space.read_cstr(UserAddr(at.0 + 2 * P - 3), 99, Errno::ENAMETOOLONG), Err(Errno::EFAULT));
}

#[test]
fn many_mappings_stay_fast_and_end_at_the_limit() {
    let (sim, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    let mut made = 0;
    loop {
        let prot = if made % 2 == 0 { Prot::READ } else { rw() };
        match space.map(request(0, 1, prot, MapFlags::empty())) {
            Ok(_) => made += 1,
            Err(e) => {
                assert_eq!(e, Errno::ENOMEM);
                break;
            }
        }
    }
    assert_eq!(made, MAX_MAP_COUNT + 1);
    assert!(sim.memory().charged(KernelMemory::Slab) >= (made * 256) as u64);
    drop(space);
    assert_eq!(sim.memory().used(), 0);
}

#[test]
fn a_huge_reservation_costs_nothing() {
    let (sim, platform) = platform();
    let space = AddressSpace::new(&platform).unwrap();
    assert_eq!(space.map(request(0, 1 << 28, rw(), MapFlags::empty())), Err(Errno::ENOMEM));
    let at = space.map(request(0, 1 << 28, rw(), MapFlags::NORESERVE)).unwrap();
    put(&space, at.0 + (1 << 39), 1).unwrap();
    assert!(frames_used(&sim) <= 8 * P);
    space.unmap(at, 1 << 40).unwrap();
    assert_eq!(frames_used(&sim), 0);
}

/// What the model knows of a page.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Page {
    prot: Prot,
    value: u64,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Random calls on a small range, compared with the model after each.
fn compare_with_model(seed: u64, steps: usize) {
    const BASE: u64 = 0x4000_0000;
    const PAGES: u64 = 48;
    let (sim, platform) = platform();
    let mut spaces = vec![(AddressSpace::new(&platform).unwrap(), BTreeMap::<u64, Page>::new())];
    let mut r = Random(seed);
    for step in 0..steps {
        let which = r.below(spaces.len() as u64) as usize;
        let first = r.below(PAGES);
        let count = 1 + r.below((PAGES - first).min(12));
        let at = BASE + first * P;
        let prot = [Prot::empty(), Prot::READ, rw(), rw(), Prot::READ | Prot::EXEC][r.below(5) as usize];
        let kind = r.below(12);
        let len = spaces.len();
        let (space, model) = &mut spaces[which];
        let range = first..first + count;
        let whole = range.clone().all(|i| model.contains_key(&i));
        match kind {
            0 | 1 => {
                space.map(request(at, count, prot, MapFlags::FIXED)).unwrap();
                model.extend(range.map(|i| (i, Page { prot, value: 0 })));
            }
            2 => {
                space.unmap(UserAddr(at), count * P).unwrap();
                model.retain(|i, _| !range.contains(i));
            }
            3 | 4 => {
                let expect = if whole { Ok(()) } else { Err(Errno::ENOMEM) };
                assert_eq!(space.protect(UserAddr(at), count * P, prot, false), expect, "step {step}");
                for i in range {
                    let Some(page) = model.get_mut(&i) else { break };
                    page.prot = prot;
                }
            }
            5 => {
                let expect = if whole { Ok(()) } else { Err(Errno::ENOMEM) };
                assert_eq!(space.advise(UserAddr(at), count * P, Advice::DontNeed), expect);
                for i in range {
                    if let Some(page) = model.get_mut(&i) {
                        page.value = 0;
                    }
                }
            }
            6 => {
                // Move within the range, where nothing overlaps.
                let target = r.below(PAGES - count + 1);
                let apart = target + count <= first || first + count <= target;
                let same = whole && model.range(range.clone()).all(|(_, p)| p.prot == model[&first].prot);
                if !apart || !same {
                    continue;
                }
                let flags =
                    RemapFlags { may_move: true, fixed: Some(UserAddr(BASE + target * P)), ..RemapFlags::default() };
                let got = space.remap(UserAddr(at), count * P, count * P, flags);
                assert_eq!(got.map(|a| a.0), Ok(BASE + target * P), "step {step}");
                for i in 0..count {
                    if let Some(page) = model.remove(&(first + i)) {
                        model.insert(target + i, page);
                    }
                }
            }
            7 if len < 4 => {
                let child = (space.fork().unwrap(), model.clone());
                spaces.push(child);
            }
            8 if len > 1 => {
                spaces.remove(which);
                continue;
            }
            _ => {
                let allowed = model.get(&first).is_some_and(|p| p.prot.contains(Prot::WRITE));
                let value = step as u64 + 1;
                assert_eq!(put(space, at + 64, value).is_ok(), allowed, "step {step}");
                if allowed {
                    model.get_mut(&first).unwrap().value = value;
                }
            }
        }
        for (space, model) in &spaces {
            space.state.read().vmas.check();
            for i in 0..PAGES {
                let expect = model.get(&i).filter(|p| !p.prot.is_empty()).map(|p| p.value);
                assert_eq!(get(space, BASE + i * P + 64).ok(), expect, "seed {seed} step {step} page {i}");
            }
            let present = space.pages().as_any().downcast_ref::<SimSpace>().unwrap().entries().len() as u64;
            assert_eq!(space.sizes(), (model.len() as u64 * P, present * P));
        }
    }
    drop(spaces);
    assert_eq!(frames_used(&sim), 0);
}

#[test]
fn random_calls_agree_with_the_model() {
    for seed in 0..20 {
        compare_with_model(seed * 7919 + 1, 300);
    }
}
