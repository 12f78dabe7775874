//! Access to guest memory that cannot fault the host. Owns the assembly routines and the process's SIGBUS and SIGSEGV handlers;
//! never decides which addresses are guest memory.
//!
//! A file truncated under a window, or an address with nothing behind it, raises a signal on access. The handler finds the
//! faulting instruction inside one of the routines below and continues at their failure exit. Every other fault goes to
//! whoever handled the signal before.
#![allow(unsafe_code)]
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

use guest_abi::Errno;

core::arch::global_asm!(
    r#"
    .pushsection .text.bartizan_try,"ax",@progbits
    .p2align 6
    .globl bartizan_try_begin
    .hidden bartizan_try_begin
bartizan_try_begin:

    # bartizan_try_copy(rdi = destination, rsi = source, rdx = bytes) -> eax: 0, or 1 on a fault
    .globl bartizan_try_copy
    .hidden bartizan_try_copy
bartizan_try_copy:
    cmp rdx, 16
    ja 20f
    cmp edx, 8
    jae 28f
    cmp edx, 4
    jae 24f
    test edx, edx
    je 90f
    mov r8, rdx
    shr r8, 1
    movzx eax, byte ptr [rsi]
    movzx ecx, byte ptr [rsi + rdx - 1]
    movzx r9d, byte ptr [rsi + r8]
    mov byte ptr [rdi], al
    mov byte ptr [rdi + r8], r9b
    mov byte ptr [rdi + rdx - 1], cl
    jmp 90f
24: mov eax, dword ptr [rsi]
    mov ecx, dword ptr [rsi + rdx - 4]
    mov dword ptr [rdi], eax
    mov dword ptr [rdi + rdx - 4], ecx
    jmp 90f
28: mov rax, qword ptr [rsi]
    mov rcx, qword ptr [rsi + rdx - 8]
    mov qword ptr [rdi], rax
    mov qword ptr [rdi + rdx - 8], rcx
    jmp 90f
20: cmp rdx, 512
    ja 30f
    movups xmm1, xmmword ptr [rsi + rdx - 16]
    lea r8, [rdi + rdx - 16]
21: movups xmm0, xmmword ptr [rsi]
    movups xmmword ptr [rdi], xmm0
    add rsi, 16
    add rdi, 16
    cmp rdi, r8
    jb 21b
    movups xmmword ptr [r8], xmm1
    jmp 90f
30: mov rcx, rdx
    rep movsb
90: xor eax, eax
    ret

    # bartizan_try_zero(rdi = destination, rsi = bytes) -> eax
    .globl bartizan_try_zero
    .hidden bartizan_try_zero
bartizan_try_zero:
    xor eax, eax
    mov rcx, rsi
    rep stosb
    xor eax, eax
    ret

    # bartizan_try_load(rdi = source, rsi = result) -> eax
    .globl bartizan_try_load
    .hidden bartizan_try_load
bartizan_try_load:
    mov eax, dword ptr [rdi]
    mov dword ptr [rsi], eax
    xor eax, eax
    ret

    # bartizan_try_exchange(rdi = word, esi = old, edx = new, rcx = found) -> eax
    .globl bartizan_try_exchange
    .hidden bartizan_try_exchange
bartizan_try_exchange:
    mov eax, esi
    lock cmpxchg dword ptr [rdi], edx
    mov dword ptr [rcx], eax
    xor eax, eax
    ret

    .globl bartizan_try_end
    .hidden bartizan_try_end
bartizan_try_end:
    # None of the routines moves the stack pointer, so the failure exit returns for all of them.
    .globl bartizan_try_failed
    .hidden bartizan_try_failed
bartizan_try_failed:
    mov eax, 1
    ret
    .popsection
"#
);

unsafe extern "C" {
    static bartizan_try_begin: u8;
    static bartizan_try_end: u8;
    static bartizan_try_failed: u8;
    fn bartizan_try_copy(dst: *mut u8, src: *const u8, len: usize) -> u32;
    fn bartizan_try_zero(dst: *mut u8, len: usize) -> u32;
    fn bartizan_try_load(src: *const u32, result: *mut u32) -> u32;
    fn bartizan_try_exchange(word: *mut u32, old: u32, new: u32, found: *mut u32) -> u32;
}

fn done(failed: u32) -> Result<(), Errno> {
    if failed == 0 { Ok(()) } else { Err(Errno::EFAULT) }
}

/// Copies `len` bytes. EFAULT if either side faults; part may have been copied.
///
/// # Safety
/// `dst` must be guest memory (or fault), or valid for writes of `len` bytes and not otherwise referenced; `src` must be guest
/// memory (or fault), or valid for reads.
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> Result<(), Errno> {
    // SAFETY: by the contract above only guest memory can fault, and the handler ends that.
    done(unsafe { bartizan_try_copy(dst, src, len) })
}

/// Zeroes `len` bytes.
///
/// # Safety
/// `dst` must be guest memory, or fault.
pub unsafe fn zero(dst: *mut u8, len: usize) -> Result<(), Errno> {
    // SAFETY: as for `copy`.
    done(unsafe { bartizan_try_zero(dst, len) })
}

/// Loads an aligned word atomically (on x86 a plain load is sequentially consistent with locked instructions).
///
/// # Safety
/// `src` must be guest memory, or fault.
pub unsafe fn load_u32(src: *const u32) -> Result<u32, Errno> {
    let mut result = 0;
    // SAFETY: as for `copy`; `result` is ours.
    done(unsafe { bartizan_try_load(src, &raw mut result) })?;
    Ok(result)
}

/// Compares and exchanges an aligned word atomically; gives the value found.
///
/// # Safety
/// `word` must be guest memory, or fault.
pub unsafe fn compare_exchange_u32(word: *mut u32, old: u32, new: u32) -> Result<u32, Errno> {
    let mut found = 0;
    // SAFETY: as for `copy`; `found` is ours.
    done(unsafe { bartizan_try_exchange(word, old, new, &raw mut found) })?;
    Ok(found)
}

/// Who handled SIGBUS and SIGSEGV before.
static PREVIOUS: [AtomicPtr<libc::sigaction>; 2] =
    [AtomicPtr::new(core::ptr::null_mut()), AtomicPtr::new(core::ptr::null_mut())];
const SIGNALS: [i32; 2] = [libc::SIGBUS, libc::SIGSEGV];

extern "C" fn on_fault(signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    let begin = &raw const bartizan_try_begin as i64;
    let end = &raw const bartizan_try_end as i64;
    // SAFETY: the kernel gives SA_SIGINFO handlers a valid ucontext_t.
    let rip = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
    if (begin..end).contains(rip) {
        *rip = &raw const bartizan_try_failed as i64;
        return;
    }
    let previous = PREVIOUS[usize::from(signal == libc::SIGSEGV)].load(Ordering::Acquire);
    // SAFETY: `previous` is a leaked sigaction or null. Returning repeats the fault under the earlier disposition (or the
    // default one, which ends the process).
    unsafe {
        if previous.is_null() {
            libc::signal(signal, libc::SIG_DFL);
        } else {
            libc::sigaction(signal, previous, core::ptr::null_mut());
        }
    }
}

/// Installs the handlers, once for the process.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (i, signal) in SIGNALS.into_iter().enumerate() {
            // SAFETY: zero is a valid sigaction.
            let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            // SAFETY: zero is a valid sigaction to be overwritten.
            let mut old: Box<libc::sigaction> = Box::new(unsafe { core::mem::zeroed() });
            // SAFETY: both structures are valid; the handler is async-signal-safe (it calls only sigaction).
            if unsafe { libc::sigaction(signal, core::ptr::null(), &raw mut *old) } == 0 {
                PREVIOUS[i].store(Box::into_raw(old), Ordering::Release);
            }
            // SAFETY: as above.
            unsafe { libc::sigaction(signal, &raw const action, core::ptr::null_mut()) };
        }
    });
}
