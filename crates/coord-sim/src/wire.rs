//! The network: what is under way between processes and the store, and what becomes of it.
//!
//! A request, a reply and an event of a watch are each a message that arrives some ticks later. What a
//! process's way to the store is like (cut, paused, deaf, losing replies) is the business of its
//! [`Faulty`](coord_conformance::faults::Faulty), which stands on the store's side; the wire adds time,
//! and delivers requests twice.

mod remote;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::time::WorldTime;

pub use remote::Remote;

type Delivery = Box<dyn FnOnce() + Send>;

/// How messages of one process travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weather {
    /// The longest a message is under way, in ticks.
    pub latency: u64,
    /// Of a thousand requests, so many are delivered twice.
    pub twice: u32,
    /// Of a thousand requests, so many get lost, and so many lose their reply.
    pub lost: u32,
}

impl Weather {
    /// Nothing is lost or late.
    pub const FAIR: Self = Self { latency: 1, twice: 0, lost: 0 };
}

/// All messages under way; clones are the same network.
#[derive(Clone)]
pub struct Wire(Arc<Mutex<State>>);

struct State {
    time: WorldTime,
    random: StdRng,
    /// By the tick of arrival, then in the order of sending.
    under_way: BTreeMap<(u64, u64), Delivery>,
    sent: u64,
    /// A digest of all that was delivered.
    digest: u64,
}

impl Wire {
    /// An empty network.
    #[must_use]
    pub fn new(time: WorldTime, seed: u64) -> Self {
        let random = StdRng::seed_from_u64(seed);
        let under_way = BTreeMap::new();
        Self(Arc::new(Mutex::new(State { time, random, under_way, sent: 0, digest: 0 })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers what is due by now.
    pub fn deliver(&self) {
        loop {
            let delivery = {
                let mut state = self.lock();
                let now = state.time.ticks();
                match state.under_way.first_key_value() {
                    Some(((due, _), _)) if *due <= now => state.under_way.pop_first(),
                    _ => None,
                }
            };
            let Some((key, delivery)) = delivery else { return };
            self.note(key.0 ^ key.1.rotate_left(32));
            delivery();
        }
    }

    /// Takes something that happened into the digest of this world's trace.
    pub fn note(&self, what: u64) {
        let mut state = self.lock();
        // FNV-1a over whole words.
        state.digest = (state.digest ^ what).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(5);
    }

    /// Takes a text into the digest.
    pub fn note_text(&self, text: &str) {
        text.bytes().for_each(|byte| self.note(byte.into()));
    }

    /// The digest of all that happened: the same for the same seed.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.lock().digest
    }

    /// Sends a message; it arrives not before `after`, in ticks. Returns when it does.
    pub(crate) fn send(&self, weather: Weather, after: u64, delivery: Delivery) -> u64 {
        let mut state = self.lock();
        let travels =
            if weather.latency == 0 { 0 } else { state.random.random_range(0..=weather.latency) };
        let due = (state.time.ticks() + travels).max(after);
        state.sent += 1;
        let key = (due, state.sent);
        state.under_way.insert(key, delivery);
        due
    }

    /// Whether something happens of which there are so many in a thousand.
    fn chance(&self, thousandths: u32) -> bool {
        thousandths > 0 && self.lock().random.random_range(0..1000) < thousandths
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Wire").field("under_way", &state.under_way.len()).finish_non_exhaustive()
    }
}
