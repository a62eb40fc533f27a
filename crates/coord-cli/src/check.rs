//! `coord check`: what is wrong with the store, in words.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use coord::{
    BackendInfo, BackendUrl, Consistency, ErrorKind, ExpiryClock, ExpiryJudge, Guarantees, Health,
    HealthPoint, HealthStatus,
};
use serde_json::{Value, json};

use crate::args::{CheckArgs, Output};
use crate::failure::{self, Failure, code};

/// Checks the store; success if no point is bad, or with `--strict` if all are good and the store keeps
/// what it acknowledges.
pub(crate) async fn run(args: &CheckArgs, url: &str, output: Output) -> Result<ExitCode, Failure> {
    let coord = match crate::connect(url).await {
        Ok(coord) => coord,
        Err(error) => {
            // A program reads the answer to its question in the same form; the line is for people.
            if output == Output::Json && error.kind() != ErrorKind::Invalid {
                writeln!(io::stdout(), "{}", unreachable(url, &error))?;
            }
            return Err(error.into());
        }
    };
    let mut health = coord.check().await?;
    let info = coord.info();
    if args.strict && info.guarantees.consistency == Consistency::BestEffort {
        let why = "a failover of this store may lose acknowledged writes";
        health.add("consistency", HealthStatus::Warning, why);
    }
    match output {
        Output::Text => print(info, &health)?,
        Output::Json => writeln!(io::stdout(), "{}", json(info, &health))?,
    }
    coord.close().await?;
    let most = if args.strict { HealthStatus::Good } else { HealthStatus::Warning };
    let holds = health.status() <= most;
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::from(code::DID_NOT_HOLD) })
}

fn print(info: &BackendInfo, health: &Health) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}: {}", info.target, health.status())?;
    for HealthPoint { name, status, detail, .. } in &health.points {
        writeln!(out, "  {status:<8} {name}: {detail}")?;
    }
    for (about, promise) in info.guarantees.in_words() {
        writeln!(out, "  {:<8} {about}: {promise}", "promise")?;
    }
    Ok(())
}

fn json(info: &BackendInfo, health: &Health) -> Value {
    json!({
        "target": info.target,
        "status": health.status().to_string(),
        "points": points(health),
        "promises": promises(&info.guarantees),
        "round_trip_us": health.round_trip.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
    })
}

/// The same where the store can't be opened, so that it promises nothing.
fn unreachable(url: &str, error: &coord::Error) -> Value {
    let mut health = Health::default();
    health.add("reachable", HealthStatus::Bad, failure::shown(&error.to_string()));
    json!({
        "target": url.parse::<BackendUrl>().map(|url| url.to_string()).ok(),
        "status": health.status().to_string(),
        "points": points(&health),
        "promises": null,
        "round_trip_us": null,
    })
}

fn points(health: &Health) -> Vec<Value> {
    let point = |point: &HealthPoint| json!({ "name": point.name, "status": point.status.to_string(), "detail": point.detail });
    health.points.iter().map(point).collect()
}

/// The promises by the names that `Guarantees` has for them.
fn promises(guarantees: &Guarantees) -> Value {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let consistency = match guarantees.consistency {
        Consistency::Linearizable => "linearizable",
        _ => "best_effort",
    };
    let judge = match guarantees.expiry_judge {
        ExpiryJudge::Store => "store",
        _ => "observers",
    };
    let clock = match guarantees.expiry_clock {
        ExpiryClock::Monotonic => "monotonic",
        ExpiryClock::ServerWall => "server_wall",
        _ => "observer",
    };
    json!({
        "consistency": consistency,
        "expiry_judge": judge,
        "expiry_clock": clock,
        "heartbeats_show": guarantees.heartbeats_show,
        "ttl_step_ms": millis(guarantees.ttl_step),
        "ttl_min_ms": millis(guarantees.ttl_min.get()),
        "ttl_max_ms": millis(guarantees.ttl_max.get()),
        "terms_survive_loss": guarantees.terms_survive_loss,
        "publish_checks_lease": guarantees.publish_checks_lease,
        "value_bytes_max": guarantees.value_bytes_max,
        "nodes_max": guarantees.nodes_max,
    })
}
