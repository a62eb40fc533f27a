//! Who is alive: one incarnation of a node at a time, and nobody comes back by accident.

use std::collections::{BTreeMap, BTreeSet};

use coord_core::{
    Capacity, Declared, Effect, ErrorKind, Evict, Heartbeat, Incarnation, Label,
    METADATA_BYTES_MAX, Metadata, NODE_ID_BYTES_MAX, NodeId, NodeInfo, NodeRecord, Register,
    Registration, Replace, Report, ShardId, TableName, TableUid, Ttl, Version,
};
use futures::future::{join, join_all, try_join_all};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::Instant;

use crate::case::{Done, Stop, cases, ensure, want};
use crate::cx::{Client, Cx, node, possible};
use crate::faults::Fault;
use crate::view::{Departure, NodesView, Watched};

cases! { "discovery":
    /// A registered node is listed, by every handle, with the TTL that was granted.
    a_registered_node_is_listed => ["register-creates", "ttl-granted"];
    /// What a node says of itself is stored whole, its report on a table included.
    a_record_is_stored_whole => ["node-record", "P23b"];
    /// A second process with the same id is a duplicate, and is told the address of the first.
    a_duplicate_is_told_the_address => ["node-duplicate", "P7"];
    /// Of many processes with one id one is registered, and all others are duplicates of it.
    one_of_many_processes_is_registered => ["node-duplicate"];
    /// The same incarnation, registered again, is the same registration, extended.
    the_same_incarnation_registers_again => ["register-creates", "dropped-calls", "P4"];
    /// A process that asks for it replaces the older incarnation, which learns that it is superseded.
    a_replaced_incarnation_is_superseded => ["node-superseded", "scenario-h", "P41"];
    /// A replaced incarnation stays out also when its successor has gone.
    a_replaced_incarnation_never_comes_back => ["heartbeat-gone", "scenario-h", "P41"];
    /// Heartbeats keep a registration for as long as they come.
    heartbeats_keep_a_registration => ["heartbeat-updates"];
    /// A heartbeat with another node's record, or another run's, is refused, and creates nothing.
    a_heartbeat_with_anothers_record_is_refused => ["register-creates", "node-own"];
    /// A heartbeat that says something new rewrites the record.
    a_heartbeat_rewrites_what_changed => ["heartbeat-updates"];
    /// A heartbeat after expiry is told that it is gone, and creates nothing.
    a_heartbeat_after_expiry_is_gone => ["heartbeat-gone", "P41"];
    /// A heartbeat after deregistering is told that it is gone, and creates nothing.
    a_heartbeat_after_deregistering_is_gone => ["heartbeat-gone"];
    /// A heartbeat after an eviction is told that it is gone, and creates nothing.
    a_heartbeat_after_an_eviction_is_gone => ["heartbeat-gone", "node-evict", "P42"];
    /// Deregistering ends one's own registration, and may be repeated.
    deregistering_may_be_repeated => ["node-own"];
    /// Deregistering leaves the registration of another incarnation alone.
    deregistering_ends_only_ones_own => ["node-own", "P41"];
    /// A registration without heartbeats ends at its TTL, and not before.
    a_registration_ends_at_its_ttl => ["node-expiry"];
    /// What has run out may be registered by another process without asking to replace anything.
    an_expired_id_is_free => ["node-expiry", "node-duplicate"];
    /// An eviction that shows the record's revision removes it, and a second one finds nothing.
    an_eviction_removes_the_record => ["node-evict"];
    /// An eviction that shows an older revision is told that the node is alive, and removes nothing.
    an_eviction_with_an_old_revision_is_refused => ["node-evict", "node-silence"];
    /// An eviction of another incarnation is told who is alive, and removes nothing.
    an_eviction_of_another_incarnation_is_refused => ["node-evict", "scenario-h"];
    /// Nodes are listed by id, also many of them, and long and similar ids are different nodes.
    many_nodes_are_listed_in_order => ["names-apart", "node-record", "P19"];
    /// A watch begins with a snapshot, also when there is no node.
    a_watch_begins_with_a_snapshot => ["watch-snapshot"];
    /// A watch shows who joins, what changes and who leaves.
    a_watch_shows_joins_updates_and_departures => ["node-watch"];
    /// Where it is promised, a watch shows every heartbeat as another revision.
    a_watch_shows_every_heartbeat => ["node-watch"];
    /// Several nodes leave and another joins at one moment: the watch shows each of them.
    a_watch_shows_departures_of_one_moment => ["node-watch"];
    /// A watch that nothing was lost of tells a farewell as one, not by a snapshot that lacks the node.
    a_watch_tells_a_farewell => ["node-watch"];
    /// A record that somebody deleted is gone, and is told neither as a farewell nor as judged by a clock.
    a_deleted_record_is_no_farewell => ["node-silence", "node-watch", "heartbeat-gone"];
    /// A watch shows that an evicted node left.
    a_watch_shows_an_eviction => ["node-watch", "node-evict"];
    /// A watch shows that a node's registration ran out, although nobody asks.
    a_watch_shows_expiry => ["node-watch", "node-expiry"];
    /// A watch shows the incarnation that replaced another.
    a_watch_shows_a_replacement => ["node-watch", "node-superseded"];
    /// After many changes, read late, the watch shows what the list shows.
    a_watch_converges_to_the_list => ["node-watch", "watch-lag"];
    /// Three nodes change while the watch is cut: the next one shows all of it, the departures too.
    a_cut_watch_misses_nothing => ["node-watch", "watch-ends", "scenario-l", "P37"];
    /// While the store is away, listing nodes fails and never says that there are none.
    a_failed_lookup_is_not_an_empty_cluster => ["errors", "P34"];
    /// While the store is away, no watch says that a node left.
    silence_of_the_store_is_no_departure => ["node-silence", "scenario-e", "P34"];
    /// A registration whose reply was lost is found again, and is no duplicate.
    a_lost_reply_is_ones_own_registration => ["dropped-calls", "scenario-k", "P4"];
}

/// The record of a node as a handle lists it.
async fn listed(client: &Client, id: &NodeId) -> Done<Option<NodeRecord>> {
    let nodes = client.discovery.nodes().await?;
    Ok(nodes.into_iter().find(|record| record.info.id == *id))
}

/// The record of a node that has to be listed.
async fn found(client: &Client, id: &NodeId) -> Done<NodeRecord> {
    Ok(want!(listed(client, id).await?, Some(record) => record, "{id} is listed"))
}

async fn renewed(client: &Client, held: &Registration, node: &NodeInfo) -> Done<Registration> {
    let outcome = client.discovery.heartbeat(held, node).await?;
    Ok(want!(outcome, Heartbeat::Renewed(held) => held, "{} is renewed", node.id))
}

/// A heartbeat has to find nothing and to create nothing.
async fn is_gone(client: &Client, held: &Registration, node: &NodeInfo, after: &str) -> Done {
    for _ in 0..2 {
        let outcome = client.discovery.heartbeat(held, node).await?;
        want!(outcome, Heartbeat::Gone => (), "a heartbeat after {after} is told that it is gone");
        let record = listed(client, &node.id).await?;
        ensure!(record.is_none(), "a heartbeat after {after} created {record:?}");
    }
    Ok(())
}

async fn a_registered_node_is_listed(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let none = client.discovery.nodes().await?;
    ensure!(none.is_empty(), "a new cluster lists {none:?}");
    let guarantees = client.guarantees();
    for (name, ttl) in [("node-1", cx.ttl()), ("node-2", Ttl::from_secs(91)?)] {
        let info = node(name)?;
        let outcome = client.discovery.register(&info, ttl, Replace::No).await?;
        let held = want!(outcome, Register::Registered(held) => held, "{name} is registered");
        let right = guarantees.granted_ttl(ttl);
        ensure!(held.node == info.id && held.incarnation == info.incarnation, "got {held:?}");
        ensure!(held.ttl == right, "asked for {ttl}, granted {}, not {right}", held.ttl);
        for reader in [&client, &other] {
            let record = found(reader, &info.id).await?;
            ensure!(record.info == info, "listed as {:?}, not {info:?}", record.info);
            ensure!(record.ttl == right, "listed with ttl {}, not {right}", record.ttl);
            let remaining = record.may_expire_in.unwrap_or_default();
            ensure!(remaining <= right.get(), "{remaining:?} to live of {right}");
        }
    }
    Ok(())
}

/// A node that says all that can be said.
fn talkative(name: &str) -> Done<NodeInfo> {
    let label = |text: &str| Label::new(text);
    let value = "v".repeat(METADATA_BYTES_MAX - 3);
    let roles = BTreeSet::from([label("gateway")?, label("worker")?]);
    let mut info = node(name)?
        .with_capacity(Capacity::new(2.5)?)
        .with_zone(label("eu-1/a")?)
        .with_version(label("1.2.3+build")?)
        .with_metadata(Metadata::new(BTreeMap::from([("key".to_owned(), value)]))?)
        .with_declared(Declared::Draining)
        .with_started_at_ms(1_790_000_000_123)
        .with_unreachable(Some(BTreeSet::from([NodeId::new("node-2")?])))
        .with_roles(roles)?;
    info.load = Some(coord_core::Load::new(0.75)?);
    let mut report = Report::new(TableUid::random(), Version::new(7));
    report.stopping.extend([ShardId::new(1), ShardId::new(1_023)]);
    report.started.insert(ShardId::new(3));
    info.reports.insert(TableName::new("orders.eu")?, report);
    Ok(info)
}

async fn a_record_is_stored_whole(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = talkative("node-1")?;
    cx.join(&client, &info).await?;
    let record = found(&other, &info.id).await?;
    ensure!(record.info == info, "stored as {:?}, not {info:?}", record.info);
    let watched = Watched::nodes(&other, cx.soon()).await?;
    let seen = watched.view.nodes.get(&info.id).map(|record| &record.info);
    ensure!(seen == Some(&info), "the watch shows {seen:?}, not {info:?}");
    Ok(())
}

async fn a_duplicate_is_told_the_address(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (first, second) = (node("node-1")?, node("node-1")?);
    let held = cx.join(&client, &first).await?;
    let outcome = other.discovery.register(&second, cx.ttl(), Replace::No).await?;
    let record = want!(outcome, Register::Duplicate(record) => record,
        "another process with the id of a live one is a duplicate");
    ensure!(record.info.address == first.address, "duplicate of {}", record.info.address);
    ensure!(record.info.incarnation == first.incarnation, "duplicate of {record:?}");
    renewed(&client, &held, &first).await?;
    let record = found(&other, &first.id).await?;
    ensure!(record.info == first, "the duplicate replaced the first: {record:?}");
    Ok(())
}

async fn one_of_many_processes_is_registered(cx: &Cx) -> Done {
    const PROCESSES: usize = 16;
    let clients = [cx.open().await?, cx.open().await?];
    let infos: Vec<NodeInfo> = (0..PROCESSES).map(|_| node("node-1")).collect::<Done<_>>()?;
    let tries = infos
        .iter()
        .enumerate()
        .map(|(n, info)| clients[n % 2].discovery.register(info, cx.ttl(), Replace::No));
    let mut registered: Vec<Incarnation> = Vec::new();
    let mut duplicates: Vec<Incarnation> = Vec::new();
    for outcome in join_all(tries).await {
        match outcome? {
            Register::Registered(held) => registered.push(held.incarnation),
            Register::Duplicate(record) => duplicates.push(record.info.incarnation),
            other => ensure!(false, "this suite does not know {other:?}"),
        }
    }
    ensure!(registered.len() == 1, "{} of {PROCESSES} were registered", registered.len());
    let odd = duplicates.iter().find(|incarnation| **incarnation != registered[0]);
    ensure!(odd.is_none(), "a duplicate was told of another incarnation: {odd:?}");
    Ok(())
}

async fn the_same_incarnation_registers_again(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    for by in [&client, &other, &client] {
        // What the last registration did not extend has run out by the second of these, and would be
        // made anew by the next registration: so it is looked for before.
        cx.sleep_percent(held.ttl, 60).await;
        found(&client, &info.id).await?;
        cx.join(by, &info).await?;
    }
    cx.sleep_percent(held.ttl, 60).await;
    let nodes = client.discovery.nodes().await?;
    ensure!(nodes.len() == 1, "one node is listed as {nodes:?}");
    renewed(&client, &held, &info).await?;
    watched.drain(cx.soon() / 4).await?;
    ensure!(watched.view.gone.is_empty(), "meanwhile {:?} were seen to go", watched.view.gone);
    Ok(())
}

async fn replace(cx: &Cx, client: &Client, info: &NodeInfo) -> Done<Registration> {
    let outcome = client.discovery.register(info, cx.ttl(), Replace::Yes).await?;
    Ok(want!(outcome, Register::Registered(held) => held, "{} is replaced", info.id))
}

async fn a_replaced_incarnation_is_superseded(cx: &Cx) -> Done {
    let (old, new) = (cx.open().await?, cx.open().await?);
    let (first, second) = (node("node-1")?, node("node-1")?);
    let first_held = cx.join(&old, &first).await?;
    let second_held = replace(cx, &new, &second).await?;
    let outcome = old.discovery.heartbeat(&first_held, &first).await?;
    let by = want!(outcome, Heartbeat::Superseded(record) => record,
        "the older incarnation is superseded");
    ensure!(by.info.incarnation == second.incarnation, "superseded by {by:?}");
    let outcome = old.discovery.register(&first, cx.ttl(), Replace::No).await?;
    want!(outcome, Register::Duplicate(_) => (), "the older incarnation is a duplicate now");
    let record = found(&old, &second.id).await?;
    ensure!(record.info == second, "the older incarnation took it back: {record:?}");
    renewed(&new, &second_held, &second).await?;
    Ok(())
}

async fn a_replaced_incarnation_never_comes_back(cx: &Cx) -> Done {
    let (old, new) = (cx.open().await?, cx.open().await?);
    let (first, second) = (node("node-1")?, node("node-1")?);
    let first_held = cx.join(&old, &first).await?;
    let second_held = replace(cx, &new, &second).await?;
    new.discovery.deregister(&second_held).await?;
    is_gone(&old, &first_held, &first, "its successor left").await
}

async fn heartbeats_keep_a_registration(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let info = node("node-1")?;
    let mut held = cx.join(&client, &info).await?;
    let first = held.clone();
    for _ in 0..4 {
        cx.sleep_percent(held.ttl, 60).await;
        held = renewed(&client, &held, &info).await?;
        ensure!(held.incarnation == info.incarnation, "renewed as {held:?}");
        ensure!(held.ttl == first.ttl, "renewed with ttl {}, not {}", held.ttl, first.ttl);
        found(&client, &info.id).await?;
    }
    Ok(())
}

async fn a_heartbeat_with_anothers_record_is_refused(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    for odd in [node("node-2")?, node("node-1")?] {
        let outcome = client.discovery.heartbeat(&held, &odd).await;
        let error = want!(outcome, Err(error) => error,
            "a heartbeat of {} with the record of another is refused", held.node);
        ensure!(error.kind() == ErrorKind::Invalid, "it was refused with {error}");
        ensure!(error.effect() == Effect::None, "it had an effect: {error}");
    }
    let nodes = other.discovery.nodes().await?;
    let infos: Vec<&NodeInfo> = nodes.iter().map(|record| &record.info).collect();
    ensure!(infos == [&info], "after the refusals are listed {infos:?}");
    renewed(&client, &held, &info).await?;
    Ok(())
}

async fn a_heartbeat_rewrites_what_changed(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    let before = found(&other, &info.id).await?;
    let said = talkative("node-1")?.with_incarnation(info.incarnation);
    let held = renewed(&client, &held, &said).await?;
    let after = found(&other, &info.id).await?;
    ensure!(after.info == said, "rewritten as {:?}, not {said:?}", after.info);
    ensure!(after.revision != before.revision, "the revision is as before the rewrite");
    let back = renewed(&client, &held, &info).await?;
    renewed(&client, &back, &info).await?;
    let after = found(&other, &info.id).await?;
    ensure!(after.info == info, "rewritten as {:?}, not {info:?}", after.info);
    Ok(())
}

/// Waits until a node is no longer listed.
async fn unlisted(cx: &Cx, client: &Client, id: &NodeId, ttl: Ttl) -> Done {
    let look = || async { Ok(listed(client, id).await?.is_none().then_some(())) };
    cx.until("the registration runs out", cx.expiry_limit(client, ttl), look).await
}

async fn a_heartbeat_after_expiry_is_gone(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    unlisted(cx, &client, &info.id, held.ttl).await?;
    is_gone(&client, &held, &info, "expiry").await
}

async fn a_heartbeat_after_deregistering_is_gone(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    client.discovery.deregister(&held).await?;
    is_gone(&client, &held, &info.with_declared(Declared::Draining), "deregistering").await
}

async fn a_heartbeat_after_an_eviction_is_gone(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    let record = found(&other, &info.id).await?;
    let outcome = other.discovery.evict(&info.id, info.incarnation, &record.revision).await?;
    want!(outcome, Evict::Evicted => (), "the node is evicted");
    is_gone(&client, &held, &info, "an eviction").await
}

async fn deregistering_may_be_repeated(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    for _ in 0..2 {
        client.discovery.deregister(&held).await?;
        let record = listed(&other, &info.id).await?;
        ensure!(record.is_none(), "still listed after deregistering: {record:?}");
    }
    cx.join(&other, &node("node-1")?).await?;
    Ok(())
}

async fn deregistering_ends_only_ones_own(cx: &Cx) -> Done {
    let (old, new) = (cx.open().await?, cx.open().await?);
    let (first, second) = (node("node-1")?, node("node-1")?);
    let first_held = cx.join(&old, &first).await?;
    let second_held = replace(cx, &new, &second).await?;
    old.discovery.deregister(&first_held).await?;
    let record = listed(&new, &second.id).await?;
    ensure!(record.is_some(), "the older incarnation deregistered its successor");
    renewed(&new, &second_held, &second).await?;
    Ok(())
}

async fn a_registration_ends_at_its_ttl(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    cx.sleep_percent(held.ttl, 30).await;
    let sent = Instant::now();
    let held = renewed(&client, &held, &info).await?;
    let answered = Instant::now();
    unlisted(cx, &other, &info.id, held.ttl).await?;
    let (early, late) = (sent.elapsed(), answered.elapsed());
    let (slack, ttl) = (cx.profile.clock_slack, held.ttl.get());
    ensure!(early + slack >= ttl, "ended {early:?} after its heartbeat; its ttl is {ttl:?}");
    let limit = cx.expiry_limit(&client, held.ttl) + slack;
    ensure!(late <= limit, "ended {late:?} after its heartbeat; its ttl is {ttl:?}");
    Ok(())
}

async fn an_expired_id_is_free(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    unlisted(cx, &client, &info.id, held.ttl).await?;
    let next = node("node-1")?;
    cx.join(&client, &next).await?;
    let outcome = client.discovery.heartbeat(&held, &info).await?;
    want!(outcome, Heartbeat::Superseded(_) => (), "the expired incarnation is superseded");
    Ok(())
}

async fn an_eviction_removes_the_record(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (info, bystander) = (node("node-1")?, node("node-2")?);
    cx.join(&client, &info).await?;
    cx.join(&client, &bystander).await?;
    let record = found(&other, &info.id).await?;
    let outcome = other.discovery.evict(&info.id, info.incarnation, &record.revision).await?;
    want!(outcome, Evict::Evicted => (), "the node is evicted");
    ensure!(listed(&client, &info.id).await?.is_none(), "still listed after the eviction");
    found(&client, &bystander.id).await?;
    let outcome = other.discovery.evict(&info.id, info.incarnation, &record.revision).await?;
    want!(outcome, Evict::Gone => (), "a second eviction finds nothing");
    Ok(())
}

async fn an_eviction_with_an_old_revision_is_refused(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    let seen = found(&other, &info.id).await?.revision;
    let said = info.clone().with_declared(Declared::Draining);
    let held = renewed(&client, &held, &said).await?;
    let outcome = other.discovery.evict(&info.id, info.incarnation, &seen).await?;
    let alive = want!(outcome, Evict::Alive(record) => record,
        "a node that wrote since the revision that was shown is alive");
    ensure!(alive.info == said, "alive as {:?}, not {said:?}", alive.info);
    renewed(&client, &held, &said).await?;
    found(&other, &info.id).await?;
    Ok(())
}

async fn an_eviction_of_another_incarnation_is_refused(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (first, second) = (node("node-1")?, node("node-1")?);
    cx.join(&client, &first).await?;
    let old = found(&other, &first.id).await?.revision;
    let held = replace(cx, &client, &second).await?;
    let new = found(&other, &second.id).await?.revision;
    // Neither the right revision with the wrong incarnation nor the other way round will do.
    for (incarnation, revision) in [(first.incarnation, &new), (second.incarnation, &old)] {
        let outcome = other.discovery.evict(&first.id, incarnation, revision).await?;
        let alive = want!(outcome, Evict::Alive(record) => record,
            "an eviction that shows another incarnation or its revision is refused");
        ensure!(alive.info.incarnation == second.incarnation, "alive is {alive:?}");
    }
    renewed(&client, &held, &second).await?;
    Ok(())
}

async fn many_nodes_are_listed_in_order(cx: &Cx) -> Done {
    const NODES: usize = 100;
    let (client, other) = (cx.open().await?, cx.open().await?);
    let stem = "x".repeat(NODE_ID_BYTES_MAX - 2);
    let mut names: Vec<String> = ["a.b", "a-b", "ab", "a.b.c", "a.b-c"].map(str::to_owned).into();
    names.extend([".1", ".2", "-1", "01"].map(|end| format!("{stem}{end}")));
    names.extend((names.len()..NODES).map(|n| format!("node-{n}")));
    let infos: Vec<NodeInfo> = names.iter().map(|name| node(name)).collect::<Done<_>>()?;
    // Long enough for all of them to be there at the end.
    let ttl = Ttl::from_secs(300)?;
    for some in infos.chunks(10) {
        let tries = some.iter().map(|info| client.discovery.register(info, ttl, Replace::No));
        for outcome in try_join_all(tries).await? {
            want!(outcome, Register::Registered(_) => (), "each of them is registered");
        }
    }
    let ids: Vec<NodeId> =
        other.discovery.nodes().await?.into_iter().map(|record| record.info.id).collect();
    let mut right: Vec<NodeId> = infos.into_iter().map(|info| info.id).collect();
    right.sort();
    ensure!(ids == right, "listed are {ids:?}, not {right:?}");
    Ok(())
}

async fn a_watch_begins_with_a_snapshot(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let empty = Watched::nodes(&client, cx.soon()).await?;
    ensure!(empty.view.nodes.is_empty(), "there is nobody, and the snapshot is {:?}", empty.view);
    let infos = [node("node-1")?, node("node-2")?];
    for info in &infos {
        cx.join(&client, info).await?;
    }
    let full = Watched::nodes(&client, cx.soon()).await?;
    for info in &infos {
        ensure!(full.view.has(&info.id, info.incarnation), "the snapshot is {:?}", full.view);
    }
    Ok(())
}

async fn a_watch_shows_joins_updates_and_departures(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    let (info, bystander) = (node("node-1")?, node("node-2")?);
    cx.join(&client, &bystander).await?;
    let held = cx.join(&client, &info).await?;
    let joined = |view: &NodesView| {
        [&info, &bystander].iter().all(|info| view.has(&info.id, info.incarnation))
    };
    watched.until("both joined", cx.soon(), joined).await?;
    let said = info.clone().with_declared(Declared::Draining);
    let held = renewed(&client, &held, &said).await?;
    let updated =
        |view: &NodesView| view.nodes.get(&info.id).is_some_and(|record| record.info == said);
    watched.until("one is draining", cx.soon(), updated).await?;
    client.discovery.deregister(&held).await?;
    let left = |view: &NodesView| !view.nodes.contains_key(&info.id);
    watched.until("one left", cx.soon(), left).await?;
    departed(&watched.view, &info, &[Departure::Left, Departure::Missing])?;
    ensure!(watched.view.has(&bystander.id, bystander.incarnation), "the other one left too");
    Ok(())
}

async fn a_watch_shows_every_heartbeat(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    if !client.guarantees().heartbeats_show {
        return Err(Stop::Ignored("the backend does not promise it".to_owned()));
    }
    let info = node("node-1")?;
    let mut held = cx.join(&client, &info).await?;
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    for _ in 0..3 {
        held = renewed(&client, &held, &info).await?;
        let shows = |view: &NodesView| {
            view.nodes.get(&info.id).is_some_and(|record| record.revision == held.revision)
        };
        watched.until("the heartbeat shows", cx.soon(), shows).await?;
    }
    Ok(())
}

/// Fails unless exactly this node was seen to go, once, and in one of these ways.
fn departed(view: &NodesView, info: &NodeInfo, ways: &[Departure]) -> Done {
    let mut gone = view.gone.iter().filter(|(id, ..)| *id == info.id);
    let first = gone.next();
    ensure!(
        first.is_some_and(|(_, run, how)| *run == info.incarnation && ways.contains(how)),
        "{} was seen to go as {first:?}, not as one of {ways:?}",
        info.id
    );
    ensure!(gone.next().is_none(), "{} was seen to go twice", info.id);
    Ok(())
}

async fn a_watch_shows_departures_of_one_moment(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let infos = [node("node-1")?, node("node-2")?, node("node-3")?, node("node-4")?];
    let mut held = Vec::new();
    for info in &infos {
        held.push(cx.join(&client, info).await?);
    }
    let newcomer = node("node-5")?;
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    let leave = try_join_all(held.iter().map(|held| client.discovery.deregister(held)));
    let (left, joined) = join(leave, cx.join(&client, &newcomer)).await;
    left?;
    joined?;
    let settled =
        |view: &NodesView| view.nodes.len() == 1 && view.has(&newcomer.id, newcomer.incarnation);
    watched.until("four left and one joined", cx.soon(), settled).await?;
    for info in &infos {
        departed(&watched.view, info, &[Departure::Left, Departure::Missing])?;
    }
    Ok(())
}

async fn a_watch_tells_a_farewell(cx: &Cx) -> Done {
    const ROUNDS: usize = 3;
    let (client, other) = (cx.open().await?, cx.open().await?);
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    for round in 1..=ROUNDS {
        let info = node(&format!("node-{round}"))?;
        let held = cx.join(&client, &info).await?;
        watched.until("it joined", cx.soon(), |view| view.nodes.contains_key(&info.id)).await?;
        client.discovery.deregister(&held).await?;
        watched.until("it left", cx.soon(), |view| view.nodes.is_empty()).await?;
        departed(&watched.view, &info, &[Departure::Left, Departure::Missing])?;
    }
    // A snapshot may come at any time, but not each time.
    let told = watched.view.gone.iter().filter(|(.., how)| *how == Departure::Left).count();
    ensure!(told > 0, "{ROUNDS} farewells were shown by snapshots only");
    Ok(())
}

async fn a_deleted_record_is_no_farewell(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let operator = client.operator()?;
    let info = node("node-1")?;
    let held = cx.join(&client, &info).await?;
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    possible(operator.delete_node(&info.id).await)?;
    // Where the store does not say that something was deleted, it is missed when it should have ended.
    let limit = cx.expiry_limit(&client, held.ttl) + cx.soon();
    watched.until("the record is gone", limit, |view| view.nodes.is_empty()).await?;
    departed(&watched.view, &info, &[Departure::Gone, Departure::Missing])?;
    is_gone(&client, &held, &info, "its record was deleted").await
}

async fn a_watch_shows_an_eviction(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    cx.join(&client, &info).await?;
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    let record = found(&client, &info.id).await?;
    let outcome = client.discovery.evict(&info.id, info.incarnation, &record.revision).await?;
    want!(outcome, Evict::Evicted => (), "the node is evicted");
    watched.until("the node left", cx.soon(), |view| view.nodes.is_empty()).await?;
    departed(&watched.view, &info, &[Departure::Left, Departure::Missing])
}

async fn a_watch_shows_expiry(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    for name in ["node-1", "node-2"] {
        let info = node(name)?;
        let sent = Instant::now();
        let held = cx.join(&client, &info).await?;
        watched.until("it joined", cx.soon(), |view| view.nodes.contains_key(&info.id)).await?;
        let limit = cx.expiry_limit(&client, held.ttl);
        watched.until("it ran out", limit, |view| !view.nodes.contains_key(&info.id)).await?;
        let (after, ttl) = (sent.elapsed() + cx.profile.clock_slack, held.ttl.get());
        ensure!(after >= ttl, "the watch showed it gone after {after:?} of {ttl:?}");
        departed(&watched.view, &info, &[Departure::Expired, Departure::Missing])?;
    }
    Ok(())
}

async fn a_watch_shows_a_replacement(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (first, second) = (node("node-1")?, node("node-1")?);
    cx.join(&client, &first).await?;
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    replace(cx, &client, &second).await?;
    let replaced = |view: &NodesView| view.has(&second.id, second.incarnation);
    watched.until("the new incarnation joined", cx.soon(), replaced).await
}

async fn a_watch_converges_to_the_list(cx: &Cx) -> Done {
    const CHANGES: usize = 400;
    let (client, other) = (cx.open().await?, cx.open().await?);
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    let mut rng = StdRng::seed_from_u64(20);
    let mut alive: BTreeMap<u8, (Registration, NodeInfo)> = BTreeMap::new();
    let ttl = Ttl::from_secs(300)?;
    for _ in 0..CHANGES {
        let number: u8 = rng.random_range(0..12);
        let declared = if rng.random() { Declared::Active } else { Declared::Draining };
        match alive.remove(&number) {
            Some((held, _)) if rng.random_range(0..3) == 0 => {
                client.discovery.deregister(&held).await?;
            }
            Some((held, info)) => {
                let info = info.with_declared(declared);
                let held = renewed(&client, &held, &info).await?;
                alive.insert(number, (held, info));
            }
            None => {
                let info = node(&format!("node-{number}"))?.with_declared(declared);
                let outcome = client.discovery.register(&info, ttl, Replace::No).await?;
                let held = want!(outcome, Register::Registered(held) => held, "it joins");
                alive.insert(number, (held, info));
            }
        }
    }
    let right: Vec<NodeInfo> =
        other.discovery.nodes().await?.into_iter().map(|record| record.info).collect();
    ensure!(right.len() == alive.len(), "{} are listed of {}", right.len(), alive.len());
    let same = |view: &NodesView| view.nodes.values().map(|record| &record.info).eq(right.iter());
    watched.until("all is as listed", cx.soon() * 2, same).await
}

async fn a_cut_watch_misses_nothing(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = other.faults(&[Fault::CutWatches])?;
    let infos = [node("node-1")?, node("node-2")?, node("node-3")?];
    let mut held = Vec::new();
    for info in &infos {
        held.push(cx.join(&client, info).await?);
    }
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    faults.inject(Fault::CutWatches).await?;
    let error = watched.error(cx.soon()).await?;
    ensure!(error.kind() == ErrorKind::Unavailable, "the watch ended with {error}");
    client.discovery.deregister(&held[0]).await?;
    let said = infos[1].clone().with_declared(Declared::Draining);
    renewed(&client, &held[1], &said).await?;
    let next = node("node-3")?;
    replace(cx, &client, &next).await?;
    let newcomer = node("node-4")?;
    cx.join(&client, &newcomer).await?;
    let watched = Watched::nodes(&other, cx.soon()).await?;
    let seen: Vec<&NodeInfo> = watched.view.nodes.values().map(|record| &record.info).collect();
    ensure!(seen == [&said, &next, &newcomer], "after the cut the watch shows {seen:?}");
    Ok(())
}

async fn a_failed_lookup_is_not_an_empty_cluster(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::Cut])?;
    cx.join(&client, &node("node-1")?).await?;
    faults.inject(Fault::Cut).await?;
    let looked = client.discovery.nodes().await;
    let error = want!(looked, Err(error) => error, "listing fails while the store is away");
    ensure!(error.kind() == ErrorKind::Unavailable, "listing failed with {error}");
    ensure!(error.effect() == Effect::None, "listing had an effect: {error}");
    Ok(())
}

async fn silence_of_the_store_is_no_departure(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = other.faults(&[Fault::Cut])?;
    let info = node("node-1")?;
    let mut held = cx.join(&client, &info).await?;
    let mut watched = Watched::nodes(&other, cx.soon()).await?;
    faults.inject(Fault::Cut).await?;
    let end = Instant::now() + held.ttl.get() * 3;
    watched.error(cx.soon()).await?;
    while Instant::now() < end {
        cx.sleep_percent(held.ttl, 30).await;
        held = renewed(&client, &held, &info).await?;
        let again = Watched::nodes(&other, cx.soon() / 4).await;
        ensure!(again.is_err(), "a watch began while the store was away");
    }
    ensure!(watched.view.gone.is_empty(), "silence made {:?} go", watched.view.gone);
    faults.heal().await?;
    let begin = || async { Ok(Watched::nodes(&other, cx.soon()).await.ok()) };
    let watched = cx.until("a watch begins again", cx.soon() * 3, begin).await?;
    ensure!(watched.view.has(&info.id, info.incarnation), "back again: {:?}", watched.view);
    Ok(())
}

async fn a_lost_reply_is_ones_own_registration(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::DropReply])?;
    let mut tries = 0;
    let info = loop {
        let info = node(&format!("node-{tries}"))?;
        faults.inject(Fault::DropReply).await?;
        let lost = client.discovery.register(&info, cx.ttl(), Replace::No).await;
        faults.heal().await?;
        if lost.as_ref().is_err_and(|error| error.effect() == Effect::Unknown) {
            break info;
        }
        // The lost reply may be that of a request before the registration, such as one for etcd's lease. A
        // client with several endpoints then registers at another one.
        tries += 1;
        ensure!(tries < 5, "the effect of a lost reply is known: {lost:?}");
    };
    found(&client, &info.id).await?;
    let held = cx.join(&client, &info).await?;
    faults.inject(Fault::DropReply).await?;
    let lost = client.discovery.deregister(&held).await;
    want!(lost, Err(_) => (), "the reply is lost");
    faults.heal().await?;
    client.discovery.deregister(&held).await?;
    is_gone(&client, &held, &info, "deregistering").await
}
