//! `coord check`: what is wrong with the store, in words.

use std::io::{self, Write as _};
use std::process::ExitCode;

use coord::{BackendInfo, Health, HealthPoint, HealthStatus};

use crate::args::Output;
use crate::failure::{Failure, code};

/// Checks the store; success if no point is bad.
pub(crate) async fn run(backend: Option<&str>, output: Output) -> Result<ExitCode, Failure> {
    let coord = coord::connect(crate::backend_or_memory(backend)).await?;
    let health = coord.check().await?;
    match output {
        Output::Text => print(coord.info(), &health)?,
        Output::Json => writeln!(io::stdout(), "{}", json(coord.info(), &health))?,
    }
    coord.close().await?;
    let bad = health.status() == HealthStatus::Bad;
    Ok(if bad { ExitCode::from(code::DID_NOT_HOLD) } else { ExitCode::SUCCESS })
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

fn json(info: &BackendInfo, health: &Health) -> serde_json::Value {
    let points: Vec<_> = health
        .points
        .iter()
        .map(|HealthPoint { name, status, detail, .. }| {
            serde_json::json!({ "name": name, "status": status.to_string(), "detail": detail })
        })
        .collect();
    let promises: serde_json::Map<_, _> = info
        .guarantees
        .in_words()
        .into_iter()
        .map(|(about, promise)| (about.to_owned(), promise.into()))
        .collect();
    serde_json::json!({
        "target": info.target,
        "status": health.status().to_string(),
        "points": points,
        "promises": promises,
        "round_trip_us": health.round_trip.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
    })
}
