//! The real kubectl with its default flags.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);
const MISSING: &str = "kubectl is needed for this test: install it (https://kubernetes.io/docs/tasks/tools/ or your \
    distribution's kubernetes-client package) and put it on the PATH";

const STORAGE: &str = r#"
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: fast, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: block.cleat.dev
allowVolumeExpansion: true
---
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: block.cleat.dev}
spec: {podInfoOnMount: true}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: vol}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce, ReadOnlyMany]
  storageClassName: fast
  claimRef: {namespace: default, name: claim}
  csi: {driver: block.cleat.dev, volumeHandle: h1}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: claim}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 1Gi}}
"#;

const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  containers:
  - name: main
    image: busybox:1
    env: [{name: A, value: "1"}, {name: B, value: "2"}]
    volumeMounts: [{name: data, mountPath: /data}]
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: claim}}
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

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("kubectl");
        command
            .args(line.split_whitespace())
            .env("KUBECONFIG", self.server.kubeconfig())
            // The discovery cache lives under HOME.
            .env("HOME", self.dir.path())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    async fn run(&self, line: &str) -> Result<String, String> {
        let output = tokio::time::timeout(WAIT, self.command(line).output()).await.expect(line).expect(MISSING);
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        match output.status.success() {
            true => Ok(out),
            false => Err(out + &String::from_utf8_lossy(&output.stderr)),
        }
    }

    async fn ok(&self, line: &str) -> String {
        self.run(line).await.unwrap_or_else(|error| panic!("kubectl {line}: {error}"))
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::File::create(&path).unwrap().write_all(content.as_bytes()).unwrap();
        path
    }

    async fn apply(&self, path: &Path) -> String {
        self.ok(&format!("apply -f {}", path.display())).await
    }
}

/// Columns of a table, line by line.
fn words(table: &str) -> Vec<Vec<&str>> {
    table.lines().map(|line| line.split_whitespace().collect()).collect()
}

#[tokio::test]
async fn apply_get_describe_patch_and_delete() {
    let kubectl = Session::start().await;
    let storage = kubectl.file("storage.yaml", STORAGE);
    let pod = kubectl.file("pod.yaml", POD);
    let first = kubectl.apply(&storage).await;
    assert_eq!(first.matches(" created").count(), 4, "{first}");
    let second = kubectl.apply(&storage).await;
    assert_eq!(second.matches(" unchanged").count(), 4, "{second}");
    kubectl.apply(&pod).await;

    let classes = kubectl.ok("get sc").await;
    assert_eq!(words(&classes)[1][..6], ["fast", "(default)", "block.cleat.dev", "Delete", "Immediate", "true"]);
    let volumes = kubectl.ok("get pv -o wide").await;
    assert_eq!(
        words(&volumes)[1][..8],
        ["vol", "1Gi", "RWO,ROX", "Retain", "Pending", "default/claim", "fast", "<unset>"]
    );
    assert_eq!(words(&volumes)[1].last(), Some(&"Filesystem"));
    let claims = kubectl.ok("get pvc,pods --no-headers").await;
    assert!(claims.contains("persistentvolumeclaim/claim") && claims.contains("pod/web"), "{claims}");
    let pods = kubectl.ok("get pods -A -l app=web --field-selector status.phase=Pending --no-headers").await;
    assert_eq!(words(&pods)[0][..4], ["default", "web", "0/1", "Pending"]);
    let yaml = kubectl.ok("get pvc claim -o yaml").await;
    assert!(yaml.contains("- kubernetes.io/pvc-protection") && yaml.contains("phase: Pending"), "{yaml}");
    let described = kubectl.ok("describe pvc claim").await;
    assert!(described.contains("Used By:       web"), "{described}");
    for line in ["describe pod web", "describe pv vol", "describe sc fast", "get csidrivers,csinodes,leases -A"] {
        kubectl.ok(line).await;
    }

    // A changed image merges into the container; the rest of the pod cannot change.
    let changed = kubectl.file("pod.yaml", &POD.replace("busybox:1", "busybox:2"));
    assert!(kubectl.apply(&changed).await.contains("configured"));
    let image =
        kubectl.ok("get pod web -o jsonpath={.spec.containers[0].image}/{.spec.containers[0].env[1].name}").await;
    assert_eq!(image, "busybox:2/B");
    let moved = kubectl.file("moved.yaml", &POD.replace("/data}", "/other}"));
    let error = kubectl.run(&format!("apply -f {}", moved.display())).await.unwrap_err();
    assert!(error.contains("pod updates may not change fields other than"), "{error}");

    kubectl.ok(r#"patch pv vol --type=merge -p {"metadata":{"labels":{"tier":"gold"}}}"#).await;
    kubectl.ok(r#"patch pv vol --type=json -p [{"op":"add","path":"/metadata/labels/more","value":"x"}]"#).await;
    kubectl.ok(r#"patch pv vol -p {"metadata":{"finalizers":["example.com/hold"]}}"#).await;
    kubectl.ok("label pv vol more-").await;
    kubectl.ok("annotate pv vol note=hello").await;
    let finalizers = kubectl.ok("get pv vol -o jsonpath={.metadata.finalizers}{.metadata.labels}").await;
    assert_eq!(finalizers, r#"["kubernetes.io/pv-protection","example.com/hold"]{"tier":"gold"}"#);
    let error = kubectl.run(r#"patch pv vol -p {"spec":{"csi":{"volumeHandle":"h2"}}}"#).await.unwrap_err();
    assert!(error.contains("spec.persistentvolumesource"), "{error}");

    kubectl.ok("patch pv vol --subresource=status --type=merge -p {\"status\":{\"phase\":\"Available\"}}").await;
    kubectl.ok("wait pv/vol --for=jsonpath={.status.phase}=Available --timeout=10s").await;
    assert!(kubectl.ok("delete pod web").await.contains("deleted"));
    kubectl.ok("delete pvc claim --wait=false").await;
    assert!(kubectl.ok("get pvc claim --no-headers").await.contains("Terminating"));
    let waiting = kubectl.command("wait pvc/claim --for=delete --timeout=30s").output();
    let releasing = kubectl.ok(r#"patch pvc claim --type=merge -p {"metadata":{"finalizers":null}}"#);
    let (waited, _) = tokio::join!(waiting, releasing);
    assert!(waited.unwrap().status.success());
    assert!(kubectl.run("get pvc claim").await.unwrap_err().contains("NotFound"));
}

#[tokio::test]
async fn mistakes_are_named() {
    let kubectl = Session::start().await;
    let unknown = kubectl.file("unknown.yaml", &STORAGE.replace("provisioner:", "colour: red\nprovisioner:"));
    let error = kubectl.run(&format!("create -f {}", unknown.display())).await.unwrap_err();
    assert!(error.contains("strict decoding error: unknown field \"colour\""), "{error}");
    let empty = kubectl.file("empty.yaml", &STORAGE.replace("accessModes: [ReadWriteOnce]", "accessModes: []"));
    let error = kubectl.run(&format!("create -f {}", empty.display())).await.unwrap_err();
    let want = "PersistentVolumeClaim \"claim\" is invalid: spec.accessModes: Required value: at least 1 access mode is \
                required";
    assert!(error.contains(want), "{error}");
    assert!(kubectl.run("get pod none").await.unwrap_err().contains("pods \"none\" not found"));
    assert!(kubectl.run("get nonsense").await.unwrap_err().contains("doesn't have a resource type"));
    assert!(kubectl.run("delete ns default").await.unwrap_err().contains("Forbidden"));
}

#[tokio::test]
async fn lists_namespaces_events_and_the_rest() {
    let kubectl = Session::start().await;
    let team = kubectl.file(
        "team.yaml",
        r#"
apiVersion: v1
kind: Namespace
metadata: {name: team}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: team}
data: {a: b}
---
apiVersion: v1
kind: Secret
metadata: {name: keys, namespace: team}
stringData: {a: b}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: robot, namespace: team}
"#,
    );
    assert_eq!(kubectl.apply(&team).await.matches("created").count(), 4);
    let listed = kubectl.ok("get cm,secret,sa -n team -o name").await;
    for name in ["configmap/settings", "secret/keys", "serviceaccount/robot"] {
        assert!(listed.contains(name), "{listed}");
    }
    let list = kubectl.file(
        "list.yaml",
        "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: ConfigMap, metadata: {name: x}}\n- {apiVersion: v1, \
         kind: ConfigMap, metadata: {name: z}}\n",
    );
    assert_eq!(kubectl.apply(&list).await.matches("created").count(), 2);
    let uid = kubectl.ok("get cm x -o jsonpath={.metadata.uid}").await;
    let event = format!(
        "apiVersion: v1\nkind: Event\nmetadata: {{name: x.1}}\ninvolvedObject: {{kind: ConfigMap, name: x, namespace: \
         default, uid: {uid}}}\nreason: Noted\nmessage: something happened\ntype: Warning\nlastTimestamp: \
         2026-01-02T03:04:05Z\n"
    );
    let event = kubectl.file("event.yaml", &event);
    kubectl.ok(&format!("create -f {}", event.display())).await;
    assert!(kubectl.ok("get events").await.contains("configmap/x"));
    assert!(kubectl.ok("describe configmap x").await.contains("something happened"));
    kubectl.ok("delete cm --all").await;
    assert_eq!(kubectl.ok("get cm --no-headers").await, "");
    // Nobody empties namespaces here: that is a controller's work.
    kubectl.ok("delete namespace team --wait=false").await;
    assert!(kubectl.ok("get ns team").await.contains("Terminating"));
    for line in [
        "create namespace other",
        "create configmap -n other settings --from-literal=a=b",
        "create secret generic -n other keys --from-literal=a=b",
        "create serviceaccount -n other robot",
        "delete namespace other --wait=false",
    ] {
        kubectl.ok(line).await;
    }
    let resources = kubectl.ok("api-resources -o name").await;
    for name in ["pods", "storageclasses.storage.k8s.io", "leases.coordination.k8s.io"] {
        assert!(resources.lines().any(|line| line == name), "{name} in {resources}");
    }
}

#[tokio::test]
async fn get_w_follows_changes_as_a_table() {
    let kubectl = Session::start().await;
    let map = kubectl.file("a.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {k: '1'}\n");
    kubectl.apply(&map).await;
    let mut child = kubectl.command("get cm a -w --no-headers").stdout(Stdio::piped()).spawn().expect(MISSING);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut line = async || tokio::time::timeout(WAIT, lines.next_line()).await.unwrap().unwrap().unwrap();
    assert_eq!(words(&line().await)[0][..2], ["a", "1"]);
    kubectl.ok(r#"patch cm a -p {"data":{"l":"2"}}"#).await;
    assert_eq!(words(&line().await)[0][..2], ["a", "2"]);
    child.kill().await.unwrap();
}
