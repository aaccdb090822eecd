//! A real API server in a scratch directory. The agent's client remembers every write, and can be told to lose one.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use cleat_runtime::Caches;
use http::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(90);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

pub(crate) struct Api {
    server: ApiServer,
    /// May do everything.
    client: Client,
    log: Arc<Mutex<Log>>,
}

#[derive(Default)]
struct Log {
    /// Every write of the agent: method and path.
    writes: Vec<String>,
    /// Parts of paths; the next write to each fails.
    lose: Vec<String>,
}

impl Api {
    pub(crate) async fn new(directory: &Path) -> Api {
        let server = ApiServer::open(Config::new(directory, ([127, 0, 0, 1], 0).into())).await.unwrap();
        let api = Api { client: server.client("test"), server, log: Arc::default() };
        let ready = async |api: &Api| api.get("serviceaccounts", "default", "default").await.is_some();
        api.until("pods can be created", ready).await;
        api
    }

    /// With the rights of the node and nobody else's.
    pub(crate) fn of_node(&self, node: &str) -> Client {
        let inner = self.server.component(&format!("system:node:{node}"));
        let log = self.log.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (inner, lost) = (inner.clone(), log.lock().note(&request));
            async move { if lost { Ok(failure()) } else { inner.send(request).await } }
        });
        Client::new(service, "default")
    }

    /// What the process around the agents watches with.
    pub(crate) fn caches(&self, stop: &CancellationToken) -> Caches {
        Caches::new(self.server.component("system:cleat:caches"), stop.clone())
    }

    pub(crate) fn writes(&self) -> Vec<String> {
        self.log.lock().writes.clone()
    }

    /// The agent's next write to a path that contains `part` fails.
    pub(crate) fn lose(&self, part: &str) {
        self.log.lock().lose.push(part.to_owned());
    }

    pub(crate) fn still_to_lose(&self) -> usize {
        self.log.lock().lose.len()
    }

    pub(crate) async fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        match self.send(Method::GET, &format!("{}/{name}", path(resource, namespace)), Value::Null).await {
            Ok(object) => Some(object),
            Err(kube::Error::Api(status)) if status.code == 404 => None,
            Err(error) => panic!("{resource} {name}: {error}"),
        }
    }

    /// Creates an object together with its status. Gives it as it is stored.
    pub(crate) async fn put(&self, resource: &str, object: impl serde::Serialize) -> Value {
        let mut object = serde_json::to_value(object).unwrap();
        let meta = object["metadata"].as_object_mut().unwrap();
        for given in ["uid", "resourceVersion", "creationTimestamp"] {
            meta.remove(given);
        }
        let text = |field: &str| meta.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (namespace, name) = (text("namespace"), text("name"));
        let stored = self.send(Method::POST, &path(resource, &namespace), object.clone()).await.unwrap();
        match object.get("status").cloned() {
            Some(status) => self.edit_status(resource, &namespace, &name, status).await,
            None => stored,
        }
    }

    pub(crate) async fn edit_status(&self, resource: &str, namespace: &str, name: &str, status: Value) -> Value {
        let path = format!("{}/{name}/status", path(resource, namespace));
        self.send(Method::PATCH, &path, json!({ "status": status })).await.unwrap()
    }

    /// Deletes as kubectl does: a pod on a node is only asked to go.
    pub(crate) async fn delete(&self, resource: &str, namespace: &str, name: &str) {
        self.send(Method::DELETE, &format!("{}/{name}", path(resource, namespace)), Value::Null).await.unwrap();
    }

    /// Deletes by force.
    pub(crate) async fn remove(&self, resource: &str, namespace: &str, name: &str) {
        let path = format!("{}/{name}", path(resource, namespace));
        self.send(Method::DELETE, &path, json!({ "gracePeriodSeconds": 0 })).await.unwrap();
    }

    pub(crate) async fn until(&self, what: &str, holds: impl AsyncFn(&Api) -> bool) {
        let held = async {
            while !holds(self).await {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        if tokio::time::timeout(PATIENCE, held).await.is_err() {
            let mut there = String::new();
            for all in ["/api/v1/pods", "/api/v1/nodes"] {
                let list = self.send(Method::GET, all, Value::Null).await.unwrap();
                there.push_str(&serde_json::to_string_pretty(&list).unwrap());
            }
            panic!("waited in vain: {what}; {there}");
        }
    }

    async fn send(&self, method: Method, path: &str, body: Value) -> kube::Result<Value> {
        let content = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
        let request = Request::builder().method(method).uri(path).header("content-type", content);
        self.client.request(request.body(body).unwrap()).await
    }
}

impl Log {
    /// Whether the request is to be lost.
    fn note(&mut self, request: &Request<Body>) -> bool {
        if request.method() == Method::GET {
            return false;
        }
        let path = request.uri().path();
        self.writes.push(format!("{} {path}", request.method()));
        let lost = self.lose.iter().position(|part| path.contains(part));
        lost.map(|at| self.lose.remove(at)).is_some()
    }
}

fn path(resource: &str, namespace: &str) -> String {
    let group = match resource {
        "csidrivers" | "csinodes" | "volumeattachments" => "/apis/storage.k8s.io/v1",
        "leases" => "/apis/coordination.k8s.io/v1",
        _ => "/api/v1",
    };
    if namespace.is_empty() {
        format!("{group}/{resource}")
    } else {
        format!("{group}/namespaces/{namespace}/{resource}")
    }
}

fn failure() -> Response<Body> {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500, "reason": "InternalError",
        "message": "lost, as the test says",
    });
    let mut response = Response::new(Body::from(status.to_string().into_bytes()));
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}
