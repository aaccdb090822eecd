//! From caches to one volume's or one node's snapshot.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use cleat_api::claim::{claim_ref, claim_ref_key, is_bound_pair, volume_name};
use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::{annotation, taint};
use cleat_api::{access, names, pod};
use cleat_runtime::{Cache, Caches, Change, Index};
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use parking_lot::Mutex;

use super::decide::{Attached, NodeSeen, NodeVolume, State, Usage, VolumeSeen, Wanted};

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
    volumes_by_unique: Index<PersistentVolume>,
    /// What nodes that are gone last said they had in use: the machine may still be there.
    last_words: Arc<Mutex<HashMap<String, Vec<String>>>>,
    /// Attachments that were there when this controller began, or that it asked for. Others are somebody else's: they hold
    /// their place, but are not taken away.
    ours: Arc<Mutex<HashSet<String>>>,
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
            volumes_by_unique: volumes.index(|v| unique(v).into_iter().collect()),
            nodes: caches.nodes(),
            claims: caches.claims(),
            drivers: caches.drivers(),
            last_words: Arc::default(),
            ours: Arc::default(),
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

    /// Takes charge of every attachment there is; called once, when all is known.
    pub(super) fn take_charge(&self) {
        self.ours.lock().extend(self.attachments.all().iter().filter_map(|a| a.metadata.name.clone()));
    }

    pub(super) fn asked_for(&self, attachment: &str) {
        self.ours.lock().insert(attachment.to_owned());
    }

    pub(super) fn note_attachment(&self, change: &Change<VolumeAttachment>) {
        if let Change::Deleted(gone) = change {
            self.ours.lock().remove(gone.metadata.name.as_deref().unwrap_or_default());
        }
    }

    pub(super) fn note(&self, change: &Change<Node>) {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let mut last_words = self.last_words.lock();
        match change {
            Change::Applied { .. } => last_words.remove(&name),
            Change::Deleted(node) => last_words.insert(name, in_use(node)),
        };
    }

    /// The volume behind a claim, by the name node status uses.
    pub(super) fn unique_of_claim(&self, claim: &Key) -> Option<String> {
        let claim = self.claims.get(claim)?;
        self.unique_of_volume(volume_name(&claim)?)
    }

    pub(super) fn unique_of_volume(&self, volume: &str) -> Option<String> {
        self.volumes.named(volume).as_deref().and_then(unique)
    }

    /// Volumes that a change of this node may concern: those attached to it and those its pods want.
    pub(super) fn volumes_near(&self, node: &str) -> BTreeSet<String> {
        let attached = self.attachments_by_node.get(node);
        let attached = attached.iter().filter_map(|a| a.spec.source.persistent_volume_name.as_deref());
        let attached = attached.filter_map(|volume| self.unique_of_volume(volume));
        let pods = self.pods_by_node.get(node);
        let wanted = pods.iter().flat_map(|p| pod::claim_volumes(p)).filter_map(|v| self.unique_of_claim(&v.claim));
        attached.chain(wanted).collect()
    }

    pub(super) fn volumes_of_driver(&self, driver: &str) -> BTreeSet<String> {
        self.volumes_by_driver.get(driver).iter().filter_map(|v| unique(v)).collect()
    }

    /// Nodes with an attachment of this volume.
    pub(super) fn nodes_with(&self, unique: &str) -> BTreeSet<String> {
        self.attachments_of(unique).iter().map(|a| a.spec.node_name.clone()).collect()
    }

    /// Nodes with an attachment that names this PersistentVolume, also when that is gone.
    pub(super) fn nodes_of_attachments(&self, volume: &str) -> BTreeSet<String> {
        self.attachments_by_volume.get(volume).iter().map(|a| a.spec.node_name.clone()).collect()
    }

    fn attachments_of(&self, unique: &str) -> Vec<Arc<VolumeAttachment>> {
        let volumes = self.volumes_by_unique.get(unique);
        let names = volumes.iter().filter_map(|v| v.metadata.name.as_deref());
        names.flat_map(|name| self.attachments_by_volume.get(name)).collect()
    }

    /// `None` for a volume that is not there or not a CSI volume.
    pub(super) fn volume(&self, unique: &str) -> Option<VolumeSeen> {
        let volumes = self.volumes_by_unique.get(unique);
        let (driver, _) = names::split_unique_volume(unique)?;
        let shared = |v: &Arc<PersistentVolume>| {
            access::allows_many_nodes(&v.spec.as_ref().and_then(|s| s.access_modes.clone()).unwrap_or_default())
        };
        let mut attachments = self.attachments_of(unique);
        attachments.sort_by_key(|a| (a.metadata.creation_timestamp.clone(), a.metadata.name.clone()));
        let attached = attachments.iter().map(|a| Attached {
            node: a.spec.node_name.clone(),
            state: state(a),
            error: a.status.as_ref().and_then(|s| s.attach_error.as_ref()?.message.clone()),
        });
        Some(VolumeSeen {
            unique: unique.to_owned(),
            many_nodes: volumes.iter().all(shared),
            attachable: self.is_attachable(driver),
            wanted: volumes.iter().flat_map(|v| self.wanted(v)).collect(),
            attached: attached.collect(),
        })
    }

    /// The pods that need the volume, on nodes that leave attaching to this controller.
    fn wanted(&self, volume: &PersistentVolume) -> Vec<Wanted> {
        let Some(claim) = claim_ref(volume).map(claim_ref_key) else { return Vec::new() };
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
                    volume: volume.metadata.name.clone().unwrap_or_default(),
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

    pub(super) fn node(&self, name: &str) -> NodeSeen {
        let node = self.nodes.named(name);
        let in_use = node.as_deref().map(in_use).or_else(|| self.last_words.lock().get(name).cloned());
        let mut attachments = self.attachments_by_node.get(name);
        attachments.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let volumes = attachments.into_iter().filter_map(|attachment| {
            let volume = attachment.spec.source.persistent_volume_name.clone()?;
            let unique = self.unique_of_volume(&volume)?;
            let (driver, _) = names::split_unique_volume(&unique)?;
            let name_of_it = attachment.metadata.name.clone()?;
            let mut wanted = self.volumes_by_unique.get(&unique).into_iter().flat_map(|v| self.wanted(&v));
            let wanted = self.is_attachable(driver) && wanted.any(|w| w.node == name);
            if !wanted && !self.ours.lock().contains(&name_of_it) {
                return None;
            }
            Some(NodeVolume {
                attachment: name_of_it,
                state: state(&attachment),
                wanted,
                usage: match &in_use {
                    None => Usage::Unknown,
                    Some(in_use) if in_use.contains(&unique) => Usage::InUse,
                    Some(_) => Usage::NotInUse,
                },
                volume,
                unique,
            })
        });
        NodeSeen {
            name: name.to_owned(),
            volumes: volumes.collect(),
            reported: node.as_deref().map(reported),
            out_of_service: node.as_deref().is_some_and(is_out_of_service),
        }
    }

    /// The pods that wait for the volume on `node`; for events.
    pub(super) fn waiting(&self, unique: &str, node: &str) -> Vec<Arc<Pod>> {
        let pods = self.pods_by_node.get(node);
        let waits = |pod: &Arc<Pod>| {
            let mut claims = pod::claim_volumes(pod).into_iter();
            claims.any(|v| self.unique_of_claim(&v.claim).as_deref() == Some(unique)) && !pod::is_terminated(pod)
        };
        pods.into_iter().filter(waits).collect()
    }

    /// A PersistentVolume of this volume; for messages.
    pub(super) fn shown(&self, unique: &str) -> String {
        let mut names: Vec<_> =
            self.volumes_by_unique.get(unique).iter().filter_map(|v| v.metadata.name.clone()).collect();
        names.sort();
        names.into_iter().next().unwrap_or_else(|| unique.to_owned())
    }
}

/// A claim made for one pod serves that pod only.
fn may_use(pod: &Pod, claim: &Key, bound: &PersistentVolumeClaim) -> bool {
    let owned = || bound.metadata.owner_references.iter().flatten().any(|o| o.uid == pod.metadata.uid());
    pod::claim_volumes(pod).iter().filter(|v| v.claim == *claim).all(|v| !v.ephemeral || owned())
}

fn csi(volume: &PersistentVolume) -> Option<&CSIPersistentVolumeSource> {
    volume.spec.as_ref()?.csi.as_ref()
}

fn unique(volume: &PersistentVolume) -> Option<String> {
    csi(volume).map(|c| names::unique_volume(&c.driver, &c.volume_handle))
}

fn state(attachment: &VolumeAttachment) -> State {
    match (attachment.metadata.is_deleting(), attachment.status.as_ref().is_some_and(|s| s.attached)) {
        (true, _) => State::Leaving,
        (false, true) => State::Confirmed,
        (false, false) => State::Unconfirmed,
    }
}

pub(super) fn in_use(node: &Node) -> Vec<String> {
    node.status.as_ref().and_then(|s| s.volumes_in_use.clone()).unwrap_or_default()
}

fn reported(node: &Node) -> Vec<String> {
    let attached = node.status.iter().flat_map(|s| s.volumes_attached.iter().flatten());
    attached.map(|v| v.name.clone()).collect()
}

fn is_out_of_service(node: &Node) -> bool {
    let mut taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    taints.any(|t| t.key == taint::OUT_OF_SERVICE)
}
