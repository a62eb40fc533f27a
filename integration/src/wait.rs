//! Waiting outside of a runtime, with a bound.

use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_millis(10);

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
