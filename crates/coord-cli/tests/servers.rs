//! The command on real stores: what it does there, and what it says where something is wrong.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use coord_integration::faults::{Direction, Proxy};
use coord_integration::servers::{ApiServer, Etcd, Kube, Nats, Node, Redis, Server};
use coord_integration::{Missing, free_port, trial, until};
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;
use tempfile::TempDir;
use tokio::time::Instant;

type Done = Result<(), Failed>;
type Body = fn(Store) -> Done;
type Start = Arc<dyn Fn() -> Result<Running, Missing> + Send + Sync>;

/// What a store that can't be reached or refuses is answered with.
const STORE: i32 = 3;
/// It cleans up for six seconds at most.
const ENDS_WITHIN: Duration = Duration::from_secs(20);

/// A kind of store.
#[derive(Clone)]
struct Store {
    scheme: &'static str,
    start: Start,
    /// One for which a password, or a token, is needed.
    start_locked: Start,
    secret: &'static str,
    /// How a server alone is found to be: told, where it keeps its data on one disk.
    alone: &'static str,
    /// What is said where nobody listens, and where somebody else does.
    nobody: &'static str,
    stranger: &'static str,
}

/// A server that runs.
enum Running {
    Plain(Server),
    Kube(ApiServer),
}

impl Running {
    fn url(&self, cluster: &str) -> String {
        match self {
            Self::Plain(server) => format!("{}/{cluster}", server.url()),
            Self::Kube(server) => kube_url(cluster, server.kubeconfig()),
        }
    }

    fn address(&self) -> Result<String, Failed> {
        match self {
            Self::Plain(server) => Ok(server.addresses()[0].clone()),
            Self::Kube(server) => Ok(server.address()?),
        }
    }

    /// The processes that clients talk to.
    fn each(&self, act: fn(&Node) -> std::io::Result<()>) -> Done {
        match self {
            Self::Plain(server) => Ok(server.nodes().iter().try_for_each(act)?),
            Self::Kube(server) => Ok(act(server.node()?)?),
        }
    }
}

fn kube_url(cluster: &str, kubeconfig: &Path) -> String {
    format!("kube:///{cluster}?kubeconfig={}", kubeconfig.display())
}

/// The URL of a server at this address with a login that none has, and the folder of what it names.
fn stranger_url(scheme: &str, address: &str) -> Result<(String, Option<TempDir>), Failed> {
    if scheme != "kube" {
        return Ok((format!("{scheme}://me:hunter2@{address}/jobs"), None));
    }
    let kubeconfig = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {
            "server": format!("https://{address}"), "insecure-skip-tls-verify": true,
        }}],
        "users": [{"name": "test", "user": {"token": "hunter2"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    });
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("kubeconfig");
    std::fs::write(&path, kubeconfig.to_string())?;
    Ok((kube_url("jobs", &path), Some(folder)))
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let trials = nats().into_iter().chain(etcd()).chain(redis()).chain(kube()).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn nats() -> Vec<Trial> {
    let any = Nats::new().with_control().find();
    let store = any.map(|nats| {
        let locked = nats.clone().with_login("me", "right");
        Store {
            scheme: "nats",
            start: Arc::new(move || nats.start().map(Running::Plain)),
            start_locked: Arc::new(move || locked.start().map(Running::Plain)),
            secret: "password",
            alone: "warning",
            nobody: "is one up there?",
            stranger: "is that a NATS server?",
        }
    });
    let mut trials = on("nats", &store);
    let plain = "accounts: { PLAIN: { users: [ { user: plain, password: plain } ] } }\n\
                 no_auth_user: plain\n";
    let without = Nats::new().with_config(plain).find();
    trials.push(trial("nats::a_server_without_jetstream", &without, |nats| {
        let server = nats.start()?;
        refuses(&format!("{}/jobs", server.url()), STORE, &["no JetStream"])
    }));
    trials
}

fn etcd() -> Vec<Trial> {
    let any = Etcd::new().with_control().find();
    let store = any.map(|etcd| {
        let locked = etcd.clone().with_root_password("right");
        Store {
            scheme: "etcd",
            start: Arc::new(move || etcd.start().map(Running::Plain)),
            start_locked: Arc::new(move || locked.start().map(Running::Plain)),
            secret: "password",
            alone: "warning",
            nobody: "is the server up there?",
            stranger: "is that an etcd server?",
        }
    });
    on("etcd", &store)
}

fn redis() -> Vec<Trial> {
    let any = Redis::new().with_control().find();
    let store = any.map(|redis| {
        let locked = redis.clone().with_login("me", "right");
        Store {
            scheme: "redis",
            start: Arc::new(move || redis.start().map(Running::Plain)),
            start_locked: Arc::new(move || locked.start().map(Running::Plain)),
            secret: "password",
            alone: "warning",
            nobody: "is one up there?",
            stranger: "is that a Redis server?",
        }
    });
    on("redis", &store)
}

fn kube() -> Vec<Trial> {
    let any = Kube::new().with_control().find();
    let store = any.map(|kube| {
        // It never is without one.
        let locked = kube.clone();
        Store {
            scheme: "kube",
            start: Arc::new(move || kube.start().map(Running::Kube)),
            start_locked: Arc::new(move || locked.start().map(Running::Kube)),
            secret: "token",
            // How the API server keeps its data is not to be seen from outside.
            alone: "good",
            nobody: "no answer from the API server",
            stranger: "is that an API server?",
        }
    });
    let mut trials = on("kube", &store);
    // All that it needs but one verb.
    let role = ROLE.replacen("watch, create, update, delete", "watch, create, delete", 1);
    let documents = format!("{role}\n---\n{BINDING}");
    let documents = documents.replace("name: coord\n", "name: coord\n  namespace: default\n");
    let without = Kube::new().with_token(TOKEN, "clerk").with_rbac(documents).find();
    trials.push(trial("kube::check_names_a_missing_verb", &without, missing_verb));
    trials
}

const ROLE: &str = include_str!("../../../deploy/kubernetes/role.yaml");
const TOKEN: &str = "hunter2-of-the-clerk";
const BINDING: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: coord
roleRef: { apiGroup: rbac.authorization.k8s.io, kind: Role, name: coord }
subjects: [{ kind: User, name: clerk }]
";

fn missing_verb(kube: Kube) -> Done {
    let server = kube.start()?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig_via(server.address()?.parse()?, TOKEN)?)?;
    let url = kube_url("jobs", &path);
    let right = "may not update leases.coordination.k8s.io in namespace \"default\"";
    let (done, stdout, stderr) = output(&url, &["check"])?;
    let told = (done.status.code(), &stdout, &stderr);
    ensure(done.status.code() == Some(1) && stderr.is_empty(), told)?;
    let bad: Vec<_> = stdout.lines().filter(|line| line.trim_start().starts_with("bad")).collect();
    ensure(
        matches!(bad[..], [line] if line.contains("permissions") && line.contains(right)),
        told,
    )?;
    ensure(!stdout.contains(TOKEN), told)?;
    // What needs the verb says the same, in one line.
    let (done, stdout, stderr) = output(&url, &["lease", "run", "job", "--", "echo", "ran"])?;
    let told = (done.status.code(), &stdout, &stderr);
    ensure(done.status.code() == Some(STORE) && stdout.is_empty(), told)?;
    ensure(stderr.lines().count() == 1 && stderr.contains(right) && !stderr.contains(TOKEN), told)
}

fn on(name: &str, store: &Result<Store, Missing>) -> Vec<Trial> {
    let trials: [(&str, Body); 13] = [
        ("check_says_what_to_act_on", check),
        ("the_demo_runs", demo),
        ("the_demo_leaves_a_cluster_at_work_alone", demo_among_others),
        ("lease_run_runs_one_at_a_time", lease_run),
        ("lease_run_stops_what_it_runs_when_the_lease_is_lost", lease_lost),
        ("lease_run_hands_its_code_on_though_the_store_is_away", not_released),
        ("lease_run_told_to_end_while_it_waits_leaves_nothing", told_while_waiting),
        ("lease_run_cancels_an_acquire_that_is_on_its_way", cancelled),
        ("lease_run_waits_for_a_store_that_is_away", store_away),
        ("lease_run_gives_up_on_a_store_that_is_cut_off", store_cut_off),
        ("a_wrong_port", wrong_port),
        ("a_wrong_secret", wrong_secret),
        ("a_server_of_another_kind", stranger),
    ];
    let trials = trials.map(|(trial, body)| (trial, store.clone(), body));
    let first = "lease_run_as_the_first_process_hears_that_it_shall_end";
    let inside = store.clone().and_then(|store| namespaces().map(|()| store));
    let trials = trials.into_iter().chain([(first, inside, told_as_first as Body)]);
    trials.map(|(what, store, body)| trial(format!("{name}::{what}"), &store, body)).collect()
}

fn namespaces() -> Result<(), Missing> {
    let made = Command::new("unshare").args(["--pid", "--fork", "true"]).output();
    let made = made.is_ok_and(|output| output.status.success());
    let why = "this user can't make one with unshare";
    if made { Ok(()) } else { Err(Missing::absent("pid namespaces", why)) }
}

fn coord(url: &str, args: &[&str]) -> Command {
    // A run of these tests under nohup or in the background ignores signals; coord is not to inherit that.
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,QUIT", env!("CARGO_BIN_EXE_coord")]);
    command.args(args).env("COORD_BACKEND", url).stdin(Stdio::null());
    command
}

fn output(url: &str, args: &[&str]) -> Result<(Output, String, String), Failed> {
    let output = coord(url, args).output()?;
    let stdout = String::from_utf8(output.stdout.clone())?;
    let stderr = String::from_utf8(output.stderr.clone())?;
    Ok((output, stdout, stderr))
}

fn ensure(holds: bool, what: impl std::fmt::Debug) -> Done {
    if holds { Ok(()) } else { Err(format!("{what:?}").into()) }
}

/// Every command that needs the store says in one line what is wrong with it.
fn refuses(url: &str, code: i32, names: &[&str]) -> Done {
    let commands: [&[&str]; 4] = [
        &["check"],
        &["lease", "get", "job"],
        &["lease", "run", "job", "--wait", "0s", "--", "true"],
        &["demo", "--fast"],
    ];
    for args in commands {
        let begun = Instant::now();
        let (output, stdout, stderr) = output(url, args)?;
        let told = (args, output.status.code(), &stdout, &stderr);
        ensure(output.status.code() == Some(code), told)?;
        ensure(stdout.is_empty() && stderr.lines().count() == 1, told)?;
        ensure(names.iter().all(|name| stderr.contains(name)), told)?;
        // Neither a password nor the layers of a client's error.
        ensure(!stderr.contains("hunter2") && !stderr.contains("Error("), told)?;
        ensure(begun.elapsed() < Duration::from_secs(20), (told, begun.elapsed()))?;
    }
    Ok(())
}

fn wrong_port(store: Store) -> Done {
    let (url, _folder) = stranger_url(store.scheme, &format!("127.0.0.1:{}", free_port()?))?;
    refuses(&url, STORE, &[store.nobody])
}

fn wrong_secret(store: Store) -> Done {
    let server = (store.start_locked)()?;
    let (url, _folder) = stranger_url(store.scheme, &server.address()?)?;
    refuses(&url, STORE, &["denied", store.secret])
}

/// Something listens that answers with a text of its own and hangs up.
fn stranger(store: Store) -> Done {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            // Whoever has gone already need not be told.
            let _ = stream.write_all(b"220 mail.example.com ESMTP\r\n");
            let _ = stream.read(&mut [0; 64]);
        }
    });
    let (url, _folder) = stranger_url(store.scheme, &address.to_string())?;
    refuses(&url, STORE, &[store.stranger])
}

fn check(store: Store) -> Done {
    let server = (store.start)()?;
    let url = server.url("jobs");
    let (done, stdout, stderr) = output(&url, &["check", "--output", "json"])?;
    ensure(done.status.success() && stderr.is_empty(), (&stdout, &stderr))?;
    let health: Value = serde_json::from_str(&stdout)?;
    ensure(health["target"] == url.as_str(), &health)?;
    ensure(health["round_trip_us"].as_u64().is_some_and(|time| time > 0), &health)?;
    let points = health["points"].as_array().ok_or("no points")?;
    for name in ["reachable", "version", "permissions", "configuration", "round trip"] {
        ensure(points.iter().any(|point| point["name"] == name), (name, points))?;
    }
    let promises = health["promises"].as_object().ok_or("no promises")?;
    ensure(promises.len() == 11 && promises.contains_key("consistency"), promises)?;
    ensure(health["status"] == store.alone, &health)?;
    // Strictly, a warning is a failure, and so is a store that may lose what it acknowledged.
    let (strict, stdout, _) = output(&url, &["check", "--strict"])?;
    ensure(strict.status.success() == (store.alone == "good"), stdout)?;

    server.each(Node::kill)?;
    let (done, stdout, stderr) = output(&url, &["check", "--output", "json"])?;
    let health: Value = serde_json::from_str(&stdout)?;
    ensure(done.status.code() == Some(STORE) && health["status"] == "bad", (&health, &stderr))?;
    ensure(health["points"][0]["name"] == "reachable" && health["promises"].is_null(), &health)?;
    refuses(&url, STORE, &[store.nobody])
}

fn demo(store: Store) -> Done {
    let server = (store.start)()?;
    let url = server.url("demo");
    let (done, stdout, stderr) = output(&url, &["demo", "--fast", "--output", "json"])?;
    ensure(done.status.success(), (&stdout, &stderr))?;
    let last: Value = serde_json::from_str(stdout.lines().last().ok_or("no output")?)?;
    ensure(last["held"] == true, &last)?;
    ensure(last["moved"] == serde_json::json!([0, 256, 256]), &last)?;
    // Nothing is in the way of the next one.
    let (done, stdout, stderr) = output(&url, &["demo", "--fast"])?;
    ensure(done.status.success(), (&stdout, &stderr))
}

fn demo_among_others(store: Store) -> Done {
    let server = (store.start)()?;
    let url = server.url("demo");
    let mut first = coord(&url, &["demo", "--fast"]).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(first.stdout.take().ok_or("no output")?).lines();
    let joined = lines.by_ref().map_while(Result::ok).any(|line| line.contains("joined"));
    let (second, stdout, stderr) = output(&url, &["demo", "--fast"])?;
    let told = (joined, second.status.code(), &stdout, &stderr);
    let rest = lines.map_while(Result::ok).last();
    ensure(first.wait()?.success(), (rest, told))?;
    ensure(joined && second.status.code() == Some(2), told)?;
    ensure(stdout.is_empty() && stderr.contains("node(s) at work"), told)
}

/// Runs a command under the lease that says when it has begun and goes on until its input ends.
fn hold(url: &str, ttl: &str) -> Result<Child, Failed> {
    let args = ["lease", "run", "job", "--ttl", ttl, "--", "sh", "-c", "echo begun; exec cat"];
    let mut command = coord(url, &args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut line = String::new();
    let stdout = child.stdout.as_mut().ok_or("no output")?;
    // One line and no more, so that nothing of the rest is swallowed.
    let mut byte = [0];
    while !line.ends_with('\n') && stdout.read(&mut byte)? == 1 {
        line.push(char::from(byte[0]));
    }
    if line != "begun\n" {
        let mut why = String::new();
        child.kill()?;
        child.stderr.take().ok_or("no errors")?.read_to_string(&mut why)?;
        return Err(format!("the command did not begin: {line:?} {why}").into());
    }
    Ok(child)
}

fn term(url: &str) -> Result<u64, Failed> {
    let (_, stdout, stderr) = output(url, &["lease", "get", "job", "--output", "json"])?;
    let record: Value = serde_json::from_str(&stdout)?;
    record["term"].as_u64().ok_or_else(|| format!("no term: {record} {stderr}").into())
}

fn lease_run(store: Store) -> Done {
    let server = (store.start)()?;
    let url = server.url("jobs");
    let mut first = hold(&url, "5s")?;
    let first_term = term(&url)?;
    let second = ["lease", "run", "job", "--wait", "0s", "--", "sh", "-c", "echo ran"];
    let (refused, stdout, stderr) = output(&url, &second)?;
    ensure(refused.status.code() == Some(75) && stdout.is_empty(), (&stdout, &stderr))?;
    ensure(stderr.contains("job is held by"), &stderr)?;
    let chosen =
        ["lease", "run", "job", "--wait", "300ms", "-E", "9", "--", "sh", "-c", "echo ran"];
    let (refused, stdout, stderr) = output(&url, &chosen)?;
    ensure(refused.status.code() == Some(9) && stdout.is_empty(), (&stdout, &stderr))?;
    ensure(stderr.contains("job is held by") && !stderr.contains("another"), &stderr)?;
    // One that waits begins when the first has ended, well before its TTL.
    let waiting = std::thread::spawn({
        let url = url.clone();
        move || hold(&url, "5s")
    });
    drop(first.stdin.take());
    ensure(first.wait()?.success(), "the first did not end well")?;
    let mut next = waiting.join().map_err(|_| "the second panicked")??;
    ensure(term(&url)? > first_term, "the term did not rise")?;
    drop(next.stdin.take());
    ensure(next.wait()?.success(), "the second did not end well")?;
    // The command's own exit code comes back.
    let (third, ..) = output(&url, &["lease", "run", "job", "--", "sh", "-c", "exit 7"])?;
    ensure(third.status.code() == Some(7), third)
}

/// The store is away when the command ends: its exit code is handed on all the same.
fn not_released(store: Store) -> Done {
    let server = (store.start)()?;
    let mut child = hold(&server.url("jobs"), "5s")?;
    server.each(Node::pause)?;
    drop(child.stdin.take());
    let status = child.wait()?;
    let mut why = String::new();
    child.stderr.take().ok_or("no errors")?.read_to_string(&mut why)?;
    server.each(Node::resume)?;
    ensure(status.success(), (status, &why))?;
    ensure(why.contains("job could not be released and ends by its ttl"), &why)
}

fn lease_lost(store: Store) -> Done {
    let server = (store.start)()?;
    let mut child = hold(&server.url("jobs"), "3s")?;
    let begun = Instant::now();
    server.each(Node::pause)?;
    // Its input stays open, or the command would end by itself.
    let input = child.stdin.take();
    let status = child.wait()?;
    let took = begun.elapsed();
    drop(input);
    let mut why = String::new();
    child.stderr.take().ok_or("no errors")?.read_to_string(&mut why)?;
    server.each(Node::resume)?;
    ensure(status.code() == Some(76), (status, &why))?;
    ensure(why.contains("the lease job was lost") && why.contains("was stopped"), &why)?;
    // The command was stopped before the store could give the lease to another.
    ensure(took < Duration::from_secs(3), took)
}

/// A run that waits, what it has said so far, and its id.
struct Waiting {
    coord: Child,
    told: BufReader<ChildStderr>,
}

impl Waiting {
    /// Starts one that says `ran` if its command is ever started, and waits until it has told this.
    fn until(mut command: Command, told: &str) -> Result<Self, Failed> {
        let mut coord = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let reader = BufReader::new(coord.stderr.take().ok_or("no errors")?);
        let mut waiting = Self { coord, told: reader };
        waiting.told(told)?;
        Ok(waiting)
    }

    fn told(&mut self, text: &str) -> Done {
        let mut all = String::new();
        while self.told.read_line(&mut all)? > 0 {
            if all.lines().last().is_some_and(|line| line.contains(text)) {
                return Ok(());
            }
        }
        Err(format!("{text:?} was not told: {all}").into())
    }

    /// Ends within the limit, with this code and without having run its command; what it told since.
    fn ends(mut self, limit: Duration, code: i32) -> Result<String, Failed> {
        let status = until(limit, || self.coord.try_wait().transpose());
        let _ = self.coord.kill();
        let (mut told, mut said) = (String::new(), String::new());
        self.told.read_to_string(&mut told)?;
        self.coord.stdout.take().ok_or("no output")?.read_to_string(&mut said)?;
        let status = status.ok_or_else(|| format!("it does not end: {told}"))??;
        ensure(status.code() == Some(code) && said.is_empty(), (status, &told, said))?;
        Ok(told)
    }
}

fn run_says(url: &str, more: &[&str]) -> Command {
    let args = [&["lease", "run", "job", "--ttl", "10s"], more, &["--", "echo", "ran"]];
    coord(url, &args.concat())
}

fn signal(name: &str, process: u32) -> Done {
    let sent = Command::new("kill").args([name, &process.to_string()]).status()?;
    ensure(sent.success(), (name, process))
}

/// Nobody holds the lease, long before any TTL would have ended it.
fn is_free(url: &str) -> Done {
    let free = until(Duration::from_secs(3), || {
        let (done, stdout, _) = output(url, &["lease", "get", "job"]).ok()?;
        (done.status.code() == Some(1) && stdout.contains("nobody holds it")).then_some(())
    });
    let (_, stdout, stderr) = output(url, &["lease", "get", "job"])?;
    ensure(free.is_some(), (stdout, stderr))
}

fn told_while_waiting(store: Store) -> Done {
    let server = (store.start)()?;
    let url = server.url("jobs");
    let mut first = hold(&url, "10s")?;
    for (name, code) in [("-TERM", 143), ("-INT", 130), ("-HUP", 129)] {
        let waiting = Waiting::until(run_says(&url, &[]), "job is held by")?;
        // It has nothing to go to yet, and is no reason to end.
        signal("-USR1", waiting.coord.id())?;
        signal(name, waiting.coord.id())?;
        let told = waiting.ends(ENDS_WITHIN, code)?;
        ensure(told.contains("the command was not started"), told)?;
    }
    drop(first.stdin.take());
    ensure(first.wait()?.success(), "the first did not end well")?;
    is_free(&url)
}

fn told_as_first(store: Store) -> Done {
    let server = (store.start)()?;
    let url = server.url("jobs");
    let mut first = hold(&url, "10s")?;
    let run = run_says(&url, &[]);
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork"]).arg(run.get_program()).args(run.get_args());
    command.env("COORD_BACKEND", &url);
    let waiting = Waiting::until(command, "job is held by")?;
    let id = waiting.coord.id();
    let inside = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
    signal("-TERM", inside.trim().parse()?)?;
    waiting.ends(ENDS_WITHIN, 143)?;
    drop(first.stdin.take());
    ensure(first.wait()?.success(), "the first did not end well")?;
    is_free(&url)
}

/// A way to the server that can be cut, and the URL that goes by it.
struct Way {
    proxy: Proxy,
    url: String,
    _kubeconfig: TempDir,
    _runtime: tokio::runtime::Runtime,
}

impl Way {
    fn to(store: &Store, server: &Running) -> Result<Self, Failed> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let proxy = runtime.block_on(Proxy::start(&[server.address()?]))?;
        let address = proxy.addresses()[0];
        let folder = tempfile::tempdir()?;
        let url = match server {
            Running::Plain(_) => format!("{}://{address}/jobs", store.scheme),
            Running::Kube(server) => {
                let path = folder.path().join("kubeconfig");
                std::fs::write(&path, server.kubeconfig_via(address, server.admin_token())?)?;
                kube_url("jobs", &path)
            }
        };
        Ok(Self { proxy, url, _kubeconfig: folder, _runtime: runtime })
    }
}

/// A run for which the store has granted the lease and whose answer is held back: what ends it then must
/// leave no lease behind, although the answer comes only later.
fn cancelled(store: Store) -> Done {
    let server = (store.start)()?;
    let direct = server.url("jobs");
    for wait in [None, Some(Duration::from_secs(5))] {
        let way = Way::to(&store, &server)?;
        let mut first = hold(&direct, "10s")?;
        let limit = wait.map(|wait| format!("{}s", wait.as_secs()));
        let more = limit.as_ref().map_or(vec![], |limit| vec!["--wait", limit.as_str()]);
        let begun = Instant::now();
        let mut waiting = Waiting::until(run_says(&way.url, &more), "job is held by")?;
        // What it asks for next is granted, which it hears of late, and then not at all.
        way.proxy.delay(Direction::ToClient, Duration::from_millis(600));
        drop(first.stdin.take());
        ensure(first.wait()?.success(), "the first did not end well")?;
        let granted = until(Duration::from_secs(10), || {
            let (done, ..) = output(&direct, &["lease", "get", "job"]).ok()?;
            done.status.success().then_some(())
        });
        ensure(granted.is_some(), "it does not ask for the lease")?;
        way.proxy.hold(Direction::ToClient);
        let code = match wait {
            None => {
                signal("-TERM", waiting.coord.id())?;
                143
            }
            Some(wait) => {
                let over = || (begun.elapsed() > wait + Duration::from_millis(500)).then_some(());
                ensure(until(wait * 2, over).is_some(), "time stands still")?;
                // The lease was free, and the store did not answer.
                STORE
            }
        };
        // It does not end before it has tried to clean up.
        ensure(waiting.coord.try_wait()?.is_none(), "it left the lease behind")?;
        way.proxy.heal();
        let told = waiting.ends(ENDS_WITHIN, code)?;
        ensure(!told.contains("another"), told)?;
        is_free(&direct)?;
    }
    Ok(())
}

/// Nobody listens, then somebody who says nothing, and then the store comes.
fn store_away(store: Store) -> Done {
    let server = (store.start)()?;
    let url = server.url("jobs");
    server.each(Node::kill)?;
    let mut told = Waiting::until(run_says(&url, &[]), "waiting for the store")?;
    // One that is told to end meanwhile does so at once.
    let other = Waiting::until(run_says(&url, &[]), "waiting for the store")?;
    signal("-TERM", other.coord.id())?;
    other.ends(Duration::from_secs(2), 143)?;
    // One that may not wait that long says what is wrong with the store.
    let begun = Instant::now();
    let (short, stdout, stderr) =
        output(&url, &["lease", "run", "job", "--wait", "1s", "--", "true"])?;
    let took = begun.elapsed();
    ensure(short.status.code() == Some(STORE) && stdout.is_empty(), (&stdout, &stderr))?;
    ensure(stderr.contains(store.nobody), &stderr)?;
    ensure(took > Duration::from_millis(900) && took < Duration::from_secs(10), took)?;
    server.each(Node::start)?;
    let status = until(Duration::from_secs(30), || told.coord.try_wait().transpose());
    let _ = told.coord.kill();
    let mut said = String::new();
    told.coord.stdout.take().ok_or("no output")?.read_to_string(&mut said)?;
    ensure(said == "ran\n", (status, said))
}

/// The store is there and is then cut off, or says nothing, while the lease is waited for.
fn store_cut_off(store: Store) -> Done {
    let server = (store.start)()?;
    let direct = server.url("jobs");
    let mut first = hold(&direct, "10s")?;
    let cuts: [fn(&Proxy); 2] = [Proxy::cut, |proxy| proxy.hold(Direction::Both)];
    for cut in cuts {
        let way = Way::to(&store, &server)?;
        let mut told = Waiting::until(run_says(&way.url, &[]), "job is held by")?;
        let ran_out = Waiting::until(run_says(&way.url, &["--wait", "6s"]), "job is held by")?;
        cut(&way.proxy);
        told.told("waiting for the store")?;
        signal("-TERM", told.coord.id())?;
        // An attempt that may be on its way is looked for as long as cleaning up may take.
        told.ends(Duration::from_secs(10), 143)?;
        let said = ran_out.ends(Duration::from_secs(16), 75)?;
        ensure(said.contains("job is held by") && !said.contains("another"), said)?;
    }
    drop(first.stdin.take());
    ensure(first.wait()?.success(), "the first did not end well")?;
    is_free(&direct)
}
