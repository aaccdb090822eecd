//! The server's configuration, and the errors of opening a server with it.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use cleat_auth::pki::PkiError;
use cleat_store::embedded::{HistoryLimits, KeyFileError};

use crate::limits::Limits;
use crate::serve::TlsError;

#[derive(Clone, Debug)]
pub struct Config {
    /// The directory of the store, the certificates and the kubeconfig. Created if it does not exist.
    pub data_dir: PathBuf,
    /// Port 0 means any free port; `ApiServer::address` returns the one in use.
    pub listen: SocketAddr,
    /// Host names and addresses that clients use besides this machine's own; they become part of the server's
    /// certificate.
    pub extra_names: Vec<String>,
    pub history: HistoryLimits,
    pub limits: Limits,
    /// The audit log, one line per request. None: no audit log.
    pub audit_log: Option<PathBuf>,
    /// The file with the keys that encrypt Secrets on disk. None: Secrets are stored in clear.
    pub encryption_key: Option<PathBuf>,
    /// Register metrics of other components, to be served at `/metrics` with the server's own.
    pub more_metrics: Vec<fn(&mut prometheus_client::registry::Registry)>,
}

impl Config {
    pub fn new(data_dir: impl Into<PathBuf>, listen: SocketAddr) -> Self {
        Self {
            data_dir: data_dir.into(),
            listen,
            extra_names: Vec::new(),
            history: HistoryLimits::default(),
            limits: Limits::default(),
            audit_log: None,
            encryption_key: None,
            more_metrics: Vec::new(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot create the data directory {path}")]
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
    #[error("cannot create the built-in roles: {0}")]
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
    #[error("cannot create the namespace {name}: {why}")]
    Namespace { name: &'static str, why: String },
}
