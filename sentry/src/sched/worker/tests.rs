//! Where woken tasks go while a worker serves calls of another.
use super::*;
use crate::platform::sim::SimPlatform;
use crate::sched::GroupClock;

/// What the tasks of a test share.
struct Trial {
    platform: Arc<SimPlatform>,
    scheduler: Scheduler,
    /// Where the second task ran, and 1.
    ran_on: AtomicUsize,
}

fn entity() -> Arc<Entity> {
    Arc::new(Entity::new(2, GroupClock::new(2)))
}

/// Starts a second task with `second` from a first one on one of two workers, while the other is idle, calls `then`, and gives whether the
/// second ran beside the first.
fn start_second(keeps: bool, second: Arc<Entity>, then: impl Fn(&Trial, usize) + Send + 'static) -> bool {
    let platform = SimPlatform::new(2);
    let trial = Arc::new(Trial { scheduler: Scheduler::new(platform.clone()), platform, ran_on: AtomicUsize::new(0) });
    let beside = Arc::new(AtomicBool::new(false));
    let (t, b) = (trial.clone(), beside.clone());
    trial.scheduler.spawn(entity(), async move {
        let me = current_cpu().unwrap();
        let other = 1 - me;
        while !t.scheduler.shared.workers[other].is_idle_now() {
            std::thread::yield_now();
        }
        if keeps {
            t.platform.keep_tasks_away(Some(other));
        }
        let inner = t.clone();
        t.scheduler.spawn(second, async move {
            inner.ran_on.store(current_cpu().unwrap() + 1, Ordering::SeqCst);
        });
        then(&t, other);
        b.store(t.ran_on.load(Ordering::SeqCst) == other + 1, Ordering::SeqCst);
    });
    std::thread::scope(|s| {
        for cpu in 0..2 {
            let trial = &trial;
            s.spawn(move || trial.scheduler.run_worker(cpu));
        }
        while trial.ran_on.load(Ordering::SeqCst) == 0 || trial.scheduler.runnable() != 0 {
            std::thread::yield_now();
        }
        trial.scheduler.shutdown();
    });
    beside.load(Ordering::SeqCst)
}

fn until_it_ran(t: &Trial) {
    while t.ran_on.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_woken_task_goes_to_an_idle_worker() {
    assert!(start_second(false, entity(), |t, other| {
        until_it_ran(t);
        assert!(!t.scheduler.task_waits_for_others(other));
    }));
}

#[test]
fn a_woken_task_waits_while_the_idle_worker_serves() {
    assert!(!start_second(true, entity(), |t, other| {
        assert!(t.scheduler.task_waits_for_others(other));
        assert!(t.scheduler.task_waits_for_others(other), "until the task has run");
        assert_eq!(t.scheduler.kept_near(), 1);
    }));
}

#[test]
fn a_worker_that_gives_up_serving_takes_the_task() {
    assert!(start_second(true, entity(), |t, other| {
        assert!(t.scheduler.task_waits_for_others(other));
        t.platform.keep_tasks_away(None);
        // What the platform does then: its worker comes back from park.
        t.platform.unpark(other);
        until_it_ran(t);
    }));
}

#[test]
fn tasks_that_cannot_or_must_not_wait_do_not() {
    let realtime = entity();
    realtime.set_policy(crate::sched::Policy { number: 1, priority: 1, reset_on_fork: false });
    assert!(start_second(true, realtime, |t, _| until_it_ran(t)));
    for cpu in 0..2 {
        let pinned = entity();
        pinned.set_affinity(only(cpu), 2);
        start_second(true, pinned, move |t, other| {
            if other == cpu {
                until_it_ran(t);
            }
        });
    }
}

fn only(cpu: usize) -> crate::sched::CpuSet {
    let mut set = crate::sched::CpuSet::first(0);
    set.0[0] = 1 << cpu;
    set
}
