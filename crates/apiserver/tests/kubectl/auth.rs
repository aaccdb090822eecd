//! `kubectl auth`, `kubectl create role` and `kubectl create token`.

use crate::session::Session;

#[tokio::test]
async fn kubectl_creates_roles_and_reviews_rights() {
    let kubectl = Session::start().await;
    let can_ask = kubectl.supports("auth", "whoami").await;
    if can_ask {
        let whoami = kubectl.ok("auth whoami").await;
        assert!(whoami.contains("admin") && whoami.contains("system:masters"), "{whoami}");
    }
    for line in [
        "create serviceaccount robot",
        "create role reader --verb=get,list --resource=pods,pods/log",
        "create rolebinding robot-reads --role=reader --serviceaccount=default:robot",
        "create clusterrole lister --verb=list --resource=nodes",
        "create clusterrolebinding bob-lists --clusterrole=lister --user=bob",
    ] {
        kubectl.ok(line).await;
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
        let reply = kubectl.run(&line).await.text();
        assert!(reply.lines().any(|l| l == want || l.starts_with(&format!("{want} "))), "{line}: {reply}");
    }
    let list = kubectl.ok(&format!("auth can-i --list {robot}")).await;
    assert!(list.lines().any(|l| l.starts_with("pods ") && l.contains("[get list]")), "{list}");
    let error = kubectl.refused("get secrets --as=bob").await;
    let refusal =
        r#"secrets is forbidden: User "bob" cannot list resource "secrets" in API group "" in the namespace "default""#;
    assert!(error.contains(refusal), "{error}");
    let wide = kubectl.ok("get clusterrolebindings bob-lists -o wide --no-headers").await;
    assert!(wide.contains("ClusterRole/lister") && wide.contains("bob"), "{wide}");

    let token = match kubectl.supports("create", "Request a service account token").await {
        true => kubectl.ok("create token robot --duration=10m").await,
        false => {
            let path = "/api/v1/namespaces/default/serviceaccounts/robot/token";
            let request = http::Request::post(path).body(br#"{"spec":{"expirationSeconds":600}}"#.to_vec()).unwrap();
            let created = kubectl.server.client("test").request::<serde_json::Value>(request).await.unwrap();
            created["status"]["token"].as_str().unwrap().to_owned()
        }
    };
    let mut config = kube::config::Kubeconfig::read_from(kubectl.server.kubeconfig()).unwrap();
    let user = config.auth_infos[0].auth_info.as_mut().unwrap();
    (user.client_certificate_data, user.client_key_data) = (None, None);
    user.token = Some(token.trim().to_owned().into());
    let mut value = serde_json::to_value(&config).unwrap();
    value["users"][0]["user"]["token"] = token.trim().into();
    kubectl.file("robot.kubeconfig", &value.to_string());
    if can_ask {
        let whoami = kubectl.ok("auth whoami --kubeconfig robot.kubeconfig").await;
        assert!(whoami.contains("system:serviceaccount:default:robot"), "{whoami}");
    }
    assert_eq!(kubectl.ok("get pods --kubeconfig robot.kubeconfig").await, "");
    assert!(kubectl.refused("get secrets --kubeconfig robot.kubeconfig").await.contains("Forbidden"));
}
