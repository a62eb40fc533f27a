//! What a scenario works with: a store, members as processes of their own, patience, and the history.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::ChildStdin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord::cluster::{Event, EventKind, Handoff, Settings};
use coord::{
    AttemptId, Backend, ClusterName, Consistency, Fence, Moment, PlacementEvent, ShardCount,
    ShardId, ShardMap, Ttl, Watched, Watcher,
};
use coord_conformance::history::{Entry, What};
use coord_integration::Missing;
use coord_integration::faults::{Clock, Proxy};
use coord_integration::servers::Process;
use libtest_mimic::{Failed, Trial};
use tempfile::TempDir;
use tokio_util::task::AbortOnDropHandle;

use super::backends::{Servers, Store};
use super::checks::{self, Told};
use super::figures::note;
use super::member::{Description, ServiceAt, command, table};
use super::recording::{Recording, now};
use super::said::{Answer, Ask, Line, Outcome, Question, Said, View};

pub(crate) type Done<T = ()> = Result<T, Failed>;

/// For what has to come about, however busy the machine is; no promise is measured by it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// What a promise may be late by on a machine with two cores that do other things besides.
pub(crate) const SLACK: Duration = Duration::from_millis(1_500);
const POLL: Duration = Duration::from_millis(10);
/// How many of a member's last lines are shown when a scenario fails.
const SHOWN: usize = 16;
const SHOWN_CHARS: usize = 240;

/// TTLs as short as a busy machine can hold.
pub(crate) fn quick(_: &Store) -> Settings {
    let mut settings = Settings::default();
    settings.leader_ttl = Duration::from_secs(4);
    settings.leader_renew = Duration::from_millis(1_200);
    settings.leader_retry = Duration::from_millis(800);
    settings.heartbeat = Duration::from_millis(1_200);
    settings.node_ttl = Duration::from_secs(4);
    settings.request_timeout = Duration::from_secs(1);
    settings.rebalance_delay = Duration::from_millis(300);
    settings
}

/// Twice as long, where nothing waits for their end.
pub(crate) fn calm(store: &Store) -> Settings {
    let mut settings = quick(store);
    for time in [
        &mut settings.leader_ttl,
        &mut settings.leader_renew,
        &mut settings.leader_retry,
        &mut settings.heartbeat,
        &mut settings.node_ttl,
        &mut settings.request_timeout,
    ] {
        *time *= 2;
    }
    settings
}

/// One cluster on a store.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) store: Store,
    pub(crate) server: Servers,
    pub(crate) cluster: ClusterName,
    pub(crate) settings: Settings,
    /// How many shards the table has, and how they move.
    pub(crate) shards: ShardCount,
    pub(crate) handoff: Handoff,
    /// The service that members run besides.
    pub(crate) service: Option<ServiceAt>,
    /// The scenario's own way to the store, past all proxies.
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) members: Vec<Member>,
    /// What the scenario itself did through [clients](Client).
    lines: Arc<Mutex<Vec<Line>>>,
    maps: Arc<Mutex<Vec<Arc<ShardMap>>>>,
    _watch: AbortOnDropHandle<()>,
    folder: TempDir,
}

/// A way to the store of the scenario's own, that is recorded and can be broken.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) backend: Recording,
    pub(crate) proxy: Proxy,
}

/// A member's process, with its own way to the store.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) process: Process,
    pub(crate) proxy: Proxy,
    input: ChildStdin,
    log: File,
    unread: String,
    pub(crate) lines: Vec<Line>,
    view: Option<View>,
    /// The shards that it hosts, and until when it may.
    hosts: BTreeSet<ShardId>,
    may_host: Option<Moment>,
    killed: Option<Moment>,
    asked: u32,
}

impl World {
    /// A fresh cluster on a fresh store.
    async fn new(store: Store, settings: Settings) -> Done<Self> {
        let server = tokio::task::spawn_blocking(move || store.start()).await??;
        let bits = AttemptId::random().as_u128() >> 64;
        let cluster = ClusterName::new(format!("scenario-{bits:016x}"))?;
        let backend = connect(&store.url(&server, &cluster)).await?;
        let maps = Arc::<Mutex<Vec<_>>>::default();
        let mut watcher = Watcher::<PlacementEvent>::placement(backend.placement(), table());
        let seen = Arc::clone(&maps);
        let watch = tokio::runtime::Handle::current().spawn(async move {
            loop {
                if let Watched::Event(
                    PlacementEvent::Changed(map) | PlacementEvent::Snapshot(Some(map)),
                ) = watcher.next().await
                {
                    seen.lock().unwrap_or_else(PoisonError::into_inner).push(map);
                }
            }
        });
        let folder = tempfile::Builder::new().prefix("coord-scenario-").tempdir()?;
        Ok(Self {
            store,
            server,
            cluster,
            settings,
            shards: ShardCount::default(),
            handoff: Handoff::Exclusive,
            service: None,
            backend,
            members: Vec::new(),
            lines: Arc::default(),
            maps,
            _watch: AbortOnDropHandle::new(watch),
            folder,
        })
    }

    /// A way of its own to the store, and the URL that leads there.
    pub(crate) async fn way(&self) -> Done<(Proxy, String)> {
        let proxy = self.store.proxy(&self.server).await?;
        let url = self.store.url_via(&self.server, proxy.addresses(), &self.cluster)?;
        Ok((proxy, url))
    }

    /// Starts a member; its place among the members.
    pub(crate) async fn add(&mut self, name: &str) -> Done<usize> {
        self.add_with(name, false, None).await
    }

    /// Starts a member that replaces a live one of its name, or has a clock of its own.
    pub(crate) async fn add_with(
        &mut self,
        name: &str,
        replace: bool,
        clock: Option<&Clock>,
    ) -> Done<usize> {
        let (proxy, url) = self.way().await?;
        self.add_by(proxy, url, name, None, replace, clock)
    }

    /// Starts a member under the name of one that is dead, as a supervisor does.
    pub(crate) async fn add_successor(&mut self, name: &str) -> Done<usize> {
        self.add_with(name, true, None).await
    }

    /// Starts a member that by mistake looks for its leases where another cluster has them.
    pub(crate) async fn add_misled(&mut self, name: &str, other: &ClusterName) -> Done<usize> {
        let (proxy, url) = self.way().await?;
        let leases = self.store.url_via(&self.server, proxy.addresses(), other)?;
        self.add_by(proxy, url, name, Some(leases), false, None)
    }

    fn add_by(
        &mut self,
        proxy: Proxy,
        url: String,
        name: &str,
        leases: Option<String>,
        replace: bool,
        clock: Option<&Clock>,
    ) -> Done<usize> {
        let (node, settings) = (name.to_owned(), self.settings.clone());
        let Self { shards, handoff, service, .. } = *self;
        let description =
            Description { url, leases, node, settings, replace, shards, handoff, service };
        let mut command = command(&description)?;
        if let Some(clock) = clock {
            clock.give(&mut command);
        }
        let path = self.folder.path().join(format!("{}-{name}.log", self.members.len()));
        let (process, input) = Process::spawn_piped(command, &path)?;
        self.members.push(Member {
            name: name.to_owned(),
            process,
            proxy,
            input,
            log: File::open(path)?,
            unread: String::new(),
            lines: Vec::new(),
            view: None,
            hosts: BTreeSet::new(),
            may_host: None,
            killed: None,
            asked: 0,
        });
        Ok(self.members.len() - 1)
    }

    /// A way to the store for the scenario itself.
    pub(crate) async fn client(&self) -> Done<Client> {
        let (proxy, url) = self.way().await?;
        let backend = connect(&url).await?;
        let lines = Arc::clone(&self.lines);
        let keep = move |line| lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        Ok(Client { backend: Recording::new(backend, keep), proxy })
    }

    /// What was recorded of the scenario's own clients.
    pub(crate) fn lines(&self) -> Vec<Line> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Starts members n1, n2 … and waits until they share all shards.
    pub(crate) async fn start(&mut self, count: usize) -> Done {
        for number in 1..=count {
            self.add(&format!("n{number}")).await?;
        }
        self.shared_by(count).await
    }

    /// Waits until all members that were not killed see the shards shared evenly among so many, and each
    /// shard is hosted.
    pub(crate) async fn shared_by(&mut self, count: usize) -> Done {
        self.shared_by_but(count, &[]).await
    }

    /// The same, whatever these members see.
    pub(crate) async fn shared_by_but(&mut self, count: usize, blind: &[usize]) -> Done {
        let what = format!("the shards are shared by {count}");
        let are_shared = |world: &mut Self| world.are_shared_by(count, blind).then_some(());
        self.until(&what, PATIENCE, are_shared).await
    }

    fn are_shared_by(&self, count: usize, blind: &[usize]) -> bool {
        let (shards, count) = (self.shards.get(), u32::try_from(count).expect("few"));
        let (least, more) = (shards / count, shards % count);
        let wanted: Vec<u32> = (0..count).map(|n| least + u32::from(n >= count - more)).collect();
        let seeing = self.members.iter().enumerate();
        let seeing = seeing.filter(|(n, member)| member.killed.is_none() && !blind.contains(n));
        let views: Vec<_> = seeing.map(|(_, member)| member.view.as_ref()).collect();
        let are_shared = |view: &Option<&View>| {
            view.is_some_and(|view| view.shares() == wanted && view.leader.is_some())
        };
        views.iter().all(are_shared)
            && views.windows(2).all(|pair| pair[0].map(|v| &v.tables) == pair[1].map(|v| &v.tables))
            && self.hosted_by(|_| true) == shards
    }

    /// How many shards are hosted now by these members, of those that were not killed.
    pub(crate) fn hosted_by(&self, counts: impl Fn(usize) -> bool) -> u32 {
        let at = now();
        let may = |member: &Member| {
            member.killed.is_none() && member.may_host.is_some_and(|until| at < until)
        };
        let members = self.members.iter().enumerate();
        let members = members.filter(|(n, member)| counts(*n) && may(member));
        let hosted = members.flat_map(|(_, member)| &member.hosts).collect::<BTreeSet<_>>().len();
        u32::try_from(hosted).expect("few")
    }

    /// Those that were not killed.
    pub(crate) fn living(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.killed.is_none())
    }

    /// The TTL of the leader's lease, as granted.
    pub(crate) fn leader_ttl(&self) -> Duration {
        let asked = Ttl::new(self.settings.leader_ttl).expect("the settings are valid");
        self.backend.info().guarantees.granted_ttl(asked).get()
    }

    /// By when a node that died has failed, as promised.
    pub(crate) fn detection(&self) -> Duration {
        let guarantees = &self.backend.info().guarantees;
        let asked = Ttl::new(self.settings.node_ttl).expect("the settings are valid");
        let ttl = guarantees.granted_ttl(asked).get();
        // Where a failover may lose a heartbeat, the TTL passes on the leader's clock besides.
        let lossy = guarantees.consistency == Consistency::BestEffort;
        ttl * (u32::from(lossy) + 1) + Duration::from_secs(1)
    }

    /// Notes what was measured.
    pub(crate) fn note(&self, what: &str, time: Duration, limit: Duration) {
        note(format!("{}: {what} after {time:.2?}, promised {limit:.2?}", self.store.name));
    }

    /// Reads what the members have said since, again and again, until `ask` has an answer.
    pub(crate) async fn until<T>(
        &mut self,
        what: &str,
        limit: Duration,
        mut ask: impl FnMut(&mut Self) -> Option<T>,
    ) -> Done<T> {
        let begun = now();
        loop {
            self.members.iter_mut().for_each(Member::read);
            if let Some(answer) = ask(self) {
                return Ok(answer);
            }
            if now().since(begun) > limit {
                return Err(format!("waited {limit:?} in vain: {what}").into());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// For so long, looks at what is to stay as it is.
    pub(crate) async fn throughout(
        &mut self,
        what: &str,
        time: Duration,
        mut holds: impl FnMut(&Self) -> bool,
    ) -> Done {
        let begun = now();
        while now().since(begun) < time {
            self.members.iter_mut().for_each(Member::read);
            if !holds(self) {
                return Err(format!("no more after {:?}: {what}", now().since(begun)).into());
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// The place of the member that leads, as it says itself.
    pub(crate) async fn leader(&mut self) -> Done<(usize, Fence)> {
        self.until("one leads", PATIENCE, |world| {
            let leads = |member: &Member| {
                let view = member.view.as_ref()?;
                let leader = view.leader.as_ref()?;
                let is_own = leader.node.as_str() == member.name
                    && view.registered == Some(leader.incarnation);
                let fence = member.fence()?;
                (is_own && fence.term == leader.term && member.killed.is_none()).then_some(fence)
            };
            world.members.iter().enumerate().find_map(|(n, member)| Some((n, leads(member)?)))
        })
        .await
    }

    /// Waits for a grant of the same lease in a greater term; to whom, when and under which fence.
    pub(crate) async fn successor(
        &mut self,
        after: &Fence,
        limit: Duration,
    ) -> Done<(usize, Moment, Fence)> {
        let (term, origin) = (after.term, after.origin.clone());
        self.until("another leads", limit, |world| {
            world.members.iter().enumerate().find_map(|(n, member)| {
                member
                    .grants()
                    .find(|(_, fence)| fence.term > term && fence.origin == origin)
                    .map(|(at, f)| (n, at, f.clone()))
            })
        })
        .await
    }

    /// Kills a member as a crash would, and returns when.
    pub(crate) fn kill(&mut self, member: usize) -> Done<Moment> {
        let member = &mut self.members[member];
        let at = now();
        member.process.kill()?;
        member.killed = Some(at);
        Ok(at)
    }

    /// Lets a member leave in order, and waits for the end of its process; when that was.
    pub(crate) async fn leave(&mut self, member: usize) -> Done<Moment> {
        self.members[member].ask(Question::Leave)?;
        let over = |world: &mut Self| {
            world.members[member].lines.iter().find_map(|line| match &line.said {
                Said::Over(why) => Some((line.at(), why.clone())),
                _ => None,
            })
        };
        let (at, why) = self.until("it leaves", PATIENCE, over).await?;
        if !why.is_empty() {
            return Err(format!("{} left so: {why}", self.members[member].name).into());
        }
        self.kill(member)?;
        Ok(at)
    }

    /// Asks a member and waits for its answer.
    pub(crate) async fn ask(&mut self, member: usize, question: Question) -> Done<Answer> {
        let number = self.members[member].ask(question)?;
        self.answer(member, number).await
    }

    /// Waits for the answer to a question.
    pub(crate) async fn answer(&mut self, member: usize, number: u32) -> Done<Answer> {
        self.until("it answers", PATIENCE, |world| {
            world.members[member].lines.iter().find_map(|line| match &line.said {
                Said::Answered { number: n, answer } if *n == number => Some(answer.clone()),
                _ => None,
            })
        })
        .await
    }

    /// Where a watch puts the maps that it shows.
    pub(crate) fn maps(&self) -> Arc<Mutex<Vec<Arc<ShardMap>>>> {
        Arc::clone(&self.maps)
    }

    /// The maps that a watch has shown so far.
    pub(crate) fn seen_maps(&self) -> Vec<Arc<ShardMap>> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The newest map that the store has.
    pub(crate) async fn map(&self) -> Done<Arc<ShardMap>> {
        let (placement, table) = (self.backend.placement(), table());
        let begun = now();
        loop {
            match placement.load(&table).await {
                Ok(table) => return Ok(table.ok_or("there is no table")?.map),
                Err(error) if !error.is_retryable() || now().since(begun) > PATIENCE => {
                    return Err(error.into());
                }
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// Checks all that was recorded, with this scenario's own reading of the table at the end.
    pub(crate) async fn check(&mut self) -> Done {
        let who = "the scenario";
        let mut maps = self.seen_maps();
        let mut entries = own_entries(who, &self.lines());
        if !self.members.is_empty() {
            let map = self.map().await?;
            entries.push(Entry::new(now(), who, What::read(&table(), &map)));
            maps.push(map);
        }
        self.members.iter_mut().for_each(Member::read);
        for member in &self.members {
            entries.extend(member.entries());
        }
        let members: Vec<_> = self.members.iter().map(Member::told).collect();
        checks::check(&members, entries, &maps, self.handoff)
    }

    /// What the members said last, for a failure.
    pub(crate) fn story(&mut self) -> String {
        let mut story = String::new();
        let end = now();
        for member in &mut self.members {
            member.read();
            story.push_str(&format!("--- {} (killed: {:?})\n", member.name, member.killed));
            let told: Vec<_> = member.lines.iter().filter(|line| is_news(&line.said)).collect();
            for line in &told[told.len().saturating_sub(SHOWN)..] {
                let text = format!("{:?}", line.said);
                let text: String = text.chars().take(SHOWN_CHARS).collect();
                story.push_str(&format!("  {:?} ago: {text}\n", end.since(line.at())));
            }
            let (hosts, until) = (member.hosts.len(), member.may_host);
            story.push_str(&format!("  hosts {hosts} shards until {until:?}, now {end:?}\n"));
            story.push_str(&format!("  last view: {:?}\n", member.view));
        }
        story
    }
}

/// What these lines hold for the history.
pub(crate) fn own_entries(who: &str, lines: &[Line]) -> Vec<Entry> {
    let entry = |line: &Line| match &line.said {
        Said::Entry(what) => Some(Entry::new(line.at(), who, what.clone())),
        _ => None,
    };
    lines.iter().filter_map(entry).collect()
}

/// What is not said again and again.
fn is_news(said: &Said) -> bool {
    match said {
        Said::View(_) | Said::Leads(_) | Said::Entry(_) => false,
        Said::Starts { .. } | Said::Acts(_) | Said::Stopped(_) | Said::Lapsed(_) => false,
        Said::Call(call) => {
            let usual = call.operation == "renew" && call.outcome == Outcome::Done;
            !usual && call.outcome != Outcome::NotHeld
        }
        _ => true,
    }
}

impl Member {
    /// Takes in what the process has written since.
    pub(crate) fn read(&mut self) {
        if self.log.read_to_string(&mut self.unread).is_err() {
            return;
        }
        while let Some(end) = self.unread.find('\n') {
            let text: String = self.unread.drain(..=end).collect();
            // Its logs go the same way.
            if let Ok(line) = serde_json::from_str::<Line>(&text) {
                self.take_in(&line.said);
                self.lines.push(line);
            }
        }
    }

    fn take_in(&mut self, said: &Said) {
        match said {
            Said::View(view) => self.view = Some(view.clone()),
            Said::Starts { shard, right } => {
                self.hosts.insert(*shard);
                self.may_host = self.may_host.max(Some(right.until()));
            }
            Said::Acts(acts) => {
                let until = acts.iter().map(|act| act.right.until()).max();
                self.may_host = self.may_host.max(until);
            }
            Said::Stopped(shard) => {
                self.hosts.remove(shard);
            }
            Said::Lapsed(shards) => self.hosts.retain(|shard| !shards.contains(shard)),
            _ => {}
        }
    }

    pub(crate) fn told(&self) -> Told<'_> {
        Told { name: &self.name, lines: &self.lines, killed: self.killed }
    }

    /// How things stand as it sees them.
    pub(crate) fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    pub(crate) fn was_killed(&self) -> bool {
        self.killed.is_some()
    }

    /// Puts a question, also to a process that is paused; its number.
    pub(crate) fn ask(&mut self, question: Question) -> Done<u32> {
        self.asked += 1;
        let ask = Ask { number: self.asked, question };
        let mut text = serde_json::to_string(&ask)?;
        text.push('\n');
        self.input.write_all(text.as_bytes())?;
        Ok(self.asked)
    }

    /// Each grant of the leader's lease that it was told of, when first.
    pub(crate) fn grants(&self) -> impl Iterator<Item = (Moment, &Fence)> {
        let mut seen = BTreeMap::new();
        self.lines.iter().filter_map(move |line| match &line.said {
            Said::Entry(What::Holds { fence, .. }) if seen.insert(fence.term, ()).is_none() => {
                Some((line.at(), fence))
            }
            _ => None,
        })
    }

    /// The fence under which it led last.
    pub(crate) fn fence(&self) -> Option<Fence> {
        self.lines.iter().rev().find_map(|line| match &line.said {
            Said::Leads(fence) => Some(fence.clone()),
            _ => None,
        })
    }

    /// Its events, with when it told of them.
    pub(crate) fn events(&self) -> impl Iterator<Item = (Moment, &Event)> {
        self.lines.iter().filter_map(|line| match &line.said {
            Said::Event(event) => Some((line.at(), event)),
            _ => None,
        })
    }

    /// When it first told of such an event after that moment.
    pub(crate) fn event(
        &self,
        after: Moment,
        wanted: impl Fn(&EventKind) -> bool,
    ) -> Option<Moment> {
        let fits = |(at, event): &(Moment, &Event)| *at > after && wanted(&event.kind);
        self.events().find(fits).map(|(at, _)| at)
    }

    /// Whether it has joined, or why not; none as long as it is not known.
    pub(crate) fn has_joined(&self) -> Option<Result<(), String>> {
        self.lines.iter().find_map(|line| match &line.said {
            Said::Started => Some(Ok(())),
            Said::Over(why) => Some(Err(why.clone())),
            _ => None,
        })
    }

    /// Its part of the history. The tenures of a process that was killed ended with it.
    fn entries(&self) -> Vec<Entry> {
        let mut going_on: BTreeMap<_, (Fence, Moment)> = BTreeMap::new();
        let mut entries = own_entries(&self.name, &self.lines);
        for entry in &entries {
            match &entry.what {
                What::Holds { fence, until } => {
                    going_on.insert(fence.attempt, (fence.clone(), *until));
                }
                What::Ended { fence, .. } => {
                    going_on.remove(&fence.attempt);
                }
                _ => {}
            }
        }
        if let Some(killed) = self.killed {
            for (fence, until) in going_on.into_values() {
                let how = "killed".to_owned();
                entries.push(Entry::new(killed.min(until), &self.name, What::Ended { fence, how }));
            }
        }
        entries
    }
}

/// Opens a store, again and again where it does not answer yet.
pub(crate) async fn connect(url: &str) -> Done<Arc<dyn Backend>> {
    let begun = now();
    loop {
        match coord::connect(url).await {
            Ok(coord) => return Ok(Arc::clone(coord.backend())),
            Err(error) if !error.is_retryable() || now().since(begun) > PATIENCE => {
                return Err(error.into());
            }
            Err(_) => tokio::time::sleep(POLL).await,
        }
    }
}

/// A trial of this name on each of these stores.
pub(crate) fn on_each(
    stores: impl IntoIterator<Item = Store>,
    name: &str,
    settings: fn(&Store) -> Settings,
    scenario: impl AsyncFn(&mut World) -> Done + Copy + Send + 'static,
) -> Vec<Trial> {
    on_each_found(stores, Store::find, name, settings, scenario)
}

/// The same on those that are found so.
pub(crate) fn on_each_found(
    stores: impl IntoIterator<Item = Store>,
    find: fn(&Store) -> Result<Store, Missing>,
    name: &str,
    settings: fn(&Store) -> Settings,
    scenario: impl AsyncFn(&mut World) -> Done + Copy + Send + 'static,
) -> Vec<Trial> {
    let named = |store: Store| {
        let trial = format!("{}::{name}", store.name);
        let name = trial.clone();
        coord_integration::trial(trial, &find(&store), move |store| {
            let begun = now();
            let played = play(scenario, store, settings(&store));
            note(format!("{name} took {:.1?}", now().since(begun)));
            played
        })
    };
    stores.into_iter().map(named).collect()
}

/// Runs a scenario on a runtime of its own, and tells its story if it fails.
fn play(scenario: impl AsyncFn(&mut World) -> Done, store: Store, settings: Settings) -> Done {
    // The proxies go on while the scenario looks at files.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let mut world = World::new(store, settings).await?;
        let mut played = scenario(&mut world).await;
        if played.is_ok() {
            played = world.check().await;
        }
        played.map_err(|failed| {
            let message = failed.message().unwrap_or_default().to_owned();
            Failed::from(format!("{message}\n{}", world.story()))
        })
    })
}
