//! Drives [`Downing`] for one node: looks, asks peers and the lease, and carries out what is decided.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use coord_core::session::{LeaseGuard, Leases, TryAcquire};
use coord_core::{Error, LeaseName, Moment, NodeId, Result};

use super::Probe;
use super::inputs::{Inputs, Snapshot};
use super::peers::Peers;
use crate::downing::detector::FailureDetector;
use crate::downing::{
    Downing, DowningSettings, LeaseAnswer, PartitionState, Reach, Step, Strategy, Warning,
};
use crate::events::{Event, EventKind, EventSource};
use crate::member_view;
use crate::model::DownDecision;
use crate::observer::Observer;
use crate::settings::Settings;
use crate::shared::Shared;

/// How often it looks although nothing was heard; a longer silence of its own is a stall.
const TICK: Duration = Duration::from_secs(1);
type Asking = Pin<Box<dyn Future<Output = Result<TryAcquire>> + Send>>;

/// What it takes to drive downing for one node.
pub(crate) struct PartitionDriver {
    settings: DowningSettings,
    downing: Downing,
    peers: Peers,
}

impl PartitionDriver {
    /// A driver where downing is chosen.
    ///
    /// # Errors
    /// `Invalid` for settings that contradict each other, or a probe or a detector without downing.
    pub(crate) fn new(
        settings: &Settings,
        probe: Option<Arc<dyn Probe>>,
        detector: Option<Box<dyn FailureDetector>>,
    ) -> Result<Option<Self>> {
        let Some(downing) = settings.downing.clone() else {
            if probe.is_none() && detector.is_none() {
                return Ok(None);
            }
            let why = "a probe or a detector is given, and downing is not chosen; set downing";
            return Err(Error::invalid("start", why));
        };
        let peers = Peers::new(settings, &downing, probe, detector)?;
        let machine = Downing::new(downing.clone())?.with_node_ttl(settings.node_ttl);
        Ok(Some(Self { downing: machine, settings: downing, peers }))
    }

    /// Drives until the node's runtime ends, or ends it.
    pub(crate) async fn run(self, shared: Arc<Shared>) {
        let Self { settings, downing, peers } = self;
        let watch = Watch {
            settings,
            downing,
            peers,
            inputs: Inputs::default(),
            row: BTreeSet::new(),
            row_since: shared.clock.now(),
            tells: false,
            asking: None,
            lease: None,
            partition_state: PartitionState::Normal,
            said: BTreeSet::new(),
            warned: Vec::new(),
            shared,
        };
        watch.run().await;
    }
}

struct Watch {
    shared: Arc<Shared>,
    settings: DowningSettings,
    downing: Downing,
    peers: Peers,
    inputs: Inputs,
    /// The nodes that this node does not reach, and since when that has been so.
    row: BTreeSet<NodeId>,
    row_since: Moment,
    /// Whether it reports them: as soon as it knows of every peer whether it reaches it, and as a member also
    /// while others join.
    tells: bool,
    asking: Option<Asking>,
    lease: Option<LeaseGuard>,
    partition_state: PartitionState,
    /// The nodes that this side has downed, as it was reported.
    said: BTreeSet<NodeId>,
    warned: Vec<Warning>,
}

impl Watch {
    async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let (mut news, mut nodes) = (shared.news(), shared.view.subscribe());
        loop {
            news.borrow_and_update();
            let seen = Arc::clone(&nodes.borrow_and_update());
            let now = shared.clock.now();
            if seen.is_ready() {
                self.look(&seen, now);
            }
            let Some(wake) = self.act(now).await else { break };
            let ask_at = self.peers.ask(&self.inputs.peers, now);
            let wake = wake.min(now.plus(TICK)).min(ask_at.unwrap_or(wake));
            debug_assert!(wake > now, "it would spin");
            tokio::select! {
                biased;
                () = shared.stop.cancelled() => break,
                () = self.peers.answer() => {}
                answer = answer(&mut self.asking) => self.take_lease(answer),
                () = lost(self.lease.as_ref()) => {
                    self.lease = None;
                    self.downing.on_lease_gone();
                }
                Ok(()) = news.changed() => {}
                Ok(()) = nodes.changed() => {}
                () = shared.sleep_until(wake) => {}
            }
            let late = shared.clock.now().since(wake);
            if late > TICK {
                self.downing.on_stall(late);
                self.peers.excuse(late);
            }
        }
        if let Some(guard) = self.lease.take() {
            // The node that won the lease continues with its side, or shuts down with it. The TTL is as long as
            // the other side may still ask.
            guard.abandon();
        }
    }

    /// Takes the members, the nodes that this node reaches, and the reports of the members.
    fn look(&mut self, nodes: &member_view::View, now: Moment) {
        let shared = Arc::clone(&self.shared);
        let run = *shared.registered.borrow();
        let inputs = shared.look(|observer| {
            let cluster = observer.cluster()?;
            let (me, record, role) = (&shared.node, observer.record(), self.settings.role.as_ref());
            Some(Inputs::of(&Snapshot { me, run, cluster, record, nodes, role }))
        });
        let Some(inputs) = inputs else { return };
        self.inputs = inputs;
        let away = shared.look(Observer::is_store_away);
        self.peers.follow(&self.inputs.peers, now);
        self.peers.hear(nodes, away || !shared.judging.from_heartbeat, now);
        let row = self.peers.unreachable(now);
        if row != self.row {
            (self.row, self.row_since) = (row, now);
        }
        let (known, member) = (self.peers.are_known(now), self.inputs.is_member(&shared.node));
        self.tells = known || (member && self.tells);
        if self.peers.are_asked() {
            // Without probes all know the same, from the store.
            let row = self.tells.then(|| self.row.clone());
            shared.row.send_if_modified(|told| {
                *told != row && {
                    *told = row;
                    true
                }
            });
        }
        // A change of one's own row is written at once, so the store soon shows whether it is there. Until
        // it has answered, what it has brought from others may be as old as the partition.
        let fresh = shared.answered() >= self.row_since;
        let patience = shared.settings.request_timeout * 2;
        let mute = self.peers.are_asked() && !fresh && now >= self.row_since.plus(patience);
        let (away, with_others) = (away || mute, fresh && !away);
        let store = if away { Reach::Unreachable } else { Reach::Reachable };
        self.downing.on_store(store, now);
        self.downing.on_view(self.inputs.view(&shared.node, &self.row, with_others), now);
        self.tell();
    }

    /// Tells what is new.
    fn tell(&mut self) {
        let partition_state = self.downing.partition_state();
        let told = self.shared.look(|observer| observer.unreachable().iter().eq(&self.row));
        if partition_state != self.partition_state || !told {
            self.partition_state = partition_state;
            let row = self.row.iter().cloned().collect();
            self.shared.observe(|observer| observer.on_partition_state(partition_state, row));
        }
        let warnings = self.downing.warnings();
        for warning in warnings.iter().filter(|warning| !self.warned.contains(warning)) {
            tracing::warn!(node = %self.shared.node, "downing can't decide: {warning}");
            let kind = EventKind::DowningUnfit { why: warning.to_string() };
            self.shared.observe(|_| vec![Event::new(EventSource::Local, kind)]);
        }
        self.warned = warnings;
        if self.downing.downed().is_none() {
            self.said.clear();
        }
        // A decision that is taken back needs no report: the leader looks at the members as well.
        let verdicts = self.verdicts();
        self.shared.verdicts.send_if_modified(|said| {
            said.retain(|id, verdict| verdicts.get(id) == Some(verdict));
            false
        });
    }

    /// Which runs this side has downed and are still members.
    fn verdicts(&self) -> BTreeMap<NodeId, DownDecision> {
        let strategy = self.settings.strategy.as_str();
        let downed = self.downing.downed().into_iter().flatten();
        let verdict = |id: &NodeId| {
            let incarnation = self.inputs.peers.get(id)?.incarnation;
            let why = format!("downed by {strategy}, seen from {}", self.shared.node);
            Some((id.clone(), DownDecision { incarnation, why }))
        };
        downed.filter_map(verdict).collect()
    }

    /// Carries the decisions out. Returns when to look again; none once this node shuts down.
    async fn act(&mut self, now: Moment) -> Option<Moment> {
        loop {
            match self.downing.next(now) {
                Step::Stay => return Some(now.plus(TICK)),
                Step::Wait(until) => return Some(until),
                Step::AskLease => self.asking = Some(self.ask()),
                Step::ReleaseLease => {
                    if let Some(guard) = self.lease.take()
                        && let Err(error) = guard.release().await
                    {
                        tracing::warn!(node = %self.shared.node, %error, "the lease of downing is left to its TTL");
                    }
                    self.downing.on_lease_gone();
                }
                Step::Down(nodes) => self.down(nodes),
                Step::DownSelf(why) => {
                    self.shared.go_down(why);
                    return None;
                }
            }
        }
    }

    /// Hands the decisions to this node's coordinator, for the case that this node leads. They are handed over
    /// again, in case another node led before.
    fn down(&mut self, nodes: BTreeSet<NodeId>) {
        self.shared.verdicts.send_replace(self.verdicts());
        if !nodes.is_subset(&self.said) {
            let strategy = self.settings.strategy.as_str().to_owned();
            let kind = EventKind::NodesDowned { nodes: nodes.iter().cloned().collect(), strategy };
            self.shared.observe(|_| vec![Event::new(EventSource::Local, kind)]);
        }
        self.said.extend(nodes);
    }

    fn ask(&self) -> Asking {
        let shared = &self.shared;
        let Strategy::LeaseMajority { release_after, .. } = self.settings.strategy else {
            return Box::pin(std::future::pending());
        };
        let Some(run) = *shared.registered.borrow() else {
            let why = "this node is not registered";
            return Box::pin(std::future::ready(Err(Error::unavailable("acquire", why))));
        };
        let leases = Leases::new(Arc::clone(&shared.lease), shared.node.clone(), run);
        let lease = leases
            .with_clock(Arc::clone(&shared.clock))
            .named(LeaseName::downing())
            .ttl(release_after)
            .request_timeout(shared.settings.request_timeout);
        Box::pin(lease.try_acquire())
    }

    fn take_lease(&mut self, asked: Result<TryAcquire>) {
        self.asking = None;
        let answer = match asked {
            Ok(TryAcquire::Acquired(guard)) => {
                self.lease = Some(guard);
                LeaseAnswer::Acquired
            }
            Ok(TryAcquire::Held(record)) => LeaseAnswer::HeldBy(record.holder.node),
            Ok(_) => LeaseAnswer::Unknown,
            Err(error) => {
                tracing::debug!(node = %self.shared.node, %error, "the lease of downing was not answered");
                LeaseAnswer::Unknown
            }
        };
        self.downing.on_lease(&answer, self.shared.clock.now());
    }
}

async fn answer(asking: &mut Option<Asking>) -> Result<TryAcquire> {
    match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    }
}

async fn lost(lease: Option<&LeaseGuard>) {
    match lease {
        Some(guard) => drop(guard.lost().await),
        None => std::future::pending().await,
    }
}
