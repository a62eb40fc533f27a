//! As much of HTTPS as it takes to ask an API server on this machine.

use std::fs::File;
use std::io::{self, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};

use super::start::Certificate;

const TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_MAX: u64 = 16 << 20;

/// The status and the body that a request is answered with, of whoever has this token.
pub(super) fn ask(
    port: u16,
    authority: &Path,
    token: &str,
    method: &str,
    path: &str,
    body: Option<&str>,
) -> io::Result<(u16, String)> {
    let (config, name) = trusting(authority)?;
    let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut stream = StreamOwned::new(connection, stream);
    let body = body.unwrap_or_default();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    let mut answer = Vec::new();
    match (&mut stream).take(ANSWER_MAX).read_to_end(&mut answer) {
        Ok(_) => {}
        // Some servers end without saying so in TLS.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && !answer.is_empty() => {}
        Err(error) => return Err(error),
    }
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    match (status, answer.split_once("\r\n\r\n")) {
        (Some(status), Some((_, body))) => Ok((status, body.to_owned())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not an answer in HTTP")),
    }
}

/// How a server on this machine is spoken to whose certificate is by this authority.
pub(crate) fn trusting(authority: &Path) -> io::Result<(Arc<ClientConfig>, ServerName<'static>)> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_reader_iter(BufReader::new(File::open(authority)?)) {
        let certificate = certificate.map_err(io::Error::other)?;
        roots.add(certificate).map_err(io::Error::other)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::from(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST));
    Ok((Arc::new(config), name))
}

/// How clients are spoken to by whoever has this certificate.
pub(super) fn serving(files: &Certificate) -> io::Result<ServerConfig> {
    let chain = CertificateDer::pem_file_iter(&files.certificate).map_err(io::Error::other)?;
    let chain = chain.collect::<Result<_, _>>().map_err(io::Error::other)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(io::Error::other)?;
    ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(io::Error::other)
}
