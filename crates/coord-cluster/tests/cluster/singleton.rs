//! A job that runs on one node of many.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coord_cluster::singleton::{
    Ended, Failure, JobContext, Next, Singleton, SingletonBuilder, State,
};
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::{
    Backend, Effect, ErrorKind, Incarnation, Leases, MemoryBackend, Term, TokioClock,
};
use tokio::time::{Instant, sleep, timeout};

use crate::common::{LIMIT, id, node, store};

const TTL: Duration = Duration::from_secs(30);
const MARGIN: Duration = Duration::from_secs(3);
const STOP_BUDGET: Duration = Duration::from_secs(2);

fn builder(store: &dyn Backend, name: &str) -> SingletonBuilder {
    let leases = Leases::new(store.lease(), id(name), Incarnation::random())
        .with_clock(Arc::new(TokioClock::new()));
    Singleton::builder(&leases, "report").expect("name")
}

/// What all runs of the job share, as a store would.
#[derive(Clone, Default)]
struct Place {
    at_work: Arc<AtomicUsize>,
    /// Each run, and when it began and ended.
    runs: Arc<Mutex<Vec<Run>>>,
}

#[derive(Clone, Debug)]
struct Run {
    term: Term,
    began: Instant,
    ended: Option<Instant>,
}

impl Place {
    /// Begins to work, and ends when this is dropped.
    fn enter(&self, duty: &JobContext) -> AtWork {
        assert_eq!(self.at_work.fetch_add(1, Ordering::SeqCst), 0, "two at work at one moment");
        assert!(duty.is_current());
        let mut runs = self.runs.lock().expect("no panic inside");
        let term = duty.fence().term;
        assert!(runs.last().is_none_or(|last| last.term < term), "an older fence came later");
        runs.push(Run { term, began: Instant::now(), ended: None });
        AtWork(self.clone())
    }

    fn runs(&self) -> Vec<Run> {
        self.runs.lock().expect("no panic inside").clone()
    }

    /// Waits until so many runs have begun.
    async fn begun(&self, runs: usize) -> Run {
        let wait = async {
            while self.runs().len() < runs {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LIMIT, wait).await.expect("it begins");
        self.runs()[runs - 1].clone()
    }

    /// A node that works until it is told to stop.
    fn worker(&self, store: &dyn Backend, name: &str) -> Singleton {
        let place = self.clone();
        let job = move |duty: JobContext| {
            let at_work = place.enter(&duty);
            async move {
                duty.cancelled().await;
                // What it has to finish it may still write.
                assert!(duty.is_current());
                drop(at_work);
                Next::Again
            }
        };
        builder(store, name).start(job).expect("starts")
    }
}

struct AtWork(Place);

impl Drop for AtWork {
    fn drop(&mut self) {
        let mut runs = self.0.runs.lock().expect("no panic inside");
        runs.last_mut().expect("it began").ended = Some(Instant::now());
        self.0.at_work.fetch_sub(1, Ordering::SeqCst);
    }
}

fn faulty(store: &MemoryBackend) -> (Faulty, FaultControl) {
    let faulty = Faulty::new(Arc::new(store.reopen()));
    let control = faulty.control().clone();
    (faulty, control)
}

async fn resting(singleton: &Singleton) -> (Duration, Option<Failure>) {
    let mut state = singleton.state();
    let resting = state.wait_for(|state| matches!(state, State::Resting(..)));
    match &*timeout(LIMIT, resting).await.expect("it rests").expect("runs") {
        State::Resting(pause, failure) => (*pause, failure.clone()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_graceful_stop_hands_over_at_once() {
    let (store, place) = (store(), Place::default());
    let one = place.worker(&store, "n1");
    place.begun(1).await;
    let two = place.worker(&store, "n2");
    sleep(TTL).await;
    assert!(matches!(&*two.state().borrow(), State::Waiting));
    let asked = Instant::now();
    assert!(matches!(one.stop().await, Ended::Stopped));
    assert!(matches!(&*one.state().borrow(), State::Ended(Ended::Stopped)));
    let next = place.begun(2).await;
    assert!(next.began - asked < Duration::from_millis(200), "{:?}", next.began - asked);
    assert!(matches!(&*two.state().borrow(), State::Running(fence) if fence.term == next.term));
    drop(two);
    let third = place.worker(&store, "n3");
    place.begun(3).await;
    assert!(matches!(third.stop().await, Ended::Stopped));
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_stops_the_job_before_another_starts() {
    let (store, place) = (store(), Place::default());
    let (way, control) = faulty(&store);
    let one = place.worker(&way, "n1");
    place.begun(1).await;
    let two = place.worker(&store, "n2");
    sleep(Duration::from_secs(100)).await;
    let cut = Instant::now();
    control.cut(Effect::Unknown);
    let next = place.begun(2).await;
    let first = place.runs()[0].clone();
    let ended = first.ended.expect("it ended first");
    assert!(ended + STOP_BUDGET + MARGIN <= next.began, "{first:?} {next:?}");
    assert!(next.began - cut <= TTL + Duration::from_secs(1));
    control.heal();
    sleep(TTL).await;
    assert!(matches!(&*one.state().borrow(), State::Waiting));
    assert_eq!(place.runs().len(), 2);
    assert!(matches!(two.stop().await, Ended::Stopped));
    place.begun(3).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_that_ignores_its_stop_is_dropped_at_the_deadline_or_after_the_budget() {
    let (store, place) = (store(), Place::default());
    let (way, control) = faulty(&store);
    let work = |store: &dyn Backend, name: &str| {
        let place = place.clone();
        let job = move |duty: JobContext| {
            let at_work = place.enter(&duty);
            async move {
                std::future::pending::<()>().await;
                drop(at_work);
                Next::Done
            }
        };
        builder(store, name).start(job).expect("starts")
    };
    let one = work(&way, "n1");
    place.begun(1).await;
    let two = work(&store, "n2");
    let cut = Instant::now();
    control.cut(Effect::Unknown);
    let next = place.begun(2).await;
    let ended = place.runs()[0].ended.expect("it was dropped");
    // Nothing was renewed since the lease was acquired.
    let lasted = ended - cut;
    let tick = Duration::from_millis(50);
    assert!(lasted <= TTL - MARGIN && lasted + tick >= TTL - MARGIN, "{lasted:?}");
    assert!(ended + MARGIN <= next.began + tick);

    let asked = Instant::now();
    assert!(matches!(two.stop().await, Ended::Stopped));
    assert!(asked.elapsed() >= STOP_BUDGET && asked.elapsed() < STOP_BUDGET + tick);
    drop(one);
}

#[tokio::test(start_paused = true)]
async fn a_job_that_panics_gives_the_lease_up_and_is_started_again() {
    let (store, place) = (store(), Place::default());
    let panics = |_: JobContext| async {
        sleep(Duration::from_secs(1)).await;
        panic!("no report today")
    };
    let one = builder(&store, "n1").start(panics).expect("starts");
    let (pause, failure) = resting(&one).await;
    assert_eq!(pause, Duration::from_secs(1));
    assert!(matches!(failure, Some(Failure::Panicked(message)) if message == "no report today"));
    // Somebody else may have the lease at once.
    let two = place.worker(&store, "n2");
    place.begun(1).await;
    sleep(TTL).await;
    assert!(matches!(&*one.state().borrow(), State::Waiting));
    assert!(matches!(two.stop().await, Ended::Stopped));
    let (pause, _) = resting(&one).await;
    assert_eq!(pause, Duration::from_secs(2), "it was started again, and failed again");

    // A job that can't even be made is one that panics.
    let other = builder(&store, "n3").start(|_duty| -> std::future::Ready<Next> { panic!("odd") });
    let (_, failure) = resting(&other.expect("starts")).await;
    assert!(matches!(failure, Some(Failure::Panicked(message)) if message == "odd"));
}

#[tokio::test(start_paused = true)]
async fn never_two_at_a_moment_while_stores_and_nodes_come_and_go() {
    let (store, place) = (store(), Place::default());
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3"] {
        let (way, control) = faulty(&store);
        nodes.push((place.worker(&way, name), control));
    }
    let mut losses = 0;
    for round in 0..60_u64 {
        let run = place.begun(place.runs().len().max(1)).await;
        let holder = nodes.iter().position(|(node, _)| {
            matches!(&*node.state().borrow(), State::Running(fence) if fence.term == run.term)
        });
        let Some(holder) = holder else {
            sleep(Duration::from_secs(1)).await;
            continue;
        };
        losses += 1;
        let control = &nodes[holder].1;
        match round % 4 {
            0 => control.cut(Effect::Unknown),
            1 => control.pause(),
            2 => control.mute(),
            _ => control.deafen(),
        }
        // Also at odd moments between two renewals.
        sleep(Duration::from_millis(20_000 + round * 777)).await;
        control.heal();
        sleep(Duration::from_millis(round * 333)).await;
    }
    assert!(losses >= 30 && place.runs().len() >= 20, "{losses} {}", place.runs().len());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_for_less_than_half_of_the_ttl_stops_no_job() {
    let (store, place) = (store(), Place::default());
    let (way, control) = faulty(&store);
    let one = place.worker(&way, "n1");
    place.begun(1).await;
    for round in 0..40_u64 {
        sleep(Duration::from_millis(5_000 + 139 * round)).await;
        if round % 2 == 0 {
            control.cut(Effect::Unknown);
        } else {
            control.mute();
        }
        sleep(TTL / 2 - Duration::from_millis(1)).await;
        control.heal();
    }
    assert_eq!(place.runs().len(), 1);
    assert!(matches!(one.stop().await, Ended::Stopped));
}

#[tokio::test(start_paused = true)]
async fn it_ends_with_its_node() {
    let (store, place) = (store(), Place::default());
    let one = node(&store, "n1").await;
    let work = |node: &coord_cluster::Cluster| {
        let place = place.clone();
        let job = move |duty: JobContext| {
            let at_work = place.enter(&duty);
            async move {
                duty.cancelled().await;
                sleep(Duration::from_secs(1)).await;
                drop(at_work);
                Next::Again
            }
        };
        node.singleton("report").expect("name").start(job).expect("starts")
    };
    let job = work(&one);
    place.begun(1).await;
    one.shutdown().await.expect("ends");
    assert!(place.runs()[0].ended.is_some(), "the job ended before the node had");
    assert!(matches!(job.ended().await, Ended::Stopped));
    assert_eq!(store.lease().get(job.name()).await.expect("reads"), None);

    // A node that crashed leaves the lease to its TTL.
    let two = node(&store, "n2").await;
    let crashed = work(&two);
    place.begun(2).await;
    two.abandon();
    assert!(matches!(crashed.ended().await, Ended::Stopped));
    assert!(store.lease().get(job.name()).await.expect("reads").is_some());
}

#[tokio::test(start_paused = true)]
async fn one_error_names_every_contradiction() {
    let bad = builder(&store(), "n1")
        .stop_budget(Duration::from_secs(25))
        .restart_pause(Duration::from_secs(9))
        .restart_pause_max(Duration::from_secs(3))
        .start(|_duty| async { Next::Done });
    let error = bad.expect_err("bad");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    for part in ["stop_budget 25s", "restart_pause_max 3s", "restart_pause 9s", "report"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    for (ttl, fits) in [(1, true), (30, true), (86_400, true), (86_401, false)] {
        let ttl = Duration::from_secs(ttl);
        let built = builder(&store(), "n1").ttl(ttl).start(|_duty| async { Next::Done });
        assert_eq!(built.is_ok(), fits, "{ttl:?}");
    }
}
