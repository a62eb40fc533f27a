//! At most one holder of a name at a time, and terms that only rise.

use coord_core::{
    Acquire, AcquireRequest, AttemptId, Effect, ErrorKind, Grant, Incarnation, LeaseName,
    LeaseRecord, Page, Reclaim, Release, Renew, Term, Ttl,
};
use futures::future::{join_all, try_join_all};
use std::time::Duration;
use tokio::time::{Instant, sleep};

use crate::case::{Done, Stop, cases, ensure, want};
use crate::cx::{Client, Cx, holder, lease_name, possible, release, won};
use crate::faults::Fault;
use crate::view::Watched;

cases! { "lease":
    /// A free lease is granted as asked, and its record shows holder, term and TTL.
    a_free_lease_is_granted => ["lease-one-holder", "lease-get"];
    /// While one attempt holds the lease, another is told who does, also from the same process.
    a_second_attempt_is_held => ["lease-one-holder", "lease-other-attempt", "P7"];
    /// Of many attempts at one moment one wins, and all others are told that it did.
    one_of_many_attempts_wins => ["lease-one-holder", "scenario-j", "P6"];
    /// The same attempt, tried again, gets the same grant and term, extended.
    the_same_attempt_gets_the_same_grant => ["lease-retry", "dropped-calls", "P4"];
    /// The same attempt, tried many times at one moment, is one grant.
    an_attempt_tried_at_once_is_one_grant => ["lease-retry", "lease-one-holder"];
    /// Each grant after a release has a greater term, also to the same holder.
    terms_rise_after_release => ["term-rises", "P8"];
    /// Each grant after an expiry has a greater term, also to the same holder.
    terms_rise_after_expiry => ["term-rises", "P8"];
    /// A grant after an operator deleted the record has a greater term.
    terms_rise_after_deletion => ["term-rises", "P8"];
    /// A grant after a restart of the store has a greater term than before.
    terms_rise_over_a_restart => ["term-rises", "scenario-e", "P8"];
    /// Where it is promised, terms go on rising after the store has lost its data.
    terms_rise_over_lost_data => ["term-rises", "guarantees"];
    /// A restarted node that says that its former process is dead takes its grant over, with a greater
    /// term, and the former grant is lost.
    reclaim_takes_over_a_former_grant => ["lease-reclaim", "term-rises", "P7"];
    /// Reclaiming takes nothing from another node.
    reclaim_leaves_other_nodes_alone => ["lease-reclaim"];
    /// Without reclaiming, a restarted node waits its former grant out.
    a_restarted_node_waits_its_former_grant_out => ["lease-other-attempt", "P7"];
    /// A release ends the grant at once, and a second one changes nothing.
    a_release_frees_the_lease => ["lease-own-grant"];
    /// A release that comes after another's grant leaves that alone.
    a_late_release_leaves_the_successor => ["lease-own-grant", "P9"];
    /// A release under another attempt leaves the grant alone, also of the same node.
    a_release_ends_only_ones_own => ["lease-own-grant", "P9"];
    /// Renewals keep the grant, under one term, for as long as they come.
    renewals_keep_the_grant => ["lease-own-grant", "term-rises"];
    /// Renewing what was released is lost, and acquires nothing.
    a_renewal_after_a_release_is_lost => ["lease-lost"];
    /// Renewing what has run out is lost, and acquires nothing.
    a_renewal_after_expiry_is_lost => ["lease-lost", "P15"];
    /// Renewing what another holds by now is lost, and leaves that alone.
    a_late_renewal_loses_to_the_successor => ["lease-lost", "lease-own-grant"];
    /// A grant that is not renewed ends at its TTL, and not before.
    a_grant_ends_at_its_ttl => ["lease-expiry"];
    /// Not only the first grant of a lease ends at its TTL: each does.
    every_later_grant_ends_too => ["lease-expiry"];
    /// Where a grant's TTL was changed, a renewal by an older copy of the grant tells the TTL that counts.
    a_renewal_tells_the_ttl_that_counts => ["lease-expiry", "ttl-granted"];
    /// A renewal counts the TTL from then on.
    a_renewal_counts_from_then_on => ["lease-expiry"];
    /// A TTL is rounded up to the store's step and bounds, and what was granted is told.
    the_granted_ttl_is_told => ["ttl-granted", "guarantees", "P13"];
    /// Nobody holds a lease that nobody acquired.
    a_free_lease_has_no_record => ["lease-get"];
    /// The list shows what is held, in order, page by page, and nothing else.
    the_list_shows_what_is_held => ["lease-list"];
    /// Names that look alike are different leases, up to the longest.
    names_never_collide => ["names-apart", "P19"];
    /// A watch begins with a snapshot, also when nobody holds the lease.
    a_watch_begins_with_a_snapshot => ["watch-snapshot"];
    /// A watch shows each new holder, and the vacancy in between.
    a_watch_shows_holders_and_releases => ["lease-watch"];
    /// A watch shows the greater term of a node that reclaimed its own grant.
    a_watch_shows_a_reclaim => ["lease-watch", "lease-reclaim"];
    /// A watch shows that a grant ran out, although nobody asks.
    a_watch_shows_expiry => ["lease-watch", "lease-expiry"];
    /// A watch that was read late shows how things stand.
    a_late_reader_learns_how_things_stand => ["watch-lag", "lease-watch"];
    /// An acquire whose reply was lost is found again by the same attempt, under the same term.
    a_lost_reply_is_ones_own_grant => ["lease-retry", "scenario-k", "P4"];
    /// A renewal or a release whose reply was lost can be repeated.
    lost_replies_of_renew_and_release_do_no_harm => ["dropped-calls", "scenario-k", "P4"];
    /// While the store is away, a look-up fails and never says that nobody holds the lease.
    a_failed_lookup_is_not_a_vacancy => ["errors", "P34"];
    /// A watch ends with an error at a cut, and the next one shows what is missed.
    a_cut_watch_misses_nothing => ["watch-ends", "scenario-l", "P37"];
}

async fn a_free_lease_is_granted(cx: &Cx) -> Done {
    // Both before there is a grant: to open one may take longer than that lives.
    let (client, other) = (cx.open().await?, cx.open().await?);
    let request = cx.ask(&lease_name("jobs")?, "node-1")?;
    let grant = won(client.lease.try_acquire(&request).await?)?;
    let info = client.backend().info();
    ensure!(grant.lease == request.lease, "granted {} for {}", grant.lease, request.lease);
    ensure!(grant.holder == request.holder, "granted to {:?}", grant.holder);
    ensure!(grant.origin == info.origin, "origin {:?}, not {:?}", grant.origin, info.origin);
    let record = seen(&client, &other, &grant).await?;
    let record = want!(record, Some(record) => record, "the lease that was granted has a record");
    ensure!(record.fence() == grant.fence(), "the record shows another grant: {record:?}");
    ensure!(record.holder == grant.holder, "the record shows another holder: {record:?}");
    ensure!(record.ttl == grant.ttl, "the record shows another ttl: {record:?}");
    let remaining = record.may_expire_in.unwrap_or_default();
    ensure!(remaining <= grant.ttl.get(), "{remaining:?} to live, more than the ttl");
    Ok(())
}

/// The record of a lease that is held, as a second handle sees it; none where one of both sees none.
async fn seen(client: &Client, other: &Client, grant: &Grant) -> Done<Option<LeaseRecord>> {
    let own = client.lease.get(&grant.lease).await?;
    let record = other.lease.get(&grant.lease).await?;
    Ok(own.and(record))
}

async fn a_second_attempt_is_held(cx: &Cx) -> Done {
    let (first, second) = (cx.open().await?, cx.open().await?);
    let grant = cx.grant(&first, &lease_name("jobs")?, "node-1").await?;
    let mut same_run = grant.holder.clone();
    same_run.attempt = AttemptId::random();
    for holder in [holder("node-2")?, holder("node-1")?, same_run] {
        for client in [&first, &second] {
            let request = AcquireRequest::new(grant.lease.clone(), holder.clone(), cx.ttl());
            let outcome = client.lease.try_acquire(&request).await?;
            let record = want!(outcome, Acquire::Held(record) => record,
                "attempt {} is told that the lease is held", holder.attempt);
            ensure!(record.fence() == grant.fence(), "held by another: {record:?}");
            ensure!(record.holder == grant.holder, "held by another: {record:?}");
        }
    }
    let renewed = first.lease.renew(&grant).await?;
    want!(renewed, Renew::Renewed(_) => (), "the first attempt still holds the lease");
    Ok(())
}

async fn one_of_many_attempts_wins(cx: &Cx) -> Done {
    const ATTEMPTS: usize = 32;
    const ROUNDS: usize = 5;
    let clients = [cx.open().await?, cx.open().await?];
    let lease = lease_name("jobs")?;
    let mut term = None;
    for round in 0..ROUNDS {
        let requests: Vec<AcquireRequest> =
            (0..ATTEMPTS).map(|n| cx.ask(&lease, &format!("node-{n}"))).collect::<Done<_>>()?;
        let tries = requests
            .iter()
            .enumerate()
            .map(|(n, request)| clients[n % clients.len()].lease.try_acquire(request));
        let mut grants = Vec::new();
        let mut held = Vec::new();
        for outcome in join_all(tries).await {
            match outcome? {
                Acquire::Acquired(grant) => grants.push(grant),
                Acquire::Held(record) => held.push(record),
                other => ensure!(false, "this suite does not know {other:?}"),
            }
        }
        ensure!(grants.len() == 1, "round {round}: {} of {ATTEMPTS} attempts won", grants.len());
        let grant = &grants[0];
        let odd = held.iter().find(|record| record.fence() != grant.fence());
        ensure!(odd.is_none(), "round {round}: a loser was told of another holder: {odd:?}");
        ensure!(Some(grant.term) > term, "round {round}: term {} after {term:?}", grant.term);
        term = Some(grant.term);
        let released = clients[0].lease.release(grant).await?;
        ensure!(released == Release::Released, "round {round}: the winner held nothing");
    }
    Ok(())
}

async fn the_same_attempt_gets_the_same_grant(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let request = cx.ask(&lease_name("jobs")?, "node-1")?;
    let grant = won(client.lease.try_acquire(&request).await?)?;
    // Each retry has to extend it: three times 60 % of the TTL is more than one.
    for retry in 1..=3 {
        cx.sleep_percent(grant.ttl, 60).await;
        let by = if retry == 2 { &other } else { &client };
        let again = won(by.lease.try_acquire(&request).await?)?;
        ensure!(again.term == grant.term, "retry {retry}: term {} to {}", grant.term, again.term);
        ensure!(again.holder == grant.holder, "retry {retry}: {:?}", again.holder);
        ensure!(again.ttl == grant.ttl, "retry {retry}: ttl {}", again.ttl);
    }
    let renewed = client.lease.renew(&grant).await?;
    want!(renewed, Renew::Renewed(_) => (), "the first reply's grant is still good");
    Ok(())
}

async fn an_attempt_tried_at_once_is_one_grant(cx: &Cx) -> Done {
    let clients = [cx.open().await?, cx.open().await?];
    let request = cx.ask(&lease_name("jobs")?, "node-1")?;
    let tries = (0..8).map(|n| clients[n % 2].lease.try_acquire(&request));
    let outcomes = join_all(tries).await;
    let mut terms = Vec::new();
    for outcome in outcomes {
        terms.push(won(outcome?)?.term);
    }
    terms.dedup();
    ensure!(terms.len() == 1, "one attempt got the terms {terms:?}");
    Ok(())
}

/// Fails unless the term is above the last one, which it then is.
fn rises(last: &mut Option<Term>, grant: &Grant, after: &str) -> Done {
    let term = grant.term;
    ensure!(Some(term) > *last, "term {term} {after}, where it had been {last:?}");
    *last = Some(term);
    Ok(())
}

async fn terms_rise_after_release(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let lease = lease_name("jobs")?;
    let mut last = None;
    for node in ["node-1", "node-1", "node-2", "node-1", "node-2", "node-2"] {
        let grant = cx.grant(&client, &lease, node).await?;
        rises(&mut last, &grant, "after a release")?;
        release(&client, &grant).await?;
    }
    // The very same attempt, too: what was released is over.
    let request = cx.ask(&lease, "node-1")?;
    for _ in 0..2 {
        let grant = won(client.lease.try_acquire(&request).await?)?;
        rises(&mut last, &grant, "to a released attempt")?;
        release(&client, &grant).await?;
    }
    Ok(())
}

async fn terms_rise_after_expiry(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let lease = lease_name("jobs")?;
    let grant = cx.grant(&client, &lease, "node-1").await?;
    let mut last = Some(grant.term);
    for node in ["node-1", "node-2", "node-2"] {
        let grant = cx.grant_after_expiry(&client, &lease, node, grant.ttl).await?;
        rises(&mut last, &grant, "after an expiry")?;
    }
    Ok(())
}

async fn terms_rise_after_deletion(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let operator = client.operator()?;
    let lease = lease_name("jobs")?;
    let mut last = None;
    for node in ["node-1", "node-1", "node-2", "node-1"] {
        let grant = cx.grant(&client, &lease, node).await?;
        rises(&mut last, &grant, "after a deletion")?;
        operator.delete_lease(&lease).await?;
        // A deletion says nothing of the holder: who saw it may wait until its TTL is over.
        let gone = || async { Ok(client.lease.get(&lease).await?.is_none().then_some(())) };
        let limit = cx.expiry_limit(&client, grant.ttl) + cx.soon();
        cx.until("the deleted lease is vacant", limit, gone).await?;
    }
    Ok(())
}

async fn terms_rise_over_a_restart(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::Restart])?;
    let lease = lease_name("jobs")?;
    let grant = cx.grant(&client, &lease, "node-1").await?;
    faults.inject(Fault::Restart).await?;
    let request = cx.ask(&lease, "node-2")?;
    let limit = cx.expiry_limit(&client, grant.ttl) * 2;
    let next = cx
        .until("the store grants again", limit, || async {
            // It may well fail until the store is back.
            match client.lease.try_acquire(&request).await {
                Ok(Acquire::Acquired(grant)) => Ok(Some(grant)),
                _ => Ok(None),
            }
        })
        .await?;
    rises(&mut Some(grant.term), &next, "after a restart")
}

async fn terms_rise_over_lost_data(cx: &Cx) -> Done {
    let client = cx.open().await?;
    if !client.guarantees().terms_survive_loss {
        return Err(Stop::Ignored("the backend does not promise it".to_owned()));
    }
    let operator = client.operator()?;
    let lease = lease_name("jobs")?;
    let mut last = None;
    for node in ["node-1", "node-1", "node-2"] {
        // A handle of its own each time: an older one may have to be opened anew after the loss.
        let client = cx.open().await?;
        let grant = cx.grant(&client, &lease, node).await?;
        rises(&mut last, &grant, "after the store lost its data")?;
        possible(operator.lose_data().await)?;
    }
    Ok(())
}

/// A request of the next run of the holder's node.
fn restarted(cx: &Cx, grant: &Grant) -> AcquireRequest {
    let mut holder = grant.holder.clone();
    holder.incarnation = Incarnation::random();
    holder.attempt = AttemptId::random();
    AcquireRequest::new(grant.lease.clone(), holder, cx.ttl())
}

async fn reclaim_takes_over_a_former_grant(cx: &Cx) -> Done {
    let (former, client) = (cx.open().await?, cx.open().await?);
    let grant = cx.grant(&former, &lease_name("jobs")?, "node-1").await?;
    let request = restarted(cx, &grant).with_reclaim(Reclaim::FormerProcessIsDead);
    let next = won(client.lease.try_acquire(&request).await?)?;
    rises(&mut Some(grant.term), &next, "after a reclaim")?;
    ensure!(next.holder == request.holder, "granted to {:?}", next.holder);
    // The same attempt again is a retry, not one more reclaim.
    let again = won(client.lease.try_acquire(&request).await?)?;
    ensure!(again.term == next.term, "a retried reclaim went from {} to {}", next.term, again.term);
    let renewed = former.lease.renew(&grant).await?;
    let lost = want!(renewed, Renew::Lost(record) => record, "the former grant is lost");
    ensure!(lost.is_none_or(|record| record.fence() == next.fence()), "lost to somebody else");
    let released = former.lease.release(&grant).await?;
    ensure!(released == Release::NotHeld, "the former grant released its successor");
    want!(client.lease.renew(&next).await?, Renew::Renewed(_) => (), "the reclaimed grant lives");
    Ok(())
}

async fn reclaim_leaves_other_nodes_alone(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    for node in ["node-2", "node-11", "node"] {
        let request = cx.ask(&grant.lease, node)?.with_reclaim(Reclaim::FormerProcessIsDead);
        let outcome = client.lease.try_acquire(&request).await?;
        let record = want!(outcome, Acquire::Held(record) => record,
            "{node} can't reclaim what node-1 holds");
        ensure!(record.fence() == grant.fence(), "held by {record:?}");
    }
    let vacant = cx.ask(&lease_name("free")?, "node-2")?;
    won(client.lease.try_acquire(&vacant.with_reclaim(Reclaim::FormerProcessIsDead)).await?)?;
    Ok(())
}

async fn a_restarted_node_waits_its_former_grant_out(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let begun = Instant::now();
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    let request = restarted(cx, &grant);
    let outcome = client.lease.try_acquire(&request).await?;
    want!(outcome, Acquire::Held(_) => (), "the former grant holds on");
    cx.grant_after_expiry(&client, &grant.lease, "node-1", grant.ttl).await?;
    let waited = begun.elapsed() + cx.profile.clock_slack;
    ensure!(waited >= grant.ttl.get(), "the former grant ended after {waited:?}");
    Ok(())
}

async fn a_release_frees_the_lease(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    release(&client, &grant).await?;
    ensure!(other.lease.get(&grant.lease).await?.is_none(), "still held after the release");
    ensure!(client.lease.release(&grant).await? == Release::NotHeld, "released twice");
    cx.grant(&other, &grant.lease, "node-2").await?;
    Ok(())
}

async fn a_late_release_leaves_the_successor(cx: &Cx) -> Done {
    let (late, next) = (cx.open().await?, cx.open().await?);
    let lease = lease_name("jobs")?;
    let old = cx.grant(&late, &lease, "node-1").await?;
    let new = cx.grant_after_expiry(&next, &lease, "node-2", old.ttl).await?;
    ensure!(late.lease.release(&old).await? == Release::NotHeld, "released what was another's");
    let record = next.lease.get(&lease).await?;
    ensure!(record.is_some_and(|it| it.fence() == new.fence()), "the successor was evicted");
    want!(next.lease.renew(&new).await?, Renew::Renewed(_) => (), "the successor holds on");
    Ok(())
}

async fn a_release_ends_only_ones_own(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    let mut foreign = grant.clone();
    foreign.holder.attempt = AttemptId::random();
    ensure!(client.lease.release(&foreign).await? == Release::NotHeld, "a foreign release worked");
    let renewed = client.lease.renew(&foreign).await?;
    want!(renewed, Renew::Lost(_) => (), "a foreign renewal is lost");
    want!(client.lease.renew(&grant).await?, Renew::Renewed(_) => (), "the grant lives");
    Ok(())
}

async fn renewals_keep_the_grant(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let first = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    let rival = cx.ask(&first.lease, "node-2")?;
    let mut grant = first.clone();
    for renewal in 1..=4 {
        cx.sleep_percent(grant.ttl, 60).await;
        let renewed = client.lease.renew(&grant).await?;
        grant = want!(renewed, Renew::Renewed(grant) => grant, "renewal {renewal} succeeds");
        ensure!(grant.fence() == first.fence(), "renewal {renewal} changed the fence: {grant:?}");
        ensure!(grant.ttl == first.ttl, "renewal {renewal} changed the ttl to {}", grant.ttl);
        let outcome = client.lease.try_acquire(&rival).await?;
        want!(outcome, Acquire::Held(_) => (), "held at renewal {renewal}");
    }
    // An older copy of the grant is as good: what counts is whose it is.
    want!(client.lease.renew(&first).await?, Renew::Renewed(_) => (), "the first copy renews");
    Ok(())
}

async fn a_renewal_after_a_release_is_lost(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    release(&client, &grant).await?;
    let renewed = client.lease.renew(&grant).await?;
    want!(renewed, Renew::Lost(None) => (), "renewing a released grant is lost to nobody");
    ensure!(client.lease.get(&grant.lease).await?.is_none(), "the renewal acquired the lease");
    cx.grant(&client, &grant.lease, "node-2").await?;
    Ok(())
}

/// Waits until nobody holds the lease any more.
async fn vacant(cx: &Cx, client: &Client, lease: &LeaseName, ttl: Ttl) -> Done {
    let look = || async { Ok(client.lease.get(lease).await?.is_none().then_some(())) };
    cx.until("the grant runs out", cx.expiry_limit(client, ttl), look).await
}

async fn a_renewal_after_expiry_is_lost(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    vacant(cx, &client, &grant.lease, grant.ttl).await?;
    let renewed = client.lease.renew(&grant).await?;
    want!(renewed, Renew::Lost(None) => (), "a renewal after expiry is lost to nobody");
    ensure!(client.lease.get(&grant.lease).await?.is_none(), "a late renewal acquired the lease");
    ensure!(client.lease.release(&grant).await? == Release::NotHeld, "released what is gone");
    Ok(())
}

async fn a_late_renewal_loses_to_the_successor(cx: &Cx) -> Done {
    let (late, next) = (cx.open().await?, cx.open().await?);
    let lease = lease_name("jobs")?;
    let old = cx.grant(&late, &lease, "node-1").await?;
    let new = cx.grant_after_expiry(&next, &lease, "node-2", old.ttl).await?;
    let renewed = late.lease.renew(&old).await?;
    let lost = want!(renewed, Renew::Lost(lost) => lost, "a late renewal is lost");
    ensure!(lost.is_none_or(|record| record.fence() == new.fence()), "lost to somebody else");
    let record = next.lease.get(&lease).await?;
    ensure!(record.is_some_and(|it| it.fence() == new.fence()), "the late renewal took it back");
    want!(next.lease.renew(&new).await?, Renew::Renewed(_) => (), "the successor holds on");
    Ok(())
}

/// Waits until a rival gets the lease, and tells how long after `sent` that was.
async fn ends_at(cx: &Cx, client: &Client, grant: &Grant, sent: Instant, rival: &str) -> Done {
    let ttl = grant.ttl.get();
    let granted = Instant::now();
    cx.grant_after_expiry(client, &grant.lease, rival, grant.ttl).await?;
    let (early, late) = (sent.elapsed(), granted.elapsed());
    let slack = cx.profile.clock_slack;
    ensure!(early + slack >= ttl, "ended {early:?} after it was asked for; its ttl is {ttl:?}");
    let limit = cx.expiry_limit(client, grant.ttl) + slack;
    ensure!(late <= limit, "ended {late:?} after it was granted; its ttl is {ttl:?}");
    Ok(())
}

async fn a_grant_ends_at_its_ttl(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let sent = Instant::now();
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    ends_at(cx, &client, &grant, sent, "node-2").await
}

async fn every_later_grant_ends_too(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let lease = lease_name("jobs")?;
    let first = cx.grant(&client, &lease, "node-1").await?;
    release(&client, &first).await?;
    let sent = Instant::now();
    let second = cx.grant(&client, &lease, "node-2").await?;
    ends_at(cx, &client, &second, sent, "node-3").await?;
    // The third came over an expired one and was renewed; nobody looks while it runs out.
    let third = cx.ask(&lease, "node-4")?;
    vacant(cx, &client, &lease, first.ttl).await?;
    let third = won(client.lease.try_acquire(&third).await?)?;
    want!(client.lease.renew(&third).await?, Renew::Renewed(_) => (), "the third is renewed");
    sleep(cx.expiry_limit(&client, third.ttl)).await;
    vacant(cx, &client, &lease, third.ttl).await
}

async fn a_renewal_tells_the_ttl_that_counts(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let mut request = cx.ask(&lease_name("jobs")?, "node-1")?;
    let short = won(client.lease.try_acquire(&request).await?)?;
    request.ttl = Ttl::new(short.ttl.get() * 2)?;
    let long = won(client.lease.try_acquire(&request).await?)?;
    ensure!(long.term == short.term, "the same attempt went from {} to {}", short.term, long.term);
    let sent = Instant::now();
    let renewed = client.lease.renew(&short).await?;
    let told = want!(renewed, Renew::Renewed(grant) => grant, "an older copy renews");
    let record = want!(client.lease.get(&told.lease).await?, Some(record) => record, "it is held");
    ensure!(record.ttl == told.ttl, "the renewal told {}, the record {}", told.ttl, record.ttl);
    ends_at(cx, &client, &told, sent, "node-2").await
}

async fn a_renewal_counts_from_then_on(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    cx.sleep_percent(grant.ttl, 50).await;
    let sent = Instant::now();
    let renewed = client.lease.renew(&grant).await?;
    let grant = want!(renewed, Renew::Renewed(grant) => grant, "renewed halfway");
    ends_at(cx, &client, &grant, sent, "node-2").await
}

async fn the_granted_ttl_is_told(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let asked = [Ttl::MIN, Ttl::new(Duration::from_millis(1_001))?, Ttl::from_secs(90)?, Ttl::MAX];
    for (n, ttl) in asked.into_iter().enumerate() {
        let lease = lease_name(&format!("jobs-{n}"))?;
        // The shortest may run out meanwhile on a busy machine.
        while !tells_ttl(&client, &other, &lease, ttl).await? {}
    }
    Ok(())
}

/// Acquires, looks, renews and releases, and looks at the TTL that is told each time; false if the grant ran
/// out meanwhile.
async fn tells_ttl(client: &Client, other: &Client, lease: &LeaseName, ttl: Ttl) -> Done<bool> {
    let right = client.guarantees().granted_ttl(ttl);
    let sent = Instant::now();
    let request = AcquireRequest::new(lease.clone(), holder("node-1")?, ttl);
    let grant = won(client.lease.try_acquire(&request).await?)?;
    ensure!(grant.ttl == right, "asked for {ttl}, granted {}, not {right}", grant.ttl);
    let record = seen(client, other, &grant).await?;
    let renewed = client.lease.renew(&grant).await?;
    let released = client.lease.release(&grant).await?;
    match (record, renewed, released) {
        (Some(record), Renew::Renewed(renewed), Release::Released) => {
            ensure!(record.ttl == right, "the record says {}, not {right}", record.ttl);
            ensure!(renewed.ttl == right, "the renewal says {}, not {right}", renewed.ttl);
            Ok(true)
        }
        lost => {
            let took = sent.elapsed();
            ensure!(took >= right.get(), "lost after {took:?} of {right}: {lost:?}");
            Ok(false)
        }
    }
}

async fn a_free_lease_has_no_record(cx: &Cx) -> Done {
    let client = cx.open().await?;
    cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    let record = client.lease.get(&lease_name("job")?).await?;
    ensure!(record.is_none(), "a lease that nobody acquired has the record {record:?}");
    Ok(())
}

async fn the_list_shows_what_is_held(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let empty = client.lease.list(Page::first()).await?;
    ensure!(empty.items.is_empty() && empty.next.is_none(), "a new cluster lists {empty:?}");
    let names = ["zebra", "a", "jobs.2", "jobs-2", "jobs", "b", "jobs.10"];
    let mut held = Vec::new();
    for name in names {
        held.push(cx.grant(&client, &lease_name(name)?, "node-1").await?);
    }
    let gone = cx.grant(&client, &lease_name("released")?, "node-1").await?;
    release(&client, &gone).await?;
    held.sort_by(|one, two| one.lease.cmp(&two.lease));
    for limit in [1, 3, 7, 100] {
        let mut page = Page::first().with_limit(limit);
        let mut listed = Vec::new();
        for _ in 0..=names.len() {
            let listing = other.lease.list(page).await?;
            let count = listing.items.len();
            ensure!(count <= usize::from(limit), "{count} entries on a page of {limit}");
            listed.extend(listing.items);
            match listing.next {
                Some(next) => page = next.with_limit(limit),
                None => break,
            }
        }
        let fences: Vec<_> = listed.iter().map(LeaseRecord::fence).collect();
        let right: Vec<_> = held.iter().map(Grant::fence).collect();
        ensure!(fences == right, "pages of {limit} list {fences:?}, not {right:?}");
    }
    Ok(())
}

async fn names_never_collide(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let stem = "x".repeat(coord_core::NAME_BYTES_MAX - 2);
    let alike = ["a.b", "a-b", "ab", "a--b", "a.b.c", "a.b-c", "a-b.c", "a", "0"];
    let mut names: Vec<LeaseName> = alike.into_iter().map(lease_name).collect::<Done<_>>()?;
    for end in [".1", ".2", "-1", "01"] {
        names.push(lease_name(&format!("{stem}{end}"))?);
    }
    names.push(LeaseName::leader());
    let mut grants = Vec::new();
    for name in &names {
        grants.push(cx.grant(&client, name, "node-1").await?);
    }
    for grant in &grants {
        let record = client.lease.get(&grant.lease).await?;
        ensure!(
            record.as_ref().is_some_and(|record| record.fence() == grant.fence()),
            "{} shows {record:?}",
            grant.lease
        );
    }
    let listed = client.lease.list(Page::first()).await?.items.len();
    ensure!(listed == names.len(), "{listed} leases are listed, not {}", names.len());
    try_join_all(grants.iter().map(|grant| client.lease.release(grant))).await?;
    Ok(())
}

async fn a_watch_begins_with_a_snapshot(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let lease = lease_name("jobs")?;
    let empty = Watched::lease(&client, &lease, cx.soon()).await?;
    ensure!(empty.view.now.is_none(), "nobody holds it, and the snapshot is {:?}", empty.view);
    let grant = cx.grant(&client, &lease, "node-1").await?;
    let held = Watched::lease(&client, &lease, cx.soon()).await?;
    let now = held.view.now;
    ensure!(now.as_ref().is_some_and(|it| it.fence() == grant.fence()), "snapshot of {now:?}");
    Ok(())
}

async fn a_watch_shows_holders_and_releases(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let lease = lease_name("jobs")?;
    let mut watched = Watched::lease(&other, &lease, cx.soon()).await?;
    for (round, node) in ["node-1", "node-2", "node-1"].into_iter().enumerate() {
        let grant = cx.grant(&client, &lease, node).await?;
        let fence = grant.fence();
        watched
            .until(&format!("{node} holds it"), cx.soon(), |view| {
                view.now.as_ref().is_some_and(|record| record.fence() == fence)
            })
            .await?;
        release(&client, &grant).await?;
        watched.until("it is vacant", cx.soon(), |view| view.now.is_none()).await?;
        let seen = watched.view.vacancies;
        ensure!(seen == round + 1, "{seen} vacancies were seen after {} releases", round + 1);
    }
    Ok(())
}

async fn a_watch_shows_a_reclaim(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let lease = lease_name("jobs")?;
    let mut watched = Watched::lease(&other, &lease, cx.soon()).await?;
    let mut grant = cx.grant(&client, &lease, "node-1").await?;
    for _ in 0..2 {
        let request = restarted(cx, &grant).with_reclaim(Reclaim::FormerProcessIsDead);
        grant = won(client.lease.try_acquire(&request).await?)?;
        let fence = grant.fence();
        let shows = |view: &crate::view::LeaseView| {
            view.now.as_ref().is_some_and(|record| record.fence() == fence)
        };
        watched.until("the reclaimed grant shows", cx.soon(), shows).await?;
    }
    Ok(())
}

async fn a_watch_shows_expiry(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let lease = lease_name("jobs")?;
    let mut watched = Watched::lease(&other, &lease, cx.soon()).await?;
    for _ in 0..2 {
        let sent = Instant::now();
        let grant = cx.grant(&client, &lease, "node-1").await?;
        watched.until("it is held", cx.soon(), |view| view.now.is_some()).await?;
        let limit = cx.expiry_limit(&client, grant.ttl);
        watched.until("the grant ran out", limit, |view| view.now.is_none()).await?;
        let (after, ttl) = (sent.elapsed() + cx.profile.clock_slack, grant.ttl.get());
        ensure!(after >= ttl, "the watch showed a vacancy after {after:?} of {ttl:?}");
    }
    Ok(())
}

async fn a_late_reader_learns_how_things_stand(cx: &Cx) -> Done {
    const CHANGES: usize = 300;
    let (client, other) = (cx.open().await?, cx.open().await?);
    let lease = lease_name("jobs")?;
    let mut watched = Watched::lease(&other, &lease, cx.soon()).await?;
    for n in 0..CHANGES {
        let grant = cx.grant(&client, &lease, &format!("node-{n}")).await?;
        release(&client, &grant).await?;
    }
    let last = cx.grant(&client, &lease, "node-last").await?.fence();
    let is_last = |view: &crate::view::LeaseView| {
        view.now.as_ref().is_some_and(|record| record.fence() == last)
    };
    watched.until("the last of many holds it", cx.soon() * 2, is_last).await
}

async fn a_lost_reply_is_ones_own_grant(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = client.faults(&[Fault::DropReply])?;
    let request = cx.ask(&lease_name("jobs")?, "node-1")?;
    faults.inject(Fault::DropReply).await?;
    let lost = client.lease.try_acquire(&request).await;
    let error = want!(lost, Err(error) => error, "the reply is lost");
    ensure!(error.kind() == ErrorKind::Unavailable, "the lost reply is {error}");
    ensure!(error.effect() == Effect::Unknown, "the effect of a lost reply is known: {error}");
    faults.heal().await?;
    let applied = || async { Ok(other.lease.get(&request.lease).await?) };
    let record = cx.until("the request is applied", cx.soon(), applied).await?;
    let grant = won(client.lease.try_acquire(&request).await?)?;
    ensure!(grant.fence() == record.fence(), "the retry got another grant: {grant:?}");
    want!(client.lease.renew(&grant).await?, Renew::Renewed(_) => (), "it renews");
    Ok(())
}

async fn lost_replies_of_renew_and_release_do_no_harm(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::DropReply])?;
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    cx.sleep_percent(grant.ttl, 60).await;
    faults.inject(Fault::DropReply).await?;
    // A client with several endpoints may renew again at another one.
    want!(
        client.lease.renew(&grant).await,
        Err(_) | Ok(Renew::Renewed(_)) => (),
        "the renewal's reply is lost"
    );
    faults.heal().await?;
    cx.sleep_percent(grant.ttl, 60).await;
    let renewed = client.lease.renew(&grant).await?;
    // The newest grant: with an older one the first of several requests may be refused, and its reply lost.
    let grant =
        want!(renewed, Renew::Renewed(grant) => grant, "the renewal counted, and can be repeated");
    faults.inject(Fault::DropReply).await?;
    want!(client.lease.release(&grant).await, Err(_) => (), "the release's reply is lost");
    faults.heal().await?;
    let again = client.lease.release(&grant).await?;
    ensure!(again == Release::NotHeld, "a repeated release is {again:?}");
    let next = cx.grant(&client, &grant.lease, "node-2").await?;
    rises(&mut Some(grant.term), &next, "after a release without reply")
}

async fn a_failed_lookup_is_not_a_vacancy(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::Cut])?;
    // Long enough for the client to give up on each of the calls.
    let holder = holder("node-1")?;
    let request = AcquireRequest::new(lease_name("jobs")?, holder, Ttl::from_secs(120)?);
    let grant = won(client.lease.try_acquire(&request).await?)?;
    faults.inject(Fault::Cut).await?;
    let looked = client.lease.get(&grant.lease).await;
    let error = want!(looked, Err(error) => error, "a look-up fails while the store is away");
    ensure!(error.kind() == ErrorKind::Unavailable, "the look-up failed with {error}");
    ensure!(error.effect() == Effect::None, "a look-up had an effect: {error}");
    let listed = client.lease.list(Page::first()).await;
    want!(listed, Err(_) => (), "a listing fails while the store is away");
    let renewed = client.lease.renew(&grant).await;
    want!(renewed, Err(_) => (), "a renewal fails, and is not lost, while the store is away");
    faults.heal().await?;
    want!(client.lease.renew(&grant).await?, Renew::Renewed(_) => (), "the grant outlives a cut");
    Ok(())
}

async fn a_cut_watch_misses_nothing(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = other.faults(&[Fault::CutWatches])?;
    let lease = lease_name("jobs")?;
    let grant = cx.grant(&client, &lease, "node-1").await?;
    let mut watched = Watched::lease(&other, &lease, cx.soon()).await?;
    faults.inject(Fault::CutWatches).await?;
    let error = watched.error(cx.soon()).await?;
    ensure!(error.kind() == ErrorKind::Unavailable, "the watch ended with {error}");
    release(&client, &grant).await?;
    let watched = Watched::lease(&other, &lease, cx.soon()).await?;
    ensure!(watched.view.now.is_none(), "after the cut: {:?}", watched.view);
    Ok(())
}
