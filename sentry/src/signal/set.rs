//! Signal numbers and sets. Owns their names and classes; never a queue.
use core::fmt;
use core::ops::{BitAnd, BitAndAssign, BitOr, BitOrAssign, Not};

/// A signal number, 1..=64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Signal(u8);

macro_rules! signals {
    ($($name:ident = $n:expr),* $(,)?) => {
        #[allow(missing_docs)]
        impl Signal {
            $(pub const $name: Signal = Signal($n);)*

            /// The symbolic name; real-time signals are `SIGRT`.
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $($n => stringify!($name),)*
                    _ => "SIGRT",
                }
            }
        }
    };
}

signals! {
    SIGHUP = 1, SIGINT = 2, SIGQUIT = 3, SIGILL = 4, SIGTRAP = 5, SIGABRT = 6, SIGBUS = 7, SIGFPE = 8, SIGKILL = 9,
    SIGUSR1 = 10, SIGSEGV = 11, SIGUSR2 = 12, SIGPIPE = 13, SIGALRM = 14, SIGTERM = 15, SIGSTKFLT = 16, SIGCHLD = 17,
    SIGCONT = 18, SIGSTOP = 19, SIGTSTP = 20, SIGTTIN = 21, SIGTTOU = 22, SIGURG = 23, SIGXCPU = 24, SIGXFSZ = 25,
    SIGVTALRM = 26, SIGPROF = 27, SIGWINCH = 28, SIGIO = 29, SIGPWR = 30, SIGSYS = 31,
}

/// What happens when a signal's action is SIG_DFL (signal(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultAction {
    /// The group dies.
    Terminate,
    /// The group dies and the wait status says that it dumped core.
    Core,
    /// Nothing.
    Ignore,
    /// The group stops.
    Stop,
    /// The group continues (at generation); nothing at delivery.
    Continue,
}

impl Signal {
    /// The first real-time signal.
    pub const RT_MIN: u8 = 32;
    /// The largest number.
    pub const MAX: u8 = 64;

    /// From a number; None outside 1..=64.
    pub fn new(n: i32) -> Option<Signal> {
        u8::try_from(n).ok().filter(|n| (1..=Self::MAX).contains(n)).map(Signal)
    }

    /// The number.
    pub const fn number(self) -> i32 {
        self.0 as i32
    }

    /// Place in a table of 64, 0..=63.
    pub const fn index(self) -> usize {
        (self.0 - 1) as usize
    }

    /// Whether it is queued rather than only marked.
    pub const fn is_realtime(self) -> bool {
        self.0 >= Self::RT_MIN
    }

    /// SIGKILL and SIGSTOP.
    pub const fn is_kernel_only(self) -> bool {
        matches!(self, Signal::SIGKILL | Signal::SIGSTOP)
    }

    /// What SIG_DFL means.
    pub const fn default_action(self) -> DefaultAction {
        match self {
            Signal::SIGQUIT
            | Signal::SIGILL
            | Signal::SIGTRAP
            | Signal::SIGABRT
            | Signal::SIGBUS
            | Signal::SIGFPE
            | Signal::SIGSEGV
            | Signal::SIGXCPU
            | Signal::SIGXFSZ
            | Signal::SIGSYS => DefaultAction::Core,
            Signal::SIGCHLD | Signal::SIGURG | Signal::SIGWINCH => DefaultAction::Ignore,
            Signal::SIGCONT => DefaultAction::Continue,
            Signal::SIGSTOP | Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU => DefaultAction::Stop,
            _ => DefaultAction::Terminate,
        }
    }
}

impl fmt::Debug for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_realtime() { write!(f, "SIGRT_{}", self.0 - Self::RT_MIN) } else { f.write_str(self.name()) }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A set of signals; bit n-1 is signal n, as in the kernel's sigset_t.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct SigSet(pub u64);

impl SigSet {
    /// No signal.
    pub const EMPTY: SigSet = SigSet(0);
    /// All signals.
    pub const FULL: SigSet = SigSet(u64::MAX);
    /// SIGKILL and SIGSTOP, which nobody can block, catch or ignore.
    pub const KERNEL_ONLY: SigSet = SigSet::of(&[Signal::SIGKILL, Signal::SIGSTOP]);
    /// The stop signals.
    pub const STOP: SigSet = SigSet::of(&[Signal::SIGSTOP, Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU]);
    /// Signals that an instruction causes; they are delivered first.
    pub const SYNCHRONOUS: SigSet =
        SigSet::of(&[Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGILL, Signal::SIGTRAP, Signal::SIGFPE, Signal::SIGSYS]);

    /// The set of the given signals.
    pub const fn of(signals: &[Signal]) -> SigSet {
        let mut bits = 0;
        let mut i = 0;
        while i < signals.len() {
            bits |= 1 << signals[i].index();
            i += 1;
        }
        SigSet(bits)
    }

    /// Whether `signal` is a member.
    pub const fn contains(self, signal: Signal) -> bool {
        self.0 & (1 << signal.index()) != 0
    }

    /// Whether the two sets share a member.
    pub const fn intersects(self, other: SigSet) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether there is no member.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Adds a member.
    pub fn add(&mut self, signal: Signal) {
        self.0 |= 1 << signal.index();
    }

    /// Removes a member.
    pub fn remove(&mut self, signal: Signal) {
        self.0 &= !(1 << signal.index());
    }

    /// The set without the members of `other`.
    #[must_use]
    pub const fn without(self, other: SigSet) -> SigSet {
        SigSet(self.0 & !other.0)
    }

    /// The member with the lowest number.
    pub const fn first(self) -> Option<Signal> {
        if self.0 == 0 { None } else { Some(Signal(self.0.trailing_zeros() as u8 + 1)) }
    }
}

impl BitOr for SigSet {
    type Output = SigSet;
    fn bitor(self, other: SigSet) -> SigSet {
        SigSet(self.0 | other.0)
    }
}
impl BitAnd for SigSet {
    type Output = SigSet;
    fn bitand(self, other: SigSet) -> SigSet {
        SigSet(self.0 & other.0)
    }
}
impl BitOrAssign for SigSet {
    fn bitor_assign(&mut self, other: SigSet) {
        self.0 |= other.0;
    }
}
impl BitAndAssign for SigSet {
    fn bitand_assign(&mut self, other: SigSet) {
        self.0 &= other.0;
    }
}
impl Not for SigSet {
    type Output = SigSet;
    fn not(self) -> SigSet {
        SigSet(!self.0)
    }
}

impl fmt::Debug for SigSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = *self;
        let mut set = f.debug_set();
        while let Some(s) = rest.first() {
            set.entry(&s);
            rest.remove(s);
        }
        set.finish()
    }
}
