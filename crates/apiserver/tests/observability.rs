//! Metrics, health endpoints, the audit log, and encryption of Secrets on disk.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use cleat_apiserver::{ApiServer, Config, OpenError};
use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{PostParams, WatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(60);
const FIRST_KEY: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
const SECOND_KEY: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";

fn config(dir: &tempfile::TempDir) -> Config {
    Config::new(dir.path().join("data"), "127.0.0.1:0".parse().unwrap())
}

async fn get(client: &Client, path: &str) -> Result<String, u16> {
    match client.request_text(http::Request::get(path).body(Vec::new()).unwrap()).await {
        Ok(text) => Ok(text),
        Err(kube::Error::Api(status)) => Err(status.code),
        Err(other) => panic!("{other}"),
    }
}

fn secret(text: &str) -> Secret {
    let mut secret = Secret { data: Some([("k".to_owned(), ByteString(text.into()))].into()), ..Secret::default() };
    secret.metadata.name = Some("s".into());
    secret
}

#[tokio::test]
async fn metrics_count_requests_watchers_commits_and_objects() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(config(&dir)).await.unwrap();
    let client = server.client("admin");
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    let map = || serde_json::from_value(json!({ "metadata": { "name": "a" } })).unwrap();
    maps.create(&PostParams::default(), &map()).await.unwrap();
    assert!(maps.create(&PostParams::default(), &map()).await.is_err());
    let watch = maps.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    let metrics = get(&client, "/metrics").await.unwrap();
    for line in [
        r#"apiserver_request_total{verb="create",group="",resource="configmaps",code="201"} 1"#,
        r#"apiserver_request_total{verb="create",group="",resource="configmaps",code="409"} 1"#,
        r#"apiserver_request_duration_seconds_count{verb="create",group="",resource="configmaps"} 2"#,
        r#"apiserver_watchers{group="",resource="configmaps"} 1"#,
        r#"apiserver_storage_objects{group="",resource="configmaps"} 1"#,
        r#"apiserver_storage_objects{group="",resource="namespaces"} 4"#,
        r#"cleat_store_batch_size_bucket{le="+Inf"}"#,
        "cleat_store_failures_total 0",
    ] {
        assert!(metrics.lines().any(|l| l.starts_with(line)), "{line} is not in\n{metrics}");
    }
    let count = |name: &str| -> u64 {
        let line = metrics.lines().find(|l| l.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(count("cleat_store_writes_total") >= count("cleat_store_commits_total"));
    drop(watch);
    let gone = async {
        while !get(&client, "/metrics")
            .await
            .unwrap()
            .contains(r#"apiserver_watchers{group="",resource="configmaps"} 0"#)
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, gone).await.expect("a watch that ended is not counted");
    for i in 0..50 {
        let _ = get(&client, &format!("/apis/made.up/v1/things{i}")).await;
    }
    let metrics = get(&client, "/metrics").await.unwrap();
    assert!(!metrics.contains("things"), "unknown resources do not become label values");
}

#[tokio::test]
async fn health_endpoints_report_each_check() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(config(&dir)).await.unwrap();
    let client = server.client("admin");
    for path in ["/healthz", "/livez", "/readyz", "/readyz/store-writes", "/livez/ping"] {
        assert_eq!(get(&client, path).await.unwrap(), "ok", "{path}");
    }
    let ready = "[+]ping ok\n[+]store-reads ok\n[+]store-writes ok\nreadyz check passed\n";
    assert_eq!(get(&client, "/readyz?verbose").await.unwrap(), ready);
    assert_eq!(get(&client, "/livez?verbose").await.unwrap(), "[+]ping ok\nlivez check passed\n");
    let less = get(&client, "/readyz?verbose&exclude=store-writes").await.unwrap();
    assert!(less.contains("[+]store-writes excluded: ok"), "{less}");
    assert_eq!(get(&client, "/readyz/nothing").await, Err(404));
    let user = server.component("a-user-without-roles");
    assert_eq!(get(&user, "/readyz").await.unwrap(), "ok", "every user may read health");
}

#[tokio::test]
async fn the_audit_log_names_users_and_requests_but_no_secret_data() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.log");
    let server = ApiServer::open(Config { audit_log: Some(log.clone()), ..config(&dir) }).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(server.client("ann"), "default");
    secrets.create(&PostParams::default(), &secret("swordfish")).await.unwrap();
    assert!(Api::<Secret>::namespaced(server.component("bob"), "default").get("s").await.is_err());
    let lines = async {
        loop {
            let text = std::fs::read_to_string(&log).unwrap();
            if text.lines().count() >= 2 && text.ends_with('\n') {
                break text;
            }
            tokio::task::yield_now().await;
        }
    };
    let text = tokio::time::timeout(TIMEOUT, lines).await.expect("both requests are logged");
    assert!(!text.contains("swordfish") && !text.contains("c3dvcmRmaXNo"), "{text}");
    let entries: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    for (line, user, verb, code, name) in
        [(&entries[0], "ann", "create", 201, None), (&entries[1], "bob", "get", 403, Some("s"))]
    {
        assert_eq!((&line["verb"], &line["responseStatus"]["code"]), (&json!(verb), &json!(code)), "{line}");
        assert_eq!(line["objectRef"]["resource"], "secrets");
        assert_eq!(line["objectRef"]["name"].as_str(), name);
        assert!(line["latencyMicroseconds"].is_u64() && line["auditID"].is_string());
        // The log names refused callers as well.
        assert_eq!(line["user"]["username"], user);
    }
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn secrets_are_encrypted_on_disk_and_need_their_key() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    let open = |text: &'static str| {
        std::fs::write(&keys, text).unwrap();
        ApiServer::open(Config { encryption_key: Some(keys.clone()), ..config(&dir) })
    };
    let server = open(FIRST_KEY).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(server.client("ann"), "default");
    secrets.create(&PostParams::default(), &secret("swordfish")).await.unwrap();
    server.close().await;
    let file = std::fs::read(dir.path().join("data/store.redb")).unwrap();
    assert!(!file.windows(12).any(|w| w == b"c3dvcmRmaXNo"), "not even in base64");
    let error = open(SECOND_KEY).await.err().unwrap();
    assert!(matches!(error, OpenError::Store(cleat_store::OpenError::WrongKey { .. })), "{error}");
    let error = ApiServer::open(config(&dir)).await.err().unwrap();
    assert!(matches!(error, OpenError::Store(cleat_store::OpenError::Encrypted { .. })), "{error}");
    let server = open(FIRST_KEY).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(server.client("ann"), "default");
    assert_eq!(secrets.get("s").await.unwrap().data.unwrap()["k"].0, b"swordfish");
}
