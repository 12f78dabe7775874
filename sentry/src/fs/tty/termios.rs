//! struct termios and its kin (termios(3), ioctl_tty(2)). Owns their layout and initial values.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Indices of control characters.
#[allow(missing_docs)]
pub mod cc {
    pub const INTR: usize = 0;
    pub const QUIT: usize = 1;
    pub const ERASE: usize = 2;
    pub const KILL: usize = 3;
    pub const EOF: usize = 4;
    pub const TIME: usize = 5;
    pub const MIN: usize = 6;
    pub const START: usize = 8;
    pub const STOP: usize = 9;
    pub const SUSP: usize = 10;
    pub const EOL: usize = 11;
    pub const REPRINT: usize = 12;
    pub const WERASE: usize = 14;
    pub const LNEXT: usize = 15;
    pub const EOL2: usize = 16;
}

/// c_iflag.
#[allow(missing_docs)]
pub mod iflag {
    pub const PARMRK: u32 = 0o10;
    pub const ISTRIP: u32 = 0o40;
    pub const INLCR: u32 = 0o100;
    pub const IGNCR: u32 = 0o200;
    pub const ICRNL: u32 = 0o400;
    pub const IUCLC: u32 = 0o1000;
    pub const IXON: u32 = 0o2000;
    pub const IXANY: u32 = 0o4000;
    pub const IMAXBEL: u32 = 0o20000;
    pub const IUTF8: u32 = 0o40000;
}

/// c_oflag.
#[allow(missing_docs)]
pub mod oflag {
    pub const OPOST: u32 = 0o1;
    pub const OLCUC: u32 = 0o2;
    pub const ONLCR: u32 = 0o4;
    pub const OCRNL: u32 = 0o10;
    pub const ONOCR: u32 = 0o20;
    pub const ONLRET: u32 = 0o40;
    pub const XTABS: u32 = 0o14000;
}

/// c_lflag.
#[allow(missing_docs)]
pub mod lflag {
    pub const ISIG: u32 = 0o1;
    pub const ICANON: u32 = 0o2;
    pub const ECHO: u32 = 0o10;
    pub const ECHOE: u32 = 0o20;
    pub const ECHOK: u32 = 0o40;
    pub const ECHONL: u32 = 0o100;
    pub const NOFLSH: u32 = 0o200;
    pub const TOSTOP: u32 = 0o400;
    pub const ECHOCTL: u32 = 0o1000;
    pub const ECHOKE: u32 = 0o4000;
    pub const IEXTEN: u32 = 0o100000;
}

/// struct termios2 of the kernel; its first 36 bytes are struct termios.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Termios {
    pub iflag: u32,
    pub oflag: u32,
    pub cflag: u32,
    pub lflag: u32,
    pub line: u8,
    pub cc: [u8; 19],
    pub ispeed: u32,
    pub ospeed: u32,
}

/// sizeof(struct termios) of the kernel.
pub const TERMIOS_LEN: usize = 36;
/// B38400.
const B38400: u32 = 0o17;
/// CBAUD.
const CBAUD: u32 = 0o10017;
/// BOTHER: the speed stands in ospeed.
const BOTHER: u32 = 0o10000;

impl Default for Termios {
    /// What a new pseudo-terminal has (tty_std_termios).
    fn default() -> Self {
        Termios {
            iflag: iflag::ICRNL | iflag::IXON,
            oflag: oflag::OPOST | oflag::ONLCR,
            // CS8, CREAD.
            cflag: B38400 | 0o60 | 0o200,
            lflag: lflag::ISIG
                | lflag::ICANON
                | lflag::ECHO
                | lflag::ECHOE
                | lflag::ECHOK
                | lflag::ECHOCTL
                | lflag::ECHOKE
                | lflag::IEXTEN,
            line: 0,
            cc: [3, 28, 127, 21, 4, 0, 1, 0, 17, 19, 26, 0, 18, 15, 23, 22, 0, 0, 0],
            ispeed: 38400,
            ospeed: 38400,
        }
    }
}

impl Termios {
    /// Whether an input flag is set.
    pub fn i(&self, flag: u32) -> bool {
        self.iflag & flag != 0
    }

    /// Whether an output flag is set.
    pub fn o(&self, flag: u32) -> bool {
        self.oflag & flag != 0
    }

    /// Whether a local flag is set.
    pub fn l(&self, flag: u32) -> bool {
        self.lflag & flag != 0
    }

    /// A control character; None if disabled.
    pub fn special(&self, index: usize) -> Option<u8> {
        self.cc.get(index).copied().filter(|&c| c != 0)
    }

    /// A count kept among the control characters (MIN, TIME).
    pub fn count(&self, index: usize) -> u8 {
        self.cc.get(index).copied().unwrap_or(0)
    }

    /// Makes the speeds agree with c_cflag.
    pub fn settle_speed(&mut self) {
        const SPEEDS: [u32; 16] = [0, 50, 75, 110, 134, 150, 200, 300, 600, 1200, 1800, 2400, 4800, 9600, 19200, 38400];
        const HIGH: [u32; 15] = [
            57600, 115_200, 230_400, 460_800, 500_000, 576_000, 921_600, 1_000_000, 1_152_000, 1_500_000, 2_000_000,
            2_500_000, 3_000_000, 3_500_000, 4_000_000,
        ];
        let code = self.cflag & CBAUD;
        let speed = if code == BOTHER {
            self.ospeed
        } else if code & BOTHER == 0 {
            SPEEDS.get(code as usize).copied().unwrap_or(0)
        } else {
            HIGH.get((code & 0o17) as usize - 1).copied().unwrap_or(0)
        };
        self.ispeed = speed;
        self.ospeed = speed;
    }
}

/// struct winsize.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct WinSize {
    pub rows: u16,
    pub cols: u16,
    pub xpixel: u16,
    pub ypixel: u16,
}
