//! The nodes of the demo: each opens the store by itself, as a process of its own would.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use coord::cluster::{Cluster, Events, Host, HostError, Settings, ShardFence, Status, Table};
use coord::{
    Address, BackendUrl, Fence, Label, NodeId, NodeInfo, NodeStatus, Result, ShardCount, ShardId,
    ShardMap, TableHeader, TableName,
};

use super::view::NodeLine;
use crate::args::DemoArgs;
use crate::failure::Failure;

/// The nodes that run, and those that were killed.
#[derive(Debug)]
pub(crate) struct World {
    url: String,
    settings: Settings,
    pub(crate) table: TableName,
    header: TableHeader,
    pub(crate) running: BTreeMap<NodeId, Cluster>,
    hosted: Arc<Hosted>,
}

/// Which shards run, all nodes together.
#[derive(Debug, Default)]
struct Hosted(Mutex<Ledger>);

#[derive(Debug, Default)]
struct Ledger {
    running: BTreeMap<ShardId, (NodeId, ShardFence)>,
    violations: Vec<String>,
}

/// What one node runs.
#[derive(Debug)]
struct Noting {
    node: NodeId,
    hosted: Arc<Hosted>,
}

#[async_trait]
impl Host for Noting {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        let mut ledger = self.hosted.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = ledger.running.insert(shard, (self.node.clone(), fence));
        // A node that was killed runs nothing, although it has not said so.
        if let Some((other, _)) = before.filter(|(_, fence)| fence.is_current()) {
            let why = format!("I6: {} and {other} host shard {shard} at one moment", self.node);
            ledger.violations.push(why);
        }
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        let mut ledger = self.hosted.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ledger.running.get(&shard).is_some_and(|(node, _)| *node == self.node) {
            ledger.running.remove(&shard);
        }
    }
}

impl World {
    /// A world on this store. A cluster that is at work there is left alone.
    pub(crate) async fn open(url: &str, args: &DemoArgs) -> Result<Self, Failure> {
        let coord = crate::connect(url).await?;
        let nodes = coord.backend().discovery().nodes().await?;
        let target = coord.info().target.clone();
        coord.close().await?;
        if let Some(first) = nodes.first() {
            return Err(Failure::input(format!(
                "{target} has {} node(s) at work, {} for one; end the URL with a cluster name of the demo's own, /demo say",
                nodes.len(),
                first.info.id,
            )));
        }
        let settings = if args.fast { Settings::demo() } else { Settings::fast() };
        Ok(Self {
            url: url.to_owned(),
            settings,
            table: TableName::new("orders")?,
            header: TableHeader::new(ShardCount::new(args.shards)?),
            running: BTreeMap::new(),
            hosted: Arc::default(),
        })
    }

    /// The store without secrets.
    pub(crate) fn target(&self) -> String {
        self.url.parse::<BackendUrl>().map(|url| url.to_string()).unwrap_or_default()
    }

    /// Starts a node and listens to it.
    pub(crate) async fn start(&mut self, number: u16) -> Result<(NodeId, Events)> {
        let id = NodeId::new(format!("n{number}"))?;
        let address = Address::new(format!("127.0.0.1:{}", 7000 + number))?;
        let node = NodeInfo::new(id.clone(), address).with_version(Label::new("demo")?);
        let coord = coord::connect(&self.url).await?;
        let hosted = Arc::clone(&self.hosted);
        let cluster = coord
            .cluster(node)
            .settings(self.settings.clone())
            .table(
                Table::new(self.table.clone())
                    .shards(self.header.shards)
                    .host(Arc::new(Noting { node: id.clone(), hosted })),
            )
            .start()
            .await?;
        let events = cluster.events();
        self.running.insert(id.clone(), cluster);
        Ok((id, events))
    }

    /// Ends a node as a crash would: it sends nothing any more, and what it holds stays until its TTL.
    pub(crate) fn kill(&mut self, id: &NodeId) {
        if let Some(cluster) = self.running.remove(id) {
            cluster.abandon();
        }
    }

    /// Stops all nodes in good order.
    pub(crate) async fn shut_down(self) -> Result<()> {
        for cluster in self.running.into_values() {
            cluster.shutdown().await?;
        }
        Ok(())
    }

    /// Shards that were hosted twice at one moment, since this was last asked.
    pub(crate) fn hosted_twice(&self) -> Vec<String> {
        let mut ledger = self.hosted.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut ledger.violations)
    }

    /// How many shards run on the nodes that the newest map names.
    fn hosted(&self) -> usize {
        let Some(map) = self.map() else { return 0 };
        let ledger = self.hosted.0.lock().unwrap_or_else(PoisonError::into_inner);
        let runs = |(shard, (node, fence)): (&ShardId, &(NodeId, ShardFence))| {
            fence.is_current() && map.owner(*shard).is_some_and(|owner| owner.id == *node)
        };
        ledger.running.iter().filter(|entry| runs(*entry)).count()
    }

    /// The node that leads by its own clock at this moment, with the fence.
    pub(crate) fn leaders(&self) -> Vec<(NodeId, Fence)> {
        let fence = |(id, cluster): (&NodeId, &Cluster)| Some((id.clone(), cluster.fence()?));
        self.running.iter().filter_map(fence).collect()
    }

    /// The table's map as each node sees it.
    pub(crate) fn maps(&self) -> impl Iterator<Item = (&NodeId, Arc<ShardMap>)> {
        self.running.iter().filter_map(|(id, cluster)| Some((id, cluster.map(&self.table)?)))
    }

    /// The newest map that any node sees.
    pub(crate) fn map(&self) -> Option<Arc<ShardMap>> {
        self.maps().map(|(_, map)| map).max_by_key(|map| map.version())
    }

    /// The cluster as the leader sees it; as any other node sees it while no node leads.
    pub(crate) fn status(&self) -> Option<Arc<Status>> {
        let leader = self.running.values().find(|cluster| cluster.is_leader());
        leader.or_else(|| self.running.values().next()).map(Cluster::status)
    }

    /// One node leads, all see this many active members and the same version of a settled table, and every
    /// shard runs where it says.
    pub(crate) fn is_settled(&self, active: usize) -> bool {
        let mut versions = self.maps().map(|(_, map)| map.version());
        let first = versions.next();
        self.leaders().len() == 1
            && first.is_some()
            && self.hosted() == self.header.shards.get() as usize
            && versions.all(|version| Some(version) == first)
            && self.running.values().all(|cluster| {
                let status = cluster.status();
                status.is_settled() && status.count(NodeStatus::Active) == active
            })
    }

    /// The nodes as the view shows them.
    pub(crate) fn lines(&self) -> Vec<NodeLine> {
        let Some(status) = self.status() else { return Vec::new() };
        let leaders = self.leaders();
        let line = |member: &coord::cluster::Member| NodeLine {
            node: member.id.to_string(),
            status: member.status.to_string(),
            leader: leaders.iter().any(|(leader, _)| *leader == member.id),
            shards: member.shards,
        };
        status.members.iter().map(line).collect()
    }
}
