//! Bodies: reading a request's with a limit, and the one type all responses have.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use cleat_apimachinery::error::ApiError;

pub(crate) const REQUEST_LIMIT: usize = 3 << 20;

/// A response body: whole, or produced as it is read.
pub(crate) enum ApiBody {
    Full(Option<Bytes>),
    Stream(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

impl ApiBody {
    pub(crate) fn full(bytes: impl Into<Bytes>) -> Self {
        Self::Full(Some(bytes.into()))
    }

    /// Keeps something alive as long as the body is being sent.
    pub(crate) fn holding(self, guard: impl Send + 'static) -> Self {
        match self {
            Self::Full(_) => self,
            Self::Stream(stream) => Self::stream(stream.inspect(move |_| {
                let _held = &guard;
            })),
        }
    }

    pub(crate) fn stream(stream: impl Stream<Item = Bytes> + Send + 'static) -> Self {
        Self::Stream(Box::pin(stream))
    }
}

impl Body for ApiBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Full(bytes) => Poll::Ready(bytes.take().filter(|b| !b.is_empty()).map(|b| Ok(Frame::data(b)))),
            Self::Stream(stream) => stream.as_mut().poll_next(cx).map(|next| next.map(|b| Ok(Frame::data(b)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Full(bytes) if bytes.as_ref().is_none_or(Bytes::is_empty))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64)),
            Self::Stream(_) => SizeHint::default(),
        }
    }
}

/// The whole body; one that does not come in time costs its sender the request.
pub(crate) async fn read<B>(body: B, patience: Duration) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    let reading = Limited::new(body, REQUEST_LIMIT).collect();
    let Ok(outcome) = tokio::time::timeout(patience, reading).await else { return Err(ApiError::Slow) };
    match outcome {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::TooLarge { limit: REQUEST_LIMIT }),
        Err(error) => Err(ApiError::BadRequest(format!("cannot read the body: {error}"))),
    }
}
