//! The Kubernetes API: http → authentication → authorization → admission → strategy of the kind → store.
//!
//! [`ApiServer`] answers kubectl and other clients over TLS, and components in the same process through
//! [`ApiServer::client`], without a socket. Both go through the same code.

mod accounts;
mod admission;
mod api;
mod audit;
mod authenticate;
mod authorize;
mod custom;
mod descriptor;
#[cfg(test)]
mod dice;
mod discovery;
mod endpoint;
mod error;
mod expiry;
mod field;
mod follow;
mod guard;
mod http;
mod kind;
mod kubeconfig;
mod limits;
mod managed;
mod memo;
mod meta;
mod metrics;
mod names;
mod openapi;
mod patch;
mod pki;
mod raw;
mod recent;
mod render;
mod review;
mod schema;
mod security;
mod selector;
mod serve;
mod strategy;
mod strict;
mod table;
mod view;

use std::convert::Infallible;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ::http::{Request, Response};
use bytes::Bytes;
use cleat_store::embedded::{History, Seal};
use cleat_store::{EmbeddedStore, Store};
use futures::future::BoxFuture;
use http_body_util::{BodyExt as _, Full};
use k8s_openapi::api::core::v1::Namespace;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use api::{Api, Catalog};
use audit::{Audit, Ids};
use authenticate::token::Signer;
use authenticate::{Caller, Peer};
use authorize::Authorizer;
pub use cleat_store::embedded::KeyFileError;
use http::body::ApiBody;
pub use limits::Limits;
use metrics::Metrics;
pub use pki::PkiError;
use recent::Recent;
use security::Security;
pub use serve::TlsError;

/// Namespaces that are always there.
const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];

/// How long `close` waits for requests in flight.
const RELEASE: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Config {
    /// Where the store, the certificates and the kubeconfig are.
    pub data_dir: PathBuf,
    /// Port 0 takes any free port; `ApiServer::address` tells which.
    pub listen: SocketAddr,
    /// Names and addresses clients use to reach the server, besides this machine's own.
    pub extra_names: Vec<String>,
    pub history: History,
    pub limits: Limits,
    /// Where every request is noted, if anywhere.
    pub audit_log: Option<PathBuf>,
    /// The keys Secrets are encrypted with on disk, if they are.
    pub encryption_key: Option<PathBuf>,
    /// What others in the process count, to be told at `/metrics` with the server's own.
    pub more_metrics: Vec<fn(&mut prometheus_client::registry::Registry)>,
}

/// What is private, and encrypted on disk when there is a key.
const SEALED: [&str; 1] = ["/registry/secrets/"];

impl Config {
    pub fn new(data_dir: impl Into<PathBuf>, listen: SocketAddr) -> Self {
        Self {
            data_dir: data_dir.into(),
            listen,
            extra_names: Vec::new(),
            history: History::default(),
            limits: Limits::default(),
            audit_log: None,
            encryption_key: None,
            more_metrics: Vec::new(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot make the data directory {path}")]
    DataDir {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Store(#[from] cleat_store::OpenError),
    #[error(transparent)]
    Keys(#[from] KeyFileError),
    #[error("cannot write the audit log {path}")]
    Audit {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot make the built-in roles: {0}")]
    Roles(String),
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("cannot listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot make the namespace {name}: {why}")]
    Seed { name: &'static str, why: String },
}

/// A call into the server, which need not be sent anywhere.
pub type Direct = dyn Fn(Request<Bytes>) -> BoxFuture<'static, Response<Bytes>> + Send + Sync;

/// A running API on an embedded store.
pub struct ApiServer {
    api: Arc<Api>,
    listener: Arc<TcpListener>,
    address: SocketAddr,
    tls: TlsAcceptor,
    kubeconfig: PathBuf,
    released: watch::Receiver<()>,
}

impl ApiServer {
    /// Opens the data directory, or makes it, and binds the socket. Connections wait until `serve` runs; in-process
    /// clients work at once.
    pub async fn open(config: Config) -> Result<Self, OpenError> {
        let data = config.data_dir;
        make_private(&data).map_err(|source| OpenError::DataDir { path: data.clone(), source })?;
        let path = data.join("store.redb");
        let history = config.history;
        let seal = config.encryption_key.as_deref().map(|keys| Seal::read(keys, &SEALED)).transpose()?;
        let store = tokio::task::spawn_blocking(move || EmbeddedStore::open_sealed(&path, history, seal, &SEALED))
            .await
            .map_err(|e| OpenError::DataDir { path: data.clone(), source: io::Error::other(e) })??;
        let mut names = config.extra_names;
        names.extend(rustix::system::uname().nodename().to_str().ok().filter(|n| !n.is_empty()).map(Into::into));
        if !config.listen.ip().is_unspecified() {
            names.push(config.listen.ip().to_string());
        }
        let pki = pki::open(&data.join("pki"), &names)?;
        let tls = serve::acceptor(&pki)?;
        let bind = |source| OpenError::Listen { address: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let kubeconfig = data.join("kubeconfig");
        pki::write_private(&kubeconfig, kubeconfig::content(&pki, address).as_bytes())?;
        let audit = config.audit_log.map(|path| match Audit::open(&path) {
            Ok(audit) => Ok(audit),
            Err(source) => Err(OpenError::Audit { path, source }),
        });
        let security = Security {
            signer: Signer::open(&data.join("pki"))?,
            authorizer: Authorizer::default(),
            audit: audit.transpose()?,
            ids: Ids::new(),
            metrics: Metrics::new(store.statistics(), &config.more_metrics),
        };
        let store: Arc<dyn Store> = Arc::new(store);
        let (release, released) = watch::channel(());
        let closing = CancellationToken::new();
        let (catalog, limits) = (Catalog::builtin(), config.limits);
        let lines = Arc::default();
        let recent = Recent::default();
        let api = Arc::new(Api { store, catalog, lines, recent, security, limits, closing, _release: release });
        for name in NAMESPACES {
            seed(&api, name).await?;
        }
        let made = async {
            authorize::bootstrap::ensure(&api).await?;
            authorize::aggregate::collect_all(&api).await
        };
        made.await.map_err(|e| OpenError::Roles(e.to_string()))?;
        tokio::spawn(authorize::aggregate::run(api.clone()));
        tokio::spawn(accounts::run(api.clone()));
        custom::register::load(&api).await;
        tokio::spawn(custom::register::run(api.clone()));
        tokio::spawn(expiry::run(api.clone()));
        tracing::info!(%address, data = %data.display(), "API server open");
        Ok(Self { api, listener: Arc::new(listener), address, tls, kubeconfig, released })
    }

    /// A client inside the process, acting as `user` with every right. It needs no socket. Once the server is gone it
    /// is told that the service is unavailable.
    pub fn client(&self, user: &str) -> kube::Client {
        self.client_of(Caller::trusted(user))
    }

    /// A client inside the process with the rights that roles grant `user`; `system:node:NAME` is that node.
    pub fn component(&self, user: &str) -> kube::Client {
        self.client_of(Caller::component(user))
    }

    /// The same component without a client around it: each call goes straight into the server, on the caller's task, and
    /// brings the whole answer. That of a watch comes when it ends. A write with a [`cleat_api::TypedBody`] is answered with
    /// a [`cleat_api::TypedReply`] where the kind has that type.
    pub fn direct(&self, user: &str) -> Arc<Direct> {
        let api = Arc::downgrade(&self.api);
        let peer = Peer::Internal(Arc::new(Caller::component(user)));
        Arc::new(move |request: Request<Bytes>| {
            let (api, peer) = (api.upgrade(), peer.clone());
            Box::pin(async move {
                let answer = match api {
                    Some(api) => {
                        let closing = api.closing.clone();
                        http::handle(api, request.map(Full::new), peer, closing).await
                    }
                    None => http::unavailable(),
                };
                let (parts, body) = answer.into_parts();
                let body = match body {
                    ApiBody::Full(bytes) => bytes.unwrap_or_default(),
                    streamed => match streamed.collect().await {
                        Ok(all) => all.to_bytes(),
                        Err(never) => match never {},
                    },
                };
                Response::from_parts(parts, body)
            })
        })
    }

    fn client_of(&self, caller: Caller) -> kube::Client {
        let api = Arc::downgrade(&self.api);
        let peer = Peer::Internal(Arc::new(caller));
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let (api, peer) = (api.upgrade(), peer.clone());
            async move {
                Ok::<_, Infallible>(match api {
                    Some(api) => {
                        let closing = api.closing.clone();
                        http::handle(api, request, peer, closing).await
                    }
                    None => http::unavailable(),
                })
            }
        });
        kube::Client::new(service, "default")
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The file with the administrator's access, readable by the owner alone.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Serves the socket until stopped. Watches end at once, other requests get a moment to finish.
    pub fn serve(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + 'static {
        serve::serve(self.api.clone(), self.listener.clone(), self.tls.clone(), stop)
    }
}

impl ApiServer {
    /// Ends everything and waits until the data directory is free for another server. Dropping does the same without
    /// waiting.
    pub async fn close(self) {
        let mut released = self.released.clone();
        drop(self);
        // The sender goes away with the last user of the store, after the store itself.
        let gone = async { while released.changed().await.is_ok() {} };
        if tokio::time::timeout(RELEASE, gone).await.is_err() {
            tracing::warn!("the data directory is still in use");
        }
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.api.closing.cancel();
    }
}

/// A directory that is there already keeps the permissions its owner gave it.
fn make_private(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

async fn seed(api: &Api, name: &'static str) -> Result<(), OpenError> {
    let failed = |why: String| OpenError::Seed { name, why };
    let kinds = api.kinds();
    let kind = kinds.find("", "v1", "namespaces").ok_or_else(|| failed("the kind is missing".into()))?;
    let mut namespace = Namespace::default();
    namespace.metadata.name = Some(name.into());
    let effect = http::query::Effect::Write;
    let document = managed::Document::unowned(Box::new(namespace));
    match endpoint::write::insert(api, &**kind, None, document, effect).await {
        Ok(_) | Err(error::ApiError::AlreadyExists { .. }) => Ok(()),
        Err(error) => Err(failed(error.to_string())),
    }
}
