//! The etcd backend passes the suite, on a real server.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use coord_conformance::faults::Faulty;
use coord_conformance::{Fixture, Handle, Operator, Profile};
use coord_core::{BackendUrl, ClusterName, Error, ErrorKind, LeaseName, Result, TableName};
use coord_etcd::EtcdBackend;
use coord_integration::Missing;
use coord_integration::servers::{Etcd, Server};
use etcd_client::{Client, ConnectOptions, DeleteOptions};

/// The password of a server that was started here, which must never show.
const PASSWORD: &str = "hunter2-conformance";

fn main() -> ExitCode {
    // One with authentication on, unless the URL of another one is given.
    let server = Etcd::new().with_root_password(PASSWORD).or_given().start();
    coord_conformance::main(Etcds { server })
}

#[derive(Debug)]
struct Etcds {
    server: Result<Server, Missing>,
}

impl Etcds {
    fn server(&self) -> Result<&Server> {
        self.server.as_ref().map_err(|missing| {
            Error::new(ErrorKind::Unavailable, "start").message(missing.to_string())
        })
    }
}

#[async_trait]
impl Fixture for Etcds {
    fn name(&self) -> &str {
        "etcd"
    }

    fn profile(&self) -> Profile {
        Profile::real_time().with_secrets([PASSWORD.to_owned()])
    }

    async fn available(&self) -> Result<(), String> {
        self.server.as_ref().map(drop).map_err(ToString::to_string)
    }

    async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
        let url = format!("{}/{cluster}", self.server()?.url());
        let backend = EtcdBackend::open(&BackendUrl::parse(&url)?).await?;
        let faulty = Faulty::new(Arc::new(backend));
        let control = faulty.control().clone();
        let operator = Admin { client: admin(self.server()?).await?, cluster: cluster.clone() };
        let handle = Handle::new(Arc::new(faulty)).with_faults(Arc::new(control));
        Ok(handle.with_operator(Arc::new(operator)))
    }

    async fn clean(&self, cluster: &ClusterName) {
        let Ok(server) = self.server() else { return };
        if let Ok(mut client) = admin(server).await {
            let all = Some(DeleteOptions::new().with_prefix());
            // What is left is in the way of nobody: the next cluster has another name.
            let _ = client.delete(format!("coord/{cluster}/"), all).await;
        }
    }
}

/// A client of its own, as `etcdctl` is.
async fn admin(server: &Server) -> Result<Client> {
    let mut options = ConnectOptions::new();
    if server.url().contains(PASSWORD) {
        options = options.with_user("root", PASSWORD);
    }
    Client::connect(server.addresses(), Some(options)).await.map_err(refused)
}

fn refused(error: etcd_client::Error) -> Error {
    Error::unavailable("operator", "the server's own tools failed").with_source(error)
}

struct Admin {
    client: Client,
    cluster: ClusterName,
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

#[async_trait]
impl Operator for Admin {
    async fn delete_lease(&self, lease: &LeaseName) -> Result<()> {
        let key = format!("coord/{}/lease/{lease}", self.cluster);
        self.client.clone().delete(key, None).await.map(drop).map_err(refused)
    }

    async fn delete_table(&self, table: &TableName) -> Result<()> {
        let mut client = self.client.clone();
        let head = format!("coord/{}/table/{table}", self.cluster);
        client.delete(head, None).await.map_err(refused)?;
        let chunks = format!("coord/{}/chunk/{table}/", self.cluster);
        let all = Some(DeleteOptions::new().with_prefix());
        client.delete(chunks, all).await.map(drop).map_err(refused)
    }
}
