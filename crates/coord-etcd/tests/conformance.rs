//! The etcd backend passes the suite, on a real server.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use coord_conformance::{Fixture, Handle, Operator, Profile};
use coord_core::{BackendUrl, ClusterName, Error, ErrorKind, LeaseName, NodeId, Result, TableName};
use coord_etcd::EtcdBackend;
use coord_integration::faults::{Link, Proxy, Request};
use coord_integration::servers::{Etcd, Server};
use coord_integration::{Missing, opened};
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
        Missing::available(&self.server)
    }

    async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
        let server = self.server()?;
        let proxy = Proxy::to(server).await.map_err(|error| {
            Error::new(ErrorKind::Internal, "start").message("no proxy").with_source(error)
        })?;
        let url = server.url_via(proxy.addresses());
        let url = format!("{url}/{cluster}?request_timeout=5s");
        let url = BackendUrl::parse(&url)?;
        // To log in takes the server a while of computing, for many at once longer than a request may take.
        let backend = opened(|| EtcdBackend::open(&url)).await?;
        let operator = Admin { client: admin(server).await?, cluster: cluster.clone() };
        let link = Link::new(proxy).with_request(writes(cluster));
        let handle = Handle::new(Arc::new(backend)).with_faults(Arc::new(link));
        Ok(handle.with_operator(Arc::new(operator)))
    }

    async fn clean(&self, cluster: &ClusterName) {
        let Ok(server) = self.server() else { return };
        if let Ok(client) = admin(server).await {
            let admin = Admin { client, cluster: cluster.clone() };
            // What is left is in the way of nobody: the next cluster has another name.
            let _ = admin.delete("", true).await;
        }
    }
}

/// What only requests hold that write: a transaction's condition on a key of the cluster, which is the
/// third field of its message, or nothing but an etcd lease, whose number takes eight or nine bytes.
fn writes(cluster: &ClusterName) -> Request {
    const NAME_BYTES_MAX: usize = 64;
    let prefix = format!("coord/{cluster}/").into_bytes();
    let condition = |length: usize| {
        let tag = [0x1a, u8::try_from(length).unwrap_or(u8::MAX)];
        [&tag[..], &prefix].concat()
    };
    let conditions = (prefix.len()..prefix.len() + NAME_BYTES_MAX).map(condition);
    let leases = [8, 9].map(|bytes| vec![0, 0, 0, 0, bytes + 1, 0x08]);
    Request::WithAny(conditions.chain(leases).collect())
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

impl Admin {
    /// As `etcdctl del` does it, with or without `--prefix`.
    async fn delete(&self, key: &str, all: bool) -> Result<()> {
        let key = format!("coord/{}/{key}", self.cluster);
        let options = all.then(|| DeleteOptions::new().with_prefix());
        self.client.clone().delete(key, options).await.map(drop).map_err(refused)
    }
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

#[async_trait]
impl Operator for Admin {
    async fn delete_lease(&self, lease: &LeaseName) -> Result<()> {
        self.delete(&format!("lease/{lease}"), false).await
    }

    async fn delete_node(&self, node: &NodeId) -> Result<()> {
        self.delete(&format!("node/{node}"), false).await
    }

    async fn lose_data(&self) -> Result<()> {
        self.delete("", true).await
    }

    async fn delete_table(&self, table: &TableName) -> Result<()> {
        self.delete(&format!("table/{table}"), false).await?;
        self.delete(&format!("chunk/{table}/"), true).await
    }
}
