//! One watch of each lease, however many of this handle's candidates read it.
//!
//! ```text
//!   the API server ── one watch ──► hub ─┬─► reader    each begins with a snapshot that was listed
//!                                        ├─► reader    after it had asked
//!                                        └─► reader
//! ```
//! The client speaks HTTP/1.1, in which a watch takes a connection for itself. HTTP/2 would be no way
//! out: of a server's few hundred streams a connection the watches would leave none to the renewals.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use coord_core::{Error, LeaseEvent, LeaseName, LeaseRecord, Result};
use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::runtime::Handle;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use crate::error::Op;

/// How many changes wait for a reader; one that is further behind gets a snapshot.
const BEHIND_MAX: usize = 64;
/// How many new readers queue while a list is under way; more wait to be queued.
const JOINS_MAX: usize = 64;
/// The least time from one list for new readers to the next, of which each opens the watch anew.
const LISTS_EVERY: Duration = Duration::from_millis(50);

/// Subscribes by itself: a snapshot first, then changes, and an error at its end.
type Open = Box<dyn Fn() -> BoxStream<'static, Result<LeaseEvent>> + Send>;
/// What became of a subscription that several readers have.
type Told<T> = Result<T, Arc<Error>>;

/// The hubs that are read now.
#[derive(Clone, Default)]
pub(crate) struct LeaseWatches(Arc<Mutex<HashMap<LeaseName, Weak<Hub>>>>);

/// Ends with its last reader.
struct Hub {
    joins: mpsc::Sender<Join>,
    _task: AbortOnDropHandle<()>,
}

/// A reader that waits for its snapshot.
type Join = oneshot::Sender<Told<Joined>>;

struct Joined {
    now: Option<LeaseRecord>,
    changes: broadcast::Receiver<Told<LeaseEvent>>,
}

enum Reader {
    Joining,
    Reading(Arc<Hub>, broadcast::Receiver<Told<LeaseEvent>>),
    Ended,
}

impl LeaseWatches {
    /// One reader's subscription. It ends with its first error.
    pub(crate) fn read(
        &self,
        lease: &LeaseName,
        open: impl Fn() -> BoxStream<'static, Result<LeaseEvent>> + Clone + Send + Sync + 'static,
    ) -> BoxStream<'static, Result<LeaseEvent>> {
        let (hubs, lease) = (self.clone(), lease.clone());
        stream::unfold(Reader::Joining, move |reader| {
            let (hubs, lease, open) = (hubs.clone(), lease.clone(), open.clone());
            async move { hubs.next(&lease, open, reader).await }
        })
        .boxed()
    }

    async fn next(
        &self,
        lease: &LeaseName,
        open: impl Fn() -> BoxStream<'static, Result<LeaseEvent>> + Clone + Send + 'static,
        mut reader: Reader,
    ) -> Option<(Result<LeaseEvent>, Reader)> {
        let failed = |error: Arc<Error>| Some((Err(copied(lease.as_str(), error)), Reader::Ended));
        loop {
            reader = match reader {
                Reader::Joining => {
                    let hub = self.hub(lease, Box::new(open.clone()));
                    let (join, joined) = oneshot::channel();
                    // Where it fails, `joined` does too.
                    let _ = hub.joins.send(join).await;
                    match joined.await {
                        Ok(Ok(Joined { now, changes })) => {
                            let now = LeaseEvent::Snapshot(now);
                            return Some((Ok(now), Reader::Reading(hub, changes)));
                        }
                        Ok(Err(error)) => return failed(error),
                        // It was just ending.
                        Err(_) => Reader::Joining,
                    }
                }
                Reader::Reading(hub, mut changes) => match changes.recv().await {
                    Ok(Ok(event)) => return Some((Ok(event), Reader::Reading(hub, changes))),
                    Ok(Err(error)) => return failed(error),
                    // Too far behind, or the hub's runtime has ended.
                    Err(_) => Reader::Joining,
                },
                Reader::Ended => return None,
            }
        }
    }

    /// The hub of a lease, started if there is none.
    fn hub(&self, lease: &LeaseName, open: Open) -> Arc<Hub> {
        let mut hubs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = hubs.get(lease).and_then(Weak::upgrade)
            && !hub.joins.is_closed()
        {
            return hub;
        }
        let (joins, joining) = mpsc::channel(JOINS_MAX);
        let task = Handle::current().spawn(run(open, joining));
        let hub = Arc::new(Hub { joins, _task: AbortOnDropHandle::new(task) });
        hubs.retain(|_, hub| hub.strong_count() > 0);
        hubs.insert(lease.clone(), Arc::downgrade(&hub));
        hub
    }
}

/// Reads the watch for all, and lists again for those who come later.
async fn run(open: Open, mut joining: mpsc::Receiver<Join>) {
    let changes = broadcast::Sender::new(BEHIND_MAX);
    let (mut shown, mut waiting) = (None, Vec::<Join>::new());
    // Who starts the hub asks right after that: a list before would not do for it.
    waiting.extend(joining.recv().await);
    loop {
        let mut events = open();
        // It lists when it is first read: after all these have asked.
        waiting.extend(std::iter::from_fn(|| joining.try_recv().ok()));
        let mut listed = None;
        loop {
            let event = tokio::select! {
                biased;
                event = events.next() => event,
                Some(join) = joining.recv(), if listed.is_some() => {
                    waiting.push(join);
                    continue;
                }
                () = sleep_until(listed.unwrap_or_else(Instant::now) + LISTS_EVERY),
                    if listed.is_some() && !waiting.is_empty() => break,
            };
            match event {
                Some(Ok(LeaseEvent::Snapshot(now))) => {
                    if let Some(change) = shown.as_ref().and_then(|shown| change(shown, &now)) {
                        let _ = changes.send(Ok(change));
                    }
                    if listed.is_none() {
                        listed = Some(Instant::now());
                        for join in waiting.drain(..) {
                            let joined = Joined { now: now.clone(), changes: changes.subscribe() };
                            let _ = join.send(Ok(joined));
                        }
                    }
                    shown = Some(now);
                }
                Some(Ok(event)) => {
                    shown = Some(match &event {
                        LeaseEvent::Changed(now) => Some(now.clone()),
                        _ => None,
                    });
                    let _ = changes.send(Ok(event));
                }
                Some(Err(error)) => {
                    let error = Arc::new(error);
                    for join in waiting {
                        let _ = join.send(Err(Arc::clone(&error)));
                    }
                    let _ = changes.send(Err(error));
                    return;
                }
                None => return,
            }
        }
    }
}

/// What those have to know who were shown the one state, now that it is the other.
fn change(shown: &Option<LeaseRecord>, now: &Option<LeaseRecord>) -> Option<LeaseEvent> {
    match (shown, now) {
        (None, None) => None,
        (Some(_), None) => Some(LeaseEvent::Vacant),
        (Some(shown), Some(now)) if shown.fence() == now.fence() && shown.ttl == now.ttl => None,
        (_, Some(now)) => Some(LeaseEvent::Changed(now.clone())),
    }
}

/// The same error for one of several readers.
fn copied(lease: &str, error: Arc<Error>) -> Error {
    let why = error.message_text().to_owned();
    Op::read("watch", lease).error(error.kind()).message(why).with_source(error)
}

impl fmt::Debug for LeaseWatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseWatches").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use coord_core::{
        AttemptId, Era, ErrorKind, Grant, Holder, Incarnation, NodeId, Origin, Revision, Term, Ttl,
    };
    use futures::FutureExt as _;

    use super::*;

    /// A store of one lease, whose watches are counted.
    #[derive(Clone)]
    struct Store {
        now: Arc<Mutex<Option<LeaseRecord>>>,
        events: broadcast::Sender<Option<LeaseEvent>>,
        opened: Arc<AtomicUsize>,
        open: Arc<AtomicUsize>,
    }

    struct Open(Arc<AtomicUsize>);

    impl Drop for Open {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    impl Store {
        fn new() -> Self {
            let (now, events) = (Arc::default(), broadcast::Sender::new(16));
            Self { now, events, opened: Arc::default(), open: Arc::default() }
        }

        fn set(&self, now: Option<LeaseRecord>) {
            self.now.lock().expect("no panic").clone_from(&now);
        }

        fn tell(&self, now: Option<LeaseRecord>) {
            self.set(now.clone());
            let event = now.map_or(LeaseEvent::Vacant, LeaseEvent::Changed);
            let _ = self.events.send(Some(event));
        }

        fn opens(&self) -> impl Fn() -> BoxStream<'static, Result<LeaseEvent>> + Clone + use<> {
            let store = self.clone();
            move || {
                let store = store.clone();
                stream::once(async move { store.subscribe() }).flatten().boxed()
            }
        }

        fn subscribe(&self) -> BoxStream<'static, Result<LeaseEvent>> {
            self.opened.fetch_add(1, Ordering::Relaxed);
            self.open.fetch_add(1, Ordering::Relaxed);
            let open = Open(Arc::clone(&self.open));
            let now = self.now.lock().expect("no panic").clone();
            let changes =
                stream::unfold((self.events.subscribe(), open), |(mut events, open)| async move {
                    let event = match events.recv().await.ok()? {
                        Some(event) => Ok(event),
                        None => Err(Op::read("watch", "jobs").unclear("cut")),
                    };
                    Some((event, (events, open)))
                });
            stream::once(async { Ok(LeaseEvent::Snapshot(now)) }).chain(changes).boxed()
        }

        fn counts(&self) -> (usize, usize) {
            (self.opened.load(Ordering::Relaxed), self.open.load(Ordering::Relaxed))
        }
    }

    fn name() -> LeaseName {
        LeaseName::new("jobs").expect("a name")
    }

    fn held(term: u64) -> Option<LeaseRecord> {
        let node = NodeId::new("a").expect("a name");
        let holder = Holder::new(node, Incarnation::from_u128(1), AttemptId::from_u128(2));
        let (term, ttl) = (Term::new(Era::default(), term).expect("small"), Ttl::MIN);
        let revision = Revision::from_bytes(vec![1]);
        let origin = Origin::new("kube:u/orders");
        Some(LeaseRecord::new(Grant::new(name(), holder, term, ttl, origin, revision)))
    }

    type Events = BoxStream<'static, Result<LeaseEvent>>;

    async fn next(events: &mut Events) -> LeaseEvent {
        events.next().await.expect("goes on").expect("watches")
    }

    fn changed(term: u64) -> LeaseEvent {
        LeaseEvent::Changed(held(term).expect("held"))
    }

    #[tokio::test(start_paused = true)]
    async fn many_read_one_watch() {
        let (store, watches) = (Store::new(), LeaseWatches::default());
        let read = || watches.read(&name(), store.opens());
        let mut readers: Vec<_> = (0..1_000).map(|_| read()).collect();
        // All are there before the first list is answered.
        let snapshots = futures::future::join_all(readers.iter_mut().map(next)).await;
        assert!(snapshots.iter().all(|event| *event == LeaseEvent::Snapshot(None)));
        let (opened, open) = store.counts();
        assert!(opened <= 2 && open == 1, "{opened} {open}");
        store.tell(held(1));
        for reader in &mut readers {
            assert_eq!(next(reader).await, changed(1));
        }
        drop(readers);
        tokio::task::yield_now().await;
        assert_eq!(store.counts().1, 0, "it ends with its last reader");
    }

    /// On several threads, where the hub may run before its first reader has asked.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_first_reader_opens_one_watch() {
        let lists_are_over = LISTS_EVERY * 3;
        for _ in 0..20 {
            let (store, watches) = (Store::new(), LeaseWatches::default());
            let mut reader = watches.read(&name(), store.opens());
            assert_eq!(next(&mut reader).await, LeaseEvent::Snapshot(None));
            assert!(tokio::time::timeout(lists_are_over, reader.next()).await.is_err());
            assert_eq!(store.counts(), (1, 1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_reader_sees_what_the_watch_has_not_told() {
        let (store, watches) = (Store::new(), LeaseWatches::default());
        let mut first = watches.read(&name(), store.opens());
        assert_eq!(next(&mut first).await, LeaseEvent::Snapshot(None));
        // Written, and on its way to the watch yet.
        store.set(held(1));
        let mut second = watches.read(&name(), store.opens());
        assert_eq!(next(&mut second).await, LeaseEvent::Snapshot(held(1)));
        assert_eq!(next(&mut first).await, changed(1));
        store.tell(held(2));
        assert_eq!((next(&mut first).await, next(&mut second).await), (changed(2), changed(2)));
        // Who comes when nothing has changed disturbs nobody.
        let mut third = watches.read(&name(), store.opens());
        assert_eq!(next(&mut third).await, LeaseEvent::Snapshot(held(2)));
        assert!(first.next().now_or_never().is_none());
        assert_eq!(store.counts().1, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_error_ends_all_and_the_next_begin_anew() {
        let (store, watches) = (Store::new(), LeaseWatches::default());
        let mut readers = [0, 1].map(|_| watches.read(&name(), store.opens()));
        for reader in &mut readers {
            next(reader).await;
        }
        let _ = store.events.send(None);
        for reader in &mut readers {
            let error = reader.next().await.expect("goes on").expect_err("it was cut");
            assert_eq!((error.kind(), error.message_text()), (ErrorKind::Unavailable, "cut"));
            assert!(reader.next().await.is_none(), "it ends after its first error");
        }
        let mut again = watches.read(&name(), store.opens());
        assert_eq!(next(&mut again).await, LeaseEvent::Snapshot(None));
        drop(readers);
        store.tell(held(1));
        assert_eq!(next(&mut again).await, changed(1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_reader_learns_how_things_stand() {
        let (store, watches) = (Store::new(), LeaseWatches::default());
        let mut late = watches.read(&name(), store.opens());
        let mut early = watches.read(&name(), store.opens());
        for reader in [&mut late, &mut early] {
            assert_eq!(next(reader).await, LeaseEvent::Snapshot(None));
        }
        let last = BEHIND_MAX as u64 + 10;
        for term in 1..=last {
            store.tell(held(term));
            assert_eq!(next(&mut early).await, changed(term));
        }
        assert_eq!(next(&mut late).await, LeaseEvent::Snapshot(held(last)));
    }
}
