//! Claims on a real API server. Only the binder, protection and the ephemeral volume controller run.

#![allow(clippy::unwrap_used)]

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{claim_phase, volume_name};
use cleat_api::condition::claim_in_use;
use cleat_api::key::Meta as _;
use cleat_api::well_known::{annotation, finalizer};
use cleat_apiserver::{ApiServer, Config};
use cleat_controllers::{Context, bind, ephemeral, protect};
use cleat_runtime::{Caches, Recorder, SystemClock};
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);

struct Rig {
    client: Client,
    stop: CancellationToken,
    _server: ApiServer,
    _dir: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn rig() -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), ([127, 0, 0, 1], 0).into())).await.unwrap();
    let stop = CancellationToken::new();
    let caches = Caches::new(server.component("system:cleat:caches"), stop.clone());
    let context = |user: &str| Context {
        client: server.component(user).into(),
        caches: caches.clone(),
        clock: Arc::new(SystemClock),
    };
    tokio::spawn(bind::run(context("system:cleat:binder"), bind::BindOptions::default(), stop.clone()));
    tokio::spawn(protect::run(context("system:cleat:protector"), stop.clone()));
    tokio::spawn(ephemeral::run(context("system:cleat:ephemeral"), stop.clone()));
    Rig { client: server.client("system:admin"), stop, _server: server, _dir: dir }
}

impl Rig {
    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::default_namespaced(self.client.clone())
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.client.clone())
    }

    async fn create_claim(&self, name: &str, spec: Value) {
        let mut full = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
        full.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        create(&self.claims(), json!({ "metadata": { "name": name }, "spec": full })).await;
    }

    async fn create_volume(&self, name: &str, class: &str) {
        let spec = json!({
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "storageClassName": class,
            "csi": { "driver": "absent.test", "volumeHandle": name },
        });
        create(&self.volumes(), json!({ "metadata": { "name": name }, "spec": spec })).await;
    }

    async fn create_pod(&self, name: &str, node: Option<&str>, volume: Value) {
        let spec = json!({
            "nodeName": node, "terminationGracePeriodSeconds": 0,
            "containers": [{ "name": "main", "image": "busybox" }], "volumes": [volume],
        });
        create(&self.pods(), json!({ "metadata": { "name": name }, "spec": spec })).await;
    }

    async fn expect_event(&self, reason: &str, part: &str) {
        let events: Api<Event> = Api::default_namespaced(self.client.clone());
        let recorded = async {
            loop {
                let all = events.list(&ListParams::default()).await.unwrap();
                let matches = |e: &Event| e.message.as_deref().is_some_and(|m| m.contains(part));
                if all.iter().any(|e| e.reason.as_deref() == Some(reason) && matches(e)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(WAIT, recorded).await.unwrap_or_else(|_| panic!("no event {reason} about {part:?}"));
    }
}

async fn create<K>(api: &Api<K>, object: Value)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + serde::Serialize + Debug,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

/// Waits until the object meets the condition.
async fn until<K>(api: Api<K>, name: &str, what: &str, met: impl Fn(&K) -> bool)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let met = |object: Option<&K>| object.is_some_and(&met);
    let reached = tokio::time::timeout(WAIT, await_condition(api, name, met)).await;
    reached.unwrap_or_else(|_| panic!("{name} did not become: {what}")).unwrap();
}

fn claim_volume(claim: &str) -> Value {
    json!({ "name": "data", "persistentVolumeClaim": { "claimName": claim } })
}

#[tokio::test]
async fn a_bound_claim_reports_whether_pods_use_it() {
    let rig = rig().await;
    rig.create_volume("v", "").await;
    rig.create_claim("c", json!({ "storageClassName": "" })).await;
    let is_bound = |c: &PersistentVolumeClaim| claim_phase(c) == "Bound";
    // The write that sets the phase Bound also sets the condition.
    until(rig.claims(), "c", "bound", |c| {
        assert!(!is_bound(c) || claim_in_use(c) == Some(false));
        is_bound(c)
    })
    .await;
    rig.create_pod("p", None, claim_volume("c")).await;
    until(rig.claims(), "c", "used", |c| claim_in_use(c) == Some(true)).await;
    rig.pods().delete("p", &DeleteParams::default()).await.unwrap();
    until(rig.claims(), "c", "unused", |c| claim_in_use(c) == Some(false)).await;
    rig.create_volume("w", "").await;
    rig.create_pod("q", None, claim_volume("d")).await;
    rig.create_claim("d", json!({ "storageClassName": "" })).await;
    until(rig.claims(), "d", "bound and used", |c| is_bound(c) && claim_in_use(c) == Some(true)).await;
}

#[tokio::test]
async fn a_claim_owned_by_a_terminated_pod_does_not_wait_for_the_pod() {
    let rig = rig().await;
    let template = json!({ "spec": {
        "accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": { "requests": { "storage": "1Gi" } } } });
    rig.create_pod("p", Some("n1"), json!({ "name": "own", "ephemeral": { "volumeClaimTemplate": template } })).await;
    until(rig.claims(), "p-own", "created", |_| true).await;
    rig.claims().delete("p-own", &DeleteParams::default()).await.unwrap();
    let held = rig.claims().get("p-own").await.unwrap();
    assert!(held.metadata.has_finalizer(finalizer::PVC_PROTECTION), "the pod is running");
    // A finalizer keeps the terminated pod, as the garbage collector's finalizer does in foreground deletion.
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": ["test/last"] } }));
    rig.pods().patch("p", &PatchParams::default(), &patch).await.unwrap();
    rig.pods().delete("p", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() }).await.unwrap();
    let uid = held.metadata.uid.unwrap();
    let gone = await_condition(rig.claims(), "p-own", kube::runtime::wait::conditions::is_deleted(&uid));
    tokio::time::timeout(WAIT, gone).await.expect("the claim waits for its pod").unwrap();
}

#[tokio::test]
async fn a_pod_gets_an_event_if_its_claim_cannot_be_created() {
    let rig = rig().await;
    // The template is valid when the pod is created, but the name of the claim, made of pod and volume, is too long.
    let pod = "p".repeat(240);
    let template = json!({ "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
    let volume = json!({ "name": "a-volume-with-a-long-name", "ephemeral": { "volumeClaimTemplate": template } });
    rig.create_pod(&pod, None, volume).await;
    rig.expect_event("FailedBinding", "ephemeral volume a-volume-with-a-long-name: ").await;
}

#[tokio::test]
async fn a_claim_of_a_migrated_plugin_is_requested_from_the_csi_driver() {
    let rig = rig().await;
    let class = |name: &str, provisioner: &str| json!({ "metadata": { "name": name }, "provisioner": provisioner });
    let classes: Api<StorageClass> = Api::all(rig.client.clone());
    create(&classes, class("gp2", "kubernetes.io/aws-ebs")).await;
    create(&classes, class("manual", "kubernetes.io/no-provisioner")).await;
    rig.create_claim("new", json!({ "storageClassName": "gp2" })).await;
    let keys = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA];
    until(rig.claims(), "new", "requested", |c| {
        keys.iter().all(|k| c.metadata.annotation(k) == Some("ebs.csi.aws.com"))
    })
    .await;
    // As a controller manager from before the migration has left it.
    let object = json!({
        "metadata": { "name": "old", "annotations": { annotation::STORAGE_PROVISIONER_BETA: "kubernetes.io/aws-ebs" } },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } },
                  "storageClassName": "manual" },
    });
    create(&rig.claims(), object).await;
    until(rig.claims(), "old", "migrated", |c| {
        c.metadata.annotation(annotation::MIGRATED_TO) == Some("ebs.csi.aws.com")
    })
    .await;
    rig.expect_event("ProvisioningFailed", "kubernetes.io/no-provisioner").await;
}

#[tokio::test]
async fn an_available_volume_is_preferred_to_the_default_class() {
    let rig = rig().await;
    rig.create_claim("early", json!({})).await;
    rig.create_claim("explicit", json!({ "storageClassName": "" })).await;
    rig.expect_event("FailedBinding", "no persistent volumes available").await;
    let classes: Api<StorageClass> = Api::all(rig.client.clone());
    let marked = json!({ annotation::DEFAULT_CLASS: "true" });
    let class = json!({ "metadata": { "name": "std", "annotations": marked }, "provisioner": "absent.test" });
    create(&classes, class).await;
    let class_of = |c: &PersistentVolumeClaim| c.spec.as_ref().unwrap().storage_class_name.clone();
    until(rig.claims(), "early", "default class assigned", |c| class_of(c).as_deref() == Some("std")).await;
    rig.create_volume("v", "").await;
    until(rig.claims(), "explicit", "bound", |c| volume_name(c) == Some("v")).await;
    assert_eq!(
        class_of(&rig.claims().get("explicit").await.unwrap()).as_deref(),
        Some(""),
        "an explicitly empty class stays"
    );
}

#[tokio::test]
async fn events_are_counted_when_they_repeat_and_combined_when_they_are_many() {
    let rig = rig().await;
    rig.create_claim("c", json!({ "storageClassName": "none" })).await;
    let claim = rig.claims().get("c").await.unwrap();
    let recorder = Recorder::new(rig.client.clone(), "test", Arc::new(SystemClock));
    let events: Api<Event> = Api::default_namespaced(rig.client.clone());
    let events_of = async |reason: &str| {
        let all = events.list(&ListParams::default()).await.unwrap().items;
        all.into_iter().filter(|e| e.reason.as_deref() == Some(reason)).collect::<Vec<_>>()
    };
    let counted = async {
        loop {
            recorder.warning(&claim, "Same", "again");
            let same = events_of("Same").await;
            assert!(same.len() <= 1, "all share one Event: {same:?}");
            if same.iter().any(|e| e.count > Some(1)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(WAIT, counted).await.expect("the event is counted");
    for number in 0..30 {
        recorder.warning(&claim, "Similar", format!("number {number}"));
    }
    recorder.normal(&claim, "Fence", "written after the others");
    rig.expect_event("Fence", "written after").await;
    let similar = events_of("Similar").await;
    let combined = |e: &&Event| e.message.as_deref().is_some_and(|m| m.starts_with("(combined from similar events): "));
    assert_eq!((similar.len(), similar.iter().filter(combined).count()), (10, 1), "{similar:?}");
}
