//! As much of HTTP as it takes to ask a server how it is.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(2);
const ANSWER_MAX: u64 = 1 << 20;

/// The status and the body that a GET is answered with.
pub(super) fn get(address: &str, path: &str) -> io::Result<(u16, String)> {
    exchange(address, &format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n"))
}

/// The same for a POST of JSON.
pub(super) fn post(address: &str, path: &str, json: &str) -> io::Result<(u16, String)> {
    let length = json.len();
    exchange(
        address,
        &format!(
            "POST {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{json}"
        ),
    )
}

/// A connection on which nothing is waited for too long.
pub(super) fn connect(address: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{address} has no address"));
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(stream) => {
                stream.set_read_timeout(Some(TIMEOUT))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn exchange(address: &str, request: &str) -> io::Result<(u16, String)> {
    let mut stream = connect(address)?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.take(ANSWER_MAX).read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    match (status, answer.split_once("\r\n\r\n")) {
        (Some(status), Some((_, body))) => Ok((status, body.to_owned())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not an answer in HTTP")),
    }
}
