//! A server with an in-process client, and short forms of requests to it.

use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use futures::{AsyncBufReadExt as _, Stream, TryStreamExt as _};
use kube::Client;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(60);
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";

pub(crate) struct TestApi {
    pub(crate) client: Client,
    pub(crate) server: ApiServer,
    pub(crate) dir: tempfile::TempDir,
}

pub(crate) async fn start() -> TestApi {
    start_with(|_| {}).await
}

pub(crate) async fn start_with(configure: impl FnOnce(&mut Config)) -> TestApi {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::new(dir.path(), "127.0.0.1:0".parse().unwrap());
    configure(&mut config);
    let server = ApiServer::open(config).await.unwrap();
    TestApi { client: server.client("system:admin"), server, dir }
}

/// A server and a client with the user `component`, for tests of field ownership.
pub(crate) async fn start_with_component_client() -> (tempfile::TempDir, ApiServer, Client) {
    let TestApi { dir, server, .. } = start().await;
    let client = server.client("component");
    (dir, server, client)
}

pub(crate) async fn send(client: &Client, method: &str, path: &str, media: &str, body: impl ToString) -> (u16, Value) {
    let request = http::Request::builder().method(method).uri(path).header("content-type", media);
    let response = client.send(request.body(body.to_string().into_bytes().into()).unwrap()).await.unwrap();
    let code = response.status().as_u16();
    let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    (code, serde_json::from_slice(&bytes).unwrap())
}

/// A reply before it is decoded.
pub(crate) struct RawReply {
    pub(crate) code: u16,
    headers: http::HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl RawReply {
    /// A header's value; empty without the header.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
    }
}

impl TestApi {
    /// Sends a request with these headers and this body.
    pub(crate) async fn send_raw(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> RawReply {
        let request = http::Request::builder().method(method).uri(path);
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let response = self.client.send(request.body(body.to_vec().into()).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = http_body_util::BodyExt::collect(body).await.unwrap().to_bytes().to_vec();
        RawReply { code: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub(crate) async fn send(&self, method: &str, path: &str, media: &str, accept: &str, body: &Value) -> (u16, Value) {
        let (code, _, value) = self.send_with_warnings(method, path, media, accept, body).await;
        (code, value)
    }

    /// Returns the status code, the warnings and the body.
    pub(crate) async fn send_with_warnings(
        &self,
        method: &str,
        path: &str,
        media: &str,
        accept: &str,
        body: &Value,
    ) -> (u16, Vec<String>, Value) {
        let bytes = if body.is_null() { Vec::new() } else { serde_json::to_vec(body).unwrap() };
        let request = http::Request::builder().method(method).uri(path).header("accept", accept);
        let request = request.header("content-type", media).body(bytes.into()).unwrap();
        let response = self.client.send(request).await.unwrap();
        let code = response.status().as_u16();
        let warnings = response.headers().get_all("warning").iter();
        let warnings = warnings.map(|w| w.to_str().unwrap().to_owned()).collect();
        let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
        (code, warnings, serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into()))
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        self.send("GET", path, "application/json", "application/json", &Value::Null).await
    }

    pub(crate) async fn table(&self, path: &str) -> Value {
        self.send("GET", path, "application/json", TABLE, &Value::Null).await.1
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.send("POST", path, "application/json", "application/json", &body).await
    }

    /// Creates an object and asserts that it was created.
    pub(crate) async fn create(&self, path: &str, body: Value) -> Value {
        let (code, created) = self.post(path, body).await;
        assert_eq!(code, 201, "{created}");
        created
    }

    pub(crate) async fn put(&self, path: &str, body: Value) -> (u16, Value) {
        self.send("PUT", path, "application/json", "application/json", &body).await
    }

    pub(crate) async fn patch(&self, path: &str, body: Value) -> (u16, Value) {
        self.send("PATCH", path, "application/merge-patch+json", "application/json", &body).await
    }

    pub(crate) async fn delete(&self, path: &str) -> (u16, Value) {
        self.send("DELETE", path, "application/json", "application/json", &Value::Null).await
    }

    pub(crate) async fn watch(&self, path: &str) -> EventStream {
        let request = http::Request::builder().method("GET").uri(path).body(Vec::new()).unwrap();
        EventStream(Box::pin(self.client.request_stream(request).await.unwrap().lines()))
    }
}

pub(crate) struct EventStream(std::pin::Pin<Box<dyn Stream<Item = std::io::Result<String>>>>);

impl EventStream {
    /// The next event; none once the watch has ended.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        let line =
            tokio::time::timeout(TIMEOUT, self.0.try_next()).await.expect("an event before the timeout").unwrap();
        line.map(|line| serde_json::from_str(&line).expect("each line is one JSON object"))
    }
}

pub(crate) fn map(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "k": "v" } })
}

pub(crate) fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}

pub(crate) fn causes(status: &Value) -> Vec<String> {
    let causes = status["details"]["causes"].as_array().cloned().unwrap_or_default();
    causes.iter().map(|c| c["field"].as_str().unwrap_or_default().to_owned()).collect()
}
