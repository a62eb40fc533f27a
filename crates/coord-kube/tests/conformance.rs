//! The Kubernetes backend passes the suite, on a real API server.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use coord_conformance::faults::{Fault, FaultControl, Faults, Faulty};
use coord_conformance::{Fixture, Handle, Operator, Profile};
use coord_core::{BackendUrl, ClusterName, Error, ErrorKind, LeaseName, Result, TableName};
use coord_integration::Missing;
use coord_integration::faults::Proxy;
use coord_integration::servers::{ApiServer, Kube};
use coord_kube::KubeBackend;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use tempfile::TempDir;

fn main() -> ExitCode {
    let server = Kube::new().start();
    let folder = tempfile::tempdir().map_err(|error| Missing::broken("kube", error.to_string()));
    coord_conformance::main(Kubes { server, folder })
}

#[derive(Debug)]
struct Kubes {
    server: Result<ApiServer, Missing>,
    /// Where the kubeconfigs are that lead through proxies.
    folder: Result<TempDir, Missing>,
}

impl Kubes {
    fn server(&self) -> Result<&ApiServer> {
        self.server.as_ref().map_err(broken)
    }

    /// Writes a kubeconfig that leads through a proxy, which it starts.
    async fn via_proxy(&self) -> Result<(Proxy, PathBuf)> {
        let mut kubeconfig = Kubeconfig::read_from(self.server()?.kubeconfig()).map_err(broken)?;
        let cluster = kubeconfig.clusters.first_mut().and_then(|named| named.cluster.as_mut());
        let cluster = cluster.ok_or_else(|| broken("the kubeconfig names no cluster"))?;
        let server = cluster.server.clone().unwrap_or_default();
        let uri: http::Uri = server.parse().map_err(broken)?;
        let host = uri.host().unwrap_or_default().to_owned();
        let address = format!("{host}:{}", uri.port_u16().unwrap_or(443));
        let proxy = Proxy::start(&[address]).await.map_err(broken)?;
        cluster.server = Some(format!("https://{}", proxy.addresses()[0]));
        cluster.tls_server_name.get_or_insert(host);
        let folder = self.folder.as_ref().map_err(broken)?;
        let path = folder.path().join(format!("{}.yaml", proxy.addresses()[0].port()));
        let text = serde_json::to_string(&kubeconfig).map_err(broken)?;
        std::fs::write(&path, text).map_err(broken)?;
        Ok((proxy, path))
    }
}

fn broken(error: impl ToString) -> Error {
    Error::new(ErrorKind::Unavailable, "start").message(error.to_string())
}

#[async_trait]
impl Fixture for Kubes {
    fn name(&self) -> &str {
        "kube"
    }

    fn profile(&self) -> Profile {
        let token = self.server.as_ref().ok().filter(|server| server.is_own());
        let secrets = token.map(|server| server.admin_token().to_owned());
        Profile::real_time().with_secrets(secrets)
    }

    async fn available(&self) -> Result<(), String> {
        self.server.as_ref().map(drop).map_err(ToString::to_string)
    }

    async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
        let (proxy, kubeconfig) = self.via_proxy().await?;
        let url =
            format!("kube:///{cluster}?request_timeout=2s&kubeconfig={}", kubeconfig.display());
        let backend = KubeBackend::open(&BackendUrl::parse(&url)?).await?;
        let faulty = Faulty::new(Arc::new(backend));
        let control = faulty.control().clone();
        let operator = Admin { client: admin(self.server()?).await?, cluster: cluster.clone() };
        let handle = Handle::new(Arc::new(faulty)).with_faults(Arc::new(Way { control, proxy }));
        Ok(handle.with_operator(Arc::new(operator)))
    }

    async fn clean(&self, cluster: &ClusterName) {
        let Ok(server) = self.server() else { return };
        let Ok(client) = admin(server).await else { return };
        let all = ListParams::default().labels(&format!("coord/cluster={cluster}"));
        let now = DeleteParams::default();
        // What is left is in the way of nobody: the next cluster has another name.
        let leases = Api::<Lease>::default_namespaced(client.clone());
        let maps = Api::<ConfigMap>::default_namespaced(client);
        for lease in leases.list_metadata(&all).await.into_iter().flatten() {
            let _ = leases.delete(&lease.metadata.name.unwrap_or_default(), &now).await;
        }
        for map in maps.list_metadata(&all).await.into_iter().flatten() {
            let _ = maps.delete(&map.metadata.name.unwrap_or_default(), &now).await;
        }
    }
}

/// What goes wrong on the way: the connection is cut for real, the rest happens behind the backend.
#[derive(Debug)]
struct Way {
    control: FaultControl,
    proxy: Proxy,
}

#[async_trait]
impl Faults for Way {
    fn supports(&self, fault: Fault) -> bool {
        self.control.supports(fault)
    }

    async fn inject(&self, fault: Fault) -> Result<()> {
        match fault {
            Fault::Cut => self.proxy.cut(),
            Fault::CutWatches => self.proxy.reset(),
            other => return self.control.inject(other).await,
        }
        Ok(())
    }

    async fn heal(&self) -> Result<()> {
        self.proxy.heal();
        Faults::heal(&self.control).await
    }
}

/// A client of its own, as kubectl is.
async fn admin(server: &ApiServer) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(server.kubeconfig()).map_err(broken)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    Client::try_from(config.map_err(broken)?).map_err(broken)
}

struct Admin {
    client: Client,
    cluster: ClusterName,
}

impl Admin {
    fn name(&self, kind: &str, name: &str) -> String {
        format!("coord.{}.{kind}.{name}", self.cluster)
    }
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

#[async_trait]
impl Operator for Admin {
    /// `kubectl delete lease …`
    async fn delete_lease(&self, lease: &LeaseName) -> Result<()> {
        let leases = Api::<Lease>::default_namespaced(self.client.clone());
        let name = self.name("lease", lease.as_str());
        leases.delete(&name, &DeleteParams::default()).await.map(drop).map_err(broken)
    }

    /// `kubectl delete configmap …`, and what Kubernetes collects after it.
    async fn delete_table(&self, table: &TableName) -> Result<()> {
        let maps = Api::<ConfigMap>::default_namespaced(self.client.clone());
        let now = DeleteParams::default();
        maps.delete(&self.name("table", table.as_str()), &now).await.map_err(broken)?;
        let labels = format!("coord/cluster={},coord/table={table}", self.cluster);
        let chunks = ListParams::default().labels(&labels);
        for chunk in maps.list_metadata(&chunks).await.map_err(broken)? {
            let name = chunk.metadata.name.unwrap_or_default();
            maps.delete(&name, &now).await.map_err(broken)?;
        }
        Ok(())
    }
}
