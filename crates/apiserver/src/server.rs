//! [`ApiServer`]: opens the data directory, wires the parts of the server together, starts its background tasks, and
//! gives clients to components in the process.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cleat_api::transport::Transport;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::managed_fields::ManagedObject;
use cleat_auth::actor::Actor;
use cleat_auth::audit::{AuditIdGenerator, AuditLog};
use cleat_auth::authenticate::token::TokenSigner;
use cleat_auth::authenticate::{Authenticator, Caller, Peer};
use cleat_auth::authorize::Authorizer;
use cleat_auth::pki;
use cleat_registry::catalog::KindCatalog;
use cleat_registry::reader::ObjectReader;
use cleat_store::embedded::Encryptor;
use cleat_store::{EmbeddedStore, Store};
use http::Request;
use k8s_openapi::api::core::v1::Namespace;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, OpenError};
use crate::http::body::HttpBody;
use crate::http::query::WriteMode;
use crate::local_transport::LocalTransport;
use crate::metrics::Metrics;
use crate::security::Security;
use crate::state::ServerState;
use crate::{
    aggregate_roles, bootstrap_roles, custom_resource_definitions, default_service_accounts, endpoint, event_expiry,
    handler, kubeconfig, serve,
};

/// Namespaces that exist in every cluster. They are created at each start if they are missing.
const INITIAL_NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];
/// The key prefixes whose values are encrypted on disk if there is a key.
const ENCRYPTED_PREFIXES: [&str; 1] = ["/registry/secrets/"];
/// The time that `close` waits for requests in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A running API server on an embedded store.
pub struct ApiServer {
    state: Arc<ServerState>,
    listener: Arc<TcpListener>,
    address: SocketAddr,
    tls: TlsAcceptor,
    kubeconfig: PathBuf,
    /// Ends when the last user of the state, and with it the store, is gone.
    released: watch::Receiver<()>,
}

impl ApiServer {
    /// Opens or creates the data directory and binds the socket. Connections wait until `serve` runs; clients in the
    /// process work at once.
    pub async fn open(config: Config) -> Result<Self, OpenError> {
        let data = config.data_dir;
        create_private_dir(&data).map_err(|source| OpenError::DataDir { path: data.clone(), source })?;
        let store_path = data.join("store.redb");
        let history = config.history;
        let keys = config.encryption_key.as_deref();
        let encryptor = keys.map(|keys| Encryptor::read(keys, &ENCRYPTED_PREFIXES)).transpose()?;
        let store = tokio::task::spawn_blocking(move || {
            EmbeddedStore::open_encrypted(&store_path, history, encryptor, &ENCRYPTED_PREFIXES)
        });
        let store =
            store.await.map_err(|e| OpenError::DataDir { path: data.clone(), source: io::Error::other(e) })??;
        let mut names = config.extra_names;
        names.extend(rustix::system::uname().nodename().to_str().ok().filter(|n| !n.is_empty()).map(Into::into));
        if !config.listen.ip().is_unspecified() {
            names.push(config.listen.ip().to_string());
        }
        let pki = pki::open(&data.join("pki"), &names)?;
        let tls = serve::acceptor(&pki)?;
        let cannot_listen = |source| OpenError::Listen { address: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(cannot_listen)?;
        let address = listener.local_addr().map_err(cannot_listen)?;
        let kubeconfig = data.join("kubeconfig");
        pki::write_private(&kubeconfig, kubeconfig::render(&pki, address).as_bytes())?;
        let audit = config.audit_log.map(|path| match AuditLog::open(&path) {
            Ok(audit) => Ok(audit),
            Err(source) => Err(OpenError::Audit { path, source }),
        });
        let metrics = Metrics::new(store.statistics(), &config.more_metrics);
        let store: Arc<dyn Store> = Arc::new(store);
        let catalog = Arc::new(KindCatalog::builtin());
        let objects = ObjectReader::new(store.clone(), catalog.clone());
        let security = Security {
            authenticator: Authenticator::new(TokenSigner::open(&data.join("pki"))?, objects.clone()),
            authorizer: Authorizer::new(objects),
            audit_log: audit.transpose()?,
            audit_ids: AuditIdGenerator::with_random_start(),
            metrics,
        };
        let (dropped_last, released) = watch::channel(());
        let closing = CancellationToken::new();
        let limits = config.limits;
        let state = Arc::new(ServerState { store, catalog, security, limits, closing, _dropped_last: dropped_last });
        for name in INITIAL_NAMESPACES {
            ensure_namespace(&state, name).await?;
        }
        let roles = async {
            bootstrap_roles::ensure(&state).await?;
            aggregate_roles::aggregate_all(&state).await
        };
        roles.await.map_err(|e| OpenError::Roles(e.to_string()))?;
        tokio::spawn(aggregate_roles::run(state.clone()));
        tokio::spawn(default_service_accounts::run(state.clone()));
        custom_resource_definitions::load(&state).await;
        tokio::spawn(custom_resource_definitions::run(state.clone()));
        tokio::spawn(event_expiry::run(state.clone()));
        tracing::info!(%address, data = %data.display(), "API server open");
        Ok(Self { state, listener: Arc::new(listener), address, tls, kubeconfig, released })
    }

    /// A client in the process that acts as `user` and has every right. It uses no socket. After the server is closed,
    /// its requests fail with 503 Service Unavailable.
    pub fn client(&self, user: &str) -> kube::Client {
        self.client_as(Caller::trusted(user))
    }

    /// A client in the process with the rights that roles grant to `user`. `system:node:NAME` has the rights of that
    /// node.
    pub fn component(&self, user: &str) -> kube::Client {
        self.client_as(Caller::component(user))
    }

    /// The transport of a Cleat component in the process, with the rights that roles grant to `user`. Requests run on
    /// the caller's task, and objects are passed without encoding.
    pub fn transport(&self, user: &str) -> Arc<dyn Transport> {
        Arc::new(LocalTransport::new(&self.state, Caller::component(user)))
    }

    fn client_as(&self, caller: Caller) -> kube::Client {
        let state = Arc::downgrade(&self.state);
        let peer = Peer::Internal(Arc::new(caller));
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let (state, peer) = (state.upgrade(), peer.clone());
            async move {
                Ok::<_, Infallible>(match state {
                    Some(state) => {
                        let closing = state.closing.clone();
                        handler::handle(state, request.map(HttpBody), peer, closing).await
                    }
                    None => handler::unavailable(),
                })
            }
        });
        kube::Client::new(service, "default")
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The kubeconfig file with the administrator's credentials. Only the owner of the file can read it.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Serves the socket until `stop` is cancelled. Then watches end at once, and other requests get a few seconds to
    /// finish.
    pub fn serve(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + 'static {
        serve::serve(self.state.clone(), self.listener.clone(), self.tls.clone(), stop)
    }

    /// Stops everything and waits until another server can open the data directory. Dropping the server does the same
    /// without waiting.
    pub async fn close(self) {
        let mut released = self.released.clone();
        drop(self);
        // The sender is dropped with the last user of the state, after the store.
        let closed = async { while released.changed().await.is_ok() {} };
        if tokio::time::timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::warn!("data directory still in use after the server was closed");
        }
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.state.closing.cancel();
    }
}

/// Creates a directory that only its owner can read. An existing directory keeps its permissions.
fn create_private_dir(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

async fn ensure_namespace(state: &ServerState, name: &'static str) -> Result<(), OpenError> {
    let failed = |why: String| OpenError::Namespace { name, why };
    let kinds = state.kinds();
    let kind = kinds.find("", "v1", "namespaces").ok_or_else(|| failed("the kind is missing".into()))?;
    let mut namespace = Namespace::default();
    namespace.metadata.name = Some(name.into());
    let document = ManagedObject::without_owners(Box::new(namespace));
    match endpoint::write::insert(state, &Actor::Server, &**kind, None, document, WriteMode::Persist).await {
        Ok(_) | Err(ApiError::AlreadyExists { .. }) => Ok(()),
        Err(error) => Err(failed(error.to_string())),
    }
}
