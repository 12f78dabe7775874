//! Erasing on the line being edited: ERASE, WERASE, KILL and how it shows (termios(3)).
use super::line::Line;
use super::termios::{cc, iflag, lflag};

impl Line {
    /// ERASE, WERASE or KILL was typed.
    pub(super) fn erase(&mut self, c: u8) {
        let t = self.termios;
        if self.editing.is_empty() {
            return;
        }
        let echo = t.l(lflag::ECHO);
        let kill = t.special(cc::KILL) == Some(c) && t.special(cc::ERASE) != Some(c);
        let word = t.special(cc::WERASE) == Some(c) && !kill && t.special(cc::ERASE) != Some(c);
        if kill && !(echo && t.l(lflag::ECHOK) && t.l(lflag::ECHOKE) && t.l(lflag::ECHOE)) {
            self.editing.clear();
            if echo {
                self.echo(c);
                if t.l(lflag::ECHOK) {
                    self.put_output(b'\n');
                }
            }
            return;
        }
        let mut seen_word = false;
        while let Some(&last) = self.editing.last() {
            if word {
                let is_word = last.is_ascii_alphanumeric() || last == b'_' || last >= 0x80;
                if seen_word && !is_word {
                    break;
                }
                seen_word |= is_word;
            }
            self.erase_one(echo, c, kill || word);
            if !kill && !word {
                break;
            }
        }
    }

    fn erase_one(&mut self, echo: bool, typed: u8, silent: bool) {
        let t = self.termios;
        let mut erased = self.editing.pop().unwrap_or(0);
        if t.i(iflag::IUTF8) {
            while erased & 0xc0 == 0x80 && !self.editing.is_empty() {
                erased = self.editing.pop().unwrap_or(0);
            }
        }
        if !echo {
            return;
        }
        if !silent && !t.l(lflag::ECHOE) {
            self.echo(typed);
            return;
        }
        if erased == b'\t' {
            let before = self.column;
            let after = self.column_of_line();
            for _ in after..before {
                self.put_output(8);
            }
            return;
        }
        let shown = if erased.is_ascii_control() { if t.l(lflag::ECHOCTL) { 2 } else { 0 } } else { 1 };
        for _ in 0..shown {
            for b in [8, b' ', 8] {
                self.put_output(b);
            }
        }
    }

    /// The column after what is left of the line.
    fn column_of_line(&self) -> usize {
        let t = self.termios;
        let mut column = self.line_column;
        for &b in &self.editing {
            column += match b {
                b'\t' => 8 - (column & 7),
                b if b.is_ascii_control() => {
                    if t.l(lflag::ECHOCTL) {
                        2
                    } else {
                        0
                    }
                }
                b if t.i(iflag::IUTF8) && b & 0xc0 == 0x80 => 0,
                _ => 1,
            };
        }
        column
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::tty::line::Readable;
    use crate::signal::Signal;

    fn output(line: &mut Line) -> Vec<u8> {
        line.take_output(usize::MAX)
    }

    #[test]
    fn edits_lines_as_they_are_typed() {
        let mut line = Line::default();
        assert!(line.receive(b"abx\x7fc\r").is_empty());
        assert_eq!(output(&mut line), b"abx\x08 \x08c\r\n");
        assert_eq!(line.readable(100, 1), Readable::Bytes(4));
        assert_eq!(line.take_input(4), b"abc\n");
        assert_eq!(line.readable(100, 1), Readable::Wait);
    }

    #[test]
    fn end_of_file_gives_an_empty_read_only_at_the_start_of_a_line() {
        let mut line = Line::default();
        line.receive(b"ab\x04\x04");
        assert_eq!(line.readable(100, 1), Readable::Bytes(2));
        assert_eq!(line.take_input(2), b"ab");
        assert_eq!(line.readable(100, 1), Readable::Bytes(0));
        line.take_input(0);
        assert_eq!(line.readable(100, 1), Readable::Wait);
    }

    #[test]
    fn words_and_lines_are_erased() {
        let mut line = Line::default();
        line.receive(b"one two  \x17\n");
        assert_eq!(line.take_input(100), b"one \n");
        line.receive(b"gone\x15kept\n");
        assert_eq!(line.take_input(100), b"kept\n");
    }

    #[test]
    fn interrupt_drops_the_line_and_shows() {
        let mut line = Line::default();
        assert_eq!(line.receive(b"typed\x03"), vec![Signal::SIGINT]);
        assert_eq!(output(&mut line), b"typed^C", "what was echoed has arrived");
        assert_eq!(line.input_len(), 0);
    }
}
