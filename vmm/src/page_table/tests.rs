//! Tests of this module.
use sentry::platform::Memory;

use super::*;

#[test]
fn leaves_survive_encoding() {
    for bits in 0..128 {
        let pte = Pte { pa: PhysAddr(0x1234_5000), flags: PteFlags::from_bits_truncate(bits) };
        assert_eq!(pte::decode(pte::encode(pte)), Some(pte));
        assert_eq!(pte::target(pte::encode(pte)).is_some(), !pte.flags.contains(PteFlags::NONE));
    }
    assert_eq!(pte::decode(0), None);
}

/// A space with 1024 private pages from 2 MiB on, and what it owns.
fn dense(memory: &Arc<GuestMemory>) -> (KvmSpace, Vec<PhysAddr>) {
    let space = KvmSpace::new(memory.clone(), 1);
    let frames: Vec<_> = (0..1024).map(|_| memory.alloc().unwrap()).collect();
    for (i, &pa) in frames.iter().enumerate() {
        let va = (512 + i as u64) * PAGE_SIZE;
        space.map(va, Pte { pa, flags: PteFlags::OWNED | PteFlags::WRITE }).unwrap();
    }
    (space, frames)
}

fn drained(space: &KvmSpace, memory: &GuestMemory) -> usize {
    let mut owned = Vec::new();
    space.drain(&mut |_, pte| owned.push(pte.pa));
    memory.release(&owned);
    owned.len()
}

#[test]
fn a_fork_inherits_regions_until_either_side_changes_them() {
    let memory = GuestMemory::without_vm(64 << 20).unwrap();
    let (parent, frames) = dense(&memory);
    let child = KvmSpace::new(memory.clone(), 1);
    let given = parent.bequeath(&child, &mut |_, _| true);
    assert_eq!(
        given.iter().map(|b| (b.start, b.private, b.others)).collect::<Vec<_>>(),
        [(2 << 20, 512, 0), (4 << 20, 512, 0)]
    );
    // Nothing copied, nothing counted; the parent may not write any more.
    assert!(frames.iter().all(|&pa| memory.references(pa) == 1));
    for space in [&parent, &child] {
        let pte = space.lookup(3 << 20).unwrap();
        assert_eq!((pte.pa, pte.flags), (frames[256], PteFlags::OWNED));
    }
    let mut shared = 0;
    child.visit(0, TASK_SIZE, &mut |_, _, by_forks| shared += usize::from(by_forks));
    assert_eq!(shared, 1024);
    // The child uses one region, the parent changes the other.
    assert!(child.own(2 << 20, false) && !child.own(2 << 20, true));
    assert_eq!((memory.references(frames[0]), memory.references(frames[512])), (2, 1));
    assert!(!parent.own(4 << 20, true));
    assert_eq!(memory.references(frames[512]), 2);
    parent.update(4 << 20, (4 << 20) + PAGE_SIZE, &mut |_, _| None);
    memory.release(&[frames[512]]);
    assert_eq!(child.lookup(4 << 20).map(|p| p.pa), Some(frames[512]));
    assert!(child.own(4 << 20, true));
    assert_eq!(child.lookup(4 << 20).map(|p| p.pa), Some(frames[512]));
    // Each has its own now.
    assert_eq!((drained(&child, &memory), drained(&parent, &memory)), (1024, 1023));
    drop((child, parent));
    memory.trim();
    assert_eq!(memory.used(), 0);
}

#[test]
fn a_heritage_outlives_who_left_it_and_goes_with_the_last_heir() {
    let memory = GuestMemory::without_vm(64 << 20).unwrap();
    let (parent, frames) = dense(&memory);
    let spaces: Vec<_> = (0..3).map(|_| KvmSpace::new(memory.clone(), 1)).collect();
    assert_eq!(parent.bequeath(&spaces[0], &mut |_, _| true).len(), 2);
    // A fork of a fork that has used neither region.
    assert_eq!(spaces[0].bequeath(&spaces[1], &mut |_, _| true).len(), 2);
    // As it was at the first fork, with no pass over it; one region is not admitted.
    assert_eq!(parent.bequeath(&spaces[2], &mut |start, _| start == 2 << 20).len(), 1);
    assert_eq!(parent.renounce(0, TASK_SIZE), (1024, 0));
    assert_eq!(drained(&parent, &memory), 0);
    drop(parent);
    assert!(frames.iter().all(|&pa| memory.references(pa) == 1));
    // Half of a region goes, the rest stays; a whole one goes unseen.
    let mut seen = Vec::new();
    spaces[0].update(3 << 20, 4 << 20, &mut |_, pte| {
        seen.push(pte.pa);
        None
    });
    assert_eq!(seen, frames[256..512]);
    memory.release(&seen);
    assert_eq!(spaces[0].renounce(1 << 20, 5 << 20), (0, 0));
    assert_eq!(spaces[0].renounce(4 << 20, 6 << 20), (512, 0));
    assert_eq!(memory.references(frames[511]), 1);
    assert_eq!(drained(&spaces[0], &memory), 256);
    assert_eq!(drained(&spaces[2], &memory), 0);
    assert_eq!(memory.references(frames[511]), 1);
    // The last one: references move into its table.
    assert!(spaces[1].own(2 << 20, false));
    assert_eq!((memory.references(frames[0]), memory.references(frames[1023])), (1, 1));
    assert_eq!(drained(&spaces[1], &memory), 512);
    drop(spaces);
    memory.trim();
    assert_eq!(memory.used(), 0);
}

#[test]
fn shootdown_only_when_rights_shrink_or_the_page_moves() {
    let at = |pa, flags| pte::encode(Pte { pa: PhysAddr(pa), flags });
    let (r, rw, rx) = (PteFlags::empty(), PteFlags::WRITE, PteFlags::EXEC);
    assert!(!pte::needs_shootdown(0, at(0x1000, rw)));
    assert!(!pte::needs_shootdown(at(0x1000, r), at(0x1000, rw)));
    assert!(!pte::needs_shootdown(at(0x1000, r), at(0x1000, rx)));
    assert!(!pte::needs_shootdown(at(0x1000, r), at(0x1000, r | PteFlags::OWNED)));
    assert!(pte::needs_shootdown(at(0x1000, rw), at(0x1000, r)));
    assert!(pte::needs_shootdown(at(0x1000, rx), at(0x1000, r)));
    assert!(pte::needs_shootdown(at(0x1000, r), at(0x2000, r)));
    assert!(pte::needs_shootdown(at(0x1000, r), 0));
    assert!(pte::needs_shootdown(at(0x1000, r), at(0x1000, r | PteFlags::NONE)));
    assert!(!pte::needs_shootdown(at(0x1000, PteFlags::NONE), at(0x1000, r)));
}
