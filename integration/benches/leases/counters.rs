//! What a server counts of its clients' messages.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use coord_integration::servers::{Node, Server};

/// What came in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) messages: f64,
    pub(crate) bytes: f64,
}

impl Counters {
    /// What the servers that were started here have counted so far.
    pub(crate) async fn of(server: &Server) -> Self {
        let (backend, ports): (_, Vec<_>) =
            (server.backend(), server.nodes().iter().map(Node::http_port).collect());
        let read =
            move || ports.iter().fold(Self::default(), |sum, &port| sum.plus(&read(backend, port)));
        tokio::task::spawn_blocking(read).await.expect("no panic")
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self { messages: self.messages + other.messages, bytes: self.bytes + other.bytes }
    }

    pub(crate) fn minus(&self, other: &Self) -> Self {
        Self { messages: self.messages - other.messages, bytes: self.bytes - other.bytes }
    }
}

fn read(backend: &str, port: u16) -> Counters {
    if backend == "nats" {
        let text = get(port, "/varz");
        let number = |name: &str| {
            let text = text.split(&format!("\"{name}\":")).nth(1).unwrap_or_default();
            let digits = text.trim_start().split(|c: char| !c.is_ascii_digit()).next();
            digits.and_then(|digits| digits.parse().ok()).unwrap_or(f64::NAN)
        };
        return Counters { messages: number("in_msgs"), bytes: number("in_bytes") };
    }
    let text = get(port, "/metrics");
    let sum = |name: &str| -> f64 {
        let values = text.lines().filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
        });
        values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    Counters {
        messages: sum("grpc_server_msg_received_total"),
        bytes: sum("etcd_network_client_grpc_received_bytes_total"),
    }
}

fn get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connects");
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("asks");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answers");
    text
}
