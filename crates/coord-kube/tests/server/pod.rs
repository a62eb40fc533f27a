//! A program in a pod: nothing is given but what the kubelet puts there. The files have to stand where
//! every pod has them, so the program runs in a mount namespace of its own.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use coord_core::{Backend as _, BackendUrl};
use coord_integration::Missing;
use coord_integration::servers::Kube;
use coord_kube::KubeBackend;
use libtest_mimic::Trial;

use super::rights::{TOKEN, USER, with_account};
use super::setup::{acquire, ask, cluster, renew};

/// Set to a cluster's name, this program is the one in the pod.
pub(crate) const INSIDE: &str = "COORD_TEST_INSIDE_POD";
/// Puts the folder `$1` where a pod has its service account, and goes on as `$2`.
const MOUNT: &str = "mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount && \
                     mount --bind \"$1\" /run/secrets/kubernetes.io/serviceaccount && exec \"$2\"";
const UNSHARE: [&str; 3] = ["unshare", "--map-root-user", "--mount"];

pub(crate) fn trial() -> Trial {
    let found = find();
    coord_integration::trial("a_pod_has_its_service_account", &found, |kube| {
        let server = kube.start()?;
        let folder = tempfile::tempdir()?;
        let file = |name: &str| folder.path().join(name);
        fs::write(file("token"), TOKEN)?;
        fs::write(file("namespace"), "default")?;
        fs::copy(server.authority()?, file("ca.crt"))?;
        let address = server.address()?;
        let (host, port) = address.split_once(':').ok_or("an address has a port")?;
        let mut pod = Command::new(UNSHARE[0])
            .args(&UNSHARE[1..])
            .args(["sh", "-c", MOUNT, "sh"])
            .args([folder.path(), &std::env::current_exe()?])
            .env_remove("KUBECONFIG")
            .env("KUBERNETES_SERVICE_HOST", host)
            .env("KUBERNETES_SERVICE_PORT", port)
            .env(INSIDE, cluster())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut input = pod.stdin.take().ok_or("a pipe")?;
        let mut lines = BufReader::new(pod.stdout.take().ok_or("a pipe")?).lines();
        let mut said = || lines.next().transpose().map(Option::unwrap_or_default);
        assert_eq!(said()?, "acquired");
        // As the kubelet does it.
        let fresh = "another-token-of-the-service-account";
        fs::write(file("token"), fresh)?;
        server.set_tokens(&[(fresh, USER)])?;
        writeln!(input, "go on")?;
        assert_eq!(said()?, "renewed");
        assert!(pod.wait()?.success());
        Ok(())
    })
}

fn find() -> Result<Kube, Missing> {
    let kube = with_account().find()?;
    let link = fs::canonicalize("/var/run").is_ok_and(|path| path == Path::new("/run"));
    let mut may = Command::new(UNSHARE[0]);
    may.args(&UNSHARE[1..]).args(["mount", "-t", "tmpfs", "none", "/run"]).stderr(Stdio::null());
    if link && may.status().is_ok_and(|status| status.success()) {
        return Ok(kube);
    }
    let why = "a mount namespace of one's own, where /var/run is /run, can't be had here";
    Err(Missing::absent("a pod's folders", why))
}

/// What the program in the pod does.
pub(crate) fn inside(cluster: &str) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("starts").block_on(async {
        let url = BackendUrl::parse(&format!("kube:///{cluster}")).expect("a URL");
        let backend = KubeBackend::open(&url).await.expect("opens");
        let health = backend.check().await.expect("checks");
        assert!(
            health.points.iter().any(|point| point.detail.contains("\"default\"")),
            "{health:?}"
        );
        let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
        say("acquired");
        std::io::stdin().read_line(&mut String::new()).expect("reads");
        renew(&backend, &grant).await;
        say("renewed");
    });
    ExitCode::SUCCESS
}

#[expect(clippy::print_stdout, reason = "who started it reads that")]
fn say(word: &str) {
    println!("{word}");
}
