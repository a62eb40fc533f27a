//! What the environment says of this process.

use std::ffi::OsString;
use std::path::Path;

use coord_cluster::{ClusterBuilder, ENV_PREFIX, Settings};
use coord_core::{Address, Error, NodeId, NodeInfo, Result};

use crate::connect::{Coord, connect, host_and_process};

const BACKEND: &str = "COORD_BACKEND";
const BACKEND_FILE: &str = "COORD_BACKEND_FILE";
const NODE: &str = "COORD_NODE";
const ADDRESS: &str = "COORD_ADDRESS";

/// Reads which store, which node and which settings the environment names, and connects to nothing yet.
///
/// | variable | meaning |
/// | --- | --- |
/// | `COORD_BACKEND` | the URL of the store |
/// | `COORD_BACKEND_FILE` | a file that holds the URL, in the place of `COORD_BACKEND`: for a URL with a password |
/// | `COORD_NODE` | the node id; the host's name and the process id where it is unset |
/// | `COORD_ADDRESS` | `host:port`, where other nodes reach this one; [`Environment::cluster`] needs it |
/// | `COORD_CLUSTER_…` | [`Settings`]: `COORD_CLUSTER_NODE_TTL=30s` |
///
/// ```no_run
/// # use coord::cluster::Table;
/// # use coord::TableName;
/// # async fn example() -> coord::Result<()> {
/// let cluster = coord::from_env()?
///     .cluster()
///     .await?
///     .table(Table::new(TableName::new("sessions")?))
///     .start()
///     .await?;
/// # drop(cluster);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Invalid`, naming the variable and what would be right: no store, or two; a file that can't be read; a bad
/// node id, address or setting; a variable that is no text.
pub fn from_env() -> Result<Environment> {
    Environment::load(std::env::vars_os())
}

/// What [`from_env`] has read.
///
/// Its `Debug` form does not show the URL, which may hold a password.
#[derive(Clone)]
pub struct Environment {
    backend: String,
    node: NodeId,
    address: Option<Address>,
    settings: Settings,
}

impl Environment {
    /// As [`from_env`], from these variables.
    ///
    /// # Errors
    /// As [`from_env`].
    pub fn load<K: Into<OsString>, V: Into<OsString>>(
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self> {
        let mut backend = None;
        let mut file = None;
        let mut node = None;
        let mut address = None;
        let mut settings = Vec::new();
        for (name, value) in variables {
            // A name that is no text is none of ours.
            let Ok(name) = name.into().into_string() else { continue };
            let is_setting = name.starts_with(ENV_PREFIX);
            if !is_setting && ![BACKEND, BACKEND_FILE, NODE, ADDRESS].contains(&name.as_str()) {
                continue;
            }
            let value = value.into().into_string();
            let value = value.map_err(|_| invalid(&name, "it is not UTF-8 text"))?;
            match name.as_str() {
                BACKEND => backend = Some(value),
                BACKEND_FILE => file = Some(value),
                NODE => node = Some(NodeId::new(value).map_err(|error| invalid(NODE, error))?),
                ADDRESS => {
                    let read = Address::new(value).map_err(|error| invalid(ADDRESS, error))?;
                    address = Some(read);
                }
                _ => settings.push((name, value)),
            }
        }
        let backend = match (backend, file) {
            (Some(url), None) => url,
            (None, Some(file)) => url_in(Path::new(&file))?,
            (Some(_), Some(_)) => {
                let why = format!("{BACKEND_FILE} names a store as well; set one of them");
                return Err(invalid(BACKEND, why));
            }
            (None, None) => {
                let why = format!(
                    "no store is named; set it, or {BACKEND_FILE}, to a URL such as \
                     nats://localhost/orders"
                );
                return Err(invalid(BACKEND, why));
            }
        };
        let settings = Settings::default().with_variables(settings)?;
        settings.validate()?;
        Ok(Self { backend, node: node.unwrap_or_else(host_and_process), address, settings })
    }

    /// The node id under which this process acts.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// The settings: the default ones, as the variables change them.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Opens the store, and acts in it as this node.
    ///
    /// # Errors
    /// As [`connect`](crate::connect()).
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn connect(&self) -> Result<Coord> {
        Ok(connect(&self.backend).await?.with_node(self.node.clone()))
    }

    /// Opens the store and begins to take part in the cluster, as this node and with these settings: add
    /// tables, then `start`.
    ///
    /// # Errors
    /// `Invalid` where `COORD_ADDRESS` is unset; and as [`connect`](crate::connect()).
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn cluster(&self) -> Result<ClusterBuilder> {
        let address = self.address.clone().ok_or_else(|| {
            invalid(
                ADDRESS,
                "it is unset; set it to the host:port where other nodes reach this one",
            )
        })?;
        let node = NodeInfo::new(self.node.clone(), address);
        let coord = self.connect().await?;
        Ok(coord.cluster(node).settings(self.settings.clone()))
    }
}

impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Environment")
            .field("node", &self.node)
            .field("address", &self.address)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// The URL that a file holds, in one line.
fn url_in(file: &Path) -> Result<String> {
    let shown = file.display();
    let text = std::fs::read_to_string(file)
        .map_err(|error| invalid(BACKEND_FILE, format!("{shown} can't be read: {error}")))?;
    let url = text.trim();
    if url.is_empty() || url.lines().count() > 1 {
        let why = format!("{shown} has to hold one line, the URL of the store");
        return Err(invalid(BACKEND_FILE, why));
    }
    Ok(url.to_owned())
}

fn invalid(variable: &str, why: impl ToString) -> Error {
    Error::invalid("from_env", why.to_string()).resource(variable)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coord_core::ErrorKind;

    use super::*;

    fn refused(variables: &[(&str, &str)]) -> String {
        let error = Environment::load(variables.iter().copied()).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        error.to_string()
    }

    #[tokio::test]
    async fn the_environment_names_the_store_the_node_and_the_settings() {
        let environment = Environment::load([
            ("COORD_BACKEND", "memory://from-env"),
            ("COORD_NODE", "n1"),
            ("COORD_ADDRESS", "localhost:4001"),
            ("COORD_CLUSTER_NODE_TTL", "120s"),
            ("PATH", "/bin"),
        ]);
        let environment = environment.expect("reads");
        assert_eq!(environment.node().as_str(), "n1");
        assert_eq!(environment.settings().node_ttl, Duration::from_secs(120));
        let cluster = environment.cluster().await.expect("connects").start().await.expect("starts");
        assert_eq!(cluster.node().as_str(), "n1");
        cluster.leave().await.expect("leaves");
    }

    #[tokio::test]
    async fn leases_take_no_address_and_a_cluster_does() {
        let environment = Environment::load([("COORD_BACKEND", "memory://from-env")]);
        let environment = environment.expect("reads");
        environment.connect().await.expect("connects");
        let error = environment.cluster().await.expect_err("no address");
        assert!(error.to_string().contains("COORD_ADDRESS"), "{error}");
    }

    #[test]
    fn what_is_wrong_is_named_before_anything_is_opened() {
        let missing = refused(&[]);
        assert!(missing.contains("COORD_BACKEND") && missing.contains("nats://"), "{missing}");
        let memory = ("COORD_BACKEND", "memory://orders");
        for (name, value) in [
            ("COORD_BACKEND_FILE", "/tmp/url"),
            ("COORD_NODE", "no spaces"),
            ("COORD_ADDRESS", "no-port"),
            ("COORD_CLUSTER_NODE_TTL", "soon"),
            ("COORD_CLUSTER_COLOUR", "red"),
        ] {
            let why = refused(&[memory, (name, value)]);
            let key = name.trim_start_matches("COORD_CLUSTER_").to_ascii_lowercase();
            assert!(why.contains(name) || why.contains(&key), "{name}: {why}");
        }
        let unreadable = refused(&[("COORD_BACKEND_FILE", "/nowhere/url")]);
        assert!(unreadable.contains("/nowhere/url"), "{unreadable}");
    }

    #[test]
    fn a_file_holds_the_url_and_no_secret_is_shown() {
        let file = std::env::temp_dir().join(format!("coord-url-{}", std::process::id()));
        std::fs::write(&file, "memory://orders?password=secret\n").expect("writes");
        let environment = Environment::load([("COORD_BACKEND_FILE", &file)]).expect("reads");
        assert!(!format!("{environment:?}").contains("secret"), "{environment:?}");
        std::fs::write(&file, "one\ntwo\n").expect("writes");
        let several = Environment::load([("COORD_BACKEND_FILE", &file)]).expect_err("two lines");
        assert!(several.to_string().contains("one line"), "{several}");
        std::fs::remove_file(&file).expect("removes");
    }
}
