//! The API as JSON, for assertions on single fields. The agent's client logs every write, and can fail one.

use std::sync::Arc;

use cleat_runtime::Caches;
use cleat_testing::{TestApiServer, wait};
use http::{Method, Request, Response, StatusCode};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

pub(crate) struct JsonApi {
    server: TestApiServer,
    log: Arc<Mutex<WriteLog>>,
}

#[derive(Default)]
struct WriteLog {
    /// The method and path of every write of the agent.
    writes: Vec<String>,
    /// Parts of paths. The next write to a path that contains one fails and removes it from the list.
    fail_next_writes: Vec<String>,
}

impl JsonApi {
    pub(crate) async fn new() -> JsonApi {
        let server = TestApiServer::start().await;
        // Pods can be created from then on.
        server.wait_until("default", "exists", |_: &ServiceAccount| true).await;
        JsonApi { server, log: Arc::default() }
    }

    /// A client with the rights of the node, which logs its writes.
    pub(crate) fn node_client(&self, node: &str) -> Client {
        let inner = self.server.component(&format!("system:node:{node}"));
        let log = self.log.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (inner, must_fail) = (inner.clone(), log.lock().record(&request));
            async move { if must_fail { Ok(failure()) } else { inner.send(request).await } }
        });
        Client::new(service, "default")
    }

    /// The caches that the agents of one process share.
    pub(crate) fn caches(&self, stop: &CancellationToken) -> Caches {
        self.server.caches(stop)
    }

    pub(crate) fn writes(&self) -> Vec<String> {
        self.log.lock().writes.clone()
    }

    /// The agent's next write to a path that contains `part` fails.
    pub(crate) fn fail_next_writes(&self, part: &str) {
        self.log.lock().fail_next_writes.push(part.to_owned());
    }

    pub(crate) fn pending_failures(&self) -> usize {
        self.log.lock().fail_next_writes.len()
    }

    pub(crate) async fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        match self.send(Method::GET, &format!("{}/{name}", path(resource, namespace)), Value::Null).await {
            Ok(object) => Some(object),
            Err(kube::Error::Api(status)) if status.code == 404 => None,
            Err(error) => panic!("{resource} {name}: {error}"),
        }
    }

    /// Creates an object together with its status. Returns the stored object.
    pub(crate) async fn create(&self, resource: &str, object: impl serde::Serialize) -> Value {
        let mut object = serde_json::to_value(object).unwrap();
        let meta = object["metadata"].as_object_mut().unwrap();
        for assigned in ["uid", "resourceVersion", "creationTimestamp"] {
            meta.remove(assigned);
        }
        let field_value = |field: &str| meta.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (namespace, name) = (field_value("namespace"), field_value("name"));
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

    /// Deletes as kubectl does: a pod on a node only gets a deletion timestamp.
    pub(crate) async fn delete(&self, resource: &str, namespace: &str, name: &str) {
        self.send(Method::DELETE, &format!("{}/{name}", path(resource, namespace)), Value::Null).await.unwrap();
    }

    /// Deletes with a grace period of 0.
    pub(crate) async fn force_delete(&self, resource: &str, namespace: &str, name: &str) {
        let path = format!("{}/{name}", path(resource, namespace));
        self.send(Method::DELETE, &path, json!({ "gracePeriodSeconds": 0 })).await.unwrap();
    }

    /// Calls `holds` until it returns true.
    pub(crate) async fn wait_until(&self, what: &str, holds: impl AsyncFn(&JsonApi) -> bool) {
        wait::wait_until(what, async || holds(self).await).await;
    }

    async fn send(&self, method: Method, path: &str, body: Value) -> kube::Result<Value> {
        let content = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
        let request = Request::builder().method(method).uri(path).header("content-type", content);
        self.server.client().request(request.body(body).unwrap()).await
    }
}

impl WriteLog {
    /// Logs a write. Returns whether it must fail.
    fn record(&mut self, request: &Request<Body>) -> bool {
        if request.method() == Method::GET {
            return false;
        }
        let path = request.uri().path();
        self.writes.push(format!("{} {path}", request.method()));
        let position = self.fail_next_writes.iter().position(|part| path.contains(part));
        position.map(|at| self.fail_next_writes.remove(at)).is_some()
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
        "message": "failed by the test",
    });
    let mut response = Response::new(Body::from(status.to_string().into_bytes()));
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}
