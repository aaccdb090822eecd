//! Registers a CSI driver with the node agent: serves the plugin registration API on a socket in the plugin registry
//! directory.
//!
//! The node agent finds the socket, calls GetInfo, and reports the result with NotifyRegistrationStatus. If the agent
//! refuses the driver, the socket is removed and created again after [`RETRY_INTERVAL`]: the agent tries again only when
//! a socket appears.

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

const RETRY_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct NodeRegistrarOptions {
    /// The driver's own socket, as the node agent reaches it.
    pub driver_socket: PathBuf,
    /// The plugin registry: the directory that the node agent watches.
    pub registry: PathBuf,
}

/// Serves the registration socket until `stop` is cancelled, and then removes it.
pub async fn run(options: NodeRegistrarOptions, stop: CancellationToken) -> Result<(), ServeError> {
    let client = Client::new(Endpoint::unix(&options.driver_socket));
    let Some(driver) = Driver::connect(client, &stop).await else { return Ok(()) };
    let socket = options.registry.join(format!("{}-reg.sock", driver.name));
    while !stop.is_cancelled() {
        let stop_serving = stop.child_token();
        let (refused, mut refusal) = watch::channel(false);
        let service = RegistrationService {
            info: PluginInfo {
                r#type: CSI_PLUGIN.to_owned(),
                name: driver.name.clone(),
                endpoint: options.driver_socket.display().to_string(),
                supported_versions: vec!["1.0.0".to_owned()],
            },
            refused,
        };
        let stop_on_refusal = stop_serving.clone();
        let watcher = tokio::spawn(async move {
            if refusal.wait_for(|refused| *refused).await.is_ok() {
                stop_on_refusal.cancel();
            }
        });
        serve(&Endpoint::unix(&socket), Routes::new(RegistrationServer::new(service)), stop_serving).await?;
        watcher.abort();
        remove_socket(&socket);
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
        }
    }
    Ok(())
}

fn remove_socket(socket: &Path) {
    match std::fs::remove_file(socket) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => warn!(socket = %socket.display(), %error, "registration socket could not be removed"),
    }
}

struct RegistrationService {
    info: PluginInfo,
    /// Set to true when the node agent refuses the driver.
    refused: watch::Sender<bool>,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
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
