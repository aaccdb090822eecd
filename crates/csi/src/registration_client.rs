//! The node's side of plugin registration: GetInfo and NotifyRegistrationStatus.
use std::{path::PathBuf, time::Duration};

use crate::{
    Endpoint,
    call::{CallError, Transport},
    registration::{InfoRequest, PluginInfo, RegistrationStatus, registration_client},
};

/// Plugins answer both calls from memory; one that needs longer hangs.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct RegistrationClient {
    transport: Transport,
}

impl RegistrationClient {
    pub fn new(socket: impl Into<PathBuf>) -> RegistrationClient {
        RegistrationClient { transport: Transport::new(Endpoint::unix(socket), DEFAULT_DEADLINE) }
    }

    pub fn with_deadline(self, deadline: Duration) -> RegistrationClient {
        RegistrationClient { transport: self.transport.with_deadline(deadline) }
    }

    pub async fn get_info(&self) -> Result<PluginInfo, CallError> {
        self.transport
            .call("GetInfo", InfoRequest {}, |channel, request| async move {
                registration_client::RegistrationClient::new(channel).get_info(request).await
            })
            .await
    }

    /// Sends the outcome of the registration. `Err` contains the reason for the plugin's log.
    pub async fn notify(&self, outcome: Result<(), String>) -> Result<(), CallError> {
        let status =
            RegistrationStatus { plugin_registered: outcome.is_ok(), error: outcome.err().unwrap_or_default() };
        self.transport
            .call("NotifyRegistrationStatus", status, |channel, request| async move {
                registration_client::RegistrationClient::new(channel).notify_registration_status(request).await
            })
            .await
            .map(|_| ())
    }
}
