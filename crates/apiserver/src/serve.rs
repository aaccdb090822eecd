//! The socket: TLS, HTTP/1.1 and HTTP/2, one task per connection.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
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
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::Api;
use crate::authenticate::Caller;
use crate::http;
use crate::pki::Pki;

const HANDSHAKE: Duration = Duration::from_secs(10);
const HEADERS: Duration = Duration::from_secs(30);
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

pub(crate) async fn serve(api: Arc<Api>, listener: Arc<TcpListener>, tls: TlsAcceptor, stop: CancellationToken) {
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((socket, peer)) => {
                let (api, tls, stop) = (api.clone(), tls.clone(), stop.clone());
                connections.spawn(async move {
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

async fn connection(api: Arc<Api>, socket: TcpStream, tls: TlsAcceptor, stop: CancellationToken) -> Result<(), String> {
    // Watch events are small and must not wait for more.
    socket.set_nodelay(true).map_err(|e| e.to_string())?;
    let handshake = tokio::time::timeout(HANDSHAKE, tls.accept(socket));
    let stream = handshake.await.map_err(|_| "TLS handshake timed out".to_owned())?.map_err(|e| e.to_string())?;
    let certificates = stream.get_ref().1.peer_certificates();
    let caller = certificates.and_then(<[_]>::first).and_then(Caller::of_certificate);
    let closing = stop.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (api, caller, closing) = (api.clone(), caller.clone(), closing.clone());
        async move { Ok::<_, Infallible>(http::handle(api, request, caller, closing).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADERS);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(STREAMS);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    ended.map_err(|e| e.to_string())
}
