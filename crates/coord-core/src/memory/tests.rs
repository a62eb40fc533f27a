use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::time::{Instant, advance};

use super::*;
use crate::types::*;
use crate::{
    Acquire, Answered, Claim, Effect, Evict, Heartbeat, LeaseEvent, NodeEvent, Page,
    PlacementEvent, Publish, Register, Release, Renew, Replace, RequestEvent,
};

fn backend() -> MemoryBackend {
    MemoryBackend::isolated(ClusterName::new("orders").unwrap())
}

fn lease(name: &str) -> LeaseName {
    LeaseName::new(name).unwrap()
}

fn table(name: &str) -> TableName {
    TableName::new(name).unwrap()
}

fn node(id: &str) -> NodeInfo {
    NodeInfo::new(NodeId::new(id).unwrap(), Address::new("host:1").unwrap())
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn request(name: &str, node: &str, ttl: u64) -> AcquireRequest {
    let node = NodeId::new(node).unwrap();
    let holder = Holder::new(node, Incarnation::random(), AttemptId::random());
    AcquireRequest::new(lease(name), holder, Ttl::from_secs(ttl).unwrap())
}

async fn acquire(backend: &MemoryBackend, request: &AcquireRequest) -> Grant {
    match backend.lease().try_acquire(request).await.unwrap() {
        Acquire::Acquired(grant) => grant,
        Acquire::Held(record) => panic!("held by {record:?}"),
    }
}

async fn register(backend: &MemoryBackend, node: &NodeInfo, ttl: u64) -> Registration {
    let ttl = Ttl::from_secs(ttl).unwrap();
    match backend.discovery().register(node, ttl, Replace::Yes).await.unwrap() {
        Register::Registered(held) => held,
        Register::Duplicate(record) => panic!("duplicate of {record:?}"),
    }
}

async fn claim(backend: &MemoryBackend, name: &TableName, fence: &Fence) -> Claim {
    let header = TableHeader::new(ShardCount::new(8).unwrap());
    let request = ClaimRequest::new(name.clone(), fence.clone(), header);
    backend.placement().claim(&request).await.unwrap()
}

async fn claimed(backend: &MemoryBackend, name: &TableName, fence: &Fence) -> Arc<ShardMap> {
    match claim(backend, name, fence).await {
        Claim::Claimed(table) => table.map,
        other => panic!("{other:?}"),
    }
}

fn next_map(map: &ShardMap, fence: &Fence, annex: &'static str) -> Arc<ShardMap> {
    let mut edit = map.edit();
    edit.set_annex(Bytes::from_static(annex.as_bytes())).unwrap();
    Arc::new(edit.finish(fence.clone()).unwrap())
}

async fn publish(backend: &MemoryBackend, name: &TableName, map: &Arc<ShardMap>) -> Publish {
    let expected = Version::new(map.version().get() - 1);
    backend.placement().publish(name, map.writer().unwrap(), expected, map).await.unwrap()
}

/// The next event; a watch that has none within a day of paused time hangs.
async fn next<E>(watch: &mut BoxStream<'static, Result<E>>) -> Result<E> {
    tokio::time::timeout(secs(100_000), watch.next()).await.expect("an event").expect("no end")
}

#[tokio::test(start_paused = true)]
async fn the_same_attempt_gets_the_same_grant_and_any_other_waits() {
    let backend = backend();
    let asked = request("jobs", "a", 10);
    let first = acquire(&backend, &asked).await;
    advance(secs(6)).await;
    let again = acquire(&backend, &asked).await;
    assert_eq!((first.term, first.fence()), (again.term, again.fence()));
    advance(secs(6)).await;

    let other = request("jobs", "a", 10);
    let Acquire::Held(record) = backend.lease().try_acquire(&other).await.unwrap() else {
        panic!("two holders")
    };
    assert_eq!((record.term, record.may_expire_in), (first.term, Some(secs(4))));
    advance(secs(4)).await;
    assert!(acquire(&backend, &other).await.term > first.term);
    let lost = backend.lease().renew(&first).await.unwrap();
    assert!(matches!(lost, Renew::Lost(Some(by)) if by.holder == other.holder));
}

#[tokio::test(start_paused = true)]
async fn a_reclaim_takes_over_its_own_nodes_grant_only() {
    let backend = backend();
    let former = acquire(&backend, &request("jobs", "a", 10)).await;
    let stranger = request("jobs", "b", 10).with_reclaim(Reclaim::FormerProcessIsDead);
    assert!(matches!(backend.lease().try_acquire(&stranger).await.unwrap(), Acquire::Held(_)));
    let restarted = request("jobs", "a", 10).with_reclaim(Reclaim::FormerProcessIsDead);
    let grant = acquire(&backend, &restarted).await;
    assert!(grant.term > former.term);
    assert_eq!(backend.lease().release(&former).await.unwrap(), Release::NotHeld);
    assert_eq!(backend.lease().release(&grant).await.unwrap(), Release::Released);
    assert_eq!(backend.lease().get(&lease("jobs")).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn terms_rise_with_the_era_and_over_the_life_of_a_shared_store() {
    let cluster = ClusterName::new("terms-rise").unwrap();
    let first = MemoryBackend::open(cluster.clone());
    let term = acquire(&first, &request("jobs", "a", 10)).await.term;
    assert!(first.lease().get(&lease("jobs")).await.unwrap().is_some());
    drop(first);

    let second = MemoryBackend::open(cluster.clone());
    assert_eq!(second.lease().get(&lease("jobs")).await.unwrap(), None);
    let asked = request("jobs", "a", 10);
    let grant = acquire(&second, &asked).await;
    assert!(grant.term > term);
    assert_eq!(acquire(&MemoryBackend::open(cluster), &asked).await.term, grant.term);

    assert!(second.delete_lease(&lease("jobs")));
    second.rewind_terms(0);
    assert!(acquire(&second, &request("jobs", "b", 10)).await.term < grant.term);
    second.delete_lease(&lease("jobs"));
    let raised = second.with_era(Era::new(1).unwrap());
    assert!(acquire(&raised, &request("jobs", "b", 10)).await.term > grant.term);
}

#[tokio::test(start_paused = true)]
async fn a_lease_watch_tells_of_an_expiry_when_it_happens() {
    let backend = backend();
    let mut watch = backend.lease().watch(&lease("jobs"));
    assert_eq!(next(&mut watch).await.unwrap(), LeaseEvent::Snapshot(None));
    let grant = acquire(&backend, &request("jobs", "a", 10)).await;
    let started = Instant::now();
    assert!(
        matches!(next(&mut watch).await.unwrap(), LeaseEvent::Changed(r) if r.term == grant.term)
    );
    advance(secs(5)).await;
    assert!(matches!(backend.lease().renew(&grant).await.unwrap(), Renew::Renewed(_)));
    assert_eq!(next(&mut watch).await.unwrap(), LeaseEvent::Vacant);
    assert_eq!(started.elapsed(), secs(15));
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_lags_gets_a_snapshot() {
    let backend = backend();
    let mut watch = backend.lease().watch(&lease("jobs"));
    next(&mut watch).await.unwrap();
    for _ in 0..50 {
        let grant = acquire(&backend, &request("jobs", "a", 10)).await;
        assert_eq!(backend.lease().release(&grant).await.unwrap(), Release::Released);
    }
    assert_eq!(next(&mut watch).await.unwrap(), LeaseEvent::Snapshot(None));
    acquire(&backend, &request("jobs", "b", 10)).await;
    assert!(matches!(next(&mut watch).await.unwrap(), LeaseEvent::Changed(_)));
}

#[tokio::test(start_paused = true)]
async fn a_listing_comes_in_pages() {
    let backend = backend();
    for name in ["c", "a", "b"] {
        acquire(&backend, &request(name, "n", 10)).await;
    }
    let names = |items: &[LeaseRecord]| -> Vec<_> {
        items.iter().map(|record| record.lease.to_string()).collect()
    };
    let first = backend.lease().list(Page::first().with_limit(2)).await.unwrap();
    assert_eq!(names(&first.items), ["a", "b"]);
    let second = backend.lease().list(first.next.unwrap()).await.unwrap();
    assert_eq!((names(&second.items), second.next), (vec!["c".into()], None));
}

#[tokio::test(start_paused = true)]
async fn a_replaced_incarnation_is_superseded_and_an_expired_one_gone() {
    let backend = backend();
    let discovery = backend.discovery();
    let (old, new) = (node("a"), node("a"));
    let ttl = Ttl::from_secs(10).unwrap();
    let held = register(&backend, &old, 10).await;
    let duplicate = discovery.register(&new, ttl, Replace::No).await.unwrap();
    assert!(matches!(duplicate, Register::Duplicate(by) if by.info == old));
    let newer = register(&backend, &new, 10).await;
    let answer = discovery.heartbeat(&held, &old).await.unwrap();
    assert!(matches!(answer, Heartbeat::Superseded(by) if by.info == new));
    discovery.deregister(&held).await.unwrap();
    assert_eq!(discovery.nodes().await.unwrap().len(), 1);
    advance(secs(10)).await;
    assert_eq!(discovery.heartbeat(&newer, &new).await.unwrap(), Heartbeat::Gone);
    assert_eq!(discovery.nodes().await.unwrap(), []);
    let mixed = discovery.heartbeat(&newer, &old).await.unwrap_err();
    assert_eq!(mixed.kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn an_eviction_compares_the_revision_which_a_rewrite_changes() {
    let backend = backend();
    let discovery = backend.discovery();
    let info = node("a");
    let held = register(&backend, &info, 10).await;
    let Heartbeat::Renewed(same) = discovery.heartbeat(&held, &info).await.unwrap() else {
        panic!("not renewed")
    };
    assert_eq!(same.revision, held.revision);
    let changed = info.clone().with_declared(Declared::Draining);
    let Heartbeat::Renewed(newer) = discovery.heartbeat(&held, &changed).await.unwrap() else {
        panic!("not renewed")
    };
    let evict = async |seen: &Registration| {
        discovery.evict(&info.id, info.incarnation, &seen.revision).await.unwrap()
    };
    assert!(matches!(evict(&held).await, Evict::Alive(record) if record.info == changed));
    assert_eq!(evict(&newer).await, Evict::Evicted);
    assert_eq!(evict(&newer).await, Evict::Gone);
    assert_eq!(discovery.heartbeat(&newer, &info).await.unwrap(), Heartbeat::Gone);
}

#[tokio::test(start_paused = true)]
async fn a_node_watch_tells_who_left_and_who_expired() {
    let backend = backend();
    let mut watch = backend.discovery().watch();
    assert_eq!(next(&mut watch).await.unwrap(), NodeEvent::Snapshot(vec![]));
    let (a, b) = (node("a"), node("b"));
    let held = register(&backend, &a, 10).await;
    register(&backend, &b, 7).await;
    backend.discovery().deregister(&held).await.unwrap();
    let started = Instant::now();
    assert!(matches!(next(&mut watch).await.unwrap(), NodeEvent::Joined(r) if r.info == a));
    assert!(matches!(next(&mut watch).await.unwrap(), NodeEvent::Joined(r) if r.info == b));
    let left = NodeEvent::Left { node: a.id, incarnation: a.incarnation };
    assert_eq!(next(&mut watch).await.unwrap(), left);
    let expired = NodeEvent::Expired { node: b.id, incarnation: b.incarnation, judged: true };
    assert_eq!(next(&mut watch).await.unwrap(), expired);
    assert_eq!(started.elapsed(), secs(7));
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_was_never_set_ends_late_what_was_before_and_early_what_came_under_it() {
    let store = backend();
    let names = || async {
        let nodes = store.discovery().nodes().await.unwrap();
        nodes.iter().map(|node| node.info.id.to_string()).collect::<Vec<_>>()
    };
    let lease_of = |name| {
        let leases = store.lease();
        async move { leases.get(&lease(name)).await.unwrap() }
    };
    register(&store, &node("before"), 10).await;
    acquire(&store, &request("before", "before", 10)).await;
    store.set_wall_clock(WallClock::Slow(secs(50 * 365 * 86_400)));
    register(&store, &node("under"), 10).await;
    advance(secs(11)).await;
    assert_eq!(names().await, ["before"]);
    assert_eq!(lease_of("before").await, None, "a lease lasts for its TTL at most");
    register(&store, &node("under"), 10).await;
    acquire(&store, &request("under", "under", 10)).await;
    store.set_wall_clock(WallClock::Right);
    assert_eq!(names().await, [""; 0]);
    assert_eq!(lease_of("under").await, None);
}

#[tokio::test(start_paused = true)]
async fn what_a_jump_of_the_clock_ends_is_told_as_expired() {
    let store = backend();
    let mut watch = store.discovery().watch();
    assert_eq!(next(&mut watch).await.unwrap(), NodeEvent::Snapshot(Vec::new()));
    let one = node("n1");
    let held = register(&store, &one, 10).await;
    acquire(&store, &request("a", "n1", 10)).await;
    assert!(matches!(next(&mut watch).await.unwrap(), NodeEvent::Joined(_)));
    store.run_out();
    let (node, incarnation) = (held.node.clone(), held.incarnation);
    let expired = NodeEvent::Expired { node, incarnation, judged: true };
    assert_eq!(next(&mut watch).await.unwrap(), expired);
    assert_eq!(store.lease().get(&lease("a")).await.unwrap(), None);
    let gone = store.discovery().heartbeat(&held, &one).await.unwrap();
    assert!(matches!(gone, Heartbeat::Gone), "{gone:?}");
}

#[tokio::test(start_paused = true)]
async fn a_publish_is_a_compare_and_set_under_the_highest_fence() {
    let backend = backend();
    let orders = table("orders");
    let old = acquire(&backend, &request("jobs", "a", 10)).await;
    let map = claimed(&backend, &orders, &old.fence()).await;
    let one = next_map(&map, &old.fence(), "one");
    assert_eq!(publish(&backend, &orders, &one).await, Publish::Published(one.version()));
    assert_eq!(publish(&backend, &orders, &one).await, Publish::Published(one.version()));
    let other = next_map(&map, &old.fence(), "other");
    let conflict = Publish::Conflict { uid: map.uid(), version: one.version() };
    assert_eq!(publish(&backend, &orders, &other).await, conflict);

    advance(secs(10)).await;
    let two = next_map(&one, &old.fence(), "two");
    let fenced = Publish::Fenced(Some(old.fence()));
    assert_eq!(publish(&backend, &orders, &two).await, fenced, "the lease is vacant");
    let new = acquire(&backend, &request("jobs", "b", 10)).await;
    assert_eq!(claim(&backend, &orders, &old.fence()).await, Claim::Fenced(old.fence()));
    assert_eq!(*claimed(&backend, &orders, &new.fence()).await, *one);
    assert_eq!(claim(&backend, &orders, &old.fence()).await, Claim::Fenced(new.fence()));
    let fenced = Publish::Fenced(Some(new.fence()));
    assert_eq!(publish(&backend, &orders, &two).await, fenced);
    assert_eq!(publish(&backend, &table("none"), &two).await, Publish::Fenced(None));
    assert_eq!(claim(&backend, &table("none"), &old.fence()).await, Claim::Fenced(old.fence()));
    assert_eq!(backend.placement().tables().await.unwrap(), [orders]);
}

#[tokio::test(start_paused = true)]
async fn fences_of_another_store_go_by_term_and_attempt() {
    let backend = backend();
    let orders = table("orders");
    let fence = |term, attempt| {
        let (term, attempt) = (Term::from_u64(term), AttemptId::from_u128(attempt));
        Fence::new(lease("jobs"), term, attempt, Origin::new("etcd:1/orders"))
    };
    let map = claimed(&backend, &orders, &fence(7, 1)).await;
    assert_eq!(claim(&backend, &orders, &fence(7, 2)).await, Claim::Fenced(fence(7, 1)));
    // A higher fence that publishes without a claim fences all below it too.
    let one = next_map(&map, &fence(9, 2), "one");
    assert_eq!(publish(&backend, &orders, &one).await, Publish::Published(one.version()));
    assert_eq!(claim(&backend, &orders, &fence(8, 3)).await, Claim::Fenced(fence(9, 2)));

    let own = acquire(&backend, &request("jobs", "a", 10)).await.fence();
    let bound = Binding::of(&fence(1, 1));
    assert_eq!(claim(&backend, &orders, &own).await, Claim::OtherLease(bound.clone()));
    let header = map.header().clone().with_replicas(ReplicationFactor::new(2).unwrap());
    let request = ClaimRequest::new(orders.clone(), own.clone(), header).with_rebind_from(bound);
    let mismatch = Claim::Mismatch(map.header().clone());
    assert_eq!(backend.placement().claim(&request).await.unwrap(), mismatch);
    let request = ClaimRequest { header: map.header().clone(), ..request };
    for _ in 0..2 {
        let Claim::Claimed(table) = backend.placement().claim(&request).await.unwrap() else {
            panic!("not bound anew")
        };
        assert_eq!((table.fence, table.binding), (own.clone(), Binding::of(&own)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_map_that_does_not_fit_its_call_is_invalid() {
    let backend = backend();
    let orders = table("orders");
    let fence = acquire(&backend, &request("jobs", "a", 10)).await.fence();
    let map = claimed(&backend, &orders, &fence).await;
    let one = next_map(&map, &fence, "one");
    for expected in [Version::new(1), Version::new(u64::MAX)] {
        let publish = backend.placement().publish(&orders, &fence, expected, &one).await;
        assert_eq!(publish.unwrap_err().kind(), ErrorKind::Invalid);
    }
    let other = Fence { term: Term::from_u64(99), ..fence.clone() };
    let publish = backend.placement().publish(&orders, &other, Version::ZERO, &one).await;
    assert_eq!(publish.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn a_table_watch_shows_the_newest_map_and_another_life_as_a_snapshot() {
    let backend = backend();
    let orders = table("orders");
    let mut watch = backend.placement().watch(&orders);
    assert_eq!(next(&mut watch).await.unwrap(), PlacementEvent::Snapshot(None));
    let fence = acquire(&backend, &request("jobs", "a", 10)).await.fence();
    let map = claimed(&backend, &orders, &fence).await;
    let snapshot = PlacementEvent::Snapshot(Some(Arc::clone(&map)));
    assert_eq!(next(&mut watch).await.unwrap(), snapshot);
    let one = next_map(&map, &fence, "one");
    let two = next_map(&one, &fence, "two");
    for map in [&one, &two] {
        assert_eq!(publish(&backend, &orders, map).await, Publish::Published(map.version()));
    }
    assert_eq!(next(&mut watch).await.unwrap(), PlacementEvent::Changed(two));
    assert!(backend.delete_table(&orders));
    assert!(!backend.delete_table(&orders));
    let again = claimed(&backend, &orders, &fence).await;
    assert_ne!(again.uid(), map.uid());
    assert_eq!(next(&mut watch).await.unwrap(), PlacementEvent::Snapshot(Some(again)));
}

#[tokio::test(start_paused = true)]
async fn a_request_is_answered_once_under_the_claiming_fence_and_forgotten_in_time() {
    let backend = backend();
    let placement = backend.placement();
    let fence = acquire(&backend, &request("jobs", "a", 60)).await.fence();
    let asked = Request::new(NodeId::new("a").unwrap(), secs(30), "drain").unwrap();
    let (yes, no) = (Answer::new("yes").unwrap(), Answer::new("no").unwrap());
    let mut watch = placement.watch_requests();
    assert_eq!(next(&mut watch).await.unwrap(), RequestEvent::Snapshot(vec![]));
    for _ in 0..2 {
        assert_eq!(placement.request(&asked).await.unwrap(), asked.id);
    }
    let started = Instant::now();
    let answer = async |fence, answer| placement.answer(&asked.id, fence, answer).await.unwrap();
    assert_eq!(answer(&fence, &yes).await, Answered::Fenced(None));
    claimed(&backend, &TableName::cluster(), &fence).await;
    assert_eq!(answer(&fence, &yes).await, Answered::Recorded);
    assert_eq!(answer(&fence, &yes).await, Answered::Recorded);
    assert_eq!(answer(&fence, &no).await, Answered::Already(yes.clone()));
    let below = Fence { term: Term::from_u64(0), ..fence.clone() };
    assert_eq!(answer(&below, &no).await, Answered::Fenced(Some(fence.clone())));

    assert_eq!(next(&mut watch).await.unwrap(), RequestEvent::Submitted(asked.clone()));
    assert_eq!(next(&mut watch).await.unwrap(), RequestEvent::Answered(asked.id, yes.clone()));
    assert_eq!(next(&mut watch).await.unwrap(), RequestEvent::Gone(asked.id));
    assert_eq!(started.elapsed(), secs(30));
    assert_eq!(answer(&fence, &no).await, Answered::Gone);
}

#[tokio::test(start_paused = true)]
async fn requests_are_bounded_until_their_time_limit_passes() {
    let backend = backend();
    let placement = backend.placement();
    let from = NodeId::new("a").unwrap();
    let ask = || Request::new(from.clone(), secs(30), "drain").unwrap();
    for _ in 0..placement::REQUESTS_MAX {
        placement.request(&ask()).await.unwrap();
    }
    let full = placement.request(&ask()).await.unwrap_err();
    assert_eq!((full.kind(), full.effect()), (ErrorKind::Unavailable, Effect::None));
    advance(secs(30)).await;
    placement.request(&ask()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_watch_keeps_the_store_and_counts_heartbeats() {
    let cluster = ClusterName::new("kept-by-a-watch").unwrap();
    let backend = MemoryBackend::open(cluster.clone());
    let info = node("a");
    let held = register(&backend, &info, 10).await;
    let mut watch = backend.discovery().watch();
    drop(backend);
    assert!(matches!(next(&mut watch).await.unwrap(), NodeEvent::Snapshot(all) if all.len() == 1));

    let started = Instant::now();
    advance(secs(6)).await;
    let backend = MemoryBackend::open(cluster);
    let answer = backend.discovery().heartbeat(&held, &info).await.unwrap();
    assert_eq!(answer, Heartbeat::Renewed(held));
    assert!(matches!(next(&mut watch).await.unwrap(), NodeEvent::Expired { .. }));
    assert_eq!(started.elapsed(), secs(16));
}

#[test]
fn of_many_threads_one_wins() {
    let backend = backend();
    let compete = || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let asked = request("jobs", "a", 10);
        let outcome = runtime.block_on(backend.lease().try_acquire(&asked)).unwrap();
        usize::from(matches!(outcome, Acquire::Acquired(_)))
    };
    let winners: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(compete)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(winners, 1);
}

#[tokio::test(start_paused = true)]
async fn a_closed_handle_answers_closed_and_leaves_what_is_held() {
    let backend = backend();
    let mut watch = backend.lease().watch(&lease("jobs"));
    let mut tables = backend.placement().watch(&table("orders"));
    next(&mut watch).await.unwrap();
    let grant = acquire(&backend, &request("jobs", "a", 10)).await;
    let health = backend.check().await.unwrap();
    assert_eq!((health.status(), health.points.len()), (HealthStatus::Good, 4));

    backend.close().await.unwrap();
    for event in [watch.next().await.map(|e| e.map(drop)), tables.next().await.map(|e| e.map(drop))]
    {
        assert_eq!(event.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    }
    assert!(watch.next().await.is_none());
    assert_eq!(backend.lease().renew(&grant).await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(backend.check().await.unwrap_err().kind(), ErrorKind::Closed);
    let reopened = backend.reopen();
    assert!(reopened.lease().get(&lease("jobs")).await.unwrap().is_some());
}

#[test]
fn a_watch_in_one_runtime_hears_of_a_write_in_another() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let (writing, reading) = (runtime(), runtime());
    let backend = backend();
    let mut watch = backend.lease().watch(&lease("jobs"));
    reading.block_on(next(&mut watch)).unwrap();
    let writer = backend.clone();
    let thread = std::thread::spawn(move || {
        let grant = writing.block_on(acquire(&writer, &request("jobs", "a", 1)));
        drop(writing);
        grant
    });
    let changed = reading.block_on(next(&mut watch)).unwrap();
    let grant = thread.join().unwrap();
    assert!(matches!(changed, LeaseEvent::Changed(record) if record.term == grant.term));
    assert_eq!(reading.block_on(next(&mut watch)).unwrap(), LeaseEvent::Vacant);
}

#[test]
fn unused_watches_leave_nothing_behind() {
    let backend = backend();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let mut watch = backend.lease().watch(&lease("jobs"));
    runtime.block_on(watch.next()).unwrap().unwrap();
    assert_eq!(backend.handle.store.lock(|state, _| state.lease_events.len()), 1);
    drop(watch);
    assert_eq!(backend.handle.store.lock(|state, _| state.lease_events.len()), 0);
}
