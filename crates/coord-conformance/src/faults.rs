//! What can go wrong between a client and its store, made to order.
//!
//! [`Faulty`] puts it around any backend inside the process. That tests what is above a backend; of the
//! backend itself it tests nothing, for the errors that are seen are the wrapper's. A fixture for a real
//! server implements [`Faults`] itself, with a proxy on the way to the store, say: only then the suite
//! looks at how the backend maps its own errors.
//!
//! coord's own fixtures for etcd, NATS, Redis and Kubernetes make each fault in a proxy, below the backend.
//! The wrapper is left for the memory backend, which has no network, and for Redis with Sentinel and as a
//! Cluster, whose servers name each other's addresses and so lead past every proxy. A Kubernetes API server
//! that a kubeconfig names loses no replies, since nobody but its owner can look into its requests.
//! [`Fault::Restart`] is made by none: one server serves all trials, and what a restart may cost stands in the
//! backends' own tests.

mod wrapper;

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord_core::{Effect, Error, ErrorKind, Result};
use tokio::sync::watch;

pub use wrapper::Faulty;

/// One thing that goes wrong on the way between one handle and its store.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The store can't be reached: requests fail, watches end with an error. Requests that were under
    /// way get no reply.
    Cut,
    /// Requests are not delivered and wait, and watches stand still, until [`Faults::heal`]. Then what
    /// still waits is delivered, late.
    Pause,
    /// Each reply takes this much longer. The store applies the request at once.
    Delay(Duration),
    /// The next request that writes is applied and its reply is lost: the caller gets `Unavailable` with an
    /// unknown effect. Where an operation takes several, it is the one that settles it.
    DropReply,
    /// The watches that are open now end with an error. New ones work.
    CutWatches,
    /// The store's server stops and starts again, for all handles.
    Restart,
}

/// The faults of one handle's way to the store.
#[async_trait]
pub trait Faults: Debug + Send + Sync + 'static {
    /// Whether this fault can be made here. A trial that needs one that can't is ignored.
    fn supports(&self, fault: Fault) -> bool;

    /// Whether the faults strike between the backend and its store, so that what the backend itself makes
    /// of them is tested. They do not where they are made by a [`Faulty`] around it: then the trials look
    /// at errors of the wrapper's, and those that are about the backend's own are ignored.
    fn strike_below(&self) -> bool {
        true
    }

    /// Makes it. It stays until [`heal`](Self::heal), except for those that happen once.
    ///
    /// # Errors
    /// `Unsupported`, or whatever kept it from being made.
    ///
    /// # Cancel safety
    /// The fault may be there.
    async fn inject(&self, fault: Fault) -> Result<()>;

    /// Ends all faults of this handle.
    ///
    /// # Errors
    /// Whatever kept them from being ended.
    ///
    /// # Cancel safety
    /// Some of them may be left.
    async fn heal(&self) -> Result<()>;
}

/// The controls of a [`Faulty`] backend; clones control the same one.
#[derive(Clone, Debug)]
pub struct FaultControl(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: watch::Sender<State>,
    /// Which replies are lost next: of any operation, or of one.
    dropped: Mutex<Vec<Option<&'static str>>>,
    /// Requests of which operations are lost next.
    unsent: Mutex<Vec<&'static str>>,
    /// Which operations panic next.
    panics: Mutex<Vec<&'static str>>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// What a request that is cut off says of its effect.
    cut: Option<Effect>,
    paused: bool,
    /// The way there, or the way back, loses everything.
    mute: bool,
    deaf: bool,
    delay: Duration,
    /// Rises at every cut: a watch that began under a lower number has to end.
    watch_cuts: u64,
}

impl FaultControl {
    fn new() -> Self {
        let (paused, mute, deaf, delay) = (false, false, false, Duration::ZERO);
        let state = State { cut: None, paused, mute, deaf, delay, watch_cuts: 0 };
        Self(Arc::new(Shared {
            state: watch::Sender::new(state),
            dropped: Mutex::default(),
            unsent: Mutex::default(),
            panics: Mutex::default(),
        }))
    }

    /// Cuts the store off. `effect` is what failed writes say of themselves: `None` as if the connection
    /// was refused, `Unknown` as if no answer came. Nothing is applied either way.
    pub fn cut(&self, effect: Effect) {
        self.0.state.send_modify(|state| {
            state.cut = Some(effect);
            state.watch_cuts += 1;
        });
    }

    /// Lets requests wait and watches stand still until [`heal`](Self::heal).
    pub fn pause(&self) {
        self.0.state.send_modify(|state| state.paused = true);
    }

    /// Loses all requests, none of which is applied, and goes on showing what watches bring: a partition
    /// in one direction.
    pub fn mute(&self) {
        self.0.state.send_modify(|state| state.mute = true);
    }

    /// Loses all replies to requests, which are applied, and lets watches stand still: a partition in the
    /// other direction.
    pub fn deafen(&self) {
        self.0.state.send_modify(|state| state.deaf = true);
    }

    /// Delays each reply by this much; zero ends that.
    pub fn delay(&self, delay: Duration) {
        self.0.state.send_modify(|state| state.delay = delay);
    }

    /// Loses the reply to the next request, which is applied.
    pub fn drop_reply(&self) {
        self.lose(None);
    }

    /// Loses the reply to the next request of this operation (`"renew"`, `"publish"`: the name of the
    /// trait's method), which is applied. Others pass in between.
    pub fn drop_reply_to(&self, operation: &'static str) {
        self.lose(Some(operation));
    }

    /// Loses the next request of this operation, which is not applied; the caller can't tell. Others
    /// pass in between.
    pub fn drop_request_to(&self, operation: &'static str) {
        self.unsent(|unsent| unsent.push(operation));
    }

    /// Panics in the next request of this operation, which is not applied, as a bug in a backend would.
    pub fn panic_in(&self, operation: &'static str) {
        self.panics(|panics| panics.push(operation));
    }

    /// Ends the watches that are open now.
    pub fn cut_watches(&self) {
        self.0.state.send_modify(|state| state.watch_cuts += 1);
    }

    /// Ends all faults, requests and replies that were still to be lost included.
    pub fn heal(&self) {
        self.dropped(Vec::clear);
        self.unsent(Vec::clear);
        self.panics(Vec::clear);
        self.0.state.send_modify(|state| {
            state.cut = None;
            state.paused = false;
            state.mute = false;
            state.deaf = false;
            state.delay = Duration::ZERO;
        });
    }

    fn lose(&self, operation: Option<&'static str>) {
        self.dropped(|dropped| dropped.push(operation));
    }

    fn dropped<T>(&self, step: impl FnOnce(&mut Vec<Option<&'static str>>) -> T) -> T {
        step(&mut self.0.dropped.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn unsent<T>(&self, step: impl FnOnce(&mut Vec<&'static str>) -> T) -> T {
        step(&mut self.0.unsent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn panics<T>(&self, step: impl FnOnce(&mut Vec<&'static str>) -> T) -> T {
        step(&mut self.0.panics.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether this request is to be lost; if so, that one is used up.
    fn takes_request(&self, operation: &str) -> bool {
        self.unsent(|unsent| {
            let index = unsent.iter().position(|lost| *lost == operation);
            index.map(|index| unsent.remove(index)).is_some()
        })
    }

    /// Whether the reply to this operation is to be lost; if so, that one is used up.
    fn takes_reply(&self, operation: &'static str) -> bool {
        self.dropped(|dropped| {
            let fits = |lost: &Option<&str>| lost.is_none_or(|lost| lost == operation);
            dropped.iter().position(fits).map(|index| dropped.remove(index)).is_some()
        })
    }

    /// Waits out a pause, and fails while the store is cut off.
    async fn pass(&self, operation: &'static str, writes: bool) -> Result<()> {
        let panics = self.panics(|panics| {
            let index = panics.iter().position(|next| *next == operation);
            index.map(|index| panics.remove(index)).is_some()
        });
        assert!(!panics, "the backend panics in {operation}");
        let mut states = self.0.state.subscribe();
        let state = states.wait_for(|state| state.cut.is_some() || !state.paused).await;
        let Some(state) = state.ok().map(|state| *state) else { return Ok(()) };
        match state.cut {
            None if state.mute || self.takes_request(operation) => Err(cut_off(operation, writes)),
            None => Ok(()),
            Some(effect) => Err(cut_off(operation, writes && effect == Effect::Unknown)),
        }
    }

    /// What the caller is told of a request that was applied.
    async fn reply<T>(
        &self,
        operation: &'static str,
        writes: bool,
        result: Result<T>,
    ) -> Result<T> {
        if self.takes_reply(operation) {
            return Err(cut_off(operation, writes));
        }
        let delay = self.0.state.borrow().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let state = *self.0.state.borrow();
        if state.cut.is_some() || state.deaf {
            return Err(cut_off(operation, writes));
        }
        result
    }
}

#[async_trait]
impl Faults for FaultControl {
    fn supports(&self, fault: Fault) -> bool {
        fault != Fault::Restart
    }

    fn strike_below(&self) -> bool {
        false
    }

    async fn inject(&self, fault: Fault) -> Result<()> {
        match fault {
            Fault::Cut => self.cut(Effect::Unknown),
            Fault::Pause => self.pause(),
            Fault::Delay(delay) => self.delay(delay),
            Fault::DropReply => self.drop_reply(),
            Fault::CutWatches => self.cut_watches(),
            Fault::Restart => {
                let error = Error::new(ErrorKind::Unsupported, "inject");
                return Err(error.message("a store inside the process can't restart"));
            }
        }
        Ok(())
    }

    async fn heal(&self) -> Result<()> {
        Self::heal(self);
        Ok(())
    }
}

fn cut_off(operation: &'static str, effect_unknown: bool) -> Error {
    let error = Error::unavailable(operation, "the store is cut off");
    if effect_unknown { error } else { error.effect_none() }
}
