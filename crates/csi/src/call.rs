//! One RPC: a lazy connection, a deadline, a trace event, a metric, and an error that knows its class.
//!
//! Requests are never logged here: they carry secrets and driver-private context.
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
    policy::{self, Class},
};

/// A call that did not return OK. Displays as Go's gRPC errors do: users and tests search for that form.
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

    pub fn class(&self) -> Class {
        policy::classify(self.method, self.code)
    }

    /// See [`policy::infeasible`].
    pub fn infeasible(&self) -> bool {
        policy::infeasible(self.method, self.code)
    }
}

/// Shared by the clones of a client: one connection, opened at first use and reopened after it broke.
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
        self.exchange(method, request, send).await
    }

    /// A call whose answer comes in pieces: the deadline is for the first of them, so the driver is not told of it.
    pub(crate) async fn open<Q, A, F>(
        &self,
        method: &'static str,
        message: Q,
        send: impl FnOnce(Channel, Request<Q>) -> F,
    ) -> Result<A, CallError>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        self.exchange(method, Request::new(message), send).await
    }

    async fn exchange<Q, A, F>(
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
            let answer = tokio::time::timeout(self.deadline, send(self.channel(), request)).await;
            let duration = started.elapsed();
            let result = match answer {
                Ok(Ok(response)) => Ok(response.into_inner()),
                Ok(Err(status)) => Err(interpret(method, &status, duration >= self.deadline)),
                Err(_) => Err(CallError {
                    method,
                    code: Code::DeadlineExceeded,
                    message: format!("no answer from {} within {:?}", self.endpoint, self.deadline),
                }),
            };
            let code = code_name(result.as_ref().err().map_or(Code::Ok, CallError::code));
            metrics::observe(method, code, duration);
            debug!(code, duration_us = duration.as_micros() as u64, "call ended");
            result
        }
        .instrument(span)
        .await
    }

    fn channel(&self) -> Channel {
        // The authority every driver accepts, whatever the socket's path.
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

/// A status that the transport made up has a source; one that the driver sent has none.
pub(crate) fn interpret(method: &'static str, status: &Status, late: bool) -> CallError {
    let (code, message) = match status.source() {
        _ if late && status.code() == Code::Cancelled => (Code::DeadlineExceeded, status.message().to_owned()),
        Some(source) => (Code::Unavailable, innermost(source)),
        None => (status.code(), status.message().to_owned()),
    };
    CallError { method, code, message }
}

fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(inner) = next {
        text = inner.to_string();
        next = inner.source();
    }
    format!("connection error: {text}")
}

/// The names that Go prints.
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
