//! Waiting with a bound.

use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_millis(10);
/// How long a store may take until it serves: the servers of a new cluster elect a leader first.
const OPEN_LIMIT: Duration = Duration::from_secs(30);

/// Asks again and again, for `limit` at most, until there is an answer. Blocks the thread: inside of a
/// runtime call it through `spawn_blocking`.
#[expect(clippy::disallowed_methods, reason = "it waits for real processes, outside of a runtime")]
pub fn until<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if begun.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(EVERY);
    }
}

/// Opens a backend, and tries again for half a minute at most while its store is not available.
///
/// # Errors
/// That of the last try.
///
/// # Cancel safety
/// A backend may have been opened and dropped.
#[expect(clippy::disallowed_methods, reason = "it waits for real processes")]
pub async fn opened<B, F>(open: impl Fn() -> F) -> coord_core::Result<B>
where
    F: Future<Output = coord_core::Result<B>>,
{
    let begun = Instant::now();
    loop {
        match open().await {
            Err(error) if error.is_retryable() && begun.elapsed() < OPEN_LIMIT => {
                tokio::time::sleep(EVERY).await;
            }
            outcome => return outcome,
        }
    }
}
