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

/// All the headers of a request together.
const HEADER_BYTES: u32 = 256 << 10;
/// An HTTP/1 head must fit into the buffer; so must a chunk of a body, which may be as large as it likes.
const BUFFER: usize = 512 << 10;
/// How often a silent HTTP/2 client is asked whether it is still there, and how long it may take to say so.
const PING: Duration = Duration::from_secs(30);
/// One client multiplexes all its watches on one connection.
const STREAMS: u32 = 1000;
/// How long requests in flight may take after the server was told to stop.
const DRAIN: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("a certificate or key cannot be read")]
    Pem(#[from] rustls::pki_types::pem::Error),
    #[error("the client certificate authority cannot be used")]
    Authority(#[from] rustls::server::VerifierBuilderError),
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
}

pub(crate) fn acceptor(pki: &Pki) -> Result<TlsAcceptor, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(pki.authority.as_bytes())?)?;
    // A connection without a certificate gets as far as the health endpoints; every other request of it is a 401.
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

pub(crate) async fn serve(
    api: Arc<ServerState>,
    listener: Arc<TcpListener>,
    tls: TlsAcceptor,
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    let places = Arc::new(Semaphore::new(api.limits.connections));
    loop {
        let place = tokio::select! {
            () = stop.cancelled() => break,
            place = places.clone().acquire_owned() => place,
        };
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((socket, peer)) => {
                let (api, tls, stop) = (api.clone(), tls.clone(), stop.clone());
                connections.spawn(async move {
                    let _place = place;
                    if let Err(error) = connection(api, socket, tls, stop).await {
                        tracing::debug!(%peer, error, "connection ended");
                    }
                });
            }
            Err(error) => pause_after(&error).await,
        }
    }
    connections.close();
    if tokio::time::timeout(DRAIN, connections.wait()).await.is_err() {
        tracing::warn!("connections did not end in time");
    }
}

/// Running out of file descriptors passes; spinning on it does not help.
async fn pause_after(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

async fn connection(
    api: Arc<ServerState>,
    socket: TcpStream,
    tls: TlsAcceptor,
    stop: CancellationToken,
) -> Result<(), String> {
    // Watch events are small and must not wait for more.
    socket.set_nodelay(true).map_err(|e| e.to_string())?;
    let limits = api.limits;
    let handshake = tokio::time::timeout(limits.handshake, tls.accept(socket));
    let stream = handshake.await.map_err(|_| "TLS handshake timed out".to_owned())?.map_err(|e| e.to_string())?;
    let certificates = stream.get_ref().1.peer_certificates();
    let caller = certificates.and_then(<[_]>::first).and_then(Caller::of_certificate);
    let peer = Peer::Remote(caller.map(Arc::new));
    let begun = Arc::new(AtomicBool::new(false));
    let asked = begun.clone();
    let closing = stop.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        asked.store(true, Ordering::Relaxed);
        let (api, peer, closing) = (api.clone(), peer.clone(), closing.clone());
        async move { Ok::<_, Infallible>(handler::handle(api, request.map(HttpBody), peer, closing).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.headers).max_buf_size(BUFFER);
    let mut http2 = builder.http2();
    http2.timer(TokioTimer::new()).max_concurrent_streams(STREAMS).max_header_list_size(HEADER_BYTES);
    http2.keep_alive_interval(PING).keep_alive_timeout(PING);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    // The protocol is read from the first bytes, and nothing else bounds how long those may take.
    let idle = async {
        tokio::time::sleep(limits.headers).await;
        if begun.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = idle => return Err("no request came".into()),
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    ended.map_err(|e| e.to_string())
}
