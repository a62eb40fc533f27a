mod fake;

use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use self::fake::{Fake, Fault};
use super::*;
use crate::backend::Backend;
use crate::clock::{Clock, Moment, TokioClock};
use crate::error::{Error, ErrorKind};
use crate::lease::Release;
use crate::memory::MemoryBackend;
use crate::types::{ClusterName, Incarnation, NodeId, Ttl};

const TTL: Duration = Duration::from_secs(10);
const MARGIN: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(3_600);

/// The runtime's clock, and what a suspended machine sleeps through, which its timers don't count.
#[derive(Debug)]
struct TestClock {
    running: TokioClock,
    suspended: Mutex<Duration>,
}

impl Clock for TestClock {
    fn now(&self) -> Moment {
        self.running.now().plus(*self.suspended.lock().expect("no panic inside"))
    }
}

struct World {
    clock: Arc<TestClock>,
    fake: Arc<Fake>,
    leases: Leases,
}

impl World {
    fn new() -> Self {
        let (running, suspended) = (TokioClock::new(), Mutex::default());
        let clock = Arc::new(TestClock { running, suspended });
        let fake = Fake::new(clock.clone());
        let leases = Self::leases_of(&clock, &fake, 1);
        Self { clock, fake, leases }
    }

    fn leases_of(clock: &Arc<TestClock>, fake: &Arc<Fake>, number: u64) -> Leases {
        let node = NodeId::new(format!("node-{number}")).expect("id");
        Leases::new(fake.clone(), node, Incarnation::random())
            .with_clock(clock.clone())
            .with_seed(number)
    }

    fn node(&self, number: u64) -> Leases {
        Self::leases_of(&self.clock, &self.fake, number)
    }

    fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Lets time pass in which nothing runs, no timer either.
    fn suspend(&self, time: Duration) {
        *self.clock.suspended.lock().expect("no panic inside") += time;
    }

    /// Waits until the store has seen this many requests of the kind.
    async fn called(&self, operation: &str, times: usize) {
        let all = async {
            while self.fake.calls(operation).len() < times {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LONG, all).await.expect("it is called");
    }

    /// Waits until nobody holds the lease.
    async fn vacant(&self) {
        let vacant = async {
            while self.fake.holder().is_some() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LONG, vacant).await.expect("it ends");
    }

    fn spawn_acquire(&self, number: u64) -> AbortOnDropHandle<LeaseGuard> {
        let session = session(&self.node(number));
        spawn(async move { session.acquire().await.expect("acquired") })
    }

    async fn acquire(&self) -> LeaseGuard {
        session(&self.leases).acquire().await.expect("acquired")
    }
}

fn spawn<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> AbortOnDropHandle<T> {
    AbortOnDropHandle::new(Handle::current().spawn(future))
}

fn session(leases: &Leases) -> LeaseSession {
    leases.lease("scheduler").expect("name").ttl(TTL).build().expect("times")
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_kept_until_it_is_released() {
    let world = World::new();
    let guard = world.acquire().await;
    assert_eq!(guard.deadline(), world.now().plus(TTL - MARGIN));
    let first = guard.grant();
    sleep(Duration::from_secs(1_000)).await;
    assert!(guard.is_held() && guard.ended().is_none());
    assert_eq!(guard.grant().fence(), first.fence());
    assert_ne!(guard.grant().revision, first.revision, "the grant as answered last");
    let renewals = world.fake.calls("renew");
    for pair in renewals.windows(2) {
        let apart = pair[1].since(pair[0]);
        assert!(apart >= TTL * 3 / 10 && apart <= TTL * 11 / 30 + Duration::from_millis(2));
    }
    assert!(renewals.len() >= 270 && renewals.len() <= 334, "{}", renewals.len());
    let tenure = guard.tenure();
    assert_eq!(guard.release().await.expect("released"), Release::Released);
    assert!(!tenure.is_held() && world.fake.holder().is_none());
    assert!(matches!(tenure.lost().await, Lost::Released));
    world.leases.idle().await;
}

#[tokio::test(start_paused = true)]
async fn the_next_candidate_is_woken_by_a_release() {
    let world = World::new();
    let guard = world.acquire().await;
    let waiting = world.spawn_acquire(2);
    sleep(Duration::from_secs(60)).await;
    let released = world.now();
    assert_eq!(guard.release().await.expect("released"), Release::Released);
    let next = waiting.await.expect("no panic");
    assert!(world.now().since(released) <= Duration::from_millis(32));
    assert_eq!(next.fence().term.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn held_is_a_comparison_and_not_a_flag() {
    let world = World::new();
    let guard = world.acquire().await;
    world.suspend(TTL - MARGIN - Duration::from_millis(1));
    assert!(guard.is_held());
    world.suspend(Duration::from_millis(1));
    assert!(!guard.is_held(), "no task has run in between");
    assert!(guard.ended().is_none());
    let resumed = world.now();
    assert!(matches!(guard.lost().await, Lost::Expired { .. }));
    assert!(world.now().since(resumed) <= Duration::from_secs(1), "told within a second");
    assert!(matches!(guard.lost().await, Lost::Expired { .. }), "also to a late subscriber");
}

#[tokio::test(start_paused = true)]
async fn a_late_success_does_not_revive_a_lost_guard() {
    let world = World::new();
    let guard = world.acquire().await;
    world.fake.fail("renew", [Fault::SlowAnswer(Duration::from_secs(1))]);
    world.called("renew", 1).await;
    world.suspend(TTL);
    assert!(!guard.is_held());
    assert!(matches!(guard.lost().await, Lost::Expired { .. }));
    assert!(!guard.is_held());
    assert_eq!(world.fake.calls("renew").len(), 1);
    // The store had extended it: it is given back with the guard, not before.
    assert!(world.fake.calls("release").is_empty());
    drop(guard);
    world.vacant().await;
}

#[tokio::test(start_paused = true)]
async fn somebody_who_saw_it_lost_is_not_contradicted_by_a_renewal() {
    let world = World::new();
    let guard = world.acquire().await;
    let tenure = guard.tenure();
    let (old, new) = (tenure.deadline(), tenure.deadline().plus(TTL));
    world.suspend(TTL);
    assert!(!guard.is_held());
    assert!(!tenure.raise(old, new));
    assert!(!guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_was_overtaken_ends_the_tenure() {
    let world = World::new();
    let guard = world.acquire().await;
    world.fake.fail("renew", [Fault::Slow(Duration::from_secs(1))]);
    world.called("renew", 1).await;
    // Stands for a renewing task that has read the clock just before the deadline, while somebody
    // else reads it just after.
    world.suspend(TTL);
    assert!(!guard.is_held());
    *world.clock.suspended.lock().expect("no panic inside") = Duration::ZERO;
    assert!(matches!(guard.lost().await, Lost::Expired { .. }));
    assert!(!guard.is_held());
    drop(guard);
    world.vacant().await;
}

#[tokio::test(start_paused = true)]
async fn the_session_works_over_the_embedded_backend() {
    let cluster = ClusterName::new("orders").expect("name");
    let backend = MemoryBackend::isolated(cluster);
    let leases = |name| {
        let node = NodeId::new(name).expect("id");
        let leases = Leases::new(backend.lease(), node, Incarnation::random());
        session(&leases.with_clock(Arc::new(TokioClock::new())))
    };
    let guard = leases("node-1").acquire().await.expect("acquired");
    let other = leases("node-2");
    let waiting = spawn(async move { other.acquire().await.expect("acquired") });
    assert_eq!(guard.fence(), guard.grant().fence());
    let before = guard.fence();
    assert_eq!(guard.release().await.expect("released"), Release::Released);
    let next = timeout(LONG, waiting).await.expect("woken").expect("no panic");
    assert!(next.is_held() && next.fence().passes(&before));
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_resolved_by_the_same_attempt() {
    for fault in [Fault::AnswerLost, Fault::AppliedError] {
        let world = World::new();
        world.fake.fail("acquire", [fault]);
        let guard = world.acquire().await;
        assert_eq!(guard.fence().term.get(), 1, "granted once");
        let sent = world.fake.calls("acquire");
        assert_eq!(sent.len(), 2);
        assert_eq!(guard.deadline(), sent[1].plus(TTL - MARGIN));
        world.fake.fail("renew", [fault]);
        sleep(Duration::from_secs(60)).await;
        assert!(guard.is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn one_hung_renewal_and_a_short_outage_are_no_loss() {
    let world = World::new();
    let guard = world.acquire().await;
    world.fake.fail("renew", [Fault::Hangs, Fault::Slow(Duration::from_millis(1_900))]);
    sleep(Duration::from_secs(30)).await;
    assert!(guard.is_held());
    let away = Fault::Error(ErrorKind::Unavailable);
    world.fake.fail("renew", [away, Fault::Panics, away, Fault::Error(ErrorKind::Denied), away]);
    sleep(Duration::from_secs(30)).await;
    assert!(guard.is_held());
    assert!(guard.ended().is_none());
}

#[tokio::test(start_paused = true)]
async fn an_outage_beyond_the_deadline_is_an_expiry_that_names_its_error() {
    let world = World::new();
    let guard = world.acquire().await;
    let until = guard.deadline();
    world.fake.fail("renew", [Fault::Error(ErrorKind::Denied); 1_000]);
    let Lost::Expired { last_error: Some(error) } = guard.lost().await else {
        panic!("expired with an error")
    };
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert_eq!(world.now(), until);
    let tries = world.fake.calls("renew").len();
    assert!((10..=30).contains(&tries), "{tries} tries");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_or_taken_lease_is_lost_and_never_acquired_again() {
    let world = World::new();
    let guard = world.acquire().await;
    world.fake.delete();
    assert!(matches!(guard.lost().await, Lost::Gone));
    assert!(!guard.is_held() && world.fake.holder().is_none());
    assert_eq!(guard.release().await.expect("nothing to do"), Release::NotHeld);
    assert!(world.fake.calls("release").is_empty());

    let guard = world.acquire().await;
    world.fake.delete();
    let other = session(&world.node(2)).acquire().await.expect("acquired");
    let Lost::Superseded { by } = guard.lost().await else { panic!("superseded") };
    assert_eq!(by.fence(), other.fence());
    drop(guard);
    sleep(Duration::from_secs(60)).await;
    assert!(other.is_held(), "what another holds is left alone");
}

#[tokio::test(start_paused = true)]
async fn the_granted_ttl_counts_and_not_the_asked_one() {
    let world = World::new();
    let granted = Ttl::from_secs(4).expect("in range");
    world.fake.with(|state| state.granted_ttl = Some(granted));
    let guard = world.acquire().await;
    assert_eq!(guard.grant().ttl, granted);
    assert_eq!(guard.deadline(), world.now().plus(Duration::from_millis(3_600)));
    sleep(Duration::from_secs(60)).await;
    assert!(guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn an_answer_after_the_deadline_is_given_back_and_not_handed_out() {
    let world = World::new();
    world.fake.fail("acquire", [Fault::SlowAnswer(Duration::from_millis(900))]);
    let start = world.now();
    let acquiring = world.spawn_acquire(1);
    world.called("acquire", 1).await;
    // The answer comes when the store still holds the grant, and its holder may not act any more.
    world.suspend(TTL - Duration::from_millis(1_500));
    let guard = acquiring.await.expect("no panic");
    assert!(guard.is_held());
    assert_eq!(guard.fence().term.get(), 2);
    assert_eq!(world.fake.calls("release").len(), 1);
    assert!(world.now().since(start) < TTL, "released, not expired");
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_acquire_leaves_no_lease_behind() {
    let slow = Fault::SlowAnswer(Duration::from_secs(1));
    for fault in [slow, Fault::AnswerLost, Fault::AppliedError] {
        let world = World::new();
        world.fake.fail("acquire", [fault]);
        let acquiring = world.spawn_acquire(1);
        world.called("acquire", 1).await;
        assert!(world.fake.holder().is_some(), "granted already");
        let (cancelled, sent) = (world.now(), world.fake.calls("acquire").len());
        drop(acquiring);
        world.vacant().await;
        assert!(world.now().since(cancelled) <= TTL / 3, "released, not expired: {fault:?}");
        sleep(LONG).await;
        assert_eq!(world.fake.calls("acquire").len(), sent);
    }
}

#[tokio::test(start_paused = true)]
async fn a_candidate_that_is_cancelled_while_it_waits_acts_no_more() {
    let world = World::new();
    let guard = world.acquire().await;
    let waiting = world.spawn_acquire(2);
    world.called("acquire", 4).await;
    drop(waiting);
    let before = world.fake.calls("acquire").len();
    drop(guard);
    sleep(LONG).await;
    assert_eq!(world.fake.calls("acquire").len(), before);
    assert!(world.fake.holder().is_none());
}

#[tokio::test(start_paused = true)]
async fn trying_once_says_who_holds_it_or_leaves_nothing_behind() {
    let world = World::new();
    let guard = world.acquire().await;
    let other = session(&world.node(2));
    let TryAcquire::Held(record) = other.try_acquire().await.expect("answered") else {
        panic!("held")
    };
    assert_eq!(record.fence(), guard.fence());
    assert_eq!(guard.release().await.expect("released"), Release::Released);

    world.fake.fail("acquire", [Fault::AnswerLost, Fault::AppliedError, Fault::Hangs]);
    let error = other.try_acquire().await.expect_err("three lost replies");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    world.vacant().await;
    assert!(!world.fake.calls("release").is_empty(), "looked up and given back");

    world.fake.fail("acquire", [Fault::Error(ErrorKind::Denied)]);
    let error = other.acquire().await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Denied);
    let TryAcquire::Acquired(_guard) = other.try_acquire().await.expect("answered") else {
        panic!("free")
    };
}

#[tokio::test(start_paused = true)]
async fn a_term_that_went_back_is_an_error_and_its_grant_is_released() {
    let world = World::new();
    let session = session(&world.leases);
    for _ in 0..2 {
        let guard = session.acquire().await.expect("acquired");
        assert_eq!(guard.release().await.expect("released"), Release::Released);
    }
    // The store was restored from a backup.
    world.fake.with(|state| state.term = 1);
    let error = session.acquire().await.expect_err("the term went back");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("term=2 seen=2"), "{error}");
    assert!(world.fake.holder().is_none());
    // The failed try counted on: the next term is above all that were seen.
    assert!(session.acquire().await.expect("acquired").is_held());
}

#[tokio::test(start_paused = true)]
async fn a_release_waits_for_the_renewal_on_its_way() {
    let slow = Fault::Slow(Duration::from_millis(1_500));
    let late = Fault::SlowAnswer(Duration::from_millis(1_500));
    for fault in [slow, late, Fault::Hangs, Fault::AnswerLost] {
        let world = World::new();
        let guard = world.acquire().await;
        world.fake.fail("renew", [fault]);
        world.called("renew", 1).await;
        let tenure = guard.tenure();
        let release = guard.release();
        assert_eq!(release.await.expect("released"), Release::Released);
        assert!(matches!(tenure.lost().await, Lost::Released));
        assert_eq!(world.fake.with(|state| state.overlaps), 0);
        sleep(LONG).await;
        assert!(world.fake.holder().is_none());
        assert_eq!(world.fake.calls("renew").len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_guard_may_be_dropped_during_a_renewal() {
    let world = World::new();
    let guard = world.acquire().await;
    world.fake.fail("renew", [Fault::SlowAnswer(Duration::from_secs(1))]);
    world.called("renew", 1).await;
    let tenure = guard.tenure();
    drop(guard);
    assert!(!tenure.is_held(), "at once");
    assert!(matches!(tenure.lost().await, Lost::Released));
    world.vacant().await;
    assert_eq!(world.fake.with(|state| state.overlaps), 0);
}

#[tokio::test(start_paused = true)]
async fn nothing_renews_for_a_guard_that_was_dropped() {
    let world = World::new();
    let guard = world.acquire().await;
    world.fake.fail("renew", [Fault::SlowAnswer(Duration::from_millis(900))]);
    world.called("renew", 1).await;
    drop(guard);
    // The next renewal is due by the time this one is answered.
    world.suspend(Duration::from_millis(4_000));
    world.vacant().await;
    assert_eq!(world.fake.calls("renew").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_release_whose_answer_was_lost_is_released() {
    for fault in [Fault::AnswerLost, Fault::AppliedError] {
        let world = World::new();
        let guard = world.acquire().await;
        world.fake.fail("release", [fault]);
        assert_eq!(guard.release().await.expect("second try"), Release::Released);
        assert_eq!(world.fake.calls("release").len(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_is_tried_again_and_then_left_to_the_ttl() {
    let world = World::new();
    let guard = world.acquire().await;
    world.fake.fail("release", [Fault::Hangs]);
    assert_eq!(guard.release().await.expect("second try"), Release::Released);
    let guard = world.acquire().await;
    world.fake.fail("release", [Fault::Hangs, Fault::Hangs, Fault::Error(ErrorKind::Unavailable)]);
    assert_eq!(guard.release().await.expect_err("gave up").kind(), ErrorKind::Unavailable);
    world.vacant().await;
}

#[tokio::test(start_paused = true)]
async fn a_guard_may_be_dropped_outside_a_runtime() {
    let world = World::new();
    let guard = world.acquire().await;
    std::thread::spawn(move || drop(guard)).join().expect("no panic");
    world.vacant().await;
    world.leases.idle().await;
}

#[test]
fn an_acquire_outside_a_runtime_is_an_error() {
    let fake = Fake::new(Arc::new(crate::clock::BootClock::new()));
    let node = NodeId::new("node-1").expect("id");
    let leases = Leases::new(fake, node, Incarnation::random());
    let answer = leases.lease("jobs").expect("name").acquire().now_or_never();
    let error = answer.expect("at once").expect_err("no runtime");
    assert!(error.to_string().contains("Tokio runtime"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_lease_runs_out_like_a_crashed_holders() {
    let world = World::new();
    let guard = world.acquire().await;
    let tenure = guard.tenure();
    guard.abandon();
    assert!(!tenure.is_held());
    assert!(matches!(tenure.lost().await, Lost::Abandoned));
    let abandoned = world.now();
    let next = world.spawn_acquire(2).await.expect("no panic");
    assert!(world.now().since(abandoned) >= TTL && next.is_held());
    assert!(world.now().since(abandoned) <= TTL + Duration::from_secs(1));
    assert!(world.fake.calls("release").is_empty());
}

/// Notes when it is dropped.
struct Dropped(Arc<TestClock>, Arc<Mutex<Option<Moment>>>);

impl Drop for Dropped {
    fn drop(&mut self) {
        *self.1.lock().expect("no panic inside") = Some(self.0.now());
    }
}

#[tokio::test(start_paused = true)]
async fn work_is_dropped_at_the_deadline_and_before_the_release() {
    let world = World::new();
    let guard = world.acquire().await;
    let until = guard.deadline();
    world.fake.fail("renew", [Fault::Error(ErrorKind::Unavailable); 1_000]);
    let at = Arc::default();
    let dropped = Dropped(world.clock.clone(), Arc::clone(&at));
    let ran = guard.run(|_fence| async move {
        let _dropped = dropped;
        pending::<()>().await;
    });
    assert!(matches!(ran.await, RunOutcome::Lost(Lost::Expired { .. })));
    assert_eq!(*at.lock().expect("no panic inside"), Some(until));
    assert!(world.fake.holder().is_some(), "before another could hold it");
    world.vacant().await;
    assert!(world.fake.calls("release").iter().all(|sent| *sent >= until));
}

#[tokio::test(start_paused = true)]
async fn work_that_finishes_is_followed_by_the_release() {
    let world = World::new();
    let ran = world.acquire().await.run(|fence| async move {
        sleep(Duration::from_secs(100)).await;
        fence.term.get()
    });
    assert!(matches!(ran.await, RunOutcome::Finished(1)));
    assert!(world.fake.holder().is_none(), "released before the outcome is told");
}

#[tokio::test(start_paused = true)]
async fn panicking_work_is_reported_and_nothing_renews_for_it() {
    let world = World::new();
    let fake = world.fake.clone();
    let at = Arc::default();
    let dropped = Dropped(world.clock.clone(), Arc::clone(&at));
    let ran = world.acquire().await.run(|_fence| async move {
        let _dropped = dropped;
        sleep(Duration::from_secs(100)).await;
        panic!("the work has a bug");
    });
    let ran: RunOutcome<()> = ran.await;
    let RunOutcome::Panicked(payload) = ran else { panic!("reported") };
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"the work has a bug"));
    let unwound = at.lock().expect("no panic inside").expect("unwound");
    assert!(fake.calls("release").iter().all(|sent| *sent >= unwound));
    assert!(fake.holder().is_none());
    let renewals = fake.calls("renew").len();
    sleep(LONG).await;
    assert_eq!(fake.calls("renew").len(), renewals);
}

#[tokio::test(start_paused = true)]
async fn cancelled_work_is_dropped_before_the_release() {
    let world = World::new();
    let guard = world.acquire().await;
    let tenure = guard.tenure();
    let (started, has_started) = oneshot::channel();
    let held_at_drop = Arc::new(Mutex::new(None));
    let seen = HeldAtDrop(tenure, held_at_drop.clone());
    let running = spawn(guard.run(|_fence| async move {
        let _seen = seen;
        started.send(()).expect("awaited");
        pending::<()>().await;
    }));
    has_started.await.expect("started");
    drop(running);
    world.vacant().await;
    assert_eq!(*held_at_drop.lock().expect("no panic inside"), Some(true));
}

/// Notes whether the lease was still held when it was dropped.
struct HeldAtDrop(HeldLease, Arc<Mutex<Option<bool>>>);

impl Drop for HeldAtDrop {
    fn drop(&mut self) {
        *self.1.lock().expect("no panic inside") = Some(self.0.is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn the_state_shows_none_acquiring_and_held() {
    let world = World::new();
    let guard = world.acquire().await;
    let other = session(&world.node(2));
    let mut state = other.state();
    assert_eq!(*state.borrow_and_update(), LeaseState::Idle);
    let acquiring = spawn(async move { other.acquire().await });
    let holder = guard.grant().holder;
    let waiting = LeaseState::Acquiring(Some(holder));
    state.wait_for(|state| *state == waiting).await.expect("alive");
    drop(guard);
    let next = acquiring.await.expect("no panic").expect("acquired");
    assert_eq!(*state.borrow_and_update(), LeaseState::Held(next.fence()));
    drop(next);
    state.wait_for(|state| *state == LeaseState::Idle).await.expect("alive");
}

/// The watch shows the candidate's own grant before the store has answered for it.
#[tokio::test(start_paused = true)]
async fn the_state_never_names_the_candidate_itself_as_the_holder() {
    let world = World::new();
    let guard = world.acquire().await;
    let lost = [Fault::AppliedError, Fault::Error(ErrorKind::Unavailable)];
    let session = session(&world.node(2));
    let mut state = session.state();
    let acquiring = spawn(async move { session.acquire().await });
    state.wait_for(|state| matches!(state, LeaseState::Acquiring(Some(_)))).await.expect("alive");
    world.fake.fail("acquire", lost);
    drop(guard);
    let seen = spawn(async move {
        let own = NodeId::new("node-2").expect("id");
        let is_named = |state: &LeaseState| matches!(state, LeaseState::Acquiring(Some(holder)) if holder.node == own);
        let told = state.wait_for(|state| is_named(state) || matches!(state, LeaseState::Held(_)));
        told.await.map(|state| is_named(&state)).expect("alive")
    });
    let _guard = acquiring.await.expect("no panic").expect("acquired");
    assert!(!seen.await.expect("no panic"), "it named itself");
}

#[tokio::test(start_paused = true)]
async fn a_thousand_candidates_do_not_act_in_step() {
    let world = World::new();
    let guard = world.acquire().await;
    let (won, mut wins) = tokio::sync::mpsc::channel(1_000);
    let candidates: Vec<_> = (2..1_002)
        .map(|number| {
            let (session, won) = (session(&world.node(number)), won.clone());
            spawn(async move {
                let guard = session.acquire().await.expect("acquired");
                won.send(guard).await.expect("room");
            })
        })
        .collect();
    sleep(Duration::from_secs(60)).await;
    let start = world.fake.calls("acquire").len();
    sleep(Duration::from_secs(60)).await;
    let waiting = world.fake.calls("acquire").len() - start;
    assert!(waiting <= 1_000 * 60 * 10 / 18, "{waiting} requests while nothing changes");

    // A request takes a while, so that several candidates hear of the release before one has won.
    world.fake.fail("acquire", [Fault::Slow(Duration::from_millis(2)); 1_000]);
    let start = world.fake.calls("acquire").len();
    let released = world.now();
    assert_eq!(guard.release().await.expect("released"), Release::Released);
    let next = wins.recv().await.expect("one wins");
    assert!(world.now().since(released) <= Duration::from_millis(200));
    sleep(Duration::from_millis(100)).await;
    let calls = world.fake.calls("acquire").len() - start;
    assert!(calls <= 500, "{calls} requests for one release");
    assert!(next.is_held() && wins.try_recv().is_err());
    drop(candidates);
}

#[tokio::test(start_paused = true)]
async fn who_was_told_once_that_it_is_held_takes_no_older_term() {
    let world = World::new();
    for _ in 0..2 {
        let guard = world.acquire().await;
        assert_eq!(guard.release().await.expect("released"), Release::Released);
    }
    let guard = world.acquire().await;
    let other = session(&world.node(2));
    let told = other.try_acquire().await.expect("answered");
    assert!(matches!(told, TryAcquire::Held(_)), "{told:?}");
    assert_eq!(guard.release().await.expect("released"), Release::Released);
    // The store was restored from a backup.
    world.fake.with(|state| state.term = 1);
    let error = other.try_acquire().await.expect_err("the term went back");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[tokio::test(start_paused = true)]
async fn each_failed_try_is_reported_and_the_lease_is_watched_once() {
    let world = World::new();
    world.fake.fail("acquire", [Fault::Error(ErrorKind::Unavailable); 3]);
    let told = Arc::new(Mutex::new(Vec::new()));
    let tell = {
        let told = Arc::clone(&told);
        move |error: &Error| told.lock().expect("no panic inside").push(error.kind())
    };
    let builder = world.leases.lease("scheduler").expect("name").ttl(TTL).on_retry(tell);
    let guard = builder.build().expect("times").acquire().await.expect("acquired");
    assert!(guard.is_held());
    assert_eq!(*told.lock().expect("no panic inside"), [ErrorKind::Unavailable; 3]);
    assert_eq!(world.fake.calls("acquire").len(), 4);
    assert_eq!(world.fake.calls("watch").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_state_reports_each_change_of_the_holder_once() {
    let world = World::new();
    let guard = world.acquire().await;
    let waiting = session(&world.node(2));
    let mut state = waiting.state();
    let acquired = spawn(async move { waiting.acquire().await.expect("acquired") });
    let seen = Arc::new(Mutex::new(Vec::new()));
    let _seeing = {
        let seen = Arc::clone(&seen);
        spawn(async move {
            while state.changed().await.is_ok() {
                seen.lock().expect("no panic inside").push(state.borrow_and_update().clone());
            }
        })
    };
    // Several tries find the same holder.
    sleep(10 * TTL).await;
    assert!(world.fake.calls("acquire").len() > 2);
    let holder = guard.grant().holder;
    let take = || std::mem::take(&mut *seen.lock().expect("no panic inside"));
    let first = take();
    assert_eq!(first.last(), Some(&LeaseState::Acquiring(Some(holder))), "{first:?}");
    assert!(first.len() <= 2, "{first:?}");
    // The lease is free for as long as the next try is under way.
    world.fake.fail("acquire", [Fault::Slow(Duration::from_millis(10))]);
    assert_eq!(guard.release().await.expect("released"), Release::Released);
    let next = acquired.await.expect("no panic");
    sleep(Duration::from_millis(1)).await;
    assert_eq!(take(), [LeaseState::Acquiring(None), LeaseState::Held(next.fence())]);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_candidate_gives_back_no_grant_of_another_one() {
    let world = World::new();
    let guard = world.acquire().await;
    world.fake.fail("acquire", [Fault::Hangs]);
    let acquiring = world.spawn_acquire(2);
    world.called("acquire", 2).await;
    drop(acquiring);
    world.called("get", 1).await;
    sleep(TTL).await;
    assert_eq!(world.fake.calls("release").len(), 0);
    assert!(guard.is_held());
}
