//! Sends one RPC: connects if necessary, applies the deadline, records a trace event and a metric, and classifies errors.
//!
//! It must not log requests: they contain secrets and private data of the driver.
use std::{
    error::Error as _,
    fmt,
    future::Future,
    sync::{Arc, OnceLock},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpStream, UnixStream},
    time::Instant,
};
use tonic::{Code, Request, Response, Status, transport::Channel};
use tracing::{Instrument, debug, debug_span};

use crate::{
    Endpoint, metrics,
    policy::{self, ErrorClass},
};

/// A call that did not return OK. Its text has the form of Go's gRPC errors, which users and tests search for.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rpc error: code = {} desc = {message}", code_name(*.code))]
pub struct CallError {
    pub method: &'static str,
    pub code: Code,
    pub message: String,
}

impl CallError {
    pub fn code(&self) -> Code {
        self.code
    }

    pub fn class(&self) -> ErrorClass {
        policy::classify(self.method, self.code)
    }

    /// See [`policy::is_infeasible`].
    pub fn is_infeasible(&self) -> bool {
        policy::is_infeasible(self.method, self.code)
    }
}

/// One connection, opened at the first call and again after it broke. Clones share it.
#[derive(Clone)]
pub(crate) struct Transport {
    endpoint: Endpoint,
    channel: Arc<OnceLock<Channel>>,
    deadline: Duration,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (deadline {:?})", self.endpoint, self.deadline)
    }
}

impl Transport {
    pub(crate) fn new(endpoint: Endpoint, deadline: Duration) -> Transport {
        Transport { endpoint, channel: Arc::default(), deadline }
    }

    pub(crate) fn with_deadline(self, deadline: Duration) -> Transport {
        Transport { deadline, ..self }
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) async fn call<Q, A, F>(
        &self,
        method: &'static str,
        message: Q,
        send: impl FnOnce(Channel, Request<Q>) -> F,
    ) -> Result<A, CallError>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let mut request = Request::new(message);
        request.set_timeout(self.deadline);
        self.send_request(method, request, send).await
    }

    /// Sends a call with a stream of responses. The deadline applies to the start of the stream only, so it is not sent
    /// to the driver, which would apply it to the whole stream.
    pub(crate) async fn call_streaming<Q, A, F>(
        &self,
        method: &'static str,
        message: Q,
        send: impl FnOnce(Channel, Request<Q>) -> F,
    ) -> Result<A, CallError>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        self.send_request(method, Request::new(message), send).await
    }

    async fn send_request<Q, A, F>(
        &self,
        method: &'static str,
        request: Request<Q>,
        send: impl FnOnce(Channel, Request<Q>) -> F,
    ) -> Result<A, CallError>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let span = debug_span!("csi", method, endpoint = %self.endpoint);
        async {
            let started = Instant::now();
            let response = tokio::time::timeout(self.deadline, send(self.channel(), request)).await;
            let duration = started.elapsed();
            let result = match response {
                Ok(Ok(response)) => Ok(response.into_inner()),
                Ok(Err(status)) => Err(call_error(method, &status, duration >= self.deadline)),
                Err(_) => Err(CallError {
                    method,
                    code: Code::DeadlineExceeded,
                    message: format!("no answer from {} within {:?}", self.endpoint, self.deadline),
                }),
            };
            let code = code_name(result.as_ref().err().map_or(Code::Ok, CallError::code));
            metrics::observe(method, code, duration);
            debug!(code, duration_us = duration.as_micros() as u64, "CSI call finished");
            result
        }
        .instrument(span)
        .await
    }

    fn channel(&self) -> Channel {
        // Every driver accepts this authority. See `authority.rs` for what a socket path would cause here.
        let target = tonic::transport::Endpoint::from_static("http://localhost");
        let connect = || match self.endpoint.clone() {
            Endpoint::Unix(path) => target.connect_with_connector_lazy(tower::service_fn(move |_| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            })),
            Endpoint::Tcp(address) => target.connect_with_connector_lazy(tower::service_fn(move |_| {
                let address = address.clone();
                async move {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    Ok::<_, std::io::Error>(TokioIo::new(stream))
                }
            })),
        };
        self.channel.get_or_init(connect).clone()
    }
}

/// A status that tonic created for a transport error has a source; a status that the driver sent has none.
/// `deadline_passed`: a cancelled call then counts as DEADLINE_EXCEEDED.
pub(crate) fn call_error(method: &'static str, status: &Status, deadline_passed: bool) -> CallError {
    let (code, message) = match status.source() {
        _ if deadline_passed && status.code() == Code::Cancelled => {
            (Code::DeadlineExceeded, status.message().to_owned())
        }
        Some(source) => (Code::Unavailable, connection_error(source)),
        None => (status.code(), status.message().to_owned()),
    };
    CallError { method, code, message }
}

/// The message of the innermost cause: the outer ones say only that the transport failed.
fn connection_error(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(inner) = next {
        text = inner.to_string();
        next = inner.source();
    }
    format!("connection error: {text}")
}

/// The name of the code in Go.
fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}
