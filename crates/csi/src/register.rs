//! The node's side of plugin registration: asks a socket who it is and tells it the outcome.
use std::{path::PathBuf, time::Duration};

use crate::{
    Endpoint,
    call::{CallError, Transport},
    registration::{InfoRequest, PluginInfo, RegistrationStatus, registration_client},
};

/// GetInfo answers from memory; a plugin that needs longer hangs.
const DEADLINE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct RegistrationClient {
    transport: Transport,
}

impl RegistrationClient {
    pub fn new(socket: impl Into<PathBuf>) -> RegistrationClient {
        RegistrationClient { transport: Transport::new(Endpoint::unix(socket), DEADLINE) }
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

    /// `Err` carries the reason that the plugin is told.
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
