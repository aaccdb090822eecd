//! Claims on a real API server. Only the binder, protection and the ephemeral volume controller run.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use cleat_api::claim::{claim_phase, volume_name};
use cleat_api::condition::claim_in_use;
use cleat_api::key::Meta as _;
use cleat_api::well_known::{annotation, finalizer};
use cleat_controllers::{Context, bind, ephemeral, protect};
use cleat_runtime::{Recorder, SystemClock};
use cleat_testing::wait::{wait_until, within_timeout};
use cleat_testing::{TestApiServer, merged};
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::wait::await_condition;
use serde_json::{Value, json};

struct ClaimFixture {
    server: TestApiServer,
}

impl ClaimFixture {
    async fn start() -> Self {
        let server = TestApiServer::start().await;
        let (stop, caches) = (server.stop().clone(), server.caches(server.stop()));
        let context = |user: &str| Context {
            client: server.component(user).into(),
            caches: caches.clone(),
            clock: Arc::new(SystemClock),
        };
        tokio::spawn(bind::run(context("system:cleat:binder"), bind::BindOptions::default(), stop.clone()));
        tokio::spawn(protect::run(context("system:cleat:protector"), stop.clone()));
        tokio::spawn(ephemeral::run(context("system:cleat:ephemeral"), stop));
        Self { server }
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        self.server.api()
    }

    fn pods(&self) -> Api<Pod> {
        self.server.api()
    }

    async fn create_claim(&self, name: &str, spec: Value) {
        let defaults = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
        let claim = json!({ "metadata": { "name": name }, "spec": merged(defaults, spec) });
        self.server.create::<PersistentVolumeClaim>(claim).await;
    }

    async fn create_volume(&self, name: &str, class: &str) {
        let spec = json!({
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "storageClassName": class,
            "csi": { "driver": "absent.test", "volumeHandle": name },
        });
        self.server.create::<PersistentVolume>(json!({ "metadata": { "name": name }, "spec": spec })).await;
    }

    async fn create_pod(&self, name: &str, node: Option<&str>, volume: Value) {
        let spec = json!({
            "nodeName": node, "terminationGracePeriodSeconds": 0,
            "containers": [{ "name": "main", "image": "busybox" }], "volumes": [volume],
        });
        self.server.create::<Pod>(json!({ "metadata": { "name": name }, "spec": spec })).await;
    }

    async fn expect_event(&self, reason: &str, part: &str) {
        self.server.wait_for_event("", reason, part).await;
    }

    /// Waits until the claim meets the condition.
    async fn wait_until(&self, claim: &str, what: &str, holds: impl Fn(&PersistentVolumeClaim) -> bool) {
        self.server.wait_until(claim, what, holds).await;
    }
}

fn claim_volume(claim: &str) -> Value {
    json!({ "name": "data", "persistentVolumeClaim": { "claimName": claim } })
}

#[tokio::test]
async fn a_bound_claim_reports_whether_pods_use_it() {
    let fixture = ClaimFixture::start().await;
    fixture.create_volume("v", "").await;
    fixture.create_claim("c", json!({ "storageClassName": "" })).await;
    let is_bound = |c: &PersistentVolumeClaim| claim_phase(c) == "Bound";
    // The write that sets the phase Bound also sets the condition.
    fixture
        .wait_until("c", "bound", |c| {
            assert!(!is_bound(c) || claim_in_use(c) == Some(false));
            is_bound(c)
        })
        .await;
    fixture.create_pod("p", None, claim_volume("c")).await;
    fixture.wait_until("c", "used", |c| claim_in_use(c) == Some(true)).await;
    fixture.pods().delete("p", &DeleteParams::default()).await.unwrap();
    fixture.wait_until("c", "unused", |c| claim_in_use(c) == Some(false)).await;
    fixture.create_volume("w", "").await;
    fixture.create_pod("q", None, claim_volume("d")).await;
    fixture.create_claim("d", json!({ "storageClassName": "" })).await;
    fixture.wait_until("d", "bound and used", |c| is_bound(c) && claim_in_use(c) == Some(true)).await;
}

#[tokio::test]
async fn a_claim_owned_by_a_terminated_pod_does_not_wait_for_the_pod() {
    let fixture = ClaimFixture::start().await;
    let template = json!({ "spec": {
        "accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": { "requests": { "storage": "1Gi" } } } });
    fixture
        .create_pod("p", Some("n1"), json!({ "name": "own", "ephemeral": { "volumeClaimTemplate": template } }))
        .await;
    fixture.wait_until("p-own", "created", |_| true).await;
    fixture.claims().delete("p-own", &DeleteParams::default()).await.unwrap();
    let held = fixture.claims().get("p-own").await.unwrap();
    assert!(held.metadata.has_finalizer(finalizer::PVC_PROTECTION), "the pod is running");
    // A finalizer keeps the terminated pod, as the garbage collector's finalizer does in foreground deletion.
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": ["test/last"] } }));
    fixture.pods().patch("p", &PatchParams::default(), &patch).await.unwrap();
    fixture
        .pods()
        .delete("p", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() })
        .await
        .unwrap();
    let uid = held.metadata.uid.unwrap();
    let gone = await_condition(fixture.claims(), "p-own", kube::runtime::wait::conditions::is_deleted(&uid));
    within_timeout("the claim does not wait for its pod", gone).await.unwrap();
}

#[tokio::test]
async fn a_pod_gets_an_event_if_its_claim_cannot_be_created() {
    let fixture = ClaimFixture::start().await;
    // The template is valid when the pod is created, but the name of the claim, made of pod and volume, is too long.
    let pod = "p".repeat(240);
    let template = json!({ "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
    let volume = json!({ "name": "a-volume-with-a-long-name", "ephemeral": { "volumeClaimTemplate": template } });
    fixture.create_pod(&pod, None, volume).await;
    fixture.expect_event("FailedBinding", "ephemeral volume a-volume-with-a-long-name: ").await;
}

#[tokio::test]
async fn a_claim_of_a_migrated_plugin_is_requested_from_the_csi_driver() {
    let fixture = ClaimFixture::start().await;
    let class = |name: &str, provisioner: &str| json!({ "metadata": { "name": name }, "provisioner": provisioner });
    fixture.server.create::<StorageClass>(class("gp2", "kubernetes.io/aws-ebs")).await;
    fixture.server.create::<StorageClass>(class("manual", "kubernetes.io/no-provisioner")).await;
    fixture.create_claim("new", json!({ "storageClassName": "gp2" })).await;
    let keys = [annotation::STORAGE_PROVISIONER, annotation::STORAGE_PROVISIONER_BETA];
    fixture
        .wait_until("new", "requested", |c| keys.iter().all(|k| c.metadata.annotation(k) == Some("ebs.csi.aws.com")))
        .await;
    // As a controller manager from before the migration has left it.
    let object = json!({
        "metadata": { "name": "old", "annotations": { annotation::STORAGE_PROVISIONER_BETA: "kubernetes.io/aws-ebs" } },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } },
                  "storageClassName": "manual" },
    });
    fixture.server.create::<PersistentVolumeClaim>(object).await;
    fixture
        .wait_until("old", "migrated", |c| c.metadata.annotation(annotation::MIGRATED_TO) == Some("ebs.csi.aws.com"))
        .await;
    fixture.expect_event("ProvisioningFailed", "kubernetes.io/no-provisioner").await;
}

#[tokio::test]
async fn an_available_volume_is_preferred_to_the_default_class() {
    let fixture = ClaimFixture::start().await;
    fixture.create_claim("early", json!({})).await;
    fixture.create_claim("explicit", json!({ "storageClassName": "" })).await;
    fixture.expect_event("FailedBinding", "no persistent volumes available").await;
    let marked = json!({ annotation::DEFAULT_CLASS: "true" });
    let class = json!({ "metadata": { "name": "std", "annotations": marked }, "provisioner": "absent.test" });
    fixture.server.create::<StorageClass>(class).await;
    let class_of = |c: &PersistentVolumeClaim| c.spec.as_ref().unwrap().storage_class_name.clone();
    fixture.wait_until("early", "default class assigned", |c| class_of(c).as_deref() == Some("std")).await;
    fixture.create_volume("v", "").await;
    fixture.wait_until("explicit", "bound", |c| volume_name(c) == Some("v")).await;
    assert_eq!(
        class_of(&fixture.claims().get("explicit").await.unwrap()).as_deref(),
        Some(""),
        "an explicitly empty class stays"
    );
}

#[tokio::test]
async fn events_are_counted_when_they_repeat_and_combined_when_they_are_many() {
    let fixture = ClaimFixture::start().await;
    fixture.create_claim("c", json!({ "storageClassName": "none" })).await;
    let claim = fixture.claims().get("c").await.unwrap();
    let recorder = Recorder::new(fixture.server.client(), "test", Arc::new(SystemClock));
    let events: Api<Event> = fixture.server.api();
    let events_of = async |reason: &str| {
        let all = events.list(&ListParams::default()).await.unwrap().items;
        all.into_iter().filter(|e| e.reason.as_deref() == Some(reason)).collect::<Vec<_>>()
    };
    wait_until("the event is counted", async || {
        recorder.warning(&claim, "Same", "again");
        let same = events_of("Same").await;
        assert!(same.len() <= 1, "all share one Event: {same:?}");
        same.iter().any(|e| e.count > Some(1))
    })
    .await;
    for number in 0..30 {
        recorder.warning(&claim, "Similar", format!("number {number}"));
    }
    recorder.normal(&claim, "Fence", "written after the others");
    fixture.expect_event("Fence", "written after").await;
    let similar = events_of("Similar").await;
    let combined = |e: &&Event| e.message.as_deref().is_some_and(|m| m.starts_with("(combined from similar events): "));
    assert_eq!((similar.len(), similar.iter().filter(combined).count()), (10, 1), "{similar:?}");
}
