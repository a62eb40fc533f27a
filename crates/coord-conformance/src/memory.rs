//! The embedded backend as a fixture: under paused time, with all faults that need no server.

use std::sync::Arc;

use async_trait::async_trait;
use coord_core::{ClusterName, LeaseName, MemoryBackend, NodeId, Result, TableName};

use crate::faults::Faulty;
use crate::fixture::{Fixture, Handle, Operator, Profile};

/// Opens the embedded backend.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct MemoryFixture;

impl MemoryFixture {
    /// The fixture.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }
}

#[async_trait]
impl Fixture for MemoryFixture {
    fn name(&self) -> &str {
        "memory"
    }

    fn profile(&self) -> Profile {
        Profile::paused()
    }

    async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
        let store = MemoryBackend::open(cluster.clone());
        let operator = Arc::new(MemoryOperator(store.clone()));
        let faulty = Faulty::new(Arc::new(store));
        let faults = Arc::new(faulty.control().clone());
        Ok(Handle::new(Arc::new(faulty)).with_faults(faults).with_operator(operator))
    }
}

/// The operator of a store in this process.
#[derive(Debug)]
struct MemoryOperator(MemoryBackend);

#[async_trait]
impl Operator for MemoryOperator {
    async fn delete_lease(&self, lease: &LeaseName) -> Result<()> {
        self.0.delete_lease(lease);
        Ok(())
    }

    async fn delete_table(&self, table: &TableName) -> Result<()> {
        self.0.delete_table(table);
        Ok(())
    }

    async fn delete_node(&self, node: &NodeId) -> Result<()> {
        self.0.delete_node(node);
        Ok(())
    }

    async fn lose_data(&self) -> Result<()> {
        self.0.lose_data();
        Ok(())
    }
}
