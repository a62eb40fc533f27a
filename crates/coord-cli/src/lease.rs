//! `coord lease …`: look at leases, hold one around a command, end one.

mod child;
mod machine;
mod run;

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use coord::{Coord, LeaseName, LeaseRecord, Page, Release};

use crate::args::{LeaseCommand, Output};
use crate::failure::{Failure, code};

pub(crate) async fn run(
    command: &LeaseCommand,
    url: &str,
    output: Output,
) -> Result<ExitCode, Failure> {
    if let LeaseCommand::Run(args) = command {
        return run::run(args, url).await;
    }
    let coord = crate::connect(url).await?;
    if coord.info().scheme == "memory" {
        say_memory()?;
    }
    let code = match command {
        LeaseCommand::Get { name } => get(&coord, name, output).await?,
        LeaseCommand::Release { name, yes } => release(&coord, name, *yes).await?,
        _ => list(&coord, output).await?,
    };
    coord.close().await?;
    Ok(code)
}

fn say_memory() -> io::Result<()> {
    let note = "memory:// lives in this process alone and excludes nobody else; see --backend";
    writeln!(io::stderr(), "coord: note: {note}")
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
            "renewed_ago_ms": record.renewed_ago.map(millis),
        });
        return writeln!(out, "{value}");
    }
    let left = left(record);
    writeln!(out, "{lease}: {holder} in term {term}, ttl {ttl}{left}")
}

/// How long a lease has still to live, as far as that is known.
fn left(record: &LeaseRecord) -> String {
    match (record.renewed_ago, record.may_expire_in) {
        // Where only observers end a lease, a command that just looks can't know the time left.
        (Some(ago), _) if record.seems_abandoned() => {
            format!(", last renewed {} s ago, may be taken over", ago.as_secs())
        }
        (Some(ago), Some(left)) => format!(", renewed {} s ago, {left:.1?} left", ago.as_secs()),
        (None, Some(left)) => format!(", {left:.1?} left"),
        _ => String::new(),
    }
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

/// Asks on the terminal. Without a terminal there is no answer, and `--yes` is the way.
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

#[cfg(test)]
mod tests {
    use coord::{AttemptId, Grant, Holder, Incarnation, NodeId, Origin, Revision, Term, Ttl};

    use super::*;

    #[test]
    fn what_the_store_tells_of_a_lease_is_shown() {
        let holder = Holder::new(
            NodeId::new("node-1").expect("a name"),
            Incarnation::random(),
            AttemptId::random(),
        );
        let grant = Grant::new(
            LeaseName::new("jobs").expect("a name"),
            holder,
            Term::from_u64(7),
            Ttl::from_secs(10).expect("a ttl"),
            Origin::new("memory:1/orders"),
            Revision::from_u64(1),
        );
        let secs = |seconds: u64| Some(Duration::from_secs(seconds));
        for (ago, left_over, text) in [
            (None, None, ""),
            (None, secs(7), ", 7.0s left"),
            (secs(3), secs(7), ", renewed 3 s ago, 7.0s left"),
            (secs(20), secs(5), ", last renewed 20 s ago, may be taken over"),
        ] {
            let record = LeaseRecord::new(grant.clone());
            let record = record.with_may_expire_in(left_over).with_renewed_ago(ago);
            assert_eq!(left(&record), text);
        }
    }
}
