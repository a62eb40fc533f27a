//! Which scheme opens which backend: a value, so that third parties can add their own.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::{Instant, sleep, timeout_at};

use crate::backend::Backend;
use crate::backoff::{BackOff, Jitter};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::MemoryBackend;
use crate::quote::quoted;
use crate::url::{BackendUrl, MEMORY_SCHEME, parse_scheme};

/// The longest pause between two tries to open a store.
const PAUSE_MAX: Duration = Duration::from_secs(2);

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

    /// For how long, from the first try, this failure to [`open`](Self::open) may pass by itself although
    /// its kind says that it does not: a store that has only just started may deny what it permits a
    /// moment later. Never unless a backend says so.
    fn may_pass(&self, error: &Error) -> Duration {
        let _ = error;
        Duration::ZERO
    }
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
        self.openers.entry(MEMORY_SCHEME.to_owned()).or_insert_with(|| Arc::new(MemoryOpener));
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
            let scheme = quoted(&scheme);
            let why = format!("scheme {scheme} is registered already; take another one");
            return Err(Error::invalid("register", why));
        }
        self.openers.insert(scheme, Arc::new(opener));
        Ok(())
    }

    /// The schemes that can be opened, in order.
    pub fn schemes(&self) -> impl Iterator<Item = &str> {
        self.openers.keys().map(String::as_str)
    }

    /// Begins to open the backend that a URL names: how long to wait for the store, then
    /// [`open`](Connector::open).
    ///
    /// # Errors
    /// `Invalid` for a malformed URL.
    pub fn connector(&self, url: &str) -> Result<Connector> {
        let url = BackendUrl::parse(url)?;
        Ok(Connector { registry: self.clone(), url, wait: Duration::ZERO, on_retry: None })
    }

    /// Opens the backend that a URL names. A store that is not there fails at once, unless the URL says
    /// to wait for it (`wait_for_store=30s`).
    ///
    /// # Errors
    /// `Invalid` for a malformed URL; `Unsupported` for a scheme that is compiled out or unknown,
    /// and for an unknown option, each listing what there is; else as the backend's opener makes
    /// them.
    ///
    /// # Cancel safety
    /// Nothing is lost: what was opened so far is closed.
    pub async fn connect(&self, url: &str) -> Result<Arc<dyn Backend>> {
        self.connector(url)?.open().await
    }

    /// Opens the backend that a parsed URL names, trying once.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn open(&self, url: &BackendUrl) -> Result<Arc<dyn Backend>> {
        let opener = self.opener(url)?;
        url.options(opener.options())?;
        opener.open(url).await
    }

    fn opener(&self, url: &BackendUrl) -> Result<&dyn Opener> {
        let opener = self.openers.get(url.scheme());
        opener.map(|opener| &**opener).ok_or_else(|| self.no_opener(url))
    }

    fn no_opener(&self, url: &BackendUrl) -> Error {
        let scheme = url.scheme();
        let known = self.known.get(scheme);
        let scheme = quoted(scheme);
        let what = match known {
            Some(Some(feature)) => format!("scheme {scheme} needs the cargo feature {feature:?}"),
            Some(None) => format!("scheme {scheme} has no backend in this version"),
            None => format!("unknown scheme {scheme}"),
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

/// Opens one store, and waits for it where it is not there yet.
#[must_use]
pub struct Connector {
    registry: Registry,
    url: BackendUrl,
    wait: Duration,
    on_retry: Option<OnRetry>,
}

type OnRetry = Box<dyn Fn(&Error, Duration) + Send + Sync>;

impl Connector {
    /// How long to wait for a store that is not there: it is tried again until then, and at least once.
    /// What the URL says (`wait_for_store=30s`) goes before this.
    pub fn wait_for_store(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Called after each try that failed and that is followed by another one, with the failure and the
    /// pause before the next try.
    pub fn on_retry(mut self, tell: impl Fn(&Error, Duration) + Send + Sync + 'static) -> Self {
        self.on_retry = Some(Box::new(tell));
        self
    }

    /// Where it points.
    #[must_use]
    pub fn url(&self) -> &BackendUrl {
        &self.url
    }

    /// Opens it.
    ///
    /// # Errors
    /// As [`Registry::connect`]; the last failure where the store was not there in time. What waiting
    /// can't heal fails at once.
    ///
    /// # Cancel safety
    /// Nothing is lost: what was opened so far is closed.
    pub async fn open(&self) -> Result<Arc<dyn Backend>> {
        let opener = self.registry.opener(&self.url)?;
        let options = self.url.options(opener.options())?;
        let wait = options.wait_for_store()?.unwrap_or(self.wait);
        let begun = Instant::now();
        let (mut back_off, mut jitter) = (BackOff::default(), Jitter::new(None));
        // The first try has all the time that the backend gives it.
        let mut error = match opener.open(&self.url).await {
            Ok(backend) => return Ok(backend),
            Err(error) => error,
        };
        loop {
            let patience =
                if error.is_retryable() { wait } else { wait.min(opener.may_pass(&error)) };
            let end = begun.checked_add(patience);
            let left =
                end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(error);
            }
            let unavailable = || Error::new(ErrorKind::Unavailable, "connect");
            let pause = back_off.after(&unavailable(), &mut jitter).min(PAUSE_MAX).min(left);
            tracing::warn!(%error, ?pause, "the store can't be opened yet; it is tried again");
            if let Some(tell) = &self.on_retry {
                tell(&error, pause);
            }
            sleep(pause).await;
            let again = opener.open(&self.url);
            error = match end {
                // The last one may be cut short: then what was wrong before still is.
                Some(end) => match timeout_at(end, again).await {
                    Ok(Ok(backend)) => return Ok(backend),
                    Ok(Err(error)) => error,
                    Err(_elapsed) => return Err(error),
                },
                None => match again.await {
                    Ok(backend) => return Ok(backend),
                    Err(error) => error,
                },
            };
        }
    }
}

impl Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("url", &self.url)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
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
    use std::sync::Mutex;

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

    /// Fails so many times, each after so long, and then opens.
    struct Late {
        failures: Mutex<Vec<ErrorKind>>,
        takes: Duration,
    }

    impl Late {
        fn new(failures: &[ErrorKind], takes: Duration) -> Self {
            Self { failures: Mutex::new(failures.iter().rev().copied().collect()), takes }
        }
    }

    #[async_trait]
    impl Opener for Late {
        fn options(&self) -> &'static [&'static str] {
            &[]
        }

        async fn open(&self, _url: &BackendUrl) -> Result<Arc<dyn Backend>> {
            sleep(self.takes).await;
            let failure = self.failures.lock().expect("no panic inside").pop();
            match failure {
                Some(kind) => Err(Error::new(kind, "connect").message("not yet")),
                None => MemoryOpener.open(&BackendUrl::parse("memory://late")?).await,
            }
        }

        fn may_pass(&self, error: &Error) -> Duration {
            Duration::from_secs(if error.kind() == ErrorKind::Denied { 5 } else { 0 })
        }
    }

    const AWAY: ErrorKind = ErrorKind::Unavailable;

    /// How it ends, after how long, and how many failures were told meanwhile.
    async fn waits(
        late: Late,
        url: &str,
        wait: Duration,
    ) -> (Result<Arc<dyn Backend>>, Duration, usize) {
        let mut registry = Registry::new();
        registry.register("late", late).expect("new");
        let told = Arc::new(Mutex::new(0));
        let tell = Arc::clone(&told);
        let connector = registry.connector(url).expect("parses").wait_for_store(wait);
        let connector = connector.on_retry(move |_, _| *tell.lock().expect("no panic inside") += 1);
        let begun = Instant::now();
        let outcome = connector.open().await;
        let told = *told.lock().expect("no panic inside");
        (outcome, begun.elapsed(), told)
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_comes_late_is_waited_for() {
        let secs = Duration::from_secs;
        let late = || Late::new(&[AWAY; 6], Duration::from_millis(10));
        let (outcome, took, told) = waits(late(), "late://h/orders", secs(30)).await;
        assert!(outcome.is_ok() && told == 6 && took < secs(10), "{outcome:?} {took:?} {told}");
        // The URL goes before the code.
        let (outcome, ..) = waits(late(), "late://h/orders?wait_for_store=30s", secs(0)).await;
        assert!(outcome.is_ok(), "{outcome:?}");
        let (outcome, took, told) =
            waits(late(), "late://h/orders?wait_for_store=0s", secs(30)).await;
        assert!(outcome.is_err() && took < secs(1) && told == 0, "{outcome:?} {took:?} {told}");
        let (outcome, ..) = waits(late(), "late://h/orders", Duration::MAX).await;
        assert!(outcome.is_ok(), "{outcome:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_a_store_ends_and_tells_what_is_wrong() {
        let wait = Duration::from_secs(7);
        for takes in [Duration::from_millis(1), Duration::from_secs(3)] {
            let late = Late::new(&[AWAY; 1_000], takes);
            let (outcome, took, _) = waits(late, "late://h/orders", wait).await;
            assert_eq!(outcome.expect_err("never there").message_text(), "not yet");
            assert_eq!(took, wait);
        }
        // One try always has its time.
        let late = Late::new(&[AWAY; 1_000], Duration::from_secs(9));
        assert_eq!(waits(late, "late://h/orders", wait).await.1, Duration::from_secs(9));
    }

    #[tokio::test(start_paused = true)]
    async fn what_waiting_can_t_heal_fails_at_once() {
        let wait = Duration::from_secs(60);
        for kind in [ErrorKind::Invalid, ErrorKind::Misconfigured, ErrorKind::Corrupt] {
            let late = Late::new(&[AWAY, kind], Duration::ZERO);
            let (outcome, took, told) = waits(late, "late://h/orders", wait).await;
            assert_eq!(outcome.expect_err("for good").kind(), kind);
            assert!(took < Duration::from_secs(1) && told == 1, "{took:?} {told}");
        }
        // A denial that the backend says may pass is waited for as long as it says.
        let late = Late::new(&[AWAY, ErrorKind::Denied, ErrorKind::Denied], Duration::ZERO);
        assert!(waits(late, "late://h/orders", wait).await.0.is_ok());
        let late = Late::new(&[ErrorKind::Denied; 1_000], Duration::ZERO);
        let (outcome, took, _) = waits(late, "late://h/orders", wait).await;
        assert_eq!(outcome.expect_err("denied").kind(), ErrorKind::Denied);
        assert_eq!(took, Duration::from_secs(5));
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
