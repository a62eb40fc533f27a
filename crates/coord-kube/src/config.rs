//! What the URL says, checked before any I/O.

use std::path::PathBuf;
use std::time::Duration;

use coord_core::kit::config;
use coord_core::{BackendUrl, ClusterName, Era, Result};

use crate::SCHEME;

/// The options of a Kubernetes URL, beside the common ones.
pub(crate) const OPTIONS: &[&str] =
    &["connect_timeout", "context", "kubeconfig", "namespace", "request_timeout"];

const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const NAMESPACE_BYTES_MAX: usize = 63;

/// A URL, taken apart.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) cluster: ClusterName,
    /// The URL without secrets.
    pub(crate) target: String,
    /// The kubeconfig file; by default the usual one, or none in a pod.
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The context in it.
    pub(crate) context: Option<String>,
    /// Where the objects are; by default the context's, or the pod's own.
    pub(crate) namespace: Option<String>,
    pub(crate) era: Era,
    pub(crate) request_timeout: Duration,
    pub(crate) connect_timeout: Duration,
}

impl Config {
    pub(crate) fn from_url(url: &BackendUrl) -> Result<Self> {
        let invalid = |why: String| Err(config::invalid(url, why));
        let options = config::options(url, SCHEME, OPTIONS)?;
        if url.user().is_some() || url.password().is_some() {
            return invalid("who connects stands in the kubeconfig, not in the URL".into());
        }
        if let Some(host) = url.hosts().first() {
            return invalid(format!(
                "the URL names the host {host}; the API server stands in the kubeconfig: write \
                 {SCHEME}:///cluster?context=…, with three slashes"
            ));
        }
        let named = |name| match options.get(name) {
            Some("") => Err(config::invalid(url, format!("option {name} is empty"))),
            value => Ok(value.map(str::to_owned)),
        };
        let namespace = named("namespace")?;
        if let Some(odd) = namespace.as_deref().filter(|name| !is_label(name)) {
            let most = NAMESPACE_BYTES_MAX;
            return invalid(format!(
                "namespace {odd:?} is not 1 to {most} of a-z 0-9 -, beginning and ending with a \
                 letter or a digit"
            ));
        }
        Ok(Self {
            cluster: url.cluster().clone(),
            target: url.to_string(),
            kubeconfig: named("kubeconfig")?.map(PathBuf::from),
            context: named("context")?,
            namespace,
            era: options.era()?,
            request_timeout: options.timeout("request_timeout", REQUEST_TIMEOUT)?,
            connect_timeout: options.timeout("connect_timeout", CONNECT_TIMEOUT)?,
        })
    }
}

/// Whether this is a DNS label, as a namespace's name has to be.
fn is_label(name: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=NAMESPACE_BYTES_MAX).contains(&name.len())
        && name.bytes().all(is_good)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    use coord_core::ErrorKind;

    use super::*;

    fn config(url: &str) -> Result<Config> {
        Config::from_url(&BackendUrl::parse(url)?)
    }

    #[test]
    fn a_url_says_where_the_objects_are() {
        let config = config(
            "kube:///orders?namespace=prod&context=arn%3Aaws%3Aeks%2Fx&kubeconfig=/a/b&era=2\
             &request_timeout=500ms",
        );
        let config = config.expect("good");
        assert_eq!(config.cluster.as_str(), "orders");
        assert_eq!(config.namespace.as_deref(), Some("prod"));
        assert_eq!(config.context.as_deref(), Some("arn:aws:eks/x"));
        assert_eq!(config.kubeconfig, Some("/a/b".into()));
        assert_eq!((config.era.get(), config.request_timeout), (2, Duration::from_millis(500)));
        assert_eq!(config.connect_timeout, CONNECT_TIMEOUT);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (url, kind, part) in [
            ("kube://api.example/orders", ErrorKind::Invalid, "three slashes"),
            ("etcd://a/orders", ErrorKind::Invalid, "scheme \"etcd\""),
            ("kube://u:p@/orders", ErrorKind::Invalid, "kubeconfig"),
            ("kube:///orders?namespace=Prod", ErrorKind::Invalid, "namespace \"Prod\""),
            ("kube:///orders?namespace=-a", ErrorKind::Invalid, "namespace \"-a\""),
            ("kube:///orders?namespace=", ErrorKind::Invalid, "namespace is empty"),
            ("kube:///orders?context=", ErrorKind::Invalid, "context is empty"),
            ("kube:///orders?request_timeout=5", ErrorKind::Invalid, "100ms to 60s"),
            ("kube:///orders?token=x", ErrorKind::Unsupported, "connect_timeout, context"),
        ] {
            let error = config(url).expect_err(url);
            assert_eq!(error.kind(), kind, "{url}: {error}");
            assert!(error.to_string().contains(part), "{url}: {error}");
        }
    }
}
