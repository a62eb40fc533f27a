//! What stays behind, and what goes.

use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    Address, Backend as _, Claim, ClaimRequest, Fence, Incarnation, NodeEntry, NodeEvent, NodeId,
    NodeInfo, NodeStatus, Publish, Register, Replace, Request, ShardCount, ShardMap, TableHeader,
    TableName, Ttl,
};
use coord_integration::servers::ApiServer;
use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::ListParams;
use libtest_mimic::Trial;

use super::setup::{SOON, acquire, admin, ask, cluster, open, shared, until};

const SHARDS: u32 = 1_000_000;
const NODES: u16 = 1_000;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        shared("old_chunks_go_and_new_ones_stay", old_chunks_go_and_new_ones_stay),
        shared("a_node_that_nobody_evicted_is_collected", a_node_is_collected),
        shared("a_request_that_was_left_behind_is_not_carried_out", a_request_left_behind),
        shared("no_shard_goes_to_who_may_be_long_gone", unjudged),
        shared("a_node_whose_lease_somebody_deleted_has_not_left", deleted_by_somebody),
    ]
}

/// The next version, with every shard somewhere else: no delta is worth it.
fn shuffled(map: &ShardMap, fence: &Fence, seed: u32) -> Arc<ShardMap> {
    let mut edit = map.edit();
    if map.nodes().is_empty() {
        for n in 0..NODES {
            let id = NodeId::new(format!("node-{n}")).expect("a name");
            let address = Address::new(format!("10.0.0.1:{}", n + 1)).expect("an address");
            let entry = NodeEntry::new(id, Incarnation::random(), address, NodeStatus::Active);
            edit.put_node(entry).expect("room");
        }
    }
    let mut state = seed;
    let owners = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        u16::try_from((state >> 16) % u32::from(NODES)).expect("below the number of nodes")
    });
    edit.set_raw_owners(owners.take(SHARDS as usize).collect()).expect("known slots");
    Arc::new(edit.finish(fence.clone()).expect("changed"))
}

async fn chunks(maps: &Api<ConfigMap>, cluster: &str) -> Vec<String> {
    let labels = format!("coord/cluster={cluster},coord/kind=chunk,coord/table=orders");
    let found = maps.list_metadata(&ListParams::default().labels(&labels)).await.expect("lists");
    found.into_iter().map(|chunk| chunk.metadata.name.expect("a name")).collect()
}

async fn old_chunks_go_and_new_ones_stay(server: ApiServer) {
    let cluster = cluster();
    let maps = Api::<ConfigMap>::default_namespaced(admin(&server).await);
    let backend = open(&server, &cluster).await;
    let grant = acquire(&backend, &ask("leader", "node-1", 120)).await;
    let (fence, table) = (grant.fence(), TableName::new("orders").expect("a name"));
    let header = TableHeader::new(ShardCount::new(SHARDS).expect("a count"));
    let claim = ClaimRequest::new(table.clone(), fence.clone(), header);
    let claimed = backend.placement().claim(&claim).await.expect("claims");
    let Claim::Claimed(claimed) = claimed else { panic!("not claimed: {claimed:?}") };
    let mut map = claimed.map;
    let mut of_version = Vec::new();
    for round in 1..=3 {
        let next = shuffled(&map, &fence, round);
        let published = backend.placement().publish(&table, &fence, map.version(), &next).await;
        assert_eq!(published.expect("publishes"), Publish::Published(next.version()));
        let mark = format!(".{:016x}.", next.version().get());
        let all = chunks(&maps, &cluster).await;
        let new = all.into_iter().filter(|key| key.contains(&mark)).count();
        assert!(new >= 2, "a map of a million shards is in {new} chunks");
        of_version.push(new);
        map = next;
    }
    let two_newest = of_version[1] + of_version[2];
    until("the chunks of older maps go", SOON, || async {
        (chunks(&maps, &cluster).await.len() == two_newest).then_some(())
    })
    .await;
    let fresh = open(&server, &cluster).await;
    let loaded = fresh.placement().load(&table).await.expect("loads").expect("is there");
    assert!(*loaded.map == *map, "the map came back as another one");

    // A chunk belongs to its table's head, so that Kubernetes collects it after that.
    let name = chunks(&maps, &cluster).await.pop().expect("a chunk");
    let chunk = maps.get(&name).await.expect("reads");
    let head = maps.get(&format!("coord.{cluster}.table.orders")).await.expect("a head");
    let owner = chunk.metadata.owner_references.expect("an owner").pop().expect("an owner");
    assert_eq!((Some(owner.uid), chunk.immutable), (head.metadata.uid, Some(true)));
    // One that is gone is damage, and told as such.
    maps.delete(&name, &kube::api::DeleteParams::default()).await.expect("deletes");
    let fresh = open(&server, &cluster).await;
    let error = fresh.placement().load(&table).await.expect_err("a chunk is missing");
    assert_eq!(error.kind(), coord_core::ErrorKind::Corrupt, "{error:?}");
}

fn node(name: &str) -> NodeInfo {
    let address = Address::new("10.0.0.1:7000").expect("an address");
    NodeInfo::new(NodeId::new(name).expect("a name"), address)
}

async fn a_node_is_collected(server: ApiServer) {
    let cluster = cluster();
    let leases = Api::<Lease>::default_namespaced(admin(&server).await);
    let (backend, other) = (open(&server, &cluster).await, open(&server, &cluster).await);
    let ttl = Ttl::from_secs(1).expect("a ttl");
    let outcome = backend.discovery().register(&node("node-1"), ttl, Replace::No).await;
    assert!(matches!(outcome, Ok(Register::Registered(_))), "{outcome:?}");
    let mut watch = other.discovery().watch();
    let mut has_expired = false;
    let name = format!("coord.{cluster}.node.node-1");
    let gone = until("its Lease is deleted", SOON * 3, || async {
        leases.get_opt(&name).await.expect("reads").is_none().then_some(())
    });
    let reading = async {
        while let Some(event) = watch.next().await {
            if matches!(event.expect("no error"), NodeEvent::Expired { .. }) {
                has_expired = true;
            }
        }
    };
    tokio::select! {
        () = gone => {}
        () = reading => panic!("the watch ended"),
    }
    assert!(has_expired, "the watch told nothing before");
}

/// A command whose sender and leader are gone is not found by the next leader much later.
async fn a_request_left_behind(server: ApiServer) {
    let cluster = cluster();
    let maps = Api::<ConfigMap>::default_namespaced(admin(&server).await);
    let limit = Duration::from_secs(1);
    let asked = Request::new(NodeId::new("node-1").expect("a name"), limit, "drain node-2");
    let asked = asked.expect("a request");
    let sender = open(&server, &cluster).await;
    sender.placement().request(&asked).await.expect("asked");
    sender.close().await.expect("closes");
    let name = format!("coord.{cluster}.request.{}", asked.id);
    let made = maps.get(&name).await.expect("is there").metadata.creation_timestamp;
    let made = made.expect("a time").0;
    // Nobody looks until it is over by the server's own clock, which tells seconds.
    until("its time limit is over", SOON, || async {
        let now = maps.get(&name).await.expect("is there");
        let age = jiff::Timestamp::now().as_second() - made.as_second();
        (now.metadata.name.is_some() && age > 6).then_some(())
    })
    .await;
    let leader = open(&server, &cluster).await;
    let first = leader.placement().watch_requests().next().await.expect("an event");
    match first.expect("no error") {
        coord_core::RequestEvent::Snapshot(open) => assert!(open.is_empty(), "{open:?}"),
        other => panic!("not a snapshot: {other:?}"),
    }
    until("it is deleted", SOON, || async {
        maps.get_opt(&name).await.expect("reads").is_none().then_some(())
    })
    .await;
}

async fn unjudged(server: ApiServer) {
    let cluster = cluster();
    let (backend, other) = (open(&server, &cluster).await, open(&server, &cluster).await);
    let ttl = Ttl::from_secs(60).expect("a ttl");
    let join = async |info: &NodeInfo| {
        let outcome = backend.discovery().register(info, ttl, Replace::No).await.expect("told");
        let Register::Registered(held) = outcome else { panic!("not registered: {outcome:?}") };
        held
    };
    let first = node("node-1");
    let held = join(&first).await;
    let seen = other.discovery().nodes().await.expect("lists");
    assert!(!seen[0].judged, "it may have been there for ever: {seen:?}");
    assert!(seen[0].may_expire_in.is_some());
    // What comes later was written while it was looked at, and so was what changes.
    join(&node("node-2")).await;
    let beat = backend.discovery().heartbeat(&held, &first).await.expect("told");
    assert!(matches!(beat, coord_core::Heartbeat::Renewed(_)), "{beat:?}");
    let seen = other.discovery().nodes().await.expect("lists");
    assert!(seen.iter().all(|record| record.judged), "{seen:?}");
}

/// The next departure that a watch tells: of which node, and whether it left, or expired and how.
async fn departure(
    watch: &mut (impl futures::Stream<Item = coord_core::Result<NodeEvent>> + Unpin),
) -> (String, &'static str) {
    loop {
        let event = tokio::time::timeout(SOON, watch.next()).await.expect("in time");
        match event.expect("it goes on").expect("no error") {
            NodeEvent::Left { node, .. } => return (node.to_string(), "left"),
            NodeEvent::Expired { node, judged: true, .. } => return (node.to_string(), "judged"),
            NodeEvent::Expired { node, .. } => return (node.to_string(), "merely gone"),
            _ => {}
        }
    }
}

async fn deleted_by_somebody(server: ApiServer) {
    let cluster = cluster();
    let leases = Api::<Lease>::default_namespaced(admin(&server).await);
    let (backend, other) = (open(&server, &cluster).await, open(&server, &cluster).await);
    let ttl = Ttl::from_secs(60).expect("a ttl");
    let nodes = ["node-1", "node-2", "node-3"].map(node);
    let mut held = Vec::new();
    for node in &nodes {
        let outcome = backend.discovery().register(node, ttl, Replace::No).await;
        let Ok(Register::Registered(one)) = outcome else { panic!("{outcome:?}") };
        held.push(one);
    }
    let mut watch = other.discovery().watch();
    let first = watch.next().await.expect("an event").expect("no error");
    assert!(matches!(&first, NodeEvent::Snapshot(nodes) if nodes.len() == 3), "{first:?}");
    let seen = other.discovery().nodes().await.expect("lists");

    let object = |name: &str| format!("coord.{cluster}.node.{name}");
    let now = kube::api::DeleteParams::default();
    leases.delete(&object("node-1"), &now).await.expect("deletes");
    assert_eq!(departure(&mut watch).await, ("node-1".to_owned(), "merely gone"));
    let beat = backend.discovery().heartbeat(&held[0], &nodes[0]).await.expect("told");
    assert!(matches!(beat, coord_core::Heartbeat::Gone), "{beat:?}");

    // What its node and what the leader end is told as such.
    backend.discovery().deregister(&held[1]).await.expect("deregisters");
    assert_eq!(departure(&mut watch).await, ("node-2".to_owned(), "left"));
    assert!(leases.get_opt(&object("node-2")).await.expect("reads").is_none());
    let (last, run) = (&seen[2], seen[2].info.incarnation);
    let evicted = other.discovery().evict(&last.info.id, run, &last.revision).await.expect("told");
    assert!(matches!(evicted, coord_core::Evict::Evicted), "{evicted:?}");
    assert_eq!(departure(&mut watch).await, ("node-3".to_owned(), "left"));

    // It is over with the farewell, also where the object stays for longer.
    let outcome = backend.discovery().register(&nodes[1], ttl, Replace::No).await;
    let Ok(Register::Registered(again)) = outcome else { panic!("{outcome:?}") };
    let mut kept = leases.get(&object("node-2")).await.expect("reads");
    kept.metadata.finalizers = Some(vec!["example.com/wait".to_owned()]);
    let params = kube::api::PostParams::default();
    leases.replace(&object("node-2"), &params, &kept).await.expect("replaces");
    backend.discovery().deregister(&again).await.expect("deregisters");
    assert_eq!(departure(&mut watch).await, ("node-2".to_owned(), "left"));
    assert!(leases.get_opt(&object("node-2")).await.expect("reads").is_some(), "it is kept");
    assert!(other.discovery().nodes().await.expect("lists").is_empty());
    let beat = backend.discovery().heartbeat(&again, &nodes[1]).await.expect("told");
    assert!(matches!(beat, coord_core::Heartbeat::Gone), "{beat:?}");
    let run = again.incarnation;
    let evicted = other.discovery().evict(&again.node, run, &again.revision).await.expect("told");
    assert!(matches!(evicted, coord_core::Evict::Gone), "{evicted:?}");
}
