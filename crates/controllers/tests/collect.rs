//! The garbage collector on a real API server: owners and dependents of built-in and custom kinds, and deleted
//! namespaces.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use cleat_controllers::{Context, collect};
use cleat_runtime::{Caches, SystemClock};
use cleat_testing::wait::within_timeout;
use cleat_testing::{TestApiServer, merged};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

struct CollectorFixture {
    server: TestApiServer,
}

impl CollectorFixture {
    async fn start() -> Self {
        let server = TestApiServer::start().await;
        let caches = Caches::new(server.client(), server.stop().clone());
        let context = Context { client: server.client().into(), caches, clock: Arc::new(SystemClock) };
        tokio::spawn(collect::run(context, server.stop().clone()));
        Self { server }
    }

    fn config_maps(&self, namespace: &str) -> Api<ConfigMap> {
        Api::namespaced(self.server.client(), namespace)
    }

    async fn create_config_map(&self, name: &str, metadata: Value) -> ConfigMap {
        self.server.create(json!({ "metadata": merged(json!({ "name": name }), metadata) })).await
    }

    async fn expect_removal(&self, object: &ConfigMap) {
        let (uid, name) = (object.uid().unwrap(), object.name_any());
        let deleted = await_condition(self.config_maps("default"), &name, conditions::is_deleted(&uid));
        within_timeout(&format!("{name} is deleted"), deleted).await.unwrap();
    }

    /// Waits until the object meets the condition.
    async fn wait_until(&self, name: &str, holds: impl Fn(&ConfigMap) -> bool) {
        self.server.wait_until(name, "changes", holds).await;
    }

    async fn remove_finalizers(&self, name: &str) {
        self.server.patch::<ConfigMap>(name, json!({ "metadata": { "finalizers": null } })).await;
    }
}

fn owned_by(owners: &[&ConfigMap], block: bool) -> Value {
    let references: Vec<Value> = owners
        .iter()
        .map(|o| {
            json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": o.name_any(), "uid": o.uid(), "blockOwnerDeletion": block })
        })
        .collect();
    json!({ "ownerReferences": references })
}

#[tokio::test]
async fn an_object_is_deleted_after_its_last_owner() {
    let fixture = CollectorFixture::start().await;
    let (one, two) =
        (fixture.create_config_map("one", json!({})).await, fixture.create_config_map("two", json!({})).await);
    let child = fixture.create_config_map("child", owned_by(&[&one], false)).await;
    let grandchild = fixture.create_config_map("grandchild", owned_by(&[&child], false)).await;
    let shared = fixture.create_config_map("shared", owned_by(&[&one, &two], false)).await;
    let free = fixture.create_config_map("free", json!({})).await;
    fixture.config_maps("default").delete("one", &DeleteParams::background()).await.unwrap();
    fixture.expect_removal(&child).await;
    fixture.expect_removal(&grandchild).await;
    // The reference to the deleted owner is removed. The other owner remains.
    fixture.wait_until("shared", |o| o.owner_references().len() == 1).await;
    fixture.config_maps("default").delete("two", &DeleteParams::background()).await.unwrap();
    fixture.expect_removal(&shared).await;
    assert!(fixture.config_maps("default").get_opt(&free.name_any()).await.unwrap().is_some());
}

#[tokio::test]
async fn an_owner_that_does_not_exist_or_is_in_another_namespace_counts_as_absent() {
    let fixture = CollectorFixture::start().await;
    let elsewhere = ConfigMap {
        metadata: kube::core::ObjectMeta { name: Some("far".into()), ..Default::default() },
        ..Default::default()
    };
    let elsewhere = fixture.config_maps("kube-system").create(&PostParams::default(), &elsewhere).await.unwrap();
    let stray = fixture.create_config_map("stray", owned_by(&[&elsewhere], false)).await;
    fixture.expect_removal(&stray).await;
    let reference = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "never", "uid": "no-such-uid" });
    let lost = fixture.create_config_map("lost", json!({ "ownerReferences": [reference] })).await;
    fixture.expect_removal(&lost).await;
}

#[tokio::test]
async fn foreground_deletion_removes_the_owner_last() {
    let fixture = CollectorFixture::start().await;
    let owner = fixture.create_config_map("owner", json!({})).await;
    let mut held = owned_by(&[&owner], true);
    held["finalizers"] = json!(["test.cleat.dev/hold"]);
    let child = fixture.create_config_map("child", held).await;
    let other = fixture.create_config_map("other", owned_by(&[&owner], false)).await;
    fixture.config_maps("default").delete("owner", &DeleteParams::foreground()).await.unwrap();
    fixture.wait_until("child", |o| o.metadata.deletion_timestamp.is_some()).await;
    fixture.expect_removal(&other).await;
    let waiting = fixture.config_maps("default").get("owner").await.unwrap();
    assert_eq!(waiting.finalizers(), ["foregroundDeletion"], "the owner waits for the child that blocks it");
    fixture.remove_finalizers("child").await;
    fixture.expect_removal(&child).await;
    fixture.expect_removal(&owner).await;
}

#[tokio::test]
async fn orphaned_dependents_stay_without_their_owner_reference() {
    let fixture = CollectorFixture::start().await;
    let owner = fixture.create_config_map("owner", json!({})).await;
    let child = fixture.create_config_map("child", owned_by(&[&owner], true)).await;
    fixture.config_maps("default").delete("owner", &DeleteParams::orphan()).await.unwrap();
    fixture.expect_removal(&owner).await;
    let child = fixture.config_maps("default").get(&child.name_any()).await.unwrap();
    assert!(child.owner_references().is_empty());
}

async fn define_things(fixture: &CollectorFixture) -> Api<DynamicObject> {
    let definition = json!({
        "metadata": { "name": "things.example.com" },
        "spec": {
            "group": "example.com", "scope": "Namespaced", "names": { "plural": "things", "kind": "Thing" },
            "versions": [{ "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true } } }],
        },
    });
    fixture.server.create::<CustomResourceDefinition>(definition).await;
    let established = await_condition(fixture.server.api(), "things.example.com", conditions::is_crd_established());
    within_timeout("established", established).await.unwrap();
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("example.com", "v1", "Thing"), "things");
    Api::namespaced_with(fixture.server.client(), "default", &resource)
}

#[tokio::test]
async fn custom_objects_can_be_owners_and_dependents() {
    let fixture = CollectorFixture::start().await;
    let things = define_things(&fixture).await;
    let thing: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "example.com/v1", "kind": "Thing", "metadata": { "name": "t" }, "spec": {},
    }))
    .unwrap();
    let thing = things.create(&PostParams::default(), &thing).await.unwrap();
    let reference = json!({ "apiVersion": "example.com/v1", "kind": "Thing", "name": "t", "uid": thing.uid() });
    let child = fixture.create_config_map("child", json!({ "ownerReferences": [reference] })).await;
    let mut owned = serde_json::to_value(&thing).unwrap();
    owned["metadata"] = merged(json!({ "name": "u" }), owned_by(&[&child], false));
    let below = things.create(&PostParams::default(), &serde_json::from_value(owned).unwrap()).await.unwrap();
    things.delete("t", &DeleteParams::background()).await.unwrap();
    fixture.expect_removal(&child).await;
    let uid = below.uid().unwrap();
    let deleted = await_condition(things, "u", conditions::is_deleted(&uid));
    within_timeout("the custom object is deleted too", deleted).await.unwrap();
}

#[tokio::test]
async fn a_deeply_nested_object_does_not_stop_the_collection_of_its_kind() {
    let fixture = CollectorFixture::start().await;
    let things = define_things(&fixture).await;
    let depth = 125;
    let spec = format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
    let deep =
        format!(r#"{{"apiVersion":"example.com/v1","kind":"Thing","metadata":{{"name":"deep"}},"spec":{spec}}}"#);
    let request = http::Request::post("/apis/example.com/v1/namespaces/default/things").body(deep.into()).unwrap();
    let response = fixture.server.client().send(request.map(|body: Vec<u8>| body.into())).await.unwrap();
    assert_eq!(response.status(), 201);
    let owner = fixture.create_config_map("owner", json!({})).await;
    let metadata = merged(json!({ "name": "owned" }), owned_by(&[&owner], false));
    let object = json!({ "apiVersion": "example.com/v1", "kind": "Thing", "metadata": metadata });
    let owned = things.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    fixture.config_maps("default").delete("owner", &DeleteParams::background()).await.unwrap();
    let uid = owned.uid().unwrap();
    let gone = await_condition(things, "owned", conditions::is_deleted(&uid));
    within_timeout("objects after the nested one are collected", gone).await.unwrap();
}

#[tokio::test]
async fn a_deleted_namespace_is_removed_after_its_content() {
    let fixture = CollectorFixture::start().await;
    define_things(&fixture).await;
    let namespaces: Api<Namespace> = fixture.server.api();
    let namespace: Namespace = fixture.server.create(json!({ "metadata": { "name": "team" } })).await;
    let held: ConfigMap =
        serde_json::from_value(json!({ "metadata": { "name": "held", "finalizers": ["test.cleat.dev/hold"] } }))
            .unwrap();
    fixture.config_maps("team").create(&PostParams::default(), &held).await.unwrap();
    let plain: ConfigMap = serde_json::from_value(json!({ "metadata": { "name": "plain" } })).unwrap();
    fixture.config_maps("team").create(&PostParams::default(), &plain).await.unwrap();
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("example.com", "v1", "Thing"), "things");
    let things: Api<DynamicObject> = Api::namespaced_with(fixture.server.client(), "team", &resource);
    let thing = json!({ "apiVersion": "example.com/v1", "kind": "Thing", "metadata": { "name": "t" } });
    things.create(&PostParams::default(), &serde_json::from_value(thing).unwrap()).await.unwrap();
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    let reports_finalizers = |namespace: Option<&Namespace>| {
        let conditions = namespace.and_then(|n| n.status.as_ref()).and_then(|s| s.conditions.as_ref());
        conditions.is_some_and(|c| c.iter().any(|c| c.type_ == "NamespaceFinalizersRemaining" && c.status == "True"))
    };
    let reported = await_condition(namespaces.clone(), "team", reports_finalizers);
    within_timeout("it reports what it waits for", reported).await.unwrap();
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    fixture.config_maps("team").patch("held", &PatchParams::default(), &patch).await.unwrap();
    let uid = namespace.uid().unwrap();
    let deleted = await_condition(namespaces, "team", conditions::is_deleted(&uid));
    within_timeout("the empty namespace is removed", deleted).await.unwrap();
    assert!(fixture.config_maps("team").list(&Default::default()).await.unwrap().items.is_empty());
    assert!(things.list(&Default::default()).await.unwrap().items.is_empty());
}
