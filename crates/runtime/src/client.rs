//! The client that components read, write and watch with. It works the same on a server in this process and on one that is
//! reached over HTTP: the difference is its [`Transport`].

use std::sync::Arc;

use bytes::Bytes;
use cleat_api::transport::{ReplyBody, RequestBody, Transport, TransportError, WatchChunks};
use futures::future::BoxFuture;
use futures::{StreamExt as _, TryStreamExt};
use http::{Request, Response};
use http_body_util::{BodyExt as _, BodyStream};
use kube::client::Body;

/// A connection to the API server.
#[derive(Clone)]
pub struct Client {
    transport: Arc<dyn Transport>,
    kube: kube::Client,
}

impl From<kube::Client> for Client {
    fn from(kube: kube::Client) -> Self {
        Self { transport: Arc::new(HttpTransport(kube.clone())), kube }
    }
}

impl Client {
    /// For a server in this process. `kube` must reach the same server as the same user.
    pub fn in_process(transport: Arc<dyn Transport>, kube: kube::Client) -> Self {
        Self { transport, kube }
    }

    /// For requests that this crate does not offer, such as those about kinds known only at run time.
    pub fn kube(&self) -> &kube::Client {
        &self.kube
    }
}

impl Transport for Client {
    fn call(&self, request: Request<RequestBody>) -> BoxFuture<'_, Result<Response<ReplyBody>, TransportError>> {
        self.transport.call(request)
    }

    fn watch(&self, request: Request<()>) -> BoxFuture<'_, Result<Response<WatchChunks>, TransportError>> {
        self.transport.watch(request)
    }

    fn accepts_objects(&self) -> bool {
        self.transport.accepts_objects()
    }
}

/// A server that is reached through kube's client.
struct HttpTransport(kube::Client);

fn failed(error: kube::Error) -> TransportError {
    TransportError(Box::new(error))
}

impl Transport for HttpTransport {
    fn call(&self, request: Request<RequestBody>) -> BoxFuture<'_, Result<Response<ReplyBody>, TransportError>> {
        Box::pin(async move {
            let request = request.map(|body| match body {
                RequestBody::Encoded(bytes, _) => bytes,
                RequestBody::Object(object) => object.encode().map(Bytes::from).unwrap_or_default(),
            });
            let (parts, body) = self.0.send(request.map(Body::from)).await.map_err(failed)?.into_parts();
            let bytes = body.collect().await.map_err(failed)?.to_bytes();
            Ok(Response::from_parts(parts, ReplyBody::Encoded(bytes)))
        })
    }

    fn watch(&self, request: Request<()>) -> BoxFuture<'_, Result<Response<WatchChunks>, TransportError>> {
        Box::pin(async move {
            let response = self.0.send(request.map(|()| Body::empty())).await.map_err(failed)?;
            Ok(response.map(|body| {
                let frames = TryStreamExt::map_err(BodyStream::new(body), failed);
                // Trailers carry no data.
                frames.try_filter_map(|frame| std::future::ready(Ok(frame.into_data().ok()))).boxed()
            }))
        })
    }

    fn accepts_objects(&self) -> bool {
        false
    }
}
