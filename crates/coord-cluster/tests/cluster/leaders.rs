//! Leaders that should not lead any more: paused ones, second ones, and those of a store that went back.

use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{
    Cluster, Command, CommandError, EventKind, EventOrLag, Reply, Settings, Stores, Table,
    TableMismatch,
};
use coord_conformance::faults::Faulty;
use coord_core::{
    AttemptId, Backend, Binding, Claim, ClaimRequest, ClusterName, Era, Fence, LeaseName,
    MemoryBackend, Publish, ShardMap, TableHeader, TableName, Term, TokioClock,
};
use tokio_util::task::TaskTracker;

use crate::common::{LIMIT, four, info, kinds, leader, map, node, shares, store, table, until};

async fn start(stores: impl Into<Stores>, name: &str) -> Cluster {
    Cluster::builder(stores, info(name))
        .settings(Settings::fast())
        .table(Table::new(table()))
        .clock(Arc::new(TokioClock::new()))
        .start()
        .await
        .expect("starts")
}

/// The next version of a map, with nothing changed but its annex and its writer.
fn annexed(map: &ShardMap, fence: &Fence) -> Arc<ShardMap> {
    let mut edit = map.edit();
    edit.set_annex(b"{}".as_slice().into()).expect("fits");
    Arc::new(edit.finish(fence.clone()).expect("changed"))
}

fn terms(kinds: &[EventKind]) -> Vec<Term> {
    let elected = |kind: &EventKind| match kind {
        EventKind::LeaderElected { term, .. } => Some(*term),
        _ => None,
    };
    kinds.iter().filter_map(elected).collect()
}

#[tokio::test(start_paused = true)]
async fn a_leader_whose_store_went_back_gives_way_until_the_era_is_raised() {
    const BEFORE: u64 = 1_000_000;
    let store = store();
    store.rewind_terms(BEFORE);
    let one = node(&store, "n1").await;
    until(&one, |status| shares(status) == [1024]).await;
    let before = map(&one);
    let fence = one.fence().expect("leads");
    assert!(fence.term.get() > BEFORE);
    let mut events = one.events();

    // As if the store had been restored from a backup of long ago.
    store.rewind_terms(0);
    assert!(store.delete_lease(&LeaseName::leader()));
    let minutes = 2;
    tokio::time::sleep(Duration::from_secs(60 * minutes)).await;
    let tried = terms(&kinds(&mut events));
    let most = 60 * minutes / Settings::fast().leader_ttl.as_secs() + 1;
    assert!(tried.len() >= 2, "it tries again: {tried:?}");
    assert!(u64::try_from(tried.len()).expect("few") <= most, "it waits in between: {tried:?}");
    assert!(tried.iter().all(|term| *term < fence.term), "{tried:?}");
    assert_eq!(map(&one), before, "no map of a term that went back");
    assert_eq!(one.status().members.len(), 1);

    let two = start(&store.with_era(Era::new(1).expect("era")), "n2").await;
    until(&one, |status| shares(status) == [512, 512]).await;
    assert!(two.is_leader());
    assert!(two.fence().expect("leads").term > fence.term);
    assert!(map(&one).version() > before.version());
}

#[tokio::test(start_paused = true)]
async fn once_its_lease_is_deleted_a_term_writes_no_more() {
    let store = store();
    let nodes = four(&store).await;
    let before = nodes[leader(&nodes)].fence().expect("leads");
    let placement = store.placement();
    let current = map(&nodes[0]);
    let late = annexed(&current, &before);
    let table = table();
    let write = || placement.publish(&table, &before, current.version(), &late);
    // It may believe that it leads, up to its next renewal.
    assert!(store.delete_lease(&LeaseName::leader()));
    let published = write().await.expect("answered");
    assert!(matches!(published, Publish::Fenced(_)), "{published:?}");
    for node in &nodes {
        let newer = |leader: &coord_cluster::Leader| leader.term > before.term;
        until(node, |status| status.leader.as_ref().is_some_and(newer)).await;
    }
    let published = write().await.expect("answered");
    assert!(matches!(published, Publish::Fenced(_)), "{published:?}");
    assert_eq!(map(&nodes[0]), current, "nothing has to move");
    let five = node(&store, "n5").await;
    until(&five, |status| shares(status) == [204, 205, 205, 205, 205]).await;
    assert!(map(&five).writer().expect("written").term > before.term);
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_paused_past_its_ttl_writes_nothing_afterwards() {
    let store = store();
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3"] {
        let faulty = Faulty::new(Arc::new(store.reopen()));
        let node = start(&faulty, name).await;
        nodes.push((node, faulty));
    }
    for (node, _) in &nodes {
        until(node, |status| shares(status) == [341, 341, 342]).await;
    }
    let leads = nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads");
    let (paused, faulty) = &nodes[leads];
    let (other, _) = &nodes[(leads + 1) % 3];
    let fence = paused.fence().expect("leads");
    let prepared = map(paused);

    faulty.control().pause();
    // A write that is on its way through the pause, and a command whose write hangs.
    let late = annexed(&prepared, &fence);
    let placement = faulty.placement();
    let (on_its_way, expected) = (fence.clone(), prepared.version());
    let tasks = TaskTracker::new();
    let write =
        tasks.spawn(async move { placement.publish(&table(), &on_its_way, expected, &late).await });
    let asking = paused.clone();
    let command = tasks.spawn(async move { asking.command(Command::Pause).await });
    let taken = until(other, |status| {
        status.leader.as_ref().is_some_and(|leader| leader.term > fence.term)
    });
    tokio::select! {
        biased;
        _ = taken => assert!(!paused.is_leader(), "two lead at once"),
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("nobody took over"),
    }
    until(other, |status| shares(status) == [512, 512]).await;
    let meanwhile = map(other).version();

    faulty.control().heal();
    let written = write.await.expect("runs");
    assert!(matches!(written, Ok(Publish::Fenced(_))), "{written:?}");
    let reply = command.await.expect("runs").expect("answered");
    assert_eq!(reply, Reply::Refused(CommandError::Lost));
    for (node, _) in &nodes {
        until(node, |status| shares(status) == [341, 341, 342]).await;
        assert!(map(node).version() > meanwhile, "no map is lost");
        assert!(!node.status().paused, "the command came to nothing");
    }
    assert!(!paused.is_leader());
}

#[tokio::test(start_paused = true)]
async fn a_leader_of_another_lease_is_told_which_one_the_tables_obey() {
    let store = store();
    let right = start(&store, "n1").await;
    until(&right, |status| shares(status) == [1024]).await;
    let elsewhere = MemoryBackend::isolated(ClusterName::new("elsewhere").expect("name"));
    let stores = Stores::new(&store.reopen()).with_lease(&elsewhere);
    let wrong = start(stores, "n2").await;
    let mut events = wrong.events();
    let refused = async {
        loop {
            if let Some(EventOrLag::Event(event)) = events.next().await
                && let EventKind::TableRefused { table, misfit, .. } = &event.kind
            {
                return (table.clone(), misfit.clone());
            }
        }
    };
    let (refused, misfit) = tokio::time::timeout(LIMIT, refused).await.expect("it is told");
    let fence = right.fence().expect("leads");
    assert_eq!(refused, TableName::cluster());
    assert_eq!(misfit, TableMismatch::OtherLease(Binding::of(&fence)));
    assert_eq!(misfit.to_string(), format!("obeys lease _leader of {}", fence.origin));
    // It is a node like any other.
    until(&right, |status| shares(status) == [512, 512]).await;
    assert_eq!(map(&right).writer().map(|writer| &writer.origin), Some(&fence.origin));
    assert!(!wrong.is_leader());
}

/// Lets somebody else claim all tables under a fence of his own.
async fn usurp(store: &MemoryBackend, fence: &Fence) {
    let tables = [(TableName::cluster(), TableHeader::new(coord_core::ShardCount::ONE))];
    for (name, header) in tables.into_iter().chain([(table(), TableHeader::default())]) {
        let claim = store.placement().claim(&ClaimRequest::new(name, fence.clone(), header)).await;
        assert!(matches!(claim, Ok(Claim::Claimed(_))), "{claim:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_leaders_by_force_one_writes_and_the_other_is_told() {
    // Where the maps live apart from the leases, only the fence decides.
    let (store, leases) = (store(), store());
    let stores = || Stores::new(&store.reopen()).with_lease(&leases.reopen());
    let one = start(stores(), "n1").await;
    until(&one, |status| shares(status) == [1024]).await;
    let fence = one.fence().expect("leads");
    let term = Term::from_u64(fence.term.get() + 1);
    let forged =
        Fence::new(fence.lease.clone(), term, AttemptId::from_u128(7), fence.origin.clone());
    usurp(&store, &forged).await;
    let before = map(&one);
    let next = annexed(&before, &forged);
    let written = store.placement().publish(&table(), &forged, before.version(), &next).await;
    assert!(matches!(written, Ok(Publish::Published(_))), "{written:?}");
    assert_eq!(one.fence(), Some(fence.clone()), "it has not noticed");
    let mut events = one.events();

    // Something that the leader has to write down.
    let two = start(stores(), "n2").await;
    until(&one, |status| status.leader.as_ref().is_none_or(|leader| leader.term > fence.term))
        .await;
    let lost = |kind: &EventKind| matches!(kind, EventKind::LeadershipLost { term, .. } if *term == fence.term);
    assert!(kinds(&mut events).iter().any(lost), "it was told");
    let stored = store.placement().load(&table()).await.expect("loads").expect("exists").map;
    assert!(stored.version() > before.version());
    assert_ne!(stored.writer(), Some(&fence), "it wrote nothing more");

    // The terms go on to rise, and one of them passes the forged one.
    until(&two, |status| shares(status) == [512, 512]).await;
    assert!(map(&two).writer().expect("written").term > forged.term);
}

#[tokio::test(start_paused = true)]
async fn a_second_leader_of_other_leases_is_refused() {
    let (store, leases, others) = (store(), store(), store());
    let one = start(Stores::new(&store).with_lease(&leases), "n1").await;
    until(&one, |status| shares(status) == [1024]).await;
    let origin = one.fence().expect("leads").origin;
    let two = start(Stores::new(&store).with_lease(&others), "n2").await;
    until(&two, |status| shares(status) == [512, 512]).await;
    for _ in 0..20 {
        tokio::time::sleep(Settings::fast().leader_ttl).await;
        assert!(one.is_leader());
        assert_eq!(map(&two).writer().map(|fence| &fence.origin), Some(&origin));
    }
    assert!(two.command(Command::Pause).await.is_ok_and(|reply| !reply.is_done()));
}
