//! The guest's CPUs in Linux's words, for /proc/cpuinfo and /sys: what CPUID says inside the guest, decoded. Decides nothing.
use sentry::platform::{CpuCache, CpuModel};

/// One executed CPUID: leaf, subleaf, and EAX, EBX, ECX, EDX.
#[derive(Clone, Copy, Debug)]
pub struct Leaf {
    /// EAX before.
    pub function: u32,
    /// ECX before.
    pub index: u32,
    /// EAX, EBX, ECX, EDX after.
    pub regs: [u32; 4],
}

/// The leaves that [`describe`] reads, first those that tell of the most features.
pub const LEAVES: &[(u32, u32)] = &[
    (1, 0),
    (7, 0),
    (0x8000_0001, 0),
    (0, 0),
    (4, 0),
    (4, 1),
    (4, 2),
    (4, 3),
    (7, 1),
    (0xd, 1),
    (0x8000_0000, 0),
    (0x8000_0002, 0),
    (0x8000_0003, 0),
    (0x8000_0004, 0),
    (0x8000_0006, 0),
    (0x8000_0007, 0),
    (0x8000_0008, 0),
];

/// Linux's names of feature bits (<asm/cpufeatures.h>), by leaf and register; `-` where Linux shows none.
const NAMES: &[(u32, u32, usize, &str)] = &[
    (
        1,
        0,
        3,
        "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - dts acpi mmx fxsr sse sse2 ss ht \
         tm ia64 pbe",
    ),
    (
        0x8000_0001,
        0,
        3,
        "- - - - - - - - - - - syscall - - - - - - - mp nx - mmxext - - fxsr_opt pdpe1gb rdtscp - lm 3dnowext 3dnow",
    ),
    (
        1,
        0,
        2,
        "pni pclmulqdq dtes64 monitor ds_cpl vmx smx est tm2 ssse3 cid sdbg fma cx16 xtpr pdcm - pcid dca sse4_1 sse4_2 x2apic \
         movbe popcnt tsc_deadline_timer aes xsave - avx f16c rdrand hypervisor",
    ),
    (
        0x8000_0001,
        0,
        2,
        "lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw ibs xop skinit wdt - lwp fma4 tce - \
         nodeid_msr - tbm topoext perfctr_core perfctr_nb - bpext ptsc perfctr_llc mwaitx",
    ),
    (
        7,
        0,
        1,
        "fsgsbase tsc_adjust sgx bmi1 hle avx2 - smep bmi2 erms invpcid rtm cqm - mpx rdt_a avx512f avx512dq rdseed adx smap \
         avx512ifma - clflushopt clwb intel_pt avx512pf avx512er avx512cd sha_ni avx512bw avx512vl",
    ),
    (0xd, 1, 0, "xsaveopt xsavec xgetbv1 xsaves xfd"),
    (7, 1, 0, "- - - - avx_vnni avx512_bf16 - - - - fzrm fsrs fsrc - - - - - - - - - - avx_ifma"),
    (0x8000_0008, 0, 1, "clzero irperf xsaveerptr - rdpru - - - - wbnoinvd"),
    (
        7,
        0,
        2,
        "- avx512vbmi umip pku ospke waitpkg avx512_vbmi2 shstk gfni vaes vpclmulqdq avx512_vnni avx512_bitalg tme \
         avx512_vpopcntdq - la57 - - - - - rdpid - bus_lock_detect cldemote - movdiri movdir64b enqcmd sgx_lc",
    ),
    (
        7,
        0,
        3,
        "- - avx512_4vnniw avx512_4fmaps fsrm - - - avx512_vp2intersect - md_clear - - - serialize - tsxldtrk - pconfig \
         arch_lbr ibt - amx_bf16 avx512_fp16 amx_tile amx_int8 - - flush_l1d arch_capabilities",
    ),
];

/// Names of what Linux derives for every such processor.
const DERIVED: &str = "rep_good nopl cpuid";

/// A leaf of the host's own CPUID.
pub fn host_cpuid(function: u32) -> [u32; 4] {
    let r = core::arch::x86_64::__cpuid(function);
    [r.eax, r.ebx, r.ecx, r.edx]
}

fn find(leaves: &[Leaf], function: u32, index: u32) -> [u32; 4] {
    leaves.iter().find(|l| l.function == function && l.index == index).map_or([0; 4], |l| l.regs)
}

fn text(words: &[u32]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

fn flags(leaves: &[Leaf]) -> String {
    let largest = (find(leaves, 0, 0)[0], find(leaves, 0x8000_0000, 0)[0]);
    let mut out = Vec::new();
    for &(function, index, register, names) in NAMES {
        let exists = if function < 0x8000_0000 { function <= largest.0 } else { function <= largest.1 };
        let word = if exists { find(leaves, function, index)[register] } else { 0 };
        for (bit, name) in names.split_ascii_whitespace().enumerate() {
            if name != "-" && word >> bit & 1 != 0 {
                out.push(name);
            }
        }
        if function == 0x8000_0001 && register == 3 {
            if find(leaves, 0x8000_0007, 0)[3] & 1 << 8 != 0 {
                out.extend(["constant_tsc", "nonstop_tsc"]);
            }
            out.extend(DERIVED.split(' '));
        }
    }
    out.join(" ")
}

fn caches(leaves: &[Leaf]) -> Vec<CpuCache> {
    let mut out = Vec::new();
    for index in 0..4 {
        let [eax, ebx, ecx, _] = find(leaves, 4, index);
        let kind = match eax & 0x1f {
            1 => "Data",
            2 => "Instruction",
            3 => "Unified",
            _ => continue,
        };
        let (line, parts, ways, sets) =
            ((ebx & 0xfff) + 1, (ebx >> 12 & 0x3ff) + 1, (ebx >> 22) + 1, u64::from(ecx) + 1);
        let level = eax >> 5 & 7;
        out.push(CpuCache {
            level,
            kind,
            kib: u64::from(line) * u64::from(parts) * u64::from(ways) * sets / 1024,
            ways,
            sets: u32::try_from(sets).unwrap_or(u32::MAX),
            line,
            shared: level >= 3,
        });
    }
    out
}

/// The brand string in these leaves, empty without one.
pub fn brand(leaves: &[Leaf]) -> String {
    let brand: Vec<u32> = (0x8000_0002..=0x8000_0004).flat_map(|f| find(leaves, f, 0)).collect();
    text(&brand)
}

/// The CPU that these leaves describe, at `khz`. `host_name` stands in where KVM passes no brand string on.
pub fn describe(leaves: &[Leaf], khz: u64, host_name: &str) -> CpuModel {
    let vendor = find(leaves, 0, 0);
    let signature = find(leaves, 1, 0);
    let (family, model) = (signature[0] >> 8 & 15, signature[0] >> 4 & 15);
    let extended = matches!(family, 6 | 15);
    let name = match brand(leaves) {
        s if s.is_empty() => host_name.to_owned(),
        s => s,
    };
    let caches = caches(leaves);
    let last = caches.iter().max_by_key(|c| c.level).map(|c| c.kib);
    let sizes = find(leaves, 0x8000_0008, 0)[0];
    CpuModel {
        vendor: text(&[vendor[1], vendor[3], vendor[2]]),
        family: if family == 15 { family + (signature[0] >> 20 & 0xff) } else { family },
        model: if extended { model | (signature[0] >> 16 & 15) << 4 } else { model },
        stepping: signature[0] & 15,
        name,
        khz,
        cache_kib: last.unwrap_or_else(|| u64::from(find(leaves, 0x8000_0006, 0)[2] >> 16)),
        cpuid_level: vendor[0],
        flags: flags(leaves),
        cache_line: match signature[1] >> 8 & 0xff {
            0 => 64,
            n => n * 8,
        },
        physical_bits: match sizes & 0xff {
            0 => 36,
            n => n,
        },
        virtual_bits: match sizes >> 8 & 0xff {
            0 => 48,
            n => n,
        },
        caches,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describes_a_processor() {
        let leaf = |function, index, regs| Leaf { function, index, regs };
        let leaves = [
            leaf(0, 0, [0x20, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
            leaf(1, 0, [0x000a_0678, 0x0002_0800, 0x8000_0001, 1]),
            leaf(4, 0, [0x0400_0121, 0x02c0_003f, 0x3f, 0]),
            leaf(0x8000_0000, 0, [0x8000_0008, 0, 0, 0]),
            leaf(0x8000_0001, 0, [0, 0, 1, 1 << 29]),
            leaf(0x8000_0008, 0, [0x302e, 0, 0, 0]),
        ];
        let m = describe(&leaves, 2_000_000, "host");
        assert_eq!((m.vendor.as_str(), m.family, m.model, m.stepping), ("GenuineIntel", 6, 0xa7, 8));
        assert_eq!((m.name.as_str(), m.physical_bits, m.virtual_bits), ("host", 46, 48));
        assert_eq!(m.flags, "fpu lm rep_good nopl cpuid pni hypervisor lahf_lm");
        assert_eq!((m.caches.len(), m.caches[0].kib, m.caches[0].ways), (1, 48, 12));
    }
}
