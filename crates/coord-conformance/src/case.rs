//! One trial: a behaviour, the rules that ask for it, and the code that looks for it.

use std::any::Any;
use std::convert::Infallible;
use std::fmt::{self, Debug};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coord_core::Error;
use futures::FutureExt;
use futures::future::{BoxFuture, Either, select};
use tokio::time::{Instant, sleep};

use crate::cx::Cx;
use crate::fixture::Fixture;

/// The longest text of a failure, in characters.
const TEXT_CHARS_MAX: usize = 2_000;
/// How often a trial runs that fails on a machine that stands still.
const RUNS_MAX: usize = 5;

/// One behaviour that every backend has to show.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// Which part of the contract it belongs to: `lease`, `discovery`, `placement`, `requests`, `watch`,
    /// `backend`, `session`.
    pub group: &'static str,
    /// Its name within the group, which says the behaviour.
    pub behaviour: &'static str,
    /// The behaviour in a sentence.
    pub doc: &'static str,
    /// The [rules](crate::rules()) that ask for it, by their ids.
    pub rules: &'static [&'static str],
    /// Whether it takes so long that it only runs when asked for (`--ignored`, `--include-ignored`).
    pub slow: bool,
    pub(crate) body: for<'a> fn(&'a Cx) -> BoxFuture<'a, Done>,
}

/// How a trial came out.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// The backend behaves so.
    Passed,
    /// It can't be told here, for this reason.
    Ignored(String),
    /// It does not, as this shows.
    Failed(String),
}

impl Case {
    /// Its full name, `group::behaviour`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}::{}", self.group, self.behaviour)
    }

    /// Runs it to its end on a runtime of its own, in a cluster of its own. Must not be called from
    /// within a runtime.
    ///
    /// A trial counts on its own clock. Where it failed and its runtime had stood still for a tenth of a
    /// TTL, it may have been too late with what it had to do in time: then it runs once more, a few times
    /// at most.
    pub fn run(&self, fixture: &Arc<dyn Fixture>) -> Verdict {
        for _ in 1..RUNS_MAX {
            match self.run_once(fixture) {
                (Verdict::Failed(why), stood_still)
                    if stood_still >= fixture.profile().ttl.get() / 10 =>
                {
                    let name = self.name();
                    // Nobody reads what can't be written.
                    let _ = writeln!(
                        std::io::stderr(),
                        "{name} runs once more: the machine stood still for {stood_still:?}: {why}"
                    );
                }
                (verdict, _) => return verdict,
            }
        }
        self.run_once(fixture).0
    }

    /// The verdict, and how long the runtime stood still at most meanwhile.
    fn run_once(&self, fixture: &Arc<dyn Fixture>) -> (Verdict, Duration) {
        let stood_still = AtomicU64::new(0);
        let verdict = self.judge(fixture, &stood_still);
        (verdict, Duration::from_millis(stood_still.load(Ordering::Relaxed)))
    }

    fn judge(&self, fixture: &Arc<dyn Fixture>, stood_still: &AtomicU64) -> Verdict {
        let profile = fixture.profile();
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(profile.paused);
        let runtime = match builder.build() {
            Ok(runtime) => runtime,
            Err(error) => return Verdict::Failed(format!("no runtime: {error}")),
        };
        let done = catch_unwind(AssertUnwindSafe(|| {
            runtime.block_on(async {
                let is_real_time = !profile.paused;
                let cx = Cx::new(Arc::clone(fixture), profile);
                let limit = cx.profile.trial_limit;
                let measured = async {
                    if is_real_time {
                        measure(stood_still).await;
                    }
                    std::future::pending::<Infallible>().await
                };
                let body = tokio::time::timeout(limit, (self.body)(&cx));
                let done = match select(body.boxed_local(), measured.boxed_local()).await {
                    Either::Left((done, _)) => done,
                    Either::Right((never, _)) => match never {},
                };
                cx.close().await;
                done.unwrap_or_else(|_| Err(Stop::Failed(format!("still running after {limit:?}"))))
            })
        }));
        match done {
            Ok(Ok(())) => Verdict::Passed,
            Ok(Err(Stop::Ignored(reason))) => Verdict::Ignored(reason),
            Ok(Err(Stop::Failed(why))) => Verdict::Failed(shortened(why)),
            Err(panic) => Verdict::Failed(format!("panicked: {}", panic_text(&*panic))),
        }
    }
}

impl Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Case({})", self.name())
    }
}

/// Notes by how many milliseconds the runtime was late at most.
async fn measure(stood_still: &AtomicU64) {
    const TICK: Duration = Duration::from_millis(25);
    loop {
        let before = Instant::now();
        sleep(TICK).await;
        let late = before.elapsed().saturating_sub(TICK).as_millis();
        stood_still.fetch_max(u64::try_from(late).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// Keeps the whole map of a large table out of a message.
fn shortened(text: String) -> String {
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a text")
}

/// Why a trial ended before its end.
#[derive(Debug)]
pub(crate) enum Stop {
    Failed(String),
    Ignored(String),
}

/// What the code of a trial gives back.
pub(crate) type Done<T = ()> = Result<T, Stop>;

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        let mut text = format!("unexpected error: {error}");
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        Self::Failed(text)
    }
}

/// Ends the trial as failed unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::case::Stop::Failed(format!($($text)+)));
        }
    };
}

/// Takes the wanted variant of an outcome, or ends the trial as failed.
macro_rules! want {
    ($outcome:expr, $pattern:pat => $value:expr, $($text:tt)+) => {
        match $outcome {
            $pattern => $value,
            other => {
                let expected = format!($($text)+);
                return Err($crate::case::Stop::Failed(format!("{expected}, got {other:?}")));
            }
        }
    };
}

/// Lists the cases of one group, with their rules: the name is that of the function.
macro_rules! cases {
    ($group:literal: $($(#[doc = $doc:literal])+ $name:ident $([$slow:ident])? => $rules:expr;)+) => {
        pub(crate) const CASES: &[$crate::case::Case] = &[$(
            $crate::case::Case {
                group: $group,
                behaviour: stringify!($name),
                doc: concat!($($doc),+).trim_ascii(),
                rules: &$rules,
                slow: cases!(@slow $($slow)?),
                body: |cx| Box::pin($name(cx)),
            },
        )+];
    };
    (@slow) => { false };
    (@slow slow) => { true };
}

pub(crate) use {cases, ensure, want};
