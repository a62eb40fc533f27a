//! Which scheme opens which backend: a value, so that third parties can add their own.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::Arc;

use async_trait::async_trait;

use crate::backend::Backend;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{self, MemoryBackend};
use crate::url::{BackendUrl, parse_scheme};

/// Opens the backends of one scheme.
#[async_trait]
pub trait Opener: Send + Sync + 'static {
    /// The options that its URLs may have, beside the [common](crate::COMMON_OPTIONS) ones. Any
    /// other is refused before [`open`](Self::open) is called.
    fn options(&self) -> &'static [&'static str];

    /// Opens the backend that the URL names.
    ///
    /// # Errors
    /// `Invalid` for a URL that does not suit the backend, found before any I/O; else as the store
    /// makes them.
    ///
    /// # Cancel safety
    /// Nothing is lost: what was opened so far is closed.
    async fn open(&self, url: &BackendUrl) -> Result<Arc<dyn Backend>>;
}

/// The backends that a program can open, by the schemes of their URLs.
///
/// ```
/// # use coord_core::{Backend, Registry};
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let registry = Registry::new().with_memory().with_known("etcd", "etcd");
/// let backend = registry.connect("memory://orders").await.unwrap();
/// assert_eq!(backend.info().target, "memory://orders");
/// let error = registry.connect("etcd://localhost:2379/orders").await.unwrap_err();
/// assert!(error.to_string().contains("needs the cargo feature \"etcd\""));
/// # });
/// ```
#[derive(Clone, Default)]
pub struct Registry {
    openers: BTreeMap<String, Arc<dyn Opener>>,
    /// Schemes that coord knows, with the cargo features that bring them.
    known: BTreeMap<&'static str, Option<&'static str>>,
}

impl Registry {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With the embedded backend as `memory`, unless that scheme is registered already.
    #[must_use]
    pub fn with_memory(mut self) -> Self {
        self.openers.entry(memory::SCHEME.to_owned()).or_insert_with(|| Arc::new(MemoryOpener));
        self
    }

    /// Knowing of a scheme that a cargo feature brings, so that its absence can be told from a
    /// typing error. A scheme that is registered as well opens as registered.
    #[must_use]
    pub fn with_known(mut self, scheme: &'static str, feature: &'static str) -> Self {
        self.known.insert(scheme, Some(feature));
        self
    }

    /// Knowing of a scheme that is meant to come and that no feature of this version brings.
    #[must_use]
    pub fn with_planned(mut self, scheme: &'static str) -> Self {
        self.known.insert(scheme, None);
        self
    }

    /// Adds a scheme.
    ///
    /// # Errors
    /// `Invalid` if the scheme is registered already, or holds anything but `a-z 0-9 + - .`.
    pub fn register(&mut self, scheme: &str, opener: impl Opener) -> Result<()> {
        let scheme = parse_scheme(scheme)?;
        if self.openers.contains_key(&scheme) {
            let why = format!("scheme {scheme:?} is registered already; take another one");
            return Err(Error::invalid("register", why));
        }
        self.openers.insert(scheme, Arc::new(opener));
        Ok(())
    }

    /// The schemes that can be opened, in order.
    pub fn schemes(&self) -> impl Iterator<Item = &str> {
        self.openers.keys().map(String::as_str)
    }

    /// Opens the backend that a URL names.
    ///
    /// # Errors
    /// `Invalid` for a malformed URL; `Unsupported` for a scheme that is compiled out or unknown,
    /// and for an unknown option, each listing what there is; else as the backend's opener makes
    /// them.
    ///
    /// # Cancel safety
    /// Nothing is lost: what was opened so far is closed.
    pub async fn connect(&self, url: &str) -> Result<Arc<dyn Backend>> {
        self.open(&BackendUrl::parse(url)?).await
    }

    /// Opens the backend that a parsed URL names.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn open(&self, url: &BackendUrl) -> Result<Arc<dyn Backend>> {
        let Some(opener) = self.openers.get(url.scheme()) else {
            return Err(self.no_opener(url));
        };
        url.options(opener.options())?;
        opener.open(url).await
    }

    fn no_opener(&self, url: &BackendUrl) -> Error {
        let scheme = url.scheme();
        let what = match self.known.get(scheme) {
            Some(Some(feature)) => format!("scheme {scheme:?} needs the cargo feature {feature:?}"),
            Some(None) => format!("scheme {scheme:?} has no backend in this version"),
            None => format!("unknown scheme {scheme:?}"),
        };
        let opens: Vec<_> = self.schemes().collect();
        let is_out = |scheme: &str| !self.openers.contains_key(scheme);
        let out: Vec<_> = self.known.keys().copied().filter(|scheme| is_out(scheme)).collect();
        let list = |schemes: Vec<&str>| match schemes.as_slice() {
            [] => "none".to_owned(),
            some => some.join(", "),
        };
        let (opens, out) = (list(opens), list(out));
        let why = format!("{what}; schemes in this build: {opens}; left out of it: {out}");
        Error::new(ErrorKind::Unsupported, "connect").message(why).resource(url)
    }
}

impl Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("schemes", &self.openers.keys())
            .field("known", &self.known)
            .finish()
    }
}

struct MemoryOpener;

#[async_trait]
impl Opener for MemoryOpener {
    fn options(&self) -> &'static [&'static str] {
        &[]
    }

    async fn open(&self, url: &BackendUrl) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(MemoryBackend::from_url(url)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry() -> Registry {
        Registry::new().with_memory().with_known("etcd", "etcd").with_planned("nats")
    }

    async fn refused(url: &str) -> Error {
        registry().connect(url).await.expect_err(url)
    }

    #[tokio::test]
    async fn three_errors_list_what_there_is() {
        let compiled_out = refused("etcd://a:2379/orders").await;
        let unknown = refused("ectd://u:hunter2@a:2379/orders").await;
        let option = refused("memory://orders?ear=1").await;
        for (error, text) in [
            (&compiled_out, "needs the cargo feature \"etcd\"; schemes in this build: memory;"),
            (
                &unknown,
                "unknown scheme \"ectd\"; schemes in this build: memory; left out of it: etcd, nats",
            ),
            (&option, "unknown option \"ear\"; the known ones are era"),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(text), "{error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_memory_url_opens_the_store_of_its_cluster() {
        let backend = registry().connect("memory://opened-by-url?era=3").await.expect("opens");
        assert_eq!(backend.info().cluster.as_str(), "opened-by-url");
        let user = refused("memory://u:hunter2@orders").await;
        assert_eq!(user.kind(), ErrorKind::Invalid);
        assert!(user.to_string().contains("no user"), "{user}");
    }

    #[tokio::test]
    async fn a_scheme_of_a_third_party_is_registered_once() {
        let mut registry = registry();
        registry.register("Mine", MemoryOpener).expect("new");
        let twice = registry.register("mine", MemoryOpener).expect_err("twice");
        assert_eq!(twice.kind(), ErrorKind::Invalid);
        assert!(registry.register("m/ne", MemoryOpener).is_err());
        assert_eq!(registry.schemes().collect::<Vec<_>>(), ["memory", "mine"]);
        let opened = registry.connect("mine:///third-party").await.expect("opens");
        assert_eq!(opened.info().cluster.as_str(), "third-party");
    }
}
