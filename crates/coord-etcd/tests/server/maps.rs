//! Maps larger than a value, and what stays of them.

use std::sync::Arc;

use coord_core::{
    Address, Backend as _, Claim, ClaimRequest, Fence, Incarnation, NodeEntry, NodeId, NodeStatus,
    Publish, ShardCount, ShardMap, TableHeader, TableName,
};
use coord_integration::servers::Etcd;
use etcd_client::{Client, GetOptions};
use libtest_mimic::Trial;

use super::setup::{acquire, admin, ask, on, open, until};

const SHARDS: u32 = 1_000_000;
const NODES: u16 = 1_000;

pub(crate) fn trials() -> Vec<Trial> {
    vec![on(
        "old_chunks_go_and_new_ones_stay",
        &Etcd::new().with_control(),
        old_chunks_go_and_new_ones_stay,
    )]
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

async fn chunks(root: &Client) -> Vec<String> {
    let options = GetOptions::new().with_prefix().with_keys_only();
    let found = root.clone().get("coord/orders/chunk/orders/", Some(options)).await;
    let found = found.expect("lists");
    found.kvs().iter().map(|kv| kv.key_str().expect("UTF-8").to_owned()).collect()
}

async fn old_chunks_go_and_new_ones_stay(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let root = admin(server.addresses(), None).await;
    let backend = open(&format!("{}/orders", server.url())).await;
    let grant = acquire(&backend, &ask("leader", "node-1", 60)).await;
    let (fence, table) = (grant.fence(), TableName::new("orders").expect("a name"));
    let header = TableHeader::new(ShardCount::new(SHARDS).expect("a count"));
    let claim = ClaimRequest::new(table.clone(), fence.clone(), header);
    let claimed = backend.placement().claim(&claim).await.expect("claims");
    let Claim::Claimed(claimed) = claimed else { panic!("not claimed: {claimed:?}") };
    let mut map = claimed.map;
    let mut of_version = Vec::new();
    for round in 1..=4 {
        let next = shuffled(&map, &fence, round);
        let published = backend.placement().publish(&table, &fence, map.version(), &next).await;
        assert_eq!(published.expect("publishes"), Publish::Published(next.version()));
        let mark = format!(".{:016x}.", next.version().get());
        let new = chunks(&root).await.into_iter().filter(|key| key.contains(&mark)).count();
        assert!(new >= 2, "a map of a million shards is in {new} chunks");
        of_version.push(new);
        map = next;
    }
    let two_newest = of_version[2] + of_version[3];
    until("the chunks of older maps go", || async {
        (chunks(&root).await.len() == two_newest).then_some(())
    })
    .await;
    let fresh = open(&format!("{}/orders", server.url())).await;
    let loaded = fresh.placement().load(&table).await.expect("loads").expect("is there");
    assert!(*loaded.map == *map, "the map came back as another one");

    // A chunk that is gone is damage, and told as such.
    let lost = chunks(&root).await.pop().expect("a chunk");
    root.clone().delete(lost, None).await.expect("deletes");
    let error = open(&format!("{}/orders", server.url())).await;
    let error = error.placement().load(&table).await.expect_err("a chunk is missing");
    assert_eq!(error.kind(), coord_core::ErrorKind::Corrupt, "{error:?}");
}
