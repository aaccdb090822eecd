//! The garbage collector on a real API server: owners and dependents of built-in and custom kinds, and deleted
//! namespaces.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use cleat_controllers::{Context, collect};
use cleat_runtime::{Caches, SystemClock};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(20);

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
    let (client, stop) = (server.client("system:admin"), CancellationToken::new());
    let caches = Caches::new(client.clone(), stop.clone());
    let context = Context { client: client.clone().into(), caches, clock: Arc::new(SystemClock) };
    tokio::spawn(collect::run(context, stop.clone()));
    Rig { client, stop, _server: server, _dir: dir }
}

impl Rig {
    fn config_maps(&self, namespace: &str) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn create_config_map(&self, name: &str, metadata: Value) -> ConfigMap {
        let mut object = json!({ "metadata": { "name": name } });
        merge(&mut object["metadata"], metadata);
        self.config_maps("default")
            .create(&PostParams::default(), &serde_json::from_value(object).unwrap())
            .await
            .unwrap()
    }

    async fn expect_removal(&self, object: &ConfigMap) {
        let (uid, name) = (object.uid().unwrap(), object.name_any());
        let deleted = await_condition(self.config_maps("default"), &name, conditions::is_deleted(&uid));
        let outcome = tokio::time::timeout(WAIT, deleted).await;
        outcome.unwrap_or_else(|_| panic!("{} still exists", object.name_any())).unwrap();
    }

    /// Waits until the object meets the condition.
    async fn until(&self, name: &str, met: impl Fn(&ConfigMap) -> bool) {
        let met = |object: Option<&ConfigMap>| object.is_some_and(&met);
        let reached = await_condition(self.config_maps("default"), name, met);
        tokio::time::timeout(WAIT, reached).await.unwrap_or_else(|_| panic!("{name} did not change")).unwrap();
    }

    async fn remove_finalizers(&self, name: &str) {
        let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        self.config_maps("default").patch(name, &PatchParams::default(), &patch).await.unwrap();
    }
}

fn merge(target: &mut Value, with: Value) {
    if let (Value::Object(target), Value::Object(with)) = (target, with) {
        target.extend(with);
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
    let rig = rig().await;
    let (one, two) = (rig.create_config_map("one", json!({})).await, rig.create_config_map("two", json!({})).await);
    let child = rig.create_config_map("child", owned_by(&[&one], false)).await;
    let grandchild = rig.create_config_map("grandchild", owned_by(&[&child], false)).await;
    let shared = rig.create_config_map("shared", owned_by(&[&one, &two], false)).await;
    let free = rig.create_config_map("free", json!({})).await;
    rig.config_maps("default").delete("one", &DeleteParams::background()).await.unwrap();
    rig.expect_removal(&child).await;
    rig.expect_removal(&grandchild).await;
    // The reference to the deleted owner is removed. The other owner remains.
    rig.until("shared", |o| o.owner_references().len() == 1).await;
    rig.config_maps("default").delete("two", &DeleteParams::background()).await.unwrap();
    rig.expect_removal(&shared).await;
    assert!(rig.config_maps("default").get_opt(&free.name_any()).await.unwrap().is_some());
}

#[tokio::test]
async fn an_owner_that_does_not_exist_or_is_in_another_namespace_counts_as_absent() {
    let rig = rig().await;
    let elsewhere = ConfigMap {
        metadata: kube::core::ObjectMeta { name: Some("far".into()), ..Default::default() },
        ..Default::default()
    };
    let elsewhere = rig.config_maps("kube-system").create(&PostParams::default(), &elsewhere).await.unwrap();
    let stray = rig.create_config_map("stray", owned_by(&[&elsewhere], false)).await;
    rig.expect_removal(&stray).await;
    let reference = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "never", "uid": "no-such-uid" });
    let lost = rig.create_config_map("lost", json!({ "ownerReferences": [reference] })).await;
    rig.expect_removal(&lost).await;
}

#[tokio::test]
async fn foreground_deletion_removes_the_owner_last() {
    let rig = rig().await;
    let owner = rig.create_config_map("owner", json!({})).await;
    let mut held = owned_by(&[&owner], true);
    held["finalizers"] = json!(["test.cleat.dev/hold"]);
    let child = rig.create_config_map("child", held).await;
    let other = rig.create_config_map("other", owned_by(&[&owner], false)).await;
    rig.config_maps("default").delete("owner", &DeleteParams::foreground()).await.unwrap();
    rig.until("child", |o| o.metadata.deletion_timestamp.is_some()).await;
    rig.expect_removal(&other).await;
    let waiting = rig.config_maps("default").get("owner").await.unwrap();
    assert_eq!(waiting.finalizers(), ["foregroundDeletion"], "the owner waits for the child that blocks it");
    rig.remove_finalizers("child").await;
    rig.expect_removal(&child).await;
    rig.expect_removal(&owner).await;
}

#[tokio::test]
async fn orphaned_dependents_stay_without_their_owner_reference() {
    let rig = rig().await;
    let owner = rig.create_config_map("owner", json!({})).await;
    let child = rig.create_config_map("child", owned_by(&[&owner], true)).await;
    rig.config_maps("default").delete("owner", &DeleteParams::orphan()).await.unwrap();
    rig.expect_removal(&owner).await;
    let child = rig.config_maps("default").get(&child.name_any()).await.unwrap();
    assert!(child.owner_references().is_empty());
}

async fn define_things(rig: &Rig) -> Api<DynamicObject> {
    let definition: CustomResourceDefinition = serde_json::from_value(json!({
        "metadata": { "name": "things.example.com" },
        "spec": {
            "group": "example.com", "scope": "Namespaced", "names": { "plural": "things", "kind": "Thing" },
            "versions": [{ "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true } } }],
        },
    }))
    .unwrap();
    let definitions: Api<CustomResourceDefinition> = Api::all(rig.client.clone());
    definitions.create(&PostParams::default(), &definition).await.unwrap();
    let established = await_condition(definitions, "things.example.com", conditions::is_crd_established());
    tokio::time::timeout(WAIT, established).await.expect("established").unwrap();
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("example.com", "v1", "Thing"), "things");
    Api::namespaced_with(rig.client.clone(), "default", &resource)
}

#[tokio::test]
async fn custom_objects_can_be_owners_and_dependents() {
    let rig = rig().await;
    let things = define_things(&rig).await;
    let thing: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "example.com/v1", "kind": "Thing", "metadata": { "name": "t" }, "spec": {},
    }))
    .unwrap();
    let thing = things.create(&PostParams::default(), &thing).await.unwrap();
    let reference = json!({ "apiVersion": "example.com/v1", "kind": "Thing", "name": "t", "uid": thing.uid() });
    let child = rig.create_config_map("child", json!({ "ownerReferences": [reference] })).await;
    let mut owned = serde_json::to_value(&thing).unwrap();
    owned["metadata"] = json!({ "name": "u" });
    merge(&mut owned["metadata"], owned_by(&[&child], false));
    let below = things.create(&PostParams::default(), &serde_json::from_value(owned).unwrap()).await.unwrap();
    things.delete("t", &DeleteParams::background()).await.unwrap();
    rig.expect_removal(&child).await;
    let uid = below.uid().unwrap();
    let deleted = await_condition(things, "u", conditions::is_deleted(&uid));
    tokio::time::timeout(WAIT, deleted).await.expect("the custom object is deleted too").unwrap();
}

#[tokio::test]
async fn a_deeply_nested_object_does_not_stop_the_collection_of_its_kind() {
    let rig = rig().await;
    let things = define_things(&rig).await;
    let depth = 125;
    let spec = format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
    let deep =
        format!(r#"{{"apiVersion":"example.com/v1","kind":"Thing","metadata":{{"name":"deep"}},"spec":{spec}}}"#);
    let request = http::Request::post("/apis/example.com/v1/namespaces/default/things").body(deep.into()).unwrap();
    let response = rig.client.send(request.map(|body: Vec<u8>| body.into())).await.unwrap();
    assert_eq!(response.status(), 201);
    let owner = rig.create_config_map("owner", json!({})).await;
    let mut object = json!({ "apiVersion": "example.com/v1", "kind": "Thing", "metadata": { "name": "owned" } });
    merge(&mut object["metadata"], owned_by(&[&owner], false));
    let owned = things.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    rig.config_maps("default").delete("owner", &DeleteParams::background()).await.unwrap();
    let uid = owned.uid().unwrap();
    let gone = await_condition(things, "owned", conditions::is_deleted(&uid));
    tokio::time::timeout(WAIT, gone).await.expect("objects after the nested one are collected").unwrap();
}

#[tokio::test]
async fn a_deleted_namespace_is_removed_after_its_content() {
    let rig = rig().await;
    define_things(&rig).await;
    let namespaces: Api<Namespace> = Api::all(rig.client.clone());
    let namespace: Namespace = serde_json::from_value(json!({ "metadata": { "name": "team" } })).unwrap();
    let namespace = namespaces.create(&PostParams::default(), &namespace).await.unwrap();
    let held: ConfigMap =
        serde_json::from_value(json!({ "metadata": { "name": "held", "finalizers": ["test.cleat.dev/hold"] } }))
            .unwrap();
    rig.config_maps("team").create(&PostParams::default(), &held).await.unwrap();
    let plain: ConfigMap = serde_json::from_value(json!({ "metadata": { "name": "plain" } })).unwrap();
    rig.config_maps("team").create(&PostParams::default(), &plain).await.unwrap();
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("example.com", "v1", "Thing"), "things");
    let things: Api<DynamicObject> = Api::namespaced_with(rig.client.clone(), "team", &resource);
    let thing = json!({ "apiVersion": "example.com/v1", "kind": "Thing", "metadata": { "name": "t" } });
    things.create(&PostParams::default(), &serde_json::from_value(thing).unwrap()).await.unwrap();
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    let reports_finalizers = |namespace: Option<&Namespace>| {
        let conditions = namespace.and_then(|n| n.status.as_ref()).and_then(|s| s.conditions.as_ref());
        conditions.is_some_and(|c| c.iter().any(|c| c.type_ == "NamespaceFinalizersRemaining" && c.status == "True"))
    };
    let reported = await_condition(namespaces.clone(), "team", reports_finalizers);
    tokio::time::timeout(WAIT, reported).await.expect("it reports what it waits for").unwrap();
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    rig.config_maps("team").patch("held", &PatchParams::default(), &patch).await.unwrap();
    let uid = namespace.uid().unwrap();
    let deleted = await_condition(namespaces, "team", conditions::is_deleted(&uid));
    tokio::time::timeout(WAIT, deleted).await.expect("the empty namespace is removed").unwrap();
    assert!(rig.config_maps("team").list(&Default::default()).await.unwrap().items.is_empty());
    assert!(things.list(&Default::default()).await.unwrap().items.is_empty());
}
