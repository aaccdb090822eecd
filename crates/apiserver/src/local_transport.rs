//! Requests from components in the same process. Their user is fixed when the transport is created; after that they
//! pass the same authorization, admission and validation as requests over HTTP.

use std::sync::{Arc, Weak};

use bytes::Bytes;
use cleat_api::transport::{ReplyBody, RequestBody, Transport, TransportError, WatchChunks};
use cleat_auth::authenticate::{Caller, Peer};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream;
use http::{Request, Response};
use http_body_util::BodyExt as _;

use crate::handler;
use crate::http::body::ResponseBody;
use crate::state::ServerState;

/// One user's connection to the server. Once the server is closed, every request is answered 503 Service Unavailable.
pub(crate) struct LocalTransport {
    state: Weak<ServerState>,
    peer: Peer,
}

impl LocalTransport {
    pub(crate) fn new(state: &Arc<ServerState>, caller: Caller) -> Self {
        Self { state: Arc::downgrade(state), peer: Peer::Internal(Arc::new(caller)) }
    }

    async fn handle(&self, request: Request<RequestBody>) -> Response<ResponseBody> {
        // Many replies are ready without waiting. Without this, a caller that sends one request after another would
        // never yield to other tasks.
        tokio::task::consume_budget().await;
        match self.state.upgrade() {
            Some(state) => {
                let closing = state.closing.clone();
                handler::handle(state, request, self.peer.clone(), closing).await
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
                ResponseBody::Full(bytes) => ReplyBody::Encoded(bytes.unwrap_or_default()),
                ResponseBody::Object(object) => ReplyBody::Object(object),
                ResponseBody::Stream(_) => match body.collect().await {
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
                ResponseBody::Full(bytes) => stream::iter(bytes.map(Ok)).boxed(),
                ResponseBody::Object(_) => stream::empty().boxed(),
                ResponseBody::Stream(chunks) => chunks.map(Ok).boxed(),
            }))
        })
    }

    fn accepts_objects(&self) -> bool {
        true
    }
}
