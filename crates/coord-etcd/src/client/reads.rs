//! Keys that are read for renewals: requests of one moment share one read.
//!
//! The read is sent after all of them asked, so it shows each as much as a read of its own would. A request
//! waits at most [`HOLD_UP`] for the read before its own, so a read that hangs, for example at one of several
//! endpoints, delays only the renewals in its own batch.

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

/// The waiting requests.
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

    /// Makes sure that a task serves the waiting requests.
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
        // A reply that can't be sent says that the request does not wait any more.
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

/// Serves until no request waits, or until one read takes too long for the others.
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

    /// The next requests; none if none waits, which ends the service.
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
    /// Where its runtime is shut down, another task serves the next requests.
    fn drop(&mut self) {
        if !self.ended {
            let mut state = self.client.reads.state();
            state.is_served = false;
            state.asks.clear();
        }
    }
}
