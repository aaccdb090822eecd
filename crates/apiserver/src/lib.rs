//! The Kubernetes API server.
//!
//! A request passes these steps: `http` parses it, `handler` authenticates and authorizes the caller and routes the
//! request, `endpoint` carries out the verb with admission and the strategy of the kind, and the store makes a write
//! durable before the reply is sent.
//!
//! [`ApiServer`] serves kubectl and other clients over TLS, and components in the same process without a socket,
//! through [`ApiServer::client`] and [`ApiServer::transport`]. Requests of both pass the same steps.

mod admission;
mod aggregate_roles;
mod bootstrap_roles;
mod config;
mod custom_resource_definitions;
mod default_service_accounts;
mod discovery;
mod endpoint;
mod event_expiry;
mod handler;
mod http;
mod kubeconfig;
mod limits;
mod local_transport;
mod metrics;
mod openapi;
mod review;
mod security;
mod serve;
mod server;
mod state;
mod watch_loop;

pub use cleat_auth::pki::PkiError;
pub use cleat_store::embedded::KeyFileError;
pub use config::{Config, OpenError};
pub use limits::Limits;
pub use serve::TlsError;
pub use server::ApiServer;
