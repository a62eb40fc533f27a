//! Where the API server is, and who we say we are: a kubeconfig, or the pod's service account.

use std::path::Path;

use coord_core::{ErrorKind, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};

use crate::config::Config;
use crate::error::{Op, request_error};

/// What the service account of a pod is told by.
const HOST: &str = "KUBERNETES_SERVICE_HOST";
const KUBECONFIG: &str = "KUBECONFIG";
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// What a vendor's client is made from, as often as credentials change.
pub(crate) struct Vendor {
    config: kube::Config,
    namespace: String,
}

impl Vendor {
    /// Reads the kubeconfig or the pod's service account.
    pub(crate) async fn find(op: Op<'_>, config: &Config) -> Result<Self> {
        let variable = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_pod = variable(HOST) && Path::new(TOKEN).exists();
        let is_named = config.kubeconfig.is_some() || config.context.is_some();
        let mut found = if is_named || variable(KUBECONFIG) || !is_pod {
            from_kubeconfig(op, config).await?
        } else {
            kube::Config::incluster().map_err(|error| {
                let why = "the pod's service account can't be read; is it mounted?";
                op.error(ErrorKind::Misconfigured).message(why).with_source(error)
            })?
        };
        found.connect_timeout = Some(config.connect_timeout);
        // A watch reads for long, and each call has a limit of its own.
        found.read_timeout = None;
        found.write_timeout = Some(config.request_timeout);
        found.default_retry = false;
        let namespace = config.namespace.clone().unwrap_or_else(|| found.default_namespace.clone());
        Ok(Self { config: found, namespace })
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Whether the credentials may change without the kubeconfig.
    pub(crate) fn can_renew(&self) -> bool {
        let auth = &self.config.auth_info;
        auth.token_file.is_some() || auth.exec.is_some() || auth.client_certificate.is_some()
    }

    /// A client with the credentials of now.
    pub(crate) async fn client(&self, op: Op<'_>) -> Result<kube::Client> {
        // Where more than one is compiled in, the client would not know which to take, and panic.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Another thread may have been faster, which is as good.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let config = self.config.clone();
        // It may read files and run a program that gives a token.
        let made = tokio::task::spawn_blocking(move || kube::Client::try_from(config)).await;
        let made = made.map_err(|error| {
            op.error(ErrorKind::Internal).message("the client panicked").with_source(error)
        })?;
        made.map_err(|error| request_error(op.reading(), error))
    }
}

async fn from_kubeconfig(op: Op<'_>, config: &Config) -> Result<kube::Config> {
    let unreadable = |error: kube::config::KubeconfigError| {
        let file = config.kubeconfig.as_deref().map_or_else(
            || "the kubeconfig of KUBECONFIG or ~/.kube/config".to_owned(),
            |path| format!("the kubeconfig {}", path.display()),
        );
        let why = format!(
            "{file} can't be used, and this is no pod with a service account: {error}; name one with \
             kubeconfig=… and context=…"
        );
        op.error(ErrorKind::Misconfigured).message(why).with_source(error)
    };
    let kubeconfig = match &config.kubeconfig {
        Some(path) => Kubeconfig::read_from(path),
        None => Kubeconfig::read(),
    };
    let options =
        KubeConfigOptions { context: config.context.clone(), ..KubeConfigOptions::default() };
    let found = kube::Config::from_custom_kubeconfig(kubeconfig.map_err(unreadable)?, &options);
    found.await.map_err(unreadable)
}
