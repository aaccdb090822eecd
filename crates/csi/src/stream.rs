//! Calls that answer with many messages: the snapshot metadata service. Each message has to come within the call's
//! deadline; the whole may take as long as it does.
use std::{fmt, time::Duration};

use tonic::Streaming;

use crate::{
    CallError, Client,
    call::{Transport, interpret},
    v1::{self, snapshot_metadata_client::SnapshotMetadataClient},
};

/// What a driver sends, message by message.
pub struct Messages<T> {
    method: &'static str,
    deadline: Duration,
    inner: Streaming<T>,
}

impl<T> fmt::Debug for Messages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "messages of {}", self.method)
    }
}

impl<T> Messages<T> {
    /// Nothing after the last. After an error there is no more; begin anew from the last offset.
    pub async fn next(&mut self) -> Result<Option<T>, CallError> {
        match tokio::time::timeout(self.deadline, self.inner.message()).await {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(status)) => Err(interpret(self.method, &status, false)),
            Err(_) => Err(CallError {
                method: self.method,
                code: tonic::Code::DeadlineExceeded,
                message: format!("no further message within {:?}", self.deadline),
            }),
        }
    }

    /// All that is left.
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
    ) -> Result<Messages<v1::GetMetadataAllocatedResponse>, CallError> {
        const METHOD: &str = "GetMetadataAllocated";
        let send = |channel, request| async move {
            SnapshotMetadataClient::new(channel).get_metadata_allocated(request).await
        };
        let inner = Box::pin(self.transport().open(METHOD, request, send)).await?;
        Ok(messages(METHOD, self.transport(), inner))
    }

    pub async fn get_metadata_delta(
        &self,
        request: v1::GetMetadataDeltaRequest,
    ) -> Result<Messages<v1::GetMetadataDeltaResponse>, CallError> {
        const METHOD: &str = "GetMetadataDelta";
        let send =
            |channel, request| async move { SnapshotMetadataClient::new(channel).get_metadata_delta(request).await };
        let inner = Box::pin(self.transport().open(METHOD, request, send)).await?;
        Ok(messages(METHOD, self.transport(), inner))
    }
}

fn messages<T>(method: &'static str, transport: &Transport, inner: Streaming<T>) -> Messages<T> {
    Messages { method, deadline: transport.deadline(), inner }
}
