//! What the URL says, checked before any I/O.

use std::path::PathBuf;
use std::time::Duration;

use coord_core::kit::config::{self, Tls};
use coord_core::{BackendUrl, ClusterName, Era, Result, Secret, UrlOptions};

use crate::SCHEME;

/// The options of a NATS URL, beside the common ones.
pub(crate) const OPTIONS: &[&str] = &[
    "bucket",
    "ca",
    "cert",
    "connect_timeout",
    "creds",
    "key",
    "nkey",
    "replicas",
    "request_timeout",
    "storage",
    "tls",
];

const PORT: u16 = 4222;
const BUCKET: &str = "coord";
const BUCKET_BYTES_MAX: usize = 64;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// A URL, taken apart.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) cluster: ClusterName,
    /// The URL without secrets.
    pub(crate) target: String,
    /// `host:port` of each server.
    pub(crate) servers: Vec<String>,
    pub(crate) login: Login,
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "read where the feature is on"))]
    pub(crate) tls: Option<Tls>,
    pub(crate) era: Era,
    pub(crate) bucket: String,
    /// How many servers hold the bucket; one that is there keeps its number where none is given.
    pub(crate) replicas: Option<usize>,
    pub(crate) storage: Storage,
    pub(crate) request_timeout: Duration,
    pub(crate) connect_timeout: Duration,
}

/// Who the client says it is.
#[derive(Clone, Debug)]
pub(crate) enum Login {
    Nobody,
    Token(Secret),
    Password(Secret, Secret),
    /// A file with a JWT and its seed.
    Credentials(PathBuf),
    /// A file with the seed of an NKey.
    NKey(PathBuf),
}

/// Where the servers keep the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    File,
    /// A restart of the server loses everything.
    Memory,
}

impl Storage {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Memory => "memory",
        }
    }
}

impl Config {
    pub(crate) fn from_url(url: &BackendUrl) -> Result<Self> {
        let invalid = |why: String| Err(config::invalid(url, why));
        let options = config::options(url, SCHEME, OPTIONS)?;
        let hosts = config::hosts(url, SCHEME, PORT)?;
        let bucket = options.get("bucket").unwrap_or(BUCKET);
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if bucket.is_empty() || bucket.len() > BUCKET_BYTES_MAX || !bucket.bytes().all(is_good) {
            let most = BUCKET_BYTES_MAX;
            return invalid(format!("bucket {bucket:?} is not 1 to {most} of A-Z a-z 0-9 - _"));
        }
        let storage = match options.get("storage") {
            None | Some("file") => Storage::File,
            Some("memory") => Storage::Memory,
            Some(other) => {
                return invalid(format!("option storage is {other:?}; it is file or memory"));
            }
        };
        let replicas = options.parse::<usize>("replicas", "1, 3 or 5")?;
        if let Some(other) = replicas.filter(|replicas| ![1, 3, 5].contains(replicas)) {
            return invalid(format!("option replicas is {other}; it is 1, 3 or 5"));
        }
        let lacking = (!cfg!(feature = "tls")).then_some("coord-nats");
        Ok(Self {
            cluster: url.cluster().clone(),
            target: url.to_string(),
            servers: hosts.iter().map(|host| config::address(host, PORT)).collect(),
            login: Login::from_url(url, options)?,
            tls: Tls::of(url, options, false, lacking)?,
            era: options.era()?,
            bucket: bucket.to_owned(),
            replicas,
            storage,
            request_timeout: options.timeout("request_timeout", REQUEST_TIMEOUT)?,
            connect_timeout: options.timeout("connect_timeout", CONNECT_TIMEOUT)?,
        })
    }
}

impl Login {
    fn from_url(url: &BackendUrl, options: UrlOptions<'_>) -> Result<Self> {
        let file = |name| options.get(name).map(PathBuf::from);
        let mut ways = Vec::new();
        match (url.user(), url.password()) {
            (None, None) => {}
            (Some(token), None) => ways.push(Self::Token(token.clone())),
            (Some(user), Some(password)) => {
                ways.push(Self::Password(user.clone(), password.clone()));
            }
            (None, Some(_)) => {
                let why = "a password without a user; write user:password@ or token@";
                return Err(config::invalid(url, why));
            }
        }
        ways.extend(file("creds").map(Self::Credentials));
        ways.extend(file("nkey").map(Self::NKey));
        if ways.len() > 1 {
            let why =
                "more than one way to log in; give one of user:password@, token@, creds, nkey";
            return Err(config::invalid(url, why));
        }
        Ok(ways.pop().unwrap_or(Self::Nobody))
    }
}

#[cfg(test)]
mod tests {
    use coord_core::ErrorKind;

    use super::*;

    fn config(url: &str) -> Result<Config> {
        Config::from_url(&BackendUrl::parse(url)?)
    }

    #[test]
    fn a_url_says_all_there_is_to_say() {
        let text = "nats://me:s3cret@a,[::1]:7000/orders?era=2&request_timeout=500ms&replicas=3\
                    &bucket=Shared_1&storage=memory";
        let config = config(text).expect("good");
        assert_eq!(config.servers, ["a:4222", "[::1]:7000"]);
        assert_eq!((config.era.get(), config.replicas), (2, Some(3)));
        assert_eq!((config.bucket.as_str(), config.storage), ("Shared_1", Storage::Memory));
        assert_eq!(config.request_timeout, Duration::from_millis(500));
        assert_eq!(config.connect_timeout, CONNECT_TIMEOUT);
        assert!(matches!(config.login, Login::Password(..)));
        assert!(!format!("{config:?}").contains("s3cret"));
        let token = Config::from_url(&BackendUrl::parse("nats://t0ken@a/orders").expect("parses"))
            .expect("good");
        assert!(matches!(&token.login, Login::Token(token) if token.expose() == "t0ken"));
        assert!(!format!("{token:?}").contains("t0ken"));
        assert_eq!((token.bucket.as_str(), token.storage), ("coord", Storage::File));
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        for (url, kind, part) in [
            ("nats:///orders", ErrorKind::Invalid, "no host"),
            ("etcd://a/orders", ErrorKind::Invalid, "scheme \"etcd\""),
            ("nats://:p@a/orders", ErrorKind::Invalid, "password without a user"),
            ("nats://t@a/orders?creds=/c", ErrorKind::Invalid, "more than one way"),
            ("nats://a/orders?creds=/c&nkey=/n", ErrorKind::Invalid, "more than one way"),
            ("nats://a/orders?bucket=a.b", ErrorKind::Invalid, "bucket \"a.b\""),
            ("nats://a/orders?bucket=", ErrorKind::Invalid, "bucket \"\""),
            ("nats://a/orders?bucket=%3E", ErrorKind::Invalid, "bucket \">\""),
            ("nats://a/orders?replicas=2", ErrorKind::Invalid, "1, 3 or 5"),
            ("nats://a/orders?replicas=many", ErrorKind::Invalid, "1, 3 or 5"),
            ("nats://a/orders?storage=disk", ErrorKind::Invalid, "file or memory"),
            ("nats://a/orders?tls=yes", ErrorKind::Invalid, "on or off"),
            ("nats://a/orders?ca=/ca.pem", ErrorKind::Invalid, "without tls=on"),
            ("nats://a/orders?request_timeout=5", ErrorKind::Invalid, "100ms to 60s"),
            ("nats://a/orders?connect_timeout=61s", ErrorKind::Invalid, "100ms to 60s"),
            ("nats://a/orders?timeout=5s", ErrorKind::Unsupported, "bucket, ca, cert"),
        ] {
            let error = config(url).expect_err(url);
            assert_eq!(error.kind(), kind, "{url}");
            assert!(error.to_string().contains(part), "{url}: {error}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn tls_is_whole_or_refused() {
        let half = config("nats://a/orders?tls=on&cert=/c").expect_err("half");
        assert!(half.to_string().contains("cert and key"), "{half}");
        let whole = config("nats://a/orders?tls=on&ca=/a&cert=/c&key=/k").expect("whole");
        assert_eq!(whole.tls.expect("on").identity, Some(("/c".into(), "/k".into())));
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_that_was_left_out_names_its_feature() {
        let error = config("nats://a/orders?tls=on").expect_err("left out");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("cargo feature \"tls\""), "{error}");
    }
}
