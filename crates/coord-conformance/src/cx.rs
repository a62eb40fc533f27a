//! What the code of a trial works with: fresh names, handles, patience.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord_core::{
    Acquire, AcquireRequest, Address, AttemptId, Backend, ClusterName, Discovery, ErrorKind,
    ExpiryJudge, Grant, Guarantees, Holder, Incarnation, Lease, LeaseName, NodeId, NodeInfo,
    Placement, Register, Registration, Release, Replace, Ttl,
};
use tokio::time::{Instant, sleep};

use crate::case::{Done, Stop, want};
use crate::faults::{Fault, Faults};
use crate::fixture::{Fixture, Handle, Operator, Profile};

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(20);

/// One trial's world: a cluster name that nobody else uses.
pub(crate) struct Cx {
    fixture: Arc<dyn Fixture>,
    pub(crate) profile: Profile,
    pub(crate) cluster: ClusterName,
    opened: Mutex<Vec<(ClusterName, Arc<dyn Backend>)>>,
}

impl Cx {
    pub(crate) fn new(fixture: Arc<dyn Fixture>, profile: Profile) -> Self {
        let cluster = random_cluster();
        Self { fixture, profile, cluster, opened: Mutex::new(Vec::new()) }
    }

    /// One more client of the trial's cluster.
    pub(crate) async fn open(&self) -> Done<Client> {
        self.open_cluster(&self.cluster).await
    }

    /// A client of any cluster, whose name has to be random too.
    pub(crate) async fn open_cluster(&self, cluster: &ClusterName) -> Done<Client> {
        let handle = self.fixture.open(cluster).await?;
        let entry = (cluster.clone(), Arc::clone(&handle.backend));
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
        Ok(Client::new(handle))
    }

    /// Closes what the trial opened and removes what it left behind.
    pub(crate) async fn close(&self) {
        let opened =
            std::mem::take(&mut *self.opened.lock().unwrap_or_else(PoisonError::into_inner));
        let mut clusters: Vec<ClusterName> = Vec::new();
        for (cluster, backend) in opened {
            // The verdict stands already; a handle that a trial closed or cut off may well refuse.
            let _ = tokio::time::timeout(self.profile.eventually, backend.close()).await;
            if !clusters.contains(&cluster) {
                clusters.push(cluster);
            }
        }
        for cluster in clusters {
            self.fixture.clean(&cluster).await;
        }
    }

    /// How long "at once" may take.
    pub(crate) fn soon(&self) -> Duration {
        self.profile.eventually
    }

    /// The TTL that trials ask for where its length does not matter.
    pub(crate) fn ttl(&self) -> Ttl {
        self.profile.ttl
    }

    /// By when something granted for `ttl` has ended for sure, from its last renewal on. An observer
    /// may only then begin to count.
    pub(crate) fn expiry_limit(&self, client: &Client, ttl: Ttl) -> Duration {
        let counted = match client.guarantees().expiry_judge {
            ExpiryJudge::Observers => ttl.get() * 2,
            _ => ttl.get(),
        };
        counted + self.profile.expiry_delay
    }

    /// Sleeps for a share of a TTL, in percent.
    pub(crate) async fn sleep_percent(&self, ttl: Ttl, percent: u32) {
        sleep(ttl.get() * percent / 100).await;
    }

    /// Looks again and again until there is something to be seen.
    pub(crate) async fn until<T, F>(
        &self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut() -> F + Send,
    ) -> Done<T>
    where
        T: Send,
        F: Future<Output = Done<Option<T>>> + Send,
    {
        let end = Instant::now() + limit;
        loop {
            if let Some(found) = look().await? {
                return Ok(found);
            }
            if Instant::now() >= end {
                return Err(Stop::Failed(format!("waited {limit:?} in vain: {what}")));
            }
            sleep(POLL).await;
        }
    }

    /// A request of a node for the TTL of the profile, as a new attempt.
    pub(crate) fn ask(&self, lease: &LeaseName, node: &str) -> Done<AcquireRequest> {
        Ok(AcquireRequest::new(lease.clone(), holder(node)?, self.ttl()))
    }

    /// Acquires for a node, which has to succeed at the first try.
    pub(crate) async fn grant(
        &self,
        client: &Client,
        lease: &LeaseName,
        node: &str,
    ) -> Done<Grant> {
        let request = self.ask(lease, node)?;
        won(client.lease.try_acquire(&request).await?)
    }

    /// Acquires for a node as soon as the former grant of that TTL has run out.
    pub(crate) async fn grant_after_expiry(
        &self,
        client: &Client,
        lease: &LeaseName,
        node: &str,
        ttl: Ttl,
    ) -> Done<Grant> {
        let request = self.ask(lease, node)?;
        let limit = self.expiry_limit(client, ttl);
        self.until("the former grant runs out", limit, || async {
            match client.lease.try_acquire(&request).await? {
                Acquire::Acquired(grant) => Ok(Some(grant)),
                _ => Ok(None),
            }
        })
        .await
    }

    /// Registers a node, which has to succeed.
    pub(crate) async fn join(&self, client: &Client, node: &NodeInfo) -> Done<Registration> {
        let outcome = client.discovery.register(node, self.ttl(), Replace::No).await?;
        let registration = want!(outcome, Register::Registered(held) => held,
            "{} is registered", node.id);
        Ok(registration)
    }
}

/// One open handle, taken apart.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    handle: Handle,
    pub(crate) lease: Arc<dyn Lease>,
    pub(crate) discovery: Arc<dyn Discovery>,
    pub(crate) placement: Arc<dyn Placement>,
}

impl Client {
    fn new(handle: Handle) -> Self {
        let backend = &handle.backend;
        let (lease, discovery) = (backend.lease(), backend.discovery());
        let placement = backend.placement();
        Self { handle, lease, discovery, placement }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.handle.backend
    }

    pub(crate) fn guarantees(&self) -> &Guarantees {
        &self.backend().info().guarantees
    }

    /// The faults of this handle, or the end of the trial as ignored.
    pub(crate) fn faults(&self, needed: &[Fault]) -> Done<Arc<dyn Faults>> {
        let Some(faults) = &self.handle.faults else {
            return Err(Stop::Ignored("the fixture has no fault hook".to_owned()));
        };
        match needed.iter().find(|fault| !faults.supports(**fault)) {
            Some(fault) => {
                Err(Stop::Ignored(format!("the fixture's fault hook can't do {fault:?}")))
            }
            None => Ok(Arc::clone(faults)),
        }
    }

    /// The faults of this handle, where they strike below the backend: its own errors are seen then. The
    /// end of the trial as ignored else.
    pub(crate) fn real_faults(&self, needed: &[Fault]) -> Done<Arc<dyn Faults>> {
        let faults = self.faults(needed)?;
        if faults.strike_below() {
            return Ok(faults);
        }
        let why = "the fixture's fault hook stands before the backend, so the backend's own errors are \
                   not tested; make the faults on the way to the store";
        Err(Stop::Ignored(why.to_owned()))
    }

    /// The store's own tools, or the end of the trial as ignored.
    pub(crate) fn operator(&self) -> Done<&dyn Operator> {
        let missing = || Stop::Ignored("the fixture has no operator hook".to_owned());
        self.handle.operator.as_deref().ok_or_else(missing)
    }
}

/// What came of an operator's step, or the end of the trial as ignored where the fixture has none.
pub(crate) fn possible<T>(outcome: coord_core::Result<T>) -> Done<T> {
    outcome.map_err(|error| match error.kind() {
        ErrorKind::Unsupported => Stop::Ignored(error.message_text().to_owned()),
        _ => error.into(),
    })
}

/// A cluster name that nobody else uses.
pub(crate) fn random_cluster() -> ClusterName {
    let bits = AttemptId::random().as_u128();
    let name = ClusterName::new(format!("conformance-{:016x}", bits >> 64));
    name.unwrap_or_else(|_| unreachable!("sixteen hexadecimal digits make a name"))
}

pub(crate) fn lease_name(text: &str) -> Done<LeaseName> {
    Ok(LeaseName::new(text)?)
}

/// A new attempt of a new run of a node.
pub(crate) fn holder(node: &str) -> Done<Holder> {
    Ok(Holder::new(NodeId::new(node)?, Incarnation::random(), AttemptId::random()))
}

/// A new run of a node, with an address of its own.
pub(crate) fn node(name: &str) -> Done<NodeInfo> {
    let id = NodeId::new(name)?;
    let port = 1_024 + (Incarnation::random().as_u128() % 60_000);
    Ok(NodeInfo::new(id, Address::new(format!("10.0.0.1:{port}"))?))
}

/// The grant that was won, or the end of the trial.
pub(crate) fn won(outcome: Acquire) -> Done<Grant> {
    Ok(want!(outcome, Acquire::Acquired(grant) => grant, "the lease is acquired"))
}

/// Releases, which has to end the grant.
pub(crate) async fn release(client: &Client, grant: &Grant) -> Done {
    want!(client.lease.release(grant).await?, Release::Released => (), "the grant is released");
    Ok(())
}
