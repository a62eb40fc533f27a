//! The stores that every scenario runs on, and what each can be put through.

use std::time::Duration;

use coord::{ClusterName, TableName};
use coord_integration::Missing;
use coord_integration::servers::{Etcd, Nats, Redis, Server, versions};

/// One kind of store. To add one, add a line to [`all`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Store {
    /// How it is called in the names of trials.
    pub(crate) name: &'static str,
    find: fn(usize) -> Result<(), Missing>,
    start: fn(usize) -> Result<Server, Missing>,
    /// How many servers form it.
    pub(crate) servers: usize,
    /// What is added to its URL.
    options: &'static str,
    /// How long it takes at most to elect a leader of its own, where it does.
    pub(crate) election: Duration,
    /// Where a table's head is kept, as it shows in a request.
    head: fn(&ClusterName, &TableName) -> String,
    /// Where a lease is kept.
    lease: fn(&ClusterName, &str) -> String,
}

const NATS: Store = Store {
    name: "nats",
    find: |servers| Nats::new().with_nodes(servers).with_control().find().map(drop),
    start: |servers| Nats::new().with_nodes(servers).with_control().start(),
    servers: 1,
    options: "",
    election: Duration::ZERO,
    head: |cluster, table| format!("$KV.coord.{cluster}.table.{table}"),
    lease: |cluster, lease| format!("$KV.coord.{cluster}.lease.{lease}"),
};

/// One that judges no TTLs of single records: its clients do.
const NATS_2_10: Store = Store {
    name: "nats-2.10",
    find: |_| Nats::new().with_version(nats_2_10()?).find().map(drop),
    start: |_| Nats::new().with_version(nats_2_10()?).start(),
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
    start: |_| Redis::new().with_control().start(),
    servers: 1,
    options: "",
    election: Duration::ZERO,
    head: |cluster, _| format!("coord:{{{cluster}}}:tables"),
    lease: |cluster, _| format!("coord:{{{cluster}}}:leases"),
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
    start: |servers| Etcd::new().with_nodes(servers).with_control().start(),
    servers: 1,
    options: "",
    election: Duration::ZERO,
    head: |cluster, table| format!("coord/{cluster}/table/{table}"),
    lease: |cluster, lease| format!("coord/{cluster}/lease/{lease}"),
};

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
        three(ETCD, "etcd-3", "", etcd),
        three(NATS, "nats-3", "?replicas=3", nats),
    ]
}

impl Store {
    /// Looks whether there is such a server, without starting it.
    pub(crate) fn find(&self) -> Result<Self, Missing> {
        (self.find)(self.servers).map(|()| *self)
    }

    /// A server of its own.
    pub(crate) fn start(&self) -> Result<Server, Missing> {
        (self.start)(self.servers)
    }

    /// The URL of a cluster behind these addresses.
    pub(crate) fn url(&self, base: &str, cluster: &ClusterName) -> String {
        format!("{base}/{cluster}{}", self.options)
    }

    /// What only requests hold that concern this table's head.
    pub(crate) fn head(&self, cluster: &ClusterName, table: &TableName) -> Vec<u8> {
        (self.head)(cluster, table).into_bytes()
    }

    /// What only requests hold that concern this lease.
    pub(crate) fn lease(&self, cluster: &ClusterName, lease: &str) -> Vec<u8> {
        (self.lease)(cluster, lease).into_bytes()
    }
}
