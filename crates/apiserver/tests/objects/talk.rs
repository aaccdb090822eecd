//! Requests and answers, as short as they can be.

use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use futures::{AsyncBufReadExt as _, Stream, TryStreamExt as _};
use kube::Client;
use serde_json::{Value, json};

const WAIT: Duration = Duration::from_secs(20);
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";

pub(crate) struct Talk {
    pub(crate) client: Client,
    pub(crate) server: ApiServer,
    pub(crate) dir: tempfile::TempDir,
}

pub(crate) async fn talk() -> Talk {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    Talk { client: server.client("system:admin"), server, dir }
}

impl Talk {
    pub(crate) async fn send(&self, method: &str, path: &str, media: &str, accept: &str, body: &Value) -> (u16, Value) {
        let (code, _, value) = self.whole(method, path, media, accept, body).await;
        (code, value)
    }

    /// The code, the warnings and the body.
    pub(crate) async fn whole(
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

    /// Creates what must be created.
    pub(crate) async fn made(&self, path: &str, body: Value) -> Value {
        let (code, made) = self.post(path, body).await;
        assert_eq!(code, 201, "{made}");
        made
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

    pub(crate) async fn watch(&self, path: &str) -> Lines {
        let request = http::Request::builder().method("GET").uri(path).body(Vec::new()).unwrap();
        Lines(Box::pin(self.client.request_stream(request).await.unwrap().lines()))
    }
}

pub(crate) struct Lines(std::pin::Pin<Box<dyn Stream<Item = std::io::Result<String>>>>);

impl Lines {
    /// The next event; nothing once the watch is over.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        let line = tokio::time::timeout(WAIT, self.0.try_next()).await.expect("a line in time").unwrap();
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
