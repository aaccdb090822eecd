//! The API through `kube::Client` inside the process: verbs, conflicts, subresources, deletion, watches.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use cleat_testing::build;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent, WatchParams,
};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use serde_json::json;

const WAIT: Duration = Duration::from_secs(60);

async fn server() -> (tempfile::TempDir, ApiServer) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    (dir, server)
}

fn config_map(name: &str, value: &str) -> ConfigMap {
    serde_json::from_value(json!({ "metadata": { "name": name }, "data": { "k": value } })).unwrap()
}

/// The builders make objects as a cluster would hold them; a new one has no version yet.
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
    let made = maps.create(&post, &config_map("a", "1")).await.unwrap();
    assert!(made.uid().is_some() && made.creation_timestamp().is_some());
    assert_eq!(reason(maps.create(&post, &config_map("a", "1")).await), (409, "AlreadyExists".into()));

    let mut changed = made.clone();
    changed.data.as_mut().unwrap().insert("k".into(), "2".into());
    let changed = maps.replace("a", &post, &changed).await.unwrap();
    assert_ne!(changed.resource_version(), made.resource_version());
    assert_eq!(reason(maps.replace("a", &post, &made).await), (409, "Conflict".into()));
    let again = maps.replace("a", &post, &changed).await.unwrap();
    assert_eq!(again.resource_version(), changed.resource_version(), "an update that changes nothing writes nothing");

    let patch = json!({ "metadata": { "labels": { "x": "y" } }, "data": { "k": null, "l": "3" } });
    let patched = maps.patch("a", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    assert_eq!(patched.data.unwrap().into_iter().collect::<Vec<_>>(), [("l".to_owned(), "3".to_owned())]);
    let stale = json!({ "metadata": { "resourceVersion": made.resource_version() } });
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
    let made = maps.create(&PostParams::default(), &map).await.unwrap();
    assert!(made.name_any().starts_with("made-") && made.name_any().len() == 10);
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
    let made =
        claims.create(&PostParams::default(), &fresh(build::claim("default", "c", None, "1024Mi"))).await.unwrap();
    let spec = made.spec.as_ref().unwrap();
    assert_eq!(spec.storage_class_name.as_deref(), Some("fast"));
    assert_eq!(spec.resources.as_ref().unwrap().requests.as_ref().unwrap()["storage"].0, "1Gi");
    assert_eq!(made.finalizers(), ["kubernetes.io/pvc-protection"]);
    assert_eq!(made.status.as_ref().unwrap().phase.as_deref(), Some("Pending"));

    // Deletion waits for the finalizer, and ends with it.
    let deleted = claims.delete("c", &DeleteParams::default()).await.unwrap().left().unwrap();
    assert!(deleted.metadata.deletion_timestamp.is_some());
    let add = json!({ "metadata": { "finalizers": ["kubernetes.io/pvc-protection", "a/b"] } });
    assert_eq!(reason(claims.patch("c", &PatchParams::default(), &Patch::Merge(&add)).await), (422, "Invalid".into()));
    let free = json!({ "metadata": { "finalizers": null } });
    claims.patch("c", &PatchParams::default(), &Patch::Merge(&free)).await.unwrap();
    assert!(claims.get_opt("c").await.unwrap().is_none());
}

#[tokio::test]
async fn status_and_the_rest_are_written_apart() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let post = PostParams::default();
    let params = PatchParams::default();
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let mut volume = fresh(build::volume("v", "fast", "1Gi"));
    volume.status = Some(serde_json::from_value(json!({ "phase": "Bound" })).unwrap());
    let made = volumes.create(&post, &volume).await.unwrap();
    assert_eq!(made.status.as_ref().unwrap().phase.as_deref(), Some("Pending"), "a client cannot choose the phase");
    let both = json!({ "metadata": { "annotations": { "a": "b" } }, "spec": { "storageClassName": "other" }, "status": { "phase": "Available" } });
    let status = volumes.patch_status("v", &params, &Patch::Merge(&both)).await.unwrap();
    assert_eq!(status.status.as_ref().unwrap().phase.as_deref(), Some("Available"));
    assert_eq!(status.spec.as_ref().unwrap().storage_class_name.as_deref(), Some("fast"));
    assert_eq!(status.annotations().get("a").map(String::as_str), Some("b"), "volumes keep metadata sent to status");
    let main = volumes.patch("v", &params, &Patch::Merge(&json!({ "status": { "phase": "Bound" } }))).await.unwrap();
    assert_eq!(main.status.unwrap().phase.as_deref(), Some("Available"));

    let attachments: Api<VolumeAttachment> = Api::all(client);
    let made = attachments.create(&post, &fresh(build::attachment(&volume, "n"))).await.unwrap();
    let both = json!({ "metadata": { "annotations": { "a": "b" } }, "status": { "attached": true } });
    let status = attachments.patch_status(&made.name_any(), &params, &Patch::Merge(&both)).await.unwrap();
    assert!(status.status.as_ref().unwrap().attached && status.annotations().is_empty());
    let other = json!({ "spec": { "nodeName": "m" } });
    assert_eq!(
        reason(attachments.patch(&made.name_any(), &params, &Patch::Merge(&other)).await),
        (422, "Invalid".into())
    );
}

#[tokio::test]
async fn pods_are_given_time_to_end() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let post = PostParams::default();
    let mut pod = fresh(build::pod("default", "free", "", &[]));
    pod.spec.as_mut().unwrap().node_name = None;
    pod.spec.as_mut().unwrap().containers[0].image.get_or_insert_with(|| "i".into());
    let made = pods.create(&post, &pod).await.unwrap();
    let spec = made.spec.as_ref().unwrap();
    assert_eq!(spec.restart_policy.as_deref(), Some("Always"));
    assert_eq!(spec.scheduler_name.as_deref(), Some("default-scheduler"));
    pods.delete("free", &DeleteParams::default()).await.unwrap();
    assert!(pods.get_opt("free").await.unwrap().is_none(), "an unassigned pod goes at once");

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

    let leaving = pods.delete("free", &DeleteParams::default()).await.unwrap().left().unwrap();
    assert_eq!(leaving.metadata.deletion_grace_period_seconds, Some(30));
    let now = jiff::Timestamp::now().as_second();
    let end = leaving.metadata.deletion_timestamp.unwrap().0.as_second();
    assert!((now + 25..now + 35).contains(&end));
    pods.delete("free", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert!(pods.get_opt("free").await.unwrap().is_none());
}

#[tokio::test]
async fn a_deleted_namespace_takes_nothing_new_and_goes_when_it_is_let_go() {
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
    assert!(namespaces.get_opt("team").await.unwrap().is_some(), "its content is not known to be gone");
    ending.spec.as_mut().unwrap().finalizers = None;
    namespaces.replace_subresource("finalize", "team", &PostParams::default(), &ending).await.unwrap();
    assert!(namespaces.get_opt("team").await.unwrap().is_none());
    assert_eq!(reason(namespaces.delete("default", &DeleteParams::default()).await), (403, "Forbidden".into()));
}

#[tokio::test]
async fn a_watch_tells_what_enters_and_leaves_its_selector() {
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
    let mut seen = Vec::new();
    let mut last = 0;
    while seen.len() < 5 {
        let event = tokio::time::timeout(WAIT, events.try_next()).await.unwrap().unwrap().unwrap();
        let (name, object) = match &event {
            WatchEvent::Added(o) => ("added", o),
            WatchEvent::Modified(o) => ("modified", o),
            WatchEvent::Deleted(o) => ("deleted", o),
            other => panic!("{other:?}"),
        };
        let version: u64 = object.resource_version().unwrap().parse().unwrap();
        assert!(version > last, "versions grow along the stream");
        last = version;
        seen.push(name);
    }
    assert_eq!(seen, ["added", "modified", "deleted", "added", "deleted"]);
}

#[tokio::test]
async fn a_watch_from_the_distant_past_says_so_in_the_stream() {
    let (dir, first) = server().await;
    let maps = default_maps(first.client("test")).await;
    for i in 0..3 {
        maps.create(&PostParams::default(), &config_map(&format!("m{i}"), "1")).await.unwrap();
    }
    first.close().await;
    assert_eq!(reason(maps.get("m0").await), (503, "ServiceUnavailable".into()));
    // History does not survive a restart; the objects and the revision do.
    let again = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let maps = default_maps(again.client("test")).await;
    assert_eq!(maps.list(&ListParams::default()).await.unwrap().items.len(), 3);
    let mut events = maps.watch(&WatchParams::default(), "2").await.unwrap().boxed();
    match tokio::time::timeout(WAIT, events.try_next()).await.unwrap().unwrap().unwrap() {
        WatchEvent::Error(status) => assert_eq!((status.code, status.reason.as_str()), (410, "Expired")),
        other => panic!("{other:?}"),
    }
    assert!(events.try_next().await.unwrap().is_none(), "the stream ends after the error");
}

#[tokio::test]
async fn one_data_directory_has_one_server() {
    let (dir, _server) = server().await;
    let second = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await;
    let error = second.err().expect("the directory is taken").to_string();
    assert!(error.contains("another process uses the store"), "{error}");
}

#[tokio::test]
async fn watchers_of_both_kinds_see_every_object_once() {
    let (_dir, server) = server().await;
    let maps = default_maps(server.client("test")).await;
    for config in [watcher::Config::default(), watcher::Config::default().streaming_lists()] {
        let mut events = watcher(maps.clone(), config).boxed();
        assert!(matches!(events.try_next().await.unwrap().unwrap(), watcher::Event::Init));
        let mut known = BTreeSet::new();
        loop {
            match tokio::time::timeout(WAIT, events.try_next()).await.unwrap().unwrap().unwrap() {
                watcher::Event::InitApply(map) => assert!(known.insert(map.name_any())),
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
        let before = known.len();
        while known.len() < before + 160 {
            match tokio::time::timeout(WAIT, events.try_next()).await.unwrap().unwrap().unwrap() {
                watcher::Event::Apply(map) => assert!(known.insert(map.name_any()), "no duplicate"),
                other => panic!("{other:?}"),
            }
        }
        for writer in writers {
            writer.await.unwrap();
        }
        assert_eq!(maps.list(&ListParams::default()).await.unwrap().items.len(), known.len());
    }
}

#[tokio::test]
async fn lists_come_in_pages_of_one_snapshot() {
    let (_dir, server) = server().await;
    let maps = default_maps(server.client("test")).await;
    for i in 0..25 {
        maps.create(&PostParams::default(), &config_map(&format!("m{i:02}"), "1")).await.unwrap();
    }
    let mut seen = Vec::new();
    let mut page = maps.list(&ListParams::default().limit(10)).await.unwrap();
    assert_eq!(page.metadata.remaining_item_count, Some(15));
    let version = page.metadata.resource_version.clone();
    loop {
        seen.extend(page.items.iter().map(|m| m.name_any()));
        assert_eq!(page.metadata.resource_version, version);
        let Some(token) = page.metadata.continue_.filter(|t| !t.is_empty()) else { break };
        // Writes between pages do not show.
        maps.create(&PostParams::default(), &config_map(&format!("n{}", seen.len()), "1")).await.unwrap();
        maps.delete(&format!("m{:02}", 24 - seen.len() / 10), &DeleteParams::default()).await.unwrap();
        page = maps.list(&ListParams::default().limit(10).continue_token(&token)).await.unwrap();
    }
    assert_eq!(seen, (0..25).map(|i| format!("m{i:02}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_dropped_request_is_done_or_not_but_never_half() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let nodes: Api<Node> = Api::all(client);
    for i in 0..50 {
        let node = fresh(build::node(&format!("n{i}")));
        let post = PostParams::default();
        let create = nodes.create(&post, &node);
        // Long enough to be accepted sometimes, too short to be answered always.
        let _ = tokio::time::timeout(Duration::from_micros(20 * i), create).await;
    }
    let listed = nodes.list(&ListParams::default()).await.unwrap();
    for node in listed.items {
        assert_eq!(nodes.get(&node.name_any()).await.unwrap().uid(), node.uid());
    }
}

#[tokio::test]
async fn a_direct_call_has_the_rights_of_its_component_and_ends_with_the_server() {
    let (_dir, server) = server().await;
    let ask = |path: &str| http::Request::get(path).body(bytes::Bytes::new()).unwrap();
    let watching = server.direct("system:cleat:caches");
    let answer = watching(ask("/api/v1/persistentvolumes")).await;
    assert_eq!(answer.status(), 200, "{}", String::from_utf8_lossy(answer.body()));
    let answer = watching(ask("/api/v1/namespaces/default/secrets")).await;
    let refused: serde_json::Value = serde_json::from_slice(answer.body()).unwrap();
    assert_eq!((answer.status().as_u16(), &refused["reason"]), (403, &serde_json::json!("Forbidden")));
    server.close().await;
    assert_eq!(watching(ask("/api/v1/persistentvolumes")).await.status(), 503);
}

#[tokio::test]
async fn a_dropped_direct_call_is_done_or_not_but_never_half() {
    let (_dir, server) = server().await;
    let direct = server.direct("system:cleat:provisioner");
    let volumes: Api<PersistentVolume> = Api::all(server.client("test"));
    for i in 0..50 {
        let volume = serde_json::to_vec(&fresh(build::volume(&format!("v{i}"), "", "1Gi"))).unwrap();
        let request = http::Request::post("/api/v1/persistentvolumes").body(volume.into()).unwrap();
        // Long enough to be accepted sometimes, too short to be answered always.
        let answered = tokio::time::timeout(Duration::from_micros(20 * i), direct(request)).await;
        if let Ok(answer) = answered {
            assert_eq!(answer.status(), 201, "{}", String::from_utf8_lossy(answer.body()));
        }
    }
    let listed = volumes.list(&ListParams::default()).await.unwrap();
    for volume in listed.items {
        assert_eq!(volumes.get(&volume.name_any()).await.unwrap().uid(), volume.uid());
    }
}

/// A write, with the object in place of its text or without, and what comes back for it.
struct Sent<'a> {
    direct: &'a cleat_apiserver::Direct,
    handed: bool,
}

impl Sent<'_> {
    async fn write(&self, method: http::Method, path: &str, volume: &PersistentVolume) -> PersistentVolume {
        let handed = cleat_api::TypedBody::with_object(Box::new(volume.clone()));
        let body = if self.handed { Vec::new() } else { serde_json::to_vec(volume).unwrap() };
        self.send(method, path, "application/json", body, handed).await
    }

    async fn send(
        &self,
        method: http::Method,
        path: &str,
        media: &str,
        body: Vec<u8>,
        handed: cleat_api::TypedBody,
    ) -> PersistentVolume {
        let mut request = http::Request::builder().method(method).uri(path).header("content-type", media);
        if self.handed {
            request = request.extension(handed);
        }
        let answer = (self.direct)(request.body(body.into()).unwrap()).await;
        assert!(answer.status().is_success(), "{}", String::from_utf8_lossy(answer.body()));
        let handed = answer.extensions().get::<cleat_api::TypedReply>().and_then(|a| a.object::<PersistentVolume>());
        assert_eq!((handed.is_some(), answer.body().is_empty()), (self.handed, self.handed));
        let mut volume =
            handed.map_or_else(|| serde_json::from_slice(answer.body()).unwrap(), |volume| (*volume).clone());
        volume.metadata.managed_fields = None;
        volume
    }
}

/// The object without what no two have in common.
fn common(mut volume: PersistentVolume) -> serde_json::Value {
    let meta = &mut volume.metadata;
    (meta.name, meta.uid, meta.resource_version) = (None, None, None);
    meta.creation_timestamp = None;
    for entry in meta.managed_fields.iter_mut().flatten() {
        entry.time = None;
    }
    if let Some(status) = &mut volume.status {
        status.last_phase_transition_time = None;
    }
    serde_json::to_value(volume).unwrap()
}

#[tokio::test]
async fn an_object_that_is_handed_over_is_worth_its_text() {
    let (_dir, server) = server().await;
    let direct = server.direct("system:cleat:provisioner");
    let binder = server.direct("system:cleat:binder");
    let volumes: Api<PersistentVolume> = Api::all(server.client("test"));
    // What a text of that shape comes to is learned from the first one. What says nothing is not kept.
    for zero in [None, Some(String::new())] {
        let mut seen = Vec::new();
        for (name, handed) in [("first", true), ("text", false), ("object", true)] {
            let (sent, bind) = (Sent { direct: &*direct, handed }, Sent { direct: &*binder, handed });
            let path = format!("/api/v1/persistentvolumes/{name}");
            let mut wanted = fresh(build::volume("v", "slow", "1Gi"));
            wanted.metadata.name = Some(name.into());
            wanted.spec.get_or_insert_default().persistent_volume_reclaim_policy = zero.clone();
            let made = sent.write(http::Method::POST, "/api/v1/persistentvolumes", &wanted).await;
            assert_eq!(
                made.spec.as_ref().unwrap().persistent_volume_reclaim_policy.as_deref(),
                Some("Retain"),
                "{name}"
            );
            let mut changed = made.clone();
            changed.spec.get_or_insert_default().mount_options = Some(vec!["ro".into()]);
            let changed = bind.write(http::Method::PUT, &path, &changed).await;
            let mut marked = changed.clone();
            marked.status.get_or_insert_default().phase = Some("Available".into());
            let marked = bind.write(http::Method::PUT, &format!("{path}/status"), &marked).await;
            let patch = serde_json::json!({ "metadata": { "finalizers": ["example.com/a"] } });
            let patch = serde_json::to_vec(&patch).unwrap();
            let handed = cleat_api::TypedBody::reply_only::<PersistentVolume>();
            let media = "application/merge-patch+json";
            let held = sent.send(http::Method::PATCH, &path, media, patch, handed).await;
            let stored = volumes.get(name).await.unwrap();
            assert_eq!(
                (held.metadata.resource_version.as_ref(), &held.spec, &held.status, &held.metadata.finalizers),
                (stored.metadata.resource_version.as_ref(), &stored.spec, &stored.status, &stored.metadata.finalizers),
                "{name}: the answer is what is stored"
            );
            seen.push([made, changed, marked, held, stored].map(common));
            // The last finalizer takes the object along.
            volumes.delete(name, &DeleteParams::default()).await.unwrap();
            let patch = serde_json::to_vec(&serde_json::json!({ "metadata": { "finalizers": [] } })).unwrap();
            let handed = cleat_api::TypedBody::reply_only::<PersistentVolume>();
            sent.send(http::Method::PATCH, &path, media, patch, handed).await;
            assert!(volumes.get_opt(name).await.unwrap().is_none());
        }
        assert_eq!(seen[0], seen[1]);
        assert_eq!(seen[2], seen[1]);
    }
}

#[tokio::test]
async fn an_object_that_is_handed_over_is_there_when_somebody_else_was_first() {
    let (_dir, server) = server().await;
    let direct = server.direct("system:cleat:binder");
    let volumes: Api<PersistentVolume> = Api::all(server.client("test"));
    volumes.create(&PostParams::default(), &fresh(build::volume("v", "slow", "1Gi"))).await.unwrap();
    let made = volumes.get("v").await.unwrap();
    // Without a version each is to win, however often it has to be tried.
    let all = (0..32).map(|n| {
        let mut volume = made.clone();
        (volume.metadata.resource_version, volume.metadata.managed_fields) = (None, None);
        volume.metadata.labels = Some([("n".to_owned(), n.to_string())].into());
        if n % 2 == 0 {
            // Owners are for those who know them to send.
            volume.metadata.managed_fields = made.metadata.managed_fields.clone();
        }
        let handed = cleat_api::TypedBody::with_object(Box::new(volume));
        let request = http::Request::put("/api/v1/persistentvolumes/v").extension(handed);
        tokio::spawn(direct(request.body(bytes::Bytes::new()).unwrap()))
    });
    for answer in futures::future::join_all(all).await {
        let answer = answer.unwrap();
        assert_eq!(answer.status(), 200, "{}", String::from_utf8_lossy(answer.body()));
    }
    assert!(volumes.get("v").await.unwrap().metadata.managed_fields.is_some_and(|owners| !owners.is_empty()));
}

#[tokio::test]
async fn an_object_that_is_handed_over_is_no_larger_than_a_body() {
    let (_dir, server) = server().await;
    let direct = server.direct("system:cleat:provisioner");
    let mut volume = fresh(build::volume("v", "slow", "1Gi"));
    volume.metadata.annotations = Some([("a".to_owned(), "x".repeat(4 << 20))].into());
    let request = http::Request::post("/api/v1/persistentvolumes");
    let request = request.extension(cleat_api::TypedBody::with_object(Box::new(volume)));
    let answer = direct(request.body(bytes::Bytes::new()).unwrap()).await;
    assert_eq!(answer.status(), 413, "{}", String::from_utf8_lossy(answer.body()));
}

#[tokio::test]
async fn no_version_is_stored_with_an_object() {
    let (_dir, server) = server().await;
    let client = server.client("test");
    let attachments: Api<VolumeAttachment> = Api::all(client.clone());
    let attachment = json!({ "metadata": { "name": "a" }, "spec": { "attacher": "d", "nodeName": "n",
        "source": { "persistentVolumeName": "v" } } });
    let attachment = serde_json::from_value(attachment).unwrap();
    attachments.create(&PostParams::default(), &attachment).await.unwrap();
    for attached in [true, false, true] {
        let patch = Patch::Merge(json!({ "status": { "attached": attached } }));
        let said = attachments.patch_status("a", &PatchParams::default(), &patch).await.unwrap();
        let request = http::Request::get("/apis/storage.k8s.io/v1/volumeattachments/a").body(Vec::new()).unwrap();
        let text = client.request_text(request).await.unwrap();
        let version = format!(r#""resourceVersion":"{}""#, said.metadata.resource_version.unwrap());
        assert!(text.contains(&version), "{text}");
        assert_eq!(text.matches("resourceVersion").count(), 1);
    }
}

#[tokio::test]
async fn who_knows_another_type_goes_by_the_text() {
    let (_dir, server) = server().await;
    let direct = server.direct("system:cleat:provisioner");
    let volume = serde_json::to_value(fresh(build::volume("v", "", "1Gi"))).unwrap();
    let request = http::Request::post("/api/v1/persistentvolumes");
    let request = request.extension(cleat_api::TypedBody::with_object(Box::new(volume)));
    let answer = direct(request.body(bytes::Bytes::new()).unwrap()).await;
    assert_eq!(answer.status(), 201);
    let made: PersistentVolume = serde_json::from_slice(answer.body()).unwrap();
    assert_eq!(made.name_any(), "v");
}

#[tokio::test]
async fn an_object_that_is_read_twice_is_there_twice() {
    let (_dir, server) = server().await;
    let direct = server.direct("system:cleat:binder");
    let mut event = Event { reason: Some("Why".into()), message: Some("because".into()), ..Event::default() };
    (event.metadata.name, event.metadata.namespace) = (Some("e".into()), Some("default".into()));
    event.involved_object.namespace = Some("default".into());
    // Where a PUT may make the object, it is looked for first.
    let request = http::Request::put("/api/v1/namespaces/default/events/e");
    let request = request.extension(cleat_api::TypedBody::with_object(Box::new(event)));
    let answer = direct(request.body(bytes::Bytes::new()).unwrap()).await;
    assert_eq!(answer.status(), 201, "{}", String::from_utf8_lossy(answer.body()));
}
