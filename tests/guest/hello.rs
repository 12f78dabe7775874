//! The smallest cases: output, arguments, identity.
use super::Case;

pub const CASES: &[Case] = &[("hello", hello), ("identity", identity)];

fn hello() {
    println!("hello");
}

fn identity() {
    // SAFETY: these calls take no pointers.
    unsafe {
        assert!(libc::getpid() > 0);
        assert_eq!(i64::from(libc::getpid()), libc::syscall(libc::SYS_gettid));
        println!("{} {}", libc::getuid(), libc::getgid());
    }
}
