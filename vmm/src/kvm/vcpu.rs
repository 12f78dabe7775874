//! One virtual CPU as an object: its synchronized registers, running it, its extended state. Owns the mapping of the
//! kernel's `kvm_run` page; knows nothing of tasks.
#![allow(unsafe_code)]
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{
    kvm_debugregs, kvm_device_attr, kvm_regs, kvm_run, kvm_sregs, kvm_vcpu_events__bindgen_ty_1, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd, VmFd};

use super::PlatformError;

/// Bytes of the buffer of KVM_GET_XSAVE. A guest without dynamically enabled features (AMX) needs no more.
pub const XSAVE_BYTES: usize = 4096;

/// _IOW(KVMIO, 0xe1, struct kvm_device_attr) of <linux/kvm.h>.
const KVM_SET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee1;
/// KVM_VCPU_TSC_CTRL of <asm/kvm.h>.
const TSC_CTRL: u32 = 0;
/// KVM_VCPU_TSC_OFFSET of <asm/kvm.h>.
const TSC_OFFSET: u64 = 0;

/// DR6 and DR7 after a reset (Intel SDM volume 3, 17.2).
const DR6_RESET: u64 = 0xffff_0ff0;
const DR7_FIXED: u64 = 0x400;

/// How KVM_RUN ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunExit {
    /// A one-byte OUT to the port.
    Out(u16),
    /// Another port access, which KVM has not finished.
    OtherIo,
    /// A signal, or `immediate_exit`.
    Interrupted,
    /// The host has no memory behind a guest-physical address (told by some KVMs only).
    Fault(Option<u64>),
    /// An end that a correct monitor does not cause.
    Broken(&'static str),
}

/// The place from which any thread may ask a vCPU not to enter the guest.
#[derive(Clone, Copy)]
pub struct RunPage(NonNull<kvm_run>);

// SAFETY: only `immediate_exit` is written through it, one byte, atomically.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

impl RunPage {
    /// Sets or clears `immediate_exit`. The vCPU must still exist.
    pub fn set_immediate_exit(self, on: bool) {
        // SAFETY: the page stays mapped for as long as the vCPU lives, which the caller promises; the byte is accessed
        // through such atomics only, and read by the kernel.
        let flag = unsafe { AtomicU8::from_ptr(&raw mut (*self.0.as_ptr()).immediate_exit) };
        flag.store(u8::from(on), Ordering::SeqCst);
    }

    /// The address, for an atomic slot.
    pub fn as_ptr(self) -> *mut kvm_run {
        self.0.as_ptr()
    }

    /// Back from [`RunPage::as_ptr`].
    pub fn from_ptr(p: *mut kvm_run) -> Option<RunPage> {
        NonNull::new(p).map(RunPage)
    }
}

/// A virtual CPU.
pub struct Vcpu {
    fd: VcpuFd,
}

impl Vcpu {
    /// Creates the vCPU with KVM's number `id`.
    pub fn new(vm: &VmFd, id: u64) -> Result<Vcpu, PlatformError> {
        let mut fd = vm.create_vcpu(id).map_err(PlatformError::kvm("create a virtual CPU"))?;
        fd.set_sync_valid_reg(SyncReg::Register);
        fd.set_sync_valid_reg(SyncReg::SystemRegister);
        Ok(Vcpu { fd })
    }

    /// The descriptor, for set-up calls.
    pub fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// The page for [`RunPage::set_immediate_exit`].
    pub fn run_page(&mut self) -> RunPage {
        RunPage(NonNull::from(self.fd.get_kvm_run()))
    }

    /// General registers as of the last exit.
    pub fn regs(&mut self) -> &mut kvm_regs {
        &mut self.fd.sync_regs_mut().regs
    }

    /// System registers as of the last exit.
    pub fn sregs(&mut self) -> &mut kvm_sregs {
        &mut self.fd.sync_regs_mut().sregs
    }

    /// Makes changes through [`Vcpu::regs`] take effect at the next run.
    pub fn set_regs_dirty(&mut self) {
        self.fd.set_sync_dirty_reg(SyncReg::Register);
    }

    /// Makes changes through [`Vcpu::sregs`] take effect at the next run.
    pub fn set_sregs_dirty(&mut self) {
        self.fd.set_sync_dirty_reg(SyncReg::SystemRegister);
    }

    /// Loads all system registers at once, and the synchronized copy with them.
    pub fn load_sregs(&mut self, sregs: &kvm_sregs) -> Result<(), PlatformError> {
        self.fd.set_sregs(sregs).map_err(PlatformError::kvm("set the system registers of a virtual CPU"))?;
        *self.sregs() = *sregs;
        Ok(())
    }

    /// Sets XCR0.
    pub fn set_xcr0(&self, xcr0: u64) -> Result<(), PlatformError> {
        let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
        xcrs.xcrs[0].value = xcr0;
        self.fd.set_xcrs(&xcrs).map_err(PlatformError::kvm("set XCR0 of a virtual CPU"))
    }

    /// Makes the guest's TSC the host's. False if this KVM cannot (older than Linux 5.16).
    pub fn share_tsc(&self) -> bool {
        let offset = 0u64;
        let attr = kvm_device_attr {
            group: TSC_CTRL,
            attr: TSC_OFFSET,
            addr: (&raw const offset).expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: the descriptor is a vCPU's, and the attribute names a live u64 that the kernel only reads.
        unsafe { libc::ioctl(self.fd.as_raw_fd(), KVM_SET_DEVICE_ATTR, &raw const attr) == 0 }
    }

    /// Enters the guest until something happens.
    pub fn run(&mut self) -> RunExit {
        // An old reason must not be read as a new one after an error.
        self.fd.get_kvm_run().exit_reason = 0;
        match self.fd.run() {
            Ok(VcpuExit::IoOut(port, data)) if data.len() == 1 => RunExit::Out(port),
            Ok(VcpuExit::IoOut(..) | VcpuExit::IoIn(..)) => RunExit::OtherIo,
            Ok(VcpuExit::Intr) => RunExit::Interrupted,
            Ok(VcpuExit::MemoryFault { gpa, .. }) => RunExit::Fault(Some(gpa)),
            Ok(VcpuExit::MmioRead(..) | VcpuExit::MmioWrite(..)) => RunExit::Broken("access to absent guest memory"),
            Ok(VcpuExit::Shutdown) => RunExit::Broken("triple fault"),
            Ok(VcpuExit::FailEntry(..)) => RunExit::Broken("the processor refused the guest's state"),
            Ok(VcpuExit::InternalError) => RunExit::Broken("KVM internal error"),
            Ok(VcpuExit::Hlt) => RunExit::Broken("unexpected HLT exit"),
            Ok(_) => RunExit::Broken("unexpected KVM exit"),
            Err(e) => match e.errno() {
                libc::EINTR | libc::EAGAIN => RunExit::Interrupted,
                libc::EFAULT => RunExit::Fault(None),
                libc::ENOMEM => RunExit::Broken("the host has no memory left for KVM"),
                _ => RunExit::Broken("KVM_RUN failed"),
            },
        }
    }

    /// Lets KVM finish an access it has handed out, without running the guest, so that the registers may be replaced.
    pub fn complete_io(&mut self) {
        self.run_page().set_immediate_exit(true);
        let _ = self.fd.run();
        self.run_page().set_immediate_exit(false);
    }

    /// Whether an exception waits to be delivered at the next entry.
    pub fn exception_queued(&self) -> bool {
        self.fd.get_vcpu_events().is_ok_and(|e| e.exception.injected != 0 || e.exception.pending != 0)
    }

    /// Drops an exception that waits to be delivered.
    pub fn drop_exception(&self) {
        if let Ok(mut e) = self.fd.get_vcpu_events() {
            e.exception = kvm_vcpu_events__bindgen_ty_1::default();
            e.flags = 0;
            let _ = self.fd.set_vcpu_events(&e);
        }
    }

    /// Replaces DR0 to DR3 and DR7, with DR6 as after a reset; gives what DR6 was.
    pub fn set_debug(&self, addresses: [u64; 4], control: u64) -> Option<u64> {
        let old = self.fd.get_debug_regs().ok()?;
        let new = kvm_debugregs { db: addresses, dr6: DR6_RESET, dr7: control | DR7_FIXED, ..old };
        self.fd.set_debug_regs(&new).ok()?;
        Some(old.dr6)
    }

    /// Reads the extended state, standard format, into a buffer of [`XSAVE_BYTES`].
    pub fn read_xsave(&self) -> io::Result<Box<kvm_xsave>> {
        self.fd.get_xsave().map(Box::new).map_err(|e| io::Error::from_raw_os_error(e.errno()))
    }

    /// Replaces the extended state.
    pub fn write_xsave(&self, xsave: &kvm_xsave) -> io::Result<()> {
        // SAFETY: the guest has no dynamically enabled feature (its XCR0 and CPUID lack them), so that KVM reads no more
        // than the 4096 bytes of `kvm_xsave`.
        unsafe { self.fd.set_xsave(xsave) }.map_err(|e| io::Error::from_raw_os_error(e.errno()))
    }
}
