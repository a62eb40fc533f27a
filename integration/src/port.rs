//! Ports for servers and proxies.

use std::io;
use std::net::{Ipv4Addr, TcpListener};

use rand::RngExt as _;
use rand::rngs::StdRng;

/// Below what systems use for outgoing connections. A port from there may be taken, while its server is
/// down, by a client that tries to reach that very server.
const PORTS: std::ops::Range<u16> = 20_000..32_000;
const TRIES_MAX: usize = 100;

/// A port on 127.0.0.1 that is free now. Another process may take it before it is used: whoever starts a
/// server on it has to see that it is the server's own.
///
/// # Errors
/// No free one was found.
pub fn free_port() -> io::Result<u16> {
    let mut rng: StdRng = rand::make_rng();
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES_MAX {
        let port = rng.random_range(PORTS);
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = error,
        }
    }
    Err(last)
}
