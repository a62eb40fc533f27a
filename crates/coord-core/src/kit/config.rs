//! What the URLs of several backends say in the same words.

use std::borrow::Cow;
use std::path::PathBuf;

use crate::error::{Error, ErrorKind, Result};
use crate::url::{BackendUrl, UrlHost, UrlOptions};

/// An error about a URL, before any I/O.
#[must_use]
pub fn invalid(url: &BackendUrl, why: impl Into<Cow<'static, str>>) -> Error {
    Error::invalid("connect", why).resource(url)
}

/// The options of a URL of a backend's one scheme.
///
/// # Errors
/// `Invalid` for another scheme, `Unsupported` for an option that is not known.
pub fn options<'a>(url: &'a BackendUrl, scheme: &str, known: &[&str]) -> Result<UrlOptions<'a>> {
    if url.scheme() != scheme {
        return Err(invalid(url, format!("scheme {:?} is not {scheme}", url.scheme())));
    }
    url.options(known)
}

/// The hosts of a URL, at least one.
///
/// # Errors
/// `Invalid` for a URL without a host: it says how to write one.
pub fn hosts<'a>(url: &'a BackendUrl, scheme: &str, port: u16) -> Result<&'a [UrlHost]> {
    match url.hosts() {
        [] => {
            let why = format!("no host; write {scheme}://host[:{port}][,host…]/cluster");
            Err(invalid(url, why))
        }
        hosts => Ok(hosts),
    }
}

/// `host:port`, with the usual port where the URL names none.
#[must_use]
pub fn address(host: &UrlHost, usual_port: u16) -> String {
    format!("{}:{}", host.host, host.port.unwrap_or(usual_port))
}

/// How connections are encrypted, by the options `tls`, `ca`, `cert`, `key` and `tls_name`.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// A PEM file: the roots that are trusted instead of the machine's own.
    pub ca: Option<PathBuf>,
    /// PEM files: the client's certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name that the server's certificate is for, where it is not the host's.
    pub name: Option<String>,
}

impl Tls {
    /// Reads the options. `is_usual` says whether connections are encrypted where `tls` is not given.
    /// `lacks_feature_of` names the crate if it was built without its cargo feature `tls`.
    ///
    /// # Errors
    /// `Invalid` for options that do not fit together, `Unsupported` where the feature is missing.
    pub fn of(
        url: &BackendUrl,
        options: UrlOptions<'_>,
        is_usual: bool,
        lacks_feature_of: Option<&str>,
    ) -> Result<Option<Self>> {
        let is_on = match options.get("tls") {
            None => is_usual,
            Some("off") => false,
            Some("on") => true,
            Some(other) => {
                return Err(invalid(url, format!("option tls is {other:?}; it is on or off")));
            }
        };
        if !is_on {
            let mut parts = ["ca", "cert", "key", "tls_name"].into_iter();
            return match parts.find(|name| options.get(name).is_some()) {
                Some(name) => Err(invalid(url, format!("option {name} is given without tls=on"))),
                None => Ok(None),
            };
        }
        if let Some(name) = lacks_feature_of {
            let why = format!("an encrypted connection needs the cargo feature \"tls\" of {name}");
            return Err(Error::new(ErrorKind::Unsupported, "connect").message(why).resource(url));
        }
        let path = |name| options.get(name).map(PathBuf::from);
        let identity = match (path("cert"), path("key")) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((cert, key)),
            _ => return Err(invalid(url, "the options cert and key belong together")),
        };
        let name = options.get("tls_name").map(str::to_owned);
        Ok(Some(Self { ca: path("ca"), identity, name }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["ca", "cert", "key", "tls", "tls_name"];

    fn tls(query: &str, is_usual: bool, lacks: Option<&str>) -> Result<Option<Tls>> {
        let url = BackendUrl::parse(&format!("etcd://a/orders{query}")).expect("a URL");
        let options = options(&url, "etcd", KNOWN).expect("known options");
        Tls::of(&url, options, is_usual, lacks)
    }

    #[test]
    fn encryption_is_whole_or_refused() {
        let whole = tls("?tls=on&ca=/a&cert=/c&key=/k&tls_name=n", false, None).expect("whole");
        let expected = Tls {
            ca: Some("/a".into()),
            identity: Some(("/c".into(), "/k".into())),
            name: Some("n".to_owned()),
        };
        assert_eq!(whole, Some(expected));
        assert_eq!(tls("", false, None).expect("off"), None);
        assert_eq!(tls("?tls=off", true, None).expect("off"), None);
        assert_eq!(tls("", true, None).expect("on"), Some(Tls::default()));
        for (query, part) in [
            ("?tls=yes", "on or off"),
            ("?tls=on&cert=/c", "cert and key"),
            ("?tls=on&key=/k", "cert and key"),
            ("?ca=/a", "option ca is given without tls=on"),
            ("?tls=off&tls_name=n", "option tls_name is given without tls=on"),
        ] {
            let error = tls(query, false, None).expect_err(query);
            assert_eq!(error.kind(), ErrorKind::Invalid, "{query}");
            assert!(error.to_string().contains(part), "{query}: {error}");
        }
        let error = tls("?tls=on", false, Some("coord-x")).expect_err("left out");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("cargo feature \"tls\" of coord-x"), "{error}");
        assert_eq!(tls("", false, Some("coord-x")).expect("not asked for"), None);
    }

    #[test]
    fn a_scheme_and_a_host_have_to_be_there() {
        let url = BackendUrl::parse("etcd:///orders").expect("a URL");
        let error = hosts(&url, "etcd", 2379).expect_err("no host");
        assert!(error.to_string().contains("write etcd://host[:2379]"), "{error}");
        let error = options(&url, "nats", &[]).expect_err("another scheme");
        assert!(error.to_string().contains("scheme \"etcd\" is not nats"), "{error}");
        let url = BackendUrl::parse("etcd://a,[::1]:7000/orders").expect("a URL");
        let hosts = hosts(&url, "etcd", 2379).expect("two hosts");
        let addresses: Vec<_> = hosts.iter().map(|host| address(host, 2379)).collect();
        assert_eq!(addresses, ["a:2379", "[::1]:7000"]);
    }
}
