//! The lease that gates the coordinator, while this node leads.
//!
//! Held by the leader alone, and only while it leads: unless it is, no table is claimed or written. Which
//! shard lives where stays as it is meanwhile, and hosting and routing go on.

use std::sync::Arc;
use std::time::Duration;

use coord_core::session::{HeldLease, LeaseSession, Leases};
use coord_core::{Error, Incarnation, Result};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::model::GatingLease;
use crate::settings::Settings;
use crate::shared::{Ending, Shared};
use crate::status::Gating;

impl GatingLease {
    /// Checks how it is to be held, as far as that does not depend on the holder.
    ///
    /// # Errors
    /// `Invalid` for one of coord's own leases, and for times that do not fit together.
    pub(crate) fn check(&self, shared: &Shared) -> Result<()> {
        if self.name.is_reserved() {
            let why = "the lease is one of coord's own; give the gate a name of its own";
            return Err(Error::invalid("start", why).resource(&self.name));
        }
        self.session(shared, Incarnation::random()).map(drop)
    }

    fn session(&self, shared: &Shared, run: Incarnation) -> Result<LeaseSession> {
        let Settings { sharding_ttl, sharding_retry, request_timeout, .. } = shared.settings;
        Leases::new(Arc::clone(&self.lease), shared.node.clone(), run)
            .with_clock(Arc::clone(&shared.clock))
            .named(self.name.clone())
            .ttl(sharding_ttl)
            // So often that nothing is lost while its store is away for half of the TTL.
            .renew_every(sharding_ttl / 6)
            .retry_every(sharding_retry)
            .request_timeout(request_timeout)
            .build()
    }
}

/// The task that acquires it, keeps it and gives it back, for one term of this node.
pub(crate) struct Keeper {
    tasks: TaskTracker,
    cancel: CancellationToken,
    tenure: watch::Receiver<Option<HeldLease>>,
}

impl Keeper {
    /// Begins to acquire it; none where nothing gates the coordinator.
    pub(crate) fn start(shared: &Arc<Shared>, run: Incarnation) -> Option<Self> {
        let gate = shared.gating.clone()?;
        let (tell, tenure) = watch::channel(None);
        let (tasks, cancel) = (TaskTracker::new(), CancellationToken::new());
        let span = tracing::info_span!("gate", lease = %gate.name);
        let keep = keep(Arc::clone(shared), gate, run, tell, cancel.clone());
        tasks.spawn(keep.instrument(span));
        tasks.close();
        Some(Self { tasks, cancel, tenure })
    }

    pub(crate) fn tenure(&self) -> watch::Receiver<Option<HeldLease>> {
        self.tenure.clone()
    }

    /// Gives it back.
    pub(crate) async fn end(keeper: Option<Self>) {
        if let Some(keeper) = keeper {
            keeper.cancel.cancel();
            keeper.tasks.wait().await;
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

async fn keep(
    shared: Arc<Shared>,
    gate: GatingLease,
    run: Incarnation,
    tell: watch::Sender<Option<HeldLease>>,
    cancel: CancellationToken,
) {
    let show = |gating| shared.observe(|observer| observer.on_gating(gating));
    loop {
        show(Gating::Acquiring);
        let acquired = async {
            match gate.session(&shared, run) {
                Ok(session) => session.acquire().await,
                Err(error) => Err(error),
            }
        };
        let acquired = tokio::select! {
            biased;
            () = cancel.cancelled() => break,
            acquired = acquired => acquired,
        };
        let guard = match acquired {
            Ok(guard) => guard,
            Err(error) => {
                tracing::error!(%error, "the coordinator's gate can't be had; it is tried again");
                if paused(&cancel, shared.settings.sharding_retry).await { continue } else { break }
            }
        };
        show(Gating::Held);
        tell.send_replace(Some(guard.tenure()));
        let lost = tokio::select! {
            biased;
            () = cancel.cancelled() => None,
            lost = guard.lost() => Some(lost),
        };
        tell.send_replace(None);
        match lost {
            Some(why) => tracing::warn!(%why, "the coordinator's gate is lost; no shard is placed"),
            None if shared.ending() == Ending::Abandoned => {
                guard.abandon();
                break;
            }
            None => {
                if let Err(error) = guard.release().await {
                    tracing::warn!(%error, "the coordinator's gate is left to its TTL");
                }
                break;
            }
        }
    }
    show(Gating::None);
}

/// False if it was cancelled.
async fn paused(cancel: &CancellationToken, pause: Duration) -> bool {
    tokio::time::timeout(pause, cancel.cancelled()).await.is_err()
}
