//! Expiry in a bucket whose servers end no single records: their clock decides, and whoever notices
//! writes it down.
//!
//! A record says in a header how long it lives. The server says when it was written and what the
//! time is now. Whoever reads a record whose time is over by that clock replaces it by a marker, in
//! a compare-and-set on the record's own sequence, before anybody is told that it is gone. So the
//! end of a record is a write like any other: a renewal comes before it and prevents it, or after it
//! and fails.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use coord_core::{ErrorKind, Result};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::{Client, Condition, Last, MARKER_TTL, Outcome, Put};
use crate::RACES_MAX;
use crate::error::Op;

/// How long a record lives, in milliseconds.
pub(super) const TTL_MS: &str = "Coord-TTL";
/// Stands in the marker of a record that ran out.
pub(super) const EXPIRED: &str = "Coord-Expired";

/// How long the server's time is taken from what it said last.
const SAMPLE_AGE_MAX: Duration = Duration::from_secs(1);
/// After this, a marker is one that somebody left behind.
const MARKER_AGE_MAX: Duration = Duration::from_secs(10);

/// How long who wrote a marker waits to take it away; those that stay longer, others find.
const MARKER_WAIT_MAX: Duration = Duration::from_secs(60);

/// Who ends the records of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expiry {
    /// The servers do.
    Server,
    /// The clients do, by the servers' clock.
    Clients,
}

/// What the server said the time is, since 1970, and when that was heard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    server: Duration,
    heard: Instant,
}

impl Sample {
    /// The server's time, or one that is less by the time that its answer took: a record is never
    /// ended early by that.
    fn at(&self, now: Instant) -> Duration {
        self.server + now.saturating_duration_since(self.heard)
    }

    /// The same, or what a message says that was written at that time and arrived now.
    fn raised(known: Option<Self>, written: Duration, now: Instant) -> Self {
        match known {
            Some(known) if known.at(now) >= written => known,
            _ => Self { server: written, heard: now },
        }
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard) <= SAMPLE_AGE_MAX
    }
}

/// A subject's last message, with what tells when it ends.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) last: Last,
    /// By the server's clock, since 1970.
    pub(super) written: Duration,
    pub(super) ttl: Option<Duration>,
}

/// How it stands with a record whose time should be over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It is over: there is a marker in its place.
    Over,
    /// The server's clock has still so long to go.
    In(Duration),
    /// Another message has taken its place.
    Replaced,
}

impl Client {
    /// The last message of a subject, or the marker that was put in its place just now because its
    /// time is over.
    pub(super) async fn judged(
        &self,
        op: Op<'_>,
        subject: &str,
        mut stored: Stored,
    ) -> Result<Last> {
        for _ in 0..RACES_MAX {
            let Some(ttl) = stored.ttl.filter(|_| stored.last.value.is_some()) else {
                if stored.last.value.is_none() {
                    let (marker, written) = (stored.last.sequence, stored.written);
                    self.forget_old(subject, marker, written, stored.ttl);
                }
                return Ok(stored.last);
            };
            if self.server_time(op).await? < stored.written + ttl {
                return Ok(stored.last);
            }
            if let Some(sequence) = self.end(op, subject, stored.last.sequence).await? {
                return Ok(Last { sequence, ..Last::default() });
            }
            match self.stored(op, subject).await? {
                Some(next) => stored = next,
                None => return Ok(Last::default()),
            }
        }
        Err(op.reading().contended())
    }

    /// Ends the record with this sequence, if its time is over.
    pub(super) async fn try_end(&self, op: Op<'_>, subject: &str, sequence: u64) -> Result<End> {
        let Some(stored) = self.stored(op, subject).await? else { return Ok(End::Replaced) };
        if stored.last.sequence != sequence {
            return Ok(End::Replaced);
        }
        let Some(ttl) = stored.ttl else { return Ok(End::Replaced) };
        let now = self.server_time(op).await?;
        match (stored.written + ttl).checked_sub(now).filter(|left| !left.is_zero()) {
            Some(left) => Ok(End::In(left)),
            None if self.end(op, subject, sequence).await?.is_some() => Ok(End::Over),
            None => Ok(End::Replaced),
        }
    }

    /// Puts a marker in the place of a record whose time is over, and tells the sequence at which
    /// the subject is then; none if something else has taken that place.
    async fn end(&self, op: Op<'_>, subject: &str, sequence: u64) -> Result<Option<u64>> {
        let condition = Condition::At(sequence);
        let put = Put { subject, value: Bytes::new(), ttl: None, condition };
        match self.mark_removed(op.reading(), &put, true).await {
            Ok(Outcome::Done(marker)) => Ok(Some(marker)),
            Ok(_) => Ok(None),
            // Who may only read has the clock's word for it.
            Err(error) if error.kind() == ErrorKind::Denied => Ok(Some(sequence)),
            Err(error) => Err(error),
        }
    }

    /// The server's time, since 1970.
    async fn server_time(&self, op: Op<'_>) -> Result<Duration> {
        if let Some(time) = self.sampled(Sample::is_fresh) {
            return Ok(time);
        }
        self.sample_time(op).await?;
        self.sampled(|_, _| true).ok_or_else(|| op.reading().unclear("no answer in time"))
    }

    /// Asks the server for its time.
    pub(super) async fn sample_time(&self, op: Op<'_>) -> Result<()> {
        #[derive(Serialize)]
        struct Nothing {}
        #[derive(Deserialize)]
        struct Info {
            ts: Option<String>,
        }
        let api = format!("STREAM.INFO.{}", self.shared.stream);
        let info: Info = self
            .api(op.reading(), &api, &Nothing {})
            .await?
            .map_err(|refusal| refusal.error(op.reading()))?;
        let heard = Instant::now();
        let Some(time) = info.ts else {
            let why = "the server does not say what time it is; use NATS 2.10.26 or newer";
            return Err(op.error(ErrorKind::Unsupported).message(why));
        };
        let sample = Sample { server: time_of(op, &time)?, heard };
        *self.lock_sample() = Some(sample);
        Ok(())
    }

    fn sampled(&self, suits: impl FnOnce(&Sample, Instant) -> bool) -> Option<Duration> {
        let now = Instant::now();
        (*self.lock_sample()).filter(|sample| suits(sample, now)).map(|sample| sample.at(now))
    }

    fn lock_sample(&self) -> std::sync::MutexGuard<'_, Option<Sample>> {
        self.shared.sample.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Takes in that a message was written at that time. A watch that asks the server nothing for
    /// days falls behind it no further than that.
    pub(super) fn heard_of(&self, written: Duration) {
        let mut sample = self.lock_sample();
        *sample = Some(Sample::raised(*sample, written, Instant::now()));
    }

    /// When a moment of the server's clock comes on one's own, going by what it said last.
    pub(super) fn local(&self, moment: Duration) -> Instant {
        let now = Instant::now();
        let about = self.sampled(|_, _| true).unwrap_or(moment);
        now + moment.saturating_sub(about)
    }

    /// Takes a marker away: nothing else does. It stays as long as the record would have lived that
    /// it replaced: a server that is killed may forget the removal of both, and bring the record
    /// back.
    pub(super) fn forget(&self, subject: &str, marker: u64, after: Duration) {
        if after > MARKER_WAIT_MAX {
            return;
        }
        let (client, subject) = (self.clone(), subject.to_owned());
        self.shared.tasks.spawn(async move {
            tokio::select! {
                () = client.shared.closed.cancelled() => return,
                () = sleep(MARKER_TTL.max(after)) => {}
            }
            let op = Op::write("sweep", &subject);
            let before = Some(marker.saturating_add(1));
            if let Err(error) = client.purge(op, Some(&subject), before).await {
                // Who lists or watches next tries again.
                tracing::debug!(%error, %subject, "a marker was not removed");
            }
        });
    }

    /// Takes a marker away that somebody left behind.
    pub(super) fn forget_old(
        &self,
        subject: &str,
        marker: u64,
        written: Duration,
        ttl: Option<Duration>,
    ) {
        let stays = MARKER_AGE_MAX + ttl.unwrap_or_default();
        let is_old = |now: Duration| now.saturating_sub(written) > stays;
        if self.sampled(|_, _| true).is_some_and(is_old) {
            self.forget(subject, marker, Duration::ZERO);
        }
    }

    /// Takes what is on a subject, or on all, out of the stream, without a marker: what comes before
    /// this sequence, or everything.
    pub(super) async fn purge(
        &self,
        op: Op<'_>,
        subject: Option<&str>,
        before: Option<u64>,
    ) -> Result<()> {
        #[derive(Serialize)]
        struct Purge<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            filter: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            seq: Option<u64>,
        }
        #[derive(Deserialize)]
        struct Purged {}
        let api = format!("STREAM.PURGE.{}", self.shared.stream);
        let request = Purge { filter: subject, seq: before };
        let answer: Result<Purged, _> = self.api(op, &api, &request).await?;
        answer.map(drop).map_err(|refusal| refusal.error(op))
    }
}

/// A time as the server writes it, since 1970.
pub(super) fn time_of(op: Op<'_>, text: &str) -> Result<Duration> {
    let time = humantime::parse_rfc3339(text).ok();
    time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).ok_or_else(|| {
        op.error(ErrorKind::Corrupt).message(format!("the server says that it is {text:?}"))
    })
}

/// What a header says of how long a record lives.
pub(super) fn ttl_of(text: &str) -> Option<Duration> {
    text.trim().parse().ok().map(Duration::from_millis)
}

/// By when each record of a watch has to be looked at.
#[derive(Default)]
pub(super) struct Ends {
    by_subject: HashMap<String, (Instant, u64)>,
    order: BTreeSet<(Instant, String)>,
}

impl Ends {
    /// The record with this sequence is to be looked at then.
    pub(super) fn set(&mut self, subject: &str, at: Instant, sequence: u64) {
        self.remove(subject);
        self.by_subject.insert(subject.to_owned(), (at, sequence));
        self.order.insert((at, subject.to_owned()));
    }

    pub(super) fn remove(&mut self, subject: &str) {
        if let Some((at, _)) = self.by_subject.remove(subject) {
            self.order.remove(&(at, subject.to_owned()));
        }
    }

    /// When the first one is to be looked at.
    pub(super) fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// The subject and the sequence of one that is to be looked at by now.
    pub(super) fn due(&self, now: Instant) -> Option<(String, u64)> {
        let (_, subject) = self.order.first().filter(|(at, _)| *at <= now)?;
        let (_, sequence) = self.by_subject.get(subject)?;
        Some((subject.clone(), *sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_read_as_the_server_writes_it() {
        let op = Op::read("get", "jobs");
        for (text, nanos) in [
            ("2026-11-29T20:44:11.492521215Z", 1_795_985_051_492_521_215),
            ("2026-11-29T20:44:11Z", 1_795_985_051_000_000_000),
        ] {
            assert_eq!(time_of(op, text).expect(text).as_nanos(), nanos);
        }
        for bad in ["", "0001-01-01T00:00:00Z", "tomorrow"] {
            assert_eq!(time_of(op, bad).expect_err(bad).kind(), ErrorKind::Corrupt);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_servers_time_goes_on_and_is_asked_for_again() {
        let heard = Instant::now();
        let sample = Sample { server: Duration::from_secs(100), heard };
        let later = heard + SAMPLE_AGE_MAX;
        assert_eq!(sample.at(later), Duration::from_secs(101));
        assert!(sample.is_fresh(later));
        assert!(!sample.is_fresh(later + Duration::from_millis(1)));
        // Nothing that was written before tells anything new.
        let same = Sample::raised(Some(sample), Duration::from_secs(101), later);
        assert_eq!(same.at(later), sample.at(later));
        assert!(!same.is_fresh(later + Duration::from_millis(1)));
        let raised = Sample::raised(Some(sample), Duration::from_secs(102), later);
        assert_eq!(raised.at(later), Duration::from_secs(102));
        let first = Sample::raised(None, Duration::from_secs(7), later);
        assert_eq!(first.at(later + SAMPLE_AGE_MAX), Duration::from_secs(8));
    }

    #[tokio::test(start_paused = true)]
    async fn records_are_looked_at_in_the_order_of_their_ends() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut ends = Ends::default();
        ends.set("a", at(3), 1);
        ends.set("b", at(2), 2);
        ends.set("a", at(1), 3);
        assert_eq!(ends.next(), Some(at(1)));
        assert_eq!(ends.due(now), None);
        assert_eq!(ends.due(at(1)), Some(("a".to_owned(), 3)));
        ends.remove("a");
        assert_eq!(ends.due(at(2)), Some(("b".to_owned(), 2)));
        ends.remove("b");
        assert_eq!((ends.next(), ends.due(at(9))), (None, None));
    }
}
