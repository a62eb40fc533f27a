use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::stream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::types::{
    Address, Answer, AttemptId, Fence, Incarnation, NodeId, NodeInfo, NodeRecord, Origin, Request,
    RequestRecord, Revision, ShardCount, ShardMap, TableHeader, TableUid, Term, Ttl,
};

fn node(name: &str, incarnation: u128, revision: u64) -> NodeRecord {
    let info = NodeInfo::new(NodeId::new(name).expect("id"), Address::new("h:1").expect("address"))
        .with_incarnation(Incarnation::from_u128(incarnation));
    NodeRecord::new(info, Ttl::MIN, Revision::from_u64(revision))
}

fn map(uid: u128, version: u64) -> Arc<ShardMap> {
    let header = TableHeader::new(ShardCount::new(4).expect("count"));
    let fence = Fence::new(
        LeaseName::new("leader").expect("name"),
        Term::from_u64(1),
        AttemptId::from_u128(1),
        Origin::new("test"),
    );
    let mut map = ShardMap::empty(header, TableUid::from_u128(uid));
    for next in 0..version {
        let mut edit = map.edit();
        edit.set_annex(next.to_be_bytes().to_vec().into()).expect("short");
        map = edit.finish(fence.clone()).expect("a next version");
    }
    Arc::new(map)
}

fn differences<E: Watchable>(events: Vec<E>) -> Vec<E> {
    let mut view = E::View::default();
    let mut out = Vec::new();
    for event in events {
        out.clear();
        event.apply(&mut view, &mut out);
    }
    out
}

/// A watcher whose subscriptions are the given ones, each sent by the test, in order.
fn scripted<E: Watchable>(
    subscriptions: Vec<mpsc::Receiver<Result<E>>>,
) -> (Watcher<E>, Arc<AtomicUsize>) {
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    let mut subscriptions = subscriptions.into_iter();
    let watcher = Watcher::with_seed(
        move || {
            count.fetch_add(1, Ordering::SeqCst);
            match subscriptions.next() {
                Some(events) => stream::unfold(events, |mut events| async move {
                    events.recv().await.map(|event| (event, events))
                })
                .boxed(),
                None => stream::pending().boxed(),
            }
        },
        1,
    );
    (watcher, opened)
}

#[test]
fn a_snapshot_after_a_gap_tells_who_joined_changed_and_went() {
    let before = vec![node("a", 1, 1), node("b", 1, 2), node("c", 1, 3), node("d", 1, 4)];
    let mut same = node("a", 1, 1);
    same.may_expire_in = Some(Duration::from_secs(1));
    let after = vec![same, node("b", 1, 9), node("c", 2, 10)];
    let told = differences(vec![NodeEvent::Snapshot(before), NodeEvent::Snapshot(after)]);
    let d = node("d", 1, 4).info;
    assert_eq!(
        told,
        [
            NodeEvent::Updated(node("b", 1, 9)),
            NodeEvent::Joined(node("c", 2, 10)),
            NodeEvent::Expired { node: d.id, incarnation: d.incarnation, judged: false },
        ]
    );
}

#[test]
fn a_departure_of_an_older_run_is_not_the_newer_ones() {
    let old = node("a", 1, 1).info;
    let left = NodeEvent::Left { node: old.id, incarnation: old.incarnation };
    let joined = NodeEvent::Joined(node("a", 2, 2));
    assert_eq!(differences(vec![joined, left.clone()]), []);
    assert_eq!(differences(vec![NodeEvent::Joined(node("a", 1, 1)), left.clone()]), [left]);
}

#[test]
fn a_map_never_goes_back_within_one_uid() {
    let changed = PlacementEvent::Changed;
    let snapshot = |map| PlacementEvent::Snapshot(Some(map));
    assert_eq!(differences(vec![snapshot(map(1, 5)), snapshot(map(1, 4))]), []);
    assert_eq!(differences(vec![snapshot(map(1, 5)), changed(map(1, 5))]), []);
    let told = differences(vec![snapshot(map(1, 5)), changed(map(1, 4)), snapshot(map(1, 6))]);
    assert_eq!(told, [changed(map(1, 6))]);
    // Another life begins anew, and a table may be deleted.
    assert_eq!(differences(vec![snapshot(map(1, 5)), changed(map(2, 0))]), [snapshot(map(2, 0))]);
    let gone = PlacementEvent::Snapshot(None);
    assert_eq!(differences(vec![snapshot(map(1, 5)), gone.clone()]), [gone]);
}

#[test]
fn requests_and_answers_missed_in_a_gap_are_told_once() {
    let request = |id| {
        let from = NodeId::new("a").expect("id");
        Request::new(from, Duration::from_secs(1), "do")
            .expect("request")
            .with_id(crate::types::RequestId::from_u128(id))
    };
    let answer = Answer::new("done").expect("answer");
    let record = |id, answer| RequestRecord::new(request(id), answer);
    let told = differences(vec![
        RequestEvent::Snapshot(vec![record(1, None), record(2, None)]),
        RequestEvent::Snapshot(vec![record(2, Some(answer.clone())), record(3, None)]),
    ]);
    assert_eq!(
        told,
        [
            RequestEvent::Answered(request(2).id, answer.clone()),
            RequestEvent::Submitted(request(3)),
            RequestEvent::Gone(request(1).id),
        ]
    );
    let repeated = RequestEvent::Answered(request(2).id, answer.clone());
    let snapshot = RequestEvent::Snapshot(vec![record(2, Some(answer))]);
    assert_eq!(differences(vec![snapshot, repeated]), []);
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_told_once_and_its_changes_follow() {
    let (first, events) = mpsc::channel(8);
    let (second, events_2) = mpsc::channel(8);
    let (third, events_3) = mpsc::channel(8);
    let (mut watcher, opened) = scripted(vec![events, events_2, events_3]);
    first.try_send(Ok(NodeEvent::Snapshot(vec![node("a", 1, 1)]))).expect("room");
    assert!(matches!(watcher.next().await, Watched::Event(NodeEvent::Snapshot(nodes))
        if nodes.len() == 1));
    first.try_send(Err(Error::unavailable("watch", "cut"))).expect("room");
    assert!(matches!(watcher.next().await, Watched::Disconnected(error) if error.is_retryable()));
    second.try_send(Err(Error::unavailable("watch", "still cut"))).expect("room");
    third.try_send(Ok(NodeEvent::Snapshot(vec![]))).expect("room");
    assert!(matches!(watcher.next().await, Watched::Reconnected));
    assert!(matches!(watcher.next().await, Watched::Event(NodeEvent::Expired { .. })));
    assert_eq!(opened.load(Ordering::SeqCst), 3);
}

#[tokio::test(start_paused = true)]
async fn what_an_operator_must_mend_is_tried_once_a_minute() {
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    let mut watcher: Watcher<LeaseEvent> = Watcher::with_seed(
        move || {
            count.fetch_add(1, Ordering::SeqCst);
            stream::iter([Err(Error::new(ErrorKind::Denied, "watch"))]).boxed()
        },
        1,
    );
    assert!(matches!(watcher.next().await, Watched::Disconnected(_)));
    let more = tokio::time::timeout(Duration::from_secs(600), watcher.next()).await;
    assert!(more.is_err(), "the same outage is told once");
    let tries = opened.load(Ordering::SeqCst);
    assert!((9..=11).contains(&tries), "{tries} tries in ten minutes");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_breaks_each_subscription_is_not_hammered() {
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    let _watcher: Watcher<LeaseEvent> = Watcher::with_seed(
        move || {
            count.fetch_add(1, Ordering::SeqCst);
            stream::iter([Ok(LeaseEvent::Snapshot(None)), Err(Error::unavailable("watch", "cut"))])
                .boxed()
        },
        1,
    );
    tokio::time::sleep(Duration::from_secs(60)).await;
    let tries = opened.load(Ordering::SeqCst);
    assert!((12..=40).contains(&tries), "{tries} tries in a minute");
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_gets_a_snapshot_while_the_subscription_is_read_on() {
    let (sender, events) = mpsc::channel(1);
    let (mut watcher, _) = scripted(vec![events]);
    sender.send(Ok(NodeEvent::Snapshot(vec![]))).await.expect("read");
    // The sender gets rid of all of it: the task reads although nobody polls the watcher.
    for revision in 0..3 * WATCH_BUFFER_MAX as u64 {
        sender.send(Ok(NodeEvent::Updated(node("a", 1, revision)))).await.expect("read");
    }
    sender.send(Err(Error::unavailable("watch", "cut"))).await.expect("read");
    sender.closed().await;
    let (mut snapshots, mut events) = (0, 0);
    let mut known = None;
    let last = loop {
        match watcher.next().await {
            Watched::Event(NodeEvent::Snapshot(nodes)) => {
                snapshots += 1;
                known = nodes.into_iter().next();
            }
            Watched::Event(NodeEvent::Updated(node)) => known = Some(node),
            other => break other,
        }
        events += 1;
    };
    assert!(matches!(last, Watched::Disconnected(_)));
    assert_eq!(snapshots, 1, "the backlog was replaced");
    assert!(events <= WATCH_BUFFER_MAX);
    assert_eq!(known, Some(node("a", 1, 3 * WATCH_BUFFER_MAX as u64 - 1)), "nothing was lost");
}

#[test]
fn a_backlog_of_outages_stays_bounded_and_ends_right() {
    let mut inbox = Inbox::default();
    inbox.event(LeaseEvent::Snapshot(None));
    inbox.away(Error::unavailable("watch", "cut"));
    while inbox.pop().is_some() {}
    for _ in 0..WATCH_BUFFER_MAX {
        inbox.event(LeaseEvent::Snapshot(None));
        inbox.away(Error::unavailable("watch", "cut"));
        assert!(inbox.queue.len() <= WATCH_BUFFER_MAX);
    }
    assert!(matches!(inbox.pop(), Some(Watched::Reconnected)));
    let mut last = None;
    while let Some(item) = inbox.pop() {
        last = Some(item);
    }
    assert!(matches!(last, Some(Watched::Disconnected(_))));
}

#[tokio::test(start_paused = true)]
async fn a_panicking_subscription_is_an_outage_like_any_other() {
    let mut first = true;
    let mut watcher: Watcher<LeaseEvent> = Watcher::with_seed(
        move || {
            assert!(!std::mem::take(&mut first), "the backend has a bug");
            stream::iter([Ok(LeaseEvent::Snapshot(None))]).chain(stream::pending()).boxed()
        },
        1,
    );
    assert!(matches!(watcher.next().await, Watched::Disconnected(error)
        if error.kind() == ErrorKind::Internal));
    assert!(matches!(watcher.next().await, Watched::Reconnected));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_watcher_ends_its_subscription() {
    let dropped = CancellationToken::new();
    let guard = dropped.clone().drop_guard();
    let mut subscription = Some(stream::pending().map(move |event| {
        let _guard = &guard;
        event
    }));
    let watcher: Watcher<LeaseEvent> =
        Watcher::new(move || subscription.take().expect("one subscription").boxed());
    assert!(poll_fn(|cx| Poll::Ready(watcher.shared.poll(cx).is_pending())).await);
    tokio::task::yield_now().await;
    drop(watcher);
    dropped.cancelled().await;
}

#[test]
fn a_backlog_that_holds_a_whole_outage_tells_no_end_of_one_that_nobody_heard_of() {
    let mut inbox = Inbox::default();
    inbox.event(NodeEvent::Snapshot(vec![node("a", 1, 0)]));
    while inbox.pop().is_some() {}
    inbox.away(Error::unavailable("watch", "cut"));
    let most = WATCH_BUFFER_MAX as u64 - 1;
    (1..=most).for_each(|revision| inbox.event(NodeEvent::Updated(node("a", 1, revision))));
    let first = inbox.pop();
    let newest = |nodes: &[NodeRecord]| nodes == [node("a", 1, most)];
    assert!(
        matches!(&first, Some(Watched::Event(NodeEvent::Snapshot(nodes))) if newest(nodes)),
        "{first:?}"
    );
    assert!(inbox.pop().is_none());
    // Of one that was told and goes on no end is told either.
    inbox.away(Error::unavailable("watch", "cut"));
    assert!(matches!(inbox.pop(), Some(Watched::Disconnected(_))));
    for _ in 0..=WATCH_BUFFER_MAX {
        inbox.away(Error::new(ErrorKind::Denied, "watch"));
        inbox.away(Error::unavailable("watch", "cut"));
    }
    while let Some(item) = inbox.pop() {
        assert!(!matches!(item, Watched::Reconnected), "it is still away");
    }
}

#[tokio::test(start_paused = true)]
async fn a_watcher_is_a_stream_of_what_it_tells() {
    let (first, events) = mpsc::channel(8);
    let (mut watcher, _opened) = scripted(vec![events]);
    first.try_send(Ok(LeaseEvent::Snapshot(None))).expect("room");
    let told = StreamExt::next(&mut watcher).await;
    assert!(matches!(told, Some(Watched::Event(LeaseEvent::Snapshot(None)))), "{told:?}");
}
