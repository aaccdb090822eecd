//! From caches to one volume's or one node's snapshot.

use std::sync::Arc;

use cleat_api::claim::{is_bound_pair, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::{annotation, taint};
use cleat_api::{access, names, pod};
use cleat_runtime::{Cache, Caches, Index};
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};

use super::decide::{Attached, NodeSeen, NodeVolume, State, VolumeSeen, Wanted};

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) pods: Cache<Pod>,
    pub(super) nodes: Cache<Node>,
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) attachments: Cache<VolumeAttachment>,
    pub(super) drivers: Cache<CSIDriver>,
    pods_by_claim: Index<Pod>,
    pods_by_node: Index<Pod>,
    attachments_by_volume: Index<VolumeAttachment>,
    attachments_by_node: Index<VolumeAttachment>,
    volumes_by_driver: Index<PersistentVolume>,
}

impl Observed {
    pub(super) fn new(caches: &Caches) -> Self {
        let (pods, attachments, volumes) = (caches.pods(), caches.attachments(), caches.volumes());
        Self {
            pods_by_claim: pods.index(|p| pod::claim_volumes(p).into_iter().map(|v| v.claim.to_string()).collect()),
            pods_by_node: pods.index(|p| pod::node_name(p).map(ToOwned::to_owned).into_iter().collect()),
            attachments_by_volume: attachments
                .index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            attachments_by_node: attachments.index(|a| vec![a.spec.node_name.clone()]),
            volumes_by_driver: volumes.index(|v| csi(v).map(|c| c.driver.clone()).into_iter().collect()),
            nodes: caches.nodes(),
            claims: caches.claims(),
            drivers: caches.drivers(),
            pods,
            attachments,
            volumes,
        }
    }

    pub(super) async fn synced(&self) {
        tokio::join!(
            self.pods.synced(),
            self.nodes.synced(),
            self.claims.synced(),
            self.volumes.synced(),
            self.attachments.synced(),
            self.drivers.synced(),
        );
    }

    pub(super) fn volume_of_claim(&self, claim: &Key) -> Option<String> {
        self.claims.get(claim).as_deref().and_then(volume_name).map(ToOwned::to_owned)
    }

    /// Volumes that a change of this node may concern: those attached to it and those its pods want.
    pub(super) fn volumes_near(&self, node: &str) -> Vec<String> {
        let attached = self.attachments_by_node.get(node);
        let attached = attached.iter().filter_map(|a| a.spec.source.persistent_volume_name.clone());
        let pods = self.pods_by_node.get(node);
        let wanted = pods.iter().flat_map(|p| pod::claim_volumes(p)).filter_map(|v| self.volume_of_claim(&v.claim));
        attached.chain(wanted).collect()
    }

    pub(super) fn volumes_of_driver(&self, driver: &str) -> Vec<String> {
        self.volumes_by_driver.get(driver).iter().filter_map(|v| v.metadata.name.clone()).collect()
    }

    /// `None` for a volume that is not there or not a CSI volume.
    pub(super) fn volume(&self, name: &str) -> Option<VolumeSeen> {
        let volume = self.volumes.named(name)?;
        let source = csi(&volume)?;
        let unique = names::unique_volume(&source.driver, &source.volume_handle);
        let modes = volume.spec.as_ref().and_then(|s| s.access_modes.clone()).unwrap_or_default();
        let mut attachments = self.attachments_by_volume.get(name);
        attachments.retain(|a| a.spec.attacher == source.driver);
        // The oldest holds the place, should there ever be two.
        attachments.sort_by_key(|a| (a.metadata.creation_timestamp.clone(), a.metadata.name.clone()));
        let attached = attachments.iter().map(|a| self.attached(a, &unique)).collect();
        Some(VolumeSeen {
            volume: name.to_owned(),
            many_nodes: access::allows_many_nodes(&modes),
            attachable: self.is_attachable(&source.driver),
            wanted: self.wanted(&volume),
            attached,
            unique,
        })
    }

    fn attached(&self, attachment: &VolumeAttachment, unique: &str) -> Attached {
        let node = self.nodes.named(&attachment.spec.node_name);
        let facts = NodeFacts::of(node.as_deref());
        Attached {
            node: attachment.spec.node_name.clone(),
            state: state(attachment),
            reported: facts.reported.iter().any(|n| n == unique),
            in_use: facts.in_use.iter().any(|n| n == unique),
            out_of_service: facts.out_of_service,
        }
    }

    /// The pods that need the volume, on nodes that leave attaching to this controller.
    fn wanted(&self, volume: &PersistentVolume) -> Vec<Wanted> {
        let Some(claim) = cleat_api::claim::claim_ref(volume).map(cleat_api::claim::claim_ref_key) else {
            return Vec::new();
        };
        let Some(bound) = self.claims.get(&claim).filter(|c| is_bound_pair(volume, c)) else { return Vec::new() };
        let pods = self.pods_by_claim.get(&claim.to_string());
        let needs = |pod: &&Arc<Pod>| !pod::is_terminated(pod) && may_use(pod, &claim, &bound);
        pods.iter()
            .filter(needs)
            .filter_map(|pod| {
                let node = pod::node_name(pod).filter(|n| self.is_managed(n))?;
                Some(Wanted {
                    since: pod.metadata.creation_timestamp.as_ref().map(|t| t.0),
                    pod: pod.metadata.name.clone().unwrap_or_default(),
                    node: node.to_owned(),
                })
            })
            .collect()
    }

    fn is_managed(&self, node: &str) -> bool {
        let managed = |n: &Arc<Node>| n.metadata.annotation(annotation::CONTROLLER_MANAGED_ATTACH).is_some();
        self.nodes.named(node).as_ref().is_some_and(managed)
    }

    /// A driver nobody described is taken to need attaching.
    fn is_attachable(&self, driver: &str) -> bool {
        self.drivers.named(driver).is_none_or(|d| d.spec.attach_required.unwrap_or(true))
    }

    pub(super) fn node(&self, name: &str) -> Option<NodeSeen> {
        let node = self.nodes.named(name)?;
        let facts = NodeFacts::of(Some(&node));
        let volumes = self.attachments_by_node.get(name).into_iter().filter_map(|attachment| {
            let volume = self.volumes.named(attachment.spec.source.persistent_volume_name.as_deref()?)?;
            let source = csi(&volume)?;
            let unique = names::unique_volume(&source.driver, &source.volume_handle);
            Some(NodeVolume {
                volume: volume.metadata.name.clone().unwrap_or_default(),
                state: state(&attachment),
                wanted: self.is_attachable(&source.driver) && self.wanted(&volume).iter().any(|w| w.node == name),
                in_use: facts.in_use.contains(&unique),
                out_of_service: facts.out_of_service,
                unique,
            })
        });
        Some(NodeSeen { name: name.to_owned(), volumes: volumes.collect(), reported: facts.reported })
    }

    /// The pods that wait for `volume` on `node`; for events.
    pub(super) fn waiting(&self, volume: &str, node: &str) -> Vec<Arc<Pod>> {
        let pods = self.pods_by_node.get(node);
        let waits = |pod: &Arc<Pod>| {
            let mut claims = pod::claim_volumes(pod).into_iter();
            claims.any(|v| self.volume_of_claim(&v.claim).as_deref() == Some(volume)) && !pod::is_terminated(pod)
        };
        pods.into_iter().filter(waits).collect()
    }
}

/// A claim made for one pod serves that pod only.
fn may_use(pod: &Pod, claim: &Key, bound: &PersistentVolumeClaim) -> bool {
    let owned = || bound.metadata.owner_references.iter().flatten().any(|o| o.uid == pod.metadata.uid());
    pod::claim_volumes(pod).iter().filter(|v| v.claim == *claim).all(|v| !v.ephemeral || owned())
}

pub(super) fn csi(volume: &PersistentVolume) -> Option<&CSIPersistentVolumeSource> {
    volume.spec.as_ref()?.csi.as_ref()
}

fn state(attachment: &VolumeAttachment) -> State {
    match (attachment.metadata.is_deleting(), attachment.status.as_ref().is_some_and(|s| s.attached)) {
        (true, _) => State::Leaving,
        (false, true) => State::Confirmed,
        (false, false) => State::Unconfirmed,
    }
}

#[derive(Default)]
struct NodeFacts {
    reported: Vec<String>,
    in_use: Vec<String>,
    out_of_service: bool,
}

impl NodeFacts {
    fn of(node: Option<&Node>) -> Self {
        let Some(node) = node else { return Self::default() };
        let status = node.status.as_ref();
        let attached = status.and_then(|s| s.volumes_attached.clone()).unwrap_or_default();
        let mut taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
        Self {
            reported: attached.into_iter().map(|v| v.name).collect(),
            in_use: status.and_then(|s| s.volumes_in_use.clone()).unwrap_or_default(),
            out_of_service: taints.any(|t| t.key == taint::OUT_OF_SERVICE),
        }
    }
}
