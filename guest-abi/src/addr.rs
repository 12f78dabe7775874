//! User addresses: claims by the guest that only `sentry::mm::usercopy` judges. None can be dereferenced.
use core::fmt;
use core::marker::PhantomData;

use crate::layout::{PAGE_SIZE, TASK_SIZE};

/// A virtual address as the guest gave it; any 64-bit value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct UserAddr(pub u64);

impl UserAddr {
    /// The null pointer.
    pub const NULL: UserAddr = UserAddr(0);

    /// Whether this is the null pointer.
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// `self + bytes`, or None on overflow.
    pub fn checked_add(self, bytes: u64) -> Option<UserAddr> {
        self.0.checked_add(bytes).map(UserAddr)
    }

    /// `self + bytes` modulo 2^64, for addresses that are judged afterwards.
    #[must_use]
    pub const fn wrapping_add(self, bytes: u64) -> UserAddr {
        UserAddr(self.0.wrapping_add(bytes))
    }

    /// The start of the page that holds this address.
    #[must_use]
    pub const fn page_floor(self) -> UserAddr {
        UserAddr(self.0 & !(PAGE_SIZE - 1))
    }

    /// The next page boundary at or above, or None past the end of the address space.
    pub fn page_ceil(self) -> Option<UserAddr> {
        self.0.checked_add(PAGE_SIZE - 1).map(|a| UserAddr(a & !(PAGE_SIZE - 1)))
    }

    /// Offset in the page, 0..4096.
    pub const fn page_offset(self) -> u64 {
        self.0 & (PAGE_SIZE - 1)
    }

    /// Whether `self..self+len` lies below TASK_SIZE.
    pub fn range_ok(self, len: u64) -> bool {
        self.0.checked_add(len).is_some_and(|end| end <= TASK_SIZE)
    }
}

impl fmt::Debug for UserAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::LowerHex for UserAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}

/// A guest's claim that a `T` lies at an address.
pub struct UserPtr<T> {
    /// Where.
    pub addr: UserAddr,
    marker: PhantomData<fn() -> T>,
}

impl<T> Clone for UserPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for UserPtr<T> {}

impl<T> UserPtr<T> {
    /// The claim that a `T` lies at `addr`.
    pub const fn new(addr: UserAddr) -> Self {
        UserPtr { addr, marker: PhantomData }
    }

    /// Whether the pointer is null.
    pub const fn is_null(self) -> bool {
        self.addr.is_null()
    }

    /// The pointer to the element `index` places further on, modulo 2^64.
    #[must_use]
    pub const fn offset(self, index: u64) -> Self {
        Self::new(self.addr.wrapping_add(index.wrapping_mul(size_of::<T>() as u64)))
    }

    /// The same address seen as another type.
    pub const fn cast<U>(self) -> UserPtr<U> {
        UserPtr::new(self.addr)
    }
}

impl<T> fmt::Debug for UserPtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.addr.fmt(f)
    }
}

/// A guest's claim that `len` values of type `T` lie at an address.
pub struct UserSlice<T> {
    /// The first element.
    pub ptr: UserPtr<T>,
    /// Number of elements.
    pub len: u64,
}

impl<T> Clone for UserSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for UserSlice<T> {}

impl<T> UserSlice<T> {
    /// `len` elements at `ptr`.
    pub const fn new(ptr: UserPtr<T>, len: u64) -> Self {
        UserSlice { ptr, len }
    }
}
