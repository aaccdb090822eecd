//! The TLS socket: client certificates, credentials across restarts, and shutdown.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{Api, ListParams, PostParams, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio_util::sync::CancellationToken;

const TIMEOUT: Duration = Duration::from_secs(60);

async fn open(dir: &std::path::Path) -> ApiServer {
    ApiServer::open(Config::new(dir, "127.0.0.1:0".parse().unwrap())).await.unwrap()
}

async fn client(kubeconfig: Kubeconfig) -> kube::Client {
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    kube::Client::try_from(config).unwrap()
}

#[tokio::test]
async fn the_kubeconfig_works_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let server = open(dir.path()).await;
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(server.kubeconfig()), 0o600);
    for key in ["ca.key", "server.key", "admin.key"] {
        assert_eq!(mode(&dir.path().join("pki").join(key)), 0o600);
    }
    let old = Kubeconfig::read_from(server.kubeconfig()).unwrap();
    let stop = CancellationToken::new();
    let serving = tokio::spawn(server.serve(stop.clone()));
    let namespaces: Api<Namespace> = Api::all(client(old.clone()).await);
    assert_eq!(namespaces.list(&ListParams::default()).await.unwrap().items.len(), 4);
    stop.cancel();
    tokio::time::timeout(TIMEOUT, serving).await.unwrap().unwrap();
    server.close().await;

    let server = open(dir.path()).await;
    tokio::spawn(server.serve(CancellationToken::new()));
    // The credentials of the first run with the port of the second.
    let mut config = old;
    let cluster = config.clusters[0].cluster.as_mut().unwrap();
    cluster.server = Some(format!("https://localhost:{}", server.address().port()));
    let namespaces: Api<Namespace> = Api::all(client(config).await);
    assert_eq!(namespaces.list(&ListParams::default()).await.unwrap().items.len(), 4);
}

#[tokio::test]
async fn without_a_certificate_only_health_and_version_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let server = open(dir.path()).await;
    tokio::spawn(server.serve(CancellationToken::new()));
    let mut config = Kubeconfig::read_from(server.kubeconfig()).unwrap();
    let user = config.auth_infos[0].auth_info.as_mut().unwrap();
    user.client_certificate_data = None;
    user.client_key_data = None;
    let anonymous = client(config).await;
    let get = |path: &str| http::Request::get(path).body(Vec::new()).unwrap();
    assert_eq!(anonymous.request_text(get("/readyz")).await.unwrap(), "ok");
    assert!(anonymous.apiserver_version().await.is_ok());
    match anonymous.request_text(get("/api/v1/namespaces")).await {
        Err(kube::Error::Api(status)) => assert_eq!((status.code, status.reason.as_str()), (401, "Unauthorized")),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn stopping_ends_watches_promptly() {
    let dir = tempfile::tempdir().unwrap();
    let server = open(dir.path()).await;
    let stop = CancellationToken::new();
    let serving = tokio::spawn(server.serve(stop.clone()));
    let maps: Api<ConfigMap> =
        Api::namespaced(client(Kubeconfig::read_from(server.kubeconfig()).unwrap()).await, "default");
    let mut watches = Vec::new();
    for _ in 0..20 {
        // This returns before the first event: the response head is sent at once.
        let watch = tokio::time::timeout(TIMEOUT, maps.watch(&WatchParams::default(), "0")).await.unwrap();
        watches.push(watch.unwrap().boxed());
    }
    maps.create(&PostParams::default(), &serde_json::from_str(r#"{"metadata":{"name":"a"}}"#).unwrap()).await.unwrap();
    for watch in &mut watches {
        assert!(tokio::time::timeout(TIMEOUT, watch.try_next()).await.unwrap().unwrap().is_some());
    }
    let started = std::time::Instant::now();
    stop.cancel();
    for watch in &mut watches {
        assert!(tokio::time::timeout(TIMEOUT, watch.try_next()).await.unwrap().unwrap().is_none());
    }
    tokio::time::timeout(TIMEOUT, serving).await.unwrap().unwrap();
    assert!(started.elapsed() < Duration::from_secs(4), "the shutdown does not wait for watches");
}
