//! Announces a driver to the node agent: a socket in the plugin registry that says who the driver is and where.
//!
//! The agent finds the socket, asks, and answers with the outcome. A refusal takes the socket away and offers it again
//! after a pause, which is what makes the agent try again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cleat_csi::registration::registration_server::{Registration, RegistrationServer};
use cleat_csi::registration::{CSI_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use cleat_csi::server::{ServeError, serve};
use cleat_csi::{Client, Endpoint};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use crate::Driver;

const OFFER_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Which driver to announce, and where.
#[derive(Clone, Debug)]
pub struct Announcement {
    /// The driver's own socket, as the node agent reaches it.
    pub driver_socket: PathBuf,
    /// The directory the node agent watches.
    pub registry: PathBuf,
}

/// Announces the driver until `stop`; then takes the socket away.
pub async fn run(announcement: Announcement, stop: CancellationToken) -> Result<(), ServeError> {
    let client = Client::new(Endpoint::unix(&announcement.driver_socket));
    let Some(driver) = Driver::connect(client, &stop).await else { return Ok(()) };
    let socket = announcement.registry.join(format!("{}-reg.sock", driver.name));
    while !stop.is_cancelled() {
        let offer = stop.child_token();
        let (refused, mut refusal) = watch::channel(false);
        let plugin = Plugin {
            info: PluginInfo {
                r#type: CSI_PLUGIN.to_owned(),
                name: driver.name.clone(),
                endpoint: announcement.driver_socket.display().to_string(),
                supported_versions: vec!["1.0.0".to_owned()],
            },
            refused,
        };
        let end = offer.clone();
        let watching = tokio::spawn(async move {
            if refusal.wait_for(|refused| *refused).await.is_ok() {
                end.cancel();
            }
        });
        serve(&Endpoint::unix(&socket), Routes::new(RegistrationServer::new(plugin)), offer).await?;
        watching.abort();
        remove(&socket);
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(OFFER_AGAIN_AFTER) => {}
        }
    }
    Ok(())
}

fn remove(socket: &Path) {
    match std::fs::remove_file(socket) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => warn!(socket = %socket.display(), %error, "registration socket could not be removed"),
    }
}

struct Plugin {
    info: PluginInfo,
    refused: watch::Sender<bool>,
}

#[tonic::async_trait]
impl Registration for Plugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = status.into_inner();
        if status.plugin_registered {
            info!(driver = self.info.name, "driver registered with the node agent");
        } else {
            warn!(driver = self.info.name, error = status.error, "node agent refused the driver");
            self.refused.send_replace(true);
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
