//! A Kubernetes API server, with an etcd of its own behind it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use tempfile::TempDir;

use super::node::{Node, Program, Ready, Source};
use super::start::{Allowed, Certificate, random_name};
use super::{Etcd, Server, https};
use crate::{Missing, free_port};

const BACKEND: &str = "kube";
const KUBECONFIG: &str = "COORD_TEST_KUBECONFIG";
const PROGRAM: &str = "COORD_TEST_KUBE_APISERVER";
/// Where envtest keeps its programs.
const ASSETS: &str = "KUBEBUILDER_ASSETS";
/// The name of the real one, which wants more arguments than those that are made of its library.
const APISERVER: &str = "kube-apiserver";
/// The token of whoever may do everything.
const ADMIN: &str = "coord-test-admin";
/// The namespace that is there for tests.
const NAMESPACE: &str = "default";

/// A Kubernetes API server, found in this order: one that runs, by the kubeconfig that
/// `COORD_TEST_KUBECONFIG` names; the program that `COORD_TEST_KUBE_APISERVER` names; envtest's
/// `kube-apiserver` in the folder `KUBEBUILDER_ASSETS`. A program is started with an
/// [etcd](Etcd) of its own.
#[derive(Clone, Debug, Default)]
pub struct Kube {
    /// `token,user,group` each.
    tokens: Vec<String>,
    rbac: Option<String>,
    control: bool,
    changes_tokens: bool,
}

/// An API server that runs. Clones are the same one.
#[derive(Clone, Debug)]
pub struct ApiServer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    kubeconfig: PathBuf,
    started: Option<Started>,
}

/// What was started here.
#[derive(Debug)]
struct Started {
    tokens: PathBuf,
    authority: PathBuf,
    certificate: Certificate,
    // In this order: first the processes end, then their folder goes.
    node: Node,
    etcd: Server,
    _folder: TempDir,
}

enum Found {
    Given(PathBuf),
    Program(PathBuf),
}

impl Kube {
    /// Whatever API server is there.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With this token for a user of this name, beside the one who may do everything.
    #[must_use]
    pub fn with_token(mut self, token: &str, user: &str) -> Self {
        self.tokens.push(format!("{token},{user}"));
        self.control = true;
        self
    }

    /// Where users may do only what these Roles and RoleBindings, YAML documents, allow.
    #[must_use]
    pub fn with_rbac(mut self, documents: impl Into<String>) -> Self {
        self.rbac = Some(documents.into());
        self.control = true;
        self
    }

    /// One that is started here, so that it can be paused, killed and restarted.
    #[must_use]
    pub fn with_control(mut self) -> Self {
        self.control = true;
        self
    }

    /// One whose [tokens](ApiServer::set_tokens) can be replaced while it runs. The real one reads them
    /// at its start only.
    #[must_use]
    pub fn with_changing_tokens(mut self) -> Self {
        (self.control, self.changes_tokens) = (true, true);
        self
    }

    /// Looks whether there is one, without starting it, for [`trial`](crate::trial).
    ///
    /// # Errors
    /// There is none on this machine.
    pub fn find(self) -> Result<Self, Missing> {
        self.found().map(|_| self)
    }

    fn found(&self) -> Result<Found, Missing> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let allowed = Allowed::read(std::env::var(Allowed::VARIABLE).ok().as_deref())
            .map_err(|why| Missing::broken(BACKEND, why))?;
        if let Some(path) = variable(KUBECONFIG).filter(|_| allowed.url && !self.control) {
            return Ok(Found::Given(path.into()));
        }
        if !allowed.programs {
            let why = format!("{} allows no program", Allowed::VARIABLE);
            return Err(Missing::absent(BACKEND, why));
        }
        let assets = || variable(ASSETS).map(|folder| Path::new(&folder).join(APISERVER));
        let program = variable(PROGRAM).map(PathBuf::from).or_else(assets);
        let Some(program) = program else {
            let why = format!(
                "none of {KUBECONFIG} (a kubeconfig), {PROGRAM} (a program) and {ASSETS} (envtest's \
                 folder) is set"
            );
            return Err(Missing::absent(BACKEND, why));
        };
        if !program.is_file() {
            let why = format!("there is no program {}", program.display());
            return Err(Missing::broken(BACKEND, why));
        }
        if is_real(&program) && self.rbac.is_some() {
            let why =
                format!("{APISERVER} reads no Roles from a file; {PROGRAM} names one that does");
            return Err(Missing::absent(BACKEND, why));
        }
        if is_real(&program) && self.changes_tokens {
            let why = format!(
                "{APISERVER} reads its tokens at its start only; {PROGRAM} names one that reads them again"
            );
            return Err(Missing::absent(BACKEND, why));
        }
        if is_real(&program) && openssl(&["version"]).is_err() {
            let why = format!(
                "{APISERVER} wants an RSA key, and there is no program openssl to make one"
            );
            return Err(Missing::absent(BACKEND, why));
        }
        Etcd::new().with_control().find().map_err(|missing| {
            Missing::absent(BACKEND, format!("an API server needs etcd: {missing}"))
        })?;
        Ok(Found::Program(program))
    }

    /// Gets the API server, and the namespace `default` in it. Blocks the thread until it serves.
    ///
    /// # Errors
    /// There is none on this machine, or it does not work.
    pub fn start(&self) -> Result<ApiServer, Missing> {
        match self.found().inspect_err(Missing::tell)? {
            Found::Given(kubeconfig) if kubeconfig.is_file() => {
                Ok(ApiServer(Arc::new(Inner { kubeconfig, started: None })))
            }
            Found::Given(kubeconfig) => {
                let why = format!("there is no kubeconfig {}", kubeconfig.display());
                Err(Missing::broken(BACKEND, why))
            }
            Found::Program(program) => {
                let etcd = Etcd::new().with_control().start()?;
                let started = self.start_with(&program, etcd);
                started.map_err(|error| Missing::broken(BACKEND, error.to_string()))
            }
        }
    }

    fn start_with(&self, program: &Path, etcd: Server) -> io::Result<ApiServer> {
        let folder = tempfile::Builder::new().prefix("coord-kube-").tempdir()?;
        let path = |name: &str| folder.path().join(name);
        let authority = path("authority.pem");
        let files = Certificate { certificate: path("server.pem"), key: path("server.key") };
        super::tls::write(&authority, &files)?;
        let tokens = path("tokens.csv");
        fs::write(&tokens, self.tokens_file(program, &self.tokens))?;
        let port = free_port()?;
        let mut arguments: Vec<OsString> = vec![
            format!("--etcd-servers=http://{}", etcd.addresses().join(",http://")).into(),
            format!("--secure-port={port}").into(),
            "--tls-cert-file".into(),
            files.certificate.clone().into(),
            "--tls-private-key-file".into(),
            files.key.clone().into(),
        ];
        if is_real(program) {
            let keys = AccountKeys::make(folder.path())?;
            arguments.extend(real_arguments(port, &tokens, &keys, folder.path()));
        } else {
            arguments.extend(["--token-file".into(), tokens.clone().into()]);
            if let Some(rbac) = &self.rbac {
                fs::write(path("rbac.yaml"), rbac)?;
                arguments.extend(["--rbac-file".into(), path("rbac.yaml").into()]);
            }
        }
        let name = random_name(BACKEND);
        let ready = Ready::Https {
            path: "/readyz",
            answer: "ok",
            authority: authority.clone(),
            token: ADMIN,
        };
        let node = Node::new(Program {
            log: path(&format!("{name}.log")),
            name,
            source: Source::Program(program.to_owned()),
            arguments,
            environment: Vec::new(),
            folder: folder.path().to_owned(),
            port,
            plain_port: port,
            ready,
            sentinel: false,
        });
        node.start()?;
        make_namespace(port, &authority)?;
        let kubeconfig = path("kubeconfig");
        let started =
            Started { tokens, authority, certificate: files, node, etcd, _folder: folder };
        let server = format!("https://127.0.0.1:{port}");
        fs::write(&kubeconfig, started.kubeconfig(&server, ADMIN, None)?)?;
        Ok(ApiServer(Arc::new(Inner { kubeconfig, started: Some(started) })))
    }

    fn tokens_file(&self, program: &Path, tokens: &[String]) -> String {
        let is_real = is_real(program);
        let admin = match is_real {
            true => format!("{ADMIN},admin,admin,\"system:masters\"\n"),
            false => format!("{ADMIN},admin,system:masters\n"),
        };
        let line = |token: &String| {
            let user = token.split(',').nth(1).unwrap_or_default();
            if is_real { format!("{token},{user}\n") } else { format!("{token}\n") }
        };
        tokens.iter().map(line).fold(admin, |file, line| file + &line)
    }
}

/// What envtest starts the real one with, beside what both take.
fn real_arguments(port: u16, tokens: &Path, keys: &AccountKeys, folder: &Path) -> Vec<OsString> {
    let with = |name: &str, path: &Path| {
        let mut argument = OsString::from(name);
        argument.push(path);
        argument
    };
    vec![
        "--bind-address=127.0.0.1".into(),
        "--advertise-address=127.0.0.1".into(),
        "--allow-privileged=true".into(),
        "--authorization-mode=RBAC".into(),
        "--disable-admission-plugins=ServiceAccount".into(),
        "--service-cluster-ip-range=10.0.0.0/24".into(),
        format!("--service-account-issuer=https://127.0.0.1:{port}/").into(),
        with("--service-account-key-file=", &keys.public),
        with("--service-account-signing-key-file=", &keys.private),
        with("--cert-dir=", folder),
        with("--token-auth-file=", tokens),
    ]
}

/// What the real one signs service accounts' tokens with, and checks them: RSA, for of a private key in
/// PKCS#8 it reads the public part only if it is that.
struct AccountKeys {
    private: PathBuf,
    public: PathBuf,
}

impl AccountKeys {
    fn make(folder: &Path) -> io::Result<Self> {
        let (private, public) = (folder.join("accounts.key"), folder.join("accounts.pub"));
        let name = |path: &Path| path.display().to_string();
        let (key, published) = (name(&private), name(&public));
        openssl(&[
            "genpkey",
            "-algorithm",
            "RSA",
            "-pkeyopt",
            "rsa_keygen_bits:2048",
            "-out",
            &key,
        ])?;
        openssl(&["pkey", "-in", &key, "-pubout", "-out", &published])?;
        Ok(Self { private, public })
    }
}

fn openssl(arguments: &[&str]) -> io::Result<()> {
    let output = Command::new("openssl").args(arguments).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("openssl {} failed: {said}", arguments[0])))
}

fn is_real(program: &Path) -> bool {
    program.file_name().is_some_and(|name| name == APISERVER)
}

fn make_namespace(port: u16, authority: &Path) -> io::Result<()> {
    let body =
        format!(r#"{{"apiVersion":"v1","kind":"Namespace","metadata":{{"name":"{NAMESPACE}"}}}}"#);
    let (status, answer) =
        https::ask(port, authority, ADMIN, "POST", "/api/v1/namespaces", Some(&body))?;
    match status {
        // The real one makes it by itself.
        201 | 409 => Ok(()),
        _ => Err(io::Error::other(format!("no namespace {NAMESPACE}: {status} {answer}"))),
    }
}

impl ApiServer {
    /// The kubeconfig of whoever may do everything.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.0.kubeconfig
    }

    /// Whether it was started here.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.0.started.is_some()
    }

    /// `127.0.0.1:port`.
    ///
    /// # Errors
    /// It was not started here.
    pub fn address(&self) -> io::Result<String> {
        Ok(format!("127.0.0.1:{}", self.started()?.node.port()))
    }

    /// A kubeconfig that leads to this address, a proxy's say, with this token.
    ///
    /// # Errors
    /// It was not started here.
    pub fn kubeconfig_via(&self, address: SocketAddr, token: &str) -> io::Result<String> {
        self.started()?.kubeconfig(&format!("https://{address}"), token, None)
    }

    /// The same for an [encrypting proxy](crate::faults::Proxy::encrypting), which takes requests in
    /// the open.
    ///
    /// # Errors
    /// It was not started here.
    pub fn kubeconfig_open_via(&self, address: SocketAddr, token: &str) -> io::Result<String> {
        self.started()?.kubeconfig(&format!("http://{address}"), token, None)
    }

    /// A kubeconfig that takes its token from this file.
    ///
    /// # Errors
    /// It was not started here.
    pub fn kubeconfig_with_token_file(&self, file: &Path) -> io::Result<String> {
        let server = format!("https://{}", self.address()?);
        self.started()?.kubeconfig(&server, "", Some(file))
    }

    /// The certificate of the authority that signed its own, a file.
    ///
    /// # Errors
    /// It was not started here.
    pub fn authority(&self) -> io::Result<&Path> {
        Ok(&self.started()?.authority)
    }

    /// What it takes to speak TLS in its stead, with its certificate.
    pub(crate) fn serving(&self) -> io::Result<Arc<rustls::ServerConfig>> {
        https::serving(&self.started()?.certificate).map(Arc::new)
    }

    /// The token of whoever may do everything.
    #[must_use]
    pub fn admin_token(&self) -> &'static str {
        ADMIN
    }

    /// Takes these instead of all former tokens but the administrator's, from the next request on:
    /// `(token, user)` each. The real server reads them at its start only.
    ///
    /// # Errors
    /// It was not started here.
    pub fn set_tokens(&self, tokens: &[(&str, &str)]) -> io::Result<()> {
        let started = self.started()?;
        let lines: Vec<_> = tokens.iter().map(|(token, user)| format!("{token},{user}")).collect();
        let file = Kube::default().tokens_file(Path::new(""), &lines);
        // Whole or not at all: the server reads it at any moment.
        let new = started.tokens.with_extension("new");
        fs::write(&new, file)?;
        fs::rename(&new, &started.tokens)
    }

    /// The process, to pause, kill and restart.
    ///
    /// # Errors
    /// It was not started here.
    pub fn node(&self) -> io::Result<&Node> {
        Ok(&self.started()?.node)
    }

    /// The etcd behind it.
    ///
    /// # Errors
    /// It was not started here.
    pub fn etcd(&self) -> io::Result<&Server> {
        Ok(&self.started()?.etcd)
    }

    /// What a request of the administrator's with this method, path and JSON is answered with: the
    /// status and the body. Blocks the thread.
    ///
    /// # Errors
    /// It was not started here, or does not answer.
    pub fn ask(&self, method: &str, path: &str, body: Option<&str>) -> io::Result<(u16, String)> {
        let started = self.started()?;
        https::ask(started.node.port(), &started.authority, ADMIN, method, path, body)
    }

    fn started(&self) -> io::Result<&Started> {
        let why = "the API server was not started here";
        self.0.started.as_ref().ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, why))
    }
}

impl Started {
    fn kubeconfig(&self, server: &str, token: &str, file: Option<&Path>) -> io::Result<String> {
        let authority = self.authority.display();
        let user = match file {
            Some(file) => format!("tokenFile: {}", file.display()),
            None => format!("token: {token}"),
        };
        if !self.authority.exists() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the authority's file is gone"));
        }
        Ok(format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\nclusters:\n- name: test\n  \
             cluster:\n    server: {server}\n    certificate-authority: {authority}\n\
             users:\n- name: test\n  user:\n    {user}\ncontexts:\n- name: test\n  context:\n    \
             cluster: test\n    user: test\n    namespace: {NAMESPACE}\n"
        ))
    }
}

impl Drop for Inner {
    #[expect(clippy::print_stderr, reason = "a test that fails shows what its server said")]
    fn drop(&mut self) {
        if let (true, Some(started)) = (std::thread::panicking(), &self.started) {
            eprintln!("{}", started.node.log_tail());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_real_one_gets_keys_that_it_reads() {
        if let Err(error) = openssl(&["version"]) {
            Missing::absent("openssl", error.to_string()).tell();
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let keys = AccountKeys::make(folder.path()).expect("keys");
        let private = fs::read_to_string(&keys.private).expect("readable");
        assert!(private.starts_with("-----BEGIN PRIVATE KEY-----"), "not PKCS#8");
        let public = fs::read_to_string(&keys.public).expect("readable");
        assert!(public.starts_with("-----BEGIN PUBLIC KEY-----"), "{public}");
        openssl(&["odd"]).expect_err("there is no such command");
    }

    #[test]
    fn what_the_real_one_can_not_do_is_said() {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join(APISERVER);
        assert!(is_real(&program) && !is_real(&folder.path().join("kube-testserver")));
        let keys = AccountKeys { private: "a.key".into(), public: "a.pub".into() };
        let arguments = real_arguments(1, Path::new("t"), &keys, folder.path());
        for right in
            ["--service-account-key-file=a.pub", "--service-account-signing-key-file=a.key"]
        {
            assert!(arguments.iter().any(|one| one == right), "{arguments:?}");
        }
    }
}
