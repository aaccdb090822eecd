//! Calls with a stream of responses: the snapshot metadata service. The deadline applies to each message, not to the whole
//! stream.
use std::{fmt, time::Duration};

use tonic::Streaming;

use crate::{
    CallError, Client,
    call::{Transport, call_error},
    v1::{self, snapshot_metadata_client::SnapshotMetadataClient},
};

/// A stream of responses of a driver.
pub struct MessageStream<T> {
    method: &'static str,
    deadline: Duration,
    inner: Streaming<T>,
}

impl<T> fmt::Debug for MessageStream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "response stream of {}", self.method)
    }
}

impl<T> MessageStream<T> {
    /// Returns `None` after the last message. After an error the stream has ended; the caller may start a new call at
    /// the last offset.
    pub async fn next(&mut self) -> Result<Option<T>, CallError> {
        match tokio::time::timeout(self.deadline, self.inner.message()).await {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(status)) => Err(call_error(self.method, &status, false)),
            Err(_) => Err(CallError {
                method: self.method,
                code: tonic::Code::DeadlineExceeded,
                message: format!("no further message within {:?}", self.deadline),
            }),
        }
    }

    /// Returns all remaining messages.
    pub async fn collect(mut self) -> Result<Vec<T>, CallError> {
        let mut all = Vec::new();
        while let Some(message) = self.next().await? {
            all.push(message);
        }
        Ok(all)
    }
}

impl Client {
    pub async fn get_metadata_allocated(
        &self,
        request: v1::GetMetadataAllocatedRequest,
    ) -> Result<MessageStream<v1::GetMetadataAllocatedResponse>, CallError> {
        const METHOD: &str = "GetMetadataAllocated";
        let send = |channel, request| async move {
            SnapshotMetadataClient::new(channel).get_metadata_allocated(request).await
        };
        let inner = Box::pin(self.transport().call_streaming(METHOD, request, send)).await?;
        Ok(message_stream(METHOD, self.transport(), inner))
    }

    pub async fn get_metadata_delta(
        &self,
        request: v1::GetMetadataDeltaRequest,
    ) -> Result<MessageStream<v1::GetMetadataDeltaResponse>, CallError> {
        const METHOD: &str = "GetMetadataDelta";
        let send =
            |channel, request| async move { SnapshotMetadataClient::new(channel).get_metadata_delta(request).await };
        let inner = Box::pin(self.transport().call_streaming(METHOD, request, send)).await?;
        Ok(message_stream(METHOD, self.transport(), inner))
    }
}

fn message_stream<T>(method: &'static str, transport: &Transport, inner: Streaming<T>) -> MessageStream<T> {
    MessageStream { method, deadline: transport.deadline(), inner }
}
