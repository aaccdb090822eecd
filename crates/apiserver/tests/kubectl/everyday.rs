//! Common kubectl commands with default flags.

use std::process::Stdio;

use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::session::{KUBECTL_MISSING, Session, TIMEOUT, words};

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

#[tokio::test]
async fn apply_get_describe_patch_and_delete() {
    let kubectl = Session::start().await;
    kubectl.file("storage.yaml", STORAGE);
    kubectl.file("pod.yaml", POD);
    let first = kubectl.ok("apply -f storage.yaml").await;
    assert_eq!(first.matches(" created").count(), 4, "{first}");
    let second = kubectl.ok("apply -f storage.yaml").await;
    assert_eq!(second.matches(" unchanged").count(), 4, "{second}");
    kubectl.ok("apply -f pod.yaml").await;

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

    // The image of a container can change; most of a pod is immutable.
    kubectl.file("pod.yaml", &POD.replace("busybox:1", "busybox:2"));
    assert!(kubectl.ok("apply -f pod.yaml").await.contains("configured"));
    let image =
        kubectl.ok("get pod web -o jsonpath={.spec.containers[0].image}/{.spec.containers[0].env[1].name}").await;
    assert_eq!(image, "busybox:2/B");
    kubectl.file("moved.yaml", &POD.replace("/data}", "/other}"));
    let error = kubectl.refused("apply -f moved.yaml").await;
    assert!(error.contains("pod updates may not change fields other than"), "{error}");

    kubectl.ok(r#"patch pv vol --type=merge -p {"metadata":{"labels":{"tier":"gold"}}}"#).await;
    kubectl.ok(r#"patch pv vol --type=json -p [{"op":"add","path":"/metadata/labels/more","value":"x"}]"#).await;
    kubectl.ok(r#"patch pv vol -p {"metadata":{"finalizers":["example.com/hold"]}}"#).await;
    kubectl.ok("label pv vol more-").await;
    kubectl.ok("annotate pv vol note=hello").await;
    let finalizers = kubectl.ok("get pv vol -o jsonpath={.metadata.finalizers}{.metadata.labels}").await;
    assert_eq!(finalizers, r#"["kubernetes.io/pv-protection","example.com/hold"]{"tier":"gold"}"#);
    let error = kubectl.refused(r#"patch pv vol -p {"spec":{"csi":{"volumeHandle":"h2"}}}"#).await;
    assert!(error.contains("spec.persistentvolumesource"), "{error}");

    kubectl.set_status("/api/v1/persistentvolumes/vol", json!({ "phase": "Available" })).await;
    if kubectl.supports("patch", "--subresource").await {
        kubectl.ok(r#"patch pv vol --subresource=status --type=merge -p {"status":{"reason":"R"}}"#).await;
    }
    match kubectl.supports("wait", "--for=jsonpath").await {
        true => drop(kubectl.ok("wait pv/vol --for=jsonpath={.status.phase}=Available --timeout=50s").await),
        false => assert!(kubectl.ok("get pv vol --no-headers").await.contains("Available")),
    }
    assert!(kubectl.ok("delete pod web").await.contains("deleted"));
    kubectl.ok("delete pvc claim --wait=false").await;
    assert!(kubectl.ok("get pvc claim --no-headers").await.contains("Terminating"));
    let waiting = kubectl.command("wait pvc/claim --for=delete --timeout=30s").output();
    let releasing = kubectl.ok(r#"patch pvc claim --type=merge -p {"metadata":{"finalizers":null}}"#);
    let (waited, _) = tokio::join!(waiting, releasing);
    assert!(waited.unwrap().status.success());
    assert!(kubectl.refused("get pvc claim").await.contains("NotFound"));
}

#[tokio::test]
async fn errors_name_the_cause() {
    let kubectl = Session::start().await;
    kubectl.file("unknown.yaml", &STORAGE.replace("provisioner:", "colour: red\nprovisioner:"));
    let error = kubectl.refused("create -f unknown.yaml").await;
    assert!(error.contains("unknown field \"colour\""), "{error}");
    kubectl.file("empty.yaml", &STORAGE.replace("accessModes: [ReadWriteOnce]", "accessModes: []"));
    let error = kubectl.refused("create -f empty.yaml").await;
    let want = "PersistentVolumeClaim \"claim\" is invalid: spec.accessModes: Required value: at least 1 access mode is \
                required";
    assert!(error.contains(want), "{error}");
    assert!(kubectl.refused("get pod none").await.contains("pods \"none\" not found"));
    assert!(kubectl.refused("get nonsense").await.contains("doesn't have a resource type"));
    assert!(kubectl.refused("delete ns default").await.contains("Forbidden"));
}

#[tokio::test]
async fn lists_namespaces_events_and_the_rest() {
    let kubectl = Session::start().await;
    kubectl.file(
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
    assert_eq!(kubectl.ok("apply -f team.yaml").await.matches("created").count(), 4);
    let listed = kubectl.ok("get cm,secret,sa -n team -o name").await;
    for name in ["configmap/settings", "secret/keys", "serviceaccount/robot"] {
        assert!(listed.contains(name), "{listed}");
    }
    kubectl.file(
        "list.yaml",
        "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: ConfigMap, metadata: {name: x}}\n- {apiVersion: v1, \
         kind: ConfigMap, metadata: {name: z}}\n",
    );
    assert_eq!(kubectl.ok("apply -f list.yaml").await.matches("created").count(), 2);
    let uid = kubectl.ok("get cm x -o jsonpath={.metadata.uid}").await;
    let event = format!(
        "apiVersion: v1\nkind: Event\nmetadata: {{name: x.1}}\ninvolvedObject: {{kind: ConfigMap, name: x, namespace: \
         default, uid: {uid}}}\nreason: Noted\nmessage: something happened\ntype: Warning\nlastTimestamp: \
         2026-01-02T03:04:05Z\n"
    );
    kubectl.file("event.yaml", &event);
    kubectl.ok("create -f event.yaml").await;
    assert!(kubectl.ok("get events").await.contains("configmap/x"));
    assert!(kubectl.ok("describe configmap x").await.contains("something happened"));
    kubectl.ok("delete cm --all").await;
    assert_eq!(kubectl.ok("get cm --no-headers").await, "");
    // The namespace stays: no controller runs that deletes its objects.
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
async fn get_with_watch_prints_changes_as_a_table() {
    let kubectl = Session::start().await;
    kubectl.file("a.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {k: '1'}\n");
    kubectl.ok("apply -f a.yaml").await;
    let mut child = kubectl.command("get cm a -w --no-headers").stdout(Stdio::piped()).spawn().expect(KUBECTL_MISSING);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut line = async || tokio::time::timeout(TIMEOUT, lines.next_line()).await.unwrap().unwrap().unwrap();
    assert_eq!(words(&line().await)[0][..2], ["a", "1"]);
    kubectl.ok(r#"patch cm a -p {"data":{"l":"2"}}"#).await;
    assert_eq!(words(&line().await)[0][..2], ["a", "2"]);
    child.kill().await.unwrap();
}
