//! CSI and kubelet plugin registration: the messages, a client, the set-up of a server, and the classes of gRPC errors.
//!
//! Does not know Kubernetes objects, mounts or disks. Callers of drivers use [`Client`]; drivers use [`server`].

mod authority;
mod call;
mod client;
mod endpoint;
mod huffman;
mod in_flight;
pub mod metrics;
mod policy;
mod redact;
mod registration_client;
pub mod server;
mod stream;
pub mod validate;

/// CSI v1, generated. The `Debug` output of a message shows only the keys of its secrets.
#[allow(clippy::all, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("csi.v1");
    include!(concat!(env!("OUT_DIR"), "/redacted.rs"));
}

/// Kubelet plugin registration, generated. The service trait is `registration_server::Registration`.
#[allow(clippy::all, unreachable_pub)]
pub mod registration {
    tonic::include_proto!("pluginregistration");

    /// The `type` in the [`PluginInfo`] of a CSI driver.
    pub const CSI_PLUGIN: &str = "CSIPlugin";
}

pub use call::CallError;
pub use client::Client;
pub use endpoint::{Endpoint, EndpointError};
pub use in_flight::{InFlight, InFlightGuard};
pub use policy::{ErrorClass, classify, is_infeasible};
pub use registration_client::RegistrationClient;
pub use stream::MessageStream;
pub use tonic::{Code, Status};
