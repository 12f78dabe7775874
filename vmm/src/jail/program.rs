//! The seccomp program of an allow-list (seccomp(2)): a tree of comparisons on the call's number, and on the arguments where the list says so.
//! Owns how a list becomes a program; never what is on it.
//!
//! The kernel runs the program for every number when it is put in force, and again at every call that is judged by its arguments, among
//! them the `ioctl` that enters the guest: a chain over all numbers would cost 0.5 ms at a start and its length at each entry.
use std::collections::BTreeMap;

use seccompiler::sock_filter;

/// One condition on the low 32 bits of an argument: masked, they are the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Test {
    argument: u8,
    mask: u32,
    value: u32,
}

impl Test {
    /// The argument is `value`.
    pub fn equal(argument: u8, value: u32) -> Test {
        Test { argument, mask: u32::MAX, value }
    }

    /// The argument's bits in `mask` are `value`.
    pub fn masked(argument: u8, mask: u32, value: u32) -> Test {
        Test { argument, mask, value }
    }
}

/// What calls may be made: for each number the alternatives, each a list of conditions that all hold. No alternatives: always.
pub type List = BTreeMap<u32, Vec<Vec<Test>>>;

/// SECCOMP_RET_ALLOW.
pub const ALLOW: u32 = 0x7fff_0000;
/// SECCOMP_RET_KILL_PROCESS.
pub const KILL: u32 = 0x8000_0000;
/// SECCOMP_RET_TRAP.
pub const TRAP: u32 = 0x0003_0000;
/// AUDIT_ARCH_X86_64.
const ARCH: u32 = 0xc000_003e;

/// BPF_LD | BPF_W | BPF_ABS.
const LOAD: u16 = 0x20;
/// BPF_ALU | BPF_AND | BPF_K.
const AND: u16 = 0x54;
/// BPF_JMP | BPF_JA.
const JUMP: u16 = 0x05;
/// BPF_JMP | BPF_JEQ | BPF_K.
const IF_EQUAL: u16 = 0x15;
/// BPF_JMP | BPF_JGE | BPF_K.
const IF_NOT_BELOW: u16 = 0x35;
/// BPF_RET | BPF_K.
const RETURN: u16 = 0x06;

/// Offsets in struct seccomp_data.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

fn step(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

fn branch(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// Goes over `skipped` if the accumulator is not below `k`, and else on with it.
fn unless_below(k: u32, skipped: &[sock_filter]) -> Vec<sock_filter> {
    match u8::try_from(skipped.len()) {
        Ok(n) => vec![branch(IF_NOT_BELOW, k, n, 0)],
        Err(_) => vec![branch(IF_NOT_BELOW, k, 0, 1), step(JUMP, skipped.len() as u32)],
    }
}

/// Judges the arguments.
fn alternatives(rules: &[Vec<Test>], refused: u32) -> Vec<sock_filter> {
    let mut program = Vec::new();
    let mut loaded = None;
    for rule in rules {
        let mut body = Vec::new();
        for test in rule {
            let wanted = Some((test.argument, test.mask));
            if loaded != wanted {
                body.push(step(LOAD, ARGUMENTS + 8 * u32::from(test.argument)));
                if test.mask != u32::MAX {
                    body.push(step(AND, test.mask));
                }
            }
            loaded = wanted;
            body.push(branch(IF_EQUAL, test.value, 0, u8::MAX));
        }
        body.push(step(RETURN, ALLOW));
        // Where a condition fails, the next alternative begins. A rule has at most six conditions.
        let end = body.len();
        for (at, s) in body.iter_mut().enumerate().filter(|(_, s)| s.code == IF_EQUAL) {
            s.jf = u8::try_from(end - at - 1).unwrap_or(u8::MAX);
        }
        if rule.len() > 1 {
            // A failed condition before the last leaves another argument loaded.
            loaded = None;
        }
        program.append(&mut body);
    }
    program.push(step(RETURN, refused));
    program
}

/// A run of numbers that are treated alike.
enum Verdict<'a> {
    Always,
    Never,
    Sometimes(&'a [Vec<Test>]),
}

fn tree(runs: &[(u32, Verdict<'_>)], refused: u32) -> Vec<sock_filter> {
    match runs {
        [] | [(_, Verdict::Never)] => vec![step(RETURN, refused)],
        [(_, Verdict::Always)] => vec![step(RETURN, ALLOW)],
        [(_, Verdict::Sometimes(rules))] => alternatives(rules, refused),
        _ => {
            let (low, high) = runs.split_at(runs.len() / 2);
            let first = high.first().map_or(0, |(start, _)| *start);
            let mut below = tree(low, refused);
            let mut program = unless_below(first, &below);
            program.append(&mut below);
            program.append(&mut tree(high, refused));
            program
        }
    }
}

/// The program that allows what is on the list and answers everything else with `refused`. Calls of another architecture, and those of
/// the x32 ABI, whose numbers are beyond all others, are refused: the former always by the end of the process.
pub fn assemble(list: &List, refused: u32) -> Vec<sock_filter> {
    let mut runs = vec![(0, Verdict::Never)];
    for (&number, rules) in list {
        let verdict = if rules.is_empty() { Verdict::Always } else { Verdict::Sometimes(rules) };
        match (runs.last_mut(), &verdict) {
            // The run goes on; `Never` after it is replaced.
            (Some(last), _) if last.0 == number => *last = (number, verdict),
            _ => runs.push((number, verdict)),
        }
        if let [.., (_, Verdict::Always), (_, Verdict::Always)] = runs.as_slice() {
            runs.pop();
        }
        runs.push((number + 1, Verdict::Never));
    }
    let mut program =
        vec![step(LOAD, ARCHITECTURE), branch(IF_EQUAL, ARCH, 1, 0), step(RETURN, KILL), step(LOAD, NUMBER)];
    program.append(&mut tree(&runs, refused));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel does with a program; also the number of steps.
    fn run(program: &[sock_filter], arch: u32, number: u32, arguments: [u64; 6]) -> (u32, usize) {
        let (mut at, mut a, mut steps) = (0, 0u32, 0);
        loop {
            let s = &program[at];
            at += 1;
            steps += 1;
            match s.code {
                LOAD if s.k == NUMBER => a = number,
                LOAD if s.k == ARCHITECTURE => a = arch,
                LOAD => a = arguments[((s.k - ARGUMENTS) / 8) as usize] as u32,
                AND => a &= s.k,
                JUMP => at += s.k as usize,
                IF_EQUAL => at += usize::from(if a == s.k { s.jt } else { s.jf }),
                IF_NOT_BELOW => at += usize::from(if a >= s.k { s.jt } else { s.jf }),
                RETURN => return (s.k, steps),
                code => panic!("step {code:#x}"),
            }
        }
    }

    fn allowed(list: &List, number: u32, arguments: [u64; 6]) -> bool {
        list.get(&number).is_some_and(|rules| {
            let holds = |t: &Test| arguments[usize::from(t.argument)] as u32 & t.mask == t.value;
            rules.is_empty() || rules.iter().any(|rule| rule.iter().all(holds))
        })
    }

    #[test]
    fn says_what_the_list_says() {
        let mut list = List::new();
        for n in [0, 1, 2, 3, 17, 18, 20, 300, 452] {
            list.insert(n, Vec::new());
        }
        for n in 30..200 {
            list.insert(n * 2, Vec::new());
        }
        list.insert(16, (0..60).map(|v| vec![Test::equal(1, v * 3)]).collect());
        list.insert(9, vec![vec![Test::masked(2, 4, 0)]]);
        list.insert(
            19,
            vec![vec![Test::equal(1, 1), Test::equal(2, 17)], vec![Test::equal(1, 2)], vec![Test::equal(2, 5)]],
        );
        list.insert(453, vec![vec![Test::masked(2, 0xf000, 0x1000)], vec![Test::masked(2, 0xf000, 0xc000)]]);
        let program = assemble(&list, TRAP);
        assert!(program.len() < 4096);
        for number in (0..520).chain([0x4000_0000, 0x4000_0001, u32::MAX]) {
            for value in (0..200).chain([0x1000, 0x11ff, 0xc000, 1 << 32, 7 << 32 | 3, u64::MAX]) {
                for arguments in [[value; 6], [0, 1, value, 0, 0, 0], [0, value, 5, 0, 0, 0], [0, 2, value, 0, 0, 0]] {
                    let wanted = if allowed(&list, number, arguments) { ALLOW } else { TRAP };
                    let (got, steps) = run(&program, ARCH, number, arguments);
                    assert_eq!(got, wanted, "call {number} with {arguments:x?}");
                    assert!(steps < 90);
                }
            }
        }
        assert_eq!(run(&program, 0x4000_0003, 0, [0; 6]).0, KILL);
        assert_eq!(run(&assemble(&List::new(), KILL), ARCH, 0, [0; 6]).0, KILL);
    }
}
