//! Classic BPF as seccomp(2) takes it: which programs are accepted, and running one. Owns nothing of what an answer means.
//!
//! Jumps only go forward, so that a program ends after as many steps as it has instructions.
use crate::{Errno, Result};

/// Most instructions of one program (BPF_MAXINSNS).
pub const MAX_INSTRUCTIONS: usize = 4096;
/// Bytes of struct seccomp_data.
pub const DATA_LEN: usize = 64;
/// Words of scratch memory.
const MEMORY: usize = 16;

// Instruction classes, sizes and modes of <linux/bpf_common.h>.
const LD: u16 = 0;
const LDX: u16 = 1;
const ST: u16 = 2;
const STX: u16 = 3;
const ALU: u16 = 4;
const JMP: u16 = 5;
const RET: u16 = 6;
const MISC: u16 = 7;
const IMM: u16 = 0;
const ABS: u16 = 0x20;
const MEM: u16 = 0x60;
const LEN: u16 = 0x80;
const X: u16 = 8;
const A: u16 = 0x10;
const TXA: u16 = 0x80;

const ADD: u16 = 0;
const SUB: u16 = 0x10;
const MUL: u16 = 0x20;
const DIV: u16 = 0x30;
const OR: u16 = 0x40;
const AND: u16 = 0x50;
const LSH: u16 = 0x60;
const RSH: u16 = 0x70;
const NEG: u16 = 0x80;
const XOR: u16 = 0xa0;

const JA: u16 = 0;
const JEQ: u16 = 0x10;
const JGT: u16 = 0x20;
const JGE: u16 = 0x30;
const JSET: u16 = 0x40;

/// One instruction (struct sock_filter).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions skipped if a condition holds, and if not.
    pub jt: u8,
    #[allow(missing_docs)]
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

impl Instruction {
    /// From the eight bytes of struct sock_filter.
    pub fn from_bytes(b: [u8; 8]) -> Instruction {
        Instruction {
            code: u16::from_le_bytes([b[0], b[1]]),
            jt: b[2],
            jf: b[3],
            k: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
        }
    }
}

/// A program that has been checked.
#[derive(Debug)]
pub struct Program(Vec<Instruction>);

impl Program {
    /// EINVAL for what seccomp(2) does not accept: unknown instructions, jumps out of the program, a last instruction that does not
    /// return, loads beyond the data, scratch memory that is read before it is written.
    pub fn new(code: Vec<Instruction>) -> Result<Program> {
        if code.is_empty() || code.len() > MAX_INSTRUCTIONS || code.last().is_none_or(|i| i.code & 7 != RET) {
            return Err(Errno::EINVAL);
        }
        // For each instruction the scratch words that are written on every way to it.
        let mut written = vec![u16::MAX; code.len()];
        let mut now = 0u16;
        for (at, i) in code.iter().enumerate() {
            let left = code.len() - at - 1;
            now &= written.get(at).copied().unwrap_or(0);
            let word = || u16::try_from(i.k).ok().filter(|&k| usize::from(k) < MEMORY).map(|k| 1u16 << k);
            let mut reach = |skip: usize| {
                let slot = written.get_mut(at + 1 + skip).filter(|_| skip < left).ok_or(Errno::EINVAL)?;
                *slot &= now;
                Ok::<(), Errno>(())
            };
            match i.code {
                c if c == LD | ABS && i.k.is_multiple_of(4) && (i.k as usize) < DATA_LEN => {}
                0 | 0x80 | 1 | 0x81 => {}
                c if c == LD | MEM || c == LDX | MEM => {
                    if now & word().ok_or(Errno::EINVAL)? == 0 {
                        return Err(Errno::EINVAL);
                    }
                }
                ST | STX => now |= word().ok_or(Errno::EINVAL)?,
                c if c & 7 == ALU => check_arithmetic(c & !7, i.k)?,
                c if c == JMP | JA => {
                    reach(usize::try_from(i.k).unwrap_or(usize::MAX).min(code.len()))?;
                    now = u16::MAX;
                }
                c if c & 7 == JMP && matches!(c & 0xf0, JEQ | JGT | JGE | JSET) && c & !0xff == 0 => {
                    reach(i.jt.into())?;
                    reach(i.jf.into())?;
                    now = u16::MAX;
                }
                c if c == RET || c == RET | A => {}
                c if c == MISC || c == MISC | TXA => {}
                _ => return Err(Errno::EINVAL),
            }
        }
        Ok(Program(code))
    }

    /// Instructions.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none; a checked program has some.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The program's answer to `data`. Division by zero answers 0.
    pub fn run(&self, data: &[u8; DATA_LEN]) -> u32 {
        let (mut a, mut x) = (0u32, 0u32);
        let mut memory = [0u32; MEMORY];
        let mut at = 0usize;
        while let Some(i) = self.0.get(at) {
            at += 1;
            let index = usize::try_from(i.k).unwrap_or(usize::MAX);
            let operand = if i.code & X != 0 { x } else { i.k };
            match i.code & 7 {
                LD | LDX => {
                    let value = match i.code & 0xe0 {
                        IMM => i.k,
                        ABS => load(data, index),
                        LEN => DATA_LEN as u32,
                        _ => memory.get(index).copied().unwrap_or(0),
                    };
                    *if i.code & 7 == LD { &mut a } else { &mut x } = value;
                }
                class @ (ST | STX) => {
                    if let Some(slot) = memory.get_mut(index) {
                        *slot = if class == ST { a } else { x };
                    }
                }
                ALU => match arithmetic(i.code & 0xf0, a, operand) {
                    Some(value) => a = value,
                    None => return 0,
                },
                JMP if i.code & 0xf0 == JA => at = at.saturating_add(index),
                JMP => at += usize::from(if holds(i.code & 0xf0, a, operand) { i.jt } else { i.jf }),
                RET => return if i.code & A != 0 { a } else { i.k },
                _ if i.code & TXA != 0 => a = x,
                _ => x = a,
            }
        }
        0
    }
}

fn check_arithmetic(code: u16, k: u32) -> Result<()> {
    let ok = match code {
        NEG => true,
        DIV => k != 0,
        LSH | RSH => k < 32,
        ADD | SUB | MUL | OR | AND | XOR => true,
        c if c & X != 0 => matches!(c & !X, ADD | SUB | MUL | DIV | OR | AND | XOR | LSH | RSH),
        _ => false,
    };
    if ok { Ok(()) } else { Err(Errno::EINVAL) }
}

fn arithmetic(operation: u16, a: u32, b: u32) -> Option<u32> {
    Some(match operation {
        ADD => a.wrapping_add(b),
        SUB => a.wrapping_sub(b),
        MUL => a.wrapping_mul(b),
        DIV => a.checked_div(b)?,
        OR => a | b,
        AND => a & b,
        LSH => a.wrapping_shl(b),
        RSH => a.wrapping_shr(b),
        NEG => a.wrapping_neg(),
        _ => a ^ b,
    })
}

fn holds(condition: u16, a: u32, b: u32) -> bool {
    match condition {
        JEQ => a == b,
        JGT => a > b,
        JGE => a >= b,
        _ => a & b != 0,
    }
}

fn load(data: &[u8; DATA_LEN], at: usize) -> u32 {
    data.get(at..at.saturating_add(4)).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
        Instruction { code, jt, jf, k }
    }

    #[test]
    fn runs() {
        let mut data = [0; DATA_LEN];
        data[0] = 39;
        // getpid → 7, others → 9.
        let p =
            Program::new(vec![op(0x20, 0, 0, 0), op(0x15, 0, 1, 39), op(0x06, 0, 0, 7), op(0x06, 0, 0, 9)]).unwrap();
        assert_eq!(p.run(&data), 7);
        data[0] = 40;
        assert_eq!(p.run(&data), 9);
        // ((5 + 3) << 2) / X with X from memory.
        let p = Program::new(vec![
            op(0x00, 0, 0, 5),
            op(0x04, 0, 0, 3),
            op(0x02, 0, 0, 1),
            op(0x61, 0, 0, 1),
            op(0x64, 0, 0, 2),
            op(0x3c, 0, 0, 0),
            op(0x16, 0, 0, 0),
        ])
        .unwrap();
        assert_eq!(p.run(&data), 4);
        let p = Program::new(vec![op(0x01, 0, 0, 0), op(0x3c, 0, 0, 0), op(0x06, 0, 0, 1)]).unwrap();
        assert_eq!(p.run(&data), 0, "division by zero");
    }

    #[test]
    fn checks() {
        let bad = |code| assert!(Program::new(code).is_err());
        bad(vec![]);
        bad(vec![op(0x20, 0, 0, 0)]);
        bad(vec![op(0x20, 0, 0, 64), op(6, 0, 0, 0)]);
        bad(vec![op(0x20, 0, 0, 2), op(6, 0, 0, 0)]);
        bad(vec![op(0x15, 1, 0, 0), op(6, 0, 0, 0)]);
        bad(vec![op(0x05, 0, 0, u32::MAX), op(6, 0, 0, 0)]);
        bad(vec![op(0x60, 0, 0, 0), op(6, 0, 0, 0)]);
        bad(vec![op(0x34, 0, 0, 0), op(6, 0, 0, 0)]);
        bad(vec![op(0x64, 0, 0, 32), op(6, 0, 0, 0)]);
        bad(vec![op(0x94, 0, 0, 1), op(6, 0, 0, 0)]); // modulo
        bad(vec![op(0x28, 0, 0, 0), op(6, 0, 0, 0)]); // half words
        // Written on one way only.
        bad(vec![op(0x15, 0, 1, 0), op(0x02, 0, 0, 3), op(0x60, 0, 0, 3), op(6, 0, 0, 0)]);
        assert!(
            Program::new(vec![
                op(0x02, 0, 0, 3),
                op(0x15, 0, 1, 0),
                op(0x04, 0, 0, 3),
                op(0x60, 0, 0, 3),
                op(0x16, 0, 0, 0)
            ])
            .is_ok()
        );
    }
}
