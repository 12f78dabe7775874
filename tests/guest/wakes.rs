//! Many who wait for one object: each byte, message or connection wakes one of them, and nobody is forgotten.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use super::Case;
use super::sys::pipe;

pub const CASES: &[Case] = &[
    ("wakes_one_pipe_reader", pipe_reader),
    ("wakes_every_pipe_reader_there_is_something_for", pipe_readers),
    ("wakes_every_pipe_writer_there_is_room_for", pipe_writers),
    ("wakes_one_receiver_of_a_message", receiver),
    ("wakes_one_exclusive_epoll", exclusive_epoll),
    ("wakes_all_at_the_end_of_a_pipe", end),
];

const CROWD: usize = 16;
const ROUNDS: usize = 100;

/// Times that the calling thread has slept.
fn sleeps() -> usize {
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
    usize::try_from(usage.ru_nvcsw).unwrap()
}

fn read(fd: i32, buffer: &mut [u8]) -> isize {
    unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) }
}

fn write(fd: i32, bytes: &[u8]) {
    assert_eq!(unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) }, bytes.len() as isize);
}

/// A crowd that takes one at a time by `take`, which gives false at the end. Gives how often each slept.
fn crowd(taken: &Arc<AtomicUsize>, take: impl Fn() -> bool + Clone + Send + 'static) -> Vec<JoinHandle<usize>> {
    let one = |_| {
        let (taken, take) = (taken.clone(), take.clone());
        thread::spawn(move || {
            let before = sleeps();
            while take() {
                taken.fetch_add(1, Ordering::SeqCst);
            }
            sleeps() - before
        })
    };
    (0..CROWD).map(one).collect()
}

/// Gives one at a time, each when the one before was taken.
fn one_by_one(taken: &AtomicUsize, give: impl Fn()) {
    for round in 0..ROUNDS {
        give();
        while taken.load(Ordering::SeqCst) <= round {
            thread::sleep(core::time::Duration::from_micros(100));
        }
    }
}

/// Nobody slept again for what another took: far fewer sleeps than if all had been woken each time.
fn few_sleeps(crowd: Vec<JoinHandle<usize>>) {
    let sum: usize = crowd.into_iter().map(|t| t.join().unwrap()).sum();
    assert!(sum < ROUNDS * CROWD / 2, "{sum} sleeps of {CROWD} for {ROUNDS}");
}

fn pipe_reader() {
    let (from, to) = pipe();
    let taken = Arc::new(AtomicUsize::new(0));
    let readers = crowd(&taken, move || read(from, &mut [0]) == 1);
    one_by_one(&taken, || write(to, b"x"));
    unsafe { libc::close(to) };
    few_sleeps(readers);
}

fn pipe_readers() {
    for _ in 0..ROUNDS / 10 {
        let (from, to) = pipe();
        let readers: Vec<_> = (0..CROWD).map(|_| thread::spawn(move || read(from, &mut [0]))).collect();
        // One write, one wake: each reader that leaves something wakes the next.
        write(to, &[7; CROWD]);
        for reader in readers {
            assert_eq!(reader.join().unwrap(), 1);
        }
        unsafe { (libc::close(from), libc::close(to)) };
    }
}

fn pipe_writers() {
    for _ in 0..ROUNDS / 10 {
        let (from, to) = pipe();
        write(to, &vec![1; 65536]);
        let writers: Vec<_> = (0..CROWD - 1).map(|_| thread::spawn(move || write(to, &[2; 4096]))).collect();
        // One read, one wake: each writer that leaves room wakes the next.
        assert_eq!(read(from, &mut vec![0; 61440]), 61440);
        for writer in writers {
            writer.join().unwrap();
        }
        unsafe { (libc::close(from), libc::close(to)) };
    }
}

fn receiver() {
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, ends.as_mut_ptr()) }, 0);
    let [from, to] = ends;
    let taken = Arc::new(AtomicUsize::new(0));
    let receive = move || unsafe { libc::recv(from, [0u8].as_mut_ptr().cast(), 1, 0) } == 1;
    let receivers = crowd(&taken, receive);
    one_by_one(&taken, || write(to, b"x"));
    unsafe { libc::close(to) };
    few_sleeps(receivers);
}

fn exclusive_epoll() {
    let (from, to) = pipe();
    assert_eq!(unsafe { libc::fcntl(from, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
    let taken = Arc::new(AtomicUsize::new(0));
    let waiter = |_| {
        let taken = taken.clone();
        thread::spawn(move || {
            let before = sleeps();
            let epoll = unsafe { libc::epoll_create1(0) };
            let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLEXCLUSIVE) as u32, u64: 0 };
            assert_eq!(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, from, &raw mut event) }, 0);
            loop {
                assert_eq!(unsafe { libc::epoll_wait(epoll, &raw mut event, 1, -1) }, 1);
                match read(from, &mut [0]) {
                    0 => break sleeps() - before,
                    1 => taken.fetch_add(1, Ordering::SeqCst),
                    _ => 0,
                };
            }
        })
    };
    let waiters: Vec<_> = (0..CROWD).map(waiter).collect();
    one_by_one(&taken, || write(to, b"x"));
    unsafe { libc::close(to) };
    few_sleeps(waiters);
}

fn end() {
    let (from, to) = pipe();
    let readers: Vec<_> = (0..CROWD).map(|_| thread::spawn(move || read(from, &mut [0]))).collect();
    write(to, b"xy");
    unsafe { libc::close(to) };
    let got: Vec<_> = readers.into_iter().map(|r| r.join().unwrap()).collect();
    assert_eq!(got.iter().sum::<isize>(), 2);
}
