//! coord itself: its sessions, and the trait below them alone.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use coord::session::LeaseGuard;
use coord::{
    Acquire, AcquireRequest, AttemptId, Coord, Grant, Holder, Incarnation, Lease, LeaseEvent,
    LeaseName, NodeId, Renew, Ttl,
};
use futures::StreamExt as _;
use futures::stream;

use crate::SETUP_MAX;
use crate::contender::{Contender, Fleet, Held};
use crate::store::Store;

/// How a user of coord does it.
pub(crate) struct Sessions {
    coord: Coord,
    /// How many leases are renewed at once: requests to Kubernetes may each take a connection.
    at_once: usize,
}

impl Sessions {
    pub(crate) async fn connect(store: &Store) -> Self {
        let coord = coord::connect(&store.coord_url()).await.expect("connects");
        let node = NodeId::new(format!("node-{}", Incarnation::random())).expect("id");
        let at_once = if store.backend() == "kube" { SETUP_MAX } else { usize::MAX };
        Self { coord: coord.with_node(node), at_once }
    }

    pub(crate) fn lease(&self) -> Arc<dyn Lease> {
        self.coord.backend().lease()
    }
}

#[async_trait]
impl Contender for Sessions {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let builder = self.coord.lease(lease).expect("a good name").ttl(ttl);
        Box::new(Guard(builder.acquire().await.expect("acquires")))
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let grants = Grants::acquire(self.lease(), prefix, size, ttl).await;
        Some(Box::new(Grants { at_once: self.at_once.min(size), ..grants }))
    }
}

struct Guard(LeaseGuard);

#[async_trait]
impl Held for Guard {
    async fn release(self: Box<Self>) {
        self.0.release().await.expect("releases");
    }
}

/// Without sessions: who waits follows the watch, and tries at once when the lease is vacant.
pub(crate) struct Trait(Arc<dyn Lease>, Coord);

impl Trait {
    pub(crate) async fn connect(store: &Store) -> Self {
        let sessions = Sessions::connect(store).await;
        Self(sessions.lease(), sessions.coord)
    }
}

#[async_trait]
impl Contender for Trait {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let request = request(lease, ttl);
        let mut events = None;
        loop {
            if let Acquire::Acquired(grant) = self.0.try_acquire(&request).await.expect("answers") {
                return Box::new(Granted {
                    lease: Arc::clone(&self.0),
                    grant,
                    _coord: self.1.clone(),
                });
            }
            let events = events.get_or_insert_with(|| self.0.watch(&request.lease));
            loop {
                match events.next().await.expect("goes on").expect("watches") {
                    LeaseEvent::Vacant | LeaseEvent::Snapshot(None) => break,
                    _ => {}
                }
            }
        }
    }
}

struct Granted {
    lease: Arc<dyn Lease>,
    grant: Grant,
    _coord: Coord,
}

#[async_trait]
impl Held for Granted {
    async fn release(self: Box<Self>) {
        self.lease.release(&self.grant).await.expect("releases");
    }
}

fn request(lease: &str, ttl: Duration) -> AcquireRequest {
    let node = NodeId::new("bench").expect("id");
    let holder = Holder::new(node, Incarnation::random(), AttemptId::random());
    let name = LeaseName::new(lease).expect("a good name");
    AcquireRequest::new(name, holder, Ttl::new(ttl).expect("a good ttl"))
}

struct Grants {
    lease: Arc<dyn Lease>,
    grants: Vec<Grant>,
    at_once: usize,
}

impl Grants {
    async fn acquire(lease: Arc<dyn Lease>, prefix: &str, size: usize, ttl: Duration) -> Self {
        let acquires = (0..size).map(|n| {
            let (lease, request) = (Arc::clone(&lease), request(&format!("{prefix}-{n}"), ttl));
            async move {
                match lease.try_acquire(&request).await.expect("answers") {
                    Acquire::Acquired(grant) => grant,
                    other => panic!("not acquired: {other:?}"),
                }
            }
        });
        let grants = stream::iter(acquires).buffer_unordered(SETUP_MAX).collect().await;
        Self { lease, grants, at_once: size }
    }
}

#[async_trait]
impl Fleet for Grants {
    async fn renew_all(&mut self) {
        let renewals: Vec<_> = self.grants.iter().map(|grant| self.lease.renew(grant)).collect();
        let renewed: Vec<_> = stream::iter(renewals).buffered(self.at_once).collect().await;
        for (grant, renewed) in self.grants.iter_mut().zip(renewed) {
            match renewed.expect("answers") {
                Renew::Renewed(renewed) => *grant = renewed,
                lost => panic!("lost: {lost:?}"),
            }
        }
    }
}
