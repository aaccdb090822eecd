//! `kubectl auth`, `kubectl create role` and `kubectl create token`, the real kubectl.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use cleat_apiserver::{ApiServer, Config};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

const MISSING: &str = "kubectl is needed for this test: install it (https://kubernetes.io/docs/tasks/tools/ or your \
    distribution's kubernetes-client package) and put it on the PATH";

async fn kubectl(kubeconfig: &Path, line: &str) -> Result<String, String> {
    let mut command = Command::new("kubectl");
    command.args(line.split(' ')).env("KUBECONFIG", kubeconfig).env("KUBECACHEDIR", kubeconfig.with_extension("cache"));
    let output = command.output().await.expect(MISSING);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() {
        true => Ok(text),
        false => Err(text + &String::from_utf8_lossy(&output.stderr)),
    }
}

#[tokio::test]
async fn kubectl_manages_and_asks_for_rights() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    tokio::spawn(server.serve(CancellationToken::new()));
    let admin = server.kubeconfig().to_owned();
    let whoami = kubectl(&admin, "auth whoami").await.unwrap();
    assert!(whoami.contains("admin") && whoami.contains("system:masters"), "{whoami}");
    for line in [
        "create serviceaccount robot",
        "create role reader --verb=get,list --resource=pods,pods/log",
        "create rolebinding robot-reads --role=reader --serviceaccount=default:robot",
        "create clusterrole lister --verb=list --resource=nodes",
        "create clusterrolebinding bob-lists --clusterrole=lister --user=bob",
    ] {
        kubectl(&admin, line).await.unwrap_or_else(|e| panic!("{line}: {e}"));
    }
    let robot = "--as=system:serviceaccount:default:robot";
    for (line, want) in [
        ("auth can-i * *".to_owned(), "yes"),
        (format!("auth can-i list pods {robot}"), "yes"),
        (format!("auth can-i get pods/log {robot}"), "yes"),
        (format!("auth can-i delete pods {robot}"), "no"),
        (format!("auth can-i list pods -n kube-system {robot}"), "no"),
        ("auth can-i list nodes --as=bob".to_owned(), "yes"),
        ("auth can-i get /version --as=bob".to_owned(), "yes"),
        ("auth can-i get /metrics --as=bob".to_owned(), "no"),
    ] {
        let answer = kubectl(&admin, &line).await.unwrap_or_else(|e| e);
        assert!(answer.lines().any(|l| l == want || l.starts_with(&format!("{want} "))), "{line}: {answer}");
    }
    let list = kubectl(&admin, &format!("auth can-i --list {robot}")).await.unwrap();
    assert!(list.lines().any(|l| l.starts_with("pods ") && l.contains("[get list]")), "{list}");
    let error = kubectl(&admin, "get secrets --as=bob").await.unwrap_err();
    let refusal =
        r#"secrets is forbidden: User "bob" cannot list resource "secrets" in API group "" in the namespace "default""#;
    assert!(error.contains(refusal), "{error}");
    let wide = kubectl(&admin, "get clusterrolebindings bob-lists -o wide --no-headers").await.unwrap();
    assert!(wide.contains("ClusterRole/lister") && wide.contains("bob"), "{wide}");

    let token = kubectl(&admin, "create token robot --duration=10m").await.unwrap();
    let mut config = kube::config::Kubeconfig::read_from(&admin).unwrap();
    let user = config.auth_infos[0].auth_info.as_mut().unwrap();
    (user.client_certificate_data, user.client_key_data) = (None, None);
    user.token = Some(token.trim().to_owned().into());
    let mine = dir.path().join("robot.kubeconfig");
    let mut value = serde_json::to_value(&config).unwrap();
    value["users"][0]["user"]["token"] = token.trim().into();
    std::fs::write(&mine, value.to_string()).unwrap();
    let whoami = kubectl(&mine, "auth whoami").await.unwrap();
    assert!(whoami.contains("system:serviceaccount:default:robot"), "{whoami}");
    assert_eq!(kubectl(&mine, "get pods").await.unwrap(), "");
    assert!(kubectl(&mine, "get secrets").await.unwrap_err().contains("Forbidden"));
}
