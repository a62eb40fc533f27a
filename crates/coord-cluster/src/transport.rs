//! How bytes get from one process to another and back. A transport knows nodes and addresses, and no shards.
//!
//! A request is for a [`Recipient`], which is one incarnation of one node. Only that incarnation may take it:
//! an address may lead to another node by mistake, and a node that registers again under its name is another
//! incarnation at the same address. The request is then not delivered, and its sender gets an error that names
//! the process at the address.
//!
//! [`TcpTransport`] is the one for services; [`MemoryNetwork`] makes transports that reach each other inside
//! one process, for tests. What it takes to write another one is the trait, [`Transport`].

mod memory;
mod tcp;

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::{Address, Error, ErrorKind, Incarnation, NodeId, Result};

pub use self::memory::{MemoryNetwork, MemoryTransport};
#[cfg(feature = "fuzzing")]
pub(crate) use self::tcp::fuzzing;
pub use self::tcp::{TcpLimits, TcpTransport};

/// The process that a request is for: one incarnation of a node, and its address.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Recipient {
    /// Which node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: Address,
}

impl Recipient {
    /// A recipient of its parts.
    #[must_use]
    pub fn new(node: NodeId, incarnation: Incarnation, address: Address) -> Self {
        Self { node, incarnation, address }
    }

    /// Checks that this incarnation of this node is the process at the address; `incarnation` is none where
    /// that process is not registered at the moment.
    ///
    /// # Errors
    /// With `Effect::None`, naming both: `Misconfigured` for another node, and `Unavailable` for another
    /// incarnation, which heals with time, since the maps will soon name it.
    pub fn check(&self, node: &NodeId, incarnation: Option<Incarnation>) -> Result<()> {
        let (kind, why) = if *node != self.node {
            let why = format!(
                "node {node} answers there, and not node {}; each node needs an address that leads to it \
                 and to no other",
                self.node
            );
            (ErrorKind::Misconfigured, why)
        } else if incarnation != Some(self.incarnation) {
            let now = incarnation.map_or("not registered".to_owned(), |run| format!("run {run}"));
            let why = format!("node {node} is {now} now, and not run {}", self.incarnation);
            (ErrorKind::Unavailable, why)
        } else {
            return Ok(());
        };
        Err(Error::new(kind, "call").effect_none().message(why).resource(&self.address))
    }
}

/// Refuses an address that means something else to others, or to others of them: "all addresses of this
/// machine", by which each node reaches itself, and IPv4 addresses in forms that only some resolvers read,
/// each its own way.
pub(crate) fn check_address(address: &Address) -> Result<()> {
    let text = address.as_str();
    let host = text.rsplit_once(':').map_or(text, |(host, _port)| host);
    let is_unspecified = match text.parse::<SocketAddr>() {
        Ok(at) => at.ip().to_canonical().is_unspecified(),
        // Only an IPv4 address ends in a number.
        Err(_name) if host.rsplit('.').next().is_some_and(is_number) => {
            let is_zero = |part: &str| is_number(part) && digits(part).bytes().all(|b| b == b'0');
            if !host.split('.').all(is_zero) {
                let why = "the host is an IPv4 address in a form that is not read alike everywhere; write \
                           four decimal numbers without leading zeros, as 10.0.0.7";
                return Err(Error::invalid("start", why).resource(address));
            }
            true
        }
        Err(_name) => false,
    };
    if is_unspecified {
        let why = "to others the node's address means themselves; name one that they reach it at";
        return Err(Error::invalid("start", why).resource(address));
    }
    Ok(())
}

/// A number as `inet_aton` takes it: decimal, octal or hexadecimal.
fn is_number(part: &str) -> bool {
    let is_hex = digits(part).len() < part.len();
    digits(part).bytes().all(|b| b.is_ascii_digit() || (is_hex && b.is_ascii_hexdigit()))
}

fn digits(part: &str) -> &str {
    part.strip_prefix("0x").or_else(|| part.strip_prefix("0X")).unwrap_or(part)
}

/// Requests to other processes, and theirs to this one.
#[async_trait]
pub trait Transport: Debug + Send + Sync + 'static {
    /// Gives every request that arrives from now on to this; called once, when the node starts. An
    /// answer is worked out to its end also where the connection it came by is gone.
    fn serve(&self, incoming: Arc<dyn Incoming>);

    /// Sends one request and waits for its answer. It is sent once: the caller decides whether to send it
    /// again, so the error's effect has to be right. It is delivered only if the recipient is the process that
    /// answers at that moment ([`Recipient::check`]).
    ///
    /// # Errors
    /// With [`Effect::None`](coord_core::Effect::None) only where the request certainly did not reach the
    /// recipient's [`Incoming`] and never will; with `Effect::Unknown` else. `Unavailable` for what
    /// time may heal, another run of the node included; `Invalid` for a request that is too large;
    /// `Misconfigured` where another node answers, or a process of another cluster, and `Unsupported` for another
    /// protocol; `Closed` after [`close`](Self::close).
    ///
    /// # Cancel safety
    /// The request may have been sent.
    async fn call(&self, to: &Recipient, request: Bytes) -> Result<Bytes>;

    /// Takes no more requests, lets those that were taken be answered, and ends. The sender of a request that
    /// was not taken gets a certain error, where the network still allows it.
    ///
    /// # Cancel safety
    /// It is closed, and answers may be lost.
    async fn close(&self);
}

/// The process that answers the requests of other processes.
#[async_trait]
pub trait Incoming: Debug + Send + Sync + 'static {
    /// Which node answers.
    fn node(&self) -> &NodeId;

    /// Its incarnation; none while it is not registered. An incarnation that has ended never comes back.
    fn incarnation(&self) -> Option<Incarnation>;

    /// Waits until this incarnation does not answer any more. Connections that were made to it end then.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn ended(&self, run: Incarnation);

    /// Answers one request.
    ///
    /// # Cancel safety
    /// Not to be dropped before it returns.
    async fn answer(&self, request: Bytes) -> Bytes;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_others_read_otherwise_is_refused() {
        let check = |host: &str| check_address(&Address::new(format!("{host}:7000")).expect(host));
        for good in [
            "10.0.0.7",
            "127.0.0.1",
            "[::1]",
            "[2001:db8::]",
            "localhost",
            "node-0",
            "0.example",
            "0x.example",
            "10.0.0.7a",
            "abc",
            "0.0.0.0x-1",
        ] {
            check(good).expect(good);
        }
        for all in [
            "0",
            "00",
            "0x0",
            "0X00",
            "0x",
            "0.0",
            "0.0x0.0",
            "0.0.0.0",
            "00.0.0.0",
            "0.0.0.00",
            "[::]",
            "[0:0:0:0:0:0:0:0]",
            "[::0.0.0.0]",
            "[::ffff:0.0.0.0]",
            "[::ffff:0:0]",
        ] {
            let error = check(all).expect_err(all).to_string();
            assert!(error.contains("means themselves"), "{error}");
            assert!(error.contains(&format!("{all}:7000")), "{error}");
        }
        for odd in ["127.1", "0x7f000001", "2130706433", "010.0.0.1", "1.2.3.4.5", "256.0.0.1"] {
            let error = check(odd).expect_err(odd).to_string();
            assert!(error.contains("four decimal numbers"), "{error}");
        }
    }

    #[test]
    fn whoever_is_not_asked_for_is_named() {
        let id = |name: &str| NodeId::new(name).expect("name");
        let run = Incarnation::from_u128;
        let to = Recipient::new(id("n1"), run(5), Address::new("a:1").expect("address"));
        to.check(&id("n1"), Some(run(5))).expect("it is the one");
        let other = to.check(&id("n2"), Some(run(5))).expect_err("another node");
        assert_eq!(other.kind(), ErrorKind::Misconfigured);
        let text = other.to_string();
        assert!(
            text.contains("node n1") && text.contains("node n2") && text.contains("a:1"),
            "{text}"
        );
        for now in [None, Some(run(6))] {
            let error = to.check(&id("n1"), now).expect_err("another run");
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, coord_core::Effect::None)
            );
        }
    }
}
