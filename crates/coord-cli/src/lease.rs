//! `coord lease …`: look at leases, hold one around a command, end one.

mod child;

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use coord::session::{LeaseGuard, TryAcquire};
use coord::{Coord, LeaseName, LeaseRecord, NodeId, Page, Release, Ttl};

use crate::args::{LeaseCommand, LeaseRunArgs, Output};
use crate::failure::{Failure, code};

pub(crate) async fn run(
    command: &LeaseCommand,
    backend: Option<&str>,
    output: Output,
) -> Result<ExitCode, Failure> {
    let url = crate::backend_or_memory(backend);
    let coord = coord::connect(url).await?;
    if coord.info().scheme == "memory" {
        let note = "memory:// lives in this process alone and excludes nobody else; see --backend";
        writeln!(io::stderr(), "coord: note: {note}")?;
    }
    let code = match command {
        LeaseCommand::Run(args) => run_command(&coord, args).await,
        LeaseCommand::Get { name } => get(&coord, name, output).await,
        LeaseCommand::List => list(&coord, output).await,
        LeaseCommand::Release { name, yes } => release(&coord, name, *yes).await,
    }?;
    coord.close().await?;
    Ok(code)
}

async fn get(coord: &Coord, name: &str, output: Output) -> Result<ExitCode, Failure> {
    let name = LeaseName::new(name)?;
    let record = coord.backend().lease().get(&name).await?;
    match (&record, output) {
        (Some(record), _) => print(record, output)?,
        (None, Output::Text) => writeln!(io::stdout(), "{name}: nobody holds it")?,
        (None, Output::Json) => {
            writeln!(io::stdout(), "{}", serde_json::json!({ "lease": name, "holder": null }))?;
        }
    }
    Ok(if record.is_some() { ExitCode::SUCCESS } else { ExitCode::from(code::DID_NOT_HOLD) })
}

async fn list(coord: &Coord, output: Output) -> Result<ExitCode, Failure> {
    let lease = coord.backend().lease();
    let mut page = Some(Page::first());
    let mut count = 0_usize;
    while let Some(this) = page {
        let listing = lease.list(this).await?;
        for record in &listing.items {
            print(record, output)?;
        }
        count += listing.items.len();
        page = listing.next;
    }
    if count == 0 && output == Output::Text {
        writeln!(io::stdout(), "nobody holds a lease")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(record: &LeaseRecord, output: Output) -> io::Result<()> {
    let LeaseRecord { lease, holder, term, ttl, origin, .. } = record;
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let mut out = io::stdout().lock();
    if output == Output::Json {
        let value = serde_json::json!({
            "lease": lease,
            "holder": holder,
            "term": term,
            "ttl_ms": millis(ttl.get()),
            "origin": origin,
            "may_expire_in_ms": record.may_expire_in.map(millis),
        });
        return writeln!(out, "{value}");
    }
    let left = record.may_expire_in.map_or(String::new(), |left| format!(", {left:.1?} left"));
    writeln!(out, "{lease}: {holder} in term {term}, ttl {ttl}{left}")
}

async fn release(coord: &Coord, name: &str, yes: bool) -> Result<ExitCode, Failure> {
    let name = LeaseName::new(name)?;
    let lease = coord.backend().lease();
    let Some(record) = lease.get(&name).await? else {
        writeln!(io::stdout(), "{name}: nobody holds it")?;
        return Ok(ExitCode::from(code::DID_NOT_HOLD));
    };
    let holder = record.holder.to_string();
    if !yes && !confirm(&format!("{name} is held by {holder}, which may be at work. End it?"))? {
        writeln!(io::stdout(), "{name}: left alone")?;
        return Ok(ExitCode::from(code::DID_NOT_HOLD));
    }
    match lease.release(&record.into_grant()).await? {
        Release::Released => {
            writeln!(io::stdout(), "{name}: the tenure of {holder} was ended")?;
            Ok(ExitCode::SUCCESS)
        }
        _ => {
            writeln!(io::stdout(), "{name}: {holder} does not hold it any more, nothing changed")?;
            Ok(ExitCode::from(code::DID_NOT_HOLD))
        }
    }
}

/// Asks on the terminal. Without one nobody can answer, and `--yes` is the way.
fn confirm(question: &str) -> Result<bool, Failure> {
    if !io::stdin().is_terminal() {
        return Err(Failure::input(format!(
            "{question} There is no terminal to ask on: pass --yes"
        )));
    }
    let mut out = io::stderr().lock();
    write!(out, "{question} [y/N] ")?;
    out.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

async fn run_command(coord: &Coord, args: &LeaseRunArgs) -> Result<ExitCode, Failure> {
    let coord = match &args.node {
        Some(node) => coord.clone().with_node(NodeId::new(node)?),
        None => coord.clone(),
    };
    let stop_budget = stop_budget(args)?;
    // The lease counts as lost early enough for the command to end before another can hold it.
    let margin = (args.ttl / 10).max(Duration::from_millis(100)) + stop_budget;
    let lease = coord.lease(&args.name)?.ttl(args.ttl).margin(margin);
    let guard: LeaseGuard = match args.wait {
        Some(Duration::ZERO) => match lease.try_acquire().await? {
            TryAcquire::Acquired(guard) => guard,
            TryAcquire::Held(record) => return Err(held(&args.name, Some(&record))),
            other => {
                return Err(Failure::new(code::STORE, format!("unexpected outcome {other:?}")));
            }
        },
        Some(wait) => match tokio::time::timeout(wait, lease.acquire()).await {
            Ok(guard) => guard?,
            Err(_) => return Err(held(&args.name, None)),
        },
        None => lease.acquire().await?,
    };
    child::supervise(guard, args, stop_budget).await
}

/// The stop budget, checked against the TTL: what is left of that has to hold two renewals.
fn stop_budget(args: &LeaseRunArgs) -> Result<Duration, Failure> {
    let ttl = Ttl::new(args.ttl)?.get();
    let Some(asked) = args.stop_budget else {
        return Ok((ttl / 5).min(Duration::from_secs(1)));
    };
    let most = ttl * 3 / 10;
    if asked < most {
        return Ok(asked);
    }
    let (asked, ttl, most) = (
        humantime::format_duration(asked),
        humantime::format_duration(ttl),
        humantime::format_duration(most),
    );
    Err(Failure::input(format!(
        "--stop-budget {asked} does not fit into --ttl {ttl}: it must be below three tenths of it, {most}"
    )))
}

fn held(name: &str, record: Option<&LeaseRecord>) -> Failure {
    let by = record.map_or("another".to_owned(), |record| record.holder.to_string());
    Failure::new(code::DID_NOT_HOLD, format!("{name} is held by {by}; the command was not started"))
}
