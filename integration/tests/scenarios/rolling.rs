//! I: every node is restarted, one after the other, each leaving in order.

use coord::cluster::EventKind;
use libtest_mimic::Trial;

use super::backends;
use super::checks::Told;
use super::driver::{Done, Member, World, calm, on_each};
use super::figures::note;
use super::hosted;
use super::recording::now;

pub(crate) fn trials() -> Vec<Trial> {
    on_each(backends::all(), "i_all_nodes_are_restarted_in_order", calm, all_restart)
}

async fn all_restart(world: &mut World) -> Done {
    const NODES: usize = 3;
    world.start(NODES).await?;
    let (settled, begun) = (world.map().await?.version(), now());
    for member in 0..NODES {
        let name = world.members[member].name.clone();
        world.leave(member).await?;
        world.add(&name).await?;
        world.shared_by(NODES).await?;
    }
    let took = now().since(begun);
    // I2: while a node is there, each shard has an owner, in every version.
    for map in world.seen_maps().iter().filter(|map| map.version() > settled) {
        let orphan = map.header().shards.shards().find(|shard| map.owner(*shard).is_none());
        if let Some(shard) = orphan {
            return Err(format!("version {}: nobody owns shard {shard}", map.version()).into());
        }
    }
    // Nobody has failed, and nothing was waited for that a TTL had to end.
    for member in &world.members {
        let bad = |kind: &EventKind| {
            matches!(
                kind,
                EventKind::NodeFailed { .. }
                    | EventKind::HandoffStuck { .. }
                    | EventKind::ShardsOrphaned { .. }
            )
        };
        if let Some((_, event)) = member.events().find(|(at, e)| *at > begun && bad(&e.kind)) {
            return Err(format!("{} heard: {}", member.name, event.kind).into());
        }
    }
    let told: Vec<Told<'_>> = world.members.iter().map(Member::told).collect();
    let gaps = hosted::gaps(&told, begun);
    let (middle, longest) = (gaps[gaps.len() / 2], gaps.last().copied().unwrap_or_default());
    note(format!(
        "{}: {NODES} nodes restarted in {took:.1?}; a shard had no host for {middle:.0?} at a time (p50), \
         {longest:.0?} (longest)",
        world.store.name
    ));
    // By handing over, not by waiting for the end of a TTL.
    let limit = world.settings.node_ttl / 2;
    if longest > limit {
        return Err(format!("a shard had no host for {longest:?}").into());
    }
    Ok(())
}
