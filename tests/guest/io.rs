//! Pipes, poll, epoll, eventfd, timers as files, UNIX and loopback sockets, terminals.
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use super::Case;
use super::sys::{fork, in_child, ok, wait};

pub const CASES: &[Case] = &[
    ("pipe_eof", eof),
    ("pipe_blocks_when_full", full),
    ("pipe_atomic_writes", atomic),
    ("pipe_large_transfer", large),
    ("fifo_open_blocks", fifo),
    ("poll_pipe", poll_pipe),
    ("select_pipe", select_pipe),
    ("epoll_level_edge", epoll),
    ("epoll_errors", epoll_errors),
    ("eventfd_counts", eventfd),
    ("timerfd_fires", timerfd),
    ("unix_stream", unix_stream),
    ("unix_datagram", unix_datagram),
    ("unix_pass_descriptor", pass_descriptor),
    ("unix_path_listener", path_listener),
    ("tcp_loopback", tcp),
    ("udp_loopback", udp),
    ("socket_errors", socket_errors),
    ("pty_echo", pty),
    ("splice_pipe", splice),
    ("unix_rights_chain", rights_chain),
    ("epoll_paths_bounded", epoll_paths),
    ("long_transfers", long_transfers),
    ("long_reads_share_position", long_reads),
    ("long_appends_stay_whole", long_appends),
    ("populate_is_whole", populate),
    ("accept_by_many", accept_by_many),
];

fn pipe() -> (std::fs::File, std::fs::File) {
    let mut fds = [0; 2];
    assert_eq!(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    unsafe { (std::fs::File::from_raw_fd(fds[0]), std::fs::File::from_raw_fd(fds[1])) }
}

fn eof() {
    let (mut r, mut w) = pipe();
    w.write_all(b"abc").unwrap();
    drop(w);
    let mut s = String::new();
    r.read_to_string(&mut s).unwrap();
    assert_eq!(s, "abc");
}

fn full() {
    let (mut r, w) = pipe();
    unsafe { libc::fcntl(w.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    let mut total = 0;
    let block = [5_u8; 4096];
    while let Ok(n) = ok(unsafe { libc::write(w.as_raw_fd(), block.as_ptr().cast(), 4096) } as i64) {
        total += n;
    }
    assert_eq!(total, 65536);
    assert_eq!(unsafe { libc::fcntl(w.as_raw_fd(), libc::F_GETPIPE_SZ) }, 65536);
    unsafe { libc::fcntl(w.as_raw_fd(), libc::F_SETFL, 0) };
    let writer = thread::spawn(move || (&w).write_all(&[6; 8192]).unwrap());
    thread::sleep(Duration::from_millis(20));
    let mut all = Vec::new();
    r.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 65536 + 8192);
    writer.join().unwrap();
}

fn atomic() {
    let (mut r, w) = pipe();
    let writers: Vec<i32> = (0..4_u8)
        .map(|i| {
            let fd = w.as_raw_fd();
            fork(move || {
                for _ in 0..200 {
                    let block = [i; 512];
                    assert_eq!(unsafe { libc::write(fd, block.as_ptr().cast(), 512) }, 512);
                }
                0
            })
        })
        .collect();
    drop(w);
    let mut all = Vec::new();
    r.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 4 * 200 * 512);
    assert!(all.chunks(512).all(|c| c.iter().all(|b| *b == c[0])));
    writers.into_iter().for_each(|p| assert_eq!(wait(p), 0));
}

fn large() {
    let (mut r, mut w) = pipe();
    let pid = fork(move || {
        for i in 0..64_u8 {
            w.write_all(&vec![i; 1 << 20]).unwrap();
        }
        0
    });
    let mut buf = vec![0; 1 << 16];
    let (mut total, mut sum) = (0_usize, 0_u64);
    while total < 64 << 20 {
        let n = r.read(&mut buf).unwrap();
        total += n;
        sum += buf[..n].iter().map(|b| u64::from(*b)).sum::<u64>();
    }
    assert_eq!(sum, (0..64_u64).sum::<u64>() << 20);
    assert_eq!(wait(pid), 0);
}

fn fifo() {
    let path = std::ffi::CString::new(crate::own_path("fifo")).unwrap();
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    assert_eq!(ok(unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_NONBLOCK) }), Err(libc::ENXIO));
    let name = path.clone();
    let writer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        std::fs::OpenOptions::new().write(true).open(name.to_str().unwrap()).unwrap().write_all(b"fifo").unwrap();
    });
    let text = std::fs::read_to_string(path.to_str().unwrap()).unwrap();
    assert_eq!(text, "fifo");
    writer.join().unwrap();
    unsafe { libc::unlink(path.as_ptr()) };
}

fn poll_pipe() {
    let (r, w) = pipe();
    let poll = |fd: i32, events: i16, ms: i32| {
        let mut p = libc::pollfd { fd, events, revents: 0 };
        (unsafe { libc::poll(&raw mut p, 1, ms) }, p.revents)
    };
    assert_eq!(poll(r.as_raw_fd(), libc::POLLIN, 0), (0, 0));
    assert_eq!(poll(w.as_raw_fd(), libc::POLLOUT, 0), (1, libc::POLLOUT));
    assert_eq!(poll(999, libc::POLLIN, 0), (1, libc::POLLNVAL));
    assert_eq!(poll(-1, libc::POLLIN, 0), (0, 0));
    let start = Instant::now();
    assert_eq!(poll(r.as_raw_fd(), libc::POLLIN, 30).0, 0);
    assert!(start.elapsed() >= Duration::from_millis(30));
    let fd = r.as_raw_fd();
    let poller = thread::spawn(move || poll(fd, libc::POLLIN, 10_000));
    thread::sleep(Duration::from_millis(10));
    (&w).write_all(b"x").unwrap();
    assert_eq!(poller.join().unwrap(), (1, libc::POLLIN));
    drop(w);
    assert_eq!(poll(r.as_raw_fd(), libc::POLLIN, 0), (1, libc::POLLIN | libc::POLLHUP));
    let (r, w) = pipe();
    drop(r);
    assert_eq!(poll(w.as_raw_fd(), libc::POLLOUT, 0), (1, libc::POLLOUT | libc::POLLERR));
}

fn select_pipe() {
    let (r, w) = pipe();
    let mut set: libc::fd_set = unsafe { std::mem::zeroed() };
    unsafe { libc::FD_SET(r.as_raw_fd(), &raw mut set) };
    let mut t = libc::timeval { tv_sec: 0, tv_usec: 10_000 };
    let n = r.as_raw_fd() + 1;
    let null = std::ptr::null_mut();
    assert_eq!(unsafe { libc::select(n, &raw mut set, null, null, &raw mut t) }, 0);
    (&w).write_all(b"x").unwrap();
    unsafe { libc::FD_SET(r.as_raw_fd(), &raw mut set) };
    t.tv_sec = 5;
    assert_eq!(unsafe { libc::select(n, &raw mut set, null, null, &raw mut t) }, 1);
    assert!(unsafe { libc::FD_ISSET(r.as_raw_fd(), &raw const set) });
}

fn epoll() {
    let ep = unsafe { libc::epoll_create1(0) };
    let (mut r, mut w) = pipe();
    let ctl = |op: i32, fd: i32, events: i32| {
        let mut e = libc::epoll_event { events: events as u32, u64: 42 };
        ok(unsafe { libc::epoll_ctl(ep, op, fd, &raw mut e) })
    };
    let wait_for = |ms: i32| {
        let mut e = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let n = unsafe { libc::epoll_wait(ep, e.as_mut_ptr(), 4, ms) };
        (n, e[0].events as i32)
    };
    ctl(libc::EPOLL_CTL_ADD, r.as_raw_fd(), libc::EPOLLIN).unwrap();
    assert_eq!(wait_for(0).0, 0);
    w.write_all(b"ab").unwrap();
    assert_eq!(wait_for(1000), (1, libc::EPOLLIN));
    assert_eq!(wait_for(0), (1, libc::EPOLLIN), "level triggered");
    ctl(libc::EPOLL_CTL_MOD, r.as_raw_fd(), libc::EPOLLIN | libc::EPOLLET).unwrap();
    assert_eq!(wait_for(1000).0, 1);
    assert_eq!(wait_for(0).0, 0, "edge triggered");
    w.write_all(b"c").unwrap();
    assert_eq!(wait_for(1000).0, 1);
    let mut b = [0; 10];
    assert_eq!(r.read(&mut b).unwrap(), 3);
    ctl(libc::EPOLL_CTL_MOD, r.as_raw_fd(), libc::EPOLLIN | libc::EPOLLONESHOT).unwrap();
    w.write_all(b"d").unwrap();
    assert_eq!(wait_for(1000).0, 1);
    w.write_all(b"e").unwrap();
    assert_eq!(wait_for(0).0, 0, "one shot");
    ctl(libc::EPOLL_CTL_MOD, r.as_raw_fd(), libc::EPOLLIN).unwrap();
    drop(w);
    assert_eq!(wait_for(1000), (1, libc::EPOLLIN | libc::EPOLLHUP));
    drop(r);
    assert_eq!(wait_for(0).0, 0, "a closed file leaves");
}

fn epoll_errors() {
    let ep = unsafe { libc::epoll_create1(0) };
    let (r, _w) = pipe();
    let ctl = |op: i32, fd: i32| {
        let mut e = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        ok(unsafe { libc::epoll_ctl(ep, op, fd, &raw mut e) })
    };
    assert_eq!(ctl(libc::EPOLL_CTL_DEL, r.as_raw_fd()), Err(libc::ENOENT));
    assert_eq!(ctl(libc::EPOLL_CTL_ADD, r.as_raw_fd()), Ok(0));
    assert_eq!(ctl(libc::EPOLL_CTL_ADD, r.as_raw_fd()), Err(libc::EEXIST));
    assert_eq!(ctl(libc::EPOLL_CTL_ADD, ep), Err(libc::EINVAL));
    assert_eq!(ctl(libc::EPOLL_CTL_ADD, 999), Err(libc::EBADF));
    let file = std::fs::File::open("/etc/passwd").unwrap();
    assert_eq!(ctl(libc::EPOLL_CTL_ADD, file.as_raw_fd()), Err(libc::EPERM));
    let mut e = libc::epoll_event { events: 0, u64: 0 };
    assert_eq!(ok(unsafe { libc::epoll_wait(ep, &raw mut e, 0, 0) }), Err(libc::EINVAL));
}

fn eventfd() {
    let fd = unsafe { libc::eventfd(3, libc::EFD_NONBLOCK) };
    let read = || {
        let mut v = 0_u64;
        ok(unsafe { libc::read(fd, (&raw mut v).cast(), 8) } as i64).map(|_| v)
    };
    let write = |v: u64| ok(unsafe { libc::write(fd, (&raw const v).cast(), 8) } as i64);
    assert_eq!(read(), Ok(3));
    assert_eq!(read(), Err(libc::EAGAIN));
    assert_eq!(write(u64::MAX), Err(libc::EINVAL));
    assert_eq!(write(u64::MAX - 1), Ok(8));
    assert_eq!(write(1), Err(libc::EAGAIN));
    assert_eq!(read(), Ok(u64::MAX - 1));
    let sem = unsafe { libc::eventfd(2, libc::EFD_SEMAPHORE) };
    let mut v = 0_u64;
    unsafe { libc::read(sem, (&raw mut v).cast(), 8) };
    assert_eq!(v, 1);
    assert_eq!(ok(unsafe { libc::read(sem, (&raw mut v).cast(), 4) } as i64), Err(libc::EINVAL));
}

fn timerfd() {
    let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, 0) };
    let tick = libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 };
    let spec = libc::itimerspec { it_interval: tick, it_value: tick };
    assert_eq!(unsafe { libc::timerfd_settime(fd, 0, &raw const spec, std::ptr::null_mut()) }, 0);
    let mut total = 0;
    while total < 4 {
        let mut v = 0_u64;
        assert_eq!(unsafe { libc::read(fd, (&raw mut v).cast(), 8) }, 8);
        total += v;
    }
    let mut now: libc::itimerspec = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::timerfd_gettime(fd, &raw mut now) }, 0);
    assert_eq!(now.it_interval.tv_nsec, 5_000_000);
}

fn unix_stream() {
    let (mut a, mut b) = UnixStream::pair().unwrap();
    let pid = fork({
        let mut b = b.try_clone().unwrap();
        move || {
            let mut s = [0; 5];
            b.read_exact(&mut s).unwrap();
            b.write_all(&s).unwrap();
            0
        }
    });
    a.write_all(b"hello").unwrap();
    let mut s = [0; 5];
    a.read_exact(&mut s).unwrap();
    assert_eq!((&s, wait(pid)), (b"hello", 0));
    a.shutdown(std::net::Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    b.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    drop(b);
    assert!(a.write_all(b"x").is_err());
}

fn unix_datagram() {
    let (a, b) = UnixDatagram::pair().unwrap();
    a.send(b"one").unwrap();
    a.send(b"three").unwrap();
    let mut buf = [0; 3];
    assert_eq!(b.recv(&mut buf).unwrap(), 3);
    assert_eq!(b.recv(&mut buf).unwrap(), 3, "the rest of a datagram is dropped");
    b.set_nonblocking(true).unwrap();
    assert_eq!(b.recv(&mut buf).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
}

fn pass_descriptor() {
    let (a, b) = UnixStream::pair().unwrap();
    let (mut r, w) = pipe();
    assert!(send_descriptor(a.as_raw_fd(), w.as_raw_fd()));
    drop(w);
    unsafe {
        let mut byte = [0_u8];
        let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = [0_u64; 8];
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        assert_eq!(libc::recvmsg(b.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC), 1);
        let c = libc::CMSG_FIRSTHDR(&raw const message);
        assert!(!c.is_null());
        assert_eq!((*c).cmsg_type, libc::SCM_RIGHTS);
        let fd = libc::CMSG_DATA(c).cast::<i32>().read_unaligned();
        assert_eq!(libc::fcntl(fd, libc::F_GETFD), libc::FD_CLOEXEC);
        assert_eq!(libc::write(fd, b"passed".as_ptr().cast(), 6), 6);
        libc::close(fd);
    }
    let mut s = String::new();
    r.read_to_string(&mut s).unwrap();
    assert_eq!(s, "passed");
}

fn path_listener() {
    let path = crate::own_path("socket");
    let _ = std::fs::remove_file(&path);
    assert_eq!(UnixStream::connect(&path).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    let listener = UnixListener::bind(&path).unwrap();
    assert_eq!(UnixListener::bind(&path).unwrap_err().raw_os_error(), Some(libc::EADDRINUSE));
    let p = path.clone();
    let client = thread::spawn(move || {
        let mut s = UnixStream::connect(p).unwrap();
        s.write_all(b"hi").unwrap();
    });
    let (mut s, _) = listener.accept().unwrap();
    let mut text = String::new();
    s.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hi");
    client.join().unwrap();
    drop(listener);
    assert_eq!(UnixStream::connect(&path).unwrap_err().raw_os_error(), Some(libc::ECONNREFUSED));
    std::fs::remove_file(path).unwrap();
}

fn tcp() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let client = thread::spawn(move || {
        let mut s = std::net::TcpStream::connect(address).unwrap();
        s.write_all(&vec![7; 200_000]).unwrap();
        s.shutdown(std::net::Shutdown::Write).unwrap();
        let mut b = [0; 2];
        s.read_exact(&mut b).unwrap();
        b
    });
    let (mut s, peer) = listener.accept().unwrap();
    assert!(peer.ip().is_loopback());
    let mut all = Vec::new();
    s.read_to_end(&mut all).unwrap();
    assert_eq!(all, vec![7; 200_000]);
    s.write_all(b"ok").unwrap();
    assert_eq!(&client.join().unwrap(), b"ok");
    drop(listener);
    assert_eq!(std::net::TcpStream::connect(address).unwrap_err().raw_os_error(), Some(libc::ECONNREFUSED));
}

fn udp() {
    let a = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let b = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    a.send_to(b"datagram", b.local_addr().unwrap()).unwrap();
    let mut buf = [0; 100];
    let (n, from) = b.recv_from(&mut buf).unwrap();
    assert_eq!((&buf[..n], from), (b"datagram".as_slice(), a.local_addr().unwrap()));
}

fn socket_errors() {
    let socket = |f: i32, t: i32, p: i32| ok(unsafe { libc::socket(f, t, p) });
    assert_eq!(socket(99, libc::SOCK_STREAM, 0), Err(libc::EAFNOSUPPORT));
    assert_eq!(socket(libc::AF_UNIX, 77, 0), Err(libc::EINVAL));
    assert_eq!(socket(libc::AF_UNIX, libc::SOCK_STREAM, 5), Err(libc::EPROTONOSUPPORT));
    let fd = socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap() as i32;
    assert_eq!(ok(unsafe { libc::listen(1, 1) }), Err(libc::ENOTSOCK));
    let mut b = [0_u8; 4];
    assert_eq!(ok(unsafe { libc::recv(fd, b.as_mut_ptr().cast(), 4, 0) } as i64), Err(libc::EINVAL));
    assert_eq!(ok(unsafe { libc::send(fd, b.as_ptr().cast(), 4, libc::MSG_NOSIGNAL) } as i64), Err(libc::ENOTCONN));
    let udp = socket(libc::AF_INET6, libc::SOCK_DGRAM, 0).unwrap() as i32;
    for fd in [fd, udp] {
        let mut peer = [7_u32; 3];
        let mut len: libc::socklen_t = 12;
        let to = peer.as_mut_ptr().cast();
        assert_eq!(unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len) }, 0);
        assert_eq!(peer, [0, u32::MAX, u32::MAX], "nobody is there");
        let groups = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, to, &raw mut len) };
        assert_eq!(ok(groups), Err(libc::ENODATA));
    }
    let one = 1;
    let only = unsafe { libc::setsockopt(udp, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, (&raw const one).cast(), 4) };
    assert_eq!(only, 0);
    let mut to: libc::sockaddr_in6 = unsafe { core::mem::zeroed() };
    (to.sin6_family, to.sin6_port) = (libc::AF_INET6 as u16, 9_u16.to_be());
    to.sin6_addr.s6_addr = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
    let sent = unsafe { libc::sendto(udp, b.as_ptr().cast(), 4, 0, (&raw const to).cast(), 28) };
    assert_eq!(ok(sent as i64), Err(libc::ENETUNREACH), "an IPv4 destination");
}

fn pty() {
    unsafe {
        let master = libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY);
        assert!(master >= 0);
        assert_eq!(libc::grantpt(master), 0);
        assert_eq!(libc::unlockpt(master), 0);
        let mut name = [0 as libc::c_char; 64];
        assert_eq!(libc::ptsname_r(master, name.as_mut_ptr(), 64), 0);
        let slave = libc::open(name.as_ptr(), libc::O_RDWR | libc::O_NOCTTY);
        assert!(slave >= 0);
        assert_eq!(libc::isatty(slave), 1);
        assert_eq!(libc::write(master, b"hello\n".as_ptr().cast(), 6), 6);
        let mut buf = [0_u8; 64];
        let n = libc::read(slave, buf.as_mut_ptr().cast(), 64);
        assert_eq!(&buf[..n as usize], b"hello\n");
        let n = libc::read(master, buf.as_mut_ptr().cast(), 64);
        assert_eq!(&buf[..n as usize], b"hello\r\n", "echo");
        let size = libc::winsize { ws_row: 11, ws_col: 22, ws_xpixel: 0, ws_ypixel: 0 };
        assert_eq!(libc::ioctl(master, libc::TIOCSWINSZ, &raw const size), 0);
        let mut got: libc::winsize = std::mem::zeroed();
        assert_eq!(libc::ioctl(slave, libc::TIOCGWINSZ, &raw mut got), 0);
        assert_eq!((got.ws_row, got.ws_col), (11, 22));
        // An end of file that nobody has read is a byte 0 for who reads without lines.
        assert_eq!(libc::write(master, b"ab\x04".as_ptr().cast(), 3), 3);
        let mut termios: libc::termios = std::mem::zeroed();
        assert_eq!(libc::tcgetattr(slave, &raw mut termios), 0);
        libc::cfmakeraw(&raw mut termios);
        assert_eq!(libc::tcsetattr(slave, libc::TCSANOW, &raw const termios), 0);
        let n = libc::read(slave, buf.as_mut_ptr().cast(), 64);
        assert_eq!(&buf[..n as usize], b"ab\0");
    }
}

fn splice() {
    let (mut r, w) = pipe();
    let path = "/etc/passwd";
    let file = std::fs::File::open(path).unwrap();
    let null = std::ptr::null_mut();
    let n = ok(unsafe { libc::splice(file.as_raw_fd(), null, w.as_raw_fd(), null, 100, 0) } as i64).unwrap();
    drop(w);
    let mut all = Vec::new();
    r.read_to_end(&mut all).unwrap();
    assert_eq!(all.len() as i64, n);
    assert_eq!(all, std::fs::read(path).unwrap()[..n as usize]);
    in_child(|| ());
}

/// Sends one descriptor with one byte; false if the kernel refuses.
fn send_descriptor(socket: i32, fd: i32) -> bool {
    unsafe {
        let mut byte = [0_u8];
        let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = [0_u64; 4];
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let c = libc::CMSG_FIRSTHDR(&raw const message);
        (*c).cmsg_level = libc::SOL_SOCKET;
        (*c).cmsg_type = libc::SCM_RIGHTS;
        (*c).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(c).cast::<i32>().write_unaligned(fd);
        libc::sendmsg(socket, &raw const message, 0) == 1
    }
}

fn rights_chain() {
    // Each pair carries the one before in its queue; closing the last lets go of all, however long the chain became.
    let mut last: Option<(UnixStream, UnixStream)> = None;
    for _ in 0..3000 {
        let (a, b) = UnixStream::pair().unwrap();
        if let Some((x, y)) = &last {
            let sent = send_descriptor(a.as_raw_fd(), x.as_raw_fd()) && send_descriptor(a.as_raw_fd(), y.as_raw_fd());
            if !sent {
                break;
            }
        }
        last = Some((a, b));
    }
    drop(last);
    in_child(|| ());
}

fn epoll_paths() {
    let limit = libc::rlimit { rlim_cur: 1000, rlim_max: 1000 };
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    let (mut r, mut w) = pipe();
    let mut below = vec![r.as_raw_fd()];
    for _ in 0..4 {
        let layer: Vec<i32> = (0..40).map(|_| unsafe { libc::epoll_create1(0) }).collect();
        for &watcher in &layer {
            for &fd in &below {
                // The kernel refuses a watch that would make too many paths.
                let mut e = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
                unsafe { libc::epoll_ctl(watcher, libc::EPOLL_CTL_ADD, fd, &raw mut e) };
            }
        }
        below = layer;
    }
    w.write_all(b"x").unwrap();
    let mut byte = [0];
    r.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"x");
}

const LONG: usize = 7 << 20;

/// Bytes that tell their place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len / 4).flat_map(|i| (i as u32).to_le_bytes()).collect()
}

/// Large reads and writes are whole, move the position, and end at the file's end.
fn long_transfers() {
    let path = std::ffi::CString::new(crate::own_path("long")).unwrap();
    let fd =
        ok(unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC, 0o600) }).unwrap() as i32;
    let bytes = pattern(LONG);
    let position = || ok(unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) });
    assert_eq!(ok(unsafe { libc::write(fd, bytes.as_ptr().cast(), LONG) } as i64), Ok(LONG as i64));
    assert_eq!(position(), Ok(LONG as i64));
    let mut back = vec![0_u8; LONG + 4096];
    assert_eq!(ok(unsafe { libc::pread(fd, back.as_mut_ptr().cast(), back.len(), 0) } as i64), Ok(LONG as i64));
    assert_eq!(position(), Ok(LONG as i64));
    assert!(back[..LONG] == bytes);
    back.fill(0);
    unsafe { libc::lseek(fd, 4, libc::SEEK_SET) };
    let (first, second) = back.split_at_mut(3 << 20);
    let iov = [
        libc::iovec { iov_base: first.as_mut_ptr().cast(), iov_len: first.len() - 1 },
        libc::iovec { iov_base: second.as_mut_ptr().cast(), iov_len: second.len() },
    ];
    assert_eq!(ok(unsafe { libc::readv(fd, iov.as_ptr(), 2) } as i64), Ok(LONG as i64 - 4));
    assert_eq!(position(), Ok(LONG as i64));
    assert!(
        first[..first.len() - 1] == bytes[4..first.len() + 3] && second[..1000] == bytes[first.len() + 3..][..1000]
    );
    // A limit cuts a write short; the next one is refused.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = libc::rlimit { rlim_cur: 5 << 20, rlim_max: libc::RLIM_INFINITY };
    unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
    assert_eq!(ok(unsafe { libc::pwrite(fd, bytes.as_ptr().cast(), LONG, 1) } as i64), Ok((5 << 20) - 1));
    assert_eq!(ok(unsafe { libc::pwrite(fd, bytes.as_ptr().cast(), LONG, 5 << 20) } as i64), Err(libc::EFBIG));
    // What lies behind the program's buffer ends a transfer.
    let buffer = super::sys::map(4 << 20, libc::PROT_READ | libc::PROT_WRITE);
    unsafe { libc::munmap(buffer.add(3 << 20).cast(), 1 << 20) };
    assert_eq!(ok(unsafe { libc::pread(fd, buffer.cast(), 4 << 20, 0) } as i64), Ok(3 << 20));
    unsafe { libc::unlink(path.as_ptr()) };
}

/// Threads that read through one description get different parts, each in one piece.
fn long_reads() {
    let path = crate::own_path("shared");
    std::fs::write(&path, pattern(4 * LONG)).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let starts: Vec<u32> = std::thread::scope(|s| {
        let readers: Vec<_> = (0..4)
            .map(|_| {
                s.spawn(|| {
                    let mut part = vec![0_u8; LONG];
                    let n = std::io::Read::read(&mut &file, &mut part).unwrap();
                    assert_eq!(n, LONG);
                    let word = |i: usize| u32::from_le_bytes(part[4 * i..4 * i + 4].try_into().unwrap());
                    let start = word(0);
                    assert!((0..LONG / 4).all(|i| word(i) == start + i as u32));
                    start
                })
            })
            .collect();
        readers.into_iter().map(|r| r.join().unwrap()).collect()
    });
    let mut sorted = starts;
    sorted.sort_unstable();
    assert_eq!(sorted, (0..4).map(|i| i * (LONG / 4) as u32).collect::<Vec<_>>());
    std::fs::remove_file(&path).unwrap();
}

/// Appends of two processes do not mix.
fn long_appends() {
    const EACH: usize = 3 << 20;
    let path = crate::own_path("append");
    let file = std::fs::File::options().append(true).create(true).open(&path).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let writers: Vec<i32> = (1..=3_u8)
        .map(|n| {
            super::sys::fork(|| {
                let bytes = vec![n; EACH];
                for _ in 0..2 {
                    assert_eq!(ok(unsafe { libc::write(fd, bytes.as_ptr().cast(), EACH) } as i64), Ok(EACH as i64));
                }
                0
            })
        })
        .collect();
    for pid in writers {
        assert_eq!(super::sys::wait(pid), 0);
    }
    let all = std::fs::read(&path).unwrap();
    assert_eq!(all.len(), 6 * EACH);
    assert!(all.chunks(EACH).all(|c| c.iter().all(|b| *b == c[0])));
    std::fs::remove_file(&path).unwrap();
}

/// MAP_POPULATE, MADV_POPULATE_WRITE and mlock make every page present, however many there are.
fn populate() {
    const LEN: usize = 24 << 20;
    let pages = LEN / 4096;
    let present = |at: *mut libc::c_void| {
        let mut vec = vec![0_u8; pages];
        assert_eq!(unsafe { libc::mincore(at, LEN, vec.as_mut_ptr()) }, 0);
        vec.iter().filter(|v| **v & 1 != 0).count()
    };
    let map = |flags: i32| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
        let at = unsafe { libc::mmap(std::ptr::null_mut(), LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        at
    };
    let at = map(libc::MAP_POPULATE);
    assert_eq!(present(at), pages);
    unsafe { libc::munmap(at, LEN) };
    let at = map(0);
    assert_eq!(ok(unsafe { libc::madvise(at, LEN, libc::MADV_POPULATE_WRITE) }), Ok(0));
    assert_eq!(present(at), pages);
    unsafe { libc::munmap(at.cast::<u8>().add(LEN / 2).cast(), 4096) };
    assert_eq!(ok(unsafe { libc::madvise(at, LEN, libc::MADV_POPULATE_WRITE) }), Err(libc::ENOMEM));
    unsafe { libc::munmap(at, LEN) };
}

/// Every connection finds one of many acceptors, also when some of them are called away by a signal.
fn accept_by_many() {
    extern "C" fn nothing(_: i32) {}
    super::sys::handle(libc::SIGUSR1, nothing as *const () as usize, 0);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (addr, fd) = (listener.local_addr().unwrap(), listener.as_raw_fd());
    const THREADS: usize = 12;
    let accepted = std::sync::atomic::AtomicUsize::new(0);
    thread::scope(|s| {
        let (told, tids) = std::sync::mpsc::channel();
        let accepted = &accepted;
        let acceptors: Vec<i32> = (0..THREADS)
            .map(|_| {
                let told = told.clone();
                s.spawn(move || {
                    told.send(unsafe { libc::gettid() }).unwrap();
                    loop {
                        let none = std::ptr::null_mut();
                        match ok(unsafe { libc::accept(fd, none, none.cast()) }) {
                            Ok(fd) => {
                                unsafe { libc::close(fd as i32) };
                                accepted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                                return;
                            }
                            Err(e) => assert_eq!(e, libc::EINTR),
                        }
                    }
                });
                tids.recv().unwrap()
            })
            .collect();
        let mut clients = Vec::new();
        for (i, tid) in acceptors.iter().enumerate() {
            if i % 3 == 0 {
                // One that has had its connection may be gone.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), *tid, libc::SIGUSR1) };
            }
            clients.push(std::net::TcpStream::connect(addr).unwrap());
        }
    });
    assert_eq!(accepted.load(std::sync::atomic::Ordering::SeqCst), THREADS);
}
