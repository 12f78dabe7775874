//! CPU time: that every way to ask for it gives the same, and that what is armed on CPU clocks goes off.
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Case;
use super::sys::{fork, handle, killed_by, no_core, ok, wait};

pub const CASES: &[Case] = &[
    ("cpu_time_agrees", agrees),
    ("cpu_time_of_children", children),
    ("cpu_time_is_monotonic", monotonic),
    ("itimer_prof_of_a_microsecond", tiny_period),
    ("itimer_virtual_counts_user_time", virtual_time),
    ("posix_timer_on_cpu_clocks", cpu_timers),
    ("rlimit_cpu", rlimit_cpu),
    ("clock_nanosleep_on_cpu_time", sleep_on_cpu_time),
];

fn clock(id: i32) -> Duration {
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::clock_gettime(id, &raw mut t) }, 0);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn own() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Computes until the calling thread has had `time` of CPU.
fn spin(time: Duration) {
    let end = clock(libc::CLOCK_THREAD_CPUTIME_ID) + time;
    while clock(libc::CLOCK_THREAD_CPUTIME_ID) < end {
        for i in 0..10_000_u32 {
            std::hint::black_box(i);
        }
    }
}

fn timeval(t: libc::timeval) -> Duration {
    Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000)
}

fn rusage(who: i32) -> (Duration, libc::rusage) {
    let mut u: libc::rusage = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::getrusage(who, &raw mut u) }, 0);
    (timeval(u.ru_utime) + timeval(u.ru_stime), u)
}

/// utime, stime, cutime, cstime of /proc/PID/stat together, by pairs.
fn stat_ticks(path: &str) -> (Duration, Duration) {
    let text = std::fs::read_to_string(path).unwrap();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    let n = |i: usize| fields[i - 3].parse::<u64>().unwrap();
    let tick = 1000 / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
    (Duration::from_millis((n(14) + n(15)) * tick), Duration::from_millis((n(16) + n(17)) * tick))
}

fn times() -> (Duration, Duration) {
    let mut t: libc::tms = unsafe { std::mem::zeroed() };
    assert_ne!(unsafe { libc::times(&raw mut t) }, -1);
    let tick = 1000 / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
    let ticks = |n: i64| Duration::from_millis(n as u64 * tick);
    (ticks(t.tms_utime + t.tms_stime), ticks(t.tms_cutime + t.tms_cstime))
}

/// `a` was read before `b`, which may be rounded down in two parts to `grain` and sampled by ticks.
fn close(what: &str, a: Duration, b: Duration, grain: u64) {
    assert!(b + Duration::from_millis(2 * grain + 10) >= a, "{what}: {b:?} after {a:?}");
    assert!(b <= a + Duration::from_millis(300), "{what}: {b:?} after {a:?}");
}

fn agrees() {
    let begun = Instant::now();
    let before = own();
    let threads: Vec<_> = (1..=3)
        .map(|i| {
            thread::spawn(move || {
                let start = clock(libc::CLOCK_THREAD_CPUTIME_ID);
                spin(Duration::from_millis(20 * i));
                let now = clock(libc::CLOCK_THREAD_CPUTIME_ID);
                close("RUSAGE_THREAD", now, rusage(libc::RUSAGE_THREAD).0, 1);
                let tid = unsafe { libc::syscall(libc::SYS_gettid) };
                close("stat of a thread", now, stat_ticks(&format!("/proc/self/task/{tid}/stat")).0, 10);
                now.checked_sub(start).unwrap()
            })
        })
        .collect();
    let sum: Duration = threads.into_iter().map(|t| t.join().unwrap()).sum();
    let used = own().checked_sub(before).unwrap();
    assert!(used >= sum, "the process had {used:?}, its threads {sum:?}");
    let cpus = thread::available_parallelism().map_or(1, usize::from) as u32;
    assert!(used <= begun.elapsed() * cpus.min(4) + Duration::from_millis(20), "{used:?} in {:?}", begun.elapsed());
    close("RUSAGE_SELF", own(), rusage(libc::RUSAGE_SELF).0, 1);
    close("times", own(), times().0, 10);
    close("stat", own(), stat_ticks("/proc/self/stat").0, 10);
    let asleep = own();
    thread::sleep(Duration::from_millis(100));
    assert!(own().checked_sub(asleep).unwrap() < Duration::from_millis(50), "sleep costs nothing");
}

fn children() {
    assert_eq!(rusage(libc::RUSAGE_CHILDREN).0, Duration::ZERO);
    let pid = fork(|| {
        let grandchild = fork(|| {
            spin(Duration::from_millis(60));
            0
        });
        spin(Duration::from_millis(60));
        wait(grandchild)
    });
    thread::sleep(Duration::from_millis(20));
    assert_eq!(rusage(libc::RUSAGE_CHILDREN).0, Duration::ZERO, "only those that were waited for count");
    let mut status = 0;
    let mut of_wait: libc::rusage = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut of_wait) }, pid);
    assert_eq!(status, 0);
    let told = timeval(of_wait.ru_utime) + timeval(of_wait.ru_stime);
    assert!(told >= Duration::from_millis(110), "{told:?}");
    let (sum, all) = rusage(libc::RUSAGE_CHILDREN);
    assert_eq!((sum, all.ru_minflt), (told, of_wait.ru_minflt));
    close("times", told, times().1, 10);
    close("stat", told, stat_ticks("/proc/self/stat").1, 10);
}

fn monotonic() {
    let spinner = thread::spawn(|| spin(Duration::from_millis(60)));
    let mut last = own();
    while !spinner.is_finished() {
        let now = own();
        assert!(now >= last, "{now:?} after {last:?}");
        last = now;
    }
    spinner.join().unwrap();
}

static RUNG: AtomicU32 = AtomicU32::new(0);

extern "C" fn ring(_: i32) {
    RUNG.fetch_add(1, Ordering::SeqCst);
}

fn setitimer(which: i32, value: Duration, interval: Duration) {
    let timeval = |d: Duration| libc::timeval { tv_sec: d.as_secs() as i64, tv_usec: d.subsec_micros().into() };
    let new = libc::itimerval { it_interval: timeval(interval), it_value: timeval(value) };
    assert_eq!(unsafe { libc::setitimer(which as _, &raw const new, std::ptr::null_mut()) }, 0);
}

fn tiny_period() {
    handle(libc::SIGPROF, ring as *const () as usize, libc::SA_RESTART);
    let micro = Duration::from_micros(1);
    setitimer(libc::ITIMER_PROF, micro, micro);
    let before = own();
    spin(Duration::from_millis(200));
    setitimer(libc::ITIMER_PROF, Duration::ZERO, Duration::ZERO);
    let used = own().checked_sub(before).unwrap();
    let rung = RUNG.load(Ordering::SeqCst);
    // Once a tick at most, and ticks are a millisecond or longer.
    assert!((5..=used.as_millis() as u32 * 2).contains(&rung), "{rung} in {used:?}");
}

fn virtual_time() {
    handle(libc::SIGVTALRM, ring as *const () as usize, 0);
    setitimer(libc::ITIMER_VIRTUAL, Duration::from_millis(60), Duration::ZERO);
    let mut left: libc::itimerval = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::getitimer(libc::ITIMER_VIRTUAL as _, &raw mut left) }, 0);
    assert!((1..=70_000).contains(&left.it_value.tv_usec), "{}", left.it_value.tv_usec);
    thread::sleep(Duration::from_millis(80));
    assert_eq!(RUNG.load(Ordering::SeqCst), 0, "no user time while asleep");
    let before = rusage(libc::RUSAGE_SELF).1.ru_utime;
    let end = Instant::now() + Duration::from_secs(20);
    while RUNG.load(Ordering::SeqCst) == 0 && Instant::now() < end {
        for i in 0..10_000_u32 {
            std::hint::black_box(i);
        }
    }
    assert_eq!(RUNG.load(Ordering::SeqCst), 1);
    let used = timeval(rusage(libc::RUSAGE_SELF).1.ru_utime).checked_sub(timeval(before)).unwrap();
    assert!(used >= Duration::from_millis(20), "{used:?}");
}

fn cpu_timers() {
    handle(libc::SIGUSR1, ring as *const () as usize, libc::SA_RESTART);
    for id in [libc::CLOCK_THREAD_CPUTIME_ID, libc::CLOCK_PROCESS_CPUTIME_ID] {
        RUNG.store(0, Ordering::SeqCst);
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGUSR1;
        event.sigev_notify_thread_id = unsafe { libc::syscall(libc::SYS_gettid) } as i32;
        let mut timer: libc::timer_t = std::ptr::null_mut();
        assert_eq!(unsafe { libc::timer_create(id, &raw mut event, &raw mut timer) }, 0);
        let value = libc::itimerspec {
            it_interval: libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 },
            it_value: libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 },
        };
        assert_eq!(unsafe { libc::timer_settime(timer, 0, &raw const value, std::ptr::null_mut()) }, 0);
        thread::sleep(Duration::from_millis(60));
        assert!(RUNG.load(Ordering::SeqCst) <= 1, "no CPU time while asleep");
        spin(Duration::from_millis(200));
        let rung = RUNG.load(Ordering::SeqCst);
        assert!((5..=30).contains(&rung), "{rung} of about 20");
        assert_eq!(unsafe { libc::timer_delete(timer) }, 0);
    }
}

fn rlimit_cpu() {
    let limit = |cur, max| {
        let new = libc::rlimit { rlim_cur: cur, rlim_max: max };
        assert_eq!(ok(unsafe { libc::setrlimit(libc::RLIMIT_CPU, &raw const new) }), Ok(0));
    };
    let with_handler = fork(|| {
        no_core();
        handle(libc::SIGXCPU, ring as *const () as usize, 0);
        limit(1, 30);
        let end = Instant::now() + Duration::from_secs(60);
        while RUNG.load(Ordering::SeqCst) == 0 && Instant::now() < end {
            spin(Duration::from_millis(1));
        }
        let used = own();
        assert!((Duration::from_millis(600)..Duration::from_millis(2900)).contains(&used), "{used:?}");
        let mut now: libc::rlimit = unsafe { std::mem::zeroed() };
        unsafe { libc::getrlimit(libc::RLIMIT_CPU, &raw mut now) };
        // The soft limit moves to where the next signal will come.
        assert_eq!((now.rlim_cur, now.rlim_max), (2, 30));
        0
    });
    assert_eq!(wait(with_handler), 0);
    killed_by(libc::SIGKILL, || {
        unsafe { libc::signal(libc::SIGXCPU, libc::SIG_IGN) };
        limit(1, 1);
        spin(Duration::from_secs(60));
    });
}

fn sleep_on_cpu_time() {
    let nap = |rest: &mut libc::timespec| {
        let t = libc::timespec { tv_sec: 0, tv_nsec: 300_000_000 };
        unsafe { libc::clock_nanosleep(libc::CLOCK_PROCESS_CPUTIME_ID, 0, &raw const t, rest) }
    };
    let mut rest: libc::timespec = unsafe { std::mem::zeroed() };
    let t = libc::timespec { tv_sec: 0, tv_nsec: 1 };
    let own_thread = unsafe { libc::clock_nanosleep(libc::CLOCK_THREAD_CPUTIME_ID, 0, &raw const t, &raw mut rest) };
    assert_eq!(own_thread, libc::EINVAL);
    // Another thread uses the time; being stopped and continued meanwhile does not end the sleep.
    let pid = fork(move || {
        thread::spawn(|| spin(Duration::from_secs(30)));
        let before = own();
        let mut rest: libc::timespec = unsafe { std::mem::zeroed() };
        assert_eq!(nap(&mut rest), 0);
        let used = own().checked_sub(before).unwrap();
        assert!(used >= Duration::from_millis(290), "{used:?}");
        0
    });
    thread::sleep(Duration::from_millis(60));
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) }, pid);
    assert!(libc::WIFSTOPPED(status), "{status:#x}");
    unsafe { libc::kill(pid, libc::SIGCONT) };
    assert_eq!(wait(pid), 0);
    // A handler ends it, and what is left is told.
    handle(libc::SIGALRM, ring as *const () as usize, libc::SA_RESTART);
    setitimer(libc::ITIMER_REAL, Duration::from_millis(50), Duration::ZERO);
    assert_eq!(nap(&mut rest), libc::EINTR);
    assert!(rest.tv_sec == 0 && rest.tv_nsec > 100_000_000, "{}", rest.tv_nsec);
}
