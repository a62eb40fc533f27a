//! A member of a cluster, as a process of its own: this program, started again.

use std::io::{self, BufRead as _, Write as _};
use std::net::SocketAddr;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use coord::cluster::{Cluster, EventOrLag, Handoff, Host, Settings, Stores, Table};
use coord::{
    Address, Backend, Fence, Moment, NodeId, NodeInfo, Placement, Publish, Replace, ShardCount,
    ShardMap, TableName,
};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::host::Shards;
use super::recording::{Recording, now};
use super::said::{Answer, Ask, Line, Outcome, Question, Said, View};
use super::service::Service;

/// Holds the description of the member that this process is to be.
const MEMBER: &str = "COORD_SCENARIO_MEMBER";
/// How often it looks whether it leads.
const LOOK: Duration = Duration::from_millis(20);
/// How often it says so.
const SAY: Duration = Duration::from_millis(200);
/// How long a write goes on to be tried while the store does not answer.
const WRITE_LIMIT: Duration = Duration::from_secs(20);
const ASKS_MAX: usize = 16;
/// How long it goes on to try to start while the store does not answer.
const STARTING_LIMIT: Duration = Duration::from_secs(60);

/// What a member is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) url: String,
    /// Where it looks for its leases, if elsewhere.
    pub(crate) leases: Option<String>,
    pub(crate) node: String,
    pub(crate) settings: Settings,
    pub(crate) replace: bool,
    pub(crate) shards: ShardCount,
    pub(crate) handoff: Handoff,
    /// The service that it runs besides, if any.
    pub(crate) service: Option<ServiceAt>,
}

/// A service, and where it keeps what it has done.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct ServiceAt {
    pub(crate) ledger: SocketAddr,
}

/// The table of all scenarios.
pub(crate) fn table() -> TableName {
    TableName::new("orders").expect("a name")
}

/// The command that starts this member.
pub(crate) fn command(description: &Description) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(MEMBER, serde_json::to_string(description)?);
    Ok(command)
}

/// Runs the member that this process was started to be, if it was.
pub(crate) fn run() -> Option<ExitCode> {
    let text = std::env::var(MEMBER).ok()?;
    let description: Description = serde_json::from_str(&text).expect("a description");
    let filter = std::env::var("COORD_LOG").unwrap_or_else(|_| "info".to_owned());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let over = runtime.expect("a runtime").block_on(member(description));
    let failed = over.is_err();
    say(Said::Over(over.err().unwrap_or_default()));
    Some(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

pub(crate) fn say(said: Said) {
    say_at(now(), said);
}

pub(crate) fn say_at(at: Moment, said: Said) {
    write(Line::new(at, said));
}

/// In one piece: others append to the same file.
fn write(line: Line) {
    let mut text = serde_json::to_string(&line).expect("a line");
    text.push('\n');
    io::stdout().lock().write_all(text.as_bytes()).expect("the log takes it");
}

async fn member(description: Description) -> Result<(), String> {
    let Description { node, replace, .. } = &description;
    let text = |error: coord::Error| error.to_string();
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(|error| error.to_string())?;
    let address = match description.service {
        Some(_) => listener.local_addr().map_err(|error| error.to_string())?.to_string(),
        None => "localhost:4000".to_owned(),
    };
    let address = Address::new(address).map_err(text)?;
    let info = NodeInfo::new(NodeId::new(node).map_err(text)?, address);
    let replace = if *replace { Replace::Yes } else { Replace::No };
    let shards = Arc::<Shards>::default();
    let service =
        description.service.map(|at| Arc::new(Service::new(Arc::clone(&shards), at.ledger)));
    let host: Arc<dyn Host> = match &service {
        Some(service) => Arc::clone(service) as _,
        None => Arc::clone(&shards) as _,
    };
    let began = now();
    let (cluster, backend) = loop {
        match start(&description, info.clone(), replace, &host).await {
            Ok(started) => break started,
            // As its supervisor would.
            Err(error) if error.is_retryable() && now().since(began) < STARTING_LIMIT => {
                tokio::time::sleep(LOOK).await;
            }
            Err(error) => return Err(error.to_string()),
        }
    };
    say(Said::Started);
    let asks = asks();
    tokio::select! {
        () = tell_events(&cluster) => Ok(()),
        () = tell_views(&cluster) => Ok(()),
        () = look(&cluster, &backend) => Ok(()),
        () = shards.act() => Ok(()),
        () = serve(service, listener) => Ok(()),
        left = answer(&cluster, &backend, asks) => left.map_err(text),
    }
}

async fn start(
    description: &Description,
    info: NodeInfo,
    replace: Replace,
    host: &Arc<dyn Host>,
) -> coord::Result<(Cluster, Recording)> {
    let backend = recorded(&description.url).await?;
    let mut stores = Stores::new(&backend);
    if let Some(url) = &description.leases {
        stores = stores.with_lease(&recorded(url).await?);
    }
    let builder = Cluster::builder(stores, info)
        .settings(description.settings.clone())
        .replace(replace)
        .table(
            Table::new(table())
                .shards(description.shards)
                .handoff(description.handoff)
                .host(Arc::clone(host)),
        );
    Ok((builder.start().await?, backend))
}

async fn recorded(url: &str) -> coord::Result<Recording> {
    let coord = coord::connect(url).await?;
    Ok(Recording::new(Arc::clone(coord.backend()), write))
}

async fn serve(service: Option<Arc<Service>>, listener: TcpListener) {
    match service {
        Some(service) => service.serve(listener).await,
        None => std::future::pending().await,
    }
}

async fn tell_events(cluster: &Cluster) {
    let mut events = cluster.events();
    loop {
        match events.next().await {
            Some(EventOrLag::Event(event)) => say(Said::Event((*event).clone())),
            Some(EventOrLag::Missed(missed)) => say(Said::Missed(missed)),
            // The end is told by whoever brought it about.
            _ => return std::future::pending().await,
        }
    }
}

async fn tell_views(cluster: &Cluster) {
    let mut last = None;
    loop {
        let status = cluster.wait_for(|status| last.as_ref() != Some(&View::from(status))).await;
        let Ok(status) = status else { return std::future::pending().await };
        let view = View::from(&*status);
        say(Said::View(view.clone()));
        last = Some(view);
    }
}

/// Looks again and again whether this node says that it leads, and notices when it stops.
async fn look(cluster: &Cluster, backend: &Recording) {
    let mut said = None;
    loop {
        // Before the look: what it shows was true at that moment or later, and not sooner.
        let at = now();
        let fence = cluster.fence();
        for other in backend.told().going_on() {
            if fence.as_ref() != Some(&other) && said.as_ref().is_some_and(|(f, _)| *f == other) {
                backend.told().ended(&other, "it leads no more");
            }
        }
        if let Some(fence) = fence {
            let again = said.as_ref().is_none_or(|(f, when)| *f != fence || at.since(*when) >= SAY);
            if again {
                backend.told().say(at, Said::Leads(fence.clone()));
                said = Some((fence, at));
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// What is asked on the standard input, which a thread of its own reads: it ends with the process.
fn asks() -> mpsc::Receiver<Ask> {
    let (sender, receiver) = mpsc::channel(ASKS_MAX);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            let ask = serde_json::from_str(&line).expect("a question");
            if sender.blocking_send(ask).is_err() {
                return;
            }
        }
    });
    receiver
}

async fn answer(
    cluster: &Cluster,
    backend: &Recording,
    mut asks: mpsc::Receiver<Ask>,
) -> coord::Result<()> {
    let mut prepared = None;
    while let Some(Ask { number, question }) = asks.recv().await {
        let answer = match question {
            Question::Prepare => match prepare(cluster) {
                Some((fence, map)) => {
                    prepared = Some((fence.clone(), map));
                    Answer::Prepared(fence)
                }
                None => Answer::Failed("it does not lead".to_owned()),
            },
            Question::Write => match prepared.take() {
                Some((fence, map)) => Answer::Wrote(write_map(backend, &fence, &map).await),
                None => Answer::Failed("nothing is prepared".to_owned()),
            },
            Question::Wall => Answer::Wall(wall()),
            Question::Command(command) => match cluster.request(command).await {
                Ok(reply) => Answer::Replied(reply),
                Err(error) => Answer::Failed(error.to_string()),
            },
            Question::Leave => {
                cluster.leave().await?;
                say(Said::Answered { number, answer: Answer::Left });
                return Ok(());
            }
        };
        say(Said::Answered { number, answer });
    }
    std::future::pending().await
}

/// A next map with nothing changed but its annex.
fn prepare(cluster: &Cluster) -> Option<(Fence, Arc<ShardMap>)> {
    let (fence, map) = (cluster.fence()?, cluster.map(&table())?);
    let mut edit = map.edit();
    edit.set_annex(b"{\"scenario\":1}".as_slice().into()).ok()?;
    Some((fence.clone(), Arc::new(edit.finish(fence)?)))
}

async fn write_map(backend: &Recording, fence: &Fence, map: &Arc<ShardMap>) -> Outcome {
    let (table, placement): (_, Arc<dyn Placement>) = (table(), backend.placement());
    let expected = coord::Version::new(map.version().get() - 1);
    let deadline = tokio::time::Instant::now() + WRITE_LIMIT;
    loop {
        let call = placement.publish(&table, fence, expected, map);
        match tokio::time::timeout(Duration::from_secs(2), call).await {
            Ok(Ok(Publish::Published(_))) => return Outcome::Done,
            Ok(Ok(Publish::Conflict { .. })) => return Outcome::Conflict,
            Ok(Ok(Publish::Fenced(_))) => return Outcome::Fenced,
            Ok(Ok(other)) => return Outcome::Other(format!("{other:?}")),
            Ok(Err(error)) if tokio::time::Instant::now() > deadline => {
                return Outcome::Failed(error.to_string());
            }
            Ok(Err(_)) | Err(_) => {}
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[expect(clippy::disallowed_methods, reason = "the scenario moves this very clock")]
fn wall() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
