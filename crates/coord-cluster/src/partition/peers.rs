//! Which peers this node reaches: it asks them, or hears of them through Discovery, and a detector judges.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coord_core::{Incarnation, Moment, NodeEntry, NodeId, Result};
use tokio::task::JoinSet;

use super::Probe;
use crate::downing::detector::FailureDetector;
use crate::downing::{DowningSettings, Reach};
use crate::member_view;
use crate::settings::Settings;

/// How many unanswered probes make a node unreachable, unless the settings name a limit.
const PROBES_MISSED: u32 = 5;
/// How many intervals an answer may take.
const PROBE_INTERVALS: u32 = 2;

/// The peers of one node, as its detector sees them.
pub(super) struct Peers {
    detector: Box<dyn FailureDetector>,
    probe: Option<Arc<dyn Probe>>,
    every: Duration,
    ask_at: Option<Moment>,
    /// Pending probes: the peer, and when it was asked, if it answered.
    probes: JoinSet<(NodeEntry, Option<Moment>)>,
    asked: BTreeSet<(NodeId, Incarnation)>,
    /// The runs that the detector knows.
    known: BTreeMap<NodeId, Known>,
}

struct Known {
    run: Incarnation,
    /// Whether it has ever been heard.
    heard: bool,
    /// Whether the incarnation before it was unreachable: then this one is unreachable, too, until it is heard.
    follows_lost: bool,
}

impl Peers {
    /// With the detector that is given, or else that the settings name.
    ///
    /// # Errors
    /// `Invalid` for a threshold that is none.
    pub(super) fn new(
        settings: &Settings,
        downing: &DowningSettings,
        probe: Option<Arc<dyn Probe>>,
        detector: Option<Box<dyn FailureDetector>>,
    ) -> Result<Self> {
        let detector = match detector {
            Some(detector) => detector,
            None if probe.is_some() => {
                let interval = downing.probe_every;
                downing.new_detector(interval * PROBES_MISSED, interval)?
            }
            None => downing.new_detector(settings.node_ttl, settings.heartbeat)?,
        };
        Ok(Self {
            detector,
            probe,
            every: downing.probe_every,
            ask_at: None,
            probes: JoinSet::new(),
            asked: BTreeSet::new(),
            known: BTreeMap::new(),
        })
    }

    /// Whether they are asked, so that this node knows something of its own.
    pub(super) fn are_asked(&self) -> bool {
        self.probe.is_some()
    }

    /// The nodes that this node does not reach.
    pub(super) fn unreachable(&self, now: Moment) -> BTreeSet<NodeId> {
        let missed = self.known.iter().filter(|(id, known)| self.is_lost(id, known, now));
        missed.map(|(id, _)| id.clone()).collect()
    }

    /// Whether of each it is known whether this node reaches it.
    pub(super) fn are_known(&self, now: Moment) -> bool {
        self.known.iter().all(|(id, known)| known.heard || self.is_lost(id, known, now))
    }

    fn is_lost(&self, id: &NodeId, known: &Known, now: Moment) -> bool {
        (known.follows_lost && !known.heard) || self.detector.reach(id, now) == Reach::Unreachable
    }

    /// These are the peers from now on.
    pub(super) fn follow(&mut self, peers: &BTreeMap<NodeId, NodeEntry>, now: Moment) {
        let (known, detector) = (&mut self.known, &mut self.detector);
        known.retain(|id, _| {
            let stays = peers.contains_key(id);
            if !stays {
                detector.forget(id);
            }
            stays
        });
        for (id, entry) in peers {
            let before = self.known.get(id);
            if before.is_none_or(|known| known.run != entry.incarnation) {
                let follows_lost = before.is_some_and(|known| self.is_lost(id, known, now));
                let known = Known { run: entry.incarnation, heard: false, follows_lost };
                self.known.insert(id.clone(), known);
                // From now on it is expected to be heard.
                self.detector.on_heartbeat(id, entry.incarnation, now);
            }
        }
    }

    /// Takes the heartbeats from Discovery, where the peers are not probed. Where heartbeats don't show, a node
    /// that is registered counts as heard. Silence of the store itself counts against no node.
    pub(super) fn hear(&mut self, nodes: &member_view::View, silent: bool, now: Moment) {
        if self.are_asked() {
            return;
        }
        for seen in nodes.present() {
            let (id, run) = (&seen.info.id, seen.info.incarnation);
            if let Some(known) = self.known.get_mut(id).filter(|known| known.run == run) {
                known.heard = true;
                let heard = nodes.heard(id).filter(|_| !silent).unwrap_or(now);
                self.detector.on_heartbeat(id, run, heard);
            }
        }
    }

    /// This process heard no node for so long.
    pub(super) fn excuse(&mut self, silence: Duration) {
        self.detector.excuse(silence);
    }

    /// Asks those that are not being asked, when it is time; tells when that is again.
    pub(super) fn ask(
        &mut self,
        peers: &BTreeMap<NodeId, NodeEntry>,
        now: Moment,
    ) -> Option<Moment> {
        let probe = self.probe.as_ref()?;
        if let Some(at) = self.ask_at.filter(|at| *at > now) {
            return Some(at);
        }
        let limit = self.every * PROBE_INTERVALS;
        for peer in peers.values() {
            if self.asked.insert((peer.id.clone(), peer.incarnation)) {
                let (probe, peer) = (Arc::clone(probe), peer.clone());
                self.probes.spawn(async move {
                    let answer = tokio::time::timeout(limit, probe.probe(&peer)).await;
                    let answered = matches!(answer, Ok(Ok(())));
                    (peer, answered.then_some(now))
                });
            }
        }
        self.ask_at = Some(now.plus(self.every));
        self.ask_at
    }

    /// Waits for the next answer and takes it in. An answer shows that the peer was there when it was
    /// asked, or later. Nothing is lost when this is dropped.
    pub(super) async fn answer(&mut self) {
        let Some(probed) = self.probes.join_next().await else {
            return std::future::pending().await;
        };
        let Ok((peer, answered)) = probed else {
            // The probe panicked, and its peer is not known: all may be probed again.
            self.asked.clear();
            return;
        };
        self.asked.remove(&(peer.id.clone(), peer.incarnation));
        if let Some(asked_at) = answered
            && let Some(known) = self.known.get_mut(&peer.id)
            && known.run == peer.incarnation
        {
            known.heard = true;
            self.detector.on_heartbeat(&peer.id, peer.incarnation, asked_at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use coord_core::{Address, Error, NodeEvent, NodeInfo, NodeRecord, NodeStatus, Revision, Ttl};

    use super::*;
    use crate::member_view::Judging;

    /// A network that works or does not.
    #[derive(Debug, Default)]
    struct Network(AtomicBool);

    #[async_trait]
    impl Probe for Network {
        async fn probe(&self, _: &NodeEntry) -> Result<()> {
            let works = self.0.load(Ordering::Relaxed);
            works.then_some(()).ok_or_else(|| Error::unavailable("probe", "no route"))
        }
    }

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn info(run: u128) -> NodeInfo {
        let id = NodeId::new("n2").expect("name");
        NodeInfo::new(id, Address::new("localhost:1").expect("address"))
            .with_incarnation(Incarnation::from_u128(run))
    }

    fn only(run: u128) -> BTreeMap<NodeId, NodeEntry> {
        let NodeInfo { id, incarnation, address, .. } = info(run);
        [(id.clone(), NodeEntry::new(id, incarnation, address, NodeStatus::Active))].into()
    }

    fn peers(network: Option<&Arc<Network>>) -> Peers {
        let probe = network.map(|network| Arc::clone(network) as Arc<dyn Probe>);
        Peers::new(&Settings::default(), &DowningSettings::default(), probe, None).expect("valid")
    }

    #[tokio::test]
    async fn the_next_run_of_a_lost_peer_is_lost_until_it_answers() {
        let network = Arc::new(Network::default());
        let mut peers = peers(Some(&network));
        let lost = |peers: &Peers, second| !peers.unreachable(at(second)).is_empty();
        peers.follow(&only(1), at(0));
        assert!(!lost(&peers, 1) && !peers.are_known(at(1)), "it has its time to answer");
        assert!(lost(&peers, 6) && peers.are_known(at(6)));
        peers.follow(&only(2), at(7));
        assert!(lost(&peers, 7) && peers.are_known(at(7)));
        network.0.store(true, Ordering::Relaxed);
        peers.ask(&only(2), at(8));
        peers.answer().await;
        assert!(!lost(&peers, 8) && peers.are_known(at(8)));
        peers.follow(&only(3), at(9));
        assert!(!lost(&peers, 9) && !peers.are_known(at(9)));
    }

    #[test]
    fn without_a_probe_the_next_run_of_a_lost_peer_is_heard_in_discovery() {
        let mut peers = peers(None);
        peers.follow(&only(1), at(0));
        assert_eq!(peers.unreachable(at(100)).len(), 1);
        peers.follow(&only(2), at(100));
        assert_eq!(peers.unreachable(at(100)).len(), 1);
        let ttl = Ttl::from_secs(90).expect("ttl");
        let registered = NodeRecord::new(info(2), ttl, Revision::from_u64(1));
        let judging = Judging { wait_ttl: false, from_heartbeat: true, evict: false };
        let mut nodes = member_view::View::default();
        nodes.on_event(NodeEvent::Snapshot(vec![registered]), judging, at(101));
        peers.hear(&nodes, false, at(101));
        assert_eq!(peers.unreachable(at(101)).len(), 0);
    }
}
