//! The NATS backend passes the suite, on a real server, or on as many as `COORD_TEST_NATS_NODES` says.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

use async_nats::{ConnectOptions, HeaderMap, Request};
use async_trait::async_trait;
use coord_conformance::{Fixture, Handle, Operator, Profile};
use coord_core::{BackendUrl, ClusterName, Error, ErrorKind, LeaseName, NodeId, Result, TableName};
use coord_integration::faults::{Link, Proxy, Request as Named};
use coord_integration::servers::{Nats, Server};
use coord_integration::{Missing, opened};
use coord_nats::NatsBackend;

const USER: &str = "coord";
/// The password of a server that was started here, which must never show.
const PASSWORD: &str = "hunter2-conformance";

fn main() -> ExitCode {
    // One that wants a password, unless the URL of another one is given.
    let nodes = std::env::var("COORD_TEST_NATS_NODES").ok().and_then(|text| text.parse().ok());
    let nodes = nodes.unwrap_or(1);
    let server = Nats::new().with_login(USER, PASSWORD).with_nodes(nodes).or_given().start();
    coord_conformance::main(Natses { server, nodes })
}

#[derive(Debug)]
struct Natses {
    server: Result<Server, Missing>,
    /// How many servers there are, and keep the bucket.
    nodes: usize,
}

impl Natses {
    fn server(&self) -> Result<&Server> {
        self.server.as_ref().map_err(|missing| {
            Error::new(ErrorKind::Unavailable, "start").message(missing.to_string())
        })
    }
}

#[async_trait]
impl Fixture for Natses {
    fn name(&self) -> &str {
        "nats"
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
        let options = format!("request_timeout=5s&replicas={}", self.nodes);
        let url = format!("{}/{cluster}?{options}", server.url_via(proxy.addresses()));
        let url = BackendUrl::parse(&url)?;
        let backend = opened(|| NatsBackend::open(&url)).await?;
        let operator = Admin { client: admin(server).await?, cluster: cluster.clone() };
        let writes = format!("HPUB $KV.coord.{cluster}.").into_bytes();
        // The server also asks whether its clients live, and they may ask it.
        let link = Link::new(proxy).with_request(Named::With(writes)).with_reply("\"stream\":");
        let handle = Handle::new(Arc::new(backend)).with_faults(Arc::new(link));
        Ok(handle.with_operator(Arc::new(operator)))
    }

    async fn clean(&self, cluster: &ClusterName) {
        let Ok(server) = self.server() else { return };
        if let Ok(client) = admin(server).await {
            // What is left is in the way of nobody: the next cluster has another name.
            let _ = purge(&client, &format!("$KV.coord.{cluster}.>")).await;
        }
    }
}

/// A client of its own, as the `nats` command is.
async fn admin(server: &Server) -> Result<async_nats::Client> {
    let options = if server.url().contains(PASSWORD) {
        ConnectOptions::with_user_and_password(USER.to_owned(), PASSWORD.to_owned())
    } else {
        ConnectOptions::new()
    };
    options.connect(server.addresses().to_vec()).await.map_err(refused)
}

fn refused(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::unavailable("operator", "the server's own tools failed").with_source(error)
}

async fn purge(client: &async_nats::Client, filter: &str) -> Result<()> {
    let request = format!("{{\"filter\":\"{filter}\"}}");
    let answer = client.request("$JS.API.STREAM.PURGE.KV_coord", request.into()).await;
    answer.map(drop).map_err(refused)
}

struct Admin {
    client: async_nats::Client,
    cluster: ClusterName,
}

impl Admin {
    /// As `nats kv del` does it.
    async fn delete(&self, kind: &str, name: &str) -> Result<()> {
        let subject = format!("$KV.coord.{}.{kind}.{}", self.cluster, name.replace('.', "/"));
        let mut headers = HeaderMap::new();
        headers.insert("KV-Operation", "DEL");
        let request = Request::new().headers(headers).payload("".into());
        self.client.send_request(subject, request).await.map(drop).map_err(refused)
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
        self.delete("lease", lease.as_str()).await
    }

    async fn delete_table(&self, table: &TableName) -> Result<()> {
        self.delete("table", table.as_str()).await?;
        let table = table.as_str().replace('.', "/");
        purge(&self.client, &format!("$KV.coord.{}.chunk.{table}.>", self.cluster)).await
    }

    async fn delete_node(&self, node: &NodeId) -> Result<()> {
        self.delete("node", node.as_str()).await
    }

    /// Other trials use the same bucket: the trials in `server.rs` lose one as a whole.
    async fn lose_data(&self) -> Result<()> {
        purge(&self.client, &format!("$KV.coord.{}.>", self.cluster)).await
    }
}
