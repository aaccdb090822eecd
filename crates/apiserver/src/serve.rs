//! The socket: TLS, HTTP/1.1 and HTTP/2, one task per connection.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::handler;
use crate::http::body::HttpBody;
use crate::state::ServerState;
use cleat_auth::authenticate::{Caller, Peer};
use cleat_auth::pki::Pki;

/// For all headers of a request together, over HTTP/2.
const MAX_HEADER_BYTES: u32 = 256 << 10;
/// The headers of an HTTP/1 request must fit into the read buffer. A body need not: it is read in pieces.
const HTTP1_BUFFER_BYTES: usize = 512 << 10;
/// The interval of HTTP/2 pings, and the time that a client has to answer one.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// A client may multiplex all its watches on one connection.
const MAX_STREAMS_PER_CONNECTION: u32 = 1000;
/// The time that requests in flight have to finish when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("a certificate or key cannot be read")]
    Pem(#[from] rustls::pki_types::pem::Error),
    #[error("the client certificate authority cannot be used")]
    Authority(#[from] rustls::server::VerifierBuilderError),
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
}

/// TLS with the server's certificate. Client certificates are optional; those sent must be signed by the CA.
pub(crate) fn acceptor(pki: &Pki) -> Result<TlsAcceptor, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(pki.ca_certificate.as_bytes())?)?;
    // Clients without a certificate may connect: they authenticate with a token, or are anonymous.
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()?;
    let certificate = CertificateDer::from_pem_slice(pki.server.certificate.as_bytes())?;
    let key = PrivateKeyDer::from_pem_slice(pki.server.key.as_bytes())?;
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate], key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Accepts connections until `stop` is cancelled, then waits for the open ones up to the drain timeout.
pub(crate) async fn serve(
    api: Arc<ServerState>,
    listener: Arc<TcpListener>,
    tls: TlsAcceptor,
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    let permits = Arc::new(Semaphore::new(api.limits.max_connections));
    loop {
        let permit = tokio::select! {
            () = stop.cancelled() => break,
            permit = permits.clone().acquire_owned() => permit,
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((socket, peer)) => {
                let (api, tls, stop) = (api.clone(), tls.clone(), stop.clone());
                connections.spawn(async move {
                    let _permit = permit;
                    if let Err(error) = serve_connection(api, socket, tls, stop).await {
                        tracing::debug!(%peer, error, "connection ended");
                    }
                });
            }
            Err(error) => back_off(&error).await,
        }
    }
    connections.close();
    if tokio::time::timeout(DRAIN_TIMEOUT, connections.wait()).await.is_err() {
        tracing::warn!("connections were still open after the drain timeout");
    }
}

/// Waits before the next `accept`: the process may be out of file descriptors, and an immediate retry would fail again.
async fn back_off(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

async fn serve_connection(
    api: Arc<ServerState>,
    socket: TcpStream,
    tls: TlsAcceptor,
    stop: CancellationToken,
) -> Result<(), String> {
    // Watch events are small; without this the kernel would delay them to fill a packet.
    socket.set_nodelay(true).map_err(|e| e.to_string())?;
    let limits = api.limits;
    let handshake = tokio::time::timeout(limits.handshake_timeout, tls.accept(socket));
    let stream = handshake.await.map_err(|_| "TLS handshake timed out".to_owned())?.map_err(|e| e.to_string())?;
    let certificates = stream.get_ref().1.peer_certificates();
    let caller = certificates.and_then(<[_]>::first).and_then(Caller::from_certificate);
    let peer = Peer::Remote(caller.map(Arc::new));
    let has_request = Arc::new(AtomicBool::new(false));
    let request_started = has_request.clone();
    let closing = stop.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        request_started.store(true, Ordering::Relaxed);
        let (api, peer, closing) = (api.clone(), peer.clone(), closing.clone());
        async move { Ok::<_, Infallible>(handler::handle(api, request.map(HttpBody), peer, closing).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(HTTP1_BUFFER_BYTES);
    let mut http2 = builder.http2();
    http2
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
        .max_header_list_size(MAX_HEADER_BYTES);
    http2.keep_alive_interval(PING_INTERVAL).keep_alive_timeout(PING_INTERVAL);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    // Before the first bytes, from which the builder detects the protocol, no timeout of the builder applies.
    let no_request = async {
        tokio::time::sleep(limits.header_timeout).await;
        if has_request.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = no_request => return Err("no request before the header timeout".into()),
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    ended.map_err(|e| e.to_string())
}
