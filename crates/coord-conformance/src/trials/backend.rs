//! The backend as a whole: what it says of itself, and that clusters and handles are apart.

use coord_core::{
    AcquireRequest, AttemptId, Claim, ClaimRequest, ClusterName, Effect, ErrorKind, Fence,
    HealthStatus, NodeId, Origin, Page, Replace, Request, RequestId, ShardCount, ShardMap,
    TableHeader, TableName, TableUid, Term, Ttl, Version,
};
use std::sync::Arc;
use std::time::Duration;

use crate::case::{Done, Stop, cases, ensure, want};
use crate::cx::{Client, Cx, lease_name, node, random_cluster, release};
use crate::faults::Fault;
use crate::view::Watched;

cases! { "backend":
    /// It says which store and cluster it is, alike from every handle, and what it promises.
    info_names_store_and_cluster => ["guarantees"];
    /// No password and no token shows in what it says of itself.
    info_shows_no_secret => ["no-secrets"];
    /// A store that works is found to be in order, with a round trip.
    a_working_store_is_in_order => ["health-check", "P18"];
    /// A store that is away is found to be so, in the answer and not as an error.
    a_store_that_is_away_is_found_so => ["health-check", "P18"];
    /// While the store can't be reached, the backend's own errors say so: no look-up reads as absence, no
    /// watch begins, and nothing counts as lost.
    its_own_errors_say_that_the_store_is_away => ["errors", "P34"];
    /// After a close every call says so, and the watches end; other handles work on.
    a_closed_handle_says_so => ["closing"];
    /// A close releases and deregisters nothing.
    a_close_gives_nothing_up => ["closing"];
    /// Two clusters in one store share nothing, also when their names are alike.
    clusters_are_apart => ["cluster-isolated", "names-apart", "P19"];
}

async fn info_names_store_and_cluster(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let apart = cx.open_cluster(&random_cluster()).await?;
    let info = client.backend().info();
    ensure!(info.cluster == cx.cluster, "opened for {}, not {}", info.cluster, cx.cluster);
    ensure!(!info.scheme.is_empty(), "it names no scheme");
    ensure!(!info.target.is_empty(), "it names no target");
    let origin = &info.origin;
    let same = &other.backend().info().origin;
    ensure!(origin == same, "two handles of one cluster have origins {origin:?} and {same:?}");
    let different = &apart.backend().info().origin;
    ensure!(origin != different, "two clusters have one origin {origin:?}");
    let guarantees = client.guarantees();
    ensure!(guarantees == other.guarantees(), "two handles promise different things");
    ensure!(guarantees.ttl_min <= guarantees.ttl_max, "no ttl fits {guarantees:?}");
    ensure!(guarantees.nodes_max >= 1, "it is meant for no node");
    Ok(())
}

async fn info_shows_no_secret(cx: &Cx) -> Done {
    if cx.profile.secrets.is_empty() {
        return Err(Stop::Ignored("the fixture connects with no secret".to_owned()));
    }
    let client = cx.open().await?;
    let info = client.backend().info();
    let health = client.backend().check().await?;
    let shown = [
        format!("{info:?}"),
        format!("{:?}", client.backend()),
        format!("{:?} {:?} {:?}", client.lease, client.discovery, client.placement),
        format!("{health:?}"),
    ];
    for secret in &cx.profile.secrets {
        let leak = shown.iter().position(|text| text.contains(secret.as_str()));
        ensure!(leak.is_none(), "a secret shows in text {leak:?} of info, Debug and health");
    }
    Ok(())
}

async fn a_working_store_is_in_order(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let health = client.backend().check().await?;
    ensure!(health.status() != HealthStatus::Bad, "it works, and is found {health:?}");
    ensure!(!health.points.is_empty(), "nothing was looked at");
    let mute = health.points.iter().find(|point| point.detail.is_empty());
    ensure!(mute.is_none(), "a point says nothing: {mute:?}");
    ensure!(health.round_trip.is_some(), "no round trip was timed");
    Ok(())
}

async fn a_store_that_is_away_is_found_so(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.faults(&[Fault::Cut])?;
    faults.inject(Fault::Cut).await?;
    let health = client.backend().check().await?;
    ensure!(health.status() == HealthStatus::Bad, "it is away, and is found {health:?}");
    Ok(())
}

/// A look-up has to have failed because the store is away, and without an effect.
fn is_away<T: std::fmt::Debug>(what: &str, outcome: coord_core::Result<T>) -> Done {
    let error = want!(outcome, Err(error) => error, "{what} fails while the store is away");
    ensure!(error.kind() == ErrorKind::Unavailable, "{what} failed with {error}");
    ensure!(error.effect() == Effect::None, "{what} had an effect: {error}");
    Ok(())
}

async fn its_own_errors_say_that_the_store_is_away(cx: &Cx) -> Done {
    let client = cx.open().await?;
    let faults = client.real_faults(&[Fault::Cut])?;
    let (lease, table, info) = (lease_name("jobs")?, TableName::new("orders")?, node("node-1")?);
    // Long enough for the client to give up on each of the calls.
    let ttl = Ttl::from_secs(600)?;
    let ask = AcquireRequest::new(lease.clone(), crate::cx::holder("node-1")?, ttl);
    let grant = crate::cx::won(client.lease.try_acquire(&ask).await?)?;
    let outcome = client.discovery.register(&info, ttl, Replace::No).await?;
    let held = want!(outcome, coord_core::Register::Registered(held) => held, "registered");
    faults.inject(Fault::Cut).await?;
    is_away("nodes", client.discovery.nodes().await)?;
    is_away("get", client.lease.get(&lease).await)?;
    is_away("list", client.lease.list(Page::first()).await)?;
    is_away("load", client.placement.load(&table).await)?;
    is_away("tables", client.placement.tables().await)?;
    let watch = Watched::nodes(&client, cx.profile.trial_limit).await;
    ensure!(watch.is_err(), "a watch of the nodes began while the store was away");
    let watch = Watched::lease(&client, &lease, cx.profile.trial_limit).await;
    ensure!(watch.is_err(), "a watch of a lease began while the store was away");
    let renewed = client.lease.renew(&grant).await;
    want!(renewed, Err(_) => (), "a renewal fails, and is not lost, while the store is away");
    let beaten = client.discovery.heartbeat(&held, &info).await;
    want!(beaten, Err(_) => (), "a heartbeat fails, and is not gone, while the store is away");
    faults.heal().await?;
    let back = || async { Ok(client.lease.renew(&grant).await.ok()) };
    let renewed = cx.until("the store answers again", cx.soon() * 3, back).await?;
    want!(renewed, coord_core::Renew::Renewed(_) => (), "the grant outlives the cut");
    Ok(())
}

fn is_closed<T: std::fmt::Debug>(what: &str, outcome: coord_core::Result<T>) -> Done {
    let error = want!(outcome, Err(error) => error, "{what} says that the handle is closed");
    ensure!(error.kind() == ErrorKind::Closed, "{what} after a close says {error}");
    Ok(())
}

async fn a_closed_handle_says_so(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let (lease, info) = (lease_name("jobs")?, node("node-1")?);
    let grant = cx.grant(&client, &lease, "node-1").await?;
    let held = cx.join(&client, &info).await?;
    let record = client.discovery.nodes().await?.remove(0);
    let mut leases = Watched::lease(&client, &lease, cx.soon()).await?;
    let mut nodes = Watched::nodes(&client, cx.soon()).await?;
    client.backend().close().await?;
    for error in [leases.error(cx.soon()).await?, nodes.error(cx.soon()).await?] {
        ensure!(error.kind() == ErrorKind::Closed, "an open watch ended with {error}");
    }
    is_closed("check", client.backend().check().await)?;
    let ask = cx.ask(&lease, "node-2")?;
    is_closed("try_acquire", client.lease.try_acquire(&ask).await)?;
    is_closed("renew", client.lease.renew(&grant).await)?;
    is_closed("release", client.lease.release(&grant).await)?;
    is_closed("get", client.lease.get(&lease).await)?;
    is_closed("list", client.lease.list(Page::first()).await)?;
    let discovery = &client.discovery;
    is_closed("register", discovery.register(&info, cx.ttl(), Replace::No).await)?;
    is_closed("heartbeat", discovery.heartbeat(&held, &info).await)?;
    is_closed("deregister", discovery.deregister(&held).await)?;
    let evict = discovery.evict(&info.id, info.incarnation, &record.revision).await;
    is_closed("evict", evict)?;
    is_closed("nodes", discovery.nodes().await)?;
    placement_is_closed(cx, &client).await?;
    let mut late = client.lease.watch(&lease);
    let first = futures::StreamExt::next(&mut late).await;
    let first = want!(first, Some(event) => event, "a new watch says why it ends");
    is_closed("a new watch", first)?;
    want!(other.lease.renew(&grant).await?, coord_core::Renew::Renewed(_) => (),
        "another handle works on");
    Ok(())
}

async fn placement_is_closed(cx: &Cx, client: &Client) -> Done {
    let (table, fence, placement) = (TableName::new("orders")?, fence()?, &client.placement);
    let header = TableHeader::new(ShardCount::new(8)?);
    let claim = ClaimRequest::new(table.clone(), fence.clone(), header.clone());
    is_closed("claim", placement.claim(&claim).await)?;
    let mut edit = ShardMap::empty(header, TableUid::random()).edit();
    edit.set_annex("something".into())?;
    let map = want!(edit.finish(fence.clone()), Some(map) => Arc::new(map), "changed");
    is_closed("publish", placement.publish(&table, &fence, Version::ZERO, &map).await)?;
    is_closed("load", placement.load(&table).await)?;
    is_closed("tables", placement.tables().await)?;
    let request = Request::new(NodeId::new("node-1")?, cx.ttl().get(), "drain")?;
    is_closed("request", placement.request(&request).await)?;
    let answer = coord_core::Answer::new("done")?;
    is_closed("answer", placement.answer(&RequestId::random(), &fence, &answer).await)
}

fn fence() -> Done<Fence> {
    let origin = Origin::new("conformance:elsewhere/cluster");
    Ok(Fence::new(lease_name("leader")?, Term::from_u64(5), AttemptId::random(), origin))
}

async fn a_close_gives_nothing_up(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let info = node("node-1")?;
    let grant = cx.grant(&client, &lease_name("jobs")?, "node-1").await?;
    cx.join(&client, &info).await?;
    client.backend().close().await?;
    let record = other.lease.get(&grant.lease).await?;
    ensure!(record.is_some_and(|it| it.fence() == grant.fence()), "the close released the lease");
    let nodes = other.discovery.nodes().await?;
    ensure!(nodes.len() == 1, "the close deregistered the node");
    Ok(())
}

async fn clusters_are_apart(cx: &Cx) -> Done {
    let one = cx.open().await?;
    let name = cx.cluster.as_str();
    for alike in [format!("{name}-x"), format!("{name}0"), format!("x-{name}")] {
        let two = cx.open_cluster(&ClusterName::new(alike)?).await?;
        apart(cx, &one, &two).await?;
    }
    Ok(())
}

/// Uses every name in the second cluster that is used in the first, and looks that neither sees the
/// other's.
async fn apart(cx: &Cx, one: &Client, two: &Client) -> Done {
    let (lease, table) = (lease_name("x")?, TableName::new("x")?);
    let mut leases = Watched::lease(two, &lease, cx.soon()).await?;
    let mut nodes = Watched::nodes(two, cx.soon()).await?;
    let mut maps = Watched::table(two, &table, cx.soon()).await?;
    let mut requests = Watched::requests(two, cx.soon()).await?;
    let grant = cx.grant(one, &lease, "node-1").await?;
    let info = node("x")?;
    let ttl = Ttl::from_secs(300)?;
    let outcome = one.discovery.register(&info, ttl, Replace::Yes).await?;
    let held = want!(outcome, coord_core::Register::Registered(held) => held, "registered");
    let header = TableHeader::new(ShardCount::new(8)?);
    let claim = ClaimRequest::new(table.clone(), fence()?, header);
    let claimed = one.placement.claim(&claim).await?;
    want!(claimed, Claim::Claimed(_) | Claim::Fenced(_) => (), "claimed in one cluster");
    let request = Request::new(info.id.clone(), Duration::from_secs(60), "drain")?;
    one.placement.request(&request).await?;
    let found = two.lease.get(&lease).await?;
    ensure!(found.is_none(), "a lease shows in another cluster: {found:?}");
    ensure!(two.lease.list(Page::first()).await?.items.is_empty(), "it is listed in another");
    ensure!(two.discovery.nodes().await?.is_empty(), "a node shows in another cluster");
    ensure!(two.placement.load(&table).await?.is_none(), "a table shows in another cluster");
    ensure!(two.placement.tables().await?.is_empty(), "a table is listed in another cluster");
    cx.grant(two, &lease, "node-1").await?;
    // Whatever came through is there by the time that the other cluster's own grant shows.
    leases.until("the grant shows", cx.soon(), |view| view.now.is_some()).await?;
    nodes.drain(cx.soon() / 4).await?;
    maps.drain(cx.soon() / 4).await?;
    requests.drain(cx.soon() / 4).await?;
    ensure!(nodes.view.nodes.is_empty(), "a watch shows another cluster's node");
    ensure!(maps.view.map.is_none(), "a watch shows another cluster's table");
    ensure!(requests.view.requests.is_empty(), "a watch shows another cluster's request");
    release(one, &grant).await?;
    one.discovery.deregister(&held).await?;
    Ok(())
}
