//! One long session of a user: many commands against one server, while a second kubectl watches.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

use crate::session::{KUBECTL_MISSING, Session, TIMEOUT, words};

const TEAM: &str = r#"
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Namespace, metadata: {name: team}}
- apiVersion: storage.k8s.io/v1
  kind: StorageClass
  metadata: {name: slow}
  provisioner: block.cleat.dev
  allowVolumeExpansion: true
- apiVersion: v1
  kind: PersistentVolumeClaim
  metadata: {name: data, namespace: team, labels: {app: db}}
  spec:
    storageClassName: slow
    accessModes: [ReadWriteOnce]
    resources: {requests: {storage: 1Gi}}
- apiVersion: v1
  kind: ConfigMap
  metadata: {name: settings, namespace: team, labels: {app: db}}
  data: {colour: red, shape: round}
"#;

const DEFINITION: &str = r#"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: backups.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {kind: Backup, plural: backups, shortNames: [bk]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    additionalPrinterColumns:
    - {name: Claim, type: string, jsonPath: .spec.claim}
    - {name: Keep, type: integer, jsonPath: .spec.keep}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            required: [claim]
            properties:
              claim: {type: string, description: the claim to copy}
              keep: {type: integer, minimum: 1, default: 3}
          status: {type: object, x-kubernetes-preserve-unknown-fields: true}
"#;

const BACKUP: &str = r#"
apiVersion: example.com/v1
kind: Backup
metadata: {name: nightly, namespace: team}
spec: {claim: data}
"#;

/// A kubectl process that watches.
struct WatchProcess {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl WatchProcess {
    fn start(kubectl: &Session, line: &str) -> Self {
        let mut child = kubectl.command(line).stdout(Stdio::piped()).spawn().expect(KUBECTL_MISSING);
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Reads until a line begins with these words.
    async fn wait_for_line(&mut self, want: &[&str]) {
        let reading = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("the watch goes on");
                if line.split_whitespace().zip(want).filter(|(a, b)| a == *b).count() == want.len() {
                    return;
                }
            }
        };
        tokio::time::timeout(TIMEOUT, reading).await.unwrap_or_else(|_| panic!("no line {want:?}"));
    }
}

async fn edit(kubectl: &Session, editor: &str, line: &str) -> String {
    let mut command = kubectl.command(line);
    command.env("KUBE_EDITOR", editor);
    kubectl.run_command(command, line).await.text()
}

#[tokio::test]
async fn from_the_first_apply_to_the_last_delete() {
    let kubectl = Session::start().await;

    // Discovery.
    let resources = kubectl.ok("api-resources --namespaced=true -o wide").await;
    assert!(resources.contains("persistentvolumeclaims") && resources.contains("watch"), "{resources}");
    assert!(kubectl.ok("api-versions").await.lines().any(|line| line == "storage.k8s.io/v1"));
    let explained = kubectl.ok("explain pvc.spec.resources").await;
    assert!(explained.contains("requests"), "{explained}");

    // Apply a List file twice, then change it, with a diff before the change.
    kubectl.file("team.yaml", TEAM);
    let applied = kubectl.ok("apply -f team.yaml").await;
    assert_eq!(applied.matches(" created").count(), 4, "{applied}");
    assert_eq!(kubectl.ok("apply -f team.yaml").await.matches(" unchanged").count(), 4);
    let mut other = WatchProcess::start(&kubectl, "get cm settings -n team -w --no-headers");
    other.wait_for_line(&["settings", "2"]).await;
    kubectl.file("team.yaml", &TEAM.replace("shape: round", "shape: round, size: big"));
    let changes = kubectl.run("diff -f team.yaml").await;
    assert!(changes.code == 1 && changes.text().contains("+  size: big"), "{}", changes.text());
    let applied = kubectl.ok("apply -f team.yaml").await;
    assert_eq!((applied.matches(" configured").count(), applied.matches(" unchanged").count()), (1, 3), "{applied}");
    assert_eq!(kubectl.run("diff -f team.yaml").await.code, 0);
    other.wait_for_line(&["settings", "3"]).await;

    // Reading.
    let listed = kubectl.ok("get pvc,cm -n team -l app=db -o name").await;
    assert_eq!(words(&listed), [["persistentvolumeclaim/data"], ["configmap/settings"]]);
    let described = kubectl.ok("describe -n team pvc data").await;
    assert!(
        described.contains("StorageClass:  slow") && described.contains("kubernetes.io/pvc-protection"),
        "{described}"
    );
    let sorted =
        kubectl.ok("get cm -n team --sort-by=.metadata.name -o custom-columns=N:.metadata.name --no-headers").await;
    assert!(sorted.lines().any(|line| line == "settings"), "{sorted}");

    // Changing: labels, annotations, the three kinds of patch, an editor.
    assert!(kubectl.ok("label -n team cm settings tier=gold").await.contains("labeled"));
    assert!(kubectl.refused("label -n team cm settings tier=iron").await.contains("overwrite"));
    kubectl.ok("label -n team cm settings tier=iron --overwrite").await;
    assert!(kubectl.ok("annotate -n team cm settings note=hello").await.contains("annotated"));
    kubectl.ok("annotate -n team cm settings note-").await;
    kubectl.ok(r#"patch -n team cm settings -p {"data":{"a":"1"}}"#).await;
    kubectl.ok(r#"patch -n team cm settings --type=merge -p {"data":{"b":"2"}}"#).await;
    kubectl.ok(r#"patch -n team cm settings --type=json -p [{"op":"remove","path":"/data/a"}]"#).await;
    let edited = edit(&kubectl, "sed -i s/red/blue/", "edit -n team cm settings").await;
    assert!(edited.contains("configmap/settings edited"), "{edited}");
    let unchanged = edit(&kubectl, "true", "edit -n team cm settings").await;
    assert!(unchanged.contains("no changes made"), "{unchanged}");
    let data = kubectl.ok("get cm settings -n team -o jsonpath={.data}{.metadata.labels.tier}").await;
    assert_eq!(data, r#"{"b":"2","colour":"blue","shape":"round","size":"big"}iron"#);
    other.wait_for_line(&["settings", "4"]).await;
    let refused = kubectl.refused(r#"patch -n team pvc data -p {"spec":{"accessModes":["ReadOnlyMany"]}}"#).await;
    assert!(refused.contains("spec is immutable after creation"), "{refused}");

    server_side_apply(&kubectl).await;
    events(&kubectl).await;
    custom_resources(&kubectl).await;

    // Deletion.
    kubectl.ok("delete pvc data -n team --wait=false").await;
    assert!(kubectl.ok("get pvc -n team --no-headers").await.contains("Terminating"));
    let waiting = kubectl.run("wait pvc/data -n team --for=delete --timeout=50s");
    let releasing = kubectl.ok(r#"patch pvc data -n team --type=merge -p {"metadata":{"finalizers":null}}"#);
    let (waited, _) = tokio::join!(waiting, releasing);
    assert_eq!(waited.code, 0, "{}", waited.text());
    let deleted = kubectl.ok("delete cm,sc -n team -l app=db").await;
    assert!(deleted.contains("\"settings\" deleted"), "{deleted}");
    assert!(kubectl.refused("get cm settings -n team").await.contains("NotFound"));
    kubectl.ok("delete sc slow").await;
    // The namespace stays: no controller runs that deletes its objects.
    kubectl.ok("delete namespace team --wait=false").await;
    let refused = kubectl.refused("create configmap late -n team --from-literal=a=b").await;
    assert!(refused.contains("because it is being terminated"), "{refused}");
    other.child.kill().await.unwrap();
}

async fn server_side_apply(kubectl: &Session) {
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: shared, namespace: team}\ndata: {k: VALUE}\n";
    kubectl.file("mine.yaml", &map.replace("VALUE", "mine"));
    kubectl.file("theirs.yaml", &map.replace("VALUE", "theirs"));
    let first = kubectl.ok("apply --server-side -f mine.yaml").await;
    assert!(first.contains("configmap/shared serverside-applied"), "{first}");
    let conflict = kubectl.refused("apply --server-side --field-manager=them -f theirs.yaml").await;
    assert!(conflict.contains("Apply failed with 1 conflict: conflict with \"kubectl\": .data.k"), "{conflict}");
    kubectl.ok("apply --server-side --field-manager=them --force-conflicts -f theirs.yaml").await;
    let conflict = kubectl.refused("apply --server-side -f mine.yaml").await;
    assert!(conflict.contains("conflict with \"them\""), "{conflict}");
    assert_eq!(kubectl.ok("get cm shared -n team -o jsonpath={.data.k}").await, "theirs");
}

async fn events(kubectl: &Session) {
    let uid = kubectl.ok("get pvc data -n team -o jsonpath={.metadata.uid}").await;
    let event = format!(
        "apiVersion: v1\nkind: Event\nmetadata: {{name: data.1, namespace: team}}\ninvolvedObject: {{apiVersion: v1, kind: \
         PersistentVolumeClaim, name: data, namespace: team, uid: {uid}}}\nreason: Noted\nmessage: something \
         happened\ntype: Warning\nlastTimestamp: 2026-01-02T03:04:05Z\n"
    );
    kubectl.file("event.yaml", &event);
    kubectl.ok("create -f event.yaml").await;
    let listed = kubectl.ok("get events -n team --field-selector type=Warning --no-headers").await;
    assert!(listed.contains("persistentvolumeclaim/data") && listed.contains("something happened"), "{listed}");
    assert!(kubectl.ok("describe pvc data -n team").await.contains("something happened"));
    // Newer versions have the command `events`.
    if kubectl.supports("", "List events").await {
        let listed = kubectl.ok("events -n team --for pvc/data --types=Warning --no-headers").await;
        assert!(listed.contains("Noted") && listed.contains("something happened"), "{listed}");
    }
}

async fn custom_resources(kubectl: &Session) {
    kubectl.file("definition.yaml", DEFINITION);
    kubectl.file("backup.yaml", BACKUP);
    kubectl.ok("apply -f definition.yaml").await;
    kubectl.ok("wait crd/backups.example.com --for=condition=Established --timeout=50s").await;
    assert!(kubectl.ok("apply -f backup.yaml").await.contains("backup.example.com/nightly created"));
    assert!(kubectl.ok("apply -f backup.yaml").await.contains("unchanged"));
    let table = kubectl.ok("get bk -n team --no-headers").await;
    assert_eq!(words(&table)[0][..3], ["nightly", "data", "3"], "{table}");
    let explained = kubectl.ok("explain backup.spec").await;
    assert!(explained.contains("the claim to copy"), "{explained}");
    kubectl.file("wrong.yaml", &BACKUP.replace("claim: data", "claim: data, keep: 0"));
    let refused = kubectl.refused("apply -f wrong.yaml").await;
    assert!(refused.contains("spec.keep"), "{refused}");
    kubectl.file("odd.yaml", &BACKUP.replace("claim: data", "claim: data, colour: red"));
    let refused = kubectl.refused("apply -f odd.yaml").await;
    assert!(refused.contains("unknown field") && refused.contains("colour"), "{refused}");
    let edited = edit(kubectl, "sed -i s/keep:.3/keep:\\ 7/", "edit -n team backup nightly").await;
    assert!(edited.contains("edited"), "{edited}");
    assert_eq!(kubectl.ok("get backup nightly -n team -o jsonpath={.spec.keep}/{.metadata.generation}").await, "7/2");
    assert!(kubectl.ok("describe backup nightly -n team").await.contains("Claim:"));
    kubectl.ok("delete crd backups.example.com").await;
    assert!(kubectl.refused("get backups -n team").await.contains("the server"), "the kind is not served any more");
}
