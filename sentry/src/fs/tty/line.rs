//! The N_TTY line discipline (termios(3)): input editing, echo, output processing, flow control. Owns the bytes between the two
//! sides of a terminal; never who reads or writes. Plain data: its owner locks it and does the waking.
use std::collections::VecDeque;

use super::termios::{Termios, cc, iflag, lflag, oflag};
use crate::signal::Signal;

/// Bytes of input or output held.
const CAPACITY: usize = 64 << 10;
/// Longest line of canonical input, its end not counted (N_TTY_BUF_SIZE - 1).
pub(super) const LINE_MAX: usize = 4095;

/// TIOCPKT status bits.
#[allow(missing_docs)]
pub mod packet {
    pub const FLUSHREAD: u8 = 1;
    pub const FLUSHWRITE: u8 = 2;
    pub const STOP: u8 = 4;
    pub const START: u8 = 8;
    pub const NOSTOP: u8 = 16;
    pub const DOSTOP: u8 = 32;
}

/// What reading may give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readable {
    /// This many bytes; 0 is an end of file typed by the user.
    Bytes(usize),
    /// Nothing yet, or fewer than MIN.
    Wait,
}

/// The state between the two sides.
#[derive(Default)]
pub struct Line {
    /// Settings.
    pub termios: Termios,
    /// Input that may be read.
    ready: VecDeque<u8>,
    /// In canonical mode: lengths of the lines in `ready`, and whether the end-of-file character ended them.
    marks: VecDeque<(usize, bool)>,
    /// The line being edited.
    pub(super) editing: Vec<u8>,
    pub(super) literal_next: bool,
    /// Processed output on its way to the other side.
    output: VecDeque<u8>,
    pub(super) column: usize,
    /// Column where the line being edited began.
    pub(super) line_column: usize,
    /// Output is stopped by the user or TCOOFF.
    pub stopped: bool,
    /// Packet-mode status to be told.
    pub packet_status: u8,
}

impl Line {
    /// Bytes that input may still bring.
    pub fn input_room(&self) -> usize {
        CAPACITY.saturating_sub(self.ready.len() + self.editing.len())
    }

    /// Bytes of output that may still be taken from a writer.
    pub fn output_room(&self) -> usize {
        if self.stopped { 0 } else { CAPACITY.saturating_sub(self.output.len()) }
    }

    /// Output that waits for the other side.
    pub fn output_len(&self) -> usize {
        self.output.len()
    }

    /// Bytes for FIONREAD.
    pub fn input_len(&self) -> usize {
        if self.termios.l(lflag::ICANON) { self.marks.iter().map(|&(len, _)| len).sum() } else { self.ready.len() }
    }

    /// Moves output to `out`, at most `max` bytes.
    pub fn take_output(&mut self, max: usize) -> Vec<u8> {
        let n = max.min(self.output.len());
        self.output.drain(..n).collect()
    }

    // Input

    /// Takes typed bytes in; gives the signals they cause.
    pub fn receive(&mut self, bytes: &[u8]) -> Vec<Signal> {
        let mut signals = Vec::new();
        for &byte in bytes {
            self.receive_byte(byte, &mut signals);
        }
        signals
    }

    fn receive_byte(&mut self, byte: u8, signals: &mut Vec<Signal>) {
        let t = self.termios;
        let mut c = byte;
        if t.i(iflag::ISTRIP) {
            c &= 0x7f;
        }
        if t.i(iflag::IUCLC) && t.l(lflag::IEXTEN) {
            c = c.to_ascii_lowercase();
        }
        if self.literal_next {
            self.literal_next = false;
            self.accept(c);
            return;
        }
        let is = |index: usize| t.special(index) == Some(c);
        if t.i(iflag::IXON) {
            if is(cc::START) {
                self.set_stopped(false);
                return;
            }
            if is(cc::STOP) {
                self.set_stopped(true);
                return;
            }
        }
        if t.l(lflag::ISIG) {
            let signal = if is(cc::INTR) {
                Some(Signal::SIGINT)
            } else if is(cc::QUIT) {
                Some(Signal::SIGQUIT)
            } else if is(cc::SUSP) {
                Some(Signal::SIGTSTP)
            } else {
                None
            };
            if let Some(signal) = signal {
                if !t.l(lflag::NOFLSH) {
                    self.flush_input();
                    self.flush_output();
                }
                if t.i(iflag::IXON) {
                    self.set_stopped(false);
                }
                if t.l(lflag::ECHO) {
                    self.echo(c);
                }
                signals.push(signal);
                return;
            }
        }
        if self.stopped && t.i(iflag::IXON) && t.i(iflag::IXANY) {
            self.set_stopped(false);
        }
        match c {
            b'\r' if t.i(iflag::IGNCR) => return,
            b'\r' if t.i(iflag::ICRNL) => c = b'\n',
            b'\n' if t.i(iflag::INLCR) => c = b'\r',
            _ => {}
        }
        if t.l(lflag::ICANON) {
            self.edit(c);
        } else {
            self.accept(c);
        }
    }

    /// Canonical mode: a character that may mean something to the editor.
    fn edit(&mut self, c: u8) {
        let t = self.termios;
        let is = |index: usize| t.special(index) == Some(c);
        let extended = t.l(lflag::IEXTEN);
        if is(cc::ERASE) || is(cc::KILL) || (is(cc::WERASE) && extended) {
            self.erase(c);
            return;
        }
        if is(cc::LNEXT) && extended {
            self.literal_next = true;
            if t.l(lflag::ECHO) && t.l(lflag::ECHOCTL) {
                self.put_output(b'^');
                self.put_output(8);
            }
            return;
        }
        if is(cc::REPRINT) && extended && t.l(lflag::ECHO) {
            self.echo(c);
            self.put_output(b'\n');
            for b in self.editing.clone() {
                self.echo(b);
            }
            return;
        }
        if c == b'\n' {
            if t.l(lflag::ECHO) || t.l(lflag::ECHONL) {
                self.put_output(b'\n');
            }
            self.end_line(Some(c));
        } else if is(cc::EOF) {
            self.end_line(None);
        } else if is(cc::EOL) || (is(cc::EOL2) && extended) {
            if t.l(lflag::ECHO) {
                self.echo(c);
            }
            self.end_line(Some(c));
        } else {
            self.accept(c);
        }
    }

    fn end_line(&mut self, end: Option<u8>) {
        self.editing.extend(end);
        let line = core::mem::take(&mut self.editing);
        self.marks.push_back((line.len(), end.is_none()));
        self.ready.extend(line);
        self.line_column = self.column;
    }

    /// A character as it is.
    fn accept(&mut self, c: u8) {
        let t = self.termios;
        let canonical = t.l(lflag::ICANON);
        let full = if canonical { self.editing.len() >= LINE_MAX } else { self.ready.len() >= CAPACITY };
        if full {
            if t.i(iflag::IMAXBEL) {
                self.put_output(7);
            }
            return;
        }
        if t.l(lflag::ECHO) {
            if canonical && self.editing.is_empty() {
                self.line_column = self.column;
            }
            if c == b'\n' {
                self.put_output(b'\n');
            } else {
                self.echo(c);
            }
        }
        let doubled = t.i(iflag::PARMRK) && c == 0xff && !t.i(iflag::ISTRIP);
        for _ in 0..if doubled { 2 } else { 1 } {
            if canonical {
                self.editing.push(c);
            } else {
                self.ready.push_back(c);
            }
        }
    }

    /// Shows a typed character: control characters as ^X with ECHOCTL.
    pub(super) fn echo(&mut self, c: u8) {
        if self.termios.l(lflag::ECHOCTL) && c.is_ascii_control() && c != b'\t' {
            self.put_output(b'^');
            self.put_output(c ^ 0x40);
        } else {
            self.put_output(c);
        }
    }

    // Output

    /// Takes program output in; gives how many bytes were taken.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0;
        for &c in bytes {
            if self.output_room() < 8 {
                break;
            }
            self.put_output(c);
            taken += 1;
        }
        taken
    }

    /// Puts one byte of output through the processing that OPOST asks for.
    pub(super) fn put_output(&mut self, c: u8) {
        if self.output.len() >= CAPACITY + 4096 {
            // Echo into an output that nobody reads is lost.
            return;
        }
        let t = self.termios;
        if !t.o(oflag::OPOST) {
            self.output.push_back(c);
            return;
        }
        match c {
            b'\n' => {
                if t.o(oflag::ONLRET) {
                    self.column = 0;
                }
                if t.o(oflag::ONLCR) {
                    self.column = 0;
                    self.output.push_back(b'\r');
                }
                self.output.push_back(b'\n');
            }
            b'\r' => {
                if t.o(oflag::ONOCR) && self.column == 0 {
                    return;
                }
                if t.o(oflag::OCRNL) {
                    if t.o(oflag::ONLRET) {
                        self.column = 0;
                    }
                    self.output.push_back(b'\n');
                    return;
                }
                self.column = 0;
                self.output.push_back(b'\r');
            }
            b'\t' => {
                let spaces = 8 - (self.column & 7);
                self.column += spaces;
                if t.oflag & oflag::XTABS == oflag::XTABS {
                    self.output.extend(core::iter::repeat_n(b' ', spaces));
                } else {
                    self.output.push_back(b'\t');
                }
            }
            8 => {
                self.column = self.column.saturating_sub(1);
                self.output.push_back(8);
            }
            _ => {
                let continues = t.i(iflag::IUTF8) && c & 0xc0 == 0x80;
                if !c.is_ascii_control() && !continues {
                    self.column = self.column.wrapping_add(1);
                }
                self.output.push_back(if t.o(oflag::OLCUC) { c.to_ascii_uppercase() } else { c });
            }
        }
    }

    // Reading

    /// What a reader of at most `max` bytes may have. `min` is the least that will do in raw mode.
    pub fn readable(&self, max: usize, min: usize) -> Readable {
        if self.termios.l(lflag::ICANON) {
            return self.marks.front().map_or(Readable::Wait, |&(len, _)| Readable::Bytes(len.min(max)));
        }
        if self.ready.is_empty() || self.ready.len() < min.min(max) {
            return Readable::Wait;
        }
        Readable::Bytes(self.ready.len().min(max))
    }

    /// Bytes that wait in raw mode.
    pub fn raw_len(&self) -> usize {
        self.ready.len()
    }

    /// Takes `n` bytes that `readable` promised.
    pub fn take_input(&mut self, n: usize) -> Vec<u8> {
        let bytes = self.ready.drain(..n.min(self.ready.len())).collect();
        if self.termios.l(lflag::ICANON)
            && let Some((first, _)) = self.marks.front_mut()
        {
            *first = first.saturating_sub(n);
            if *first == 0 {
                self.marks.pop_front();
            }
        }
        bytes
    }

    /// Replaces the settings. What was typed stays readable.
    pub fn set_termios(&mut self, new: Termios) {
        let old = core::mem::replace(&mut self.termios, new);
        let (was, is) = (old.l(lflag::ICANON), new.l(lflag::ICANON));
        if was && !is {
            // An end of file that nobody has read is a byte 0 from now on, as in Linux (__DISABLED_CHAR).
            for (len, eof) in core::mem::take(&mut self.marks) {
                let line: Vec<u8> = self.ready.drain(..len.min(self.ready.len())).collect();
                self.ready.extend(line);
                self.ready.extend(eof.then_some(0));
            }
            self.ready.extend(core::mem::take(&mut self.editing));
        } else if !was && is && !self.ready.is_empty() {
            self.marks.push_back((self.ready.len(), false));
        }
        if !new.i(iflag::IXON) && self.stopped {
            self.set_stopped(false);
        }
        let stops =
            |t: &Termios| t.i(iflag::IXON) && t.special(cc::STOP) == Some(19) && t.special(cc::START) == Some(17);
        if stops(&old) != stops(&new) {
            self.packet_status &= !(packet::DOSTOP | packet::NOSTOP);
            self.packet_status |= if stops(&new) { packet::DOSTOP } else { packet::NOSTOP };
        }
    }

    /// Stops or restarts output.
    pub fn set_stopped(&mut self, stopped: bool) {
        if self.stopped != stopped {
            self.stopped = stopped;
            self.packet_status &= !(packet::STOP | packet::START);
            self.packet_status |= if stopped { packet::STOP } else { packet::START };
        }
    }

    /// Forgets what was typed and not read (TCIFLUSH).
    pub fn flush_input(&mut self) {
        self.ready.clear();
        self.marks.clear();
        self.editing.clear();
        self.literal_next = false;
        self.packet_status |= packet::FLUSHREAD;
    }

    /// Forgets output that was not taken (TCOFLUSH). What the other side's own input queue would hold on Linux, 4095 bytes, has
    /// arrived and stays.
    pub fn flush_output(&mut self) {
        self.output.truncate(LINE_MAX);
        self.packet_status |= packet::FLUSHWRITE;
    }
}
