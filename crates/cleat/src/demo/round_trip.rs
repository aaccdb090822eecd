//! The steps of the demo: each writes to the API server and waits until the result is visible there.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use cleat_api::well_known::VOLUMES_MOUNTED_CONDITION;
use cleat_api::{claim, condition};
use k8s_openapi::api::core::v1::{
    Container, Event, Node, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec,
    PersistentVolumeClaimVolumeSource, Pod, PodSpec, Volume, VolumeMount, VolumeResourceRequirements,
};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::runtime::wait::{Condition, await_condition, conditions};
use kube::{Client, ResourceExt as _};

use super::phases::PhaseReport;
use crate::up::Stack;
use crate::up::layout::Layout;
use crate::up::objects::CLASS;

const CLAIM_NAME: &str = "demo";
const FILE_CONTENT: &str = "written through the first pod, read through the second\n";

/// One claim, used by a pod on one node and then by a pod on the other.
pub(super) struct RoundTrip {
    layout: Layout,
    claims: Api<PersistentVolumeClaim>,
    pods: Api<Pod>,
    volumes: Api<PersistentVolume>,
    attachments: Api<VolumeAttachment>,
    nodes: Api<Node>,
    events: Api<Event>,
}

impl RoundTrip {
    pub(super) fn new(stack: &Stack) -> Self {
        let client: Client = stack.client();
        Self {
            layout: stack.layout().clone(),
            claims: Api::namespaced(client.clone(), "default"),
            pods: Api::namespaced(client.clone(), "default"),
            volumes: Api::all(client.clone()),
            attachments: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            events: Api::namespaced(client, "default"),
        }
    }

    pub(super) async fn run(&self, report: &PhaseReport) -> Result<()> {
        report.phase("two nodes ready, driver registered", self.wait_nodes_ready()).await?;
        let volume = report.phase("claim created, bound to a new volume", self.create_claim()).await?;
        let first = report.phase("first pod created on node-1", self.create_pod("first", "node-1")).await?;
        report.phase("  volume attached to node-1", self.wait_attached(&volume, "node-1")).await?;
        report.phase("  formatted, staged and published", self.wait_mounted("first")).await?;
        let file = self.file_in_pod(&first, "node-1", &volume);
        report.phase("file written through the pod's mount", async { write_file(&file) }).await?;
        report.phase("first pod deleted, unmounted", self.delete_pod(&first)).await?;
        report.phase("  volume detached from node-1", self.wait_detached()).await?;
        let second = report.phase("second pod created on node-2", self.create_pod("second", "node-2")).await?;
        report.phase("  volume attached to node-2", self.wait_attached(&volume, "node-2")).await?;
        report.phase("  staged and published, not formatted again", self.wait_mounted("second")).await?;
        let file = self.file_in_pod(&second, "node-2", &volume);
        report.phase("the same file read on the other node", async { check_file(&file) }).await?;
        report.phase("second pod deleted, unmounted", self.delete_pod(&second)).await?;
        report.phase("  volume detached from node-2", self.wait_detached()).await?;
        report.phase("claim deleted, volume and image gone", self.delete_claim(&volume)).await
    }

    /// For an error message: all warning events, and why each pod's volumes are not mounted.
    pub(super) async fn describe_state(&self) -> String {
        let mut lines = Vec::new();
        let events = self.events.list(&ListParams::default()).await.map(|l| l.items).unwrap_or_default();
        for event in events.iter().filter(|e| e.type_.as_deref() == Some("Warning")) {
            let object = event.involved_object.name.as_deref().unwrap_or_default();
            lines.push(format!("{object}: {}", event.message.as_deref().unwrap_or_default()));
        }
        for pod in self.pods.list(&ListParams::default()).await.map(|l| l.items).unwrap_or_default() {
            let why = condition::pod_condition(&pod, VOLUMES_MOUNTED_CONDITION).and_then(|c| c.message.clone());
            lines.push(format!(
                "pod {}: {}",
                pod.name_any(),
                why.unwrap_or_else(|| "no condition from its node".to_owned())
            ));
        }
        if lines.is_empty() { "no warning was recorded".to_owned() } else { lines.join("; ") }
    }

    async fn wait_nodes_ready(&self) -> Result<()> {
        for name in ["node-1", "node-2"] {
            let is_ready = |node: Option<&Node>| {
                node.is_some_and(|n| {
                    condition::node_is_ready(n)
                        && n.annotations().contains_key(cleat_api::well_known::annotation::NODE_CSI_IDS)
                })
            };
            wait(&self.nodes, name, is_ready).await?;
        }
        Ok(())
    }

    /// Creates the claim and waits until it is bound; returns the volume's name.
    async fn create_claim(&self) -> Result<String> {
        let request = VolumeResourceRequirements {
            requests: Some(BTreeMap::from([("storage".to_owned(), Quantity("1Gi".to_owned()))])),
            ..VolumeResourceRequirements::default()
        };
        let claim = PersistentVolumeClaim {
            metadata: metadata(CLAIM_NAME),
            spec: Some(PersistentVolumeClaimSpec {
                access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
                resources: Some(request),
                storage_class_name: Some(CLASS.to_owned()),
                ..PersistentVolumeClaimSpec::default()
            }),
            status: None,
        };
        self.claims.create(&PostParams::default(), &claim).await.context("creating the claim")?;
        let is_bound = |c: Option<&PersistentVolumeClaim>| c.is_some_and(|c| claim::claim_phase(c) == "Bound");
        let bound = wait(&self.claims, CLAIM_NAME, is_bound).await?;
        bound.as_ref().and_then(claim::volume_name).map(ToOwned::to_owned).context("bound to no volume")
    }

    async fn create_pod(&self, name: &str, node: &str) -> Result<Pod> {
        let pod = Pod {
            metadata: metadata(name),
            spec: Some(PodSpec {
                node_name: Some(node.to_owned()),
                containers: vec![Container {
                    name: "main".to_owned(),
                    image: Some("busybox".to_owned()),
                    volume_mounts: Some(vec![VolumeMount {
                        name: "data".to_owned(),
                        mount_path: "/data".to_owned(),
                        ..VolumeMount::default()
                    }]),
                    ..Container::default()
                }],
                volumes: Some(vec![Volume {
                    name: "data".to_owned(),
                    persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                        claim_name: CLAIM_NAME.to_owned(),
                        read_only: None,
                    }),
                    ..Volume::default()
                }]),
                ..PodSpec::default()
            }),
            status: None,
        };
        self.pods.create(&PostParams::default(), &pod).await.context("creating the pod")
    }

    async fn wait_attached(&self, volume: &str, node: &str) -> Result<()> {
        let volume = self.volumes.get(volume).await.context("reading the volume")?;
        let csi = volume.spec.and_then(|s| s.csi).context("not a CSI volume")?;
        let unique_name = cleat_api::names::unique_volume_name(&csi.driver, &csi.volume_handle);
        let lists_volume = move |node: Option<&Node>| {
            let attached = node.and_then(|n| n.status.as_ref()).and_then(|s| s.volumes_attached.as_ref());
            attached.is_some_and(|all| all.iter().any(|v| v.name == unique_name))
        };
        wait(&self.nodes, node, lists_volume).await.map(drop)
    }

    async fn wait_mounted(&self, pod: &str) -> Result<()> {
        let is_mounted = |pod: Option<&Pod>| {
            pod.and_then(|p| condition::pod_condition(p, VOLUMES_MOUNTED_CONDITION)).is_some_and(|c| c.status == "True")
        };
        wait(&self.pods, pod, is_mounted).await.map(drop)
    }

    /// The path of the test file in the pod's mount.
    fn file_in_pod(&self, pod: &Pod, node: &str, volume: &str) -> PathBuf {
        let pods = self.layout.node(node).join("pods").join(pod.uid().unwrap_or_default());
        pods.join("volumes/kubernetes.io~csi").join(volume).join("mount/message.txt")
    }

    async fn delete_pod(&self, pod: &Pod) -> Result<()> {
        let name = pod.name_any();
        self.pods.delete(&name, &DeleteParams::default()).await.context("deleting the pod")?;
        let uid = pod.uid().unwrap_or_default();
        wait(&self.pods, &name, conditions::is_deleted(&uid)).await.map(drop)
    }

    async fn wait_detached(&self) -> Result<()> {
        for attachment in self.attachments.list(&ListParams::default()).await?.items {
            let uid = attachment.uid().unwrap_or_default();
            wait(&self.attachments, &attachment.name_any(), conditions::is_deleted(&uid)).await?;
        }
        Ok(())
    }

    async fn delete_claim(&self, volume: &str) -> Result<()> {
        let volume = self.volumes.get(volume).await.context("reading the volume")?;
        self.claims.delete(CLAIM_NAME, &DeleteParams::default()).await.context("deleting the claim")?;
        let uid = volume.uid().unwrap_or_default();
        wait(&self.volumes, &volume.name_any(), conditions::is_deleted(&uid)).await?;
        let left = self.claims.list(&ListParams::default()).await?.items.len();
        ensure!(left == 0, "{left} claims are left");
        Ok(())
    }
}

async fn wait<K>(api: &Api<K>, name: &str, holds: impl Condition<K>) -> Result<Option<K>>
where
    K: Clone + std::fmt::Debug + Send + serde::de::DeserializeOwned + kube::Resource + 'static,
{
    // Boxed: the future is large and would be part of the future of every caller.
    Box::pin(await_condition(api.clone(), name, holds)).await.with_context(|| format!("waiting for {name}"))
}

fn metadata(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
}

/// Writes and syncs the file, so that the second pod reads it from the volume and not from a page cache.
fn write_file(path: &PathBuf) -> Result<()> {
    use std::io::Write as _;
    let mut file = std::fs::File::create_new(path).with_context(|| format!("creating {}", path.display()))?;
    file.write_all(FILE_CONTENT.as_bytes()).and_then(|()| file.sync_all()).context("writing the file")
}

fn check_file(path: &PathBuf) -> Result<()> {
    let content = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    if content != FILE_CONTENT {
        bail!("{} contains {content:?}", path.display());
    }
    Ok(())
}
