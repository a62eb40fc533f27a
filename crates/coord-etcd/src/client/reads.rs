//! Keys that are read for renewals: those who ask within a moment share one request.
//!
//! The request is sent after all of them asked, so it tells each as much as one of its own would. Nobody
//! waits longer than [`HOLD_UP`] for the answer to a request before his own: one that hangs, at one of
//! several endpoints say, holds up no renewal but those that it is about.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coord_core::kit::Op;
use coord_core::{Error, ErrorKind};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{Client, Entry, Step};
use crate::error::Problem;

/// How many keys one request reads. A server takes 128 steps by default.
const KEYS_MAX: usize = 100;
/// How long a request is waited for before the next one goes.
const HOLD_UP: Duration = Duration::from_millis(10);

/// Those who ask.
#[derive(Clone, Default)]
pub(super) struct Reads(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    asks: Vec<Ask>,
    /// Whether a task is about to send them.
    is_served: bool,
}

struct Ask {
    operation: &'static str,
    resource: String,
    key: String,
    reply: oneshot::Sender<Result<Option<Entry>, Error>>,
}

impl Client {
    /// Reads one key, together with what others read at this moment. Linearizable.
    pub(crate) async fn get_with_others(
        &self,
        op: Op<'_>,
        key: String,
    ) -> Result<Option<Entry>, Problem> {
        let (reply, answer) = oneshot::channel();
        let (operation, resource) = (op.name, op.resource.to_owned());
        self.reads.state().asks.push(Ask { operation, resource, key, reply });
        self.serve_reads();
        let gone = |_| {
            if self.closed().is_cancelled() {
                return op.closed();
            }
            op.error(ErrorKind::Unavailable).message("the runtime that read for this was shut down")
        };
        Ok(answer.await.map_err(gone)??)
    }

    /// Sees to it that somebody serves those who wait.
    fn serve_reads(&self) {
        let mut state = self.reads.state();
        if !state.asks.is_empty() && !std::mem::replace(&mut state.is_served, true) {
            drop(state);
            let service = Service { client: self.clone(), ended: false };
            self.tidy_up(service.run());
        }
    }

    /// Reads for all of them; the first one's name stands in an error.
    async fn read_for(self, asks: Vec<Ask>) {
        let Some(first) = asks.first() else { return };
        let op = Op::read(first.operation, &first.resource);
        let steps: Vec<_> = asks.iter().map(|ask| Step::Get(ask.key.clone())).collect();
        let answer = self.read(op, &steps).await.map_err(Error::from);
        // A reply that can't be sent says that nobody waits any more.
        match answer {
            Ok(mut outcome) => {
                for (step, ask) in asks.into_iter().enumerate() {
                    let _ = ask.reply.send(Ok(outcome.take(step)));
                }
            }
            Err(error) => {
                let (kind, message) = (error.kind(), error.message_text().to_owned());
                let mut cause = Some(error);
                for ask in asks {
                    let copy = || {
                        let error = Error::new(kind, ask.operation).effect_none();
                        error.resource(&ask.resource).message(message.clone())
                    };
                    let _ = ask.reply.send(Err(cause.take().unwrap_or_else(copy)));
                }
            }
        }
    }
}

impl Reads {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves until nobody waits, or until one request takes too long for the others.
struct Service {
    client: Client,
    ended: bool,
}

impl Service {
    async fn run(mut self) {
        while let Some(asks) = self.next() {
            let request = self.client.clone().read_for(asks);
            tokio::pin!(request);
            if timeout(HOLD_UP, &mut request).await.is_err() {
                self.end();
                self.client.serve_reads();
                return request.await;
            }
        }
    }

    /// Those who are next; none if nobody waits, which ends the service.
    fn next(&mut self) -> Option<Vec<Ask>> {
        let mut state = self.client.reads.state();
        state.asks.retain(|ask| !ask.reply.is_closed());
        let next = state.asks.len().min(KEYS_MAX);
        if next == 0 {
            state.is_served = false;
            self.ended = true;
            return None;
        }
        Some(state.asks.drain(..next).collect())
    }

    fn end(&mut self) {
        self.ended = true;
        self.client.reads.state().is_served = false;
    }
}

impl Drop for Service {
    /// Where its runtime is shut down, another serves those who ask next.
    fn drop(&mut self) {
        if !self.ended {
            let mut state = self.client.reads.state();
            state.is_served = false;
            state.asks.clear();
        }
    }
}
