//! Maps larger than a value, and what stays of them.

use std::sync::Arc;

use coord_core::{
    Address, Backend, Fence, Incarnation, NodeEntry, NodeId, NodeStatus, Publish, ShardMap,
};
use coord_integration::servers::Redis;
use libtest_mimic::Trial;

use super::setup::{Done, acquire, claim, ensure, on, open, orders, until};

const SHARDS: u32 = 1_000_000;
const NODES: u16 = 1_000;

pub(crate) fn trials() -> Vec<Trial> {
    vec![on("old_chunks_go_and_new_ones_stay", Redis::new(), old_chunks)]
}

/// The next version, with every shard somewhere else: no delta is worth it.
pub(crate) fn shuffled(map: &ShardMap, fence: &Fence, seed: u32, shards: u32) -> Arc<ShardMap> {
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
    edit.set_raw_owners(owners.take(shards as usize).collect()).expect("known slots");
    Arc::new(edit.finish(fence.clone()).expect("changed"))
}

async fn old_chunks(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "leader", 600).await?;
    let fence = grant.fence();
    let mut map = claim(&backend, &fence, SHARDS).await?.map;
    let stored = || -> Done<Vec<String>> {
        let said = server.nodes()[0].ask(&["HKEYS", "coord:{orders}:chunks:orders"])?;
        Ok(said.lines().map(str::to_owned).collect())
    };
    let mut of_version = Vec::new();
    for round in 1..=4 {
        let next = shuffled(&map, &fence, round, SHARDS);
        let published =
            backend.placement().publish(&orders()?, &fence, map.version(), &next).await?;
        ensure(published == Publish::Published(next.version()), published)?;
        let mark = format!(".{:016x}.", next.version().get());
        let new = stored()?.into_iter().filter(|key| key.contains(&mark)).count();
        ensure(new >= 2, format!("a map of a million shards is in {new} chunks"))?;
        of_version.push(new);
        map = next;
    }
    let two_newest = of_version[2] + of_version[3];
    until("the chunks of older maps go", || async {
        Ok((stored()?.len() == two_newest).then_some(()))
    })
    .await?;
    let fresh = open(&server, "").await?;
    let loaded = fresh.placement().load(&orders()?).await?;
    ensure(loaded.is_some_and(|table| *table.map == *map), "the newest map is there")
}
