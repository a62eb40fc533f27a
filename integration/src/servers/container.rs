//! A server in a container: the program that the machine lacks, from an image, started as any other. It
//! shares the machine's network, and its folder at the same path, so that whatever a program is told
//! (ports, certificates, other members of its cluster) holds in a container too.

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::process::{getgid, getuid};
use testcontainers::bollard::Docker;
use testcontainers::bollard::query_parameters::{
    KillContainerOptionsBuilder, ListContainersOptionsBuilder, RemoveContainerOptionsBuilder,
};
use testcontainers::core::Mount;
use testcontainers::runners::AsyncRunner as _;
use testcontainers::{ContainerAsync, GenericImage, ImageExt as _};
use tokio::runtime::{Builder, Runtime};

use super::node::Program;
use super::process::listening;

/// On each container: which process started it.
const OWNER: &str = "coord.test.owner";

/// And the folder that goes with it.
const FOLDER: &str = "coord.test.folder";

/// A container that runs. Dropped, it is killed and removed.
#[derive(Debug)]
pub(super) struct Container {
    container: Option<ContainerAsync<GenericImage>>,
    process: u32,
}

/// Whether this image is here, or can be had. The error says what is in the way.
pub(super) fn find(image: &str) -> Result<(), String> {
    static FOUND: Mutex<BTreeMap<String, Result<(), String>>> = Mutex::new(BTreeMap::new());
    if !cfg!(target_os = "linux") {
        return Err("containers are used on Linux only, whose network they can share".to_owned());
    }
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    let look = || {
        wait(async {
            let docker = docker().await.map_err(|error| format!("no Docker: {error}"))?;
            if docker.inspect_image(image).await.is_ok() {
                return Ok(());
            }
            let pulled = named(image).pull_image().await;
            pulled.map(drop).map_err(|error| format!("no image {image}: {error}"))
        })
    };
    found.entry(image.to_owned()).or_insert_with(look).clone()
}

impl Container {
    pub(super) fn start(image: &str, name: &str, program: &Program) -> io::Result<Self> {
        remove_leftovers()?;
        let Program { arguments, environment, folder, .. } = program;
        let folder = text(folder.as_os_str())?;
        let arguments: Vec<_> = arguments.iter().map(text).collect::<io::Result<_>>()?;
        let mut request = named(image)
            .with_entrypoint(name)
            .with_cmd(arguments)
            .with_network("host")
            .with_mount(Mount::bind_mount(folder.clone(), folder.clone()))
            .with_working_dir(folder.clone())
            .with_label(FOLDER, folder)
            .with_label(OWNER, owner(std::process::id()).unwrap_or_default())
            .with_user(format!("{}:{}", getuid().as_raw(), getgid().as_raw()));
        for (name, value) in environment {
            request = request.with_env_var(text(name)?, text(value)?);
        }
        wait(async {
            let container = request.start().await.map_err(io::Error::other)?;
            let docker = docker().await?;
            let state = docker.inspect_container(container.id(), None).await;
            let state = state.map_err(io::Error::other)?.state;
            let process = state.and_then(|state| u32::try_from(state.pid?).ok());
            Ok(Self { container: Some(container), process: process.unwrap_or_default() })
        })
    }

    /// The id of its first process on this machine.
    pub(super) fn id(&self) -> u32 {
        self.process
    }

    pub(super) fn has_ended(&self) -> io::Result<bool> {
        let Some(container) = &self.container else { return Ok(true) };
        wait(async { container.is_running().await.map(|runs| !runs).map_err(io::Error::other) })
    }

    pub(super) fn signal(&self, signal: &str) -> io::Result<()> {
        let ended = || io::Error::new(io::ErrorKind::NotFound, "the container has ended");
        let container = self.container.as_ref().ok_or_else(ended)?;
        let options = KillContainerOptionsBuilder::new().signal(signal).build();
        wait(async {
            let docker = docker().await?;
            let sent = docker.kill_container(container.id(), Some(options)).await;
            sent.map_err(io::Error::other)
        })
    }

    /// Kills and removes it. Its folder stays.
    pub(super) fn kill(&mut self) -> io::Result<()> {
        match self.container.take() {
            Some(container) => wait(async { container.rm().await.map_err(io::Error::other) }),
            None => Ok(()),
        }
    }

    pub(super) fn listens_on(&self, port: u16) -> bool {
        listening::socket(self.process, port)
    }

    /// What it said so far.
    pub(super) fn log(&self) -> String {
        let Some(container) = &self.container else { return String::new() };
        wait(async {
            let said = [container.stdout_to_vec().await, container.stderr_to_vec().await];
            said.map(|said| String::from_utf8_lossy(&said.unwrap_or_default()).into_owned())
                .concat()
        })
    }
}

impl Drop for Container {
    #[expect(clippy::print_stderr, reason = "a container that stays is somebody's business")]
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("a container is left: {error}");
        }
    }
}

/// Runs it in a thread of its own, whatever runtime the caller is in, which must not be blocked on.
fn wait<T: Send>(future: impl Future<Output = T> + Send) -> T {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let make = || Builder::new_multi_thread().worker_threads(1).enable_all().build();
            let runtime = RUNTIME.get_or_init(|| make().expect("threads for a runtime"));
            runtime.block_on(future)
        });
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

async fn docker() -> io::Result<Docker> {
    let docker = Docker::connect_with_defaults().map_err(io::Error::other)?;
    docker.ping().await.map_err(io::Error::other)?;
    Ok(docker)
}

fn named(image: &str) -> GenericImage {
    // A registry's name may hold a colon, before its port.
    match image.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) {
        Some((name, tag)) => GenericImage::new(name, tag),
        None => GenericImage::new(image, "latest"),
    }
}

/// Nobody removes the containers of a test process that was killed, so the next one does.
fn remove_leftovers() -> io::Result<()> {
    static REMOVED: OnceLock<()> = OnceLock::new();
    if REMOVED.get().is_some() {
        return Ok(());
    }
    wait(async {
        let docker = docker().await?;
        let labelled = HashMap::from([("label".to_owned(), vec![OWNER.to_owned()])]);
        let options = ListContainersOptionsBuilder::new().all(true).filters(&labelled).build();
        for container in docker.list_containers(Some(options)).await.map_err(io::Error::other)? {
            let mut labels = container.labels.unwrap_or_default();
            let label = labels.remove(OWNER).unwrap_or_default();
            let process = label.split('@').next().and_then(|id| id.parse().ok());
            let lives = process.and_then(owner).as_ref() == Some(&label);
            // Who sees other processes than this one can't be judged from here.
            if lives || !label.ends_with(&world()) {
                continue;
            }
            let options = RemoveContainerOptionsBuilder::new().force(true).v(true).build();
            // Another test process may be at it too.
            let _ = docker.remove_container(&container.id.unwrap_or_default(), Some(options)).await;
            let folder = labels.remove(FOLDER).map(PathBuf::from).unwrap_or_default();
            if folder.parent() == Some(&env::temp_dir()) {
                let _ = fs::remove_dir_all(folder);
            }
        }
        let _ = REMOVED.set(());
        Ok(())
    })
}

/// A process that lives: its id, when it started, in ticks since the machine did, and its world.
fn owner(process: u32) -> Option<String> {
    let state = fs::read_to_string(Path::new("/proc").join(process.to_string()).join("stat"));
    let state = state.ok()?;
    // The name before it, in brackets, may hold anything.
    let (_, after) = state.rsplit_once(") ")?;
    Some(format!("{process}@{}@{}", after.split(' ').nth(19)?, world()))
}

/// Within which a process's id means something.
fn world() -> String {
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    namespace.to_string_lossy().into_owned()
}

fn text(value: impl Into<OsString>) -> io::Result<String> {
    value.into().into_string().map_err(|odd| io::Error::other(format!("{odd:?} is not Unicode")))
}

#[cfg(test)]
mod tests {
    use testcontainers::Image as _;

    use super::*;

    #[test]
    fn an_image_has_a_name_and_a_tag() {
        for (image, name, tag) in [
            ("nats:2.15.1-alpine", "nats", "2.15.1-alpine"),
            ("localhost:5000/etcd", "localhost:5000/etcd", "latest"),
            ("localhost:5000/etcd:v3", "localhost:5000/etcd", "v3"),
        ] {
            assert_eq!((named(image).name(), named(image).tag()), (name, tag));
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_owner_is_this_process_and_no_later_one() {
        let me = owner(std::process::id()).expect("it lives");
        let [id, begun, world] = me.splitn(3, '@').collect::<Vec<_>>()[..] else { panic!("{me}") };
        assert_eq!(id, std::process::id().to_string());
        assert!(begun.parse::<u64>().is_ok_and(|begun| begun > 0), "{me}");
        assert!(world.starts_with("pid:["), "{me}");
        assert_eq!(owner(u32::MAX), None);
    }
}
