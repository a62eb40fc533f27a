//! A lease store in a few lines, whose requests can be made to fail in every way a network can.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::{self, BoxStream, StreamExt};
use tokio::sync::watch;

use crate::clock::{Clock, Moment};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{Acquire, Lease, LeaseEvent, Listing, Page, Release, Renew};
use crate::types::{AcquireRequest, Grant, LeaseName, LeaseRecord, Origin, Revision, Term, Ttl};

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// Nothing; it takes a while on the way there.
    Slow(Duration),
    /// It is applied, and the answer takes a while.
    SlowAnswer(Duration),
    /// It never arrives, and nothing answers.
    Hangs,
    /// It is applied, and nothing answers.
    AnswerLost,
    /// It is applied, and answered with an error of unknown effect.
    AppliedError,
    /// It fails at once, without effect.
    Error(ErrorKind),
    /// The backend panics.
    Panics,
}

#[derive(Debug)]
pub(super) struct Fake {
    me: Weak<Self>,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
pub(super) struct State {
    held: Option<(Grant, Moment)>,
    pub(super) term: u64,
    revision: u64,
    pub(super) granted_ttl: Option<Ttl>,
    pub(super) calls: Vec<(&'static str, Moment)>,
    faults: Vec<(&'static str, VecDeque<Fault>)>,
    in_flight: Vec<&'static str>,
    pub(super) overlaps: u32,
}

impl Fake {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        let state = State {
            held: None,
            term: 0,
            revision: 0,
            granted_ttl: None,
            calls: Vec::new(),
            faults: Vec::new(),
            in_flight: Vec::new(),
            overlaps: 0,
        };
        let (state, changed) = (Mutex::new(state), watch::Sender::new(()));
        Arc::new_cyclic(|me| Self { me: me.clone(), clock, state, changed })
    }

    pub(super) fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.state.lock().expect("no panic inside"))
    }

    /// The next requests of this kind go wrong like this, in order.
    pub(super) fn fail(&self, operation: &'static str, faults: impl IntoIterator<Item = Fault>) {
        self.with(|state| state.faults.push((operation, faults.into_iter().collect())));
    }

    pub(super) fn calls(&self, operation: &str) -> Vec<Moment> {
        self.with(|state| {
            let of = state.calls.iter().filter(|(name, _)| *name == operation);
            of.map(|(_, at)| *at).collect()
        })
    }

    /// Who holds the lease, once what ran out is gone.
    pub(super) fn holder(&self) -> Option<Grant> {
        let now = self.clock.now();
        self.with(|state| state.live(now).map(|(grant, _)| grant.clone()))
    }

    /// Ends whatever is held, as an operator would.
    pub(super) fn delete(&self) {
        self.with(|state| state.held = None);
        self.changed.send_replace(());
    }

    async fn request<T>(
        &self,
        operation: &'static str,
        apply: impl FnOnce(&mut State, Moment) -> T + Send,
    ) -> Result<T> {
        let fault = self.with(|state| {
            state.calls.push((operation, self.clock.now()));
            let faults = state.faults.iter_mut().filter(|(name, _)| *name == operation);
            faults.filter_map(|(_, faults)| faults.pop_front()).next()
        });
        let _flight = Flight::start(self, operation);
        if let Some(Fault::Slow(time)) = fault {
            tokio::time::sleep(time).await;
        }
        match fault {
            Some(Fault::Hangs) => std::future::pending().await,
            Some(Fault::Error(kind)) => return Err(Error::new(kind, operation).effect_none()),
            Some(Fault::Panics) => panic!("the backend has a bug"),
            _ => {}
        }
        let (answer, is_change) = self.with(|state| {
            let now = self.clock.now();
            let before = state.live(now).map(|(grant, _)| grant.term);
            let answer = apply(state, now);
            (answer, before != state.held.as_ref().map(|(grant, _)| grant.term))
        });
        if is_change {
            self.changed.send_replace(());
        }
        match fault {
            Some(Fault::SlowAnswer(time)) => tokio::time::sleep(time).await,
            Some(Fault::AnswerLost) => std::future::pending().await,
            Some(Fault::AppliedError) => return Err(Error::unavailable(operation, "reset")),
            _ => {}
        }
        Ok(answer)
    }
}

/// Counts requests that change the lease while another one does.
struct Flight<'a>(&'a Fake, &'static str);

impl<'a> Flight<'a> {
    fn start(fake: &'a Fake, operation: &'static str) -> Self {
        fake.with(|state| {
            let changes = |name: &&str| ["renew", "release"].contains(name);
            let others = state.in_flight.iter().filter(|name| changes(name)).count();
            if changes(&operation) && others > 0 {
                state.overlaps += 1;
            }
            state.in_flight.push(operation);
        });
        Self(fake, operation)
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock().expect("no panic inside");
        let at = state.in_flight.iter().position(|name| *name == self.1).expect("started");
        state.in_flight.swap_remove(at);
    }
}

impl State {
    fn live(&mut self, now: Moment) -> Option<&(Grant, Moment)> {
        self.held.take_if(|(_, until)| now >= *until);
        self.held.as_ref()
    }

    fn put(&mut self, mut grant: Grant, now: Moment) -> Grant {
        self.revision += 1;
        grant.revision = Revision::from_u64(self.revision);
        self.held = Some((grant.clone(), now.plus(grant.ttl.get())));
        grant
    }

    fn is_held_by(&self, grant: &Grant) -> bool {
        self.held.as_ref().is_some_and(|(held, _)| held.fence() == grant.fence())
    }

    fn record(&self) -> Option<LeaseRecord> {
        self.held.as_ref().map(|(grant, _)| LeaseRecord::new(grant.clone()))
    }
}

#[async_trait]
impl Lease for Fake {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let request = request.clone();
        self.request("acquire", move |state, now| {
            if let Some((held, _)) = &state.held {
                if held.holder.attempt != request.holder.attempt {
                    return Acquire::Held(LeaseRecord::new(held.clone()));
                }
                return Acquire::Acquired(state.put(held.clone(), now));
            }
            state.term += 1;
            let grant = Grant::new(
                request.lease,
                request.holder,
                Term::from_u64(state.term),
                state.granted_ttl.unwrap_or(request.ttl),
                Origin::new("fake:1/test"),
                Revision::from_u64(0),
            );
            Acquire::Acquired(state.put(grant, now))
        })
        .await
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        let grant = grant.clone();
        self.request("renew", move |state, now| {
            if state.is_held_by(&grant) {
                return Renew::Renewed(state.put(grant, now));
            }
            Renew::Lost(state.record())
        })
        .await
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        let grant = grant.clone();
        self.request("release", move |state, _now| {
            if !state.is_held_by(&grant) {
                return Release::NotHeld;
            }
            state.held = None;
            Release::Released
        })
        .await
    }

    async fn get(&self, _lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        self.request("get", |state, _now| state.record()).await
    }

    async fn list(&self, _page: Page) -> Result<Listing<LeaseRecord>> {
        self.request("list", |state, _now| Listing::new(state.record().into_iter().collect(), None))
            .await
    }

    fn watch(&self, _lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        // Reads the state at each change and when what is held runs out, until the store is gone.
        let state = |fake: &Self| {
            let now = fake.clock.now();
            fake.with(|state| {
                let left = state.live(now).map(|(_, until)| until.since(now));
                (state.record(), left)
            })
        };
        self.with(|state| state.calls.push(("watch", self.clock.now())));
        let me = self.me.upgrade().expect("it is being called");
        let changes = self.changed.subscribe();
        stream::unfold((me, changes, None), move |(me, mut changes, mut last)| async move {
            loop {
                let (record, left) = state(&me);
                // Renewals do not show.
                let term = record.as_ref().map(|record| record.term);
                if last != Some(term) {
                    let first = last.is_none();
                    last = Some(term);
                    let event = match record {
                        record if first => LeaseEvent::Snapshot(record),
                        Some(record) => LeaseEvent::Changed(record),
                        None => LeaseEvent::Vacant,
                    };
                    return Some((Ok(event), (me, changes, last)));
                }
                let left = left.unwrap_or(Duration::from_secs(86_400));
                tokio::select! {
                    changed = changes.changed() => changed.ok()?,
                    () = tokio::time::sleep(left) => {}
                }
            }
        })
        .boxed()
    }
}
