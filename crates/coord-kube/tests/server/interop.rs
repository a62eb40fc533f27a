//! Leases that another program writes: client-go's leader election, or an operator.

use std::time::Duration;

use coord_core::{Acquire, Backend as _, LeaseEvent, Page, Renew};
use coord_integration::servers::ApiServer;
use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use libtest_mimic::Trial;

use super::setup::{SOON, acquire, admin, ask, cluster, lease, open, renew, shared, until};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        shared("a_holder_of_another_program_is_waited_out", waited_out),
        shared("a_holder_that_died_long_ago_is_shown_as_such", died_long_ago),
        shared("what_another_program_released_is_free", what_another_program_released_is_free),
        shared("a_takeover_by_another_program_is_a_loss", taken_over),
        shared("client_go_can_take_over_what_is_released_here", client_go_reads_it),
        shared("terms_go_on_over_a_deletion_that_nobody_saw", deleted),
        shared("a_lease_that_somebody_deleted_has_no_second_holder", deleted_while_held),
    ]
}

/// As client-go's `LeaderElectionRecordToLeaseSpec` writes it.
fn spec(holder: &str, seconds: i32, transitions: i32) -> LeaseSpec {
    let now = MicroTime(jiff::Timestamp::now());
    LeaseSpec {
        holder_identity: Some(holder.to_owned()),
        lease_duration_seconds: Some(seconds),
        acquire_time: Some(now.clone()),
        renew_time: Some(now),
        lease_transitions: Some(transitions),
        ..LeaseSpec::default()
    }
}

fn object(name: &str, spec: LeaseSpec) -> Lease {
    let note = ("example.com/kept".to_owned(), "by whoever writes next".to_owned());
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        annotations: Some([note].into()),
        labels: Some([("team".to_owned(), "blue".to_owned())].into()),
        finalizers: Some(vec!["example.com/wait".to_owned()]),
        ..ObjectMeta::default()
    };
    Lease { metadata, spec: Some(spec) }
}

async fn leases(server: &ApiServer) -> Api<Lease> {
    Api::default_namespaced(admin(server).await)
}

async fn waited_out(server: ApiServer) {
    let cluster = cluster();
    let name = format!("coord.{cluster}.lease.jobs");
    let api = leases(&server).await;
    let mut theirs = spec("ip-10-0-0-1_7b9f", 2, 4);
    theirs.strategy = Some("OldestEmulationVersion".to_owned());
    theirs.preferred_holder = Some("somebody".to_owned());
    // What a feature gate of the server's leaves out is not there to be kept.
    let made = api.create(&PostParams::default(), &object(&name, theirs)).await.expect("created");
    let made = made.spec.expect("a spec");
    let backend = open(&server, &cluster).await;
    let begun = tokio::time::Instant::now();
    let listed = backend.lease().list(Page::first()).await.expect("lists").items;
    assert!(listed.len() == 1 && listed[0].lease == lease("jobs"), "{listed:?}");
    let record = match backend.lease().try_acquire(&ask("jobs", "a", 30)).await.expect("told") {
        Acquire::Held(record) => record,
        other => panic!("it is held by another program: {other:?}"),
    };
    assert_eq!(record.holder.node.as_str(), "ip-10-0-0-1-7b9f");
    assert_eq!(record.ttl.get(), Duration::from_secs(2), "its own duration counts");
    assert!(record.may_expire_in.is_some_and(|left| left <= record.ttl.get()), "{record:?}");
    let grant = until("it is free", SOON, || async {
        match backend.lease().try_acquire(&ask("jobs", "a", 30)).await.expect("told") {
            Acquire::Acquired(grant) => Some(grant),
            _ => None,
        }
    })
    .await;
    assert!(begun.elapsed() >= Duration::from_secs(2), "taken after {:?}", begun.elapsed());
    let now = api.get(&name).await.expect("reads");
    let spec = now.spec.expect("a spec");
    let identity = format!("a_{}", grant.holder.attempt);
    assert_eq!(spec.holder_identity, Some(identity));
    assert_eq!((spec.lease_transitions, spec.lease_duration_seconds), (Some(5), Some(30)));
    // What we know nothing of survives.
    assert_eq!((spec.strategy, spec.preferred_holder), (made.strategy, made.preferred_holder));
    let (notes, labels) = (now.metadata.annotations, now.metadata.labels.expect("labels"));
    assert!(notes.is_some_and(|notes| notes.contains_key("example.com/kept")));
    assert_eq!((labels["team"].as_str(), labels["coord/kind"].as_str()), ("blue", "lease"));
    assert_eq!(now.metadata.finalizers, Some(vec!["example.com/wait".to_owned()]));
}

async fn died_long_ago(server: ApiServer) {
    let cluster = cluster();
    let api = leases(&server).await;
    let ago = jiff::Timestamp::now() - jiff::Span::new().seconds(20);
    for (name, renewed) in [("alive", jiff::Timestamp::now()), ("dead", ago)] {
        let mut theirs = spec("other_1", 15, 0);
        theirs.renew_time = Some(MicroTime(renewed));
        let name = format!("coord.{cluster}.lease.{name}");
        api.create(&PostParams::default(), &object(&name, theirs)).await.expect("created");
    }
    let backend = open(&server, &cluster).await;
    let listed = backend.lease().list(Page::first()).await.expect("lists").items;
    assert_eq!(listed.len(), 2, "{listed:?}");
    assert!(!listed[0].seems_abandoned(), "{listed:?}");
    let dead = backend.lease().get(&lease("dead")).await.expect("reads").expect("nobody took it");
    for record in [&listed[1], &dead] {
        let ago = record.renewed_ago.expect("it is said").as_secs();
        assert!(record.seems_abandoned() && (19..=25).contains(&ago), "{record:?}");
    }
}

async fn what_another_program_released_is_free(server: ApiServer) {
    let cluster = cluster();
    let name = format!("coord.{cluster}.lease.jobs");
    let api = leases(&server).await;
    api.create(&PostParams::default(), &object(&name, spec("", 1, 4))).await.expect("created");
    let backend = open(&server, &cluster).await;
    assert!(backend.lease().get(&lease("jobs")).await.expect("reads").is_none());
    acquire(&backend, &ask("jobs", "a", 30)).await;
}

async fn taken_over(server: ApiServer) {
    let cluster = cluster();
    let api = leases(&server).await;
    let backend = open(&server, &cluster).await;
    let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
    let name = format!("coord.{cluster}.lease.jobs");
    // client-go replaces the spec and leaves our annotations as they are.
    let mut object = api.get(&name).await.expect("reads");
    object.spec = Some(spec("other_1", 15, 1));
    api.replace(&name, &PostParams::default(), &object).await.expect("replaced");
    let by = match backend.lease().renew(&grant).await.expect("told") {
        Renew::Lost(Some(by)) => by,
        other => panic!("it was taken over: {other:?}"),
    };
    assert_eq!(by.holder.node.as_str(), "other-1");
    assert_ne!(by.holder.attempt, grant.holder.attempt);
    let released = backend.lease().release(&grant).await.expect("told");
    assert_eq!(released, coord_core::Release::NotHeld);
    let now = api.get(&name).await.expect("reads").spec.expect("a spec");
    assert_eq!(now.holder_identity.as_deref(), Some("other_1"), "the release changed it");
}

async fn client_go_reads_it(server: ApiServer) {
    let cluster = cluster();
    let backend = open(&server, &cluster).await;
    let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
    backend.lease().release(&grant).await.expect("releases");
    let name = format!("coord.{cluster}.lease.jobs");
    let now = leases(&server).await.get(&name).await.expect("it is never deleted");
    let managers = now.metadata.managed_fields.clone().unwrap_or_default();
    assert!(!managers.is_empty(), "{managers:?}");
    assert!(managers.iter().all(|one| one.manager.as_deref() == Some("coord")), "{managers:?}");
    let spec = now.spec.expect("a spec");
    // What client-go takes for released: nobody's, and a duration that its validation lets pass.
    assert_eq!(spec.holder_identity.as_deref(), Some(""));
    assert_eq!(spec.lease_duration_seconds, Some(1));
    assert!(spec.renew_time.is_some() && spec.lease_transitions.is_some());
    let term = now.metadata.annotations.expect("annotations")["coord/term"].clone();
    assert_eq!(term, grant.term.store_part().to_string(), "the term outlives its holder");
}

async fn deleted(server: ApiServer) {
    let cluster = cluster();
    let name = format!("coord.{cluster}.lease.jobs");
    let api = leases(&server).await;
    let mut last = None;
    for _ in 0..4 {
        // Each time another process, which knows of no term before.
        let backend = open(&server, &cluster).await;
        let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
        assert!(Some(grant.term) > last, "{} after {last:?}", grant.term);
        last = Some(grant.term);
        api.delete(&name, &DeleteParams::default()).await.expect("deletes");
        let lost = backend.lease().renew(&grant).await.expect("told");
        assert!(matches!(lost, Renew::Lost(None)), "{lost:?}");
    }
}

async fn deleted_while_held(server: ApiServer) {
    let cluster = cluster();
    let name = format!("coord.{cluster}.lease.jobs");
    let api = leases(&server).await;
    let (backend, other) = (open(&server, &cluster).await, open(&server, &cluster).await);
    let grant = acquire(&backend, &ask("jobs", "a", 3)).await;
    let request = ask("jobs", "b", 3);
    let held = other.lease().try_acquire(&request).await.expect("told");
    assert!(matches!(held, Acquire::Held(_)), "{held:?}");
    let mut watch = other.lease().watch(&lease("jobs"));
    let first = watch.next().await.expect("an event").expect("no error");
    assert!(matches!(first, LeaseEvent::Snapshot(Some(_))), "{first:?}");
    // The holder renews until just before, and knows nothing of it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    renew(&backend, &grant).await;
    let renewed = tokio::time::Instant::now();
    api.delete(&name, &DeleteParams::default()).await.expect("deletes");
    let waiting = async {
        let mut blank_made = false;
        loop {
            match other.lease().try_acquire(&request).await.expect("told") {
                Acquire::Acquired(next) => return next,
                Acquire::Held(by) => assert_eq!(by.fence(), grant.fence()),
                told => panic!("{told:?}"),
            }
            // Somebody who saw nothing begins to take it: that is no release either.
            if !std::mem::replace(&mut blank_made, true) {
                let blank = Lease {
                    metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
                    spec: None,
                };
                api.create(&PostParams::default(), &blank).await.expect("creates");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let next = tokio::time::timeout(SOON, waiting).await.expect("in time");
    assert!(renewed.elapsed() >= Duration::from_secs(3), "after {:?}", renewed.elapsed());
    assert!(next.term > grant.term);
    // The watch tells no vacancy before the new holder, who was the first to be seen.
    loop {
        match watch.next().await.expect("an event").expect("no error") {
            LeaseEvent::Changed(record) if record.fence() == next.fence() => break,
            LeaseEvent::Vacant => assert!(renewed.elapsed() >= Duration::from_secs(3)),
            _ => {}
        }
    }
    let lost = backend.lease().renew(&grant).await.expect("told");
    assert!(matches!(lost, Renew::Lost(Some(_))), "{lost:?}");
}
