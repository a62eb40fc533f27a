//! As much of HTTP as it takes to ask a server on this machine how it is.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(2);
const ANSWER_MAX: u64 = 1 << 20;

/// The status and the body that a GET is answered with.
pub(super) fn get(port: u16, path: &str) -> io::Result<(u16, String)> {
    exchange(port, &format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n"))
}

/// The same for a POST of JSON.
pub(super) fn post(port: u16, path: &str, json: &str) -> io::Result<(u16, String)> {
    let length = json.len();
    exchange(
        port,
        &format!(
            "POST {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{json}"
        ),
    )
}

fn exchange(port: u16, request: &str) -> io::Result<(u16, String)> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.take(ANSWER_MAX).read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    match (status, answer.split_once("\r\n\r\n")) {
        (Some(status), Some((_, body))) => Ok((status, body.to_owned())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not an answer in HTTP")),
    }
}
