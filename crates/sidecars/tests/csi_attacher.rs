//! The CSI attacher on a real API server, with a driver whose replies the test scripts: which requests the driver gets, how
//! its failures are handled, and that every publish is undone.

#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::names;
use cleat_apiserver::{ApiServer, Config};
use cleat_csi::v1::controller_service_capability::{Rpc, Type, rpc::Type as Capability};
use cleat_csi::v1::{self, controller_server, identity_server};
use cleat_csi::{Client as Csi, Endpoint, server};
use cleat_runtime::{Backoff, Caches, SystemClock};
use cleat_sidecars::{Context, Driver, csi_attacher};
use k8s_openapi::api::core::v1::{PersistentVolume, Secret};
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
const DRIVER: &str = "scripted.test";
const FINALIZER: &str = "external-attacher/scripted-test";

/// How one call is answered.
#[derive(Clone)]
enum ScriptedReply {
    Succeed,
    Fail(Status),
    /// The call takes effect, but no reply is sent.
    Hang,
}

#[derive(Default)]
struct Script {
    replies: VecDeque<ScriptedReply>,
    published: Vec<v1::ControllerPublishVolumeRequest>,
    unpublished: Vec<v1::ControllerUnpublishVolumeRequest>,
}

#[derive(Clone)]
struct ScriptedDriver {
    script: Arc<Mutex<Script>>,
    capabilities: &'static [Capability],
}

impl ScriptedDriver {
    async fn reply(&self) -> Result<(), Status> {
        let reply = self.script.lock().replies.pop_front().unwrap_or(ScriptedReply::Succeed);
        match reply {
            ScriptedReply::Succeed => Ok(()),
            ScriptedReply::Fail(status) => Err(status),
            ScriptedReply::Hang => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl identity_server::Identity for ScriptedDriver {
    async fn get_plugin_info(
        &self,
        _: Request<v1::GetPluginInfoRequest>,
    ) -> Result<Response<v1::GetPluginInfoResponse>, Status> {
        Ok(Response::new(v1::GetPluginInfoResponse { name: DRIVER.to_owned(), ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<v1::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<v1::GetPluginCapabilitiesResponse>, Status> {
        Ok(Response::new(v1::GetPluginCapabilitiesResponse { capabilities: Vec::new() }))
    }

    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        Ok(Response::new(v1::ProbeResponse { ready: None }))
    }
}

#[tonic::async_trait]
impl controller_server::Controller for ScriptedDriver {
    async fn controller_get_capabilities(
        &self,
        _: Request<v1::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<v1::ControllerGetCapabilitiesResponse>, Status> {
        let capability = |kind: &Capability| v1::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: (*kind).into() })),
        };
        let capabilities = self.capabilities.iter().map(capability).collect();
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<v1::ControllerPublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerPublishVolumeResponse>, Status> {
        self.script.lock().published.push(request.into_inner());
        self.reply().await?;
        let publish_context = HashMap::from([("device".to_owned(), "/dev/x".to_owned())]);
        Ok(Response::new(v1::ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<v1::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerUnpublishVolumeResponse>, Status> {
        self.script.lock().unpublished.push(request.into_inner());
        self.reply().await?;
        Ok(Response::new(v1::ControllerUnpublishVolumeResponse {}))
    }
}

struct Rig {
    client: Client,
    script: Arc<Mutex<Script>>,
    stop: CancellationToken,
    _server: ApiServer,
    _dir: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

const ALL_CAPABILITIES: &[Capability] = &[Capability::PublishUnpublishVolume, Capability::PublishReadonly];

impl Rig {
    async fn new(capabilities: &'static [Capability], replies: &[ScriptedReply]) -> Self {
        Self::with_call_timeout(capabilities, replies, Duration::from_secs(2)).await
    }

    async fn with_call_timeout(
        capabilities: &'static [Capability],
        replies: &[ScriptedReply],
        call_timeout: Duration,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::open(Config::new(dir.path(), ([127, 0, 0, 1], 0).into())).await.unwrap();
        let (script, stop) = (Arc::new(Mutex::new(Script::default())), CancellationToken::new());
        script.lock().replies.extend(replies.iter().cloned());
        let endpoint = Endpoint::unix(dir.path().join("csi.sock"));
        let scripted = ScriptedDriver { script: script.clone(), capabilities };
        let mut routes = Routes::builder();
        routes.add_service(identity_server::IdentityServer::new(scripted.clone()));
        routes.add_service(controller_server::ControllerServer::new(scripted));
        let listener = server::bind(&endpoint).await.unwrap();
        tokio::spawn(listener.serve(routes.routes(), stop.clone()));
        let driver = Driver::connect(Csi::new(endpoint), &stop).await.unwrap();
        // With the permissions of its role, as in `cleat up`.
        let context = Context {
            client: server.component("system:cleat:attacher").into(),
            caches: Caches::new(server.component("system:cleat:caches"), stop.clone()),
            clock: Arc::new(SystemClock),
        };
        let options = csi_attacher::CsiAttacherOptions {
            max_concurrent_calls: 1,
            call_timeout,
            retry: Backoff::new(Duration::from_millis(10), Duration::from_millis(100)),
            ..csi_attacher::CsiAttacherOptions::default()
        };
        tokio::spawn(csi_attacher::run(context, driver, options, stop.clone()));
        let rig = Self { client: server.client("system:admin"), script, stop, _server: server, _dir: dir };
        let driver = json!({ "name": DRIVER, "nodeID": "id-1", "topologyKeys": [] });
        create(&rig.all::<CSINode>(), json!({ "metadata": { "name": "n1" }, "spec": { "drivers": [driver] } })).await;
        rig
    }

    fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>,
    {
        Api::all(self.client.clone())
    }

    async fn create_volume(&self, name: &str, more: Value) {
        let mut csi = json!({ "driver": DRIVER, "volumeHandle": format!("handle-{name}") });
        csi.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let spec = json!({ "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "csi": csi });
        create(&self.all::<PersistentVolume>(), json!({ "metadata": { "name": name }, "spec": spec })).await;
    }

    async fn create_attachment(&self, volume: &str) -> String {
        let name = names::attachment(&format!("handle-{volume}"), DRIVER, "n1");
        let spec = json!({ "attacher": DRIVER, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
        create(&self.all::<VolumeAttachment>(), json!({ "metadata": { "name": name }, "spec": spec })).await;
        name
    }

    async fn delete_attachment(&self, attachment: &str) {
        self.all::<VolumeAttachment>().delete(attachment, &DeleteParams::default()).await.unwrap();
    }

    async fn until<T>(&self, attachment: &str, find: impl Fn(Option<VolumeAttachment>) -> Option<T>) -> T {
        let wait = async {
            loop {
                if let Some(found) = find(self.all::<VolumeAttachment>().get_opt(attachment).await.unwrap()) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(WAIT_TIMEOUT, wait).await.expect("the attachment reaches the state")
    }

    async fn wait_until_attached(&self, attachment: &str) -> VolumeAttachment {
        self.until(attachment, |a| a.filter(|a| a.status.as_ref().is_some_and(|s| s.attached))).await
    }

    async fn wait_until_gone(&self, attachment: &str) {
        self.until(attachment, |a| a.is_none().then_some(())).await;
    }
}

async fn create<K: Clone + DeserializeOwned + serde::Serialize + Debug>(api: &Api<K>, object: Value) -> K {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

#[tokio::test]
async fn the_request_is_complete_and_the_publish_context_is_stored() {
    let rig = Rig::new(ALL_CAPABILITIES, &[]).await;
    let secret = json!({ "metadata": { "name": "key", "namespace": "default" }, "stringData": { "user": "u" } });
    create(&Api::<Secret>::namespaced(rig.client.clone(), "default"), secret).await;
    let reference = json!({ "name": "key", "namespace": "default" });
    let more = json!({
        "controllerPublishSecretRef": reference, "readOnly": true, "volumeAttributes": { "zone": "z" }, "fsType": "xfs",
    });
    rig.create_volume("v", more).await;
    let name = rig.create_attachment("v").await;
    let attachment = rig.wait_until_attached(&name).await;
    let context = attachment.status.as_ref().unwrap().attachment_metadata.clone().unwrap();
    assert_eq!(context["device"], "/dev/x");
    assert_eq!(attachment.finalizers(), [FINALIZER]);
    assert_eq!(attachment.annotations()["csi.alpha.kubernetes.io/node-id"], "id-1");
    let volume = rig.all::<PersistentVolume>().get("v").await.unwrap();
    assert!(volume.finalizers().contains(&FINALIZER.to_owned()), "{:?}", volume.finalizers());
    let request = rig.script.lock().published[0].clone();
    assert_eq!((request.volume_id.as_str(), request.node_id.as_str(), request.readonly), ("handle-v", "id-1", true));
    assert_eq!(request.secrets["user"], "u");
    assert_eq!(request.volume_context["zone"], "z");

    // The volume is deleted first: it stays until the attachment, which needs its handle and its secret, is gone.
    rig.all::<PersistentVolume>().delete("v", &DeleteParams::default()).await.unwrap();
    rig.delete_attachment(&name).await;
    rig.wait_until_gone(&name).await;
    assert_eq!(rig.script.lock().unpublished[0].secrets["user"], "u");
    let finalizer_removed = async {
        while rig
            .all::<PersistentVolume>()
            .get_opt("v")
            .await
            .unwrap()
            .is_some_and(|v| v.finalizers().contains(&FINALIZER.to_owned()))
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, finalizer_removed).await.expect("the finalizer is removed from the volume");
}

#[tokio::test]
async fn a_failure_is_reported_retried_and_cleared_after_success() {
    let full = || ScriptedReply::Fail(Status::resource_exhausted("no room"));
    let busy = || ScriptedReply::Fail(Status::aborted("busy"));
    let replies: Vec<ScriptedReply> = std::iter::repeat_with(full).take(3).collect();
    let rig = Rig::new(ALL_CAPABILITIES, &replies).await;
    rig.create_volume("v", json!({})).await;
    let name = rig.create_attachment("v").await;
    let error = rig.until(&name, |a| a?.status?.attach_error).await;
    assert!(error.message.as_ref().unwrap().contains("no room"), "{error:?}");
    assert_eq!(error.error_code, Some(8));
    let attachment = rig.wait_until_attached(&name).await;
    assert!(attachment.status.unwrap().attach_error.is_none());
    assert_eq!(rig.script.lock().published.len(), 4);

    rig.script.lock().replies.extend(std::iter::repeat_with(busy).take(3));
    rig.delete_attachment(&name).await;
    let error = rig.until(&name, |a| a?.status?.detach_error).await;
    assert!(error.message.unwrap().contains("busy"));
    rig.wait_until_gone(&name).await;
    assert_eq!(rig.script.lock().unpublished.len(), 4);
}

#[tokio::test]
async fn a_call_without_a_reply_is_undone_before_the_attachment_is_deleted() {
    let rig = Rig::new(
        ALL_CAPABILITIES,
        &[
            ScriptedReply::Hang,
            ScriptedReply::Fail(Status::internal("no")),
            ScriptedReply::Fail(Status::internal("no")),
        ],
    )
    .await;
    rig.create_volume("v", json!({})).await;
    let name = rig.create_attachment("v").await;
    rig.until(&name, |a| a.filter(|a| a.finalizers().contains(&FINALIZER.to_owned()))).await;
    rig.delete_attachment(&name).await;
    rig.wait_until_gone(&name).await;
    let script = rig.script.lock();
    assert!(!script.unpublished.is_empty(), "the call may have taken effect");
    assert_eq!(script.unpublished[0].node_id, "id-1");
}

#[tokio::test]
async fn a_driver_that_does_not_publish_has_its_attachments_confirmed() {
    let rig = Rig::new(&[], &[]).await;
    rig.create_volume("v", json!({})).await;
    let name = rig.create_attachment("v").await;
    let attachment = rig.wait_until_attached(&name).await;
    assert_eq!(attachment.finalizers(), [] as [&str; 0]);
    rig.delete_attachment(&name).await;
    rig.wait_until_gone(&name).await;
    let script = rig.script.lock();
    assert!(script.published.is_empty() && script.unpublished.is_empty());
}

#[tokio::test]
async fn an_unpublish_that_hangs_does_not_delay_a_publish() {
    let rig = Rig::with_call_timeout(
        ALL_CAPABILITIES,
        &[ScriptedReply::Succeed, ScriptedReply::Hang],
        Duration::from_secs(600),
    )
    .await;
    rig.create_volume("old", json!({})).await;
    rig.create_volume("new", json!({})).await;
    let old = rig.create_attachment("old").await;
    rig.wait_until_attached(&old).await;
    rig.delete_attachment(&old).await;
    let unpublish_called = async {
        while rig.script.lock().unpublished.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, unpublish_called).await.expect("ControllerUnpublishVolume is called");
    let new = rig.create_attachment("new").await;
    rig.wait_until_attached(&new).await;
    rig.until(&old, |a| a).await;
}
