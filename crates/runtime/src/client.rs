//! The client that components read and write with: over HTTP through kube's client, or by direct calls of a server in the same
//! process.
//!
//! kube's client puts a queue and a task between the caller and the server. Within one process these cost more than many
//! requests do; a direct call runs the server's future on the caller's task instead.

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use kube::client::Body;

/// Handles a request in this process and returns the complete response. The future runs on the caller's task and is dropped if
/// the caller is cancelled. A request with a [`TypedBody`](cleat_api::TypedBody) may get a response with a
/// [`TypedReply`](cleat_api::TypedReply).
pub type InProcessHandler = dyn Fn(Request<Bytes>) -> BoxFuture<'static, Response<Bytes>> + Send + Sync;

/// Sends a request to a server and returns the complete response.
pub trait Transport: Send + Sync {
    fn call(&self, request: Request<Bytes>) -> BoxFuture<'_, kube::Result<Response<Bytes>>>;

    /// Returns true if the server is in this process and accepts a [`TypedBody`](cleat_api::TypedBody).
    fn is_in_process(&self) -> bool {
        false
    }
}

/// A connection to the API server.
#[derive(Clone)]
pub struct Client {
    kube: kube::Client,
    handler: Option<Arc<InProcessHandler>>,
}

impl From<kube::Client> for Client {
    fn from(kube: kube::Client) -> Self {
        Self { kube, handler: None }
    }
}

impl Client {
    /// For a server in this process. `kube` must reach the same server as the same user.
    pub fn in_process(kube: kube::Client, handler: Arc<InProcessHandler>) -> Self {
        Self { kube, handler: Some(handler) }
    }

    /// For watches, and for requests that this crate does not offer.
    pub fn kube(&self) -> &kube::Client {
        &self.kube
    }
}

impl Transport for Client {
    fn is_in_process(&self) -> bool {
        self.handler.is_some()
    }

    fn call(&self, request: Request<Bytes>) -> BoxFuture<'_, kube::Result<Response<Bytes>>> {
        let Some(handler) = &self.handler else { return self.kube.call(request) };
        let response = handler(request);
        Box::pin(async move {
            // Many responses are ready without waiting: a caller that sends one request after another must yield to other tasks.
            tokio::task::consume_budget().await;
            Ok(response.await)
        })
    }
}

impl Transport for kube::Client {
    fn call(&self, request: Request<Bytes>) -> BoxFuture<'_, kube::Result<Response<Bytes>>> {
        Box::pin(async move {
            let (parts, body) = self.send(request.map(Body::from)).await?.into_parts();
            Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
        })
    }
}
