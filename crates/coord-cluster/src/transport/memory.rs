//! Transports inside one process, with faults, for tests; deterministic under paused time.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::{Address, Error, ErrorKind, Result};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use super::{Incoming, Recipient, Transport};

/// A network inside this process. Clones are the same network.
#[derive(Clone, Debug, Default)]
pub struct MemoryNetwork(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    places: BTreeMap<Address, Arc<Place>>,
    /// How long one way takes.
    delay: Duration,
}

/// A transport's end of the network.
struct Place {
    incoming: Mutex<Option<Arc<dyn Incoming>>>,
    tasks: TaskTracker,
    /// While true, nothing gets here or away.
    cut: watch::Sender<bool>,
    /// How many of the next answers get lost.
    lost: Mutex<usize>,
}

impl MemoryNetwork {
    /// A network on which everything arrives at once.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// From now on every request, and every answer, takes so long.
    pub fn delay(&self, one_way: Duration) {
        self.state().delay = one_way;
    }

    /// A transport at this address, in the place of one that was there before.
    #[must_use]
    pub fn transport(&self, address: Address) -> MemoryTransport {
        let place = Place {
            incoming: Mutex::default(),
            tasks: TaskTracker::new(),
            cut: watch::Sender::new(false),
            lost: Mutex::default(),
        };
        let place = Arc::new(place);
        self.state().places.insert(address.clone(), Arc::clone(&place));
        MemoryTransport { network: self.clone(), address, place }
    }

    /// Cuts an address off: what is on its way there or back is lost, and nothing gets there. What has
    /// arrived is worked out all the same.
    pub fn cut(&self, address: &Address) {
        self.set_cut(address, true);
    }

    /// Ends a [`cut`](Self::cut).
    pub fn heal(&self, address: &Address) {
        self.set_cut(address, false);
    }

    /// The next answers from an address are lost, after the requests were worked out.
    pub fn lose_answers(&self, address: &Address, count: usize) {
        if let Some(place) = self.place(address) {
            *lock(&place.lost) = count;
        }
    }

    fn set_cut(&self, address: &Address, cut: bool) {
        if let Some(place) = self.place(address) {
            place.cut.send_replace(cut);
        }
    }

    fn place(&self, address: &Address) -> Option<Arc<Place>> {
        self.state().places.get(address).cloned()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

/// One process's transport on a [`MemoryNetwork`].
#[derive(Debug)]
pub struct MemoryTransport {
    network: MemoryNetwork,
    address: Address,
    place: Arc<Place>,
}

impl MemoryTransport {
    /// Where it is reached.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }
}

#[async_trait]
impl Transport for MemoryTransport {
    fn serve(&self, incoming: Arc<dyn Incoming>) {
        *lock(&self.place.incoming) = Some(incoming);
    }

    async fn call(&self, to: &Recipient, request: Bytes) -> Result<Bytes> {
        let address = &to.address;
        let not_sent = |why: &'static str| {
            Error::new(ErrorKind::Unavailable, "call").effect_none().message(why).resource(address)
        };
        let delay = self.network.state().delay;
        let there = self.network.place(address).ok_or_else(|| not_sent("nobody listens"))?;
        if *self.place.cut.borrow() || *there.cut.borrow() {
            return Err(not_sent("the network is cut"));
        }
        let (mut near, mut far) = (self.place.cut.subscribe(), there.cut.subscribe());
        let asked = async {
            pause(delay).await;
            let incoming = lock(&there.incoming).clone();
            let incoming = incoming.ok_or_else(|| not_sent("nobody listens"))?;
            to.check(incoming.node(), incoming.incarnation())?;
            let working = there.tasks.spawn(async move { incoming.answer(request).await });
            let answer = working.await;
            let is_lost = {
                let mut lost = lock(&there.lost);
                let is_lost = *lost > 0;
                *lost = lost.saturating_sub(1);
                is_lost
            };
            if is_lost {
                return Err(not_sent("the answer was lost").effect_unknown());
            }
            pause(delay).await;
            answer.map_err(|error| {
                not_sent("the request was dropped").effect_unknown().with_source(error)
            })
        };
        tokio::select! {
            biased;
            answer = asked => answer,
            _ = near.wait_for(|cut| *cut) => Err(not_sent("the network was cut").effect_unknown()),
            _ = far.wait_for(|cut| *cut) => Err(not_sent("the network was cut").effect_unknown()),
        }
    }

    async fn close(&self) {
        lock(&self.place.incoming).take();
        self.place.tasks.close();
        self.place.tasks.wait().await;
        let mut state = self.network.state();
        if state.places.get(&self.address).is_some_and(|place| Arc::ptr_eq(place, &self.place)) {
            state.places.remove(&self.address);
        }
    }
}

async fn pause(duration: Duration) {
    if !duration.is_zero() {
        tokio::time::sleep(duration).await;
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("cut", &*self.cut.borrow()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
