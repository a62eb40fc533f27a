//! What the URL says, checked before any I/O.

use std::time::Duration;

use coord_core::kit::config::{self, Tls};
use coord_core::{BackendUrl, ClusterName, Era, Result, Secret};

use crate::SCHEME;

/// The options of an etcd URL, beside the common ones.
pub(crate) const OPTIONS: &[&str] =
    &["ca", "cert", "connect_timeout", "key", "request_timeout", "tls", "tls_name"];

const PORT: u16 = 2379;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// A URL, taken apart.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) cluster: ClusterName,
    /// The URL without secrets.
    pub(crate) target: String,
    pub(crate) endpoints: Vec<String>,
    pub(crate) user: Option<(Secret, Secret)>,
    pub(crate) tls: Option<Tls>,
    pub(crate) era: Era,
    pub(crate) request_timeout: Duration,
    pub(crate) connect_timeout: Duration,
}

impl Config {
    pub(crate) fn from_url(url: &BackendUrl) -> Result<Self> {
        let options = config::options(url, SCHEME, OPTIONS)?;
        let hosts = config::hosts(url, SCHEME, PORT)?;
        let user = match (url.user(), url.password()) {
            (None, None) => None,
            (Some(user), Some(password)) => Some((user.clone(), password.clone())),
            _ => {
                let why = "a user and a password belong together: user:password@";
                return Err(config::invalid(url, why));
            }
        };
        let lacking = (!cfg!(feature = "tls")).then_some("coord-etcd");
        let tls = Tls::of(url, options, false, lacking)?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        Ok(Self {
            cluster: url.cluster().clone(),
            target: url.to_string(),
            endpoints: hosts
                .iter()
                .map(|host| format!("{scheme}://{}", config::address(host, PORT)))
                .collect(),
            user,
            tls,
            era: options.era()?,
            request_timeout: options.timeout("request_timeout", REQUEST_TIMEOUT)?,
            connect_timeout: options.timeout("connect_timeout", CONNECT_TIMEOUT)?,
        })
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
    fn a_url_becomes_endpoints() {
        let config = config("etcd://root:s3cret@a,[::1]:7000/orders?era=2&request_timeout=500ms");
        let config = config.expect("good");
        assert_eq!(config.endpoints, ["http://a:2379", "http://[::1]:7000"]);
        assert_eq!(config.era.get(), 2);
        assert_eq!(config.request_timeout, Duration::from_millis(500));
        assert_eq!(config.connect_timeout, CONNECT_TIMEOUT);
        assert!(config.tls.is_none());
        assert!(!format!("{config:?}").contains("s3cret"));
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        for (url, kind, part) in [
            ("etcd:///orders", ErrorKind::Invalid, "no host"),
            ("nats://a/orders", ErrorKind::Invalid, "scheme \"nats\""),
            ("etcd://root@a/orders", ErrorKind::Invalid, "belong together"),
            ("etcd://a/orders?tls=yes", ErrorKind::Invalid, "on or off"),
            ("etcd://a/orders?ca=/ca.pem", ErrorKind::Invalid, "without tls=on"),
            ("etcd://a/orders?tls=off&cert=/c", ErrorKind::Invalid, "without tls=on"),
            ("etcd://a/orders?request_timeout=5", ErrorKind::Invalid, "100ms to 60s"),
            ("etcd://a/orders?request_timeout=99ms", ErrorKind::Invalid, "100ms to 60s"),
            ("etcd://a/orders?connect_timeout=61s", ErrorKind::Invalid, "100ms to 60s"),
            ("etcd://a/orders?timeout=5s", ErrorKind::Unsupported, "ca, cert, connect_timeout"),
        ] {
            let error = config(url).expect_err(url);
            assert_eq!(error.kind(), kind, "{url}");
            assert!(error.to_string().contains(part), "{url}: {error}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn tls_is_whole_or_refused() {
        let half = config("etcd://a/orders?tls=on&cert=/c").expect_err("half");
        assert!(half.to_string().contains("cert and key"));
        let whole = config("etcd://a/orders?tls=on&ca=/a&cert=/c&key=/k&tls_name=n");
        let tls = whole.expect("whole").tls.expect("on");
        assert_eq!(tls.identity, Some(("/c".into(), "/k".into())));
        assert_eq!(tls.name.as_deref(), Some("n"));
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_that_was_left_out_names_its_feature() {
        let error = config("etcd://a/orders?tls=on").expect_err("left out");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("cargo feature \"tls\""), "{error}");
    }
}
