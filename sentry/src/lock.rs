//! Locks with one declared order, checked at run time in debug builds. Owns the order; protects nothing itself.
//!
//! A thread may only take a lock whose rank is greater than every rank it holds (`lock_nested` admits an equal one, for
//! two objects of one kind taken in a fixed order of their own). Guards are not `Send`, so none lives across an await.
use core::ops::{Deref, DerefMut};

/// The lock order, outermost first. `docs/LOCKING.md` gives the reasons.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Rank {
    /// Outermost: held over a whole read or write, which may look at anything (/proc files).
    FilePosition,
    Tty,
    Kinship,
    PidNamespace,
    Pid,
    ProcessGroup,
    ThreadGroup,
    SignalActions,
    GroupSignals,
    TaskSignals,
    Task,
    FsContext,
    FdTable,
    Mount,
    Rename,
    Dentry,
    Inode,
    EpollNesting,
    Epoll,
    Socket,
    Pipe,
    Futex,
    AddressSpace,
    Mapping,
    PageCache,
    PageTable,
    Frames,
    EpollReady,
    TimerState,
    Timers,
    WaitQueue,
    RunQueue,
    Leaf,
}

#[cfg(debug_assertions)]
mod held {
    use super::Rank;
    use core::cell::RefCell;

    thread_local! { static HELD: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) }; }

    pub(super) fn acquire(rank: Rank, nested: bool) {
        HELD.with_borrow_mut(|h| {
            if let Some(&top) = h.iter().max() {
                assert!(rank > top || (nested && rank == top), "lock order: {rank:?} taken while {h:?} held");
            }
            h.push(rank);
        });
    }

    pub(super) fn release(rank: Rank) {
        HELD.with_borrow_mut(|h| {
            if let Some(i) = h.iter().rposition(|&r| r == rank) {
                h.remove(i);
            }
        });
    }
}

/// Proof that a rank is recorded as held; dropping it records the release.
struct Held {
    #[cfg(debug_assertions)]
    rank: Rank,
}

impl Held {
    #[cfg(debug_assertions)]
    fn new(rank: Rank, nested: bool) -> Held {
        held::acquire(rank, nested);
        Held { rank }
    }

    #[cfg(not(debug_assertions))]
    fn new(_rank: Rank, _nested: bool) -> Held {
        Held {}
    }
}

#[cfg(debug_assertions)]
impl Drop for Held {
    fn drop(&mut self) {
        held::release(self.rank);
    }
}

/// A mutual exclusion lock with a rank.
pub struct Mutex<T: ?Sized> {
    rank: Rank,
    inner: parking_lot::Mutex<T>,
}

/// A held [`Mutex`].
pub struct MutexGuard<'a, T: ?Sized> {
    inner: parking_lot::MutexGuard<'a, T>,
    _held: Held,
}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub const fn new(rank: Rank, value: T) -> Self {
        Mutex { rank, inner: parking_lot::Mutex::new(value) }
    }

    /// The value, from an owner.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Takes the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let held = Held::new(self.rank, false);
        MutexGuard { inner: self.inner.lock(), _held: held }
    }

    /// Takes the lock although one of the same rank is held; the caller orders the two.
    pub fn lock_nested(&self) -> MutexGuard<'_, T> {
        let held = Held::new(self.rank, true);
        MutexGuard { inner: self.inner.lock(), _held: held }
    }

    /// Takes the lock if nobody holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = self.inner.try_lock()?;
        Some(MutexGuard { inner, _held: Held::new(self.rank, true) })
    }

    /// The value, through an exclusive reference.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}
impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// A reader-writer lock with a rank. Readers count as holders: no recursion.
pub struct RwLock<T: ?Sized> {
    rank: Rank,
    inner: parking_lot::RwLock<T>,
}

/// A shared hold of an [`RwLock`].
pub struct RwLockReadGuard<'a, T: ?Sized> {
    inner: parking_lot::RwLockReadGuard<'a, T>,
    _held: Held,
}

/// An exclusive hold of an [`RwLock`].
pub struct RwLockWriteGuard<'a, T: ?Sized> {
    inner: parking_lot::RwLockWriteGuard<'a, T>,
    _held: Held,
}

impl<T> RwLock<T> {
    /// An unlocked lock.
    pub const fn new(rank: Rank, value: T) -> Self {
        RwLock { rank, inner: parking_lot::RwLock::new(value) }
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Takes the lock for reading.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let held = Held::new(self.rank, false);
        RwLockReadGuard { inner: self.inner.read(), _held: held }
    }

    /// Takes the lock for writing.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let held = Held::new(self.rank, false);
        RwLockWriteGuard { inner: self.inner.write(), _held: held }
    }

    /// Takes the lock for writing although one of the same rank is held; the caller orders the two.
    pub fn write_nested(&self) -> RwLockWriteGuard<'_, T> {
        let held = Held::new(self.rank, true);
        RwLockWriteGuard { inner: self.inner.write(), _held: held }
    }
}

impl<T: ?Sized> Deref for RwLockReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}
impl<T: ?Sized> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}
impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}
