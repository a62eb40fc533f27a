//! What the server is and is set to, in words an operator can act on.

use coord_core::kit::Op;
use coord_core::{
    Effect, Error, ErrorKind, Health, HealthPoint, HealthStatus, Incarnation, Result,
};
use tokio::time::Instant;

use crate::Handle;
use crate::client::{Shape, Version, command};
use crate::keys::Kind;
use crate::scripts::CHECK;

/// The Redis that has all that is used here.
pub(crate) const VERSION_MIN: (u32, u32) = (6, 2);

/// A version that can't be read is taken for a newer one.
pub(crate) fn is_old(version: &str) -> bool {
    let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
    match (parts.next(), parts.next()) {
        (Some(major), Some(minor)) => (major, minor) < VERSION_MIN,
        _ => false,
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.server, self.version)
    }
}

/// The settings that decide what survives. None for one that the server does not tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Settings {
    appendonly: Option<String>,
    appendfsync: Option<String>,
    maxmemory: Option<String>,
    maxmemory_policy: Option<String>,
    min_replicas_to_write: Option<String>,
    replicas: Option<u16>,
}

impl Handle {
    /// Logs, once, what keeps the server from keeping what it has acknowledged.
    pub(crate) async fn warn(&self, op: Op<'_>) -> Result<()> {
        let settings = self.settings(op).await?;
        let points = judge(&settings, self.client.min_replicas());
        let warnings = points.iter().filter(|point| point.status != HealthStatus::Good);
        let warnings: Vec<&str> = warnings.map(|point| point.detail.as_str()).collect();
        if !warnings.is_empty() {
            let (target, warnings) = (&self.info.target, warnings.join("; "));
            tracing::warn!(target, warnings, "the server may lose what it has acknowledged");
        }
        Ok(())
    }

    pub(crate) async fn check(&self, health: &mut Health) -> Result<()> {
        use HealthStatus::{Bad, Good, Warning};
        let op = Op::read("check", &self.info.target);
        let (stored, version, shape) = match self.ping(op).await {
            Ok((stored, (version, shape))) => (stored, version, shape),
            Err(error) if error.kind() == ErrorKind::Closed => return Err(error),
            Err(error) => {
                health.add("reachable", Bad, said(&error));
                return Ok(());
            }
        };
        let how = match shape {
            Shape::Single => "a master answers",
            Shape::Sentinel => "the master that the sentinels name answers",
            Shape::Cluster => "the master of the cluster's hash slot answers",
        };
        health.add("reachable", Good, how);
        health.points.extend(judge_identity(stored.as_deref(), self.client.identity()));
        let (major, minor) = VERSION_MIN;
        match version {
            Some(found) if is_old(&found.version) => {
                health.add("version", Bad, format!("{found}; {major}.{minor} is needed"));
            }
            Some(found) => health.add("version", Good, found.to_string()),
            None => {
                let why = format!("the server does not tell it; {major}.{minor} is needed");
                health.add("version", Warning, why);
            }
        }
        match self.settings(op).await {
            Ok(settings) => {
                health.points.extend(judge(&settings, self.client.min_replicas()));
            }
            Err(error) => health.add("configuration", Warning, said(&error)),
        }
        let words = "best effort: the server answers before its replicas have a write; a failover \
                     may lose it, and two may then hold a lease until its ttl";
        health.add("guarantee", Good, words);
        self.check_round_trip(op, health).await;
        Ok(())
    }

    /// The identity that is stored, if that may be read, and what the server says of itself.
    async fn ping(&self, op: Op<'_>) -> Result<(Option<String>, (Option<Version>, Shape))> {
        let get = command("GET", [self.client.keys().of(Kind::Identity)]);
        let stored = match self.client.send(op, Effect::None, get).await {
            Ok(reply) => Some(reply.text(0).to_owned()),
            // That it is refused is told with the permissions.
            Err(error) if error.kind() == ErrorKind::Denied => None,
            Err(error) => return Err(error),
        };
        Ok((stored, self.client.server(op).await?))
    }

    async fn settings(&self, op: Op<'_>) -> Result<Settings> {
        let mut settings =
            Settings { appendonly: self.setting(op, "appendonly").await?, ..Settings::default() };
        // Who may read one may read all.
        if settings.appendonly.is_some() {
            settings.appendfsync = self.setting(op, "appendfsync").await?;
            settings.maxmemory = self.setting(op, "maxmemory").await?;
            settings.maxmemory_policy = self.setting(op, "maxmemory-policy").await?;
            settings.min_replicas_to_write = self.setting(op, "min-replicas-to-write").await?;
        }
        if let Some(reply) = self.client.ask(op, command("INFO", ["replication"])).await? {
            let count = |line: &str| line.trim().strip_prefix("connected_slaves:")?.parse().ok();
            settings.replicas = reply.text(0).lines().find_map(count);
        }
        Ok(settings)
    }

    async fn setting(&self, op: Op<'_>, name: &str) -> Result<Option<String>> {
        let reply = self.client.ask(op, command("CONFIG", ["GET", name])).await?;
        Ok(reply.filter(|reply| reply.items().len() == 2).map(|reply| reply.text(1).to_owned()))
    }

    /// Tries every command that is used, on keys of the cluster's own.
    async fn check_round_trip(&self, op: Op<'_>, health: &mut Health) {
        use HealthStatus::{Bad, Good};
        let started = Instant::now();
        let tried = self.probe(op).await;
        let took = started.elapsed();
        let root = self.client.keys().root();
        match tried {
            Ok(refused) if refused.is_empty() => {
                health.add("permissions", Good, format!("may do all that is needed on {root}*"));
                health.add(
                    "round trip",
                    Good,
                    format!("made a write and read it back in {took:?}"),
                );
                health.round_trip = Some(took);
            }
            Ok(refused) => {
                let commands = refused.join("; ");
                let why = format!("refused on {root}*: {commands}; see docs/backends/redis.md");
                health.add("permissions", Bad, why);
            }
            Err(error) if error.kind() == ErrorKind::Denied => {
                let why = format!("{}; see docs/backends/redis.md", said(&error));
                health.add("permissions", Bad, why);
            }
            Err(error) => health.add("round trip", Bad, said(&error)),
        }
    }

    /// The commands that were refused, and why.
    async fn probe(&self, op: Op<'_>) -> Result<Vec<String>> {
        let id = Incarnation::random();
        let key = |kind: &str| self.client.keys().probe(&format!("{id}:{kind}"));
        let keys = ["text", "hash", "sorted", "stream"].map(key);
        let reply = self.client.run_on(op, &CHECK, &keys, &[]).await?;
        let mut refused: Vec<String> = (1..reply.items().len())
            .step_by(2)
            .map(|place| format!("{} ({})", reply.text(place), reply.text(place + 1)))
            .collect();
        if refused.is_empty() && reply.outcome() != "read" {
            let why = "a write was acknowledged and could not be read back";
            return Err(op.error(ErrorKind::Internal).message(why));
        }
        let [_, hash, _, stream] = &keys;
        let direct: [(&str, &[&str]); 4] = [
            ("HMGET", &[hash, "field"]),
            ("HKEYS", &[hash]),
            ("XREAD", &["COUNT", "1", "STREAMS", stream, "0-0"]),
            ("XRANGE", &[stream, "-", "+", "COUNT", "1"]),
        ];
        for (name, arguments) in direct {
            match self.client.send_any(op, Effect::None, command(name, arguments)).await {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Denied => {
                    refused.push(format!("{name} ({})", error.message_text()));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(refused)
    }
}

/// What it means if the store says of itself that it is another one than when the backend was opened.
fn judge_identity(stored: Option<&str>, opened: &str) -> Option<HealthPoint> {
    let mut health = Health::default();
    match stored {
        Some("") => {
            let why = "the server was emptied: leases, nodes and maps are gone. It is given its identity \
                       back by the first request";
            health.add("identity", HealthStatus::Warning, why);
        }
        Some(stored) if stored != opened => {
            let why = format!(
                "the server was emptied and is another store now ({stored}) than when the backend was \
                 opened ({opened}): restart the service"
            );
            health.add("identity", HealthStatus::Bad, why);
        }
        _ => {}
    }
    health.points.pop()
}

/// What the settings mean for what was acknowledged.
fn judge(settings: &Settings, min_replicas: u16) -> Vec<HealthPoint> {
    use HealthStatus::{Bad, Good, Warning};
    let mut health = Health::default();
    let mut add = |status, why: String| health.add("configuration", status, why);
    match (settings.appendonly.as_deref(), settings.appendfsync.as_deref()) {
        (Some("yes"), Some("always")) => {
            add(Good, "appendonly yes, appendfsync always: a restart loses nothing".into());
        }
        (Some("yes"), fsync) => {
            let fsync = fsync.unwrap_or("unknown");
            let why = format!(
                "appendfsync {fsync}: a crash of the machine loses what came last, leases and maps; \
                 set it to always"
            );
            add(Warning, why);
        }
        (Some(_), _) => {
            let why = "appendonly no: a restart loses leases, nodes and maps since the last \
                       snapshot; set appendonly yes and appendfsync always";
            add(Warning, why.into());
        }
        (None, _) => {
            let why = "appendonly unknown: the server does not tell its settings (CONFIG GET); \
                       see to it that it persists";
            add(Warning, why.into());
        }
    }
    if let Some(policy) = settings.maxmemory_policy.as_deref()
        && settings.maxmemory.as_deref() != Some("0")
        && policy != "noeviction"
    {
        // Our keys have no expiry of their own, so the volatile policies leave them alone.
        if policy.starts_with("allkeys") {
            let why = format!(
                "maxmemory-policy {policy}: the server may drop leases, terms and maps; set \
                 noeviction"
            );
            add(Bad, why);
        } else {
            add(Good, format!("maxmemory-policy {policy} leaves the cluster's keys alone"));
        }
    }
    match settings.replicas {
        None => add(Warning, "how many replicas there are is unknown (INFO replication)".into()),
        Some(found) if found < min_replicas => {
            let why = format!(
                "{found} replicas are connected, min_replicas={min_replicas}: nothing can be granted"
            );
            add(Bad, why);
        }
        Some(0) => {
            let why = "no replica: while the server is away so is the store, and its disk is the \
                       only one";
            add(Warning, why.into());
        }
        Some(found) if settings.min_replicas_to_write.as_deref() == Some("0") => {
            let why = format!(
                "{found} replicas, min-replicas-to-write 0: a master that was cut off goes on \
                 granting; set it to 1"
            );
            add(Warning, why);
        }
        Some(found) => add(Good, format!("{found} replicas are connected")),
    }
    health.points
}

/// An error as a line for an operator: what it says, and the innermost cause.
fn said(error: &Error) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |&error| error.source());
    match causes.last() {
        Some(cause) if !error.message_text().contains(&cause.to_string()) => {
            format!("{} ({cause})", error.message_text())
        }
        _ => error.message_text().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        for (version, old) in [
            ("6.0.16", true),
            ("5.0.14", true),
            ("6.2.0", false),
            ("6.2.14", false),
            ("7.0.15", false),
            ("10.0.0", false),
        ] {
            assert_eq!(is_old(version), old, "{version}");
        }
        assert!(!is_old("unknown"));
    }

    #[test]
    fn a_store_that_is_another_one_is_said_to_be() {
        for (stored, status) in [
            (None, None),
            (Some("a"), None),
            (Some(""), Some(HealthStatus::Warning)),
            (Some("b"), Some(HealthStatus::Bad)),
        ] {
            let found = judge_identity(stored, "a").map(|point| point.status);
            assert_eq!(found, status, "{stored:?}");
        }
    }

    fn settings(pairs: [&str; 5], replicas: Option<u16>) -> Settings {
        let [appendonly, appendfsync, maxmemory, maxmemory_policy, min_replicas_to_write] =
            pairs.map(|text| Some(text.to_owned()));
        Settings {
            appendonly,
            appendfsync,
            maxmemory,
            maxmemory_policy,
            min_replicas_to_write,
            replicas,
        }
    }

    #[test]
    fn what_may_lose_data_is_said() {
        use HealthStatus::{Bad, Good, Warning};
        let safe = ["yes", "always", "0", "noeviction", "1"];
        let with = |place: usize, value: &'static str| {
            let mut changed = safe;
            changed[place] = value;
            changed
        };
        let limited = |policy| ["yes", "always", "100", policy, "1"];
        for (settings, min_replicas, status, part) in [
            (settings(safe, Some(1)), 1, Good, "appendfsync always"),
            (settings(with(0, "no"), Some(1)), 0, Warning, "appendonly no"),
            (settings(with(1, "everysec"), Some(1)), 0, Warning, "appendfsync everysec"),
            (settings(limited("allkeys-lru"), Some(1)), 0, Bad, "allkeys-lru"),
            (settings(limited("volatile-lru"), Some(1)), 0, Good, "volatile-lru"),
            (settings(with(3, "allkeys-lru"), Some(1)), 0, Good, "1 replicas"),
            (settings(safe, Some(0)), 0, Warning, "no replica"),
            (settings(with(4, "0"), Some(2)), 0, Warning, "min-replicas-to-write 0"),
            (settings(safe, Some(1)), 2, Bad, "min_replicas=2"),
            (Settings::default(), 0, Warning, "appendonly unknown"),
        ] {
            let points = judge(&settings, min_replicas);
            let worst = points.iter().map(|point| point.status).max();
            assert_eq!(worst, Some(status), "{points:?}");
            assert!(points.iter().any(|point| point.detail.contains(part)), "{part}: {points:?}");
        }
    }
}
