//! The handle that a service holds.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord_core::{
    Backend, BootClock, Clock, ClusterName, Discovery, Error, ErrorKind, Fence, Guarantees,
    HeldLease, Incarnation, Lease, LeaseName, Leases, NodeEntry, NodeId, NodeInfo, Placement,
    Replace, Request, RequestEvent, RequestId, Result, ShardMap, TableName, Watched, Watcher,
    shard_of,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::commands::{Command, CommandError, Reply};
use crate::coordinator::{LocalCommand, Release};
use crate::downing::detector::FailureDetector;
use crate::events::Events;
use crate::mailbox::{Inbox, Mailbox, MailboxLimits, Mailboxes, Scope};
use crate::member_view::Judging;
use crate::membership::{self, Keeper, Replaces};
use crate::model::GatingLease;
use crate::observer::Observer;
use crate::partition::{PartitionDriver, Probe};
use crate::region::{self, Host};
use crate::settings::Settings;
use crate::shared::{Ending, Parts, Shared};
use crate::singleton::{Singleton, SingletonBuilder};
use crate::status::Status;
use crate::supervise::supervise;
use crate::table::{Runner, Table};
use crate::transport::{Transport, check_address};
use crate::{election, follow, record};

/// The most commands of this process that wait for the leader's loop.
const LOCAL_COMMANDS_MAX: usize = 64;

/// The stores that a cluster lives on: one for everything, or up to three.
#[derive(Clone, Debug)]
pub struct Stores {
    lease: Arc<dyn Lease>,
    discovery: Arc<dyn Discovery>,
    placement: Arc<dyn Placement>,
    /// What the store of the nodes promises.
    guarantees: Guarantees,
    /// The cluster that the first backend was opened for, for logs.
    cluster: ClusterName,
}

impl Stores {
    /// Everything on one backend.
    #[must_use]
    pub fn new(backend: &dyn Backend) -> Self {
        Self {
            lease: backend.lease(),
            discovery: backend.discovery(),
            placement: backend.placement(),
            guarantees: backend.info().guarantees.clone(),
            cluster: backend.info().cluster.clone(),
        }
    }

    /// With leases on another backend.
    #[must_use]
    pub fn with_lease(mut self, backend: &dyn Backend) -> Self {
        self.lease = backend.lease();
        self
    }

    /// With nodes on another backend.
    #[must_use]
    pub fn with_discovery(mut self, backend: &dyn Backend) -> Self {
        self.discovery = backend.discovery();
        self.guarantees = backend.info().guarantees.clone();
        self
    }

    /// With shard maps on another backend.
    #[must_use]
    pub fn with_placement(mut self, backend: &dyn Backend) -> Self {
        self.placement = backend.placement();
        self
    }
}

impl<B: Backend> From<&B> for Stores {
    fn from(backend: &B) -> Self {
        Self::new(backend)
    }
}

impl From<Arc<dyn Backend>> for Stores {
    fn from(backend: Arc<dyn Backend>) -> Self {
        Self::new(&*backend)
    }
}

/// How a node joins its cluster.
#[derive(Debug)]
#[must_use = "a node joins when it is started"]
pub struct ClusterBuilder {
    stores: Stores,
    node: NodeInfo,
    settings: Settings,
    tables: Vec<Table>,
    mailing: Option<(Arc<dyn Transport>, MailboxLimits)>,
    gating: Option<GatingLease>,
    clock: Arc<dyn Clock>,
    replaces: Replaces,
    probe: Option<Arc<dyn Probe>>,
    detector: Option<Box<dyn FailureDetector>>,
}

impl ClusterBuilder {
    /// With these settings.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// With this table.
    pub fn table(mut self, table: Table) -> Self {
        self.tables.push(table);
        self
    }

    /// Sends and takes messages to shards through this transport, which listens at this node's address.
    pub fn transport(self, transport: Arc<dyn Transport>) -> Self {
        self.transport_with(transport, MailboxLimits::default())
    }

    /// As [`transport`](Self::transport), with other limits than the default ones.
    pub fn transport_with(mut self, transport: Arc<dyn Transport>, limits: MailboxLimits) -> Self {
        self.mailing = Some((transport, limits));
        self
    }

    /// Gates the coordinator by this lease as well, on any store: a leader that does not hold it places no
    /// shard and takes no step of a move, until it does. What is placed stays where it is, and hosting and
    /// routing go on; commands that place shards wait in order.
    ///
    /// It is held for `sharding_ttl` and tried for every `sharding_retry`, by the leader alone. All nodes
    /// name the same lease.
    pub fn require_lease(mut self, lease: Arc<dyn Lease>, name: LeaseName) -> Self {
        self.gating = Some(GatingLease { lease, name });
        self
    }

    /// Reading deadlines from this clock instead of the boot clock.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Whether a live registration of another process under this id is replaced. Unless said, it is, but for
    /// a process that is seen to run on this machine: a node that is restarted under its name need not
    /// wait for its TTL. With [`Replace::No`] only one that is proved dead is.
    ///
    /// The shards of the process before wait for its whole TTL, for it may still run where it can't be seen.
    /// They start at once where it is proved dead: it ran on this machine and in this process's pid namespace,
    /// and is gone; or it ran in this very pod (`COORD_POD_UID`, the same on both), whose containers follow
    /// each other.
    pub fn replace(mut self, replace: Replace) -> Self {
        self.replaces = match replace {
            Replace::Yes => Replaces::Yes,
            _ => Replaces::No,
        };
        self
    }

    /// The caller knows that no other process of this node runs: it holds a lock file that each of them
    /// holds for as long as it lives, say. Then the shards of the process before start at once. Where
    /// that is not so, two processes host the same shards.
    pub fn predecessor_is_dead(mut self) -> Self {
        self.replaces = Replaces::Dead;
        self
    }

    /// Asks the other members by this probe whether they are there, where downing is chosen. Without a probe a
    /// node is unreachable once its heartbeats in Discovery have stopped. All nodes that reach the store see
    /// that alike, so downing has nothing to decide except after mass failures.
    pub fn probe(mut self, probe: Arc<dyn Probe>) -> Self {
        self.probe = Some(probe);
        self
    }

    /// Judges by this detector which nodes are reachable, instead of by the one that the settings name.
    pub fn detector(mut self, detector: Box<dyn FailureDetector>) -> Self {
        self.detector = Some(detector);
        self
    }

    /// Checks the settings, registers the node and starts its runtime.
    ///
    /// # Errors
    /// `Invalid` for contradicting settings (one error names them all), an address such as `0.0.0.0`, a version that can't be compared
    /// where they prefer newer ones, a table that is named twice or reserved, a gating lease that is
    /// reserved or whose times do not fit together, a handler without a transport, a probe or a detector without downing, or a node id under
    /// which another process is registered; `Misconfigured` where a table exists with another header; and
    /// as the store answers.
    ///
    /// # Cancel safety
    /// The node may be registered, until its TTL has passed.
    pub async fn start(self) -> Result<Cluster> {
        let Self { stores, node, settings, tables, .. } = self;
        let Self { mailing, gating, clock, replaces, .. } = self;
        let Self { probe, detector, .. } = self;
        settings.validate()?;
        check_address(&node.address)?;
        let partition = PartitionDriver::new(&settings, probe, detector)?;
        let mut specs = BTreeMap::new();
        let mut runners = BTreeMap::new();
        for table in tables {
            let name = table.name().clone();
            if name.is_reserved() || specs.contains_key(&name) {
                let why = "the table is reserved or named twice; give each table its own name";
                return Err(Error::invalid("start", why).resource(&name));
            }
            if matches!(&table.runner, Some(Runner::Handler(_))) && mailing.is_none() {
                let why = "a table with a handler needs a transport; name one";
                return Err(Error::invalid("start", why).resource(&name));
            }
            specs.insert(name.clone(), table.spec(&settings));
            if let Some(runner) = table.runner {
                runners.insert(name, runner);
            }
        }
        let Stores { lease, discovery, placement, guarantees, cluster } = stores;
        let judging = Judging::of(&guarantees);
        if let (Some(_), Some(version)) = (settings.newer_leads_after, &node.version) {
            Release::parse(version).map_err(|error| error.resource(&node.id))?;
        }
        let node = if settings.candidate { node } else { node.without_candidacy() };
        let id = node.id.clone();
        let parts = Parts {
            node: id,
            settings,
            clock,
            lease,
            discovery,
            placement,
            judging,
            specs,
            gating,
        };
        let shared = Arc::new(Shared::new(parts));
        if let Some(gate) = &shared.gating {
            gate.check(&shared)?;
        }
        if shared.settings.exit_at_deadline {
            shared.gate.exit_late(shared.settings.grace())?;
        }
        let limits = mailing.as_ref().map_or(MailboxLimits::default(), |(_, limits)| *limits);
        let mut hosts: BTreeMap<TableName, Arc<dyn Host>> = BTreeMap::new();
        let mut inboxes = BTreeMap::new();
        for (name, runner) in runners {
            let handler = match runner {
                Runner::Host(host) => {
                    hosts.insert(name, host);
                    continue;
                }
                Runner::Handler(handler) => handler,
            };
            let Some(scope) = Scope::of(&shared, &name) else { continue };
            let (clock, budget) = (Arc::clone(&shared.clock), shared.settings.stop_budget());
            let inbox = Arc::new(Inbox::new(scope, handler, clock, budget, limits));
            hosts.insert(name.clone(), Arc::<Inbox>::clone(&inbox));
            inboxes.insert(name, inbox);
        }
        check_headers(&shared).await?;
        let mailboxes = Mailboxes::new(&shared, mailing, inboxes);
        let keeper = Keeper::register(Arc::clone(&shared), node, replaces).await?;
        let inner = Inner::start(shared, keeper, hosts, mailboxes, partition, &cluster);
        Ok(Cluster { inner: Arc::new(inner) })
    }
}

/// A node that is configured otherwise than the cluster is refused before it takes part.
async fn check_headers(shared: &Shared) -> Result<()> {
    for (name, spec) in &shared.specs {
        let table = shared.call("load", shared.placement.load(name)).await?;
        if let Some(table) = table.filter(|table| *table.map.header() != spec.header) {
            let (theirs, ours) = (table.map.header(), &spec.header);
            let why = format!(
                "the table exists with shards={} replicas={}, and here it is configured with \
                 shards={} replicas={}",
                theirs.shards.get(),
                theirs.replicas.get(),
                ours.shards.get(),
                ours.replicas.get()
            );
            let error = Error::new(ErrorKind::Misconfigured, "start").message(why);
            return Err(error.resource(name));
        }
    }
    Ok(())
}

/// A node's part in its cluster. Clones are the same node; dropping the last one ends its runtime in
/// the background, as [`shutdown`](Self::shutdown) does.
#[derive(Clone)]
pub struct Cluster {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    local: mpsc::Sender<LocalCommand>,
    mailboxes: Arc<Mailboxes>,
    /// What came of the deregistration.
    farewell: Arc<Mutex<Option<Error>>>,
}

impl Inner {
    fn start(
        shared: Arc<Shared>,
        keeper: Keeper,
        mut hosts: BTreeMap<TableName, Arc<dyn Host>>,
        mailboxes: Mailboxes,
        partition: Option<PartitionDriver>,
        cluster: &ClusterName,
    ) -> Self {
        let tasks = TaskTracker::new();
        let span = tracing::info_span!("cluster", %cluster, node = %shared.node);
        let (local, commands) = mpsc::channel(LOCAL_COMMANDS_MAX);
        let farewell = Arc::new(Mutex::new(None));
        let said = Arc::clone(&farewell);
        let spawn = |on: &TaskTracker, task, work: BoxFuture<'static, ()>| {
            on.spawn(supervise(Arc::clone(&shared), task, work).instrument(span.clone()));
        };
        let regions = TaskTracker::new();
        for name in shared.specs.keys() {
            let region = region::run(Arc::clone(&shared), name.clone(), hosts.remove(name));
            spawn(&regions, "region", region.boxed());
        }
        regions.close();
        let unhosted = shared.unhosted.clone();
        tasks.spawn(async move {
            regions.wait().await;
            unhosted.cancel();
        });
        spawn(&tasks, "leader watch", follow::leader(Arc::clone(&shared)).boxed());
        spawn(&tasks, "forced leave", follow::forced_leave(Arc::clone(&shared)).boxed());
        for name in shared.specs.keys().cloned().chain([TableName::cluster()]) {
            spawn(&tasks, "table watch", follow::table(Arc::clone(&shared), name).boxed());
        }
        if shared.settings.candidate || partition.is_some() {
            let always = partition.is_some();
            let watch = membership::watch_nodes_as_needed(Arc::clone(&shared), always);
            spawn(&tasks, "node watch", watch.boxed());
        }
        let mailboxes = Arc::new(mailboxes);
        spawn(&tasks, "mailboxes", Arc::clone(&mailboxes).close(Arc::clone(&shared)).boxed());
        if let Some(partition) = partition {
            spawn(&tasks, "downing", partition.run(Arc::clone(&shared)).boxed());
        }
        let elect = supervise(
            Arc::clone(&shared),
            "election",
            election::run(Arc::clone(&shared), commands),
        );
        let led = Arc::clone(&shared);
        let elect = async move {
            elect.await;
            // Also after a panic, so that no task waits for the end of the leadership any longer.
            led.tenure.send_replace(None);
            led.led.cancel();
        };
        tasks.spawn(elect.instrument(span.clone()));
        let keep = async move {
            if let Err(error) = keeper.keep().await {
                *said.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        };
        let keep = supervise(Arc::clone(&shared), "registration", keep);
        let gone = Arc::clone(&shared);
        let keep = async move {
            keep.await;
            gone.unhosted.cancelled().await;
            gone.led.cancelled().await;
            gone.gate.shut();
            gone.registered.send_replace(None);
            gone.observe(Observer::on_ended);
        };
        tasks.spawn(keep.instrument(span.clone()));
        tasks.close();
        Self { shared, tasks, local, mailboxes, farewell }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.end(Ending::Orderly);
    }
}

impl Cluster {
    /// Describes a node that is to join the cluster that the stores were opened for.
    pub fn builder(stores: impl Into<Stores>, node: NodeInfo) -> ClusterBuilder {
        ClusterBuilder {
            stores: stores.into(),
            node,
            settings: Settings::default(),
            tables: Vec::new(),
            mailing: None,
            gating: None,
            clock: Arc::new(BootClock::new()),
            replaces: Replaces::default(),
            probe: None,
            detector: None,
        }
    }

    /// This node's name.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.inner.shared.node
    }

    /// What happens from now on.
    #[must_use]
    pub fn events(&self) -> Events {
        Events::new(self.inner.shared.subscribe())
    }

    /// How things stand, as this node sees them.
    #[must_use]
    pub fn status(&self) -> Arc<Status> {
        self.inner.shared.status()
    }

    /// Waits until things stand so.
    ///
    /// # Errors
    /// `Closed` once the node's runtime has ended.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn wait_for(
        &self,
        mut wanted: impl FnMut(&Status) -> bool + Send,
    ) -> Result<Arc<Status>> {
        let shared = &self.inner.shared;
        let mut news = shared.news();
        let standing = async {
            loop {
                let status = shared.status();
                if wanted(&status) {
                    return Some(status);
                }
                news.changed().await.ok()?;
            }
        };
        tokio::select! {
            biased;
            Some(status) = standing => Ok(status),
            () = shared.stop.cancelled() => Err(Error::new(ErrorKind::Closed, "wait")
                .message("the node's runtime has ended")
                .resource(&shared.node)),
        }
    }

    /// The newest map of a table, as this node sees it.
    #[must_use]
    pub fn map(&self, table: &TableName) -> Option<Arc<ShardMap>> {
        self.inner.shared.look(|observer| observer.map(table))
    }

    /// The node that owns a key's shard, as this node sees it; none while no node does.
    #[must_use]
    pub fn owner(&self, table: &TableName, key: impl AsRef<[u8]>) -> Option<NodeEntry> {
        let map = self.map(table)?;
        map.owner(shard_of(key, map.header().shards)).cloned()
    }

    /// The way to send messages to a table's shards.
    ///
    /// # Errors
    /// `Invalid` for a table that this node does not name, or a node without a
    /// [transport](ClusterBuilder::transport).
    pub fn mailbox(&self, table: &TableName) -> Result<Mailbox> {
        let why = "it is no table of this node, or the node has no transport";
        let mailbox = self.inner.mailboxes.get(table);
        mailbox.ok_or_else(|| Error::invalid("mailbox", why).resource(table))
    }

    /// Whether this node leads now. It reads the clock, and no store.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.inner.shared.tenure.borrow().as_ref().is_some_and(HeldLease::is_held)
    }

    /// What this node shows as the leader to whatever is being protected; none while it does not lead.
    #[must_use]
    pub fn fence(&self) -> Option<Fence> {
        let tenure = self.inner.shared.tenure.borrow();
        tenure.as_ref().filter(|tenure| tenure.is_held()).map(HeldLease::fence)
    }

    /// A job that runs on one node of the cluster: the one that holds the lease of this name, kept by the
    /// settings `sharding_ttl`, `sharding_retry` and `request_timeout`. It is stopped when this node's
    /// runtime ends, which waits for it.
    ///
    /// # Errors
    /// `Invalid` for a bad name.
    pub fn singleton(&self, name: impl AsRef<str>) -> Result<SingletonBuilder> {
        let Inner { shared, tasks, .. } = &*self.inner;
        // The incarnation in the lease is for people to read: the lease protects the job by itself.
        let run = shared.registered.borrow().unwrap_or_else(Incarnation::random);
        let leases = Leases::new(Arc::clone(&shared.lease), shared.node.clone(), run)
            .with_clock(Arc::clone(&shared.clock));
        let Settings { sharding_ttl, sharding_retry, request_timeout, .. } = shared.settings;
        Ok(Singleton::builder(&leases, name)?
            .ttl(sharding_ttl)
            .retry_every(sharding_retry)
            .request_timeout(request_timeout)
            .tracked_by(tasks.clone())
            .stopped_by(&shared.stop)
            .abandoned_by(shared.abandoned.clone()))
    }

    /// Asks the leader, wherever it is, and waits for its answer for three leader TTLs.
    ///
    /// # Errors
    /// As [`request_within`](Self::request_within).
    ///
    /// # Cancel safety
    /// As `request_within`.
    pub async fn request(&self, command: Command) -> Result<Reply> {
        let limit = self.inner.shared.settings.leader_ttl * 3;
        self.request_within(command, limit).await
    }

    /// Asks the leader, wherever it is, and waits for its answer no longer than this.
    ///
    /// # Errors
    /// `Invalid` for a command above 64 KiB or a time limit of 0 or above one hour; and as the store
    /// answers the submission.
    ///
    /// # Cancel safety
    /// The command may still be carried out.
    pub async fn request_within(&self, command: Command, limit: Duration) -> Result<Reply> {
        let shared = &self.inner.shared;
        let body = record::write("write command", &command)?;
        let request = Request::new(shared.node.clone(), limit, body)?;
        let mut answers = Watcher::<RequestEvent>::requests(Arc::clone(&shared.placement));
        let asked = async {
            shared.call("request", shared.placement.request(&request)).await?;
            answer_to(&mut answers, &request.id).await
        };
        tokio::time::timeout(limit, asked).await.unwrap_or(Ok(Reply::Unanswered))
    }

    /// Asks this node to do it as the leader. A node that does not lead refuses, and names the leader.
    ///
    /// # Errors
    /// `Closed` once the node's runtime has ended.
    ///
    /// # Cancel safety
    /// The command may still be carried out.
    pub async fn command(&self, command: Command) -> Result<Reply> {
        let shared = &self.inner.shared;
        if !self.is_leader() {
            let leader = self.status().leader.as_ref().map(|leader| leader.node.clone());
            return Ok(Reply::Refused(CommandError::NotLeader { leader }));
        }
        let closed = || {
            Error::new(ErrorKind::Closed, "command")
                .message("the node's runtime has ended")
                .resource(&shared.node)
        };
        let (reply, answer) = oneshot::channel();
        let command = LocalCommand { command, reply };
        self.inner.local.send(command).await.map_err(|_closed| closed())?;
        match answer.await {
            Err(_dropped) if shared.stop.is_cancelled() => Err(closed()),
            // The term ended by a panic.
            answer => Ok(answer.unwrap_or(Reply::Refused(CommandError::Lost))),
        }
    }

    /// Leaves in order: the node's shards move first, then it gives up the leadership if it has it,
    /// deregisters and ends. The last active node stops its shards and goes all the same.
    ///
    /// # Errors
    /// `Unavailable` if the shards did not move within the handoff timeout: the node stays, and goes as soon as
    /// they have; [`leave_now`](Self::leave_now) does not wait for them any more. Else as the store
    /// answers the deregistration; the node has ended then.
    ///
    /// # Cancel safety
    /// The node may be leaving, and goes on to.
    pub async fn leave(&self) -> Result<()> {
        let shared = &self.inner.shared;
        let limit = shared.settings.handoff_timeout;
        let evacuated = tokio::time::timeout(limit, self.evacuate(false)).await;
        match evacuated {
            Ok(None) => self.shutdown().await,
            Ok(Some(why)) => {
                Err(Error::unavailable("leave", why.to_string()).resource(&shared.node))
            }
            Err(_elapsed) => {
                let why = format!(
                    "the node's shards have not moved; it goes as soon as they have, or by force \
                     limit={limit:?}"
                );
                Err(Error::unavailable("leave", why).resource(&shared.node))
            }
        }
    }

    /// Leaves as [`leave`](Self::leave) does where that is possible within the handoff timeout, and else as
    /// [`shutdown`](Self::shutdown): it stops its shards, which are orphaned until the leader has placed them
    /// anew. How many it still had then.
    ///
    /// # Errors
    /// As the store answers the deregistration; the node has ended all the same.
    ///
    /// # Cancel safety
    /// The node may be leaving, and goes on to.
    pub async fn leave_now(&self) -> Result<u32> {
        let shared = &self.inner.shared;
        let limit = shared.settings.handoff_timeout;
        // Also where no leader answers, so that the node was not told to leave by itself.
        let _ = tokio::time::timeout(limit, self.evacuate(true)).await;
        let left = self.status().member(&shared.node).map_or(0, |member| member.shards);
        self.shutdown().await.map(|()| left)
    }

    /// Asks to leave until the node may go; why it may not, if the leader says so.
    async fn evacuate(&self, force: bool) -> Option<CommandError> {
        let shared = &self.inner.shared;
        while !shared.stop.is_cancelled() {
            let command = Command::Leave { node: shared.node.clone(), force };
            match self.request(command).await {
                // The node ends by itself as soon as it owns nothing.
                Ok(Reply::Done(_)) => shared.stop.cancelled().await,
                Ok(Reply::Refused(stuck @ CommandError::StuckLeaving { .. })) => {
                    return Some(stuck);
                }
                // It is no member (any more), so it owns nothing.
                Ok(Reply::Refused(
                    CommandError::NodeNotFound { .. } | CommandError::InvalidTransition { .. },
                )) => {
                    return None;
                }
                Ok(Reply::Refused(_) | Reply::Unanswered) | Err(_) => {
                    tokio::time::sleep(shared.settings.leader_retry).await;
                }
            }
        }
        None
    }

    /// Ends at once, in order: stops the shards that it hosts, within the stop budget, gives up the
    /// leadership if the node has it, and deregisters. Its shards move afterwards. A node that replaced
    /// another process less than one TTL ago, or whose shards can't be stopped, is left to its TTL.
    ///
    /// # Errors
    /// As the store answers the deregistration; the node has ended all the same.
    ///
    /// # Cancel safety
    /// The node ends without the caller.
    pub async fn shutdown(&self) -> Result<()> {
        self.inner.shared.end(Ending::Orderly);
        self.inner.tasks.wait().await;
        let farewell = self.inner.farewell.lock().unwrap_or_else(PoisonError::into_inner).take();
        farewell.map_or(Ok(()), Err)
    }

    /// Ends at once as a crash would: nothing is released or deregistered, and the others notice by the
    /// TTLs.
    pub fn abandon(&self) {
        self.inner.shared.end(Ending::Abandoned);
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("node", self.node()).finish_non_exhaustive()
    }
}

async fn answer_to(answers: &mut Watcher<RequestEvent>, id: &RequestId) -> Result<Reply> {
    loop {
        let answer = match answers.next().await {
            Watched::Event(RequestEvent::Snapshot(records)) => records
                .into_iter()
                .find(|record| record.request.id == *id)
                .and_then(|record| record.answer),
            Watched::Event(RequestEvent::Answered(answered, answer)) if answered == *id => {
                Some(answer)
            }
            Watched::Event(RequestEvent::Gone(gone)) if gone == *id => {
                return Ok(Reply::Unanswered);
            }
            _ => None,
        };
        if let Some(answer) = answer {
            return record::read("read reply", &answer.body);
        }
    }
}
