//! What a server counts of its clients' messages.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use coord_integration::servers::{ApiServer, Node, Server};

use crate::store::Store;

/// What came in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) messages: f64,
    pub(crate) bytes: f64,
}

impl Counters {
    /// What the servers that were started here have counted so far.
    pub(crate) async fn of(store: &Store) -> Self {
        let store = store.clone();
        let read = move || match &store {
            Store::Server("redis", server) => sum(server, redis),
            Store::Server("nats", server) => sum(server, |node| nats(node.http_port())),
            Store::Server(_, server) => sum(server, |node| etcd(node.http_port())),
            Store::Kube(server) => kube(server),
        };
        tokio::task::spawn_blocking(read).await.expect("no panic")
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self { messages: self.messages + other.messages, bytes: self.bytes + other.bytes }
    }

    pub(crate) fn minus(&self, other: &Self) -> Self {
        Self { messages: self.messages - other.messages, bytes: self.bytes - other.bytes }
    }
}

/// The commands that a Redis server ran for clients. It counts also what a script calls: of what a script here
/// may call, clients send nothing themselves while leases are renewed.
fn redis(node: &Node) -> Counters {
    const BY_SCRIPTS: &[&str] = &[
        "exists", "del", "get", "hdel", "hget", "hset", "pexpire", "set", "time", "xadd", "zadd",
        "zrem", "zscore",
    ];
    let stats = node.ask(&["INFO", "commandstats"]).expect("answers");
    let calls = |line: &str| {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let is_own = name == "info" || BY_SCRIPTS.contains(&name);
        rest.split(',').next()?.parse::<f64>().ok().filter(|_| !is_own)
    };
    let traffic = node.ask(&["INFO", "stats"]).expect("answers");
    let bytes = traffic.lines().find_map(|line| line.strip_prefix("total_net_input_bytes:"));
    Counters {
        messages: stats.lines().filter_map(calls).sum(),
        bytes: bytes.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(f64::NAN),
    }
}

fn nats(port: u16) -> Counters {
    let text = get(port, "/varz");
    let number = |name: &str| {
        let text = text.split(&format!("\"{name}\":")).nth(1).unwrap_or_default();
        let digits = text.trim_start().split(|c: char| !c.is_ascii_digit()).next();
        digits.and_then(|digits| digits.parse().ok()).unwrap_or(f64::NAN)
    };
    Counters { messages: number("in_msgs"), bytes: number("in_bytes") }
}

fn etcd(port: u16) -> Counters {
    let text = get(port, "/metrics");
    Counters {
        messages: metric(&text, "grpc_server_msg_received_total", ""),
        bytes: metric(&text, "etcd_network_client_grpc_received_bytes_total", ""),
    }
}

/// The requests for Leases that an API server answered, and the bytes of their bodies.
fn kube(server: &ApiServer) -> Counters {
    let Ok((200, text)) = server.ask("GET", "/metrics", None) else {
        return Counters { messages: f64::NAN, bytes: f64::NAN };
    };
    let of_leases = "resource=\"leases\"";
    Counters {
        messages: metric(&text, "apiserver_request_total", of_leases),
        bytes: metric(&text, "apiserver_request_body_size_bytes_sum", of_leases),
    }
}

/// The sum of a metric over all that has this label.
fn metric(text: &str, name: &str, label: &str) -> f64 {
    let values = text.lines().filter(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(['{', ' ']) && rest.contains(label))
    });
    values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

fn sum(server: &Server, read: impl Fn(&Node) -> Counters) -> Counters {
    server.nodes().iter().map(read).fold(Counters::default(), |sum, it| sum.plus(&it))
}

fn get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connects");
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("asks");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answers");
    text
}
