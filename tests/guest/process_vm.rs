//! process_vm_readv(2) and process_vm_writev(2).
use crate::Case;
use crate::ptrace::{sleeper, wait_any};
use crate::sys::{call, map};

/// The cases of this area.
pub const CASES: &[Case] = &[("process_vm", process_vm)];

fn process_vm() {
    let page = map(8192, libc::PROT_READ | libc::PROT_WRITE);
    unsafe { libc::mprotect(page.add(4096).cast(), 4096, libc::PROT_NONE) };
    let pid = sleeper();
    unsafe { page.write(1) };
    let mut buffer = [7u8; 100];
    let local = libc::iovec { iov_base: (&raw mut buffer).cast(), iov_len: 100 };
    let there = |at: usize, len| libc::iovec { iov_base: unsafe { page.add(at) }.cast(), iov_len: len };
    let moved = |write: bool, remote: &libc::iovec, flags| {
        let nr = if write { libc::SYS_process_vm_writev } else { libc::SYS_process_vm_readv };
        call(nr, [pid as u64, (&raw const local) as u64, 1, std::ptr::from_ref(remote) as u64, 1, flags])
    };
    assert_eq!(moved(true, &there(0, 100), 0), Ok(100));
    buffer.fill(0);
    assert_eq!(moved(false, &there(0, 50), 0), Ok(50));
    assert_eq!((buffer[0], buffer[49], buffer[50]), (7, 7, 0));
    // Up to the page that cannot be read.
    assert_eq!(moved(false, &there(4096 - 10, 100), 0), Ok(10));
    assert_eq!(moved(false, &there(4096, 100), 0), Err(libc::EFAULT));
    assert_eq!(moved(false, &there(0, 100), 1), Err(libc::EINVAL));
    // The caller's own page was never touched.
    assert_eq!(unsafe { page.read() }, 1);
    unsafe { libc::kill(pid, libc::SIGKILL) };
    wait_any(pid);
    assert_eq!(moved(false, &there(0, 100), 0), Err(libc::ESRCH));
}
