//! How processes speak to each other: requests of mailboxes, and probes of downing.
//!
//! A request is worked out by one of the threads that its process has beside the one on which its node's
//! runtime runs, so that a handler that does not yield keeps a thread and not the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_cluster::Probe;
use coord_cluster::Transport;
use coord_cluster::transport::{Incoming, Recipient};
use coord_core::{Address, Error, ErrorKind, NodeEntry, Result};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::invariants::ProcessId;
use crate::wire::{Weather, Wire};

/// After this long without an answer a peer is given up.
const SILENCE: Duration = Duration::from_secs(5);
/// How messages between processes travel.
const WEATHER: Weather = Weather { latency: 2, twice: 0, lost: 0 };

/// All processes, as they reach each other; clones are the same.
#[derive(Clone)]
pub struct Peers {
    wire: Wire,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    ends: BTreeMap<Address, End>,
    /// Nodes between which nothing gets through.
    cut: BTreeSet<(usize, usize)>,
    /// Processes that stand still.
    still: BTreeSet<ProcessId>,
    /// How many requests of the first one the second one has taken and not answered.
    working: BTreeMap<(ProcessId, ProcessId), usize>,
    /// A planted bug: whom probes say to be gone.
    denied: BTreeSet<usize>,
    /// A planted bug: what was answered is kept.
    pile_up: bool,
}

/// One process's end.
struct End {
    process: ProcessId,
    incoming: Option<Arc<dyn Incoming>>,
    /// Threads that work out requests, and whether one of them is kept by what does not yield.
    workers: Vec<(Handle, bool)>,
}

impl Peers {
    /// Nobody is there yet.
    #[must_use]
    pub fn new(wire: Wire) -> Self {
        Self { wire, state: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers what is due by now.
    pub fn deliver(&self) {
        self.wire.deliver();
    }

    /// The digest of all that was delivered.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.wire.digest()
    }

    /// A process's end, in the place of the one that was at this address before.
    #[must_use]
    pub fn end(&self, address: Address, process: ProcessId, workers: Vec<Handle>) -> PeerEnd {
        let workers = workers.into_iter().map(|handle| (handle, false)).collect();
        let end = End { process, incoming: None, workers };
        self.lock().ends.insert(address.clone(), end);
        PeerEnd { peers: self.clone(), address, process }
    }

    /// A process is dead.
    pub fn died(&self, process: ProcessId) {
        let mut state = self.lock();
        let gone: Vec<_> = {
            let addresses = state.ends.iter().filter(|(_, end)| end.process == process);
            addresses.map(|(address, _)| address.clone()).collect()
        };
        let ends: Vec<_> = gone.iter().filter_map(|address| state.ends.remove(address)).collect();
        state.still.remove(&process);
        state.working.retain(|(from, to), _| *from != process && *to != process);
        drop(state);
        drop(ends);
    }

    /// Whether a process, and which of its threads, can do anything now.
    pub fn shows(&self, process: ProcessId, still: bool, kept: &[bool]) {
        let mut state = self.lock();
        match still {
            true => state.still.insert(process),
            false => state.still.remove(&process),
        };
        for end in state.ends.values_mut().filter(|end| end.process == process) {
            end.workers.iter_mut().zip(kept).for_each(|(worker, kept)| worker.1 = *kept);
        }
    }

    /// From now on nothing gets through between this node and these.
    pub fn cut(&self, node: usize, others: impl Iterator<Item = usize>) {
        let pairs = others.filter(|other| *other != node).map(|other| pair(node, other));
        self.lock().cut.extend(pairs);
    }

    /// Everybody reaches everybody again.
    pub fn heal(&self) {
        let mut state = self.lock();
        state.cut.clear();
        state.denied.clear();
    }

    /// A planted bug: probes say that these are gone.
    pub fn deny(&self, nodes: impl Iterator<Item = usize>) {
        self.lock().denied.extend(nodes);
    }

    /// A planted bug: what was answered is kept.
    pub fn pile_up(&self) {
        self.lock().pile_up = true;
    }

    /// The pair of processes with the most requests of the one that the other is working on.
    #[must_use]
    pub fn most_working(&self) -> Option<(ProcessId, ProcessId, usize)> {
        let state = self.lock();
        let most = state.working.iter().max_by_key(|(_, count)| **count);
        most.map(|((from, to), count)| (*from, *to, *count))
    }

    /// Whether a process reaches who is at this address.
    fn reaches(state: &State, from: ProcessId, to: &Address) -> bool {
        let there = state.ends.get(to).map(|end| end.process.node);
        there.is_some_and(|there| !state.cut.contains(&pair(from.node, there)))
    }

    /// Something is sent to who is at this address, if anybody is and is reached, when it arrives.
    fn send(
        &self,
        from: ProcessId,
        to: Address,
        arrive: impl FnOnce(&mut State, ProcessId) + Send + 'static,
    ) {
        let peers = self.clone();
        let arrive = move || {
            let mut state = peers.lock();
            if Self::reaches(&state, from, &to)
                && let Some(there) = state.ends.get(&to).map(|end| end.process)
            {
                arrive(&mut state, there);
            }
        };
        self.wire.send(WEATHER, 0, Box::new(arrive));
    }
}

fn pair(one: usize, other: usize) -> (usize, usize) {
    (one.min(other), one.max(other))
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers").field("ends", &self.lock().ends.len()).finish_non_exhaustive()
    }
}

/// One process's end of the network between processes.
#[derive(Clone, Debug)]
pub struct PeerEnd {
    peers: Peers,
    address: Address,
    process: ProcessId,
}

impl PeerEnd {
    fn refused(&self, to: &Address) -> Option<Error> {
        let state = self.peers.lock();
        let listens = state.ends.get(to).is_some_and(|end| end.incoming.is_some());
        // Whoever is cut off learns it by time alone.
        let cut = !Peers::reaches(&state, self.process, to) && state.ends.contains_key(to);
        (!listens && !cut).then(|| Error::unavailable("call", "nobody listens").resource(to))
    }
}

#[async_trait]
impl Transport for PeerEnd {
    fn serve(&self, incoming: Arc<dyn Incoming>) {
        let mut state = self.peers.lock();
        let end = state.ends.get_mut(&self.address).filter(|end| end.process == self.process);
        if let Some(end) = end {
            end.incoming = Some(incoming);
        }
    }

    async fn call(&self, to: &Recipient, request: Bytes) -> Result<Bytes> {
        if let Some(refused) = self.refused(&to.address) {
            return Err(refused);
        }
        let (reply, answer) = oneshot::channel();
        let (peers, from, here) = (self.peers.clone(), self.process, self.address.clone());
        let recipient = to.clone();
        let arrive = move |state: &mut State, there: ProcessId| {
            let Some(end) = state.ends.get(&recipient.address) else { return };
            let Some(incoming) = end.incoming.clone() else { return };
            if let Err(other) = recipient.check(incoming.node(), incoming.incarnation()) {
                peers.send(there, here, move |_, _| drop(reply.send(Err(other))));
                return;
            }
            let free = end.workers.iter().find(|(_, kept)| !kept).or_else(|| end.workers.first());
            let Some((worker, _)) = free.cloned() else { return };
            // One after the other, so that what waits on one thread does not wait for another.
            if let Some(end) = state.ends.get_mut(&recipient.address) {
                end.workers.rotate_left(1);
            }
            *state.working.entry((from, there)).or_default() += 1;
            let pile_up = state.pile_up;
            worker.spawn(async move {
                let answered = incoming.answer(request).await;
                if pile_up {
                    std::future::pending::<()>().await;
                }
                {
                    let mut state = peers.lock();
                    if let Some(count) = state.working.get_mut(&(from, there)) {
                        *count = count.saturating_sub(1);
                    }
                }
                // The caller may have given up.
                peers.send(there, here, move |_, _| drop(reply.send(Ok(answered))));
            });
        };
        self.peers.send(self.process, to.address.clone(), arrive);
        let lost = |why: &'static str| {
            Err(Error::new(ErrorKind::Unavailable, "call").message(why).effect_unknown())
        };
        match tokio::time::timeout(SILENCE, answer).await {
            Ok(Ok(answered)) => answered,
            Ok(Err(_)) => {
                tokio::time::sleep(SILENCE).await;
                lost("the connection broke")
            }
            Err(_elapsed) => lost("no answer came in time"),
        }
    }

    async fn close(&self) {
        let mut state = self.peers.lock();
        let end = state.ends.get_mut(&self.address).filter(|end| end.process == self.process);
        let incoming = end.and_then(|end| end.incoming.take());
        drop(state);
        drop(incoming);
    }
}

#[async_trait]
impl Probe for PeerEnd {
    async fn probe(&self, peer: &NodeEntry) -> Result<()> {
        let (reply, answer) = oneshot::channel::<()>();
        let (peers, here) = (self.peers.clone(), self.address.clone());
        let arrive = move |state: &mut State, there: ProcessId| {
            if !state.still.contains(&there) && !state.denied.contains(&there.node) {
                let peers = peers.clone();
                peers.send(there, here, move |_, _| {
                    // The asker may have given up.
                    let _ = reply.send(());
                });
            }
        };
        self.peers.send(self.process, peer.address.clone(), arrive);
        answer.await.map_err(|_lost| Error::unavailable("probe", "no answer came"))
    }
}
