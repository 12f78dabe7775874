//! The initial stack: strings, vectors and auxiliary vector as the System V ABI and Linux lay them out.
use std::sync::Arc;

use guest_abi::UserAddr;
use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};
use linux_raw_sys::auxvec;

use crate::mm::{AddressSpace, MapFlags, MapRequest, MapSource, Prot};
use crate::{Errno, Result};

/// Most bytes in one string, its NUL included (MAX_ARG_STRLEN).
const MAX_STRING: usize = 32 * 4096;
/// However large the stack limit, strings take no more (three quarters of _STK_LIM); however small, they may take ARG_MAX.
const MOST: u64 = 6 << 20;
const LEAST: u64 = 128 << 10;
/// Stack below the vectors that is there from the start.
const HEADROOM: u64 = 128 << 10;

/// What AT_PLATFORM points to.
const PLATFORM: &[u8] = b"x86_64\0";

/// Bytes that strings and vectors take at most. E2BIG where they exceed a quarter of the stack limit (execve(2)).
pub(super) fn check_sizes(argv: &[Vec<u8>], envp: &[Vec<u8>], path: &[u8], stack_limit: u64) -> Result<u64> {
    let mut strings = path.len() as u64 + 1;
    for s in argv.iter().chain(envp) {
        if s.len() >= MAX_STRING {
            return Err(Errno::E2BIG);
        }
        strings += s.len() as u64 + 1;
    }
    let pointers = (argv.len().max(1) + envp.len()) as u64 * 8;
    let limit = (stack_limit / 4).clamp(LEAST, MOST);
    if strings.checked_add(pointers).is_none_or(|sum| sum > limit) {
        return Err(Errno::E2BIG);
    }
    // Alignment, random offset, auxiliary vector.
    Ok(strings + pointers + 3 * PAGE_SIZE + 1024)
}

/// The strings to be laid out.
pub(super) struct Strings<'a> {
    pub argv: &'a [Vec<u8>],
    pub envp: &'a [Vec<u8>],
    pub path: &'a [u8],
    /// AT_RANDOM.
    pub random: [u8; 16],
}

/// Where everything came to lie.
pub(super) struct Laid {
    pub pointer: u64,
    pub args: (u64, u64),
    pub env: (u64, u64),
    /// As in memory, AT_NULL included.
    pub auxv: Vec<u64>,
}

/// The mapping of the stack.
pub(super) struct Stack {
    top: u64,
}

impl Stack {
    /// Maps room for `budget` bytes and some to grow into, at a random place under the top of the address space.
    pub(super) fn map(
        space: &Arc<AddressSpace>,
        budget: u64,
        executable: bool,
        limit: u64,
        random: &impl Fn(u32) -> u64,
    ) -> Result<Stack> {
        let top = TASK_SIZE - PAGE_SIZE - random(22) * PAGE_SIZE;
        let len = (budget + HEADROOM).min((limit & !(PAGE_SIZE - 1)).max(budget)).next_multiple_of(PAGE_SIZE);
        let mut prot = Prot::READ | Prot::WRITE;
        prot.set(Prot::EXEC, executable);
        space.map(MapRequest {
            addr: UserAddr(top - len),
            len,
            prot,
            flags: MapFlags::FIXED | MapFlags::GROWSDOWN | MapFlags::STACK,
            source: MapSource::Anonymous,
        })?;
        Ok(Stack { top })
    }

    /// Writes everything.
    pub(super) fn fill(
        &self,
        space: &Arc<AddressSpace>,
        strings: &Strings<'_>,
        mut auxv: Vec<(u32, u64)>,
        random: &impl Fn(u32) -> u64,
    ) -> Result<Laid> {
        let mut text = Vec::new();
        let mut offsets = Vec::new();
        for s in strings.argv.iter().map(Vec::as_slice).chain(strings.envp.iter().map(Vec::as_slice)) {
            offsets.push(text.len() as u64);
            text.extend_from_slice(s);
            text.push(0);
        }
        let path_offset = text.len() as u64;
        text.extend_from_slice(strings.path);
        // The path's NUL, and the null word that ends the stack.
        text.extend_from_slice(&[0; 9]);
        let base = self.top - text.len() as u64;
        space.write_bytes(UserAddr(base), &text)?;

        let aligned = (base - random(13)) & !15;
        let platform = aligned - PLATFORM.len() as u64;
        let seed = platform - 16;
        space.write_bytes(UserAddr(platform), PLATFORM)?;
        space.write_bytes(UserAddr(seed), &strings.random)?;
        auxv.extend([
            (auxvec::AT_RANDOM, seed),
            (auxvec::AT_EXECFN, base + path_offset),
            (auxvec::AT_PLATFORM, platform),
            (auxvec::AT_NULL, 0),
        ]);
        let auxv: Vec<u64> = auxv.into_iter().flat_map(|(kind, value)| [u64::from(kind), value]).collect();

        let argc = strings.argv.len();
        let mut words = vec![argc as u64];
        words.extend(offsets.iter().take(argc).map(|o| base + o));
        words.push(0);
        words.extend(offsets.iter().skip(argc).map(|o| base + o));
        words.push(0);
        words.extend(&auxv);
        let pointer = (seed - words.len() as u64 * 8) & !15;
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        space.write_bytes(UserAddr(pointer), &bytes)?;
        let env_start = base + offsets.get(argc).copied().unwrap_or(path_offset);
        Ok(Laid { pointer, args: (base, env_start), env: (env_start, base + path_offset), auxv })
    }
}
