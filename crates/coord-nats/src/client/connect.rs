//! Making the connection.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_nats::{ConnectOptions, Event, ServerAddr};
use coord_core::kit::Op;
use coord_core::{Error, ErrorKind, Result};
use tokio::sync::watch as changes;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Client, Expiry, Shared, Trouble};
use crate::config::{Config, Login};
use crate::error::connect_error;

/// How long a client waits between two tries to come back, at most. A lease that lives for 10 s is
/// still there then.
const RECONNECT_PAUSE_MAX: Duration = Duration::from_millis(500);

impl Client {
    /// Connects to one of the servers.
    pub(super) async fn connect(op: Op<'_>, config: &Config) -> Result<Self> {
        let trouble = Arc::new(changes::Sender::new(Trouble::default()));
        let noted = Arc::clone(&trouble);
        let options = login(op, &config.login)
            .await?
            .name("coord")
            .connection_timeout(config.connect_timeout)
            // A connection that swallows everything is given up after two unanswered pings.
            .ping_interval(config.request_timeout)
            .reconnect_delay_callback(pause)
            .event_callback(move |event| {
                note(&event, &noted);
                async {}
            });
        let options = encrypted(op, options, config).await?;
        let servers = config
            .servers
            .iter()
            .map(|server| format!("nats://{server}").parse::<ServerAddr>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|source| {
                let error = op.error(ErrorKind::Invalid).message("the client refuses a host");
                error.with_source(source)
            })?;
        let vendor = options.connect(servers).await.map_err(|error| connect_error(op, error))?;
        let shared = Shared {
            stream: super::bucket::stream_name(&config.bucket),
            request_timeout: config.request_timeout,
            closed: CancellationToken::new(),
            tasks: TaskTracker::new(),
            trouble,
            sample: Mutex::default(),
            opened: OnceLock::new(),
        };
        Ok(Self { vendor, shared: Arc::new(shared), expiry: Expiry::Server })
    }
}

/// Keeps what requests and watches have to know of what happens to the connection.
fn note(event: &Event, trouble: &changes::Sender<Trouble>) {
    match event {
        Event::Disconnected | Event::Closed => {
            trouble.send_modify(|trouble| trouble.losses += 1);
        }
        Event::ServerError(error) => {
            let text = error.to_string();
            if text.to_ascii_lowercase().contains("permissions violation") {
                trouble.send_modify(|trouble| trouble.note_denial(text.into()));
            }
        }
        _ => {}
    }
}

fn pause(tries: usize) -> Duration {
    let Some(again) = tries.checked_sub(2) else { return Duration::ZERO };
    let doublings = u32::try_from(again).unwrap_or(u32::MAX).min(8);
    (Duration::from_millis(25) * 2_u32.pow(doublings)).min(RECONNECT_PAUSE_MAX)
}

async fn login(op: Op<'_>, login: &Login) -> Result<ConnectOptions> {
    let options = ConnectOptions::new();
    Ok(match login {
        Login::Nobody => options,
        Login::Token(token) => options.token(token.expose().to_owned()),
        Login::Password(user, password) => {
            options.user_and_password(user.expose().to_owned(), password.expose().to_owned())
        }
        Login::Credentials(path) => {
            let text = read(op, "creds", path).await?;
            // The error may quote what it can't read, so it is not kept.
            options.credentials(&text).map_err(|_| unusable(op, "creds", path))?
        }
        Login::NKey(path) => {
            let text = read(op, "nkey", path).await?;
            let seed = text.lines().map(str::trim).find(|line| line.starts_with('S'));
            options.nkey(seed.ok_or_else(|| unusable(op, "nkey", path))?.to_owned())
        }
    })
}

async fn read(op: Op<'_>, option: &str, path: &Path) -> Result<String> {
    let file = path.to_owned();
    let text = tokio::task::spawn_blocking(move || std::fs::read_to_string(file)).await;
    let text = text.map_err(|source| {
        op.error(ErrorKind::Internal).message("reading a file panicked").with_source(source)
    })?;
    text.map_err(|source| {
        let why = format!("option {option}: the file {} can't be read", path.display());
        op.error(ErrorKind::Invalid).message(why).with_source(source)
    })
}

fn unusable(op: Op<'_>, option: &str, path: &Path) -> Error {
    let why = format!("option {option}: the file {} holds no such thing", path.display());
    op.error(ErrorKind::Invalid).message(why)
}

/// With what an encrypted connection needs, also where the server asks for one and the URL does
/// not.
///
/// The client would else pick a cryptographic provider for itself, and panic where a program has
/// two.
#[cfg(feature = "tls")]
async fn encrypted(op: Op<'_>, options: ConnectOptions, config: &Config) -> Result<ConnectOptions> {
    use async_nats::rustls::crypto::ring;
    use async_nats::rustls::pki_types::pem::PemObject;
    use async_nats::rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use async_nats::rustls::{ClientConfig, RootCertStore};

    let misconfigured = |why: &'static str| op.error(ErrorKind::Misconfigured).message(why);
    let mut roots = RootCertStore::empty();
    let tls = config.tls.as_ref();
    if let Some(path) = tls.and_then(|tls| tls.ca.as_deref()) {
        let text = read(op, "ca", path).await?;
        for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
            let certificate = certificate.map_err(|_| unusable(op, "ca", path))?;
            roots.add(certificate).map_err(|_| unusable(op, "ca", path))?;
        }
        if roots.is_empty() {
            return Err(unusable(op, "ca", path));
        }
    } else {
        let native = tokio::task::spawn_blocking(rustls_native_certs::load_native_certs).await;
        // A machine without roots trusts nobody, which shows when a server is met.
        roots.add_parsable_certificates(native.map(|native| native.certs).unwrap_or_default());
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|source| misconfigured("no usable version of TLS").with_source(source))?
        .with_root_certificates(roots);
    let client = match tls.and_then(|tls| tls.identity.as_ref()) {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let (chain, secret) = (read(op, "cert", cert).await?, read(op, "key", key).await?);
            let chain = CertificateDer::pem_slice_iter(chain.as_bytes())
                .collect::<Result<Vec<_>, _>>()
                .map_err(|_| unusable(op, "cert", cert))?;
            let secret = PrivateKeyDer::from_pem_slice(secret.as_bytes())
                .map_err(|_| unusable(op, "key", key))?;
            builder.with_client_auth_cert(chain, secret).map_err(|source| {
                misconfigured("the options cert and key don't fit together").with_source(source)
            })?
        }
    };
    Ok(options.tls_client_config(client).require_tls(tls.is_some()))
}

/// Refuses a server that asks for an encrypted connection, which this build can't make: the client
/// would panic.
#[cfg(not(feature = "tls"))]
async fn encrypted(op: Op<'_>, options: ConnectOptions, config: &Config) -> Result<ConnectOptions> {
    for server in &config.servers {
        let look = async {
            let mut stream = tokio::net::TcpStream::connect(server.as_str()).await.ok()?;
            greeting(&mut stream).await
        };
        // What is wrong with a server that can't be asked, the client finds out itself.
        let info = tokio::time::timeout(config.connect_timeout, look).await.ok().flatten();
        if info.is_some_and(|info| asks_for_tls(&info)) {
            let why = format!(
                "{server} asks for an encrypted connection; build with the cargo feature \"tls\" \
                 of coord-nats"
            );
            return Err(op.error(ErrorKind::Unsupported).message(why));
        }
    }
    Ok(options)
}

/// The first line that a server sends.
#[cfg(not(feature = "tls"))]
async fn greeting(stream: &mut (impl tokio::io::AsyncRead + Send + Unpin)) -> Option<String> {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

    const GREETING_BYTES_MAX: u64 = 32 * 1024;
    let mut line = String::new();
    BufReader::new(stream.take(GREETING_BYTES_MAX)).read_line(&mut line).await.ok()?;
    Some(line)
}

#[cfg(not(feature = "tls"))]
fn asks_for_tls(greeting: &str) -> bool {
    #[derive(serde::Deserialize)]
    struct Info {
        #[serde(default)]
        tls_required: bool,
    }
    let info = greeting.strip_prefix("INFO ").map(serde_json::from_str::<Info>);
    matches!(info, Some(Ok(Info { tls_required: true })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_comes_back_soon() {
        assert_eq!([pause(0), pause(1)], [Duration::ZERO; 2]);
        assert_eq!(pause(2), Duration::from_millis(25));
        assert_eq!(pause(4), Duration::from_millis(100));
        assert_eq!(pause(usize::MAX), RECONNECT_PAUSE_MAX);
    }

    #[cfg(not(feature = "tls"))]
    #[tokio::test]
    async fn a_server_that_asks_for_tls_is_known_by_its_greeting() {
        let mut plain: &[u8] = b"INFO {\"version\":\"2.15.1\",\"tls_available\":true}\r\nPING\r\n";
        assert!(!asks_for_tls(&greeting(&mut plain).await.expect("a line")));
        let mut tls: &[u8] = b"INFO {\"version\":\"2.15.1\",\"tls_required\":true}\r\n";
        assert!(asks_for_tls(&greeting(&mut tls).await.expect("a line")));
        assert!(!asks_for_tls("SSH-2.0-other\r\n"));
    }
}
