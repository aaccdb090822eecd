//! A sidecar's HTTP endpoint: metrics, and the health of its leader election.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

const METRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(super) async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address).await?;
    info!(address = %listener.local_addr()?, "metrics are served");
    Ok(listener)
}

/// Serves metrics at `path` and health at `/healthz/leader-election` until `stop`.
pub(super) async fn serve(listener: TcpListener, path: String, healthy: Arc<AtomicBool>, stop: CancellationToken) {
    let mut registry = Registry::default();
    cleat_csi::metrics::register(&mut registry);
    cleat_runtime::metrics::register(&mut registry);
    let registry = Arc::new(registry);
    let metrics = move || {
        let registry = registry.clone();
        async move {
            let mut out = String::new();
            match text::encode(&mut out, &registry) {
                Ok(()) => (StatusCode::OK, [(header::CONTENT_TYPE, METRICS_CONTENT_TYPE)], out),
                Err(error) => {
                    (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], error.to_string())
                }
            }
        }
    };
    let health = move || {
        let healthy = healthy.clone();
        async move {
            match healthy.load(Ordering::Relaxed) {
                true => (StatusCode::OK, "ok"),
                false => (StatusCode::INTERNAL_SERVER_ERROR, "leadership was lost"),
            }
        }
    };
    let path = if path.starts_with('/') { path } else { format!("/{path}") };
    let router = Router::new().route(&path, get(metrics)).route("/healthz/leader-election", get(health));
    let result = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await;
    if let Err(failure) = result {
        error!(%failure, "serving metrics failed");
    }
}
