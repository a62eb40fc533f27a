//! The handle that a service holds.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord_core::{
    Backend, BootClock, Clock, ClusterName, Discovery, Error, ErrorKind, Fence, Guarantees,
    Incarnation, Lease, LeaseName, Leases, NodeEntry, NodeId, NodeInfo, Placement, Replace,
    Request, RequestEvent, RequestId, Result, ShardMap, TableHeader, TableName, Tenure, Watched,
    Watcher, shard_of,
};
use coord_placement::{Balanced, PlacementStrategy};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::commands::{Command, Refusal, Reply};
use crate::coordinator::{LocalCommand, Release, Spec};
use crate::detector::{FailureDetector, Probe};
use crate::downing::Watchman;
use crate::events::Events;
use crate::gating::GatingLease;
use crate::handoff::Handoff;
use crate::mailbox::{Handler, Inbox, Mailbox, MailboxLimits, Mailboxes};
use crate::membership::{self, Judging, Keeper};
use crate::region::{self, Host};
use crate::settings::Settings;
use crate::shared::{Ending, Parts, Shared};
use crate::singleton::SingletonBuilder;
use crate::status::Status;
use crate::transport::Transport;
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
    tables: Vec<(TableName, Spec)>,
    hosts: Vec<(TableName, Arc<dyn Host>)>,
    handlers: Vec<(TableName, Arc<dyn Handler>)>,
    mailing: Option<(Arc<dyn Transport>, MailboxLimits)>,
    handoffs: Vec<(TableName, Handoff)>,
    gating: Option<GatingLease>,
    clock: Arc<dyn Clock>,
    replace: Replace,
    probe: Option<Arc<dyn Probe>>,
    detector: Option<Box<dyn FailureDetector>>,
}

impl ClusterBuilder {
    /// With these settings.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// With a table of this header, placed by [`Balanced`].
    pub fn table(self, name: TableName, header: TableHeader) -> Self {
        self.table_with(name, header, Arc::new(Balanced::default()))
    }

    /// With a table of this header, placed by this strategy. All nodes of a cluster name the same
    /// tables.
    pub fn table_with(
        mut self,
        name: TableName,
        header: TableHeader,
        strategy: Arc<dyn PlacementStrategy>,
    ) -> Self {
        let handoff = Handoff::default();
        self.tables.push((name, Spec { header, strategy, handoff }));
        self
    }

    /// Hosts the shards of a table that this node owns; without it they are only shown as owned.
    pub fn host(mut self, table: TableName, host: Arc<dyn Host>) -> Self {
        self.hosts.push((table, host));
        self
    }

    /// Hosts the shards of a table that this node owns, and handles the messages that are sent to them.
    /// Every node that takes shards of the table needs one: elsewhere, messages wait in vain.
    pub fn handler(mut self, table: TableName, handler: Arc<dyn Handler>) -> Self {
        self.handlers.push((table, handler));
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

    /// How the shards of a table get from one node to another; `Exclusive` unless said. It is the leader
    /// whose word counts, so all nodes say the same.
    pub fn handoff(mut self, table: TableName, handoff: Handoff) -> Self {
        self.handoffs.push((table, handoff));
        self
    }

    /// Gates the coordinator by this lease as well, on any store: a leader that does not hold it places no
    /// shard and takes no step of a move, until it does. What is placed stays where it is, and hosting and
    /// routing go on; commands that place shards wait in order.
    ///
    /// It is held for `sharding_ttl` and tried for every `sharding_retry`, by the leader alone. All nodes
    /// name the same lease.
    pub fn gated_by(mut self, lease: Arc<dyn Lease>, name: LeaseName) -> Self {
        self.gating = Some(GatingLease { lease, name });
        self
    }

    /// Reading deadlines from this clock instead of the boot clock.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Whether a live registration of another process under this id is replaced; never unless said.
    pub fn replace(mut self, replace: Replace) -> Self {
        self.replace = replace;
        self
    }

    /// Asking the other members by this whether they are there, where downing is chosen. Without it a
    /// node is unreachable once its heartbeats in Discovery have stopped, which everybody who reaches the
    /// store sees alike: then downing has nothing to decide but after mass failures.
    pub fn probe(mut self, probe: Arc<dyn Probe>) -> Self {
        self.probe = Some(probe);
        self
    }

    /// Judging by this detector who can be reached, instead of by the one that the settings name.
    pub fn detector(mut self, detector: Box<dyn FailureDetector>) -> Self {
        self.detector = Some(detector);
        self
    }

    /// Checks the settings, registers the node and starts its runtime.
    ///
    /// # Errors
    /// `Invalid` for contradicting settings (one error names them all), a version that can't be compared
    /// where they prefer newer ones, a table that is named twice or reserved, a gating lease that is
    /// reserved or whose times do not fit together, a host, handler or handoff of a table that is not
    /// named, a handler without a transport, a probe or a detector without downing, or a node id under
    /// which another process is registered; `Misconfigured` where a table exists with another header; and
    /// as the store answers.
    ///
    /// # Cancel safety
    /// The node may be registered, until its TTL has passed.
    pub async fn start(self) -> Result<Cluster> {
        let Self { stores, node, settings, tables, hosts, .. } = self;
        let Self { handlers, mailing, handoffs, gating, clock, replace, .. } = self;
        let Self { probe, detector, .. } = self;
        settings.validate()?;
        let watchman = Watchman::new(&settings, probe, detector)?;
        let mut specs = BTreeMap::new();
        for (name, spec) in tables {
            if name.is_reserved() || specs.contains_key(&name) {
                let why = "the table is reserved or named twice; give each table its own name";
                return Err(Error::invalid("start", why).resource(&name));
            }
            specs.insert(name, spec);
        }
        let unknown = |name: &TableName| {
            let why = "it is no table of this node; name the table with its header first";
            Error::invalid("start", why).resource(name)
        };
        for (name, handoff) in handoffs {
            specs.get_mut(&name).ok_or_else(|| unknown(&name))?.handoff = handoff;
        }
        let limits = mailing.as_ref().map_or(MailboxLimits::default(), |(_, limits)| *limits);
        let mut inboxes = BTreeMap::new();
        let mut regions: Vec<(TableName, Arc<dyn Host>)> = hosts;
        for (name, handler) in handlers {
            if mailing.is_none() {
                let why = "a table with a handler needs a transport; name one";
                return Err(Error::invalid("start", why).resource(&name));
            }
            let budget = settings.stop_budget();
            let inbox = Arc::new(Inbox::new(handler, Arc::clone(&clock), budget, limits));
            inboxes.insert(name.clone(), Arc::clone(&inbox));
            regions.push((name, inbox));
        }
        let mut hosts = BTreeMap::new();
        for (name, host) in regions {
            if !specs.contains_key(&name) {
                return Err(unknown(&name));
            }
            if hosts.insert(name.clone(), host).is_some() {
                let why = "the table has two hosts on this node; name one";
                return Err(Error::invalid("start", why).resource(&name));
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
        check_headers(&shared).await?;
        let mailboxes = Mailboxes::new(&shared, mailing, inboxes);
        let keeper = Keeper::register(Arc::clone(&shared), node, replace).await?;
        let inner = Inner::start(shared, keeper, hosts, mailboxes, watchman, &cluster);
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
        watchman: Option<Watchman>,
        cluster: &ClusterName,
    ) -> Self {
        let tasks = TaskTracker::new();
        let span = tracing::info_span!("cluster", %cluster, node = %shared.node);
        let (local, commands) = mpsc::channel(LOCAL_COMMANDS_MAX);
        let farewell = Arc::new(Mutex::new(None));
        let said = Arc::clone(&farewell);
        let keep = async move {
            if let Err(error) = keeper.keep().await {
                *said.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        };
        tasks.spawn(keep.instrument(span.clone()));
        let regions = TaskTracker::new();
        for name in shared.specs.keys() {
            let region = region::run(Arc::clone(&shared), name.clone(), hosts.remove(name));
            regions.spawn(region.instrument(span.clone()));
        }
        regions.close();
        let unhosted = shared.unhosted.clone();
        tasks.spawn(async move {
            regions.wait().await;
            unhosted.cancel();
        });
        tasks.spawn(follow::leader(Arc::clone(&shared)).instrument(span.clone()));
        tasks.spawn(follow::forced_leave(Arc::clone(&shared)).instrument(span.clone()));
        for name in shared.specs.keys().cloned().chain([TableName::cluster()]) {
            tasks.spawn(follow::table(Arc::clone(&shared), name).instrument(span.clone()));
        }
        if shared.settings.candidate || watchman.is_some() {
            let always = watchman.is_some();
            let watch = membership::watch_nodes_as_needed(Arc::clone(&shared), always);
            tasks.spawn(watch.instrument(span.clone()));
        }
        let mailboxes = Arc::new(mailboxes);
        tasks.spawn(Arc::clone(&mailboxes).close(Arc::clone(&shared)).instrument(span.clone()));
        if let Some(watchman) = watchman {
            tasks.spawn(watchman.watch(Arc::clone(&shared)).instrument(span.clone()));
        }
        tasks.spawn(election::run(Arc::clone(&shared), commands).instrument(span));
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
            hosts: Vec::new(),
            handlers: Vec::new(),
            mailing: None,
            handoffs: Vec::new(),
            gating: None,
            clock: Arc::new(BootClock::new()),
            replace: Replace::No,
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

    /// The node that owns a key's shard, as this node sees it; none while nobody does.
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
        self.inner.shared.tenure.borrow().as_ref().is_some_and(Tenure::is_held)
    }

    /// What this node shows as the leader to whatever is being protected; none while it does not lead.
    #[must_use]
    pub fn fence(&self) -> Option<Fence> {
        let tenure = self.inner.shared.tenure.borrow();
        tenure.as_ref().filter(|tenure| tenure.is_held()).map(Tenure::fence)
    }

    /// A job that runs on one node of the cluster: the one that holds the lease of this name, kept by the
    /// settings `sharding_ttl`, `sharding_retry` and `request_timeout`. It is stopped when this node's
    /// runtime ends, which waits for it.
    ///
    /// # Errors
    /// `Invalid` for a bad name.
    pub fn singleton(&self, name: impl AsRef<str>) -> Result<SingletonBuilder> {
        let Inner { shared, tasks, .. } = &*self.inner;
        let name = LeaseName::new(name)?;
        // Which run of the node holds it is for people: the lease protects the job by itself.
        let run = shared.registered.borrow().unwrap_or_else(Incarnation::random);
        let leases = Leases::new(Arc::clone(&shared.lease), shared.node.clone(), run)
            .with_clock(Arc::clone(&shared.clock));
        Ok(SingletonBuilder::of_node(shared, tasks, leases, name))
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

    /// Asks this node to do it as the leader. A node that does not lead refuses, and names who does.
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
            return Ok(Reply::Refused(Refusal::NotLeader { leader }));
        }
        let closed = || {
            Error::new(ErrorKind::Closed, "command")
                .message("the node's runtime has ended")
                .resource(&shared.node)
        };
        let (reply, answer) = oneshot::channel();
        let command = LocalCommand { command, reply };
        self.inner.local.send(command).await.map_err(|_closed| closed())?;
        answer.await.map_err(|_dropped| closed())
    }

    /// Leaves in order: the node's shards move first, then it gives up the leadership if it has it,
    /// deregisters and ends. The last active node stops its shards and goes all the same.
    ///
    /// # Errors
    /// `Unavailable` if the shards did not move within the handoff timeout: the node stays, and goes as soon as
    /// they have; [`leave_by_force`](Self::leave_by_force) does not wait for them any more. Else as the store
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
    pub async fn leave_by_force(&self) -> Result<u32> {
        let shared = &self.inner.shared;
        let limit = shared.settings.handoff_timeout;
        // Also where no leader answers, and so nobody has told the node to go by itself.
        let _ = tokio::time::timeout(limit, self.evacuate(true)).await;
        let left = self.status().member(&shared.node).map_or(0, |member| member.shards);
        self.shutdown().await.map(|()| left)
    }

    /// Asks to leave until the node may go; why it may not, if the leader says so.
    async fn evacuate(&self, force: bool) -> Option<Refusal> {
        let shared = &self.inner.shared;
        while !shared.stop.is_cancelled() {
            let command = Command::Leave { node: shared.node.clone(), force };
            match self.request(command).await {
                // The node ends by itself as soon as it owns nothing.
                Ok(Reply::Done(_)) => shared.stop.cancelled().await,
                Ok(Reply::Refused(stuck @ Refusal::StuckLeaving { .. })) => return Some(stuck),
                // It is no member (any more), so it owns nothing.
                Ok(Reply::Refused(
                    Refusal::NodeNotFound { .. } | Refusal::InvalidTransition { .. },
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
