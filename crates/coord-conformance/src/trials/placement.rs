//! Who owns which shard: written by the newest leader only, and never lost.

use std::sync::Arc;

use bytes::Bytes;
use coord_core::{
    ANNEX_BYTES_MAX, Address, AttemptId, Binding, Claim, ClaimRequest, Effect, ErrorKind, Fence,
    Incarnation, Label, LeaseName, Motion, MotionPhase, NodeEntry, NodeId, NodeStatus, Origin,
    Publish, ReplicationFactor, ShardCount, ShardId, ShardMap, Slot, StoredTable, TableHeader,
    TableName, Term, Version,
};
use futures::future::{join, join_all};

use crate::case::{Done, cases, ensure, want};
use crate::cx::{Client, Cx, lease_name, release};
use crate::faults::Fault;
use crate::view::{TableView, Watched};

cases! { "placement":
    /// Nothing but a claim creates a table: version 0, its header, bound to the fence's lease.
    only_a_claim_creates => ["table-create", "table-bound"];
    /// Publishing to a table that does not exist is fenced, and creates nothing.
    publishing_to_an_absent_table_is_fenced => ["table-create"];
    /// A claim with another header is told the stored one, and changes nothing, the fence included.
    a_claim_with_another_header_is_a_mismatch => ["table-mismatch", "P32"];
    /// A claim with a lower term, or an equal one of another attempt, is fenced.
    a_claim_by_a_lower_fence_is_fenced => ["table-fence", "P21"];
    /// A claim may be repeated.
    a_claim_may_be_repeated => ["dropped-calls", "table-fence"];
    /// A claim raises the stored fence, and leaves version, uid and map as they are.
    a_claim_raises_the_fence_not_the_version => ["table-claim-version"];
    /// Once a newer leader has claimed, an older one can't publish any more.
    a_publish_by_a_lower_fence_is_fenced => ["table-fence", "scenario-g", "P21"];
    /// A publish by an equal term of another attempt is fenced.
    a_publish_by_an_equal_term_of_another_attempt_is_fenced => ["table-fence"];
    /// A publish by a greater term raises the stored fence.
    a_publish_raises_the_fence => ["table-fence"];
    /// Of a pause between deciding and writing nothing comes: the successor's claim fences the write.
    a_paused_leaders_write_is_fenced => ["table-claim-first", "scenario-c", "scenario-d", "P21", "P22"];
    /// Many leaders claim an absent table at one moment: one table comes of it, under the highest fence.
    racing_claims_make_one_table => ["table-fence", "table-create", "table-uid"];
    /// Two attempts with an equal term claim at one moment: one of them is fenced.
    racing_claims_of_an_equal_term_have_one_winner => ["table-fence"];
    /// What a claim returns can't be changed by an older writer any more, however close the race.
    what_a_claim_returns_stays => ["table-claim-first", "P22"];
    /// A publish at the stored version makes the next one; at any other it is a conflict.
    a_publish_is_a_compare_and_set => ["publish-cas"];
    /// Of many publishes at one version one succeeds, and all others are told of it.
    one_of_many_publishes_wins => ["publish-cas"];
    /// The same publish, repeated, is the success that it was; another one at that version is not.
    a_repeated_publish_is_the_same_success => ["publish-retry", "dropped-calls", "scenario-k", "P4"];
    /// A claim and a publish whose replies were lost are found again.
    lost_replies_are_ones_own_writes => ["publish-retry", "dropped-calls", "scenario-k", "P4"];
    /// A map whose version or writer does not fit the call is invalid, and changes nothing.
    a_map_that_does_not_fit_is_invalid => ["publish-cas", "errors"];
    /// A table obeys one lease: the fence of another, or of another store's, is refused.
    another_lease_is_refused => ["table-bound"];
    /// An operator binds a table to another lease, whatever the terms, and the old one is refused.
    a_table_can_be_bound_anew => ["table-bound"];
    /// Where the store can, a write is refused as soon as its lease is another's, claim or not.
    a_write_is_conditional_on_the_lease => ["table-lease-checked"];
    /// A table that was deleted and claimed again has another uid, and refuses maps of the old one.
    a_table_made_again_is_another => ["table-uid"];
    /// A map comes back as it was published: owners, nodes, motions, epochs, annex.
    a_map_is_stored_whole => ["whole-maps", "P23b", "P31"];
    /// A map larger than one value of the store is read whole, by load and by watch.
    a_large_map_is_stored_whole => ["whole-maps", "P33"];
    /// A map of a million shards is read whole.
    a_huge_map_is_stored_whole [slow] => ["whole-maps", "P33"];
    /// While large maps follow each other, readers see whole ones only.
    readers_see_whole_maps_only => ["whole-maps", "table-watch"];
    /// Tables are listed by name, the reserved one among them, and each has its own fence.
    tables_are_apart => ["table-fence", "reserved-table", "names-apart", "P19"];
    /// The reserved table takes what a new leader must not forget, up to the largest annex.
    the_reserved_table_keeps_its_annex => ["reserved-table"];
    /// A watch begins with a snapshot, also when there is no table.
    a_watch_begins_with_a_snapshot => ["watch-snapshot"];
    /// A watch shows a table that is created, and each newest map.
    a_watch_shows_the_newest_map => ["table-watch"];
    /// A watch that is read late gets the newest map, and never goes back.
    a_late_reader_gets_the_newest_map => ["table-watch", "watch-lag"];
    /// A watch shows a table that was made again as a snapshot.
    a_watch_shows_another_life_as_a_snapshot => ["table-uid", "table-watch"];
    /// A cut watch ends, and the next one shows the newest map.
    a_cut_watch_misses_nothing => ["watch-ends", "scenario-l", "P37"];
    /// While the store is away, a look-up fails and never says that there is no table.
    a_failed_lookup_is_not_an_absent_table => ["errors", "P34"];
}

/// A fence whose lease lives elsewhere, so that only the term counts.
pub(super) fn fence(term: u64) -> Done<Fence> {
    let origin = Origin::new("conformance:elsewhere/cluster");
    Ok(Fence::new(lease_name("leader")?, Term::from_u64(term), AttemptId::random(), origin))
}

pub(super) fn table_name(text: &str) -> Done<TableName> {
    Ok(TableName::new(text)?)
}

fn header(shards: u32) -> Done<TableHeader> {
    Ok(TableHeader::new(ShardCount::new(shards)?))
}

pub(super) fn claim_of(name: &TableName, fence: &Fence) -> Done<ClaimRequest> {
    Ok(ClaimRequest::new(name.clone(), fence.clone(), header(64)?))
}

/// The table that was claimed, or the end of the trial.
fn claimed(outcome: Claim) -> Done<StoredTable> {
    Ok(want!(outcome, Claim::Claimed(table) => table, "the table is claimed"))
}

pub(super) async fn claim(client: &Client, name: &TableName, fence: &Fence) -> Done<StoredTable> {
    claimed(client.placement.claim(&claim_of(name, fence)?).await?)
}

async fn load(client: &Client, name: &TableName) -> Done<StoredTable> {
    let table = client.placement.load(name).await?;
    Ok(want!(table, Some(table) => table, "table {name} exists"))
}

/// The next version of a map, which differs from that of every other tag.
pub(super) fn next_map(base: &ShardMap, writer: &Fence, tag: u32) -> Done<Arc<ShardMap>> {
    let mut edit = base.edit();
    let id = NodeId::new(format!("node-{tag}"))?;
    let address = Address::new("10.0.0.1:4000")?;
    let entry = NodeEntry::new(id, Incarnation::random(), address, NodeStatus::Active);
    let slot = edit.put_node(entry)?;
    let shard = ShardId::new(tag % base.header().shards.get());
    edit.set_owner(shard, 0, slot)?;
    Ok(Arc::new(want!(edit.finish(writer.clone()), Some(map) => map, "the map changed")))
}

async fn publish(client: &Client, name: &TableName, map: &Arc<ShardMap>) -> Done<Publish> {
    let writer = want!(map.writer(), Some(writer) => writer, "the map has a writer");
    let expected = Version::new(map.version().get().saturating_sub(1));
    Ok(client.placement.publish(name, writer, expected, map).await?)
}

/// Publishes, which has to succeed.
pub(super) async fn published(client: &Client, name: &TableName, map: &Arc<ShardMap>) -> Done {
    let outcome = publish(client, name, map).await?;
    let version = want!(outcome, Publish::Published(version) => version, "published");
    ensure!(version == map.version(), "published as {version}, not {}", map.version());
    Ok(())
}

/// Publishes, which this fence has to keep from succeeding.
async fn fenced_by(
    client: &Client,
    name: &TableName,
    map: &Arc<ShardMap>,
    highest: &Fence,
) -> Done {
    let outcome = publish(client, name, map).await?;
    let by = want!(outcome, Publish::Fenced(by) => by,
        "a publish by {:?} is fenced by {highest:?}", map.writer());
    ensure!(by.as_ref() == Some(highest), "fenced by {by:?}, not by {highest:?}");
    Ok(())
}

/// Fails unless the table is at this map and fence, by every handle.
async fn stands(clients: &[&Client], name: &TableName, map: &ShardMap, fence: &Fence) -> Done {
    for client in clients {
        let table = load(client, name).await?;
        ensure!(table.fence == *fence, "the fence is {:?}, not {fence:?}", table.fence);
        ensure!(
            *table.map == *map,
            "stored is version {} by {:?}, not version {} by {:?}",
            table.map.version(),
            table.map.writer(),
            map.version(),
            map.writer()
        );
    }
    Ok(())
}

async fn only_a_claim_creates(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let name = table_name("orders")?;
    ensure!(client.placement.load(&name).await?.is_none(), "an unclaimed table exists");
    let fence = fence(5)?;
    let table = claim(&client, &name, &fence).await?;
    ensure!(table.name == name, "claimed {}", table.name);
    ensure!(table.fence == fence, "claimed by {:?}", table.fence);
    ensure!(table.binding == Binding::of(&fence), "bound to {:?}", table.binding);
    ensure!(table.map.version() == Version::ZERO, "created at {}", table.map.version());
    ensure!(*table.map.header() == header(64)?, "created with {:?}", table.map.header());
    ensure!(table.map.writer().is_none(), "created with writer {:?}", table.map.writer());
    ensure!(table.map.orphans() == 64, "created with owners");
    ensure!(load(&other, &name).await? == table, "loaded is another table than was claimed");
    Ok(())
}

async fn publishing_to_an_absent_table_is_fenced(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let empty = ShardMap::empty(header(64)?, coord_core::TableUid::random());
    let outcome = publish(&client, &name, &next_map(&empty, &fence, 1)?).await?;
    want!(outcome, Publish::Fenced(None) => (), "publishing to an absent table is fenced");
    ensure!(client.placement.load(&name).await?.is_none(), "publishing created the table");
    let tables = client.placement.tables().await?;
    ensure!(tables.is_empty(), "publishing created {tables:?}");
    Ok(())
}

async fn a_claim_with_another_header_is_a_mismatch(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let (name, low, high) = (table_name("orders")?, fence(5)?, fence(6)?);
    let table = claim(&client, &name, &low).await?;
    let replicated = header(64)?.with_replicas(ReplicationFactor::new(2)?);
    for other in [header(65)?, replicated] {
        let request = ClaimRequest::new(name.clone(), high.clone(), other);
        let outcome = client.placement.claim(&request).await?;
        let stored = want!(outcome, Claim::Mismatch(header) => header,
            "a claim with another header is a mismatch");
        ensure!(stored == header(64)?, "told the header {stored:?}");
    }
    stands(&[&client], &name, &table.map, &low).await?;
    published(&client, &name, &next_map(&table.map, &low, 1)?).await
}

async fn a_claim_by_a_lower_fence_is_fenced(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, highest) = (table_name("orders")?, fence(5)?);
    let table = claim(&client, &name, &highest).await?;
    for low in [fence(4)?, fence(5)?, fence(0)?] {
        let outcome = other.placement.claim(&claim_of(&name, &low)?).await?;
        let by = want!(outcome, Claim::Fenced(by) => by, "a claim by {low:?} is fenced");
        ensure!(by == highest, "fenced by {by:?}, not by {highest:?}");
    }
    stands(&[&client], &name, &table.map, &highest).await
}

async fn a_claim_may_be_repeated(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let table = claim(&client, &name, &fence).await?;
    ensure!(claim(&other, &name, &fence).await? == table, "a repeated claim got another table");
    let map = next_map(&table.map, &fence, 1)?;
    published(&client, &name, &map).await?;
    let again = claim(&client, &name, &fence).await?;
    ensure!(again.map == map, "a repeated claim got version {}", again.map.version());
    Ok(())
}

async fn a_claim_raises_the_fence_not_the_version(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, low, high) = (table_name("orders")?, fence(5)?, fence(9)?);
    let table = claim(&client, &name, &low).await?;
    let map = next_map(&table.map, &low, 1)?;
    published(&client, &name, &map).await?;
    let taken = claim(&other, &name, &high).await?;
    ensure!(taken.fence == high, "claimed by {:?}", taken.fence);
    ensure!(taken.map == map, "the claim changed the map to version {}", taken.map.version());
    stands(&[&client, &other], &name, &map, &high).await
}

async fn a_publish_by_a_lower_fence_is_fenced(cx: &Cx) -> Done {
    let (old, new) = (cx.open().await?, cx.open().await?);
    let (name, low, high) = (table_name("orders")?, fence(5)?, fence(6)?);
    let table = claim(&old, &name, &low).await?;
    let first = next_map(&table.map, &low, 1)?;
    published(&old, &name, &first).await?;
    claim(&new, &name, &high).await?;
    fenced_by(&old, &name, &next_map(&first, &low, 2)?, &high).await?;
    // Not even a version that is out of date makes it a mere conflict: the old leader has to learn it.
    fenced_by(&old, &name, &next_map(&table.map, &low, 3)?, &high).await?;
    stands(&[&old, &new], &name, &first, &high).await?;
    let second = next_map(&first, &high, 4)?;
    published(&new, &name, &second).await?;
    fenced_by(&old, &name, &next_map(&second, &low, 5)?, &high).await?;
    stands(&[&old, &new], &name, &second, &high).await
}

async fn a_publish_by_an_equal_term_of_another_attempt_is_fenced(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let (name, holder, twin) = (table_name("orders")?, fence(5)?, fence(5)?);
    let table = claim(&client, &name, &holder).await?;
    fenced_by(&client, &name, &next_map(&table.map, &twin, 1)?, &holder).await?;
    let map = next_map(&table.map, &holder, 2)?;
    published(&client, &name, &map).await?;
    fenced_by(&client, &name, &next_map(&map, &twin, 3)?, &holder).await?;
    stands(&[&client], &name, &map, &holder).await
}

async fn a_publish_raises_the_fence(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let (name, low, high) = (table_name("orders")?, fence(5)?, fence(6)?);
    let table = claim(&client, &name, &low).await?;
    let map = next_map(&table.map, &high, 1)?;
    published(&client, &name, &map).await?;
    stands(&[&client], &name, &map, &high).await?;
    fenced_by(&client, &name, &next_map(&map, &low, 2)?, &high).await?;
    let outcome = client.placement.claim(&claim_of(&name, &low)?).await?;
    want!(outcome, Claim::Fenced(_) => (), "the older leader can't claim any more");
    Ok(())
}

async fn a_paused_leaders_write_is_fenced(cx: &Cx) -> Done {
    let (old, new) = (cx.open().await?, cx.open().await?);
    let (lease, name) = (lease_name("leader")?, table_name("orders")?);
    let first = cx.grant(&old, &lease, "node-1").await?;
    let table = claim(&old, &name, &first.fence()).await?;
    let prepared = next_map(&table.map, &first.fence(), 1)?;
    // The old leader is paused here, with its write decided.
    let second = cx.grant_after_expiry(&new, &lease, "node-2", first.ttl).await?;
    let table = claim(&new, &name, &second.fence()).await?;
    fenced_by(&old, &name, &prepared, &second.fence()).await?;
    let map = next_map(&table.map, &second.fence(), 2)?;
    published(&new, &name, &map).await?;
    fenced_by(&old, &name, &prepared, &second.fence()).await?;
    stands(&[&old, &new], &name, &map, &second.fence()).await
}

async fn racing_claims_make_one_table(cx: &Cx) -> Done {
    const CLAIMS: u64 = 16;
    const ROUNDS: usize = 5;
    let clients = [cx.open().await?, cx.open().await?];
    for round in 0..ROUNDS {
        let name = table_name(&format!("orders-{round}"))?;
        // In mixed order, so that the highest is neither the first nor the last.
        let fences: Vec<Fence> =
            (0..CLAIMS).map(|n| fence(1 + (n * 7) % CLAIMS)).collect::<Done<_>>()?;
        let requests: Vec<ClaimRequest> =
            fences.iter().map(|fence| claim_of(&name, fence)).collect::<Done<_>>()?;
        let tries = requests.iter().enumerate();
        let tries = tries.map(|(n, request)| clients[n % 2].placement.claim(request));
        let stored = join_all(tries).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        let table = load(&clients[0], &name).await?;
        let highest = table.fence.term.get();
        ensure!(highest == CLAIMS, "round {round}: the highest fence stored is {highest}");
        for (fence, outcome) in fences.iter().zip(stored) {
            match outcome {
                Claim::Claimed(mine) => {
                    let (mine, uid) = (mine.map.uid(), table.map.uid());
                    ensure!(mine == uid, "round {round}: claims got the uids {mine} and {uid}");
                }
                Claim::Fenced(by) => {
                    ensure!(by.term > fence.term, "round {round}: {fence:?} fenced by {by:?}");
                }
                other => ensure!(false, "round {round}: {other:?}"),
            }
        }
    }
    Ok(())
}

async fn racing_claims_of_an_equal_term_have_one_winner(cx: &Cx) -> Done {
    const CLAIMS: usize = 8;
    let clients = [cx.open().await?, cx.open().await?];
    for (round, exists) in [false, true, false, true].into_iter().enumerate() {
        let name = table_name(&format!("orders-{round}"))?;
        if exists {
            claim(&clients[0], &name, &fence(4)?).await?;
        }
        let requests: Vec<ClaimRequest> =
            (0..CLAIMS).map(|_| claim_of(&name, &fence(5)?)).collect::<Done<_>>()?;
        let tries = requests.iter().enumerate();
        let tries = tries.map(|(n, request)| clients[n % 2].placement.claim(request));
        let mut winners = 0;
        for outcome in join_all(tries).await {
            winners += usize::from(matches!(outcome?, Claim::Claimed(_)));
        }
        ensure!(winners == 1, "round {round}: {winners} claims of an equal term won");
    }
    Ok(())
}

async fn what_a_claim_returns_stays(cx: &Cx) -> Done {
    const ROUNDS: u32 = 20;
    let (old, new) = (cx.open().await?, cx.open().await?);
    let name = table_name("orders")?;
    let mut writer = fence(1)?;
    let mut map = claim(&old, &name, &writer).await?.map;
    for round in 1..=ROUNDS {
        let late = next_map(&map, &writer, round)?;
        let next = fence(u64::from(round) + 1)?;
        let request = claim_of(&name, &next)?;
        // One of both comes first. Who is polled first changes from round to round.
        let (claim, publish) = if round % 2 == 0 {
            join(new.placement.claim(&request), publish(&old, &name, &late)).await
        } else {
            let (publish, claim) =
                join(publish(&old, &name, &late), new.placement.claim(&request)).await;
            (claim, publish)
        };
        let table = claimed(claim?)?;
        let (got, stored) = (table.map, load(&old, &name).await?.map);
        ensure!(
            got == stored,
            "round {round}: the claim returned version {}, and then {} was stored",
            got.version(),
            stored.version()
        );
        match publish? {
            Publish::Published(_) => ensure!(got == late, "round {round}: a publish was lost"),
            Publish::Fenced(_) => ensure!(got == map, "round {round}: a fenced publish counted"),
            other => ensure!(false, "round {round}: the publish is {other:?}"),
        }
        (map, writer) = (got, next);
    }
    Ok(())
}

async fn a_publish_is_a_compare_and_set(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let table = claim(&client, &name, &fence).await?;
    let first = next_map(&table.map, &fence, 1)?;
    published(&client, &name, &first).await?;
    let second = next_map(&first, &fence, 2)?;
    published(&other, &name, &second).await?;
    let early = next_map(&table.map, &fence, 3)?;
    let third = next_map(&second, &fence, 4)?;
    let ahead = next_map(&third, &fence, 5)?;
    for odd in [early, ahead] {
        let outcome = publish(&client, &name, &odd).await?;
        let (uid, version) = want!(outcome,
            Publish::Conflict { uid, version } => (uid, version),
            "a publish of version {} over 2 is a conflict", odd.version());
        ensure!(uid == second.uid(), "a conflict with uid {uid}");
        ensure!(version == second.version(), "a conflict with version {version}");
    }
    stands(&[&client, &other], &name, &second, &fence).await
}

async fn one_of_many_publishes_wins(cx: &Cx) -> Done {
    const WRITERS: u32 = 8;
    const ROUNDS: u32 = 5;
    let clients = [cx.open().await?, cx.open().await?];
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let mut map = claim(&clients[0], &name, &fence).await?.map;
    for round in 0..ROUNDS {
        let maps: Vec<Arc<ShardMap>> = (0..WRITERS)
            .map(|n| next_map(&map, &fence, round * WRITERS + n))
            .collect::<Done<_>>()?;
        let tries = maps.iter().enumerate().map(|(n, map)| publish(&clients[n % 2], &name, map));
        let mut won = Vec::new();
        for (map, outcome) in maps.iter().zip(join_all(tries).await) {
            match outcome? {
                Publish::Published(_) => won.push(Arc::clone(map)),
                Publish::Conflict { version, .. } if version == map.version() => {}
                other => ensure!(false, "round {round}: {other:?}"),
            }
        }
        ensure!(won.len() == 1, "round {round}: {} publishes of one version won", won.len());
        stands(&[&clients[0], &clients[1]], &name, &won[0], &fence).await?;
        map = won.remove(0);
    }
    Ok(())
}

async fn a_repeated_publish_is_the_same_success(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let table = claim(&client, &name, &fence).await?;
    let map = next_map(&table.map, &fence, 1)?;
    for by in [&client, &client, &other] {
        published(by, &name, &map).await?;
    }
    // Another map at the same version is no retry, although version and fence are the same.
    let outcome = publish(&client, &name, &next_map(&table.map, &fence, 2)?).await?;
    want!(outcome, Publish::Conflict { .. } => (), "another map at that version is a conflict");
    stands(&[&client, &other], &name, &map, &fence).await
}

async fn lost_replies_are_ones_own_writes(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = client.faults(&[Fault::DropReply])?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    faults.inject(Fault::DropReply).await?;
    let lost = client.placement.claim(&claim_of(&name, &fence)?).await;
    let error = want!(lost, Err(error) => error, "the reply is lost");
    ensure!(error.effect() == Effect::Unknown, "the effect of a lost reply is known: {error}");
    faults.heal().await?;
    let made = load(&other, &name).await?;
    let table = claim(&client, &name, &fence).await?;
    ensure!(table == made, "the repeated claim got another table");
    let map = next_map(&table.map, &fence, 1)?;
    faults.inject(Fault::DropReply).await?;
    let lost = client.placement.publish(&name, &fence, Version::ZERO, &map).await;
    let error = want!(lost, Err(error) => error, "the reply is lost");
    ensure!(error.effect() == Effect::Unknown, "the effect of a lost reply is known: {error}");
    faults.heal().await?;
    stands(&[&other], &name, &map, &fence).await?;
    published(&client, &name, &map).await?;
    stands(&[&other], &name, &map, &fence).await
}

async fn a_map_that_does_not_fit_is_invalid(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let (name, writer) = (table_name("orders")?, fence(5)?);
    let table = claim(&client, &name, &writer).await?;
    let first = next_map(&table.map, &writer, 1)?;
    let second = next_map(&first, &writer, 2)?;
    let by_another = next_map(&table.map, &fence(6)?, 3)?;
    for (odd, why) in [
        (&second, "a version that does not follow the expected one"),
        (&by_another, "a writer that is not the fence"),
        (&table.map, "version 0, which nobody wrote"),
    ] {
        let outcome = client.placement.publish(&name, &writer, Version::ZERO, odd).await;
        let error = want!(outcome, Err(error) => error, "a map with {why} is invalid");
        ensure!(error.kind() == ErrorKind::Invalid, "a map with {why} is refused with {error}");
    }
    stands(&[&client], &name, &table.map, &writer).await
}

/// Fences that come from another lease, or from the same name in another store.
fn foreign(fence: &Fence, term: u64) -> Done<[Fence; 2]> {
    let attempt = AttemptId::random();
    let (term, elsewhere) = (Term::from_u64(term), Origin::new("conformance:third/cluster"));
    let other_name = LeaseName::new("other-leader")?;
    Ok([
        Fence::new(other_name, term, attempt, fence.origin.clone()),
        Fence::new(fence.lease.clone(), term, attempt, elsewhere),
    ])
}

async fn another_lease_is_refused(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let table = claim(&client, &name, &fence).await?;
    for other in foreign(&fence, 99)? {
        let outcome = client.placement.claim(&claim_of(&name, &other)?).await?;
        let bound = want!(outcome, Claim::OtherLease(binding) => binding,
            "a claim under another lease is refused");
        ensure!(bound == Binding::of(&fence), "told the binding {bound:?}");
        fenced_by(&client, &name, &next_map(&table.map, &other, 1)?, &fence).await?;
    }
    stands(&[&client], &name, &table.map, &fence).await
}

async fn a_table_can_be_bound_anew(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let (name, first) = (table_name("orders")?, fence(50)?);
    let table = claim(&client, &name, &first).await?;
    let map = next_map(&table.map, &first, 1)?;
    published(&client, &name, &map).await?;
    // A wrong idea of the present binding binds nothing.
    let [second, third] = foreign(&first, 3)?;
    let wrong = claim_of(&name, &second)?.with_rebind_from(Binding::of(&third));
    let outcome = client.placement.claim(&wrong).await?;
    want!(outcome, Claim::OtherLease(_) => (), "a rebind from another lease is refused");
    let request = claim_of(&name, &second)?.with_rebind_from(Binding::of(&first));
    let table = claimed(client.placement.claim(&request).await?)?;
    ensure!(table.binding == Binding::of(&second), "bound to {:?}", table.binding);
    ensure!(table.map == map, "binding anew changed the map");
    // The same command again is the same success.
    claimed(client.placement.claim(&request).await?)?;
    stands(&[&client], &name, &map, &second).await?;
    let outcome = client.placement.claim(&claim_of(&name, &first)?).await?;
    want!(outcome, Claim::OtherLease(_) => (), "the former lease is refused");
    fenced_by(&client, &name, &next_map(&map, &first, 2)?, &second).await?;
    published(&client, &name, &next_map(&map, &second, 3)?).await
}

async fn a_write_is_conditional_on_the_lease(cx: &Cx) -> Done {
    let (old, new) = (cx.open().await?, cx.open().await?);
    if !old.guarantees().publish_checks_lease {
        let why = "the store does not check the lease with the write; claiming fences it";
        return Err(crate::case::Stop::Ignored(why.to_owned()));
    }
    let (lease, name) = (lease_name("leader")?, table_name("orders")?);
    let first = cx.grant(&old, &lease, "node-1").await?;
    let table = claim(&old, &name, &first.fence()).await?;
    let prepared = next_map(&table.map, &first.fence(), 1)?;
    release(&old, &first).await?;
    let outcome = publish(&old, &name, &prepared).await?;
    want!(outcome, Publish::Fenced(_) => (), "a write without the lease is fenced");
    let second = cx.grant(&new, &lease, "node-2").await?;
    // The successor has not claimed yet.
    let outcome = publish(&old, &name, &prepared).await?;
    want!(outcome, Publish::Fenced(_) => (), "a write under another's lease is fenced");
    let outcome = old.placement.claim(&claim_of(&name, &first.fence())?).await?;
    want!(outcome, Claim::Fenced(_) => (), "a claim under another's lease is fenced");
    let table = claim(&new, &name, &second.fence()).await?;
    ensure!(table.map.version() == Version::ZERO, "a refused write counted");
    published(&new, &name, &next_map(&table.map, &second.fence(), 2)?).await
}

async fn a_table_made_again_is_another(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let operator = client.operator()?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let old = claim(&client, &name, &fence).await?;
    let first = next_map(&old.map, &fence, 1)?;
    published(&client, &name, &first).await?;
    operator.delete_table(&name).await?;
    let outcome = publish(&client, &name, &next_map(&first, &fence, 2)?).await?;
    want!(outcome, Publish::Fenced(None) => (), "publishing to the deleted table is fenced");
    let new = claim(&client, &name, &fence).await?;
    ensure!(new.map.uid() != old.map.uid(), "made again with the same uid {}", new.map.uid());
    ensure!(new.map.version() == Version::ZERO, "made again at version {}", new.map.version());
    // The version fits, and only the uid shows that this map is of another life.
    let outcome = publish(&client, &name, &first).await?;
    let uid = want!(outcome, Publish::Conflict { uid, .. } => uid,
        "a map of the former life is a conflict");
    ensure!(uid == new.map.uid(), "a conflict with uid {uid}");
    stands(&[&client], &name, &new.map, &fence).await?;
    published(&client, &name, &next_map(&new.map, &fence, 3)?).await
}

async fn a_map_is_stored_whole(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let header = header(8)?.with_replicas(ReplicationFactor::new(3)?);
    let request = ClaimRequest::new(name.clone(), fence.clone(), header);
    let table = claimed(client.placement.claim(&request).await?)?;
    let mut edit = table.map.edit();
    let mut slots = Vec::new();
    for (n, status) in
        [NodeStatus::Active, NodeStatus::Draining, NodeStatus::Failed].into_iter().enumerate()
    {
        let id = NodeId::new(format!("node.{n}"))?;
        let address = Address::new(format!("[::1]:{}", 4_000 + n))?;
        let entry = NodeEntry::new(id, Incarnation::random(), address, status);
        slots.push(edit.put_node(entry.with_zone(Some(Label::new(format!("zone-{n}"))?)))?);
    }
    for shard in 0..6 {
        edit.set_owner(ShardId::new(shard), 0, slots[0])?;
        edit.set_owner(ShardId::new(shard), 2, slots[1])?;
    }
    edit.set_annex(Bytes::from_static(b"\0annex\xff"))?;
    let first = Arc::new(want!(edit.finish(fence.clone()), Some(map) => map, "changed"));
    published(&client, &name, &first).await?;
    let mut edit = first.edit();
    edit.set_owner(ShardId::new(1), 0, slots[1])?;
    edit.set_owner(ShardId::new(2), 2, Slot::NOBODY)?;
    let motion = |phase, since| Motion::new(0, slots[1], phase, since);
    let since = first.version();
    edit.set_motions(ShardId::new(3), vec![motion(MotionPhase::MovingTo, since)])?;
    edit.set_motions(ShardId::new(4), vec![motion(MotionPhase::Leaving, since.next())])?;
    let second = Arc::new(want!(edit.finish(fence.clone()), Some(map) => map, "changed"));
    published(&client, &name, &second).await?;
    stands(&[&client, &other], &name, &second, &fence).await?;
    let stored = load(&other, &name).await?.map;
    for (shard, epoch) in [(0, 1), (1, 2), (2, 2), (3, 1), (7, 0)] {
        let got = stored.epoch(ShardId::new(shard)).get();
        ensure!(got == epoch, "shard {shard} has epoch {got}, not {epoch}");
    }
    let watched = Watched::table(&other, &name, cx.soon()).await?;
    ensure!(watched.view.map == Some(second), "the watch shows another map than was published");
    Ok(())
}

/// A map in which every shard has all its owners, spread over many nodes; another one for each tag.
fn full_map(base: &ShardMap, writer: &Fence, tag: u32) -> Done<Arc<ShardMap>> {
    const NODES: u16 = 64;
    let mut edit = base.edit();
    for n in 0..NODES {
        let id = NodeId::new(format!("node-{n}.of-a-large-cluster"))?;
        let address = Address::new("10.0.0.1:4000")?;
        let run = Incarnation::from_u128(u128::from(n) + 1);
        edit.put_node(NodeEntry::new(id, run, address, NodeStatus::Active))?;
    }
    let places = base.raw_owners().len();
    // A multiplicative hash, so that the owners do not compress to nothing.
    let spread = |place: u32| (place.wrapping_add(tag)).wrapping_mul(2_654_435_769) >> 26;
    let owners = (0..u32::try_from(places).unwrap_or(u32::MAX))
        .map(|place| u16::try_from(spread(place)).unwrap_or_default() % NODES)
        .collect();
    edit.set_raw_owners(owners)?;
    Ok(Arc::new(want!(edit.finish(writer.clone()), Some(map) => map, "the map changed")))
}

/// Publishes and reads a map of this many shards with three owners each.
async fn large(cx: &Cx, shards: u32) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let header = header(shards)?.with_replicas(ReplicationFactor::new(3)?);
    let request = ClaimRequest::new(name.clone(), fence.clone(), header);
    let table = claimed(client.placement.claim(&request).await?)?;
    // Reading takes its time where the store is a server.
    let limit = cx.soon() * 10;
    let mut watched = Watched::table(&other, &name, limit).await?;
    let first = full_map(&table.map, &fence, 1)?;
    published(&client, &name, &first).await?;
    stands(&[&client, &other], &name, &first, &fence).await?;
    // A second version that differs in one place only, as a rebalance makes it.
    let second = next_map(&first, &fence, 2)?;
    published(&client, &name, &second).await?;
    stands(&[&client, &other], &name, &second, &fence).await?;
    let newest = |view: &TableView| view.map.as_ref() == Some(&second);
    watched.until("the large map is the newest", limit, newest).await
}

async fn a_large_map_is_stored_whole(cx: &Cx) -> Done {
    large(cx, 200_000).await
}

async fn a_huge_map_is_stored_whole(cx: &Cx) -> Done {
    large(cx, 1_000_000).await
}

async fn readers_see_whole_maps_only(cx: &Cx) -> Done {
    const VERSIONS: u32 = 8;
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let request = ClaimRequest::new(name.clone(), fence.clone(), header(50_000)?);
    let mut map = claimed(client.placement.claim(&request).await?)?.map;
    let mut maps = vec![Arc::clone(&map)];
    for tag in 1..=VERSIONS {
        map = full_map(&map, &fence, tag)?;
        maps.push(Arc::clone(&map));
    }
    let write = async {
        for map in &maps[1..] {
            published(&client, &name, map).await?;
        }
        Done::Ok(())
    };
    let read = async {
        let mut newest = 0;
        while newest < maps.len() - 1 {
            let seen = load(&other, &name).await?.map;
            let version = usize::try_from(seen.version().get()).unwrap_or(usize::MAX);
            ensure!(version >= newest, "load went back from version {newest} to {version}");
            ensure!(maps.get(version) == Some(&seen), "version {version} was read in pieces");
            newest = version;
            tokio::task::yield_now().await;
        }
        Done::Ok(())
    };
    let (written, read) = join(write, read).await;
    written.and(read)
}

async fn tables_are_apart(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let stem = "x".repeat(coord_core::NAME_BYTES_MAX - 2);
    let mut names: Vec<TableName> = ["orders", "orders.eu", "orders-eu", "order"]
        .into_iter()
        .map(table_name)
        .collect::<Done<_>>()?;
    names.push(table_name(&format!("{stem}.1"))?);
    names.push(table_name(&format!("{stem}-1"))?);
    names.push(TableName::cluster());
    let mut made = Vec::new();
    for (name, term) in names.iter().zip(5..) {
        let fence = fence(term)?;
        made.push((name, claim(&client, name, &fence).await?, fence));
    }
    for (name, table, fence) in &made {
        published(&client, name, &next_map(&table.map, fence, 1)?).await?;
    }
    let mut uids: Vec<_> = made.iter().map(|(_, table, _)| table.map.uid()).collect();
    uids.sort();
    uids.dedup();
    ensure!(uids.len() == names.len(), "{} tables have {} uids", names.len(), uids.len());
    let listed = client.placement.tables().await?;
    names.sort();
    ensure!(listed == names, "listed are {listed:?}, not {names:?}");
    Ok(())
}

async fn the_reserved_table_keeps_its_annex(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, low, high) = (TableName::cluster(), fence(5)?, fence(6)?);
    let request = ClaimRequest::new(name.clone(), low.clone(), header(1)?);
    let table = claimed(client.placement.claim(&request).await?)?;
    let mut state = 1_u32;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    })
    .take(ANNEX_BYTES_MAX)
    .collect();
    let mut edit = table.map.edit();
    edit.set_annex(Bytes::from(noise))?;
    let map = Arc::new(want!(edit.finish(low.clone()), Some(map) => map, "changed"));
    published(&client, &name, &map).await?;
    let request = ClaimRequest::new(name.clone(), high.clone(), header(1)?);
    let taken = claimed(other.placement.claim(&request).await?)?;
    ensure!(taken.map == map, "the new leader does not find what was kept");
    fenced_by(&client, &name, &next_map(&map, &low, 2)?, &high).await
}

async fn a_watch_begins_with_a_snapshot(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let empty = Watched::table(&client, &name, cx.soon()).await?;
    ensure!(empty.view.map.is_none(), "there is no table, and the snapshot has a map");
    let table = claim(&client, &name, &fence).await?;
    let full = Watched::table(&client, &name, cx.soon()).await?;
    ensure!(full.view.map == Some(table.map), "the snapshot is not what was claimed");
    Ok(())
}

async fn a_watch_shows_the_newest_map(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let mut watched = Watched::table(&other, &name, cx.soon()).await?;
    let mut map = claim(&client, &name, &fence).await?.map;
    for tag in 1..=4 {
        let shown = |view: &TableView| view.map.as_ref() == Some(&map);
        watched.until(&format!("version {} is there", map.version()), cx.soon(), shown).await?;
        let next = next_map(&map, &fence, tag)?;
        published(&client, &name, &next).await?;
        map = next;
    }
    let shown = |view: &TableView| view.map.as_ref() == Some(&map);
    watched.until("the last version is there", cx.soon(), shown).await
}

async fn a_late_reader_gets_the_newest_map(cx: &Cx) -> Done {
    const VERSIONS: u32 = 100;
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let mut map = claim(&client, &name, &fence).await?.map;
    let mut watched = Watched::table(&other, &name, cx.soon()).await?;
    for tag in 1..=VERSIONS {
        map = next_map(&map, &fence, tag)?;
        published(&client, &name, &map).await?;
    }
    let newest = |view: &TableView| view.map.as_ref() == Some(&map);
    watched.until("the newest map is there", cx.soon() * 2, newest).await?;
    // What comes after the newest would be older: the view refuses that.
    watched.drain(cx.soon() / 4).await
}

async fn a_watch_shows_another_life_as_a_snapshot(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let operator = client.operator()?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let old = claim(&client, &name, &fence).await?;
    published(&client, &name, &next_map(&old.map, &fence, 1)?).await?;
    let mut watched = Watched::table(&other, &name, cx.soon()).await?;
    operator.delete_table(&name).await?;
    let new = claim(&client, &name, &fence).await?;
    let shown = |view: &TableView| view.map.as_ref() == Some(&new.map);
    watched.until("the table lives anew", cx.soon(), shown).await?;
    published(&client, &name, &next_map(&new.map, &fence, 2)?).await?;
    let shown = |view: &TableView| {
        view.map.as_ref().is_some_and(|map| map.version().get() == 1 && map.uid() == new.map.uid())
    };
    watched.until("its first version is there", cx.soon(), shown).await
}

async fn a_cut_watch_misses_nothing(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = other.faults(&[Fault::CutWatches])?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let table = claim(&client, &name, &fence).await?;
    let mut watched = Watched::table(&other, &name, cx.soon()).await?;
    faults.inject(Fault::CutWatches).await?;
    let error = watched.error(cx.soon()).await?;
    ensure!(error.kind() == ErrorKind::Unavailable, "the watch ended with {error}");
    let map = next_map(&table.map, &fence, 1)?;
    published(&client, &name, &map).await?;
    let watched = Watched::table(&other, &name, cx.soon()).await?;
    ensure!(watched.view.map == Some(map), "the next watch does not show the newest map");
    Ok(())
}

async fn a_failed_lookup_is_not_an_absent_table(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::Cut])?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    claim(&client, &name, &fence).await?;
    faults.inject(Fault::Cut).await?;
    let looked = client.placement.load(&name).await;
    let error = want!(looked, Err(error) => error, "a look-up fails while the store is away");
    ensure!(error.kind() == ErrorKind::Unavailable, "the look-up failed with {error}");
    ensure!(error.effect() == Effect::None, "a look-up had an effect: {error}");
    let listed = client.placement.tables().await;
    want!(listed, Err(_) => (), "listing fails while the store is away");
    Ok(())
}
