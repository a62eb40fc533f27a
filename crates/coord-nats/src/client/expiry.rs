//! Expiry in a bucket whose servers end no single records: their clock decides, and the first handle that
//! notices writes the end down.
//!
//! A record says in a header how long it lives. The server says when it was written and what the time is now. A
//! handle that reads a record whose time is over by that clock replaces it by a marker, in a compare-and-set on
//! the record's own sequence, before it reports the record as gone. So the end of a record is a write like any
//! other: a renewal comes before it and prevents it, or after it and fails.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::{ErrorKind, Result};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::{Client, Condition, Last, Outcome, Put};
use crate::RACES_MAX;

/// How long the marker of a record that ran out stays. The server raises shorter TTLs to it, so it
/// is the shortest there is.
pub(crate) const MARKER_TTL: Duration = Duration::from_secs(1);
/// How long a record lives, in milliseconds.
pub(super) const TTL_MS: &str = "Coord-TTL";
/// Stands in the marker of a record that ran out.
pub(super) const EXPIRED: &str = "Coord-Expired";

/// How long the server's time is taken from what it said last.
const SAMPLE_AGE_MAX: Duration = Duration::from_secs(1);
/// By how much the end of a record may be too far away without a word: two clocks are read one after the
/// other.
const END_SLACK: Duration = Duration::from_secs(2);
/// After this, a marker counts as left behind.
const MARKER_AGE_MAX: Duration = Duration::from_secs(10);

/// How long the writer of a marker waits to remove it; markers that stay longer are found by others.
const MARKER_WAIT_MAX: Duration = Duration::from_secs(60);

/// The party that ends the records of a bucket.
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
    /// When the server was asked; none where only a message's time is known, which may be one at which
    /// the clock was fast.
    asked: Option<Instant>,
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
            known => {
                let is_near = |known: &Self| written - known.at(now) <= END_SLACK;
                let asked = known.filter(is_near).and_then(|known| known.asked);
                Self { server: written, heard: now, asked }
            }
        }
    }

    fn is_fresh(&self, now: Instant) -> bool {
        self.asked.is_some_and(|asked| now.saturating_duration_since(asked) <= SAMPLE_AGE_MAX)
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

/// When a record was written, by the server's clock since 1970, and how long it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(super) written: Duration,
    pub(super) ttl: Duration,
}

/// How it stands with a record that lives, by the server's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// How long it has still to live.
    pub(crate) left: Duration,
    /// How long ago it was written; none for one that was written while the clock was fast.
    pub(crate) written_ago: Option<Duration>,
    /// Whether its end is further away than it may live: it was written while the clock was fast.
    pub(crate) ends_too_late: bool,
}

impl Standing {
    /// Of a record that may live for `most`.
    fn of(life: Life, most: Duration, now: Duration) -> Self {
        let end = life.written.saturating_add(life.ttl);
        let ends_too_late = end > now.saturating_add(most).saturating_add(END_SLACK);
        Self {
            left: end.saturating_sub(now).min(most),
            written_ago: (!ends_too_late).then(|| now.saturating_sub(life.written)),
            ends_too_late,
        }
    }
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

    /// How it stands with a record that was read just now and may live for `most`; none where it does not
    /// end by itself, or the server does not tell the time.
    pub(super) async fn standing(
        &self,
        op: Op<'_>,
        last: &Last,
        most: Duration,
    ) -> Option<Standing> {
        let life = last.life?;
        let now = self.server_time(op).await.ok()?;
        let standing = Standing::of(life, most, now);
        if !standing.ends_too_late {
            return Some(standing);
        }
        // The clock may have moved since it was asked last.
        self.sample_time(op).await.ok()?;
        Some(Standing::of(life, most, self.sampled_time()?))
    }

    /// How it stands with a record that was read just now and may live for `most`, and at which sequence it
    /// stands then. A record that would end too late was written while the server's clock was fast. It is
    /// written once more, since nobody else may watch it. Where that fails, its end stays as it is.
    pub(crate) async fn observe(
        &self,
        op: Op<'_>,
        subject: &str,
        last: &Last,
        most: Duration,
    ) -> (Option<Standing>, u64) {
        let standing = self.standing(op, last, most).await;
        let mut sequence = last.sequence;
        if let (Some(Standing { ends_too_late: true, .. }), Some(value)) = (standing, &last.value) {
            match Box::pin(self.count_anew(op, subject, value.clone(), most, sequence)).await {
                Ok(Outcome::Done(at)) => sequence = at,
                // Another write came before this one; what was read was true.
                Ok(_) => {}
                // A reader that may not write leaves the end to others.
                Err(error) => tracing::debug!(%error, %subject, "its end stays too late"),
            }
        }
        (standing, sequence)
    }

    /// Writes a record once more that would end too late, so that its TTL counts from now. Its holder,
    /// should it live, takes that for a renewal of its own.
    pub(super) async fn count_anew(
        &self,
        op: Op<'_>,
        subject: &str,
        value: Bytes,
        ttl: Duration,
        sequence: u64,
    ) -> Result<Outcome> {
        tracing::warn!(%subject, "a record would end too late, the server's clock was fast: it counts anew");
        let put = Put { subject, value, ttl: Some(ttl), condition: Condition::At(sequence) };
        self.put_as_it_is(op.reading(), put).await
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
        match self.mark(op.reading(), &put, EXPIRED).await {
            Ok(Outcome::Done(marker)) => Ok(Some(marker)),
            Ok(_) => Ok(None),
            // A handle that may only read goes by the clock.
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
        let op = op.reading();
        let info = self.stream_info(op).await?.map_err(|refusal| refusal.error(op))?;
        let heard = Instant::now();
        self.is_same(op, &info)?;
        let Some(time) = info.ts else {
            let why = "the server does not say what time it is; use NATS 2.10.26 or newer";
            return Err(op.error(ErrorKind::Unsupported).message(why));
        };
        let sample = Sample { server: time_of(op, &time)?, heard, asked: Some(heard) };
        *self.lock_sample() = Some(sample);
        Ok(())
    }

    /// The server's time by what it said last.
    pub(super) fn sampled_time(&self) -> Option<Duration> {
        self.sampled(|_, _| true)
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
                // The next listing or watch tries again.
                tracing::debug!(%error, %subject, "a marker was not removed");
            }
        });
    }

    /// Removes a marker that was left behind.
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
        let sample = Sample { server: Duration::from_secs(100), heard, asked: Some(heard) };
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
        assert!(raised.is_fresh(later), "the server was asked, and the message is near");
        let first = Sample::raised(None, Duration::from_secs(7), later);
        assert_eq!(first.at(later + SAMPLE_AGE_MAX), Duration::from_secs(8));
        // A message that was written while the clock was fast ends nobody's record.
        let fast = Sample::raised(Some(sample), Duration::from_secs(28_900), later);
        assert!(!first.is_fresh(later) && !fast.is_fresh(later), "the server has to be asked");
    }

    #[test]
    fn an_end_that_is_too_far_away_is_seen() {
        let secs = Duration::from_secs;
        let (ttl, now) = (secs(10), secs(100_000));
        let of = |written: u64, lives: u64| {
            let standing =
                Standing::of(Life { written: secs(written), ttl: secs(lives) }, ttl, now);
            (standing.left.as_secs(), standing.written_ago.map(|ago| ago.as_secs()))
        };
        assert_eq!(of(99_997, 10), (7, Some(3)));
        // One that the server ends late, and one that was written since the clock was asked.
        assert_eq!(of(99_985, 10), (0, Some(15)));
        assert_eq!(of(100_001, 10), (10, Some(0)));
        // While the clock was eight hours fast, or for a TTL that is none of the record's.
        assert_eq!(of(128_800, 10), (10, None));
        assert_eq!(of(100_000, 28_800), (10, None));
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
