//! The guest's CPUID: what KVM supports, less what ring 3 cannot use or the sentry does not carry, with the sandbox's own
//! topology and hypervisor leaf. Decides nothing about the vCPU's other registers.
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Kvm, VcpuFd};

use super::PlatformError;

/// XCR0 features the sentry carries: x87, SSE, AVX, AVX-512 (opmask, upper ZMM, high ZMM).
const XCR0_CARRIED: u64 = 0b1110_0111;
/// XCR0 bits of AVX-512, usable only together.
const XCR0_AVX512: u64 = 0b1110_0000;
/// Twelve bytes of CPUID leaf 0x40000000.
const SIGNATURE: &[u8; 12] = b"BartizanBart";

/// CPUID.1:ECX bits that stay: all but MONITOR, the debug store, VMX, SMX, EST, TM2, SDBG, xTPR, PDCM, PCID, DCA, x2APIC, TSC
/// deadline.
const LEAF1_ECX: u32 = !(1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 11 | 1 << 14 | 1 << 15)
    & !(1 << 17 | 1 << 18 | 1 << 21 | 1 << 24);
/// CPUID.1:EDX bits that stay: all but the debug store, thermal and pending-break bits.
const LEAF1_EDX: u32 = !(1 << 21 | 1 << 22 | 1 << 29 | 1 << 31);
/// CPUID.7.0:EBX bits that stay: all but TSC_ADJUST, SGX, INVPCID, resource monitoring and allocation, MPX, processor trace.
const LEAF7_EBX: u32 = !(1 << 1 | 1 << 2 | 1 << 10 | 1 << 12 | 1 << 14 | 1 << 15 | 1 << 25);
/// CPUID.7.0:ECX bits that stay: all but UMIP, PKU, OSPKE, WAITPKG, shadow stacks, TME, LA57, key locker, bus lock, ENQCMD,
/// SGX, PKS.
const LEAF7_ECX: u32 = !(1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 13 | 1 << 16 | 1 << 23 | 1 << 24)
    & !(1 << 29 | 1 << 30 | 1 << 31);
/// CPUID.7.0:EDX bits that stay: AVX-512 4VNNIW, 4FMAPS, FSRM, VP2INTERSECT, MD_CLEAR, SERIALIZE, TSXLDTRK, AVX512-FP16.
const LEAF7_EDX: u32 = 1 << 2 | 1 << 3 | 1 << 4 | 1 << 8 | 1 << 10 | 1 << 14 | 1 << 16 | 1 << 23;
/// CPUID.7.1:EAX bits that stay: SHA512, SM3, SM4, RAO-INT, AVX-VNNI, AVX512-BF16, CMPCCXADD, FZRM, FSRS, FSRC, AVX-IFMA.
const LEAF7_1_EAX: u32 =
    1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 23;
/// CPUID.7.1:EDX bits that stay: AVX-VNNI-INT8, AVX-NE-CONVERT, AVX-VNNI-INT16, PREFETCHI.
const LEAF7_1_EDX: u32 = 1 << 4 | 1 << 5 | 1 << 10 | 1 << 14;
/// CPUID.80000001:ECX bits that stay: all but SVM, extended APIC, OSVW, IBS, SKINIT, WDT, LWP, TCE, the counters, MWAITX.
const EXT1_ECX: u32 = !(1 << 1 | 1 << 2 | 1 << 3 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 17)
    & !(1 << 22 | 1 << 23 | 1 << 24 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 29);

/// CPUID for every vCPU, and what follows from it.
pub struct GuestCpuid {
    entries: Vec<kvm_cpuid_entry2>,
    cpus: u32,
    /// XCR0.
    pub xcr0: u64,
    /// Bytes of the standard-format XSAVE area for `xcr0`.
    pub xsave_len: usize,
    /// (state component, offset, length) of the components beyond x87 and SSE, in order.
    pub components: Vec<(u32, usize, usize)>,
    /// Offset of PKRU in the XSAVE area, if KVM may carry it. No program is offered protection keys.
    pub pkru_offset: Option<usize>,
    /// Whether the guest has FSGSBASE. Some KVMs let ring 3 have what their CPUID does not name: the self-test has the last
    /// word.
    pub fsgsbase: bool,
    /// CPUID.1:EDX; the last word as above.
    pub hwcap: u32,
}

impl GuestCpuid {
    /// Shapes what `kvm` supports for `cpus` CPUs.
    pub fn new(kvm: &Kvm, cpus: usize) -> Result<GuestCpuid, PlatformError> {
        let supported =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(PlatformError::kvm("tell the CPUID it supports"))?;
        let supported = supported.as_slice();
        let leaf = |function, index| supported.iter().find(|e| e.function == function && e.index == index);

        let xsave = leaf(0xd, 0).copied().unwrap_or_default();
        let mut xcr0 = (u64::from(xsave.edx) << 32 | u64::from(xsave.eax)) & XCR0_CARRIED;
        if xcr0 & XCR0_AVX512 != XCR0_AVX512 || xcr0 & 4 == 0 {
            xcr0 &= !XCR0_AVX512;
        }
        if xcr0 & 3 != 3 {
            return Err(PlatformError::SelfTest("the processor offers no XSAVE state to a guest".into()));
        }
        let pkru = leaf(0xd, 9).filter(|c| xsave.eax & 1 << 9 != 0 && c.eax >= 4);
        let pkru_offset = pkru.map(|c| c.ebx as usize).filter(|o| o + 8 <= super::vcpu::XSAVE_BYTES);
        let mut xsave_len = 576;
        let mut components = Vec::new();
        for i in 2..32 {
            if xcr0 & (1 << i) != 0
                && let Some(c) = leaf(0xd, i)
            {
                let (offset, len) = (c.ebx as usize, c.eax as usize);
                xsave_len = xsave_len.max(offset.saturating_add(len));
                components.push((i, offset, len));
            }
        }
        if xsave_len > super::vcpu::XSAVE_BYTES {
            return Err(PlatformError::SelfTest(format!("the processor's XSAVE area has {xsave_len} bytes")));
        }

        let cpus32 = u32::try_from(cpus).unwrap_or(u32::MAX);
        let mut fsgsbase = false;
        let mut hwcap = 0;
        let mut entries = Vec::new();
        for e in supported {
            let mut e = *e;
            let lone = e.index == 0;
            match e.function {
                1 => {
                    e.ebx = (e.ebx & 0xffff) | cpus32.min(255) << 16;
                    e.ecx = (e.ecx & LEAF1_ECX) | 1 << 31;
                    e.edx &= LEAF1_EDX;
                    e.edx = if cpus > 1 { e.edx | 1 << 28 } else { e.edx & !(1 << 28) };
                    hwcap = e.edx;
                }
                // Cache parameters: one thread a core shares the first two levels, all share the last.
                4 if e.eax & 0x1f != 0 => {
                    let sharing = if (e.eax >> 5) & 7 >= 3 { cpus32 - 1 } else { 0 };
                    e.eax = (e.eax & 0x3fff) | sharing.min(0xfff) << 14 | (cpus32 - 1).min(0x3f) << 26;
                }
                7 if lone => {
                    e.ebx &= LEAF7_EBX;
                    e.ecx &= LEAF7_ECX;
                    e.edx &= LEAF7_EDX;
                    if xcr0 & XCR0_AVX512 == 0 {
                        // Foundation, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; the rest.
                        e.ebx &= !(1 << 16 | 1 << 17 | 1 << 21 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 30 | 1 << 31);
                        e.ecx &= !(1 << 1 | 1 << 6 | 1 << 11 | 1 << 12 | 1 << 14);
                        e.edx &= !(1 << 2 | 1 << 3 | 1 << 8 | 1 << 23);
                    }
                    fsgsbase = e.ebx & 1 != 0;
                    e.eax = e.eax.min(1);
                }
                7 if e.index == 1 => {
                    e.eax &= LEAF7_1_EAX;
                    e.edx &= LEAF7_1_EDX;
                    if xcr0 & XCR0_AVX512 == 0 {
                        e.eax &= !(1 << 5);
                    }
                    (e.ebx, e.ecx) = (0, 0);
                }
                7 => continue,
                0xd if lone => {
                    e.eax = xcr0 as u32;
                    e.edx = (xcr0 >> 32) as u32;
                    e.ebx = xsave_len as u32;
                    e.ecx = xsave_len as u32;
                }
                // XSAVEOPT, XSAVEC and XGETBV with ECX=1 stay; XSAVES is for kernels.
                0xd if e.index == 1 => {
                    e.eax &= 7;
                    (e.ebx, e.ecx, e.edx) = (0, 0, 0);
                }
                0xd if e.index >= 32 || xcr0 & (1 << e.index) == 0 => continue,
                // Topology and others are made below or for each CPU.
                0xb | 0x1f => continue,
                // MONITOR, power, counters, SGX, trace, AMX, key locker, LBR, AVX10.
                5 | 6 | 0xa | 0xf | 0x10 | 0x12 | 0x14 | 0x17..=0x24 => continue,
                0x4000_0000..=0x4fff_ffff => continue,
                0x8000_0001 => e.ecx &= EXT1_ECX,
                // Only the invariant TSC.
                0x8000_0007 => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, e.edx & 1 << 8),
                // 48 bits of virtual address, as without LA57. CLZERO and WBNOINVD stay; the number of cores is the sandbox's.
                0x8000_0008 => {
                    e.eax = (e.eax & !0xff00) | 48 << 8;
                    (e.ebx, e.ecx, e.edx) = (e.ebx & (1 | 1 << 9), (cpus32 - 1).min(255), 0);
                }
                // The brand string, where KVM passes none on.
                0x8000_0002..=0x8000_0004 if (e.eax, e.ebx, e.ecx, e.edx) == (0, 0, 0, 0) => {
                    let host = super::model::host_cpuid(e.function);
                    [e.eax, e.ebx, e.ecx, e.edx] = host;
                }
                0x8000_000a | 0x8000_001b..=0x8000_001f | 0x8000_0020..=0x8fff_ffff => continue,
                0xc000_0000.. => continue,
                _ => {}
            }
            entries.push(e);
        }

        let word = |i: usize| u32::from_le_bytes([SIGNATURE[i], SIGNATURE[i + 1], SIGNATURE[i + 2], SIGNATURE[i + 3]]);
        entries.push(kvm_cpuid_entry2 {
            function: 0x4000_0000,
            eax: 0x4000_0000,
            ebx: word(0),
            ecx: word(4),
            edx: word(8),
            ..Default::default()
        });
        // Extended topology: one thread a core, all cores in one package. EDX is each CPU's own.
        let core_bits = u32::BITS - (cpus32 - 1).leading_zeros();
        let significant = kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
        for (index, eax, ebx, ecx) in [(0, 0, 1, 0x100), (1, core_bits, cpus32, 0x201), (2, 0, 0, 2)] {
            let flags = significant;
            entries.push(kvm_cpuid_entry2 { function: 0xb, index, flags, eax, ebx, ecx, ..Default::default() });
        }
        Ok(GuestCpuid { entries, cpus: cpus32, xcr0, xsave_len, components, pkru_offset, fsgsbase, hwcap })
    }

    /// Gives the vCPU numbered `cpu` its CPUID.
    pub fn apply(&self, vcpu: &VcpuFd, cpu: u32) -> Result<(), PlatformError> {
        let what = "set the CPUID of a virtual CPU";
        let mut entries = self.entries.clone();
        for e in &mut entries {
            match e.function {
                1 => e.ebx = (e.ebx & 0x00ff_ffff) | (cpu & 0xff) << 24,
                0xb => e.edx = cpu,
                _ => {}
            }
        }
        let cpuid = CpuId::from_entries(&entries)
            .map_err(|_| PlatformError::Kvm(what, std::io::Error::from_raw_os_error(libc::E2BIG)))?;
        vcpu.set_cpuid2(&cpuid).map_err(PlatformError::kvm(what))
    }

    /// What KVM says that CPUID gives on a vCPU: EAX, EBX, ECX, EDX for each leaf and subleaf, with what the vCPU's own state decides.
    pub fn in_force(vcpu: &VcpuFd) -> Result<Vec<kvm_cpuid_entry2>, PlatformError> {
        let entries = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES);
        Ok(entries.map_err(PlatformError::kvm("tell a virtual CPU's CPUID"))?.as_slice().to_vec())
    }

    /// A register set of the guest's CPUID (EAX, EBX, ECX, EDX), zero where there is no such leaf.
    pub fn leaf(&self, function: u32, index: u32) -> [u32; 4] {
        self.entries
            .iter()
            .find(|e| e.function == function && e.index == index)
            .map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
    }

    /// CPUs the topology shows.
    pub fn cpus(&self) -> u32 {
        self.cpus
    }
}
