//! `coord check`: what is wrong with the store, in words.

use std::io::{self, Write as _};
use std::process::ExitCode;

use coord::{Health, HealthPoint, HealthStatus};

use crate::args::Output;
use crate::failure::{Failure, code};

/// Checks the store; success if no point is bad.
pub(crate) async fn run(backend: Option<&str>, output: Output) -> Result<ExitCode, Failure> {
    let coord = coord::connect(crate::backend_or_memory(backend)).await?;
    let health = coord.check().await?;
    match output {
        Output::Text => print(&coord.info().target, &health)?,
        Output::Json => writeln!(io::stdout(), "{}", json(&coord.info().target, &health))?,
    }
    coord.close().await?;
    let bad = health.status() == HealthStatus::Bad;
    Ok(if bad { ExitCode::from(code::DID_NOT_HOLD) } else { ExitCode::SUCCESS })
}

fn print(target: &str, health: &Health) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{target}: {}", health.status())?;
    for HealthPoint { name, status, detail, .. } in &health.points {
        writeln!(out, "  {status:<8} {name}: {detail}")?;
    }
    Ok(())
}

fn json(target: &str, health: &Health) -> serde_json::Value {
    let points: Vec<_> = health
        .points
        .iter()
        .map(|HealthPoint { name, status, detail, .. }| {
            serde_json::json!({ "name": name, "status": status.to_string(), "detail": detail })
        })
        .collect();
    serde_json::json!({
        "target": target,
        "status": health.status().to_string(),
        "points": points,
        "round_trip_us": health.round_trip.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
    })
}
