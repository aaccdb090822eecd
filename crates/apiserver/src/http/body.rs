//! Request bodies, read with limits on size and time, and the body type of all responses.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use cleat_api::transport::{RequestBody, TypedReply};
use futures::{Stream, StreamExt};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use cleat_apimachinery::error::ApiError;

/// The largest request body; Kubernetes has the same limit.
pub(crate) const MAX_BODY_BYTES: usize = 3 << 20;

/// A response body.
pub(crate) enum ResponseBody {
    /// All bytes at once; None after they were read.
    Full(Option<Bytes>),
    /// Produced while it is read.
    Stream(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
    /// A decoded object, only for a caller in this process that accepts it. Over HTTP it is an empty body.
    Object(TypedReply),
}

impl ResponseBody {
    pub(crate) fn full(bytes: impl Into<Bytes>) -> Self {
        Self::Full(Some(bytes.into()))
    }

    /// Drops `guard` when a stream ends or is dropped; at once for other bodies.
    pub(crate) fn with_guard(self, guard: impl Send + 'static) -> Self {
        match self {
            Self::Full(_) | Self::Object(_) => self,
            Self::Stream(stream) => Self::stream(stream.inspect(move |_| {
                let _guard = &guard;
            })),
        }
    }

    pub(crate) fn stream(stream: impl Stream<Item = Bytes> + Send + 'static) -> Self {
        Self::Stream(Box::pin(stream))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Full(bytes) => Poll::Ready(bytes.take().filter(|b| !b.is_empty()).map(|b| Ok(Frame::data(b)))),
            Self::Stream(stream) => stream.as_mut().poll_next(cx).map(|next| next.map(|b| Ok(Frame::data(b)))),
            Self::Object(_) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Self::Stream(_) => false,
            Self::Object(_) => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64)),
            Self::Stream(_) => SizeHint::default(),
            Self::Object(_) => SizeHint::with_exact(0),
        }
    }
}

/// A request body that has not been read yet.
pub(crate) trait IncomingBody {
    /// Reads the whole body. Fails if the client does not send it within `timeout`.
    fn read(self, timeout: Duration) -> impl Future<Output = Result<RequestBody, ApiError>> + Send;
}

/// The body of a request that came over HTTP.
pub(crate) struct HttpBody<B>(pub(crate) B);

impl<B> IncomingBody for HttpBody<B>
where
    B: Body<Data = Bytes> + Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    async fn read(self, timeout: Duration) -> Result<RequestBody, ApiError> {
        if self.0.is_end_stream() {
            return Ok(RequestBody::encoded(Bytes::new()));
        }
        let reading = Limited::new(self.0, MAX_BODY_BYTES).collect();
        let Ok(outcome) = tokio::time::timeout(timeout, reading).await else { return Err(ApiError::BodyTimeout) };
        match outcome {
            Ok(collected) => Ok(RequestBody::encoded(collected.to_bytes())),
            Err(error) if error.is::<LengthLimitError>() => Err(ApiError::TooLarge { limit: MAX_BODY_BYTES }),
            Err(error) => Err(ApiError::BadRequest(format!("cannot read the body: {error}"))),
        }
    }
}

/// A body from this process is complete already.
impl IncomingBody for RequestBody {
    async fn read(self, _timeout: Duration) -> Result<RequestBody, ApiError> {
        Ok(self)
    }
}
