//! What the server tells about itself: metrics, health, the audit log; and what it keeps to itself.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use cleat_apiserver::{ApiServer, Config, OpenError};
use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{PostParams, WatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

const WAIT: Duration = Duration::from_secs(60);
const ONE: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
const TWO: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";

fn config(dir: &tempfile::TempDir) -> Config {
    Config::new(dir.path().join("data"), "127.0.0.1:0".parse().unwrap())
}

async fn text(client: &Client, path: &str) -> Result<String, u16> {
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
    let shown = text(&client, "/metrics").await.unwrap();
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
        assert!(shown.lines().any(|l| l.starts_with(line)), "{line} is not in\n{shown}");
    }
    let count = |name: &str| -> u64 {
        let line = shown.lines().find(|l| l.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(count("cleat_store_writes_total") >= count("cleat_store_commits_total"));
    drop(watch);
    let gone = async {
        while !text(&client, "/metrics")
            .await
            .unwrap()
            .contains(r#"apiserver_watchers{group="",resource="configmaps"} 0"#)
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(WAIT, gone).await.expect("a watch that ended is not counted");
    for i in 0..50 {
        let _ = text(&client, &format!("/apis/made.up/v1/things{i}")).await;
    }
    let shown = text(&client, "/metrics").await.unwrap();
    assert!(!shown.contains("things"), "what clients make up does not become a metric");
}

#[tokio::test]
async fn health_is_told_check_by_check() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(config(&dir)).await.unwrap();
    let client = server.client("admin");
    for path in ["/healthz", "/livez", "/readyz", "/readyz/store-writes", "/livez/ping"] {
        assert_eq!(text(&client, path).await.unwrap(), "ok", "{path}");
    }
    let ready = "[+]ping ok\n[+]store-reads ok\n[+]store-writes ok\nreadyz check passed\n";
    assert_eq!(text(&client, "/readyz?verbose").await.unwrap(), ready);
    assert_eq!(text(&client, "/livez?verbose").await.unwrap(), "[+]ping ok\nlivez check passed\n");
    let less = text(&client, "/readyz?verbose&exclude=store-writes").await.unwrap();
    assert!(less.contains("[+]store-writes excluded: ok"), "{less}");
    assert_eq!(text(&client, "/readyz/nothing").await, Err(404));
    let stranger = server.component("nobody-in-particular");
    assert_eq!(text(&stranger, "/readyz").await.unwrap(), "ok", "everybody may know");
}

#[tokio::test]
async fn the_audit_log_says_who_did_what_and_no_secrets() {
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
    let text = tokio::time::timeout(WAIT, lines).await.expect("both requests are noted");
    assert!(!text.contains("swordfish") && !text.contains("c3dvcmRmaXNo"), "{text}");
    let noted: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    for (line, user, verb, code, name) in
        [(&noted[0], "ann", "create", 201, None), (&noted[1], "bob", "get", 403, Some("s"))]
    {
        assert_eq!((&line["verb"], &line["responseStatus"]["code"]), (&json!(verb), &json!(code)), "{line}");
        assert_eq!(line["objectRef"]["resource"], "secrets");
        assert_eq!(line["objectRef"]["name"].as_str(), name);
        assert!(line["latencyMicroseconds"].is_u64() && line["auditID"].is_string());
        // A refused caller is named as well: that is what the log is for.
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
    let server = open(ONE).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(server.client("ann"), "default");
    secrets.create(&PostParams::default(), &secret("swordfish")).await.unwrap();
    server.close().await;
    let file = std::fs::read(dir.path().join("data/store.redb")).unwrap();
    assert!(!file.windows(12).any(|w| w == b"c3dvcmRmaXNo"), "not even in base64");
    let error = open(TWO).await.err().unwrap();
    assert!(matches!(error, OpenError::Store(cleat_store::OpenError::WrongKey { .. })), "{error}");
    let error = ApiServer::open(config(&dir)).await.err().unwrap();
    assert!(matches!(error, OpenError::Store(cleat_store::OpenError::Encrypted { .. })), "{error}");
    let server = open(ONE).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(server.client("ann"), "default");
    assert_eq!(secrets.get("s").await.unwrap().data.unwrap()["k"].0, b"swordfish");
}
