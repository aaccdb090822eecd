//! The API through an in-process `kube::Client`: verbs, conflicts, subresources, deletion, watches.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use cleat_testing::build;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent, WatchParams,
};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use serde_json::json;

const TIMEOUT: Duration = Duration::from_secs(60);

async fn server() -> (tempfile::TempDir, ApiServer) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    (dir, server)
}

fn config_map(name: &str, value: &str) -> ConfigMap {
    serde_json::from_value(json!({ "metadata": { "name": name }, "data": { "k": value } })).unwrap()
}

/// The builders return objects as a server stores them. A new object has no resourceVersion.
fn fresh<K: kube::Resource>(mut object: K) -> K {
    object.meta_mut().resource_version = None;
    object
}

fn reason<T: std::fmt::Debug>(result: kube::Result<T>) -> (u16, String) {
    match result {
        Err(kube::Error::Api(status)) => (status.code, status.reason.clone()),
        other => panic!("expected a Status, got {other:?}"),
    }
}

async fn default_maps(client: Client) -> Api<ConfigMap> {
    Api::namespaced(client, "default")
}

#[tokio::test]
async fn objects_are_created_read_changed_and_deleted() {
    let (_dir, server) = server().await;
    let maps = default_maps(server.client("test")).await;
    let post = PostParams::default();
    let created = maps.create(&post, &config_map("a", "1")).await.unwrap();
    assert!(created.uid().is_some() && created.creation_timestamp().is_some());
    assert_eq!(reason(maps.create(&post, &config_map("a", "1")).await), (409, "AlreadyExists".into()));

    let mut changed = created.clone();
    changed.data.as_mut().unwrap().insert("k".into(), "2".into());
    let changed = maps.replace("a", &post, &changed).await.unwrap();
    assert_ne!(changed.resource_version(), created.resource_version());
    assert_eq!(reason(maps.replace("a", &post, &created).await), (409, "Conflict".into()));
    let again = maps.replace("a", &post, &changed).await.unwrap();
    assert_eq!(again.resource_version(), changed.resource_version(), "an update that changes nothing writes nothing");

    let patch = json!({ "metadata": { "labels": { "x": "y" } }, "data": { "k": null, "l": "3" } });
    let patched = maps.patch("a", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    assert_eq!(patched.data.unwrap().into_iter().collect::<Vec<_>>(), [("l".to_owned(), "3".to_owned())]);
    let stale = json!({ "metadata": { "resourceVersion": created.resource_version() } });
    assert_eq!(reason(maps.patch("a", &PatchParams::default(), &Patch::Merge(&stale)).await), (409, "Conflict".into()));

    let listed = maps.list(&ListParams::default().labels("x=y")).await.unwrap();
    assert_eq!(listed.items.len(), 1);
    assert!(maps.list(&ListParams::default().labels("x!=y")).await.unwrap().items.is_empty());
    let elsewhere = Preconditions { uid: Some("other".into()), resource_version: None };
    let guarded = DeleteParams { preconditions: Some(elsewhere), ..Default::default() };
    assert_eq!(reason(maps.delete("a", &guarded).await), (409, "Conflict".into()));
    assert!(maps.delete("a", &DeleteParams::default()).await.unwrap().is_right());
    assert_eq!(reason(maps.get("a").await), (404, "NotFound".into()));
}

#[tokio::test]
async fn names_are_generated_and_checked() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let maps = default_maps(client.clone()).await;
    let mut map = config_map("", "1");
    map.metadata.name = None;
    map.metadata.generate_name = Some("made-".into());
    let created = maps.create(&PostParams::default(), &map).await.unwrap();
    assert!(created.name_any().starts_with("made-") && created.name_any().len() == 10);
    let (code, why) = reason(maps.create(&PostParams::default(), &config_map("Bad_Name", "1")).await);
    assert_eq!((code, why.as_str()), (422, "Invalid"));
    let nowhere: Api<ConfigMap> = Api::namespaced(client, "nowhere");
    assert_eq!(reason(nowhere.create(&PostParams::default(), &config_map("a", "1")).await), (404, "NotFound".into()));
}

#[tokio::test]
async fn claims_get_their_class_finalizer_and_phase() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let classes: Api<StorageClass> = Api::all(client.clone());
    let mut class = fresh(build::class("fast", "block.cleat.dev"));
    build::annotate(&mut class.metadata, "storageclass.kubernetes.io/is-default-class", "true");
    let class = classes.create(&PostParams::default(), &class).await.unwrap();
    assert_eq!(class.reclaim_policy.as_deref(), Some("Delete"));

    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client, "default");
    let created =
        claims.create(&PostParams::default(), &fresh(build::claim("default", "c", None, "1024Mi"))).await.unwrap();
    let spec = created.spec.as_ref().unwrap();
    assert_eq!(spec.storage_class_name.as_deref(), Some("fast"));
    assert_eq!(spec.resources.as_ref().unwrap().requests.as_ref().unwrap()["storage"].0, "1Gi");
    assert_eq!(created.finalizers(), ["kubernetes.io/pvc-protection"]);
    assert_eq!(created.status.as_ref().unwrap().phase.as_deref(), Some("Pending"));

    // The claim is removed with its last finalizer.
    let deleted = claims.delete("c", &DeleteParams::default()).await.unwrap().left().unwrap();
    assert!(deleted.metadata.deletion_timestamp.is_some());
    let add = json!({ "metadata": { "finalizers": ["kubernetes.io/pvc-protection", "a/b"] } });
    assert_eq!(reason(claims.patch("c", &PatchParams::default(), &Patch::Merge(&add)).await), (422, "Invalid".into()));
    let free = json!({ "metadata": { "finalizers": null } });
    claims.patch("c", &PatchParams::default(), &Patch::Merge(&free)).await.unwrap();
    assert!(claims.get_opt("c").await.unwrap().is_none());
}

#[tokio::test]
async fn status_and_spec_are_written_separately() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let post = PostParams::default();
    let params = PatchParams::default();
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let mut volume = fresh(build::volume("v", "fast", "1Gi"));
    volume.status = Some(serde_json::from_value(json!({ "phase": "Bound" })).unwrap());
    let created = volumes.create(&post, &volume).await.unwrap();
    assert_eq!(created.status.as_ref().unwrap().phase.as_deref(), Some("Pending"), "a client cannot choose the phase");
    let both = json!({ "metadata": { "annotations": { "a": "b" } }, "spec": { "storageClassName": "other" }, "status": { "phase": "Available" } });
    let status = volumes.patch_status("v", &params, &Patch::Merge(&both)).await.unwrap();
    assert_eq!(status.status.as_ref().unwrap().phase.as_deref(), Some("Available"));
    assert_eq!(status.spec.as_ref().unwrap().storage_class_name.as_deref(), Some("fast"));
    assert_eq!(status.annotations().get("a").map(String::as_str), Some("b"), "volumes keep metadata sent to status");
    let main = volumes.patch("v", &params, &Patch::Merge(&json!({ "status": { "phase": "Bound" } }))).await.unwrap();
    assert_eq!(main.status.unwrap().phase.as_deref(), Some("Available"));

    let attachments: Api<VolumeAttachment> = Api::all(client);
    let created = attachments.create(&post, &fresh(build::attachment(&volume, "n"))).await.unwrap();
    let both = json!({ "metadata": { "annotations": { "a": "b" } }, "status": { "attached": true } });
    let status = attachments.patch_status(&created.name_any(), &params, &Patch::Merge(&both)).await.unwrap();
    assert!(status.status.as_ref().unwrap().attached && status.annotations().is_empty());
    let other = json!({ "spec": { "nodeName": "m" } });
    assert_eq!(
        reason(attachments.patch(&created.name_any(), &params, &Patch::Merge(&other)).await),
        (422, "Invalid".into())
    );
}

#[tokio::test]
async fn pods_have_a_grace_period() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let post = PostParams::default();
    let mut pod = fresh(build::pod("default", "free", "", &[]));
    pod.spec.as_mut().unwrap().node_name = None;
    pod.spec.as_mut().unwrap().containers[0].image.get_or_insert_with(|| "i".into());
    let created = pods.create(&post, &pod).await.unwrap();
    let spec = created.spec.as_ref().unwrap();
    assert_eq!(spec.restart_policy.as_deref(), Some("Always"));
    assert_eq!(spec.scheduler_name.as_deref(), Some("default-scheduler"));
    pods.delete("free", &DeleteParams::default()).await.unwrap();
    assert!(pods.get_opt("free").await.unwrap().is_none(), "an unassigned pod is removed at once");

    pods.create(&post, &pod).await.unwrap();
    let binding = json!({ "metadata": { "name": "free" }, "target": { "kind": "Node", "name": "n" } });
    let bind = || {
        let url = "/api/v1/namespaces/default/pods/free/binding";
        http::Request::post(url).header("content-type", "application/json").body(serde_json::to_vec(&binding).unwrap())
    };
    client.request::<serde_json::Value>(bind().unwrap()).await.unwrap();
    assert_eq!(pods.get("free").await.unwrap().spec.unwrap().node_name.as_deref(), Some("n"));
    assert_eq!(reason(client.request::<serde_json::Value>(bind().unwrap()).await), (409, "Conflict".into()));
    let field = ListParams::default().fields("spec.nodeName=n,status.phase=Pending");
    assert_eq!(pods.list(&field).await.unwrap().items.len(), 1);

    let deleted = pods.delete("free", &DeleteParams::default()).await.unwrap().left().unwrap();
    assert_eq!(deleted.metadata.deletion_grace_period_seconds, Some(30));
    let now = jiff::Timestamp::now().as_second();
    let end = deleted.metadata.deletion_timestamp.unwrap().0.as_second();
    assert!((now + 25..now + 35).contains(&end));
    pods.delete("free", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert!(pods.get_opt("free").await.unwrap().is_none());
}

#[tokio::test]
async fn a_deleted_namespace_accepts_no_objects_and_goes_when_it_is_finalized() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace: Namespace = serde_json::from_value(json!({ "metadata": { "name": "team" } })).unwrap();
    namespaces.create(&PostParams::default(), &namespace).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "team");
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    let mut ending = namespaces.get("team").await.unwrap();
    assert_eq!(ending.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Terminating"));
    assert_eq!(reason(maps.create(&PostParams::default(), &config_map("b", "1")).await), (403, "Forbidden".into()));
    namespaces.delete("team", &DeleteParams::default()).await.unwrap();
    assert!(namespaces.get_opt("team").await.unwrap().is_some(), "it is not finalized yet");
    ending.spec.as_mut().unwrap().finalizers = None;
    namespaces.replace_subresource("finalize", "team", &PostParams::default(), &ending).await.unwrap();
    assert!(namespaces.get_opt("team").await.unwrap().is_none());
    assert_eq!(reason(namespaces.delete("default", &DeleteParams::default()).await), (403, "Forbidden".into()));
}

#[tokio::test]
async fn a_watch_with_a_selector_reports_objects_that_start_and_stop_to_match() {
    let (_dir, server) = server().await;
    let maps = default_maps(server.client("test")).await;
    let start = maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut events = maps.watch(&WatchParams::default().labels("on=yes"), &start).await.unwrap().boxed();
    maps.create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    for labels in [json!({ "on": "yes" }), json!({ "more": "x" }), json!({ "on": "no" }), json!({ "on": "yes" })] {
        let patch = json!({ "metadata": { "labels": labels } });
        maps.patch("a", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }
    maps.delete("a", &DeleteParams::default()).await.unwrap();
    let mut types = Vec::new();
    let mut last = 0;
    while types.len() < 5 {
        let event = tokio::time::timeout(TIMEOUT, events.try_next()).await.unwrap().unwrap().unwrap();
        let (name, object) = match &event {
            WatchEvent::Added(o) => ("added", o),
            WatchEvent::Modified(o) => ("modified", o),
            WatchEvent::Deleted(o) => ("deleted", o),
            other => panic!("{other:?}"),
        };
        let version: u64 = object.resource_version().unwrap().parse().unwrap();
        assert!(version > last, "versions grow along the stream");
        last = version;
        types.push(name);
    }
    assert_eq!(types, ["added", "modified", "deleted", "added", "deleted"]);
}

#[tokio::test]
async fn a_watch_from_an_expired_version_gets_the_error_in_the_stream() {
    let (dir, first) = server().await;
    let maps = default_maps(first.client("test")).await;
    for i in 0..3 {
        maps.create(&PostParams::default(), &config_map(&format!("m{i}"), "1")).await.unwrap();
    }
    first.close().await;
    assert_eq!(reason(maps.get("m0").await), (503, "ServiceUnavailable".into()));
    // The objects and the revision survive a restart, the history of changes does not.
    let again = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let maps = default_maps(again.client("test")).await;
    assert_eq!(maps.list(&ListParams::default()).await.unwrap().items.len(), 3);
    let mut events = maps.watch(&WatchParams::default(), "2").await.unwrap().boxed();
    match tokio::time::timeout(TIMEOUT, events.try_next()).await.unwrap().unwrap().unwrap() {
        WatchEvent::Error(status) => assert_eq!((status.code, status.reason.as_str()), (410, "Expired")),
        other => panic!("{other:?}"),
    }
    assert!(events.try_next().await.unwrap().is_none(), "the stream ends after the error");
}

#[tokio::test]
async fn a_data_directory_is_used_by_one_server() {
    let (dir, _server) = server().await;
    let second = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await;
    let error = second.err().expect("the directory is taken").to_string();
    assert!(error.contains("another process uses the store"), "{error}");
}

#[tokio::test]
async fn listing_and_streaming_watchers_get_every_object_once() {
    let (_dir, server) = server().await;
    let maps = default_maps(server.client("test")).await;
    for config in [watcher::Config::default(), watcher::Config::default().streaming_lists()] {
        let mut events = watcher(maps.clone(), config).boxed();
        assert!(matches!(events.try_next().await.unwrap().unwrap(), watcher::Event::Init));
        let mut names = BTreeSet::new();
        loop {
            match tokio::time::timeout(TIMEOUT, events.try_next()).await.unwrap().unwrap().unwrap() {
                watcher::Event::InitApply(map) => assert!(names.insert(map.name_any())),
                watcher::Event::InitDone => break,
                other => panic!("{other:?}"),
            }
        }
        let writers: Vec<_> = (0..8)
            .map(|w| {
                let maps = maps.clone();
                tokio::spawn(async move {
                    for i in 0..20 {
                        let mut map = config_map("", "1");
                        map.metadata.name = None;
                        map.metadata.generate_name = Some(format!("w{w}-{i}-"));
                        maps.create(&PostParams::default(), &map).await.unwrap();
                    }
                })
            })
            .collect();
        let before = names.len();
        while names.len() < before + 160 {
            match tokio::time::timeout(TIMEOUT, events.try_next()).await.unwrap().unwrap().unwrap() {
                watcher::Event::Apply(map) => assert!(names.insert(map.name_any()), "no duplicate"),
                other => panic!("{other:?}"),
            }
        }
        for writer in writers {
            writer.await.unwrap();
        }
        assert_eq!(maps.list(&ListParams::default()).await.unwrap().items.len(), names.len());
    }
}

#[tokio::test]
async fn all_pages_of_a_list_show_one_snapshot() {
    let (_dir, server) = server().await;
    let maps = default_maps(server.client("test")).await;
    for i in 0..25 {
        maps.create(&PostParams::default(), &config_map(&format!("m{i:02}"), "1")).await.unwrap();
    }
    let mut names = Vec::new();
    let mut page = maps.list(&ListParams::default().limit(10)).await.unwrap();
    assert_eq!(page.metadata.remaining_item_count, Some(15));
    let version = page.metadata.resource_version.clone();
    loop {
        names.extend(page.items.iter().map(|m| m.name_any()));
        assert_eq!(page.metadata.resource_version, version);
        let Some(token) = page.metadata.continue_.filter(|t| !t.is_empty()) else { break };
        // Later pages do not show writes between pages.
        maps.create(&PostParams::default(), &config_map(&format!("n{}", names.len()), "1")).await.unwrap();
        maps.delete(&format!("m{:02}", 24 - names.len() / 10), &DeleteParams::default()).await.unwrap();
        page = maps.list(&ListParams::default().limit(10).continue_token(&token)).await.unwrap();
    }
    assert_eq!(names, (0..25).map(|i| format!("m{i:02}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_dropped_request_is_either_complete_or_without_effect() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let nodes: Api<Node> = Api::all(client);
    for i in 0..50 {
        let node = fresh(build::node(&format!("n{i}")));
        let post = PostParams::default();
        let create = nodes.create(&post, &node);
        // Some of these timeouts are long enough for the write, few for the reply.
        let _ = tokio::time::timeout(Duration::from_micros(20 * i), create).await;
    }
    let listed = nodes.list(&ListParams::default()).await.unwrap();
    for node in listed.items {
        assert_eq!(nodes.get(&node.name_any()).await.unwrap().uid(), node.uid());
    }
}

#[tokio::test]
async fn the_resource_version_is_not_stored_with_the_object() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let attachments: Api<VolumeAttachment> = Api::all(client.clone());
    let attachment = json!({ "metadata": { "name": "a" }, "spec": { "attacher": "d", "nodeName": "n",
        "source": { "persistentVolumeName": "v" } } });
    let attachment = serde_json::from_value(attachment).unwrap();
    attachments.create(&PostParams::default(), &attachment).await.unwrap();
    for attached in [true, false, true] {
        let patch = Patch::Merge(json!({ "status": { "attached": attached } }));
        let updated = attachments.patch_status("a", &PatchParams::default(), &patch).await.unwrap();
        let request = http::Request::get("/apis/storage.k8s.io/v1/volumeattachments/a").body(Vec::new()).unwrap();
        let text = client.request_text(request).await.unwrap();
        let version = format!(r#""resourceVersion":"{}""#, updated.metadata.resource_version.unwrap());
        assert!(text.contains(&version), "{text}");
        assert_eq!(text.matches("resourceVersion").count(), 1);
    }
}
