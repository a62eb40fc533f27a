//! The embedded backend, wrapped so that it is broken in one way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use coord_conformance::faults::{Fault, Faults};
use coord_conformance::{Fixture, Handle, MemoryFixture, Operator, Profile};
use coord_core::{
    AttemptId, Backend, BackendInfo, ClusterName, Discovery, Grant, Health, Lease, LeaseName,
    MemoryBackend, NodeId, Placement, RequestId, Result, TableName, TableUid,
};

use crate::plant::Plant;

/// Opens the broken backend.
#[derive(Debug)]
pub(crate) struct BrokenFixture {
    plant: Plant,
    shared: Arc<Mutex<Memory>>,
}

/// What all handles of a broken backend remember.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// The grants as the store made them, where others were told.
    pub(crate) real: HashMap<AttemptId, Grant>,
    pub(crate) terms: HashMap<LeaseName, u64>,
    pub(crate) grants: HashMap<LeaseName, u32>,
    pub(crate) releases: u32,
    pub(crate) uids: HashMap<TableName, TableUid>,
    /// Requests, and whether they were submitted more than once.
    pub(crate) repeated: HashMap<RequestId, bool>,
    /// The cluster that all are opened for, where clusters leak.
    cluster: Option<ClusterName>,
}

impl BrokenFixture {
    pub(crate) fn new(plant: Plant) -> Self {
        Self { plant, shared: Arc::default() }
    }
}

#[async_trait]
impl Fixture for BrokenFixture {
    fn name(&self) -> &str {
        "broken"
    }

    fn profile(&self) -> Profile {
        Profile::paused()
    }

    async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
        let asked = cluster.clone();
        let leaky = lock(&self.shared).cluster.get_or_insert(asked).clone();
        let cluster = if self.plant == Plant::ClustersLeak { &leaky } else { cluster };
        let mut handle = MemoryFixture::new().open(cluster).await?;
        let (plant, shared) = (self.plant, Arc::clone(&self.shared));
        if let Some(inner) = handle.operator.take() {
            let (store, shared) = (MemoryBackend::open(cluster.clone()), Arc::clone(&shared));
            handle.operator = Some(Arc::new(BrokenOperator { inner, plant, store, shared }));
        }
        handle.faults = handle.faults.take().map(|inner| Arc::new(Below(inner)) as _);
        let mut info = handle.backend.info().clone();
        info.guarantees.terms_survive_loss = true;
        let part = Part { inner: handle.backend, plant, shared };
        handle.backend = Arc::new(Broken { part, info });
        Ok(handle)
    }
}

/// One trait of the good backend, and how it is broken.
#[derive(Debug)]
pub(crate) struct Part<T: ?Sized> {
    pub(crate) inner: Arc<T>,
    pub(crate) plant: Plant,
    pub(crate) shared: Arc<Mutex<Memory>>,
}

impl<T: ?Sized> Part<T> {
    pub(crate) fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.shared)
    }

    fn with<U: ?Sized>(&self, inner: Arc<U>) -> Arc<Part<U>> {
        Arc::new(Part { inner, plant: self.plant, shared: Arc::clone(&self.shared) })
    }
}

fn lock(shared: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Broken {
    part: Part<dyn Backend>,
    info: BackendInfo,
}

#[async_trait]
impl Backend for Broken {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn lease(&self) -> Arc<dyn Lease> {
        self.part.with(self.part.inner.lease())
    }

    fn discovery(&self) -> Arc<dyn Discovery> {
        self.part.with(self.part.inner.discovery())
    }

    fn placement(&self) -> Arc<dyn Placement> {
        self.part.with(self.part.inner.placement())
    }

    async fn check(&self) -> Result<Health> {
        self.part.inner.check().await
    }

    async fn close(&self) -> Result<()> {
        match self.part.plant {
            Plant::CloseDoesNothing => Ok(()),
            _ => self.part.inner.close().await,
        }
    }
}

/// The faults of the good backend are below the one that is broken.
#[derive(Debug)]
struct Below(Arc<dyn Faults>);

#[async_trait]
impl Faults for Below {
    fn supports(&self, fault: Fault) -> bool {
        self.0.supports(fault)
    }

    async fn inject(&self, fault: Fault) -> Result<()> {
        self.0.inject(fault).await
    }

    async fn heal(&self) -> Result<()> {
        self.0.heal().await
    }
}

#[derive(Debug)]
struct BrokenOperator {
    inner: Arc<dyn Operator>,
    plant: Plant,
    store: MemoryBackend,
    shared: Arc<Mutex<Memory>>,
}

#[async_trait]
impl Operator for BrokenOperator {
    async fn delete_lease(&self, lease: &LeaseName) -> Result<()> {
        lock(&self.shared).terms.remove(lease);
        self.inner.delete_lease(lease).await
    }

    async fn delete_table(&self, table: &TableName) -> Result<()> {
        self.inner.delete_table(table).await
    }

    async fn delete_node(&self, node: &NodeId) -> Result<()> {
        self.inner.delete_node(node).await
    }

    async fn lose_data(&self) -> Result<()> {
        if self.plant == Plant::TermsLost {
            self.store.rewind_terms(0);
        }
        self.inner.lose_data().await
    }
}
