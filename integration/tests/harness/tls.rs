//! Servers that speak TLS, by real handshakes.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coord_integration::servers::{Etcd, Nats, Redis, Server};
use coord_integration::trial;
use libtest_mimic::{Failed, Trial};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::servers::{broken_and_mended, covers_all_slots, fails_over};

const LIMIT: Duration = Duration::from_secs(10);

pub(crate) fn trials() -> Vec<Trial> {
    let nats = Nats::new().with_login("ann", "secret").with_tls().find();
    let etcd = Etcd::new().with_root_password("secret").with_tls().find();
    let redis = || Redis::new().with_login("ann", "secret").with_tls();
    vec![
        trial("tls::nats", &nats, |nats| speaks_tls([nats.start()?, nats.start()?], true)),
        trial("tls::etcd", &etcd, |etcd| speaks_tls([etcd.start()?, etcd.start()?], false)),
        trial("tls::redis", &redis().find(), |redis| {
            speaks_tls([redis.start()?, redis.start()?], false)
        }),
        trial("tls::redis_with_sentinels", &redis().with_sentinels(1, 3).find(), |redis| {
            fails_over(&redis.start()?)
        }),
        trial("tls::redis_cluster", &redis().with_cluster(3, 1).find(), |redis| {
            covers_all_slots(&redis.start()?)
        }),
    ]
}

/// Each is trusted by who trusts its own authority, and only by him.
fn speaks_tls(servers: [Server; 2], says_info_first: bool) -> Result<(), Failed> {
    for (server, signer) in [(0, 0), (1, 1), (0, 1), (1, 0)] {
        let authority = servers[signer].authority().ok_or("it has an authority")?;
        let shaken = shake_hands(&servers[server].addresses()[0], authority, says_info_first)?;
        match shaken {
            Ok(()) => assert_eq!(server, signer, "another's authority was believed"),
            Err(error) => {
                assert!(server != signer && error.contains("invalid peer certificate"), "{error}");
            }
        }
    }
    let [server, _] = servers;
    broken_and_mended(server)
}

fn shake_hands(
    address: &str,
    authority: &Path,
    says_info_first: bool,
) -> Result<Result<(), String>, Failed> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority)?)?;
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1")?;
    let mut client = ClientConnection::new(Arc::new(config), name)?;
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LIMIT))?;
    if says_info_first {
        BufReader::with_capacity(1, &stream).read_line(&mut String::new())?;
    }
    while client.is_handshaking() {
        if let Err(error) = client.complete_io(&mut stream) {
            return Ok(Err(error.to_string()));
        }
    }
    Ok(Ok(()))
}
