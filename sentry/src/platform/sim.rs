//! A platform in plain memory, for tests without KVM: frames in a vector, page tables in a map, a clock that moves by hand.
//! It checks the contracts of the traits with assertions; it never runs guest code except through a given closure.
use core::any::Any;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::collections::BTreeMap;
use std::sync::Arc;

use guest_abi::Errno;
use guest_abi::layout::PAGE_SIZE;

use super::host::Window;
use super::{Exit, Fpu, GuestSpace, KernelMemory, Memory, PhysAddr, Platform, Pte, PteFlags, TscClock, UserContext};
use crate::lock::{Mutex, Rank};

const PAGE: usize = PAGE_SIZE as usize;

#[derive(Default)]
struct Frames {
    bytes: Vec<Option<Box<[u8]>>>,
    references: Vec<u32>,
    free: Vec<usize>,
}

impl Frames {
    fn fresh(&mut self) -> usize {
        let i = self.free.pop().unwrap_or_else(|| {
            self.bytes.push(None);
            self.references.push(0);
            self.bytes.len() - 1
        });
        self.bytes[i] = Some(vec![0; PAGE].into_boxed_slice());
        self.references[i] = 1;
        i
    }

    fn append(&mut self, count: usize) -> usize {
        let first = self.bytes.len();
        for _ in 0..count {
            self.bytes.push(Some(vec![0; PAGE].into_boxed_slice()));
            self.references.push(1);
        }
        first
    }

    /// Calls `f` with each piece of `pa..pa+len`.
    fn pieces(&mut self, pa: PhysAddr, len: usize, mut f: impl FnMut(&mut [u8], usize)) -> Result<(), Errno> {
        let mut done = 0;
        while done < len {
            let at = pa.0 + done as u64;
            let (frame, within) = (index(at).ok_or(Errno::EFAULT)?, (at % PAGE_SIZE) as usize);
            let n = (PAGE - within).min(len - done);
            let bytes = self.bytes.get_mut(frame).and_then(Option::as_mut).ok_or(Errno::EFAULT)?;
            f(&mut bytes[within..within + n], done);
            done += n;
        }
        Ok(())
    }
}

/// Frame number 0 is never given out, so that address 0 stays invalid.
fn index(pa: u64) -> Option<usize> {
    usize::try_from(pa / PAGE_SIZE).ok()?.checked_sub(1)
}

fn address(index: usize) -> PhysAddr {
    PhysAddr((index as u64 + 1) * PAGE_SIZE)
}

/// Frames in a vector.
pub struct SimMemory {
    frames: Mutex<Frames>,
    used: AtomicU64,
    peak: AtomicU64,
    charged: [AtomicU64; KernelMemory::COUNT],
    limit: AtomicU64,
}

impl SimMemory {
    /// Changes the limit on allocated bytes.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    fn grow(&self, bytes: u64) {
        let now = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn take(&self, bytes: u64) -> Result<(), Errno> {
        if bytes > self.limit().saturating_sub(self.used()) {
            return Err(Errno::ENOMEM);
        }
        self.grow(bytes);
        Ok(())
    }

    /// Memory that stands for a file window: it shows `content`, zero-filled to whole pages.
    pub fn window(self: &Arc<Self>, content: &[u8]) -> Arc<SimWindow> {
        let pages = content.len().div_ceil(PAGE).max(1);
        self.grow(pages as u64 * PAGE_SIZE);
        let base = address(self.frames.lock().append(pages));
        let _ = self.write(base, content);
        Arc::new(SimWindow { memory: self.clone(), base, pages })
    }
}

/// A file window of a [`SimMemory`]; its frames go back when it is dropped.
pub struct SimWindow {
    memory: Arc<SimMemory>,
    base: PhysAddr,
    pages: usize,
}

impl Window for SimWindow {
    fn base(&self) -> PhysAddr {
        self.base
    }
}

impl Drop for SimWindow {
    fn drop(&mut self) {
        let frames: Vec<_> = (0..self.pages as u64).map(|i| PhysAddr(self.base.0 + i * PAGE_SIZE)).collect();
        self.memory.release(&frames);
    }
}

impl Memory for SimMemory {
    fn alloc(&self) -> Result<PhysAddr, Errno> {
        self.take(PAGE_SIZE)?;
        Ok(address(self.frames.lock().fresh()))
    }

    fn alloc_many(&self, count: usize, out: &mut Vec<(PhysAddr, usize)>) -> Result<(), Errno> {
        self.take(count as u64 * PAGE_SIZE)?;
        let mut f = self.frames.lock();
        // Two runs where possible, so that callers meet more than one.
        for n in [count / 2, count - count / 2] {
            if n > 0 {
                out.push((address(f.append(n)), n));
            }
        }
        Ok(())
    }

    fn share(&self, pa: PhysAddr) {
        let mut f = self.frames.lock();
        let r = index(pa.0).and_then(|i| f.references.get_mut(i)).expect("a frame");
        assert!(*r > 0, "share of a free frame {pa:?}");
        *r += 1;
    }

    fn release(&self, frames: &[PhysAddr]) {
        let mut f = self.frames.lock();
        for pa in frames {
            let i = index(pa.0).expect("a frame");
            assert!(f.references[i] > 0, "release of a free frame {pa:?}");
            f.references[i] -= 1;
            if f.references[i] == 0 {
                f.bytes[i] = None;
                f.free.push(i);
                self.used.fetch_sub(PAGE_SIZE, Ordering::Relaxed);
            }
        }
    }

    fn references(&self, pa: PhysAddr) -> u32 {
        let f = self.frames.lock();
        index(pa.0).and_then(|i| f.references.get(i).copied()).unwrap_or(0)
    }

    fn read(&self, pa: PhysAddr, buf: &mut [u8]) -> Result<(), Errno> {
        let len = buf.len();
        self.frames.lock().pieces(pa, len, |m, at| buf[at..at + m.len()].copy_from_slice(m))
    }

    fn write(&self, pa: PhysAddr, buf: &[u8]) -> Result<(), Errno> {
        self.frames.lock().pieces(pa, buf.len(), |m, at| m.copy_from_slice(&buf[at..at + m.len()]))
    }

    fn zero(&self, pa: PhysAddr, len: usize) -> Result<(), Errno> {
        self.frames.lock().pieces(pa, len, |m, _| m.fill(0))
    }

    fn copy_page(&self, from: PhysAddr, to: PhysAddr) -> Result<(), Errno> {
        let mut page = [0; PAGE];
        self.read(from, &mut page)?;
        self.write(to, &page)
    }

    fn load_u32(&self, pa: PhysAddr) -> Result<u32, Errno> {
        let mut word = [0; 4];
        self.read(pa, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    fn compare_exchange_u32(&self, pa: PhysAddr, old: u32, new: u32) -> Result<u32, Errno> {
        let mut found = 0;
        self.frames.lock().pieces(pa, 4, |m, _| {
            found = u32::from_le_bytes([m[0], m[1], m[2], m[3]]);
            if found == old {
                m.copy_from_slice(&new.to_le_bytes());
            }
        })?;
        Ok(found)
    }

    fn charge(&self, what: KernelMemory, bytes: u64) -> Result<(), Errno> {
        self.take(bytes)?;
        self.charged[what as usize].fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn uncharge(&self, what: KernelMemory, bytes: u64) {
        let before = self.charged[what as usize].fetch_sub(bytes, Ordering::Relaxed);
        assert!(bytes <= before, "more uncharged than charged of {what:?}");
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn charged(&self, what: KernelMemory) -> u64 {
        self.charged[what as usize].load(Ordering::Relaxed)
    }

    fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }
}

/// Page tables in a map.
pub struct SimSpace {
    entries: Mutex<BTreeMap<u64, Pte>>,
    updates: AtomicU64,
}

impl SimSpace {
    /// Calls of `update` so far, each a possible shootdown.
    pub fn updates(&self) -> u64 {
        self.updates.load(Ordering::Relaxed)
    }

    /// All entries, ascending.
    pub fn entries(&self) -> Vec<(u64, Pte)> {
        self.entries.lock().iter().map(|(va, pte)| (*va, *pte)).collect()
    }
}

impl GuestSpace for SimSpace {
    fn lookup(&self, va: u64) -> Option<Pte> {
        self.entries.lock().get(&(va & !(PAGE_SIZE - 1))).copied()
    }

    fn map(&self, va: u64, pte: Pte) -> Result<(), Errno> {
        assert_eq!(va % PAGE_SIZE, 0);
        assert_eq!(pte.pa.0 % PAGE_SIZE, 0);
        assert!(va < guest_abi::layout::TASK_SIZE);
        if let Some(old) = self.entries.lock().insert(va, pte) {
            assert_eq!(old.pa, pte.pa, "map over a present entry of another frame at {va:#x}");
            assert!(pte.flags.contains(old.flags - PteFlags::NONE), "map takes rights away at {va:#x}");
        }
        Ok(())
    }

    fn update(&self, start: u64, end: u64, visit: &mut dyn FnMut(u64, Pte) -> Option<Pte>) {
        assert_eq!((start | end) % PAGE_SIZE, 0);
        self.updates.fetch_add(1, Ordering::Relaxed);
        if start >= end {
            return;
        }
        let mut entries = self.entries.lock();
        let there: Vec<_> = entries.range(start..end).map(|(va, pte)| (*va, *pte)).collect();
        for (va, pte) in there {
            match visit(va, pte) {
                Some(new) => entries.insert(va, new),
                None => entries.remove(&va),
            };
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Vector state as plain bytes.
pub struct SimFpu {
    image: Mutex<Vec<u8>>,
}

impl Fpu for SimFpu {
    fn read(&self) -> Vec<u8> {
        self.image.lock().clone()
    }

    fn write(&self, image: &[u8]) -> Result<(), Errno> {
        let mut own = self.image.lock();
        if image.len() != own.len() {
            return Err(Errno::EINVAL);
        }
        own.copy_from_slice(image);
        Ok(())
    }

    fn reset(&self) {
        self.image.lock().fill(0);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// What stands for guest code: called by [`Platform::enter`].
pub type Program = dyn Fn(&dyn GuestSpace, &mut UserContext, &dyn Fpu) -> Exit + Send + Sync;

#[derive(Default)]
struct Cpu {
    kicked: AtomicBool,
    token: parking_lot::Mutex<bool>,
    wake: parking_lot::Condvar,
}

std::thread_local! { static CPU: core::cell::Cell<usize> = const { core::cell::Cell::new(0) }; }

/// The platform.
pub struct SimPlatform {
    memory: Arc<SimMemory>,
    cpus: Vec<Cpu>,
    clock: AtomicU64,
    /// CLOCK_REALTIME minus CLOCK_MONOTONIC.
    real_offset: AtomicU64,
    deadline: Mutex<Option<u64>>,
    seed: AtomicU64,
    /// The worker that keeps tasks away, and 1.
    keeping: AtomicUsize,
    program: Box<Program>,
}

impl SimPlatform {
    /// Nanoseconds between CLOCK_MONOTONIC and CLOCK_REALTIME at first.
    pub const REAL_OFFSET: u64 = 1_700_000_000_000_000_000;

    /// `cpus` CPUs, 1 GiB of memory, no guest code.
    pub fn new(cpus: usize) -> Arc<SimPlatform> {
        Self::with_program(cpus, Box::new(|_, _, _| Exit::Broken("the simulated platform has no program")))
    }

    /// As `new`, with `program` in the place of guest code.
    pub fn with_program(cpus: usize, program: Box<Program>) -> Arc<SimPlatform> {
        Arc::new(SimPlatform {
            memory: Arc::new(SimMemory {
                frames: Mutex::new(Rank::Frames, Frames::default()),
                used: AtomicU64::new(0),
                peak: AtomicU64::new(0),
                charged: Default::default(),
                limit: AtomicU64::new(1 << 30),
            }),
            cpus: (0..cpus).map(|_| Cpu::default()).collect(),
            clock: AtomicU64::new(1_000_000_000),
            real_offset: AtomicU64::new(Self::REAL_OFFSET),
            deadline: Mutex::new(Rank::Leaf, None),
            seed: AtomicU64::new(0x9e37_79b9_7f4a_7c15),
            keeping: AtomicUsize::new(0),
            program,
        })
    }

    /// Makes `cpu` the only worker, or none, that [`Platform::keeps_tasks_away`] is true of.
    pub fn keep_tasks_away(&self, cpu: Option<usize>) {
        self.keeping.store(cpu.map_or(0, |c| c + 1), Ordering::SeqCst);
    }

    /// The memory, as its own type.
    pub fn sim_memory(&self) -> &Arc<SimMemory> {
        &self.memory
    }

    /// Moves the clock. The caller then calls `Kernel::on_deadline` if [`SimPlatform::deadline`] has passed.
    pub fn advance(&self, ns: u64) {
        self.clock.fetch_add(ns, Ordering::SeqCst);
    }

    /// Sets CLOCK_REALTIME. The caller then calls `Kernel::on_clock_set`.
    pub fn set_realtime(&self, ns: u64) {
        self.real_offset.store(ns.wrapping_sub(self.clock.load(Ordering::SeqCst)), Ordering::SeqCst);
    }

    /// The deadline last asked for.
    pub fn deadline(&self) -> Option<u64> {
        *self.deadline.lock()
    }

    /// Names the CPU that the calling thread stands for (0 unless told).
    pub fn set_current_cpu(cpu: usize) {
        CPU.set(cpu);
    }
}

impl Platform for SimPlatform {
    fn cpus(&self) -> usize {
        self.cpus.len()
    }

    fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    fn new_space(&self) -> Result<Arc<dyn GuestSpace>, Errno> {
        let entries = Mutex::new(Rank::PageTable, BTreeMap::new());
        Ok(Arc::new(SimSpace { entries, updates: AtomicU64::new(0) }))
    }

    fn new_fpu(&self) -> Arc<dyn Fpu> {
        Arc::new(SimFpu { image: Mutex::new(Rank::Leaf, vec![0; self.xsave_len()]) })
    }

    fn xsave_len(&self) -> usize {
        832
    }

    fn xcr0(&self) -> u64 {
        7
    }

    fn hwcap(&self) -> (u64, u64) {
        (0x178b_fbff, 2)
    }

    fn enter(&self, space: &dyn GuestSpace, ctx: &mut UserContext, fpu: &dyn Fpu) -> Exit {
        if self.cpus.get(CPU.get()).is_some_and(|c| c.kicked.swap(false, Ordering::SeqCst)) {
            return Exit::Interrupted;
        }
        (self.program)(space, ctx, fpu)
    }

    fn kick(&self, cpu: usize) {
        if let Some(c) = self.cpus.get(cpu) {
            c.kicked.store(true, Ordering::SeqCst);
        }
    }

    fn set_preemption(&self, _cpu: usize, _ns: Option<u64>) {}

    fn park(&self, cpu: usize) {
        let Some(c) = self.cpus.get(cpu) else { return };
        let mut token = c.token.lock();
        while !*token {
            c.wake.wait(&mut token);
        }
        *token = false;
    }

    fn keeps_tasks_away(&self, cpu: usize) -> bool {
        self.keeping.load(Ordering::SeqCst) == cpu + 1
    }

    fn unpark(&self, cpu: usize) {
        if let Some(c) = self.cpus.get(cpu) {
            *c.token.lock() = true;
            c.wake.notify_one();
        }
    }

    fn monotonic(&self) -> u64 {
        self.clock.load(Ordering::SeqCst)
    }

    fn realtime(&self) -> u64 {
        self.monotonic().wrapping_add(self.real_offset.load(Ordering::SeqCst))
    }

    fn tsc_clock(&self) -> Option<TscClock> {
        None
    }

    fn set_deadline(&self, at: Option<u64>) {
        *self.deadline.lock() = at;
    }

    fn random(&self, buf: &mut [u8]) {
        for chunk in buf.chunks_mut(8) {
            // splitmix64: tests want the same numbers in every run.
            let mut z = self.seed.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            chunk.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes()[..chunk.len()]);
        }
    }

    fn mailbox_readable(&self) -> bool {
        false
    }
}
