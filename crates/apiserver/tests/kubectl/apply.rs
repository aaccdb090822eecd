//! The real kubectl with what it needs schemas for: explain, validation, List files, diff, server-side apply.

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
async fn explain_knows_every_field() {
    let kubectl = Session::start().await;
    let volumes = kubectl.ok("explain pod.spec.volumes").await;
    assert!(volumes.contains("FIELD: volumes <[]Volume>"), "{volumes}");
    assert!(volumes.contains("persistentVolumeClaim\t<PersistentVolumeClaimVolumeSource>"), "{volumes}");
    let claim = kubectl.ok("explain pvc.spec --recursive").await;
    assert!(claim.contains("requests\t<map[string]Quantity>"), "{claim}");
    let class = kubectl.ok("explain storageclass.allowedTopologies").await;
    assert!(class.contains("matchLabelExpressions"), "{class}");
    let nothing = kubectl.refused("explain pod.spec.nonsense").await;
    assert!(nothing.contains("does not exist"), "{nothing}");
}

#[tokio::test]
async fn row_17_lists_are_validated_and_applied() {
    let kubectl = Session::start().await;
    kubectl.file("list.yaml", LIST);
    assert_eq!(kubectl.ok("apply -f list.yaml").await.matches(" created").count(), 2);
    assert_eq!(kubectl.ok("apply -f list.yaml").await.matches(" unchanged").count(), 2);
    kubectl.file("wrong.yaml", &LIST.replace("data: {k: v}", "data: {k: v}, bogus: 1"));
    let refused = kubectl.refused("apply -f wrong.yaml").await;
    assert!(refused.contains("unknown field \"bogus\""), "{refused}");
}

#[tokio::test]
async fn strict_validation_is_the_servers() {
    let kubectl = Session::start().await;
    kubectl.file("pod.yaml", &POD.replace("image: \"x:1\"", "image: \"x:1\", imagee: y"));
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
    // What client-side apply made moves over without a conflict.
    kubectl.file("pod.yaml", POD);
    kubectl.ok("apply -f pod.yaml").await;
    kubectl.file("pod.yaml", &POD.replace("x:1", "x:2"));
    kubectl.ok("apply --server-side -f pod.yaml").await;
    assert_eq!(kubectl.ok("get pod web -o jsonpath={.spec.containers[0].image}").await, "x:2");
}
