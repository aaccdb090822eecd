//! Authentication, authorization, tokens, access reviews and impersonation.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

const TIMEOUT: Duration = Duration::from_secs(60);
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const AUTHENTICATION: &str = "/apis/authentication.k8s.io/v1";
const AUTHORIZATION: &str = "/apis/authorization.k8s.io/v1";

async fn server() -> (tempfile::TempDir, ApiServer, Client) {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::open(Config::new(dir.path(), "127.0.0.1:0".parse().unwrap())).await.unwrap();
    let admin = server.client("admin");
    (dir, server, admin)
}

async fn send(client: &Client, method: &str, path: &str, body: Value) -> (u16, Value) {
    let media = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
    let request = http::Request::builder().method(method).uri(path).header("content-type", media).body(body).unwrap();
    let response = client.send(request.map(Into::into)).await.unwrap();
    let code = response.status().as_u16();
    let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    (code, serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into()))
}

async fn get(client: &Client, path: &str) -> (u16, Value) {
    send(client, "GET", path, Value::Null).await
}

async fn create(client: &Client, path: &str, body: Value) -> Value {
    let (code, reply) = send(client, "POST", path, body).await;
    assert_eq!(code, 201, "{path}: {reply}");
    reply
}

fn rule(resources: &[&str], verbs: &[&str]) -> Value {
    json!([{ "apiGroups": [""], "resources": resources, "verbs": verbs }])
}

async fn grant(admin: &Client, name: &str, rules: Value, user: &str) {
    create(admin, &format!("{RBAC}/clusterroles"), json!({ "metadata": { "name": name }, "rules": rules })).await;
    let subjects = json!([{ "kind": "User", "name": user }]);
    let role = json!({ "kind": "ClusterRole", "name": name });
    let binding = json!({ "metadata": { "name": name }, "roleRef": role, "subjects": subjects });
    create(admin, &format!("{RBAC}/clusterrolebindings"), binding).await;
}

/// A client over TLS that authenticates with a token.
async fn bearer(server: &ApiServer, token: &str) -> Client {
    let mut config = Kubeconfig::read_from(server.kubeconfig()).unwrap();
    let user = config.auth_infos[0].auth_info.as_mut().unwrap();
    (user.client_certificate_data, user.client_key_data) = (None, None);
    user.token = Some(token.to_owned().into());
    let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

async fn token(admin: &Client, account: &str, spec: Value) -> Value {
    create(admin, &format!("/api/v1/namespaces/default/serviceaccounts/{account}/token"), json!({ "spec": spec })).await
}

#[tokio::test]
async fn a_role_takes_effect_with_the_next_request() {
    let (_dir, server, admin) = server().await;
    let bob = server.component("bob");
    let (code, status) = get(&bob, "/api/v1/namespaces/default/pods").await;
    assert_eq!((code, &status["reason"], &status["details"]), (403, &json!("Forbidden"), &json!({ "kind": "pods" })));
    assert_eq!(
        status["message"],
        r#"pods is forbidden: User "bob" cannot list resource "pods" in API group "" in the namespace "default""#
    );
    grant(&admin, "reader", rule(&["pods"], &["list"]), "bob").await;
    assert_eq!(get(&bob, "/api/v1/namespaces/default/pods").await.0, 200);
    assert_eq!(get(&bob, "/api/v1/pods").await.0, 200);
    for (method, path) in [
        ("GET", "/api/v1/namespaces/default/pods/p"),
        ("GET", "/api/v1/namespaces/default/pods/p?fieldSelector=metadata.name%3Dp"),
        ("GET", "/api/v1/pods?watch=1"),
        ("GET", "/api/v1/secrets"),
        ("POST", "/api/v1/namespaces/default/pods"),
        ("DELETE", "/api/v1/namespaces/default/pods"),
        ("PATCH", "/api/v1/namespaces/default/pods/p/status"),
        ("GET", "/metrics"),
    ] {
        let (code, status) = send(&bob, method, path, Value::Null).await;
        assert_eq!(code, 403, "{method} {path}: {status}");
    }
    assert_eq!(send(&admin, "DELETE", &format!("{RBAC}/clusterrolebindings/reader"), Value::Null).await.0, 200);
    assert_eq!(get(&bob, "/api/v1/pods").await.0, 403, "a removed right is gone at once");
}

#[tokio::test]
async fn resource_names_in_a_rule_apply_only_to_requests_for_one_name() {
    let (_dir, server, admin) = server().await;
    let bob = server.component("bob");
    let rules = json!([{ "apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["a"], "verbs": ["*"] }]);
    grant(&admin, "one", rules, "bob").await;
    let maps = "/api/v1/namespaces/default/configmaps";
    for name in ["a", "b"] {
        create(&admin, maps, json!({ "metadata": { "name": name } })).await;
    }
    for (method, path, want) in [
        ("GET", format!("{maps}/a"), 200),
        ("GET", format!("{maps}/b"), 403),
        ("GET", maps.to_owned(), 403),
        ("GET", format!("{maps}?fieldSelector=metadata.name%3Da"), 200),
        ("GET", format!("{maps}?fieldSelector=metadata.name!%3Da"), 403),
        ("POST", maps.to_owned(), 403),
        ("DELETE", maps.to_owned(), 403),
    ] {
        assert_eq!(send(&bob, method, &path, Value::Null).await.0, want, "{method} {path}");
    }
}

#[tokio::test]
async fn users_cannot_grant_rights_they_do_not_have() {
    let (_dir, server, admin) = server().await;
    let bob = server.component("bob");
    let mut rules = rule(&["pods"], &["get"]);
    let own = json!({ "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["*"], "verbs": ["create", "update", "patch", "get"] });
    rules.as_array_mut().unwrap().push(own);
    grant(&admin, "granter", rules, "bob").await;
    let role = |name: &str, verb: &str| json!({ "metadata": { "name": name }, "rules": rule(&["pods"], &[verb]) });
    let roles = format!("{RBAC}/clusterroles");
    create(&bob, &roles, role("same", "get")).await;
    let (code, status) = send(&bob, "POST", &roles, role("more", "delete")).await;
    assert_eq!(code, 403, "{status}");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("is attempting to grant RBAC permissions not currently held"), "{message}");
    assert!(message.contains(r#"{APIGroups:[""], Resources:["pods"], Verbs:["delete"]}"#), "{message}");
    let more = json!({ "rules": rule(&["pods"], &["delete"]) });
    assert_eq!(send(&bob, "PATCH", &format!("{roles}/same"), more).await.0, 403);
    let put = role("new", "delete");
    assert_eq!(send(&bob, "PUT", &format!("{roles}/new"), put).await.0, 403, "creating with PUT is checked as well");
    let aggregation = json!({ "metadata": { "name": "sum" }, "aggregationRule": {
        "clusterRoleSelectors": [{ "matchLabels": { "a": "b" } }] } });
    assert_eq!(send(&bob, "POST", &roles, aggregation).await.0, 403);
    let binding = |name: &str, role: &str| {
        let role = json!({ "kind": "ClusterRole", "name": role });
        json!({ "metadata": { "name": name }, "roleRef": role, "subjects": [{ "kind": "User", "name": "bob" }] })
    };
    let bindings = format!("{RBAC}/clusterrolebindings");
    assert_eq!(send(&bob, "POST", &bindings, binding("evil", "cluster-admin")).await.0, 403);
    assert_eq!(send(&bob, "POST", &bindings, binding("early", "not-there-yet")).await.0, 403);
    create(&bob, &bindings, binding("fine", "same")).await;
    // A RoleBinding to a ClusterRole also needs the rights of that role.
    let local = format!("{RBAC}/namespaces/default/rolebindings");
    assert_eq!(send(&bob, "POST", &local, binding("evil", "admin")).await.0, 403);
    let escalate = json!([{ "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["clusterroles"], "verbs": ["escalate", "bind"] }]);
    grant(&admin, "trusted", escalate, "bob").await;
    create(&bob, &roles, role("more", "delete")).await;
    create(&bob, &bindings, binding("high", "admin")).await;
}

#[tokio::test]
async fn the_role_of_a_binding_is_immutable() {
    let (_dir, _server, admin) = server().await;
    grant(&admin, "reader", rule(&["pods"], &["list"]), "bob").await;
    let path = format!("{RBAC}/clusterrolebindings/reader");
    let (code, status) = send(&admin, "PATCH", &path, json!({ "roleRef": { "name": "cluster-admin" } })).await;
    assert_eq!((code, &status["details"]["causes"][0]["field"]), (422, &json!("roleRef")), "{status}");
    assert!(status["message"].as_str().unwrap().ends_with("cannot change roleRef"), "{status}");
}

#[tokio::test]
async fn aggregated_roles_follow_labels() {
    let (_dir, server, admin) = server().await;
    let bob = server.component("bob");
    let role = json!({ "kind": "ClusterRole", "name": "view" });
    let subjects = json!([{ "kind": "User", "name": "bob" }]);
    let binding = json!({ "metadata": { "name": "b" }, "roleRef": role, "subjects": subjects });
    create(&admin, &format!("{RBAC}/namespaces/default/rolebindings"), binding).await;
    assert_eq!(get(&bob, "/api/v1/namespaces/default/configmaps").await.0, 200);
    assert_eq!(get(&bob, "/api/v1/namespaces/default/secrets").await.0, 403, "the role view excludes secrets");
    assert_eq!(get(&bob, "/api/v1/namespaces/kube-system/configmaps").await.0, 403, "and only there");
    let labels = json!({ "rbac.authorization.k8s.io/aggregate-to-view": "true" });
    let more = json!({ "metadata": { "name": "more", "labels": labels }, "rules": rule(&["secrets"], &["list"]) });
    create(&admin, &format!("{RBAC}/clusterroles"), more).await;
    let collected = async {
        while get(&bob, "/api/v1/namespaces/default/secrets").await.0 != 200 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, collected).await.expect("the role collects the new one");
}

#[tokio::test]
async fn a_token_is_valid_until_its_account_or_bound_object_is_deleted() {
    let (_dir, server, admin) = server().await;
    tokio::spawn(server.serve(CancellationToken::new()));
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    create(&admin, accounts, json!({ "metadata": { "name": "robot" } })).await;
    let pod = json!({ "metadata": { "name": "p" }, "spec": {
        "serviceAccountName": "robot", "containers": [{ "name": "c", "image": "i" }] } });
    let pod = create(&admin, "/api/v1/namespaces/default/pods", pod).await;
    let uid = &pod["metadata"]["uid"];
    let plain = token(&admin, "robot", json!({})).await;
    let to_pod = json!({ "boundObjectRef": { "kind": "Pod", "apiVersion": "v1", "name": "p", "uid": uid } });
    let bound = token(&admin, "robot", to_pod).await;
    let text = |reply: &Value| reply["status"]["token"].as_str().unwrap().to_owned();
    let robot = bearer(&server, &text(&bound)).await;
    let own = create(&robot, &format!("{AUTHENTICATION}/selfsubjectreviews"), json!({})).await;
    let user = &own["status"]["userInfo"];
    assert_eq!(user["username"], "system:serviceaccount:default:robot");
    let groups = json!(["system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"]);
    assert_eq!(user["groups"], groups);
    assert_eq!(user["extra"]["authentication.kubernetes.io/pod-name"], json!(["p"]));
    assert_eq!(user["extra"]["authentication.kubernetes.io/pod-uid"], json!([uid]));
    assert_eq!(get(&robot, "/api/v1/namespaces/default/pods").await.0, 403, "authenticated, but without rights");
    let review = |token: String, audiences: Value| json!({ "spec": { "token": token, "audiences": audiences } });
    let reviews = format!("{AUTHENTICATION}/tokenreviews");
    let good = create(&admin, &reviews, review(text(&bound), Value::Null)).await;
    assert_eq!((&good["status"]["authenticated"], &good["status"]["user"]["uid"]), (&json!(true), &user["uid"]));
    let wrong_audience = create(&admin, &reviews, review(text(&bound), json!(["somebody-else"]))).await;
    assert_eq!(wrong_audience["status"]["authenticated"], Value::Null);
    assert!(wrong_audience["status"]["error"].as_str().unwrap().contains("audience"), "{wrong_audience}");
    let pod_path = "/api/v1/namespaces/default/pods/p";
    assert_eq!(send(&admin, "DELETE", pod_path, json!({ "gracePeriodSeconds": 0 })).await.0, 200);
    assert_eq!(get(&robot, "/api").await.0, 401, "the pod is gone, and so is its token");
    let robot = bearer(&server, &text(&plain)).await;
    assert_eq!(get(&robot, "/api").await.0, 200, "a token of the account alone lives on");
    assert_eq!(send(&admin, "DELETE", &format!("{accounts}/robot"), Value::Null).await.0, 200);
    create(&admin, accounts, json!({ "metadata": { "name": "robot" } })).await;
    assert_eq!(get(&robot, "/api").await.0, 401, "another account of that name is another account");
    assert_eq!(
        get(&bearer(&server, "nonsense").await, "/readyz").await.0,
        401,
        "an invalid token is refused also where none is needed"
    );
}

#[tokio::test]
async fn token_requests_are_validated() {
    let (_dir, _server, admin) = server().await;
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    create(&admin, accounts, json!({ "metadata": { "name": "robot" } })).await;
    let pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": [{ "name": "c", "image": "i" }] } });
    create(&admin, "/api/v1/namespaces/default/pods", pod).await;
    let pods = |uid: Value| json!({ "boundObjectRef": { "kind": "Pod", "apiVersion": "v1", "name": "p", "uid": uid } });
    for (case, spec, want) in [
        ("too short", json!({ "expirationSeconds": 599 }), 422),
        ("too long", json!({ "expirationSeconds": 1i64 << 33 }), 422),
        ("a pod of another account", pods(Value::Null), 400),
        ("another pod of that name", pods("x".into()), 409),
        ("no such pod", json!({ "boundObjectRef": { "kind": "Pod", "apiVersion": "v1", "name": "q" } }), 404),
        ("an unsupported kind", json!({ "boundObjectRef": { "kind": "Lease", "apiVersion": "v1", "name": "q" } }), 400),
    ] {
        let path = format!("{accounts}/robot/token");
        assert_eq!(send(&admin, "POST", &path, json!({ "spec": spec })).await.0, want, "{case}");
    }
    let (code, status) = send(&admin, "POST", &format!("{accounts}/none/token"), json!({})).await;
    assert_eq!((code, &status["message"]), (404, &json!(r#"serviceaccounts "none" not found"#)));
    let default = token(&admin, "robot", json!({})).await;
    assert_eq!(default["spec"]["expirationSeconds"], 3600);
    let (_, keys) = get(&admin, "/openid/v1/jwks").await;
    assert_eq!((&keys["keys"][0]["alg"], &keys["keys"][0]["crv"]), (&json!("ES256"), &json!("P-256")));
    let (_, issuer) = get(&admin, "/.well-known/openid-configuration").await;
    assert_eq!(issuer["issuer"], default["spec"]["audiences"][0]);
}

#[tokio::test]
async fn access_reviews_report_rights() {
    let (_dir, server, admin) = server().await;
    let bob = server.component("bob");
    grant(&admin, "reader", rule(&["pods"], &["list"]), "bob").await;
    let ask = |verb: &str| json!({ "spec": { "resourceAttributes": { "verb": verb, "resource": "pods", "namespace": "x" } } });
    let own = format!("{AUTHORIZATION}/selfsubjectaccessreviews");
    let yes = create(&bob, &own, ask("list")).await;
    assert_eq!(yes["status"]["allowed"], true);
    let reason = r#"RBAC: allowed by ClusterRoleBinding "reader" of ClusterRole "reader" to User "bob""#;
    assert_eq!(yes["status"]["reason"], reason);
    assert_eq!(create(&bob, &own, ask("delete")).await["status"]["allowed"], false);
    let path = json!({ "spec": { "nonResourceAttributes": { "verb": "get", "path": "/version" } } });
    assert_eq!(create(&bob, &own, path).await["status"]["allowed"], true);
    assert_eq!(send(&bob, "POST", &own, json!({ "spec": {} })).await.0, 422);
    let mut about = ask("list");
    about["spec"]["user"] = "bob".into();
    let any = format!("{AUTHORIZATION}/subjectaccessreviews");
    assert_eq!(create(&admin, &any, about.clone()).await["status"]["allowed"], true);
    assert_eq!(send(&bob, "POST", &any, about.clone()).await.0, 403, "reviews of other users need a right");
    let local = format!("{AUTHORIZATION}/namespaces/x/localsubjectaccessreviews");
    assert_eq!(create(&admin, &local, about.clone()).await["status"]["allowed"], true);
    let elsewhere = format!("{AUTHORIZATION}/namespaces/y/localsubjectaccessreviews");
    assert_eq!(send(&admin, "POST", &elsewhere, about).await.0, 422);
    let rules = format!("{AUTHORIZATION}/selfsubjectrulesreviews");
    let listed = create(&bob, &rules, json!({ "spec": { "namespace": "x" } })).await;
    let found = listed["status"]["resourceRules"].as_array().unwrap();
    assert!(found.iter().any(|r| r["resources"] == json!(["pods"]) && r["verbs"] == json!(["list"])), "{listed}");
    assert_eq!(get(&admin, &own).await.0, 405, "reviews are not stored");
}

#[tokio::test]
async fn impersonation_uses_the_rights_of_the_impersonated_user() {
    let (_dir, server, admin) = server().await;
    let as_ann = |client: Client| async move {
        let request = http::Request::get("/api/v1/namespaces/default/pods").header("impersonate-user", "ann");
        let response = client.send(request.body(Vec::new().into()).unwrap()).await.unwrap();
        response.status().as_u16()
    };
    grant(&admin, "reader", rule(&["pods"], &["list"]), "ann").await;
    let bob = server.component("bob");
    assert_eq!(as_ann(bob.clone()).await, 403, "bob may not");
    grant(&admin, "actor", rule(&["users"], &["impersonate"]), "bob").await;
    assert_eq!(as_ann(bob.clone()).await, 200, "bob may act as ann, who may list");
    assert_eq!(get(&bob, "/api/v1/namespaces/default/pods").await.0, 403, "bob himself still may not");
}

#[tokio::test]
async fn every_namespace_has_a_default_service_account() {
    let (_dir, server, admin) = server().await;
    let namespaces: Api<Namespace> = Api::all(admin.clone());
    let name = |name: &str| serde_json::from_value(json!({ "metadata": { "name": name } })).unwrap();
    namespaces.create(&Default::default(), &name("team")).await.unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(server.client("admin"), "team");
    let appears = || async {
        while accounts.get_opt("default").await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, appears()).await.expect("created with the namespace");
    accounts.delete("default", &Default::default()).await.unwrap();
    tokio::time::timeout(TIMEOUT, appears()).await.expect("created again");
}
