//! An API server small enough to see through: objects as JSON in memory, one revision, list, watch, merge patch, the rules for
//! resourceVersion, uid preconditions and graceful deletion of pods. Only what the node agent relies on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

/// Resource, namespace, name.
pub(crate) type Name = (String, String, String);

#[derive(Clone)]
pub(crate) struct Api {
    world: Arc<Mutex<World>>,
    revision: Arc<watch::Sender<u64>>,
}

#[derive(Default)]
struct World {
    revision: u64,
    objects: BTreeMap<Name, Value>,
    /// Revision, resource, type, object.
    log: Vec<(u64, String, &'static str, Value)>,
    /// Every write: method and path.
    writes: Vec<String>,
}

impl Api {
    pub(crate) fn new() -> Api {
        Api { world: Arc::default(), revision: Arc::new(watch::Sender::new(0)) }
    }

    pub(crate) fn client(&self) -> kube::Client {
        kube::Client::new(Router::new().fallback(any(handle)).with_state(self.clone()), "default")
    }

    pub(crate) fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        self.world.lock().objects.get(&key(resource, namespace, name)).cloned()
    }

    pub(crate) fn writes(&self) -> Vec<String> {
        self.world.lock().writes.clone()
    }

    /// Creates or replaces an object, whatever its version.
    pub(crate) fn put(&self, resource: &str, object: impl serde::Serialize) {
        let object = serde_json::to_value(object).unwrap();
        let meta = &object["metadata"];
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let name = key(resource, &text(&meta["namespace"]), &text(&meta["name"]));
        let mut world = self.world.lock();
        world.store(name, object);
        self.revision.send_replace(world.revision);
    }

    pub(crate) fn edit(&self, resource: &str, namespace: &str, name: &str, patch: Value) {
        let mut world = self.world.lock();
        let name = key(resource, namespace, name);
        let mut object = world.objects[&name].clone();
        json_patch::merge(&mut object, &patch);
        world.store(name, object);
        self.revision.send_replace(world.revision);
    }

    pub(crate) fn remove(&self, resource: &str, namespace: &str, name: &str) {
        let mut world = self.world.lock();
        world.remove(&key(resource, namespace, name));
        self.revision.send_replace(world.revision);
    }

    /// Returns when `holds` does, looking again after every write.
    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Api) -> bool) {
        let mut revision = self.revision.subscribe();
        let wait = async {
            loop {
                revision.borrow_and_update();
                if holds(self) {
                    return;
                }
                revision.changed().await.unwrap();
            }
        };
        if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
            let world = self.world.lock();
            let pods: Vec<_> = world.objects.iter().filter(|((r, _, _), _)| r == "pods" || r == "nodes").collect();
            panic!("waited in vain: {what}; {}", serde_json::to_string_pretty(&json!(pods)).unwrap());
        }
    }
}

fn key(resource: &str, namespace: &str, name: &str) -> Name {
    (resource.to_owned(), namespace.to_owned(), name.to_owned())
}

impl World {
    fn store(&mut self, name: Name, mut object: Value) -> Value {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}-{}", name.2, self.revision));
        }
        let kind = if self.objects.contains_key(&name) { "MODIFIED" } else { "ADDED" };
        self.log.push((self.revision, name.0.clone(), kind, object.clone()));
        self.objects.insert(name, object.clone());
        object
    }

    fn remove(&mut self, name: &Name) {
        if let Some(mut object) = self.objects.remove(name) {
            self.revision += 1;
            object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
            self.log.push((self.revision, name.0.clone(), "DELETED", object));
        }
    }
}

async fn handle(
    State(api): State<Api>,
    method: Method,
    uri: Uri,
    Query(query): Query<BTreeMap<String, String>>,
    body: Bytes,
) -> Response {
    let path: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
    let path = if path[0] == "api" { &path[2..] } else { &path[3..] };
    let (namespace, path) = match path {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
        path => ("", path),
    };
    let (resource, name) = (path[0], path.get(1).copied().unwrap_or_default());
    if method == Method::GET && name.is_empty() {
        return if query.get("watch").is_some_and(|w| w == "true" || w == "1") {
            watch_events(api, resource, query.get("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or(0))
        } else {
            let world = api.world.lock();
            let items: Vec<&Value> = world.objects.iter().filter(|(k, _)| k.0 == resource).map(|(_, v)| v).collect();
            let metadata = json!({ "resourceVersion": world.revision.to_string() });
            answer(200, &json!({ "apiVersion": "v1", "kind": "List", "metadata": metadata, "items": items }))
        };
    }
    let sent: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let mut world = api.world.lock();
    if method != Method::GET {
        world.writes.push(format!("{method} {}", uri.path()));
    }
    let response = write(&mut world, &method, &key(resource, namespace, name), sent);
    api.revision.send_replace(world.revision);
    response
}

fn write(world: &mut World, method: &Method, name: &Name, sent: Value) -> Response {
    if *method == Method::POST {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let name = key(&name.0, &name.1, &text(&sent["metadata"]["name"]));
        if world.objects.contains_key(&name) {
            return refuse(409, "AlreadyExists");
        }
        return answer(201, &world.store(name, sent));
    }
    let Some(mut object) = world.objects.get(name).cloned() else { return refuse(404, "NotFound") };
    let expected = &sent["metadata"]["resourceVersion"];
    if !expected.is_null() && *expected != object["metadata"]["resourceVersion"] {
        return refuse(409, "Conflict");
    }
    match *method {
        Method::GET => answer(200, &object),
        Method::PATCH => {
            json_patch::merge(&mut object, &sent);
            answer(200, &world.store(name.clone(), object))
        }
        Method::PUT => answer(200, &world.store(name.clone(), sent)),
        Method::DELETE => {
            let uid = &sent["preconditions"]["uid"];
            if !uid.is_null() && *uid != object["metadata"]["uid"] {
                return refuse(409, "Conflict");
            }
            if name.0 == "pods" && sent["gracePeriodSeconds"] != json!(0) {
                object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                return answer(200, &world.store(name.clone(), object));
            }
            world.remove(name);
            answer(200, &json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
        }
        _ => refuse(405, "MethodNotAllowed"),
    }
}

fn watch_events(api: Api, resource: &str, since: u64) -> Response {
    let resource = resource.to_owned();
    let start = (api.clone(), api.revision.subscribe(), since);
    let stream = futures::stream::unfold(start, move |(api, mut revision, since)| {
        let resource = resource.clone();
        async move {
            loop {
                revision.borrow_and_update();
                let (lines, seen) = {
                    let world = api.world.lock();
                    let new = world.log.iter().filter(|(r, of, ..)| *r > since && *of == resource);
                    let lines: String = new
                        .map(|(_, _, kind, object)| format!("{}\n", json!({ "type": kind, "object": object })))
                        .collect();
                    (lines, world.revision)
                };
                if !lines.is_empty() {
                    return Some((Ok::<_, std::convert::Infallible>(lines), (api, revision, seen)));
                }
                revision.changed().await.ok()?;
            }
        }
    });
    Response::new(Body::from_stream(stream))
}

fn answer(code: u16, body: &Value) -> Response {
    (StatusCode::from_u16(code).unwrap(), axum::Json(body)).into_response()
}

fn refuse(code: u16, reason: &str) -> Response {
    answer(
        code,
        &json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason }),
    )
}
