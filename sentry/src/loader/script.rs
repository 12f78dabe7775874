//! `#!` scripts (execve(2), "Interpreter scripts").
use crate::{Errno, Result};

/// Bytes of the first line that count.
pub(super) const LINE: usize = 256;

/// What the first line asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Interpreter {
    pub path: Vec<u8>,
    /// Everything after the path, as one argument.
    pub argument: Option<Vec<u8>>,
}

fn is_blank(b: u8) -> bool {
    b == b' ' || b == b'\t'
}

/// The interpreter of a file that begins with `head`; None if it is no script. ENOEXEC where the line names none or is cut
/// in the path.
pub(super) fn parse(head: &[u8; LINE]) -> Result<Option<Interpreter>> {
    let Some(rest) = head.strip_prefix(b"#!") else { return Ok(None) };
    let ends_line = |b: &u8| *b == b'\n' || *b == 0;
    let line = if let Some(end) = rest.iter().position(ends_line) {
        rest.split_at(end).0
    } else {
        // Cut by the buffer (whose last byte does not count): good enough if the path itself is whole.
        let line = rest.split_last().map_or(rest, |(_, line)| line);
        let path = line.iter().position(|&b| !is_blank(b)).and_then(|at| line.get(at..)).ok_or(Errno::ENOEXEC)?;
        if !path.iter().any(|&b| is_blank(b)) {
            return Err(Errno::ENOEXEC);
        }
        line
    };
    let line = line.trim_ascii_end_blank();
    let line = line.trim_ascii_start_blank();
    if line.is_empty() {
        return Err(Errno::ENOEXEC);
    }
    let (path, argument) = match line.iter().position(|&b| is_blank(b)) {
        Some(at) => {
            let (path, rest) = line.split_at(at);
            (path, rest.trim_ascii_start_blank())
        }
        None => (line, &[][..]),
    };
    let argument = (!argument.is_empty()).then(|| argument.to_vec());
    Ok(Some(Interpreter { path: path.to_vec(), argument }))
}

trait TrimBlanks {
    fn trim_ascii_start_blank(&self) -> &Self;
    fn trim_ascii_end_blank(&self) -> &Self;
}

impl TrimBlanks for [u8] {
    fn trim_ascii_start_blank(&self) -> &[u8] {
        let mut rest = self;
        while let Some((first, tail)) = rest.split_first() {
            if !is_blank(*first) {
                break;
            }
            rest = tail;
        }
        rest
    }

    fn trim_ascii_end_blank(&self) -> &[u8] {
        let mut rest = self;
        while let Some((last, head)) = rest.split_last() {
            if !is_blank(*last) {
                break;
            }
            rest = head;
        }
        rest
    }
}

/// The arguments of the interpreter: its path, its argument, the script, and the script's own from the second on.
pub(super) fn rewrite(argv: &mut Vec<Vec<u8>>, interpreter: &Interpreter, script: Vec<u8>) {
    let mut new = vec![interpreter.path.clone()];
    new.extend(interpreter.argument.clone());
    new.push(script);
    let take = argv.len().min(1);
    argv.splice(..take, new);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &[u8]) -> [u8; LINE] {
        let mut head = [0; LINE];
        head[..text.len().min(LINE)].copy_from_slice(&text[..text.len().min(LINE)]);
        head
    }

    #[test]
    fn lines_as_linux_reads_them() {
        let ok = |text: &[u8], path: &[u8], argument: Option<&[u8]>| {
            let want = Interpreter { path: path.to_vec(), argument: argument.map(<[u8]>::to_vec) };
            assert_eq!(parse(&head(text)), Ok(Some(want)));
        };
        ok(b"#!/bin/sh\nexit", b"/bin/sh", None);
        ok(b"#! \t/bin/sh", b"/bin/sh", None);
        ok(b"#!/usr/bin/env  python3 -u \t\n", b"/usr/bin/env", Some(b"python3 -u"));
        assert_eq!(parse(&head(b"\x7fELF")), Ok(None));
        assert_eq!(parse(&head(b"#!\n")), Err(Errno::ENOEXEC));
        assert_eq!(parse(&head(&[b"#!/".to_vec(), vec![b'x'; 300]].concat())), Err(Errno::ENOEXEC));
    }

    #[test]
    fn arguments_are_put_before_the_script() {
        let mut argv = vec![b"s".to_vec(), b"1".to_vec()];
        rewrite(&mut argv, &Interpreter { path: b"/i".to_vec(), argument: Some(b"-x y".to_vec()) }, b"./s".to_vec());
        assert_eq!(argv, [b"/i".to_vec(), b"-x y".to_vec(), b"./s".to_vec(), b"1".to_vec()]);
    }
}
