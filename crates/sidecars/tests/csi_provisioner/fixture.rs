//! An API server with a binder and the protection controller, and provisioners for scripted drivers.

use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{claim_phase, volume_name};
use cleat_api::key::Meta as _;
use cleat_api::well_known::annotation;
use cleat_controllers::{Context, bind, protect};
use cleat_csi::Client as Csi;
use cleat_runtime::{Backoff, SystemClock};
use cleat_sidecars::{Driver, csi_provisioner};
use cleat_testing::{DRIVER_NAME, ScriptedDriver, TestApiServer, ZONE_KEY, merged};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Secret};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::Api;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

pub(crate) struct ProvisionerFixture {
    pub(crate) server: TestApiServer,
}

/// Short retry delays, and a short timeout for a driver that does not answer.
pub(crate) fn fast_retries() -> csi_provisioner::ProvisionerOptions {
    csi_provisioner::ProvisionerOptions {
        retry: Backoff::new(Duration::from_millis(10), Duration::from_millis(100)),
        call_timeout: Duration::from_secs(2),
        ..csi_provisioner::ProvisionerOptions::default()
    }
}

impl ProvisionerFixture {
    pub(crate) async fn new() -> Self {
        let server = TestApiServer::start().await;
        let (stop, caches) = (server.stop().clone(), server.caches(server.stop()));
        let context = |user: &str| Context {
            client: server.in_process(user),
            caches: caches.clone(),
            clock: Arc::new(SystemClock),
        };
        let binder = bind::BindOptions { holding_provisioners: [DRIVER_NAME.to_owned()].into() };
        tokio::spawn(bind::run(context("system:cleat:binder"), binder, stop.clone()));
        tokio::spawn(protect::run(context("system:cleat:protector"), stop));
        Self { server }
    }

    /// Starts a provisioner for the driver. It ends when the returned token is cancelled or the fixture is dropped.
    pub(crate) async fn start_provisioner(
        &self,
        driver: &ScriptedDriver,
        options: csi_provisioner::ProvisionerOptions,
    ) -> CancellationToken {
        let stop = self.server.stop().child_token();
        let endpoint = driver.serve(self.server.directory(), self.server.stop()).await;
        self.start_provisioner_at(endpoint, options, &stop).await;
        stop
    }

    pub(crate) async fn start_provisioner_at(
        &self,
        endpoint: cleat_csi::Endpoint,
        options: csi_provisioner::ProvisionerOptions,
        stop: &CancellationToken,
    ) {
        let driver = Driver::connect(Csi::new(endpoint), stop).await.unwrap();
        tokio::spawn(csi_provisioner::run(self.sidecar_context(stop), driver, options, stop.clone()));
    }

    /// With the permissions of the provisioner's role, and caches of its own.
    pub(crate) fn sidecar_context(&self, stop: &CancellationToken) -> cleat_sidecars::Context {
        cleat_sidecars::Context {
            client: self.server.component("system:cleat:provisioner").into(),
            caches: self.server.caches(stop),
            clock: Arc::new(SystemClock),
        }
    }

    pub(crate) fn claims(&self) -> Api<PersistentVolumeClaim> {
        self.server.api()
    }

    pub(crate) async fn create_class(&self, name: &str, more: Value) {
        let class = json!({ "metadata": { "name": name }, "provisioner": DRIVER_NAME });
        self.server.create::<StorageClass>(merged(class, more)).await;
    }

    pub(crate) async fn create_secret(&self, name: &str, key: &str, value: &str) {
        let secret = json!({ "metadata": { "name": name }, "stringData": { key: value } });
        self.server.create::<Secret>(secret).await;
    }

    /// Creates a node in the zone, with the driver registered on it.
    pub(crate) async fn create_node(&self, name: &str, zone: &str) {
        self.server.create::<Node>(json!({ "metadata": { "name": name, "labels": { ZONE_KEY: zone } } })).await;
        let driver = json!({ "name": DRIVER_NAME, "nodeID": name, "topologyKeys": [ZONE_KEY] });
        self.server.create::<CSINode>(json!({ "metadata": { "name": name }, "spec": { "drivers": [driver] } })).await;
    }

    pub(crate) async fn create_claim(&self, name: &str, class: &str, more: Value) -> PersistentVolumeClaim {
        let spec = json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } },
        });
        self.server.create(json!({ "metadata": { "name": name }, "spec": merged(spec, more) })).await
    }

    /// Sets the selected node, as the scheduler does.
    pub(crate) async fn select_node(&self, claim: &str, node: &str) {
        let patch = json!({ "metadata": { "annotations": { annotation::SELECTED_NODE: node } } });
        self.server.patch::<PersistentVolumeClaim>(claim, patch).await;
    }

    /// Waits until the claim is bound, and returns its volume.
    pub(crate) async fn wait_until_bound(&self, claim: &str) -> PersistentVolume {
        let is_bound = |claim: &PersistentVolumeClaim| claim_phase(claim) == "Bound";
        let bound = self.server.wait_until(claim, "is bound", is_bound).await;
        self.server.api::<PersistentVolume>().get(volume_name(&bound).unwrap()).await.unwrap()
    }

    /// Deletes the claim, and waits until it and all volumes are gone.
    pub(crate) async fn delete_claim(&self, claim: &str) {
        self.server.delete::<PersistentVolumeClaim>(claim).await;
        self.wait_until_gone(claim).await;
        self.wait_for_no_volumes().await;
    }

    /// Waits until no PersistentVolume exists.
    pub(crate) async fn wait_for_no_volumes(&self) {
        let none = |volumes: &[PersistentVolume]| volumes.is_empty().then_some(());
        self.server.wait_for_list("no PersistentVolume is left", none).await;
    }

    pub(crate) async fn wait_until_gone(&self, claim: &str) {
        self.server.wait_until_gone::<PersistentVolumeClaim>(claim).await;
    }

    pub(crate) async fn wait_for_event(&self, about: &str, reason: &str, part: &str) {
        self.server.wait_for_event(about, reason, part).await;
    }
}

pub(crate) fn annotated<'a, K: kube::Resource>(object: &'a K, key: &str) -> Option<&'a str> {
    object.meta().annotation(key)
}
