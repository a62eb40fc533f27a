//! What the URL says, checked before any I/O.

use std::time::Duration;

use coord_core::kit::config::{self, Tls};
use coord_core::{BackendUrl, ClusterName, Era, Result, Secret, UrlHost, UrlOptions};

use crate::{SCHEME, SCHEME_TLS};

/// The options of a Redis URL, beside the common ones.
pub(crate) const OPTIONS: &[&str] = &[
    "ca",
    "cert",
    "connect_timeout",
    "db",
    "key",
    "master",
    "min_replicas",
    "request_timeout",
    "sentinel_password",
    "sentinel_user",
    "tls",
];

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const MIN_REPLICAS_MAX: u16 = 100;

/// A URL, taken apart.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) scheme: &'static str,
    pub(crate) cluster: ClusterName,
    /// The URL without secrets.
    pub(crate) target: String,
    pub(crate) hosts: Vec<Host>,
    pub(crate) login: Login,
    pub(crate) sentinel: Option<Sentinel>,
    pub(crate) tls: Option<Tls>,
    pub(crate) db: u16,
    pub(crate) min_replicas: u16,
    pub(crate) era: Era,
    pub(crate) request_timeout: Duration,
    pub(crate) connect_timeout: Duration,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// A name or an address, without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// As whom to speak to a server.
#[derive(Clone, Debug, Default)]
pub(crate) struct Login {
    pub(crate) user: Option<Secret>,
    pub(crate) password: Option<Secret>,
}

/// The hosts are sentinels, which know the master by this name.
#[derive(Clone, Debug)]
pub(crate) struct Sentinel {
    pub(crate) master: String,
    pub(crate) login: Login,
}

impl Config {
    pub(crate) fn from_url(url: &BackendUrl) -> Result<Self> {
        let invalid = |why: String| Err(config::invalid(url, why));
        let Some(scheme) = [SCHEME, SCHEME_TLS].into_iter().find(|known| *known == url.scheme())
        else {
            let why = format!("scheme {:?} is neither {SCHEME} nor {SCHEME_TLS}", url.scheme());
            return invalid(why);
        };
        let options = url.options(OPTIONS)?;
        let hosts = config::hosts(url, SCHEME, PORT)?;
        let cluster = url.cluster().as_str();
        if cluster.bytes().all(|byte| byte.is_ascii_digit()) {
            return invalid(format!(
                "the path {cluster:?} names the cluster and not a database; write \
                 {SCHEME}://host/cluster?db={cluster}"
            ));
        }
        if url.user().is_some() && url.password().is_none() {
            return invalid("a user needs a password: user:password@, or :password@ alone".into());
        }
        let sentinel = Sentinel::from_options(url, options)?;
        let port = if sentinel.is_some() { SENTINEL_PORT } else { PORT };
        Ok(Self {
            scheme,
            cluster: url.cluster().clone(),
            target: url.to_string(),
            hosts: hosts.iter().map(|host| Host::of(host, port)).collect(),
            login: Login { user: url.user().cloned(), password: url.password().cloned() },
            sentinel,
            tls: tls(url, options, scheme)?,
            db: options.parse("db", "the number of a database")?.unwrap_or(0),
            min_replicas: min_replicas(url, options)?,
            era: options.era()?,
            request_timeout: options.timeout("request_timeout", REQUEST_TIMEOUT)?,
            connect_timeout: options.timeout("connect_timeout", CONNECT_TIMEOUT)?,
        })
    }
}

fn tls(url: &BackendUrl, options: UrlOptions<'_>, scheme: &str) -> Result<Option<Tls>> {
    let is_usual = scheme == SCHEME_TLS;
    if is_usual && options.get("tls") == Some("off") {
        let why = format!("{SCHEME_TLS} encrypts and tls=off does not; take one");
        return Err(config::invalid(url, why));
    }
    Tls::of(url, options, is_usual, (!cfg!(feature = "tls")).then_some("coord-redis"))
}

fn min_replicas(url: &BackendUrl, options: UrlOptions<'_>) -> Result<u16> {
    let wanted = "a number of 0 to 100";
    let number = options.parse("min_replicas", wanted)?.unwrap_or(0);
    if number > MIN_REPLICAS_MAX {
        let why = format!("option min_replicas is \"{number}\"; it is {wanted}");
        return Err(config::invalid(url, why));
    }
    Ok(number)
}

impl Host {
    fn of(host: &UrlHost, port: u16) -> Self {
        let name = host.host.trim_start_matches('[').trim_end_matches(']');
        Self { host: name.to_owned(), port: host.port.unwrap_or(port) }
    }
}

impl Sentinel {
    fn from_options(url: &BackendUrl, options: UrlOptions<'_>) -> Result<Option<Self>> {
        let invalid = |why: &'static str| Err(config::invalid(url, why));
        let login = Login {
            user: options.secret("sentinel_user"),
            password: options.secret("sentinel_password"),
        };
        match options.get("master") {
            Some("") => invalid("option master is empty; it is the name that sentinels know"),
            Some(_) if login.user.is_some() && login.password.is_none() => {
                invalid("option sentinel_user needs sentinel_password")
            }
            Some(master) => Ok(Some(Self { master: master.to_owned(), login })),
            None if login.user.is_some() || login.password.is_some() => {
                invalid("a login for sentinels is given without the option master")
            }
            None => Ok(None),
        }
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
    fn a_url_becomes_hosts() {
        let url = "redis://me:s3cret@a,[::1]:7000/orders?era=2&request_timeout=500ms&db=3";
        let config = config(url).expect("good");
        let hosts: Vec<_> =
            config.hosts.iter().map(|host| (host.host.as_str(), host.port)).collect();
        assert_eq!(hosts, [("a", 6379), ("::1", 7000)]);
        assert_eq!((config.era.get(), config.db, config.min_replicas), (2, 3, 0));
        assert_eq!(config.request_timeout, Duration::from_millis(500));
        assert!(config.tls.is_none() && config.sentinel.is_none());
        assert!(!format!("{config:?}").contains("s3cret"));
        let only_password =
            self::config("redis://:s3cret@a/orders").expect("as requirepass has it");
        assert!(only_password.login.user.is_none() && only_password.login.password.is_some());
    }

    #[test]
    fn sentinels_have_a_port_and_a_login_of_their_own() {
        let url = "redis://me:s3cret@a,b/orders?master=m&sentinel_password=s3cret2&min_replicas=1";
        let config = config(url).expect("good");
        assert_eq!(config.hosts[1], Host { host: "b".into(), port: 26379 });
        let sentinel = config.sentinel.as_ref().expect("sentinels");
        assert_eq!(sentinel.master, "m");
        assert!(sentinel.login.user.is_none() && sentinel.login.password.is_some());
        assert!(!format!("{config:?}").contains("s3cret"));
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        for (url, kind, part) in [
            ("redis:///orders", ErrorKind::Invalid, "no host"),
            ("nats://a/orders", ErrorKind::Invalid, "scheme \"nats\""),
            ("redis://a/0", ErrorKind::Invalid, "cluster?db=0"),
            ("redis://me@a/orders", ErrorKind::Invalid, "a user needs a password"),
            ("redis://a/orders?tls=yes", ErrorKind::Invalid, "on or off"),
            ("rediss://a/orders?tls=off", ErrorKind::Invalid, "take one"),
            ("redis://a/orders?ca=/ca.pem", ErrorKind::Invalid, "without tls=on"),
            ("redis://a/orders?db=x", ErrorKind::Invalid, "number of a database"),
            ("redis://a/orders?min_replicas=-1", ErrorKind::Invalid, "0 to 100"),
            ("redis://a/orders?min_replicas=101", ErrorKind::Invalid, "0 to 100"),
            ("redis://a/orders?master=", ErrorKind::Invalid, "master is empty"),
            ("redis://a/orders?sentinel_password=x", ErrorKind::Invalid, "without the option"),
            ("redis://a/orders?master=m&sentinel_user=x", ErrorKind::Invalid, "sentinel_password"),
            ("redis://a/orders?request_timeout=5", ErrorKind::Invalid, "100ms to 60s"),
            ("redis://a/orders?timeout=5s", ErrorKind::Unsupported, "connect_timeout, db"),
        ] {
            let error = config(url).expect_err(url);
            assert_eq!(error.kind(), kind, "{url}");
            assert!(error.to_string().contains(part), "{url}: {error}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn tls_is_whole_or_refused() {
        let half = config("rediss://a/orders?cert=/c").expect_err("half");
        assert!(half.to_string().contains("cert and key"));
        let whole = config("redis://a/orders?tls=on&ca=/a&cert=/c&key=/k").expect("whole");
        let tls = whole.tls.expect("on");
        assert_eq!(tls.identity, Some(("/c".into(), "/k".into())));
        assert!(config("rediss://a/orders").expect("by scheme").tls.is_some());
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_that_was_left_out_names_its_feature() {
        for url in ["redis://a/orders?tls=on", "rediss://a/orders"] {
            let error = config(url).expect_err("left out");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("cargo feature \"tls\""), "{error}");
        }
    }
}
