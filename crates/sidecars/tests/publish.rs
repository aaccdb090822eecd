//! The attacher on a real API server, beside a driver whose answers the test writes: what it is told, what comes of its
//! failures, and what is never forgotten.

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
use cleat_sidecars::{Context, Driver, publish};
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

const WAIT: Duration = Duration::from_secs(60);
const DRIVER: &str = "scripted.test";
const FINALIZER: &str = "external-attacher/scripted-test";

/// What a call comes to.
#[derive(Clone)]
enum Answer {
    Succeed,
    Fail(Status),
    /// It is done, and nobody hears of it.
    Hang,
}

#[derive(Default)]
struct Script {
    answers: VecDeque<Answer>,
    published: Vec<v1::ControllerPublishVolumeRequest>,
    unpublished: Vec<v1::ControllerUnpublishVolumeRequest>,
}

#[derive(Clone)]
struct Scripted {
    script: Arc<Mutex<Script>>,
    capabilities: &'static [Capability],
}

impl Scripted {
    async fn answer(&self) -> Result<(), Status> {
        let answer = self.script.lock().answers.pop_front().unwrap_or(Answer::Succeed);
        match answer {
            Answer::Succeed => Ok(()),
            Answer::Fail(status) => Err(status),
            Answer::Hang => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl identity_server::Identity for Scripted {
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
impl controller_server::Controller for Scripted {
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
        self.answer().await?;
        let publish_context = HashMap::from([("device".to_owned(), "/dev/x".to_owned())]);
        Ok(Response::new(v1::ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<v1::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerUnpublishVolumeResponse>, Status> {
        self.script.lock().unpublished.push(request.into_inner());
        self.answer().await?;
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

const ALL: &[Capability] = &[Capability::PublishUnpublishVolume, Capability::PublishReadonly];

impl Rig {
    async fn new(capabilities: &'static [Capability], answers: &[Answer]) -> Self {
        Self::with_deadline(capabilities, answers, Duration::from_secs(2)).await
    }

    async fn with_deadline(capabilities: &'static [Capability], answers: &[Answer], deadline: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::open(Config::new(dir.path(), ([127, 0, 0, 1], 0).into())).await.unwrap();
        let (script, stop) = (Arc::new(Mutex::new(Script::default())), CancellationToken::new());
        script.lock().answers.extend(answers.iter().cloned());
        let endpoint = Endpoint::unix(dir.path().join("csi.sock"));
        let scripted = Scripted { script: script.clone(), capabilities };
        let mut routes = Routes::builder();
        routes.add_service(identity_server::IdentityServer::new(scripted.clone()));
        routes.add_service(controller_server::ControllerServer::new(scripted));
        let listener = server::bind(&endpoint).await.unwrap();
        tokio::spawn(listener.serve(routes.routes(), stop.clone()));
        let driver = Driver::connect(Csi::new(endpoint), &stop).await.unwrap();
        // With the rights that its role gives it, as in `cleat up`.
        let context = Context {
            client: server.component("system:cleat:attacher").into(),
            caches: Caches::new(server.component("system:cleat:caches"), stop.clone()),
            clock: Arc::new(SystemClock),
        };
        let options = publish::Options {
            calls: 1,
            deadline,
            retry: Backoff::new(Duration::from_millis(10), Duration::from_millis(100)),
            ..publish::Options::default()
        };
        tokio::spawn(publish::run(context, driver, options, stop.clone()));
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

    async fn volume(&self, name: &str, more: Value) {
        let mut csi = json!({ "driver": DRIVER, "volumeHandle": format!("handle-{name}") });
        csi.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let spec = json!({ "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "csi": csi });
        create(&self.all::<PersistentVolume>(), json!({ "metadata": { "name": name }, "spec": spec })).await;
    }

    async fn attach(&self, volume: &str) -> String {
        let name = names::attachment(&format!("handle-{volume}"), DRIVER, "n1");
        let spec = json!({ "attacher": DRIVER, "nodeName": "n1", "source": { "persistentVolumeName": volume } });
        create(&self.all::<VolumeAttachment>(), json!({ "metadata": { "name": name }, "spec": spec })).await;
        name
    }

    async fn detach(&self, attachment: &str) {
        self.all::<VolumeAttachment>().delete(attachment, &DeleteParams::default()).await.unwrap();
    }

    async fn until<T>(&self, attachment: &str, holds: impl Fn(Option<VolumeAttachment>) -> Option<T>) -> T {
        let wait = async {
            loop {
                if let Some(found) = holds(self.all::<VolumeAttachment>().get_opt(attachment).await.unwrap()) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(WAIT, wait).await.expect("the attachment comes to it")
    }

    async fn attached(&self, attachment: &str) -> VolumeAttachment {
        self.until(attachment, |a| a.filter(|a| a.status.as_ref().is_some_and(|s| s.attached))).await
    }

    async fn gone(&self, attachment: &str) {
        self.until(attachment, |a| a.is_none().then_some(())).await;
    }
}

async fn create<K: Clone + DeserializeOwned + serde::Serialize + Debug>(api: &Api<K>, object: Value) -> K {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

#[tokio::test]
async fn the_driver_is_told_everything_and_its_context_is_kept() {
    let rig = Rig::new(ALL, &[]).await;
    let secret = json!({ "metadata": { "name": "key", "namespace": "default" }, "stringData": { "user": "u" } });
    create(&Api::<Secret>::namespaced(rig.client.clone(), "default"), secret).await;
    let reference = json!({ "name": "key", "namespace": "default" });
    let more = json!({
        "controllerPublishSecretRef": reference, "readOnly": true, "volumeAttributes": { "zone": "z" }, "fsType": "xfs",
    });
    rig.volume("v", more).await;
    let name = rig.attach("v").await;
    let attachment = rig.attached(&name).await;
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

    // The volume is deleted first: it waits for the attachment, which needs its handle and its secret.
    rig.all::<PersistentVolume>().delete("v", &DeleteParams::default()).await.unwrap();
    rig.detach(&name).await;
    rig.gone(&name).await;
    assert_eq!(rig.script.lock().unpublished[0].secrets["user"], "u");
    let freed = async {
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
    tokio::time::timeout(WAIT, freed).await.expect("the volume is let go");
}

#[tokio::test]
async fn a_failure_is_noted_tried_again_and_forgotten_once_it_works() {
    let full = || Answer::Fail(Status::resource_exhausted("no room"));
    let busy = || Answer::Fail(Status::aborted("busy"));
    let answers: Vec<Answer> = std::iter::repeat_with(full).take(3).collect();
    let rig = Rig::new(ALL, &answers).await;
    rig.volume("v", json!({})).await;
    let name = rig.attach("v").await;
    let error = rig.until(&name, |a| a?.status?.attach_error).await;
    assert!(error.message.as_ref().unwrap().contains("no room"), "{error:?}");
    assert_eq!(error.error_code, Some(8));
    let attachment = rig.attached(&name).await;
    assert!(attachment.status.unwrap().attach_error.is_none());
    assert_eq!(rig.script.lock().published.len(), 4);

    rig.script.lock().answers.extend(std::iter::repeat_with(busy).take(3));
    rig.detach(&name).await;
    let error = rig.until(&name, |a| a?.status?.detach_error).await;
    assert!(error.message.unwrap().contains("busy"));
    rig.gone(&name).await;
    assert_eq!(rig.script.lock().unpublished.len(), 4);
}

#[tokio::test]
async fn a_call_without_an_answer_is_undone_before_the_attachment_goes() {
    let rig =
        Rig::new(ALL, &[Answer::Hang, Answer::Fail(Status::internal("no")), Answer::Fail(Status::internal("no"))])
            .await;
    rig.volume("v", json!({})).await;
    let name = rig.attach("v").await;
    rig.until(&name, |a| a.filter(|a| a.finalizers().contains(&FINALIZER.to_owned()))).await;
    rig.detach(&name).await;
    rig.gone(&name).await;
    let script = rig.script.lock();
    assert!(!script.unpublished.is_empty(), "the driver may have done it");
    assert_eq!(script.unpublished[0].node_id, "id-1");
}

#[tokio::test]
async fn a_driver_that_does_not_publish_has_its_attachments_confirmed() {
    let rig = Rig::new(&[], &[]).await;
    rig.volume("v", json!({})).await;
    let name = rig.attach("v").await;
    let attachment = rig.attached(&name).await;
    assert_eq!(attachment.finalizers(), [] as [&str; 0]);
    rig.detach(&name).await;
    rig.gone(&name).await;
    let script = rig.script.lock();
    assert!(script.published.is_empty() && script.unpublished.is_empty());
}

#[tokio::test]
async fn a_detach_that_hangs_delays_no_attach() {
    let rig = Rig::with_deadline(ALL, &[Answer::Succeed, Answer::Hang], Duration::from_secs(600)).await;
    rig.volume("old", json!({})).await;
    rig.volume("new", json!({})).await;
    let old = rig.attach("old").await;
    rig.attached(&old).await;
    rig.detach(&old).await;
    let asked = async {
        while rig.script.lock().unpublished.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, asked).await.expect("the driver is asked to detach");
    let new = rig.attach("new").await;
    rig.attached(&new).await;
    rig.until(&old, |a| a).await;
}
