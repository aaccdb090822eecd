//! The CSI and kubelet registration contracts: messages, client, server set-up, and what each gRPC code means.
//!
//! Knows nothing of Kubernetes objects, mounts or disks. Whoever calls a driver goes through [`Client`]; whoever is a
//! driver goes through [`server`].

mod authority;
mod call;
mod client;
mod endpoint;
mod huffman;
mod inflight;
pub mod metrics;
mod policy;
mod redact;
mod register;
pub mod server;
mod stream;
pub mod validate;

/// CSI v1, generated. Messages with secrets print only the secrets' keys.
#[allow(clippy::all, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("csi.v1");
    include!(concat!(env!("OUT_DIR"), "/redacted.rs"));
}

/// Kubelet plugin registration, generated. The service trait is `registration_server::Registration`.
#[allow(clippy::all, unreachable_pub)]
pub mod registration {
    tonic::include_proto!("pluginregistration");

    /// The `type` a CSI driver announces.
    pub const CSI_PLUGIN: &str = "CSIPlugin";
}

pub use call::CallError;
pub use client::Client;
pub use endpoint::{Endpoint, EndpointError};
pub use inflight::{InFlight, InFlightGuard};
pub use policy::{Class, classify, infeasible};
pub use register::RegistrationClient;
pub use stream::Messages;
pub use tonic::{Code, Status};
