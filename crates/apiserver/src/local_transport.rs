//! Requests from components in the same process. They pass the same authorization, admission and validation as requests over
//! HTTP.

use std::sync::{Arc, Weak};

use bytes::Bytes;
use cleat_api::transport::{ReplyBody, RequestBody, Transport, TransportError, WatchChunks};
use cleat_auth::authenticate::{Caller, Peer};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream;
use http::{Request, Response};
use http_body_util::BodyExt as _;

use crate::api::Api;
use crate::handler;
use crate::http::body::ApiBody;

/// One user's connection to the server. Once the server is closed, every request is answered 503 Service Unavailable.
pub(crate) struct LocalTransport {
    api: Weak<Api>,
    peer: Peer,
}

impl LocalTransport {
    pub(crate) fn new(api: &Arc<Api>, caller: Caller) -> Self {
        Self { api: Arc::downgrade(api), peer: Peer::Internal(Arc::new(caller)) }
    }

    async fn handle(&self, request: Request<RequestBody>) -> Response<ApiBody> {
        // Many replies are ready without waiting: a caller that sends one request after another must yield to other tasks.
        tokio::task::consume_budget().await;
        match self.api.upgrade() {
            Some(api) => {
                let closing = api.closing.clone();
                handler::handle(api, request, self.peer.clone(), closing).await
            }
            None => handler::unavailable(),
        }
    }
}

impl Transport for LocalTransport {
    fn call(&self, request: Request<RequestBody>) -> BoxFuture<'_, Result<Response<ReplyBody>, TransportError>> {
        Box::pin(async move {
            let (parts, body) = self.handle(request).await.into_parts();
            let body = match body {
                ApiBody::Full(bytes) => ReplyBody::Encoded(bytes.unwrap_or_default()),
                ApiBody::Object(object) => ReplyBody::Object(object),
                ApiBody::Stream(_) => match body.collect().await {
                    Ok(collected) => ReplyBody::Encoded(collected.to_bytes()),
                    Err(never) => match never {},
                },
            };
            Ok(Response::from_parts(parts, body))
        })
    }

    fn watch(&self, request: Request<()>) -> BoxFuture<'_, Result<Response<WatchChunks>, TransportError>> {
        Box::pin(async move {
            let response = self.handle(request.map(|()| RequestBody::encoded(Bytes::new()))).await;
            Ok(response.map(|body| match body {
                ApiBody::Full(bytes) => stream::iter(bytes.map(Ok)).boxed(),
                ApiBody::Object(_) => stream::empty().boxed(),
                ApiBody::Stream(chunks) => chunks.map(Ok).boxed(),
            }))
        })
    }

    fn accepts_objects(&self) -> bool {
        true
    }
}
