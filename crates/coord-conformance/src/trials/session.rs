//! Core's lease session over the backend: it keeps what it holds, and stops in time.

use std::sync::Arc;
use std::time::Duration;

use coord_core::session::{LeaseGuard, LeaseSession, Leases, Lost};
use coord_core::{
    BootClock, Claim, Clock, Incarnation, LeaseName, NodeId, Publish, Release, ShardMap, TableName,
    TokioClock, Version,
};
use futures::FutureExt as _;
use futures::future::{Either, join, join_all, select};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::placement::{claim, claim_of, next_map, table_name};
use crate::case::{Done, Stop, cases, ensure, want};
use crate::cx::{Client, Cx};
use crate::faults::{Fault, Faults};
use crate::history::{Recorder, What};

cases! { "session":
    /// A session keeps its lease for as long as it wants, and its release hands it over at once.
    a_session_keeps_its_lease => ["session", "lease-one-holder"];
    /// The lost replies of an acquire and of a renewal cost nothing: one grant, one term.
    lost_replies_cost_nothing => ["session", "scenario-k", "P4"];
    /// A cut that is shorter than the TTL is no loss.
    a_short_cut_is_no_loss => ["session-retries", "scenario-e", "P3"];
    /// Cut off for longer, the holder stops at its own deadline, before another one holds the lease.
    a_long_cut_ends_the_tenure_in_time => ["session-deadline", "scenario-c", "P1", "P5"];
    /// Replies that come later than half of the TTL prolong nothing.
    late_replies_prolong_nothing => ["session-deadline", "P1"];
    /// The write that a holder made before it was paused, delivered after its successor's claim, is
    /// fenced, and the holder stays lost.
    a_paused_holders_write_is_fenced => ["session-deadline", "scenario-d", "P21"];
    /// A cancelled acquire leaves no lease behind, also when the store had granted it already.
    a_cancelled_acquire_leaves_nothing => ["session-cancel", "dropped-calls", "P4"];
    /// Three nodes, any faults: tenures never overlap, terms rise, each end is told once, and no update
    /// is lost.
    faults_never_make_two_holders => ["session", "session-deadline", "table-fence", "P1", "P5", "P21"];
}

/// The clock that sessions of this trial read.
fn clock(cx: &Cx) -> Arc<dyn Clock> {
    if cx.profile.paused { Arc::new(TokioClock::new()) } else { Arc::new(BootClock::new()) }
}

/// A session of a node for the lease that all of these trials are about.
fn session(cx: &Cx, client: &Client, node: &str, clock: &Arc<dyn Clock>) -> Done<LeaseSession> {
    let leases = Leases::new(client.lease.clone(), NodeId::new(node)?, Incarnation::random());
    Ok(leases.with_clock(Arc::clone(clock)).lease("jobs")?.ttl(cx.ttl().get()).build()?)
}

/// Records whether a guard holds by now.
fn note(recorder: &Recorder, who: &str, guard: &LeaseGuard) {
    let (until, fence) = (guard.deadline(), guard.fence());
    let held = guard.is_held();
    recorder.record(who, if held { What::Holds { fence, until } } else { What::Lapsed { fence } });
}

/// Records how the tenure ended.
fn note_end(recorder: &Recorder, who: &str, guard: &LeaseGuard, how: &str) {
    recorder.record(who, What::Ended { fence: guard.fence(), how: how.to_owned() });
}

/// Ends the trial if the history breaks a rule.
fn is_right(recorder: &Recorder) -> Done {
    let wrong = recorder.history().check();
    let text: Vec<String> = wrong.iter().map(ToString::to_string).collect();
    ensure!(wrong.is_empty(), "the history breaks {} rules: {}", wrong.len(), text.join("; "));
    Ok(())
}

async fn a_session_keeps_its_lease(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let clock = clock(cx);
    let recorder = Recorder::new(Arc::clone(&clock));
    let guard = session(cx, &client, "node-1", &clock)?.acquire().await?;
    let rival = session(cx, &other, "node-2", &clock)?;
    let ttl = guard.grant().ttl;
    let hold = async {
        for _ in 0..12 {
            note(&recorder, "node-1", &guard);
            ensure!(guard.is_held(), "lost: {:?}", guard.ended());
            cx.sleep_percent(ttl, 25).await;
        }
        let tenure = guard.tenure();
        note_end(&recorder, "node-1", &guard, "released");
        let released = clock.now();
        let outcome = guard.release().await?;
        ensure!(outcome == Release::Released, "released what was not held");
        ensure!(matches!(tenure.lost().await, Lost::Released), "lost: {:?}", tenure.ended());
        Done::Ok(released)
    };
    let wait = async {
        let guard = rival.acquire().await?;
        note(&recorder, "node-2", &guard);
        Done::Ok((guard, clock.now()))
    };
    let (released, next) = join(hold, wait).await;
    let (released, (next, granted)) = (released?, next?);
    let gap = granted.since(released);
    ensure!(gap <= cx.soon(), "the next one held the lease {gap:?} after the release");
    is_right(&recorder)?;
    ensure!(next.release().await? == Release::Released, "the new tenure ended by itself");
    Ok(())
}

async fn lost_replies_cost_nothing(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = client.faults(&[Fault::DropReply])?;
    let clock = clock(cx);
    faults.inject(Fault::DropReply).await?;
    let guard = session(cx, &client, "node-1", &clock)?.acquire().await?;
    faults.heal().await?;
    let lease = LeaseName::new("jobs")?;
    let first = other.lease.get(&lease).await?.map(|record| record.fence());
    ensure!(first.as_ref() == Some(&guard.fence()), "the store shows {first:?}");
    for _ in 0..3 {
        faults.inject(Fault::DropReply).await?;
        cx.sleep_percent(guard.grant().ttl, 50).await;
        ensure!(guard.is_held(), "a lost reply made it lost: {:?}", guard.ended());
    }
    faults.heal().await?;
    let last = other.lease.get(&lease).await?.map(|record| record.fence());
    ensure!(last == first, "there was a second grant: {last:?}");
    ensure!(guard.release().await? == Release::Released, "released what was not held");
    Ok(())
}

async fn a_short_cut_is_no_loss(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::Cut])?;
    let guard = session(cx, &client, "node-1", &clock(cx))?.acquire().await?;
    let fence = guard.fence();
    // Less than half of the TTL, so that a renewal may have been due right before and right after.
    for _ in 0..3 {
        faults.inject(Fault::Cut).await?;
        cx.sleep_percent(guard.grant().ttl, 40).await;
        faults.heal().await?;
        cx.sleep_percent(guard.grant().ttl, 60).await;
        ensure!(guard.is_held(), "a short cut made it lost: {:?}", guard.ended());
    }
    ensure!(guard.fence() == fence, "the fence changed");
    ensure!(guard.release().await? == Release::Released, "released what was not held");
    Ok(())
}

async fn a_long_cut_ends_the_tenure_in_time(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = client.faults(&[Fault::Cut])?;
    let clock = clock(cx);
    let recorder = Recorder::new(Arc::clone(&clock));
    let guard = session(cx, &client, "node-1", &clock)?.acquire().await?;
    let rival = session(cx, &other, "node-2", &clock)?;
    cx.sleep_percent(guard.grant().ttl, 60).await;
    faults.inject(Fault::Cut).await?;
    note(&recorder, "node-1", &guard);
    let deadline = guard.deadline();
    let hold = async {
        let lost = guard.lost().await;
        let at = clock.now();
        ensure!(!guard.is_held(), "told that it is lost, and still held");
        note_end(&recorder, "node-1", &guard, lost.as_str());
        ensure!(matches!(lost, Lost::Expired { .. }), "cut off, and told {lost}");
        let late = at.since(deadline);
        ensure!(late <= cx.soon(), "told {late:?} after the deadline");
        Done::Ok(())
    };
    let wait = async {
        let guard = rival.acquire().await?;
        note(&recorder, "node-2", &guard);
        Done::Ok((guard, clock.now()))
    };
    let (held, next) = join(hold, wait).await;
    held?;
    let (next, granted) = next?;
    ensure!(granted >= deadline, "the next one held the lease before the deadline");
    is_right(&recorder)?;
    faults.heal().await?;
    ensure!(!guard.is_held(), "healing revived what was lost");
    ensure!(next.release().await? == Release::Released, "the new tenure ended by itself");
    Ok(())
}

async fn late_replies_prolong_nothing(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::Delay(Duration::ZERO)])?;
    let clock = clock(cx);
    let sent = clock.now();
    let guard = session(cx, &client, "node-1", &clock)?.acquire().await?;
    let ttl = guard.grant().ttl.get();
    ensure!(guard.deadline() <= sent.plus(ttl), "the deadline counts from the reply");
    // The store applies each renewal at once, so that it would be right to go on, if one knew.
    faults.inject(Fault::Delay(ttl * 6 / 10)).await?;
    let from = guard.deadline();
    let lost = guard.lost().await;
    ensure!(!guard.is_held(), "told that it is lost, and still held");
    ensure!(matches!(lost, Lost::Expired { .. }), "no reply came, and it was told {lost}");
    let late = clock.now().since(from);
    ensure!(late <= cx.soon(), "it ended {late:?} after the deadline");
    faults.heal().await?;
    sleep(ttl).await;
    ensure!(!guard.is_held(), "a late reply revived what was lost");
    Ok(())
}

async fn a_paused_holders_write_is_fenced(cx: &Cx) -> Done {
    let (old, new) = (cx.open().await?, cx.open().await?);
    let faults = old.faults(&[Fault::Pause])?;
    let (clock, name) = (clock(cx), table_name("orders")?);
    let guard = session(cx, &old, "node-1", &clock)?.acquire().await?;
    let fence = guard.fence();
    let map = next_map(&claim(&old, &name, &fence).await?.map, &fence, 1)?;
    let rival = session(cx, &new, "node-2", &clock)?;
    faults.inject(Fault::Pause).await?;
    let write = old.placement.publish(&name, &fence, Version::ZERO, &map);
    let take_over = async {
        let guard = rival.acquire().await?;
        claim(&new, &name, &guard.fence()).await?;
        faults.heal().await?;
        Done::Ok(guard)
    };
    let (written, next) = join(write, take_over).await;
    let next = next?;
    // A proxy may have given up on the request; then there is nothing that could have been written.
    if let Ok(outcome) = written {
        let by = want!(outcome, Publish::Fenced(by) => by, "the late write is fenced");
        ensure!(by.as_ref() == Some(&next.fence()), "fenced by {by:?}");
    }
    let again = old.placement.publish(&name, &fence, Version::ZERO, &map).await?;
    want!(again, Publish::Fenced(_) => (), "the write, repeated, is fenced");
    ensure!(!guard.is_held(), "the old holder still holds");
    cx.sleep_percent(next.grant().ttl, 100).await;
    ensure!(!guard.is_held(), "the old holder came back");
    ensure!(next.is_held(), "the old holder's late requests ended the new tenure");
    ensure!(next.release().await? == Release::Released, "the new tenure ended by itself");
    Ok(())
}

async fn a_cancelled_acquire_leaves_nothing(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = client.faults(&[Fault::Delay(Duration::ZERO)])?;
    let session = session(cx, &client, "node-1", &clock(cx))?;
    let ttl = cx.ttl().get();
    // One of the replies that it takes: cancelled while the last of them is on its way.
    faults.inject(Fault::Delay(ttl / 10)).await?;
    let lease = LeaseName::new("jobs")?;
    let granted = || async { Ok(other.lease.get(&lease).await?.map(drop)) };
    let granted = cx.until("the store has granted it", cx.soon() * 2, granted);
    match select(session.acquire().boxed(), granted.boxed()).await {
        Either::Left(_) => return Err(Stop::Failed("it was there before it was granted".into())),
        Either::Right((granted, acquire)) => {
            drop(acquire);
            granted?;
        }
    }
    faults.heal().await?;
    let free = || async { Ok(other.lease.get(&lease).await?.is_none().then_some(())) };
    cx.until("the lease is free long before its ttl", ttl * 8 / 10, free).await
}

/// One node of the trial with random faults.
struct Node<'a> {
    name: String,
    client: Client,
    session: LeaseSession,
    recorder: &'a Recorder,
    table: &'a TableName,
    /// How long it waits for one answer.
    patience: Duration,
}

impl Node<'_> {
    /// Leads whenever it can, until told to stop.
    async fn live(&self, mut stop: watch::Receiver<bool>) -> Done {
        loop {
            let guard = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
                guard = self.session.acquire() => guard?,
            };
            self.lead(guard, &mut stop).await?;
        }
    }

    /// Writes for as long as it holds the lease, or gives it up after some writes.
    async fn lead(&self, guard: LeaseGuard, stop: &mut watch::Receiver<bool>) -> Done {
        const WRITES: u32 = 30;
        note(self.recorder, &self.name, &guard);
        let mut map = None;
        for _ in 0..WRITES {
            if !guard.is_held() || *stop.borrow() {
                break;
            }
            map = timeout(self.patience, self.write(&guard, map)).await.unwrap_or(Ok(None))?;
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => {}
                _ = guard.lost() => {}
                () = sleep(self.patience / 2) => {}
            }
            note(self.recorder, &self.name, &guard);
        }
        let how = guard.ended().map_or("released", |lost| lost.as_str());
        note_end(self.recorder, &self.name, &guard, how);
        // A release that fails leaves the lease to its TTL.
        let _ = guard.release().await;
        Ok(())
    }

    /// Publishes the next version, after a claim where it does not know the newest.
    async fn write(
        &self,
        guard: &LeaseGuard,
        newest: Option<Arc<ShardMap>>,
    ) -> Done<Option<Arc<ShardMap>>> {
        let fence = guard.fence();
        let base = match newest {
            Some(map) => map,
            None => match self.client.placement.claim(&claim_of(self.table, &fence)?).await {
                Ok(Claim::Claimed(table)) => table.map,
                _ => return Ok(None),
            },
        };
        let tag = u32::try_from(base.version().get() % 500).unwrap_or_default();
        let map = next_map(&base, &fence, tag)?;
        let placement = &self.client.placement;
        match placement.publish(self.table, &fence, base.version(), &map).await {
            Ok(Publish::Published(_)) => {
                self.recorder.record(&self.name, What::published(self.table, &map));
                Ok(Some(map))
            }
            _ => Ok(None),
        }
    }
}

/// Makes one fault after the other, each for a while, and heals them all at the end.
async fn disturb(ttl: Duration, faults: &[Arc<dyn Faults>]) -> Done {
    const ROUNDS: usize = 10;
    let mut rng = StdRng::seed_from_u64(7);
    let kinds = [Fault::Cut, Fault::Pause, Fault::Delay(ttl * 3 / 10), Fault::DropReply];
    for round in 0..ROUNDS {
        let victim = &faults[rng.random_range(0..faults.len())];
        let fault = kinds[round % kinds.len()];
        if victim.supports(fault) {
            victim.inject(fault).await?;
        }
        sleep(ttl * rng.random_range(20..150) / 100).await;
        victim.heal().await?;
    }
    Ok(())
}

async fn faults_never_make_two_holders(cx: &Cx) -> Done {
    let clock = clock(cx);
    let (recorder, table) = (Recorder::new(Arc::clone(&clock)), table_name("orders")?);
    let patience = cx.ttl().get() / 10;
    let (mut nodes, mut faults) = (Vec::new(), Vec::new());
    for n in 1..=3 {
        let client = cx.open().await?;
        faults.push(client.faults(&[Fault::Cut])?);
        let name = format!("node-{n}");
        let session = session(cx, &client, &name, &clock)?;
        let (recorder, table) = (&recorder, &table);
        nodes.push(Node { name, client, session, recorder, table, patience });
    }
    let stop = watch::Sender::new(false);
    let lives = join_all(nodes.iter().map(|node| node.live(stop.subscribe())));
    let trouble = async {
        let done = disturb(cx.ttl().get(), &faults).await;
        stop.send_replace(true);
        done
    };
    let (lives, trouble) = join(lives, trouble).await;
    trouble?;
    lives.into_iter().collect::<Done<Vec<()>>>()?;
    let reader = cx.open().await?;
    let newest = reader.placement.load(&table).await?;
    let newest = want!(newest, Some(table) => table.map, "somebody led, and wrote");
    recorder.record("reader", What::read(&table, &newest));
    let history = recorder.history();
    let count = |wanted: fn(&What) -> bool| {
        history.entries().iter().filter(|entry| wanted(&entry.what)).count()
    };
    let (ends, writes) = (
        count(|what| matches!(what, What::Ended { .. })),
        count(|what| matches!(what, What::Published(..))),
    );
    ensure!(ends >= 2 && writes >= 2, "{ends} tenures and {writes} writes show nothing");
    is_right(&recorder)
}
