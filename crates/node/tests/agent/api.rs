//! A real API server in a temporary directory. The agent's client logs every write, and can fail one.

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

const WAIT_TIMEOUT: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

pub(crate) struct Api {
    server: ApiServer,
    /// Has all rights.
    client: Client,
    log: Arc<Mutex<WriteLog>>,
}

#[derive(Default)]
struct WriteLog {
    /// The method and path of every write of the agent.
    writes: Vec<String>,
    /// Parts of paths. The next write to a path that contains one fails and removes it from the list.
    fail_next_writes: Vec<String>,
}

impl Api {
    pub(crate) async fn new(directory: &Path) -> Api {
        let server = ApiServer::open(Config::new(directory, ([127, 0, 0, 1], 0).into())).await.unwrap();
        let api = Api { client: server.client("test"), server, log: Arc::default() };
        let ready = async |api: &Api| api.get("serviceaccounts", "default", "default").await.is_some();
        api.wait_until("pods can be created", ready).await;
        api
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
        Caches::new(self.server.component("system:cleat:caches"), stop.clone())
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

    pub(crate) async fn wait_until(&self, what: &str, condition_holds: impl AsyncFn(&Api) -> bool) {
        let held = async {
            while !condition_holds(self).await {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        if tokio::time::timeout(WAIT_TIMEOUT, held).await.is_err() {
            let mut objects = String::new();
            for all in ["/api/v1/pods", "/api/v1/nodes"] {
                let list = self.send(Method::GET, all, Value::Null).await.unwrap();
                objects.push_str(&serde_json::to_string_pretty(&list).unwrap());
            }
            panic!("timed out waiting until {what}; {objects}");
        }
    }

    async fn send(&self, method: Method, path: &str, body: Value) -> kube::Result<Value> {
        let content = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
        let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
        let request = Request::builder().method(method).uri(path).header("content-type", content);
        self.client.request(request.body(body).unwrap()).await
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
