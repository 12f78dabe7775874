//! The little decoding that makes KVMs agree: `int n`, and port instructions of the program.

/// Bytes of the longest instruction.
pub const MAX_LEN: usize = 15;

/// How many legacy and REX prefixes the bytes begin with.
fn prefixes(code: &[u8]) -> usize {
    code.iter()
        .take_while(|b| matches!(b, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3 | 0x40..=0x4f))
        .count()
}

/// The vector of an `int n` at the start of `code`. A locked one is #UD on hardware too.
pub fn software_interrupt(code: &[u8]) -> Option<u8> {
    let n = prefixes(code);
    if code[..n].contains(&0xf0) {
        return None;
    }
    match code.get(n..)? {
        [0xcd, vector, ..] => Some(*vector),
        _ => None,
    }
}

/// The bytes before a port instruction's end, newest last: how long the instruction is, prefixes excluded.
pub fn port_instruction_len(before: &[u8]) -> u64 {
    match before {
        [.., 0xe4..=0xe7, _] => 2,
        [.., 0xec..=0xef | 0x6c..=0x6f] => 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_software_interrupts() {
        assert_eq!(software_interrupt(&[0xcd, 0x80]), Some(0x80));
        assert_eq!(software_interrupt(&[0x66, 0x48, 0xcd, 1, 0]), Some(1));
        assert_eq!(software_interrupt(&[0xf0, 0xcd, 1]), None);
        assert_eq!(software_interrupt(&[0xcd]), None);
        assert_eq!(software_interrupt(&[]), None);
        assert_eq!(software_interrupt(&[0x0f, 0x0b]), None);
    }
}
