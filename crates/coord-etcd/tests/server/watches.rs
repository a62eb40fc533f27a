//! Watches whose beginning is compacted away, and why a node left.

use std::time::Duration;

use coord_core::{
    Address, Backend as _, Evict, LeaseEvent, NodeEvent, NodeId, NodeInfo, Register, Replace, Ttl,
};
use coord_integration::faults::{Direction, Proxy};
use coord_integration::servers::Etcd;
use futures::StreamExt as _;
use libtest_mimic::Trial;

use super::setup::{SOON, acquire, admin, ask, name, on, open, release};

pub(crate) fn trials() -> Vec<Trial> {
    let control = Etcd::new().with_control();
    let plain = Etcd::new();
    vec![
        on("a_compacted_watch_begins_again", &control, a_compacted_watch_begins_again),
        on("a_departure_says_why", &plain, a_departure_says_why),
    ]
}

/// The snapshot's reply is on its way for so long that its revision is compacted before the watch
/// that follows from it is opened.
async fn a_compacted_watch_begins_again(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let proxy = Proxy::to(&server).await.expect("stands");
    let watching = open(&format!("{}/orders", server.url_via(proxy.addresses()))).await;
    let direct = open(&format!("{}/orders", server.url())).await;
    let mut events = watching.lease().watch(&name("jobs"));
    proxy.delay(Direction::ToClient, Duration::from_secs(2));
    let change = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let grant = acquire(&direct, &ask("jobs", "node-1", 30)).await;
        let mut root = admin(server.addresses(), None).await;
        // What is compacted has to lie behind the watch's first revision.
        root.put("other", "1", None).await.expect("writes");
        let now = root.put("other", "2", None).await.expect("writes");
        let now = now.header().expect("a header").revision();
        root.compact(now, None).await.expect("compacts");
        grant
    };
    let (first, grant) = tokio::join!(events.next(), change);
    assert!(matches!(first, Some(Ok(LeaseEvent::Snapshot(None)))), "{first:?}");
    proxy.heal();
    let second = tokio::time::timeout(SOON, events.next()).await.expect("in time");
    let Some(Ok(LeaseEvent::Snapshot(Some(record)))) = second else {
        panic!("no snapshot after the compaction: {second:?}");
    };
    assert_eq!(record.fence(), grant.fence());
    release(&direct, &grant).await;
    let third = tokio::time::timeout(SOON, events.next()).await.expect("in time");
    assert!(matches!(third, Some(Ok(LeaseEvent::Vacant))), "{third:?}");
}

async fn a_departure_says_why(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let backend = open(&format!("{}/departures", server.url())).await;
    let discovery = backend.discovery();
    let mut events = discovery.watch();
    let mut next = async || {
        tokio::time::timeout(SOON, events.next()).await.expect("in time").expect("an event")
    };
    assert!(matches!(next().await, Ok(NodeEvent::Snapshot(nodes)) if nodes.is_empty()));
    let address = Address::new("127.0.0.1:1").expect("an address");
    let node = NodeInfo::new(NodeId::new("node-1").expect("a name"), address);
    let ttl = Ttl::from_secs(2).expect("a ttl");
    let join = async || {
        let node = node.clone().with_incarnation(coord_core::Incarnation::random());
        match discovery.register(&node, ttl, Replace::No).await.expect("registers") {
            Register::Registered(held) => held,
            other => panic!("not registered: {other:?}"),
        }
    };

    let held = join().await;
    assert!(matches!(next().await, Ok(NodeEvent::Joined(_))));
    discovery.deregister(&held).await.expect("deregisters");
    let left = next().await.expect("an event");
    assert_eq!(left, NodeEvent::Left { node: held.node, incarnation: held.incarnation });

    let held = join().await;
    assert!(matches!(next().await, Ok(NodeEvent::Joined(_))));
    let (node, incarnation) = (held.node.clone(), held.incarnation);
    let evicted = discovery.evict(&node, incarnation, &held.revision).await.expect("evicts");
    assert_eq!(evicted, Evict::Evicted);
    assert_eq!(next().await.expect("an event"), NodeEvent::Left { node, incarnation });

    let held = join().await;
    assert!(matches!(next().await, Ok(NodeEvent::Joined(_))));
    let expired = next().await.expect("an event");
    let (node, incarnation) = (held.node, held.incarnation);
    assert_eq!(expired, NodeEvent::Expired { node, incarnation, judged: true });

    // A key that somebody deletes is a statement neither of its node's nor of the store's clock.
    let held = join().await;
    assert!(matches!(next().await, Ok(NodeEvent::Joined(_))));
    let mut root = admin(server.addresses(), None).await;
    root.delete("coord/departures/node/node-1", None).await.expect("deletes");
    let (node, incarnation) = (held.node, held.incarnation);
    let gone = next().await.expect("an event");
    assert_eq!(gone, NodeEvent::Expired { node, incarnation, judged: false });
}
