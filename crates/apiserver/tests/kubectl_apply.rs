//! The real kubectl with what it needs schemas for: explain, validation, List files, diff, server-side apply.

#![allow(clippy::unwrap_used)]

use std::process::Stdio;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);
const MISSING: &str = "kubectl is needed for this test: install it (https://kubernetes.io/docs/tasks/tools/ or your \
    distribution's kubernetes-client package) and put it on the PATH";

const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  containers: [{name: c, image: "x:1", ports: [{containerPort: 80}]}]
  volumes: [{name: a, emptyDir: {}}, {name: b, emptyDir: {}}]
"#;

const LIST: &str = r#"
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: one}, data: {k: v}}
- apiVersion: v1
  kind: PersistentVolumeClaim
  metadata: {name: two}
  spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
"#;

struct Session {
    dir: tempfile::TempDir,
    server: ApiServer,
}

impl Session {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let server = ApiServer::open(Config::new(data, "127.0.0.1:0".parse().unwrap())).await.unwrap();
        tokio::spawn(server.serve(CancellationToken::new()));
        Self { dir, server }
    }

    /// Exit code and everything printed.
    async fn run(&self, line: &str) -> (i32, String) {
        let mut command = Command::new("kubectl");
        command
            .args(line.split_whitespace())
            .current_dir(self.dir.path())
            .env("KUBECONFIG", self.server.kubeconfig())
            .env("HOME", self.dir.path())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = tokio::time::timeout(WAIT, command.output()).await.expect(line).expect(MISSING);
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.code().unwrap_or(-1), text)
    }

    async fn ok(&self, line: &str) -> String {
        let (code, text) = self.run(line).await;
        assert_eq!(code, 0, "kubectl {line}: {text}");
        text
    }

    fn file(&self, name: &str, content: &str) {
        std::fs::write(self.dir.path().join(name), content).unwrap();
    }
}

#[tokio::test]
async fn explain_knows_every_field() {
    let kubectl = Session::start().await;
    let volumes = kubectl.ok("explain pod.spec.volumes").await;
    assert!(volumes.contains("FIELD: volumes <[]Volume>"), "{volumes}");
    assert!(volumes.contains("persistentVolumeClaim\t<PersistentVolumeClaimVolumeSource>"), "{volumes}");
    let claim = kubectl.ok("explain pvc.spec --recursive").await;
    assert!(claim.contains("requests\t<map[string]Quantity>"), "{claim}");
    let class = kubectl.ok("explain storageclass.allowedTopologies").await;
    assert!(class.contains("matchLabelExpressions"), "{class}");
    let (code, nothing) = kubectl.run("explain pod.spec.nonsense").await;
    assert!(code != 0 && nothing.contains("does not exist"), "{nothing}");
}

#[tokio::test]
async fn lists_are_validated_and_applied() {
    let kubectl = Session::start().await;
    kubectl.file("list.yaml", LIST);
    assert_eq!(kubectl.ok("apply -f list.yaml").await.matches(" created").count(), 2);
    assert_eq!(kubectl.ok("apply -f list.yaml").await.matches(" unchanged").count(), 2);
    kubectl.file("wrong.yaml", &LIST.replace("data: {k: v}", "data: {k: v}, bogus: 1"));
    let (code, refused) = kubectl.run("apply -f wrong.yaml").await;
    assert!(code != 0 && refused.contains("unknown field \"bogus\""), "{refused}");
}

#[tokio::test]
async fn strict_validation_is_the_servers() {
    let kubectl = Session::start().await;
    kubectl.file("pod.yaml", &POD.replace("image: \"x:1\"", "image: \"x:1\", imagee: y"));
    let (code, refused) = kubectl.run("create -f pod.yaml --validate=strict").await;
    assert!(code != 0 && refused.contains("unknown field \"spec.containers[0].imagee\""), "{refused}");
    let warned = kubectl.ok("create -f pod.yaml --validate=warn").await;
    assert!(warned.contains("Warning: unknown field") && warned.contains("created"), "{warned}");
}

#[tokio::test]
async fn client_side_apply_merges_by_the_published_keys() {
    let kubectl = Session::start().await;
    kubectl.file("pod.yaml", POD);
    kubectl.ok("apply -f pod.yaml").await;
    assert!(kubectl.ok("apply -f pod.yaml").await.contains("unchanged"));
    assert_eq!(kubectl.run("diff -f pod.yaml").await, (0, String::new()));
    kubectl.file("pod.yaml", &POD.replace("x:1", "x:2"));
    let (code, changes) = kubectl.run("diff -f pod.yaml").await;
    assert!(code == 1 && changes.contains("+  - image: x:2"), "{changes}");
    assert!(kubectl.ok("apply -f pod.yaml").await.contains("configured"));
    let owned = kubectl.ok("get pod web -o jsonpath={.metadata.managedFields[0].manager}").await;
    assert_eq!(owned, "kubectl-client-side-apply");
}

#[tokio::test]
async fn server_side_apply_with_conflict_and_force() {
    let kubectl = Session::start().await;
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: s}\ndata: {k: VALUE}\n";
    kubectl.file("v.yaml", &map.replace("VALUE", "v"));
    kubectl.file("w.yaml", &map.replace("VALUE", "w"));
    assert!(kubectl.ok("apply --server-side -f v.yaml").await.contains("serverside-applied"));
    kubectl.ok("apply --server-side -f v.yaml --field-manager=other").await;
    let (code, conflict) = kubectl.run("apply --server-side -f w.yaml").await;
    assert!(code != 0 && conflict.contains("conflict with \"other\": .data.k"), "{conflict}");
    kubectl.ok("apply --server-side -f w.yaml --force-conflicts").await;
    assert_eq!(kubectl.ok("get cm s -o jsonpath={.data.k}").await, "w");
    // What client-side apply made moves over without a conflict.
    kubectl.file("pod.yaml", POD);
    kubectl.ok("apply -f pod.yaml").await;
    kubectl.file("pod.yaml", &POD.replace("x:1", "x:2"));
    kubectl.ok("apply --server-side -f pod.yaml").await;
    assert_eq!(kubectl.ok("get pod web -o jsonpath={.spec.containers[0].image}").await, "x:2");
}
