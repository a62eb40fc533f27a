//! The stores that every scenario runs on, and what each can be put through.

use std::io;
use std::net::SocketAddr;
#[cfg(feature = "tls")]
use std::path::Path;
#[cfg(feature = "tls")]
use std::sync::Arc;
use std::time::Duration;

use coord::{ClusterName, TableName};
use coord_integration::Missing;
use coord_integration::faults::Proxy;
#[cfg(feature = "tls")]
use coord_integration::servers::{ApiServer, Kube};
use coord_integration::servers::{Etcd, Nats, Node, Redis, Server, versions};
#[cfg(feature = "tls")]
use tempfile::TempDir;

/// One kind of store. To add one, add a line to [`all`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Store {
    /// How it is called in the names of trials.
    pub(crate) name: &'static str,
    find: fn(usize) -> Result<(), Missing>,
    start: fn(usize) -> Result<Servers, Missing>,
    /// How many servers form it.
    pub(crate) servers: usize,
    /// What is added to its URL.
    options: &'static str,
    /// How long it takes at most to elect a leader of its own, where it does.
    pub(crate) election: Duration,
    /// Where tables and leases are kept, as it shows in a request.
    keys: Keys,
    encryption: Encryption,
}

/// Who sees what requests hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encryption {
    /// There is none.
    None,
    /// Nobody on the way.
    ToTheServer,
    /// The proxies, which encrypt what comes to them in the open.
    FromTheProxies,
}

#[derive(Clone, Copy, Debug)]
struct Keys {
    /// Where a table's head is kept.
    head: fn(&ClusterName, &TableName) -> String,
    /// Where a lease is kept.
    lease: fn(&ClusterName, &str) -> String,
}

const NATS: Store = Store {
    name: "nats",
    find: |servers| Nats::new().with_nodes(servers).with_control().find().map(drop),
    start: |servers| Nats::new().with_nodes(servers).with_control().start().map(Servers::Plain),
    servers: 1,
    options: "",
    election: Duration::ZERO,
    keys: Keys {
        head: |cluster, table| format!("$KV.coord.{cluster}.table.{table}"),
        lease: |cluster, lease| format!("$KV.coord.{cluster}.lease.{lease}"),
    },
    encryption: Encryption::None,
};

/// One that judges no TTLs of single records: its clients do.
const NATS_2_10: Store = Store {
    name: "nats-2.10",
    find: |_| Nats::new().with_version(nats_2_10()?).find().map(drop),
    start: |_| Nats::new().with_version(nats_2_10()?).start().map(Servers::Plain),
    ..NATS
};

fn nats_2_10() -> Result<String, Missing> {
    let mut versions = versions("nats-server").into_iter().map(|(version, _)| version);
    let missing = || Missing::absent("nats-2.10", "the servers' folder holds none");
    versions.rfind(|version| version.starts_with("2.10.")).ok_or_else(missing)
}

const REDIS: Store = Store {
    name: "redis",
    find: |_| Redis::new().with_control().find().map(drop),
    start: |_| Redis::new().with_control().start().map(Servers::Plain),
    servers: 1,
    options: "",
    election: Duration::ZERO,
    keys: Keys {
        head: |cluster, _| format!("coord:{{{cluster}}}:tables"),
        lease: |cluster, _| format!("coord:{{{cluster}}}:leases"),
    },
    encryption: Encryption::None,
};

const ETCD: Store = Store {
    name: "etcd",
    find: |servers| {
        if !cfg!(feature = "etcd") {
            let reason = "built without the feature etcd; cargo xtask test builds it";
            return Err(Missing::absent("etcd", reason));
        }
        Etcd::new().with_nodes(servers).with_control().find().map(drop)
    },
    start: |servers| Etcd::new().with_nodes(servers).with_control().start().map(Servers::Plain),
    servers: 1,
    options: "",
    election: Duration::ZERO,
    keys: Keys {
        head: |cluster, table| format!("coord/{cluster}/table/{table}"),
        lease: |cluster, lease| format!("coord/{cluster}/lease/{lease}"),
    },
    encryption: Encryption::None,
};

/// An API server with an etcd of its own behind it, reached by a kubeconfig and encrypted.
const KUBE: Store = Store {
    name: "kube",
    #[cfg(feature = "tls")]
    find: |_| Kube::new().with_control().find().map(drop),
    #[cfg(not(feature = "tls"))]
    find: |_| Err(no_kube()),
    #[cfg(feature = "tls")]
    start: |_| {
        let broken = |error: io::Error| Missing::broken("kube", error.to_string());
        let folder =
            tempfile::Builder::new().prefix("coord-scenario-").tempdir().map_err(broken)?;
        Ok(Servers::Kube(Kube::new().with_control().start()?, Arc::new(folder)))
    },
    #[cfg(not(feature = "tls"))]
    start: |_| Err(no_kube()),
    servers: 1,
    options: "",
    election: Duration::ZERO,
    // Only what is written: it is read more often.
    keys: Keys {
        head: |cluster, table| {
            format!("PUT /api/v1/namespaces/default/configmaps/coord.{cluster}.table.{table} ")
        },
        lease: |cluster, lease| {
            let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
            format!("PUT {leases}/coord.{cluster}.lease.{lease} ")
        },
    },
    encryption: Encryption::ToTheServer,
};

#[cfg(not(feature = "tls"))]
fn no_kube() -> Missing {
    Missing::absent("kube", "built without the feature tls; cargo xtask test builds it")
}

/// All kinds: those of one server, and those that elect a leader among three.
pub(crate) fn all() -> Vec<Store> {
    // A follower of NATS waits 4 to 9 s for its leader before it stands, one of etcd 1 to 2 s.
    let (nats, etcd) = (Duration::from_secs(9), Duration::from_secs(2));
    let three = |store: Store, name, options, election| Store {
        name,
        servers: 3,
        options,
        election,
        ..store
    };
    vec![
        ETCD,
        NATS,
        NATS_2_10,
        REDIS,
        KUBE,
        three(ETCD, "etcd-3", "", etcd),
        three(NATS, "nats-3", "?replicas=3", nats),
    ]
}

impl Store {
    /// Looks whether there is such a server, without starting it.
    pub(crate) fn find(&self) -> Result<Self, Missing> {
        (self.find)(self.servers).map(|()| *self)
    }

    /// Whether requests show what they concern.
    pub(crate) fn shows_keys(&self) -> bool {
        self.encryption != Encryption::ToTheServer
    }

    /// The same, with requests that show what they concern.
    pub(crate) fn find_open(&self) -> Result<Self, Missing> {
        let found = self.find()?;
        let encryption = match found.encryption {
            Encryption::None => Encryption::None,
            _ => Encryption::FromTheProxies,
        };
        Ok(Self { encryption, ..found })
    }

    /// A server of its own.
    pub(crate) fn start(&self) -> Result<Servers, Missing> {
        (self.start)(self.servers)
    }

    /// The URL of a cluster on these servers.
    pub(crate) fn url(&self, servers: &Servers, cluster: &ClusterName) -> String {
        match servers {
            Servers::Plain(server) => format!("{}/{cluster}{}", server.url(), self.options),
            #[cfg(feature = "tls")]
            Servers::Kube(server, _) => kube_url(cluster, server.kubeconfig()),
        }
    }

    /// A proxy in front of these servers.
    pub(crate) async fn proxy(&self, servers: &Servers) -> io::Result<Proxy> {
        #[cfg(feature = "tls")]
        if let (Encryption::FromTheProxies, Servers::Kube(server, _)) = (self.encryption, servers) {
            return Proxy::encrypting(server).await;
        }
        Proxy::start(&servers.addresses()?).await
    }

    /// The same by way of these addresses, those of proxies.
    pub(crate) fn url_via(
        &self,
        servers: &Servers,
        addresses: &[SocketAddr],
        cluster: &ClusterName,
    ) -> io::Result<String> {
        match servers {
            Servers::Plain(server) => {
                Ok(format!("{}/{cluster}{}", server.url_via(addresses), self.options))
            }
            #[cfg(feature = "tls")]
            Servers::Kube(server, folder) => {
                let token = server.admin_token();
                let text = match self.encryption {
                    Encryption::FromTheProxies => {
                        server.kubeconfig_open_via(addresses[0], token)?
                    }
                    _ => server.kubeconfig_via(addresses[0], token)?,
                };
                let path = folder.path().join(format!("{}.yaml", addresses[0].port()));
                std::fs::write(&path, text)?;
                Ok(kube_url(cluster, &path))
            }
        }
    }

    /// What only requests hold that concern this table's head, where they can be read.
    pub(crate) fn head(&self, cluster: &ClusterName, table: &TableName) -> Vec<u8> {
        (self.keys.head)(cluster, table).into_bytes()
    }

    /// What only requests hold that concern this lease, where they can be read.
    pub(crate) fn lease(&self, cluster: &ClusterName, lease: &str) -> Vec<u8> {
        (self.keys.lease)(cluster, lease).into_bytes()
    }
}

#[cfg(feature = "tls")]
fn kube_url(cluster: &ClusterName, kubeconfig: &Path) -> String {
    format!("kube:///{cluster}?kubeconfig={}", kubeconfig.display())
}

/// The servers of one store. Clones are the same ones.
#[derive(Clone, Debug)]
pub(crate) enum Servers {
    Plain(Server),
    /// With the folder of the kubeconfigs that lead through proxies.
    #[cfg(feature = "tls")]
    Kube(ApiServer, Arc<TempDir>),
}

impl Servers {
    /// `host:port` of each that clients talk to.
    pub(crate) fn addresses(&self) -> io::Result<Vec<String>> {
        match self {
            Self::Plain(server) => Ok(server.addresses().to_vec()),
            #[cfg(feature = "tls")]
            Self::Kube(server, _) => Ok(vec![server.address()?]),
        }
    }

    /// The one among several that leads.
    pub(crate) fn leader(&self) -> io::Result<&Node> {
        match self {
            Self::Plain(server) => server.leader(),
            #[cfg(feature = "tls")]
            Self::Kube(server, _) => server.node(),
        }
    }

    /// Kills all processes, also those that clients do not talk to.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match self {
            Self::Plain(server) => server.nodes().iter().try_for_each(Node::kill),
            #[cfg(feature = "tls")]
            Self::Kube(server, _) => {
                server.node()?.kill()?;
                server.etcd()?.nodes().iter().try_for_each(Node::kill)
            }
        }
    }

    /// Kills all processes, and then starts them on the same data. Blocks the thread until they serve.
    pub(crate) fn restart(&self) -> io::Result<()> {
        match self {
            Self::Plain(server) => server.restart(),
            #[cfg(feature = "tls")]
            Self::Kube(server, _) => {
                server.node()?.kill()?;
                server.etcd()?.restart()?;
                server.node()?.start()
            }
        }
    }
}
