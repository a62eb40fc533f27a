//! The Redis backend passes the suite, on a real server.
//!
//! `COORD_TEST_REDIS_SHAPE` asks for another one than a single server: `sentinel` or `cluster`.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use coord_conformance::faults::Faulty;
use coord_conformance::{Fixture, Handle, Operator, Profile};
use coord_core::{BackendUrl, ClusterName, Error, ErrorKind, LeaseName, NodeId, Result, TableName};
use coord_integration::faults::{Link, Proxy, Request};
use coord_integration::servers::{Redis, Server};
use coord_integration::{Missing, opened};
use coord_redis::RedisBackend;
use redis::Cmd;

macro_rules! script {
    ($name:literal) => {
        concat!(
            include_str!("../src/scripts/prelude.lua"),
            include_str!(concat!("../src/scripts/", $name, ".lua"))
        )
    };
}

/// What the backend writes by.
const WRITES: [&str; 9] = [
    script!("acquire"),
    script!("renew"),
    script!("release"),
    script!("register"),
    script!("heartbeat"),
    script!("leave"),
    script!("write"),
    script!("request"),
    script!("answer"),
];

const USER: &str = "coord";
/// The password of a server that was started here, which must never show.
const PASSWORD: &str = "hunter2-conformance";

fn main() -> ExitCode {
    // One that wants a password, unless the URL of another one is given.
    let shape = std::env::var("COORD_TEST_REDIS_SHAPE").unwrap_or_default();
    let redis = Redis::new().with_login(USER, PASSWORD);
    let server = match shape.as_str() {
        "sentinel" => redis.with_sentinels(1, 3).start(),
        "cluster" => redis.with_cluster(3, 0).start(),
        _ => redis.or_given().start(),
    };
    coord_conformance::main(Redises { server, shape })
}

#[derive(Debug)]
struct Redises {
    server: Result<Server, Missing>,
    shape: String,
}

impl Redises {
    fn server(&self) -> Result<&Server> {
        self.server.as_ref().map_err(|missing| {
            Error::new(ErrorKind::Unavailable, "start").message(missing.to_string())
        })
    }

    /// The URL of the servers themselves, for a cluster.
    fn url(&self, cluster: &ClusterName) -> Result<BackendUrl> {
        let server = self.server()?;
        let url = match self.shape.as_str() {
            "sentinel" => {
                let hosts = server.sentinels().join(",");
                format!("redis://{USER}:{PASSWORD}@{hosts}/{cluster}?master=coord")
            }
            _ => format!("{}/{cluster}", server.url()),
        };
        BackendUrl::parse(&url)
    }
}

#[async_trait]
impl Fixture for Redises {
    fn name(&self) -> &str {
        "redis"
    }

    fn profile(&self) -> Profile {
        Profile::real_time().with_secrets([PASSWORD.to_owned()])
    }

    async fn available(&self) -> Result<(), String> {
        Missing::available(&self.server)
    }

    async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
        let server = self.server()?;
        let admin = Admin { url: self.url(cluster)?, cluster: cluster.clone() };
        // Servers that name each other's addresses lead past every proxy: there the faults are made before
        // the backend.
        let proxy = match self.shape.as_str() {
            "" => Some(Proxy::to(server).await.map_err(|error| {
                Error::new(ErrorKind::Internal, "start").message("no proxy").with_source(error)
            })?),
            _ => None,
        };
        let url = match &proxy {
            Some(proxy) => {
                let url = server.url_via(proxy.addresses());
                BackendUrl::parse(&format!("{url}/{cluster}?request_timeout=5s"))?
            }
            None => self.url(cluster)?,
        };
        let backend = Arc::new(opened(|| RedisBackend::open(&url)).await?);
        let Some(proxy) = proxy else {
            let faulty = Faulty::new(backend);
            let control = Arc::new(faulty.control().clone());
            return Ok(Handle::new(Arc::new(faulty))
                .with_faults(control)
                .with_operator(Arc::new(admin)));
        };
        admin.load_scripts().await?;
        let writes = WRITES.iter().map(|code| redis::Script::new(code).get_hash().into());
        let link = Link::new(proxy).with_request(Request::WithAny(writes.collect()));
        Ok(Handle::new(backend).with_faults(Arc::new(link)).with_operator(Arc::new(admin)))
    }

    async fn clean(&self, cluster: &ClusterName) {
        let Ok(url) = self.url(cluster) else { return };
        let admin = Admin { url, cluster: cluster.clone() };
        // What is left is in the way of nobody: the next cluster has another name.
        let _ = admin.clean().await;
    }
}

/// A client of its own, as `redis-cli` is: to every server, for one of them is the one to ask.
struct Admin {
    url: BackendUrl,
    cluster: ClusterName,
}

impl Admin {
    fn key(&self, kind: &str) -> String {
        format!("coord:{{{}}}:{kind}", self.cluster)
    }

    async fn send(&self, command: &Cmd) -> Result<redis::Value> {
        let mut last = None;
        for address in self.servers().await? {
            let settings = format!("redis://{USER}:{PASSWORD}@{address}");
            let plain = format!("redis://{address}");
            for url in [settings, plain] {
                let client = redis::Client::open(url).map_err(refused)?;
                let Ok(mut connection) = client.get_multiplexed_async_connection().await else {
                    continue;
                };
                match command.query_async(&mut connection).await {
                    Ok(answer) => return Ok(answer),
                    Err(error) => last = Some(error),
                }
            }
        }
        Err(last.map_or_else(|| Error::unavailable("operator", "no server answers"), refused))
    }

    /// The servers that may keep the data: those of the URL, or those that sentinels name.
    async fn servers(&self) -> Result<Vec<String>> {
        let hosts = self.url.hosts().iter().map(ToString::to_string).collect::<Vec<_>>();
        if !self.url.to_string().contains("master=") {
            return Ok(hosts);
        }
        let client = redis::Client::open(format!("redis://{}", hosts[0])).map_err(refused)?;
        let mut connection = client.get_multiplexed_async_connection().await.map_err(refused)?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg("coord");
        let master: (String, u16) = command.query_async(&mut connection).await.map_err(refused)?;
        Ok(vec![format!("{}:{}", master.0, master.1)])
    }

    /// Lets the server know them, so that the first request with one is not refused for that.
    async fn load_scripts(&self) -> Result<()> {
        for code in WRITES {
            let mut command = redis::cmd("SCRIPT");
            command.arg("LOAD").arg(code);
            self.send(&command).await?;
        }
        Ok(())
    }

    async fn clean(&self) -> Result<()> {
        let kinds = ["id", "clock", "leases", "lease-ends", "lease-names", "nodes", "node-ends"];
        let others = ["tables", "requests", "answers", "request-ends", "events"];
        let mut command = redis::cmd("UNLINK");
        for kind in kinds.iter().chain(&others) {
            command.arg(self.key(kind));
        }
        self.send(&command).await.map(drop)
    }
}

fn refused(error: redis::RedisError) -> Error {
    Error::unavailable("operator", "the server's own tools failed").with_source(error)
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

#[async_trait]
impl Operator for Admin {
    async fn delete_lease(&self, lease: &LeaseName) -> Result<()> {
        let mut command = redis::cmd("HDEL");
        command.arg(self.key("leases")).arg(lease.as_str());
        self.send(&command).await.map(drop)
    }

    async fn delete_table(&self, table: &TableName) -> Result<()> {
        let mut command = redis::cmd("HDEL");
        command.arg(self.key("tables")).arg(table.as_str());
        self.send(&command).await?;
        let mut command = redis::cmd("UNLINK");
        command.arg(self.key(&format!("chunks:{table}")));
        self.send(&command).await.map(drop)
    }

    async fn delete_node(&self, node: &NodeId) -> Result<()> {
        let mut command = redis::cmd("HDEL");
        command.arg(self.key("nodes")).arg(node.as_str());
        self.send(&command).await.map(drop)
    }

    async fn lose_data(&self) -> Result<()> {
        self.clean().await
    }
}
