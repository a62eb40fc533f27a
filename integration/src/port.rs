//! Ports for servers and proxies.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rand::RngExt as _;
use rand::rngs::StdRng;

/// Below what systems use for outgoing connections. A port from there may be taken, while its server is
/// down, by a client that tries to reach that very server.
const PORTS: Range<u16> = 20_000..32_000;
/// Test programs that run at once mostly take theirs from different ones of so many parts.
const PARTS: u16 = 6;
const TRIES_MAX: usize = 100;

/// A port looks free while its server is down, and would be missed when that starts again.
static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port on 127.0.0.1 that is free now and that this process was not given before. Another process may take it
/// before it is used: whoever starts a server on it has to see that it is the server's own.
///
/// # Errors
/// No free one was found.
pub fn free_port() -> io::Result<u16> {
    let mut rng: StdRng = rand::make_rng();
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES_MAX {
        let port = rng.random_range(part(std::process::id()));
        let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
        if given.contains(&port) {
            continue;
        }
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => {
                given.insert(port);
                return Ok(port);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The ports of this process.
fn part(process: u32) -> Range<u16> {
    let size = (PORTS.end - PORTS.start) / PARTS;
    let part = u16::try_from(process % u32::from(PARTS)).unwrap_or(0);
    let start = PORTS.start + part * size;
    start..start + size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_twice_though_it_is_free_again() {
        let given: BTreeSet<u16> = (0..200).map(|_| free_port().expect("a port")).collect();
        assert_eq!(given.len(), 200);
        assert!(given.iter().all(|port| part(std::process::id()).contains(port)));
        assert!((0..12).all(|process| PORTS.contains(&(part(process).end - 1))));
    }
}
