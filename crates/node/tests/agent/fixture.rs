//! A node agent with an API server and either the real block driver, with loop devices and mounts, or a scripted driver. The
//! tests do the work of the controllers themselves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleat_api::names;
use cleat_csi::registration::registration_server::{Registration, RegistrationServer};
use cleat_csi::registration::{CSI_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use cleat_csi::v1::{self, volume_capability::access_mode::Mode};
use cleat_csi::{Client, Endpoint, server};
use cleat_drivers::block;
use cleat_host::{loopdev, mount};
use cleat_node::{Agent, Config};
use cleat_testing::{Method, NodeCall, ScriptedDriver, build};
use k8s_openapi::api::core::v1::{Pod, VolumeMount};
use k8s_openapi::api::storage::v1::{CSIDriver, CSIDriverSpec};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::json_api::JsonApi;

pub(crate) const NODE: &str = "n1";

pub(crate) struct NodeFixture {
    pub(crate) api: JsonApi,
    pub(crate) directory: TempDir,
    /// The real driver.
    driver: Option<Client>,
    driver_stop: CancellationToken,
    agent: Option<(CancellationToken, JoinHandle<()>)>,
    /// The names of the created pods, by uid.
    pods: Mutex<BTreeMap<String, String>>,
}

impl NodeFixture {
    /// With a scripted driver.
    pub(crate) async fn scripted() -> (NodeFixture, ScriptedDriver) {
        let directory = TempDir::with_prefix("cleat-node-").unwrap();
        let driver_stop = CancellationToken::new();
        let driver = ScriptedDriver::new(block::NAME);
        driver.serve_at(&Endpoint::unix(directory.path().join("driver.sock")), &driver_stop).await;
        (NodeFixture::with_parts(directory, None, driver_stop, true).await, driver)
    }

    pub(crate) async fn new() -> NodeFixture {
        NodeFixture::with_driver(true).await
    }

    /// With a CSIDriver that requires no attachment.
    pub(crate) async fn without_attachment() -> NodeFixture {
        NodeFixture::with_driver(false).await
    }

    async fn with_driver(attach_required: bool) -> NodeFixture {
        assert!(rustix::process::geteuid().is_root(), "these tests mount file systems: run them as root");
        let directory = TempDir::with_prefix("cleat-node-").unwrap();
        let endpoint = Endpoint::unix(directory.path().join("driver.sock"));
        let config = block::Config::new(endpoint.clone(), directory.path().join("pool"), NODE);
        let driver_stop = CancellationToken::new();
        tokio::spawn(block::run(config, driver_stop.clone()));
        let driver = Client::new(endpoint);
        driver.wait_ready(Duration::from_secs(30)).await.unwrap();
        NodeFixture::with_parts(directory, Some(driver), driver_stop, attach_required).await
    }

    async fn with_parts(
        directory: TempDir,
        driver: Option<Client>,
        driver_stop: CancellationToken,
        attach_required: bool,
    ) -> NodeFixture {
        let api = JsonApi::new().await;
        let mut object = CSIDriver::default();
        object.metadata.name = Some(block::NAME.to_owned());
        object.spec = CSIDriverSpec { attach_required: Some(attach_required), ..CSIDriverSpec::default() };
        api.create("csidrivers", object).await;
        NodeFixture { api, directory, driver, driver_stop, agent: None, pods: Mutex::default() }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.directory.path().join("kubelet")
    }

    pub(crate) fn start(&mut self) {
        let stop = CancellationToken::new();
        let config = Config::new(NODE, self.root());
        let agent = Agent::new(config, self.api.node_client(NODE).into(), self.api.caches(&stop));
        let running = tokio::spawn({
            let stop = stop.clone();
            async move { agent.run(stop).await.unwrap() }
        });
        self.agent = Some((stop, running));
    }

    pub(crate) async fn stop(&mut self) {
        let (stop, running) = self.agent.take().unwrap();
        stop.cancel();
        running.await.unwrap();
    }

    /// Ends the agent as a crash would: at its next await point.
    pub(crate) async fn crash(&mut self) {
        let (stop, running) = self.agent.take().unwrap();
        running.abort();
        let _ = running.await;
        // A crash of the process would end the caches too.
        stop.cancel();
    }

    /// Serves the driver's registration socket until the driver stops.
    pub(crate) async fn serve_registration(&self) {
        let registry = self.root().join("plugins_registry");
        std::fs::create_dir_all(&registry).unwrap();
        let info = PluginInfo {
            r#type: CSI_PLUGIN.to_owned(),
            name: block::NAME.to_owned(),
            endpoint: self.directory.path().join("driver.sock").display().to_string(),
            supported_versions: vec!["1.0.0".to_owned()],
        };
        let endpoint = Endpoint::unix(registry.join("block-reg.sock"));
        let stop = self.driver_stop.clone();
        tokio::spawn(async move {
            server::serve(&endpoint, Routes::new(RegistrationServer::new(FakePlugin(info))), stop).await.unwrap();
        });
    }

    /// Creates a claim that is bound to a volume. With the real driver the volume exists. Returns the volume handle.
    pub(crate) async fn volume(&self, claim: &str) -> String {
        let name = format!("pv-{claim}");
        let mut volume = build::volume(&name, "", "64Mi");
        let csi = volume.spec.as_mut().unwrap().csi.as_mut().unwrap();
        csi.fs_type = Some("ext4".to_owned());
        if let Some(driver) = &self.driver {
            let request = v1::CreateVolumeRequest {
                name: name.clone(),
                capacity_range: Some(v1::CapacityRange { required_bytes: 64 << 20, limit_bytes: 0 }),
                volume_capabilities: vec![capability()],
                ..Default::default()
            };
            let created = driver.create_volume(request).await.unwrap().volume.unwrap();
            csi.volume_handle = created.volume_id;
            csi.volume_attributes = Some(created.volume_context.into_iter().collect());
        }
        let handle = csi.volume_handle.clone();
        let (claim, mut volume) = build::bound(build::claim("default", claim, None, "64Mi"), volume);
        let claim = self.api.create("persistentvolumeclaims", claim).await;
        let reference = volume.spec.as_mut().unwrap().claim_ref.as_mut().unwrap();
        reference.uid = claim["metadata"]["uid"].as_str().map(ToOwned::to_owned);
        self.api.create("persistentvolumes", volume).await;
        handle
    }

    /// Creates the pod and stores its uid.
    pub(crate) async fn create_pod(&self, pod: impl serde::Serialize) {
        let pod = self.api.create("pods", pod).await;
        let field_value = |field: &str| pod["metadata"][field].as_str().unwrap().to_owned();
        self.pods.lock().insert(field_value("uid"), field_value("name"));
    }

    pub(crate) fn uid(&self, pod: &str) -> String {
        let pods = self.pods.lock();
        pods.iter().find(|(_, name)| *name == pod).map(|(uid, _)| uid.clone()).unwrap()
    }

    /// The calls of the scripted driver's node service: the method, and for publish and unpublish the name of the pod.
    pub(crate) fn calls(&self, driver: &ScriptedDriver) -> Vec<String> {
        let pods = self.pods.lock();
        let named = |call: &NodeCall| {
            let method = match call.method {
                Method::NodeStageVolume => "stage",
                Method::NodePublishVolume => "publish",
                Method::NodeUnpublishVolume => "unpublish",
                Method::NodeUnstageVolume => "unstage",
                other => panic!("{other:?} is not a call of the node service"),
            };
            let uid = call.path.split('/').skip_while(|part| *part != "pods").nth(1);
            uid.map_or(method.to_owned(), |uid| format!("{method} {}", pods[uid]))
        };
        driver.state().node_calls.iter().map(named).collect()
    }

    pub(crate) fn pod(&self, name: &str, claims: &[&str]) -> Pod {
        let mut pod = build::pod("default", name, NODE, claims);
        let mounts = claims.iter().map(|claim| VolumeMount {
            name: format!("v-{claim}"),
            mount_path: format!("/{claim}"),
            ..VolumeMount::default()
        });
        pod.spec.as_mut().unwrap().containers[0].volume_mounts = Some(mounts.collect());
        pod
    }

    /// Does the work of the attach/detach controller and the attacher: waits until the node reports the volume in use, then
    /// attaches it.
    pub(crate) async fn attach(&self, handle: &str) {
        let unique = names::unique_volume_name(block::NAME, handle);
        self.api.wait_until("the volume is reported in use", async |api| in_use(api).await.contains(&unique)).await;
        self.publish_to_node(handle).await;
        let mut attachment = build::attachment(&build::volume("x", "", "1"), NODE);
        attachment.metadata.name = Some(names::attachment(handle, block::NAME, NODE));
        attachment.spec.attacher = block::NAME.to_owned();
        let mut attachment = serde_json::to_value(attachment).unwrap();
        attachment["status"] = json!({ "attached": true });
        self.api.create("volumeattachments", attachment).await;
        self.report_attached(&[handle]).await;
    }

    /// Writes `volumesAttached`, as the attach/detach controller does.
    pub(crate) async fn report_attached(&self, handles: &[&str]) {
        let entry = |handle: &&str| json!({ "name": names::unique_volume_name(block::NAME, handle), "devicePath": "" });
        let list: Vec<_> = handles.iter().map(entry).collect();
        self.api.edit_status("nodes", "", NODE, json!({ "volumesAttached": list })).await;
    }

    /// Calls ControllerPublishVolume of the real driver.
    pub(crate) async fn publish_to_node(&self, handle: &str) {
        let request = v1::ControllerPublishVolumeRequest {
            volume_id: handle.to_owned(),
            node_id: NODE.to_owned(),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        if let Some(driver) = &self.driver {
            driver.controller_publish_volume(request).await.unwrap();
        }
    }

    pub(crate) async fn wait_until_mounted(&self, pod: &str) {
        self.api.wait_until("the pod's volumes are mounted", async |api| condition(api, pod).await.0 == "True").await;
    }

    pub(crate) async fn wait_until_unused(&self) {
        self.api.wait_until("nothing is in use any more", async |api| in_use(api).await.is_empty()).await;
    }

    /// Deletes the pod as kubectl does.
    pub(crate) async fn delete(&self, pod: &str) {
        self.api.delete("pods", "default", pod).await;
    }

    pub(crate) async fn wait_until_gone(&self, pod: &str) {
        self.api.wait_until("the pod is gone", async |api| api.get("pods", "default", pod).await.is_none()).await;
    }

    pub(crate) fn target(&self, pod: &str, claim: &str) -> PathBuf {
        self.pod_dir(pod).join(format!("volumes/kubernetes.io~csi/pv-{claim}/mount"))
    }

    pub(crate) fn pod_dir(&self, pod: &str) -> PathBuf {
        self.root().join("pods").join(self.uid(pod))
    }

    pub(crate) fn staged(&self, handle: &str) -> PathBuf {
        let driver = self.root().join("plugins/kubernetes.io/csi").join(block::NAME);
        driver.join(names::sha256_hex(handle)).join("globalmount")
    }

    /// The mounts below the fixture's directory.
    pub(crate) fn mounts(&self) -> Vec<(u32, PathBuf)> {
        let here = self.directory.path().canonicalize().unwrap();
        let table = mount::table().unwrap();
        table.into_iter().filter(|m| m.target.starts_with(&here)).map(|m| (m.id, m.target)).collect()
    }
}

impl Drop for NodeFixture {
    fn drop(&mut self) {
        if let Some((stop, _)) = &self.agent {
            stop.cancel();
        }
        self.driver_stop.cancel();
        for (_, target) in self.mounts().iter().rev() {
            let _ = mount::unmount(target);
        }
        let images = std::fs::read_dir(self.directory.path().join("pool/volumes"));
        for entry in images.into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|e| e == "img") {
                let _ = loopdev::detach_file(&entry.path());
            }
        }
    }
}

fn capability() -> v1::VolumeCapability {
    use v1::volume_capability::{AccessMode, AccessType, MountVolume};
    let mount = MountVolume { fs_type: "ext4".to_owned(), ..MountVolume::default() };
    v1::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter as i32 }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

pub(crate) async fn in_use(api: &JsonApi) -> Vec<String> {
    let node = api.get("nodes", "", NODE).await.unwrap_or_default();
    let list = node["status"]["volumesInUse"].as_array().cloned().unwrap_or_default();
    list.iter().map(|v| v.as_str().unwrap().to_owned()).collect()
}

/// Status, reason and message of the condition `cleat.dev/VolumesMounted`.
pub(crate) async fn condition(api: &JsonApi, pod: &str) -> (String, String, String) {
    let pod = api.get("pods", "default", pod).await.unwrap_or_default();
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.into_iter().find(|c| c["type"] == "cleat.dev/VolumesMounted").unwrap_or_default();
    let field_value = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    (field_value("status"), field_value("reason"), field_value("message"))
}

pub(crate) fn record(target: &Path) -> Value {
    let json = std::fs::read_to_string(target.parent().unwrap().join("vol_data.json")).unwrap();
    serde_json::from_str(&json).unwrap()
}

struct FakePlugin(PluginInfo);

#[tonic::async_trait]
impl Registration for FakePlugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.0.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        assert!(status.plugin_registered, "{}", status.error);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
