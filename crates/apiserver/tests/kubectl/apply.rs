//! kubectl commands that use OpenAPI schemas: explain, validation, List files, diff, apply.

use crate::session::Session;

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

#[tokio::test]
async fn explain_shows_every_field() {
    let kubectl = Session::start().await;
    // Older versions name the types of fields differently.
    let shown = |text: &str, words: [&str; 2]| words.iter().any(|w| text.contains(w));
    let volumes = kubectl.ok("explain pod.spec.volumes").await;
    assert!(shown(&volumes, ["FIELD: volumes <[]Volume>", "RESOURCE: volumes <[]Object>"]), "{volumes}");
    let source = ["persistentVolumeClaim\t<PersistentVolumeClaimVolumeSource>", "persistentVolumeClaim\t<Object>"];
    assert!(shown(&volumes, source), "{volumes}");
    let claim = kubectl.ok("explain pvc.spec --recursive").await;
    assert!(shown(&claim, ["requests\t<map[string]Quantity>", "requests\t<map[string]string>"]), "{claim}");
    let class = kubectl.ok("explain storageclass.allowedTopologies").await;
    assert!(class.contains("matchLabelExpressions"), "{class}");
    let nothing = kubectl.refused("explain pod.spec.nonsense").await;
    assert!(nothing.contains("does not exist"), "{nothing}");
}

#[tokio::test]
async fn lists_are_validated_and_applied() {
    let kubectl = Session::start().await;
    kubectl.file("list.yaml", LIST);
    assert_eq!(kubectl.ok("apply -f list.yaml").await.matches(" created").count(), 2);
    assert_eq!(kubectl.ok("apply -f list.yaml").await.matches(" unchanged").count(), 2);
    kubectl.file("wrong.yaml", &LIST.replace("data: {k: v}", "data: {k: v}, bogus: 1"));
    let refused = kubectl.refused("apply -f wrong.yaml").await;
    assert!(refused.contains("unknown field \"bogus\""), "{refused}");
}

#[tokio::test]
async fn strict_validation_is_done_by_the_server() {
    let kubectl = Session::start().await;
    kubectl.file("pod.yaml", &POD.replace("image: \"x:1\"", "image: \"x:1\", imagee: y"));
    // Older versions have no `--validate=strict` and validate on the client.
    if !kubectl.supports("create", "strict").await {
        let refused = kubectl.refused("create -f pod.yaml").await;
        assert!(refused.contains("unknown field \"imagee\""), "{refused}");
        return;
    }
    let refused = kubectl.refused("create -f pod.yaml --validate=strict").await;
    assert!(refused.contains("unknown field \"spec.containers[0].imagee\""), "{refused}");
    let warned = kubectl.run("create -f pod.yaml --validate=warn").await.text();
    assert!(warned.contains("Warning: unknown field") && warned.contains("created"), "{warned}");
}

#[tokio::test]
async fn client_side_apply_merges_by_the_published_keys() {
    let kubectl = Session::start().await;
    kubectl.file("pod.yaml", POD);
    kubectl.ok("apply -f pod.yaml").await;
    assert!(kubectl.ok("apply -f pod.yaml").await.contains("unchanged"));
    let same = kubectl.run("diff -f pod.yaml").await;
    assert_eq!((same.code, same.text().as_str()), (0, ""));
    kubectl.file("pod.yaml", &POD.replace("x:1", "x:2"));
    let changes = kubectl.run("diff -f pod.yaml").await;
    assert!(changes.code == 1 && changes.text().contains("+  - image: x:2"), "{}", changes.text());
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
    let conflict = kubectl.refused("apply --server-side -f w.yaml").await;
    assert!(conflict.contains("conflict with \"other\": .data.k"), "{conflict}");
    kubectl.ok("apply --server-side -f w.yaml --force-conflicts").await;
    assert_eq!(kubectl.ok("get cm s -o jsonpath={.data.k}").await, "w");
    // Objects of client-side apply can be applied on the server without a conflict.
    kubectl.file("pod.yaml", POD);
    kubectl.ok("apply -f pod.yaml").await;
    kubectl.file("pod.yaml", &POD.replace("x:1", "x:2"));
    kubectl.ok("apply --server-side -f pod.yaml").await;
    assert_eq!(kubectl.ok("get pod web -o jsonpath={.spec.containers[0].image}").await, "x:2");
}

/// One object of every kind that can be created.
const EVERY_KIND: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: x}
---
{apiVersion: v1, kind: Pod, metadata: {name: x}, spec: {containers: [{name: c, image: i}]}}
---
{apiVersion: v1, kind: Node, metadata: {name: x}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: x}
spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], csi: {driver: d.example.com, volumeHandle: h}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: x}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: x}, data: {k: v}}
---
{apiVersion: v1, kind: Secret, metadata: {name: x}, stringData: {k: v}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: x}}
---
{apiVersion: v1, kind: Event, metadata: {name: x}, involvedObject: {kind: Pod, name: p, namespace: default}}
---
apiVersion: events.k8s.io/v1
kind: Event
metadata: {name: x}
eventTime: "2026-01-02T03:04:05.000000Z"
reportingController: c.example.com/x
reportingInstance: i
action: A
reason: R
type: Normal
regarding: {kind: Pod, name: p, namespace: default}
---
{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: x}, provisioner: d.example.com}
---
{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: d.example.com}, spec: {}}
---
{apiVersion: storage.k8s.io/v1, kind: CSINode, metadata: {name: x}, spec: {drivers: []}}
---
apiVersion: storage.k8s.io/v1
kind: VolumeAttachment
metadata: {name: x}
spec: {attacher: d.example.com, nodeName: node-1, source: {persistentVolumeName: v}}
---
{apiVersion: storage.k8s.io/v1, kind: CSIStorageCapacity, metadata: {name: x}, storageClassName: s, capacity: 1Gi}
---
{apiVersion: storage.k8s.io/v1, kind: VolumeAttributesClass, metadata: {name: x}, driverName: d.example.com, parameters: {a: b}}
---
{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: x}, spec: {holderIdentity: me}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: x}
spec: {serviceName: s, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: x}
spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: x}
spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}
---
apiVersion: apps/v1
kind: ReplicaSet
metadata: {name: x}
spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: x}
spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: x}, rules: []}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: x}, rules: []}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {name: x}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: r}}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: x}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: r}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: xs.example.com}
spec:
  group: example.com
  scope: Cluster
  names: {kind: X, plural: xs}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
"#;

#[tokio::test]
async fn every_kind_passes_kubectl_validation() {
    let kubectl = Session::start().await;
    kubectl.file("every.yaml", EVERY_KIND);
    let created = kubectl.ok("create --dry-run=server -f every.yaml").await;
    assert_eq!(created.matches(" created (server dry run)").count(), created.lines().count(), "{created}");
    let listed = kubectl.ok("api-resources --verbs=create,list -o name").await;
    assert_eq!(
        created.lines().count(),
        listed.lines().count(),
        "every kind that is served has its object here: {listed}"
    );
    let again = kubectl.ok("apply --dry-run=server -f every.yaml").await;
    assert_eq!(again.lines().count(), created.lines().count(), "{again}");
}

const DEPLOYMENT: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec:
      containers:
      - {name: one, image: "x:1", env: [{name: A, value: "1"}, {name: B, value: "2"}]}
      - {name: two, image: "y:1"}
      volumes: [{name: a, emptyDir: {}}, {name: b, emptyDir: {}}]
"#;

#[tokio::test]
async fn lists_are_merged_by_their_keys() {
    let kubectl = Session::start().await;
    kubectl.file("web.yaml", DEPLOYMENT);
    kubectl.ok("apply -f web.yaml").await;
    // Elements of other clients stay, elements that the file no longer contains are removed.
    let sidecar = r#"{"spec":{"template":{"spec":{"containers":[{"name":"other","image":"z:1"}]}}}}"#;
    kubectl.ok(&format!("patch deployment web -p {sidecar}")).await;
    kubectl.file(
        "web.yaml",
        &DEPLOYMENT.replace(", {name: b, emptyDir: {}}", "").replace(r#"{name: A, value: "1"}, "#, ""),
    );
    assert!(kubectl.ok("apply -f web.yaml").await.contains("configured"));
    let names = "{.spec.template.spec.volumes[*].name}/{.spec.template.spec.containers[*].name}/{.spec.template.spec.containers[*].env[*].name}";
    let names = kubectl.ok(&format!("get deployment web -o jsonpath={names}")).await;
    let (volumes, rest) = names.split_once('/').unwrap();
    let (containers, environment) = rest.split_once('/').unwrap();
    let mut containers: Vec<_> = containers.split(' ').collect();
    containers.sort_unstable();
    assert_eq!((volumes, containers, environment), ("a", vec!["one", "other", "two"], "B"));
    let version = "get deployment web -o jsonpath={.metadata.resourceVersion}/{.metadata.generation}";
    let before = kubectl.ok(version).await;
    kubectl.ok("apply -f web.yaml").await;
    assert_eq!(kubectl.ok(version).await, before, "an apply that changes nothing is not stored");
    // Conditions are merged by their type.
    let condition =
        |kind: &str| serde_json::json!({ "status": { "conditions": [{ "type": kind, "status": "True" }] } });
    let path = "/apis/apps/v1/namespaces/default/deployments/web/status";
    for kind in ["Available", "Progressing", "Available"] {
        let request = http::Request::patch(path).header("content-type", "application/strategic-merge-patch+json");
        let request = request.body(condition(kind).to_string().into_bytes()).unwrap();
        kubectl.server.client("test").request::<serde_json::Value>(request).await.unwrap();
    }
    let kinds = kubectl.ok("get deployment web -o jsonpath={.status.conditions[*].type}").await;
    let mut kinds: Vec<_> = kinds.split(' ').collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["Available", "Progressing"]);
}
