//! The in-process [`Transport`]: rights, watches, cancellation, and objects as bodies.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cleat_api::transport::{AcceptedReply, ReplyBody, RequestBody, Transport, TypedBody};
use cleat_apiserver::{ApiServer, Config};
use cleat_testing::build;
use futures::StreamExt as _;
use http::{Method, Request, Response};
use k8s_openapi::api::core::v1::{Event, PersistentVolume};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Resource, ResourceExt as _};
use serde_json::json;

async fn server() -> (tempfile::TempDir, ApiServer) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    (dir, server)
}

/// The object without the fields that the server sets.
fn fresh<K: Resource>(mut object: K) -> K {
    let meta = object.meta_mut();
    (meta.uid, meta.resource_version, meta.creation_timestamp) = (None, None, None);
    object
}

fn body_text(reply: &Response<ReplyBody>) -> String {
    String::from_utf8_lossy(reply.body().encoded()).into_owned()
}

fn get(path: &str) -> Request<RequestBody> {
    Request::get(path).body(RequestBody::encoded(Bytes::new())).unwrap()
}

#[tokio::test]
async fn a_call_has_the_rights_of_its_component_and_ends_with_the_server() {
    let (_dir, server) = server().await;
    let caches = server.transport("system:cleat:caches");
    let reply = caches.call(get("/api/v1/persistentvolumes")).await.unwrap();
    assert_eq!(reply.status(), 200, "{}", body_text(&reply));
    let reply = caches.call(get("/api/v1/namespaces/default/secrets")).await.unwrap();
    let refused: serde_json::Value = serde_json::from_slice(reply.body().encoded()).unwrap();
    assert_eq!((reply.status().as_u16(), &refused["reason"]), (403, &json!("Forbidden")));
    server.close().await;
    assert_eq!(caches.call(get("/api/v1/persistentvolumes")).await.unwrap().status(), 503);
}

#[tokio::test]
async fn a_watch_delivers_events_at_once_and_a_refused_one_a_status() {
    let (_dir, server) = server().await;
    let caches = server.transport("system:cleat:caches");
    let watch = |path: &str| Request::get(path).body(()).unwrap();
    let reply = caches.watch(watch("/api/v1/persistentvolumes?watch=1")).await.unwrap();
    assert_eq!(reply.status(), 200);
    let mut chunks = reply.into_body();
    let volumes: Api<PersistentVolume> = Api::all(server.client("test"));
    volumes.create(&PostParams::default(), &fresh(build::volume("v", "", "1Gi"))).await.unwrap();
    let event: serde_json::Value = serde_json::from_slice(&chunks.next().await.unwrap().unwrap()).unwrap();
    assert_eq!((&event["type"], &event["object"]["metadata"]["name"]), (&json!("ADDED"), &json!("v")));
    let reply = caches.watch(watch("/api/v1/secrets?watch=1")).await.unwrap();
    assert_eq!(reply.status(), 403);
    let status: serde_json::Value = serde_json::from_slice(&reply.into_body().next().await.unwrap().unwrap()).unwrap();
    assert_eq!(status["reason"], "Forbidden");
}

#[tokio::test]
async fn a_dropped_call_is_either_complete_or_without_effect() {
    let (_dir, server) = server().await;
    let provisioner = server.transport("system:cleat:provisioner");
    let volumes: Api<PersistentVolume> = Api::all(server.client("test"));
    for i in 0..50 {
        let volume = serde_json::to_vec(&fresh(build::volume(&format!("v{i}"), "", "1Gi"))).unwrap();
        let request = Request::post("/api/v1/persistentvolumes").body(RequestBody::encoded(volume)).unwrap();
        // Some of these timeouts are long enough for the write, few for the reply.
        let answered = tokio::time::timeout(Duration::from_micros(20 * i), provisioner.call(request)).await;
        if let Ok(reply) = answered {
            let reply = reply.unwrap();
            assert_eq!(reply.status(), 201, "{}", body_text(&reply));
        }
    }
    let listed = volumes.list(&ListParams::default()).await.unwrap();
    for volume in listed.items {
        assert_eq!(volumes.get(&volume.name_any()).await.unwrap().uid(), volume.uid());
    }
}

/// Writes a volume as an object or encoded, and expects the reply in the same form.
struct VolumeWriter<'a> {
    transport: &'a dyn Transport,
    as_object: bool,
}

impl VolumeWriter<'_> {
    async fn write(&self, method: Method, path: &str, volume: &PersistentVolume) -> PersistentVolume {
        let body = match self.as_object {
            true => RequestBody::Object(TypedBody::new(Box::new(volume.clone()))),
            false => RequestBody::encoded(serde_json::to_vec(volume).unwrap()),
        };
        self.send(method, path, "application/json", body).await
    }

    async fn patch_finalizers(&self, path: &str, finalizers: &[&str]) -> PersistentVolume {
        let patch = serde_json::to_vec(&json!({ "metadata": { "finalizers": finalizers } })).unwrap();
        let accepted = match self.as_object {
            true => AcceptedReply::object::<PersistentVolume>(),
            false => AcceptedReply::Encoded,
        };
        let body = RequestBody::Encoded(patch.into(), accepted);
        self.send(Method::PATCH, path, "application/merge-patch+json", body).await
    }

    async fn send(&self, method: Method, path: &str, media: &str, body: RequestBody) -> PersistentVolume {
        let request = Request::builder().method(method).uri(path).header("content-type", media);
        let reply = self.transport.call(request.body(body).unwrap()).await.unwrap();
        assert!(reply.status().is_success(), "{}", body_text(&reply));
        let object = reply.body().object::<PersistentVolume>();
        assert_eq!((object.is_some(), reply.body().encoded().is_empty()), (self.as_object, self.as_object));
        let mut volume =
            object.map_or_else(|| serde_json::from_slice(reply.body().encoded()).unwrap(), |volume| (*volume).clone());
        volume.metadata.managed_fields = None;
        volume
    }
}

/// The object without its name, uid, version and times.
fn comparable(mut volume: PersistentVolume) -> serde_json::Value {
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
async fn an_object_is_treated_like_its_encoded_form() {
    let (_dir, server) = server().await;
    let provisioner = server.transport("system:cleat:provisioner");
    let binder = server.transport("system:cleat:binder");
    let volumes: Api<PersistentVolume> = Api::all(server.client("test"));
    // The first write fills the cache of body shapes. The empty reclaim policy of the second round is a zero value,
    // which is not stored.
    for zero in [None, Some(String::new())] {
        let mut results = Vec::new();
        for (name, as_object) in [("first", true), ("encoded", false), ("object", true)] {
            let provision = VolumeWriter { transport: &*provisioner, as_object };
            let bind = VolumeWriter { transport: &*binder, as_object };
            let path = format!("/api/v1/persistentvolumes/{name}");
            let mut wanted = fresh(build::volume("v", "slow", "1Gi"));
            wanted.metadata.name = Some(name.into());
            wanted.spec.get_or_insert_default().persistent_volume_reclaim_policy = zero.clone();
            let created = provision.write(Method::POST, "/api/v1/persistentvolumes", &wanted).await;
            assert_eq!(
                created.spec.as_ref().unwrap().persistent_volume_reclaim_policy.as_deref(),
                Some("Retain"),
                "{name}"
            );
            let mut changed = created.clone();
            changed.spec.get_or_insert_default().mount_options = Some(vec!["ro".into()]);
            let changed = bind.write(Method::PUT, &path, &changed).await;
            let mut marked = changed.clone();
            marked.status.get_or_insert_default().phase = Some("Available".into());
            let marked = bind.write(Method::PUT, &format!("{path}/status"), &marked).await;
            let held = provision.patch_finalizers(&path, &["example.com/a"]).await;
            let stored = volumes.get(name).await.unwrap();
            assert_eq!(
                (held.metadata.resource_version.as_ref(), &held.spec, &held.status, &held.metadata.finalizers),
                (stored.metadata.resource_version.as_ref(), &stored.spec, &stored.status, &stored.metadata.finalizers),
                "{name}: the reply is what is stored"
            );
            results.push([created, changed, marked, held, stored].map(comparable));
            // The object is removed with its last finalizer.
            volumes.delete(name, &DeleteParams::default()).await.unwrap();
            provision.patch_finalizers(&path, &[]).await;
            assert!(volumes.get_opt(name).await.unwrap().is_none());
        }
        assert_eq!(results[0], results[1]);
        assert_eq!(results[2], results[1]);
    }
}

#[tokio::test]
async fn a_write_of_an_object_is_retried_after_a_conflict() {
    let (_dir, server) = server().await;
    let binder = server.transport("system:cleat:binder");
    let volumes: Api<PersistentVolume> = Api::all(server.client("test"));
    volumes.create(&PostParams::default(), &fresh(build::volume("v", "slow", "1Gi"))).await.unwrap();
    let created = volumes.get("v").await.unwrap();
    // A write without a resourceVersion succeeds after any number of conflicts.
    let all = (0..32).map(|n| {
        let mut volume = created.clone();
        (volume.metadata.resource_version, volume.metadata.managed_fields) = (None, None);
        volume.metadata.labels = Some([("n".to_owned(), n.to_string())].into());
        if n % 2 == 0 {
            volume.metadata.managed_fields = created.metadata.managed_fields.clone();
        }
        let body = RequestBody::Object(TypedBody::new(Box::new(volume)));
        let request = Request::put("/api/v1/persistentvolumes/v").body(body).unwrap();
        let binder: Arc<dyn Transport> = binder.clone();
        tokio::spawn(async move { binder.call(request).await.unwrap() })
    });
    for reply in futures::future::join_all(all).await {
        let reply = reply.unwrap();
        assert_eq!(reply.status(), 200, "{}", body_text(&reply));
    }
    assert!(volumes.get("v").await.unwrap().metadata.managed_fields.is_some_and(|owners| !owners.is_empty()));
}

#[tokio::test]
async fn an_object_has_the_size_limit_of_encoded_bodies() {
    let (_dir, server) = server().await;
    let provisioner = server.transport("system:cleat:provisioner");
    let mut volume = fresh(build::volume("v", "slow", "1Gi"));
    volume.metadata.annotations = Some([("a".to_owned(), "x".repeat(4 << 20))].into());
    let body = RequestBody::Object(TypedBody::new(Box::new(volume)));
    let reply = provisioner.call(Request::post("/api/v1/persistentvolumes").body(body).unwrap()).await.unwrap();
    assert_eq!(reply.status(), 413, "{}", body_text(&reply));
}

#[tokio::test]
async fn an_object_of_another_type_is_encoded() {
    let (_dir, server) = server().await;
    let provisioner = server.transport("system:cleat:provisioner");
    let volume = serde_json::to_value(fresh(build::volume("v", "", "1Gi"))).unwrap();
    let body = RequestBody::Object(TypedBody::new(Box::new(volume)));
    let reply = provisioner.call(Request::post("/api/v1/persistentvolumes").body(body).unwrap()).await.unwrap();
    assert_eq!(reply.status(), 201);
    let created: PersistentVolume = serde_json::from_slice(reply.body().encoded()).unwrap();
    assert_eq!(created.name_any(), "v");
}

#[tokio::test]
async fn a_put_that_creates_uses_its_object_twice() {
    let (_dir, server) = server().await;
    let binder = server.transport("system:cleat:binder");
    let mut event = Event { reason: Some("Why".into()), message: Some("because".into()), ..Event::default() };
    (event.metadata.name, event.metadata.namespace) = (Some("e".into()), Some("default".into()));
    event.involved_object.namespace = Some("default".into());
    // A PUT that may create decodes the body again if the object does not exist.
    let body = RequestBody::Object(TypedBody::new(Box::new(event)));
    let request = Request::put("/api/v1/namespaces/default/events/e").body(body).unwrap();
    let reply = binder.call(request).await.unwrap();
    assert_eq!(reply.status(), 201, "{}", body_text(&reply));
}
