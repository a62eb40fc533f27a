//! One cluster over three stores: its lease lives in Kubernetes, its nodes are registered in NATS, and its
//! maps are kept by etcd, which fences writers by the terms of a lease that it never saw.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use coord::cluster::{Cluster, Settings, Stores, Table};
use coord::session::Leases;
use coord::{
    Address, Backend, Binding, Claim, ClaimRequest, Fence, Incarnation, LeaseName, NodeId,
    NodeInfo, NodeStatus, Publish, ShardCount, ShardMap, TableName, connect,
};
use coord_integration::servers::{ApiServer, Etcd, Kube, Nats, Server};
use coord_integration::{Missing, trial};
use libtest_mimic::{Arguments, Failed, Trial};

type Done<T = ()> = Result<T, Failed>;

/// For what has to come about, however busy the machine is; no promise is measured by it.
const PATIENCE: Duration = Duration::from_secs(60);
const SHARDS: u32 = 120;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let found = found();
    let trials = vec![
        on(&found, "the_leader_crashes", the_leader_crashes),
        on(&found, "a_lease_of_another_store_is_refused", another_lease_is_refused),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// What the servers are started with.
type Servers = (Kube, Nats, Etcd);

fn found() -> Result<Servers, Missing> {
    // One that was given would keep what is left by the trials.
    let kube = Kube::new().with_control().find()?;
    Ok((kube, Nats::new().with_control().find()?, Etcd::new().with_control().find()?))
}

fn on(
    found: &Result<Servers, Missing>,
    name: &str,
    body: impl AsyncFn(&mut Mixed) -> Done + Send + 'static,
) -> Trial {
    trial(name, found, move |(kube, nats, etcd)| {
        let servers = (kube.start()?, nats.start()?, etcd.start()?);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async { body(&mut Mixed::start(servers).await?).await })
    })
}

/// A cluster of three members.
struct Mixed {
    leases: Arc<dyn Backend>,
    nodes: Arc<dyn Backend>,
    maps: Arc<dyn Backend>,
    members: Vec<Cluster>,
    _servers: (ApiServer, Server, Server),
}

impl Mixed {
    async fn start(servers: (ApiServer, Server, Server)) -> Done<Self> {
        let (kube, nats, etcd) = &servers;
        let open = async |url: String| connect(&url).await.map(|coord| Arc::clone(coord.backend()));
        let kubeconfig = kube.kubeconfig().display();
        let mut mixed = Self {
            leases: open(format!("kube:///mixed?kubeconfig={kubeconfig}")).await?,
            nodes: open(format!("{}/mixed", nats.url())).await?,
            maps: open(format!("{}/mixed", etcd.url())).await?,
            members: Vec::new(),
            _servers: servers,
        };
        for number in 1..=3_u16 {
            let id = NodeId::new(format!("n{number}"))?;
            let node = NodeInfo::new(id, Address::new(format!("localhost:{}", 4000 + number))?);
            let stores = Stores::new(mixed.leases.as_ref())
                .with_discovery(mixed.nodes.as_ref())
                .with_placement(mixed.maps.as_ref());
            let member = Cluster::builder(stores, node)
                .settings(quick())
                .table(Table::new(table()).shards(ShardCount::new(SHARDS)?))
                .start()
                .await?;
            mixed.members.push(member);
        }
        mixed.shared_by(3).await?;
        Ok(mixed)
    }

    /// Waits until every member sees the shards shared evenly by so many.
    async fn shared_by(&self, count: u32) -> Done {
        for member in &self.members {
            let shared = member.wait_for(|status| {
                let active = status.members.iter().filter(|m| m.status == NodeStatus::Active);
                let shares: Vec<_> = active.map(|member| member.shards).collect();
                let even = shares.iter().all(|share| share * count == SHARDS);
                let all = shares.len() == usize::try_from(count).expect("few");
                status.is_settled() && status.leader.is_some() && all && even
            });
            let waited = tokio::time::timeout(PATIENCE, shared).await;
            let told = || {
                format!("not shared by {count}, as {} sees: {:?}", member.node(), member.status())
            };
            waited.map_err(|_| told())??;
        }
        Ok(())
    }

    /// The place of the member that leads, and its fence, from Kubernetes.
    async fn leader(&self) -> Done<(usize, Fence)> {
        let leads = async {
            loop {
                let mut fences = self.members.iter().map(Cluster::fence).enumerate();
                if let Some(found) = fences.find_map(|(n, fence)| Some((n, fence?))) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        Ok(tokio::time::timeout(PATIENCE, leads).await.map_err(|_| "nobody leads")?)
    }

    /// The newest map, as etcd has it.
    async fn map(&self) -> Done<Arc<ShardMap>> {
        Ok(self.maps.placement().load(&table()).await?.ok_or("there is no table")?.map)
    }

    /// Each store has its own part of the cluster, and nothing of the others'.
    async fn is_apart(&self) -> Done {
        let (_, fence) = self.leader().await?;
        let mut held = Vec::new();
        let mut registered = Vec::new();
        let mut tables = Vec::new();
        for store in [&self.leases, &self.nodes, &self.maps] {
            let record = store.lease().get(&LeaseName::leader()).await?;
            held.push(record.map(|record| record.fence()));
            registered.push(store.discovery().nodes().await?.len());
            tables.push(store.placement().tables().await?.contains(&table()));
        }
        assert_eq!(held, [Some(fence), None, None], "who leads is known to Kubernetes alone");
        assert_eq!(registered, [0, self.members.len(), 0], "nodes are known to NATS alone");
        assert_eq!(tables, [false, false, true], "maps are known to etcd alone");
        Ok(())
    }
}

/// TTLs as short as a busy machine can hold.
fn quick() -> Settings {
    let mut settings = Settings::default();
    settings.leader_ttl = Duration::from_secs(4);
    settings.leader_renew = Duration::from_millis(1_200);
    settings.leader_retry = Duration::from_millis(800);
    settings.heartbeat = Duration::from_millis(1_200);
    settings.node_ttl = Duration::from_secs(4);
    settings.request_timeout = Duration::from_secs(1);
    settings.rebalance_delay = Duration::from_millis(300);
    settings
}

fn table() -> TableName {
    TableName::new("orders").expect("a name")
}

/// The map that a writer of this fence would write next, changed in nothing but its annex.
fn next(map: &ShardMap, fence: &Fence) -> Done<Arc<ShardMap>> {
    let mut edit = map.edit();
    edit.set_annex(b"{\"mixed\":1}".as_slice().into())?;
    Ok(Arc::new(edit.finish(fence.clone()).ok_or("nothing is changed")?))
}

async fn the_leader_crashes(mixed: &mut Mixed) -> Done {
    mixed.is_apart().await?;
    let (leads, former) = mixed.leader().await?;
    let before = mixed.map().await?;
    let gone = mixed.members.remove(leads);
    let name = gone.node().clone();
    gone.abandon();
    drop(gone);

    mixed.shared_by(2).await?;
    let (_, fence) = mixed.leader().await?;
    assert!(fence.term > former.term, "{fence:?} does not come after {former:?}");
    let after = mixed.map().await?;
    assert_eq!(after.uid(), before.uid());
    let mut received = BTreeMap::new();
    for shard in before.header().shards.shards() {
        let owner =
            |map: &ShardMap| map.owner(shard).map(|node| (node.id.clone(), node.incarnation));
        let (from, to) = (owner(&before), owner(&after));
        let has_moved = from != to;
        let was_there = from.as_ref().is_some_and(|(id, _)| *id == name);
        assert_eq!(has_moved, was_there, "shard {shard} of {from:?} is now with {to:?}");
        if has_moved {
            *received.entry(to.ok_or("a shard has no owner")?.0).or_insert(0) += 1;
        }
    }
    assert!(received.values().eq(&[SHARDS / 6; 2]), "moved to each: {received:?}");

    // Etcd has never seen the lease, and knows whose term is over.
    let placement = mixed.maps.placement();
    let write = next(&after, &former)?;
    match placement.publish(&table(), &former, after.version(), &write).await? {
        Publish::Fenced(Some(by)) if by == fence => {}
        other => return Err(format!("a former leader's write: {other:?}").into()),
    }
    let claim = ClaimRequest::new(table(), former, after.header().clone());
    match placement.claim(&claim).await? {
        Claim::Fenced(by) if by == fence => {}
        other => return Err(format!("a former leader's claim: {other:?}").into()),
    }
    assert_eq!(*mixed.map().await?, *after, "neither has changed the map");
    mixed.is_apart().await
}

/// A lease of the same name in another store, whose terms say nothing about those of the first.
async fn another_lease_is_refused(mixed: &mut Mixed) -> Done {
    let (_, fence) = mixed.leader().await?;
    let node = NodeId::new("stranger")?;
    let leases = Leases::new(mixed.nodes.lease(), node, Incarnation::random());
    let guard = leases.named(LeaseName::leader()).ttl(Duration::from_secs(30)).acquire().await?;
    let other = guard.fence();
    assert_eq!(other.lease, fence.lease);
    assert_ne!(other.origin, fence.origin);
    let before = mixed.map().await?;
    let placement = mixed.maps.placement();
    let claim = ClaimRequest::new(table(), other.clone(), before.header().clone());
    match placement.claim(&claim).await? {
        Claim::OtherLease(binding) if binding == Binding::of(&fence) => {}
        refused => return Err(format!("another lease's claim: {refused:?}").into()),
    }
    let write = next(&before, &other)?;
    match placement.publish(&table(), &other, before.version(), &write).await? {
        Publish::Fenced(Some(by)) if by == fence => {}
        refused => return Err(format!("another lease's write: {refused:?}").into()),
    }
    assert_eq!(*mixed.map().await?, *before, "neither has changed the map");
    guard.release().await?;
    // The cluster works on: who leads may write.
    let write = next(&before, &fence)?;
    match placement.publish(&table(), &fence, before.version(), &write).await? {
        Publish::Published(_) => Ok(()),
        other => Err(format!("the leader's own write: {other:?}").into()),
    }
}
