//! The Kubernetes backend passes the suite, on a real API server.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use coord_conformance::{Fixture, Handle, Operator, Profile};
use coord_core::{BackendUrl, ClusterName, Error, ErrorKind, LeaseName, NodeId, Result, TableName};
use coord_integration::faults::{Link, Proxy, Request};
use coord_integration::servers::{ApiServer, Kube};
use coord_integration::{Missing, opened};
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

    /// A way through a proxy, and a kubeconfig that leads through it.
    async fn via_proxy(&self, cluster: &ClusterName) -> Result<(Link, PathBuf)> {
        let server = self.server()?;
        if !server.is_own() {
            return self.via_blind_proxy(server).await;
        }
        let proxy = Proxy::seeing(server).await.map_err(broken)?;
        let text = server.kubeconfig_via(proxy.addresses()[0], server.admin_token());
        let path = self.write(&proxy, &text.map_err(broken)?)?;
        // A POST of a lease makes an empty object: what counts is the PUT after it.
        let node = format!("\"name\":\"coord.{cluster}.node.");
        let writes = ["PUT /api", "DELETE /api", "POST /api/v1/", &node];
        let writes = Request::WithAny(writes.map(Into::into).into());
        Ok((Link::new(proxy).with_request(writes), path))
    }

    /// The same to a server of somebody else's, whose certificate nobody here has.
    async fn via_blind_proxy(&self, server: &ApiServer) -> Result<(Link, PathBuf)> {
        let mut kubeconfig = Kubeconfig::read_from(server.kubeconfig()).map_err(broken)?;
        let cluster = kubeconfig.clusters.first_mut().and_then(|named| named.cluster.as_mut());
        let cluster = cluster.ok_or_else(|| broken("the kubeconfig names no cluster"))?;
        let server = cluster.server.clone().unwrap_or_default();
        let uri: http::Uri = server.parse().map_err(broken)?;
        let host = uri.host().unwrap_or_default().to_owned();
        let address = format!("{host}:{}", uri.port_u16().unwrap_or(443));
        let proxy = Proxy::start(&[address]).await.map_err(broken)?;
        cluster.server = Some(format!("https://{}", proxy.addresses()[0]));
        cluster.tls_server_name.get_or_insert(host);
        let text = serde_json::to_string(&kubeconfig).map_err(broken)?;
        let path = self.write(&proxy, &text)?;
        Ok((Link::new(proxy).without_sight(), path))
    }

    fn write(&self, proxy: &Proxy, kubeconfig: &str) -> Result<PathBuf> {
        let folder = self.folder.as_ref().map_err(broken)?;
        let path = folder.path().join(format!("{}.yaml", proxy.addresses()[0].port()));
        std::fs::write(&path, kubeconfig).map_err(broken)?;
        Ok(path)
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
        Missing::available(&self.server)
    }

    async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
        let (link, kubeconfig) = self.via_proxy(cluster).await?;
        let url =
            format!("kube:///{cluster}?request_timeout=5s&kubeconfig={}", kubeconfig.display());
        let url = BackendUrl::parse(&url)?;
        let backend = opened(|| KubeBackend::open(&url)).await?;
        let operator = Admin { client: admin(self.server()?).await?, cluster: cluster.clone() };
        let handle = Handle::new(Arc::new(backend)).with_faults(Arc::new(link));
        Ok(handle.with_operator(Arc::new(operator)))
    }

    async fn clean(&self, cluster: &ClusterName) {
        let Ok(server) = self.server() else { return };
        let Ok(client) = admin(server).await else { return };
        // What is left is in the way of nobody: the next cluster has another name.
        let _ = Admin { client, cluster: cluster.clone() }.delete_all().await;
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

    /// `kubectl delete lease …`
    async fn delete(&self, kind: &str, name: &str) -> Result<()> {
        let leases = Api::<Lease>::default_namespaced(self.client.clone());
        let now = DeleteParams::default();
        leases.delete(&self.name(kind, name), &now).await.map(drop).map_err(broken)
    }

    /// `kubectl delete leases,configmaps -l coord/cluster=…`
    async fn delete_all(&self) -> Result<()> {
        let all = ListParams::default().labels(&format!("coord/cluster={}", self.cluster));
        let now = DeleteParams::default();
        let leases = Api::<Lease>::default_namespaced(self.client.clone());
        for lease in leases.list_metadata(&all).await.map_err(broken)? {
            let name = lease.metadata.name.unwrap_or_default();
            leases.delete(&name, &now).await.map_err(broken)?;
        }
        let maps = Api::<ConfigMap>::default_namespaced(self.client.clone());
        for map in maps.list_metadata(&all).await.map_err(broken)? {
            let name = map.metadata.name.unwrap_or_default();
            maps.delete(&name, &now).await.map_err(broken)?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

#[async_trait]
impl Operator for Admin {
    async fn delete_lease(&self, lease: &LeaseName) -> Result<()> {
        self.delete("lease", lease.as_str()).await
    }

    async fn delete_node(&self, node: &NodeId) -> Result<()> {
        self.delete("node", node.as_str()).await
    }

    async fn lose_data(&self) -> Result<()> {
        self.delete_all().await
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
