//! Builds the snapshot of one volume or one node from the caches. Holds no state of its own: facts that no cache shows
//! come from [`AttachMemory`].
//!
//! A volume is identified by its unique name, as in Node status: driver and handle. All PersistentVolumes and inline
//! pod volumes with the same unique name are one volume.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{claim_ref, claim_ref_key, is_bound_pair, volume_name};
use cleat_api::flex;
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{annotation, taint};
use cleat_api::{access, condition, migrate, pod};
use cleat_flex::Drivers;
use cleat_runtime::{Cache, Caches, Change, Index};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use k8s_openapi::jiff::Timestamp;

use super::decide::{
    AttachNodeSnapshot, AttachVolumeSnapshot, AttachmentSnapshot, AttachmentSource, AttachmentState, NodeAttachment,
    ReportedVolume, VolumeReferences, VolumeUsage, VolumeUser,
};
use super::memory::AttachMemory;
use super::volume_identity::{attachment_source, device_path, driver_name, inline_volumes, unique_volume_name};

#[derive(Clone)]
pub(super) struct AttachObserver {
    pub(super) pods: Cache<Pod>,
    pub(super) nodes: Cache<Node>,
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) attachments: Cache<VolumeAttachment>,
    pub(super) drivers: Cache<CSIDriver>,
    pub(super) flex: Drivers,
    pods_by_claim: Index<Pod>,
    pods_by_node: Index<Pod>,
    /// By the unique names of the volumes that pods define inline.
    pods_by_inline_volume: Index<Pod>,
    attachments_by_volume: Index<VolumeAttachment>,
    /// By the unique name of the inline volume in their spec.
    attachments_by_inline_volume: Index<VolumeAttachment>,
    attachments_by_node: Index<VolumeAttachment>,
    volumes_by_driver: Index<PersistentVolume>,
    volumes_by_unique_name: Index<PersistentVolume>,
}

impl AttachObserver {
    pub(super) fn new(caches: &Caches, flex: Drivers) -> Self {
        let (pods, attachments, volumes) = (caches.pods(), caches.attachments(), caches.volumes());
        Self {
            pods_by_claim: pods.index(|p| pod::claim_volumes(p).into_iter().map(|v| v.claim.to_string()).collect()),
            pods_by_node: pods.index(|p| pod::node_name(p).map(ToOwned::to_owned).into_iter().collect()),
            pods_by_inline_volume: pods
                .index(|p| inline_volumes(p).into_iter().map(|(unique_name, _)| unique_name).collect()),
            attachments_by_inline_volume: attachments
                .index(|a| flex::inline_unique_volume_name(a).into_iter().collect()),
            attachments_by_volume: attachments
                .index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            attachments_by_node: attachments.index(|a| vec![a.spec.node_name.clone()]),
            volumes_by_driver: volumes.index(|v| driver_name(v).into_iter().collect()),
            volumes_by_unique_name: volumes.index(|v| unique_volume_name(v).into_iter().collect()),
            nodes: caches.nodes(),
            claims: caches.claims(),
            drivers: caches.csi_drivers(),
            flex,
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

    pub(super) fn attachment_names(&self) -> impl Iterator<Item = String> {
        self.attachments.each().filter_map(|attachment| attachment.metadata.name.clone())
    }

    pub(super) fn attachment_names_on(&self, node: &str) -> Vec<String> {
        let attachments = self.attachments_by_node.get(node);
        attachments.iter().filter_map(|attachment| attachment.metadata.name.clone()).collect()
    }

    fn unique_name_of_claim(&self, claim: &Key) -> Option<String> {
        let claim = self.claims.get(claim)?;
        self.unique_name_of_volume(volume_name(&claim)?)
    }

    pub(super) fn unique_name_of_volume(&self, volume: &str) -> Option<String> {
        self.volumes.named(volume).as_deref().and_then(unique_volume_name)
    }

    /// `None` if the attachment names a PersistentVolume that does not exist any more.
    pub(super) fn unique_name_of_attachment(&self, attachment: &VolumeAttachment) -> Option<String> {
        match attachment.spec.source.persistent_volume_name.as_deref() {
            Some(volume) => self.unique_name_of_volume(volume),
            None => flex::inline_unique_volume_name(attachment),
        }
    }

    /// The unique names of the pod's volumes that a driver may have to attach.
    pub(super) fn unique_names_of_pod(&self, pod: &Pod) -> Vec<String> {
        let claims = pod::claim_volumes(pod).into_iter().filter_map(|v| self.unique_name_of_claim(&v.claim));
        claims.chain(inline_volumes(pod).into_iter().map(|(unique_name, _)| unique_name)).collect()
    }

    /// The volumes that the node's pods use or that have an attachment to it.
    pub(super) fn volumes_of_node(&self, node: &str) -> BTreeSet<String> {
        let attachments = self.attachments_by_node.get(node);
        let attached = attachments.iter().filter_map(|a| self.unique_name_of_attachment(a));
        let pods = self.pods_by_node.get(node);
        attached.chain(pods.iter().flat_map(|p| self.unique_names_of_pod(p))).collect()
    }

    /// The volumes that this driver attaches: those of PersistentVolumes, and those that pods define inline.
    pub(super) fn volumes_of_driver(&self, driver: &str) -> BTreeSet<String> {
        let persistent = self.volumes_by_driver.get(driver).into_iter().filter_map(|v| unique_volume_name(&v));
        let inline = self.pods.each().flat_map(|pod| inline_volumes(&pod)).map(|(unique_name, _)| unique_name);
        let is_attached_by_driver =
            |unique_name: &String| flex::attacher_and_handle(unique_name).map(|(attacher, _)| attacher) == Some(driver);
        persistent.chain(inline.filter(is_attached_by_driver)).collect()
    }

    /// The references to the volume that the claim names, through this claim.
    pub(super) fn references_to_claim(&self, claim: &PersistentVolumeClaim) -> VolumeReferences {
        let has_attachments = volume_name(claim).is_some_and(|name| {
            let unique_name = self.unique_name_of_volume(name);
            self.attachments_by_volume.has(name)
                || unique_name.is_some_and(|unique_name| self.attachments_by_inline_volume.has(&unique_name))
        });
        VolumeReferences { has_attachments, has_pods: self.pods_by_claim.has(&Key::of(&claim.metadata).to_string()) }
    }

    /// The references to the PersistentVolume. Pods of the claim that it named before the change count too.
    pub(super) fn references_to_volume(&self, change: &Change<PersistentVolume>) -> VolumeReferences {
        let old = match change {
            Change::Applied { old, .. } => old.as_deref(),
            Change::Deleted(_) => None,
        };
        let volume = change.object().as_ref();
        let mut claims = old.into_iter().chain([volume]).filter_map(claim_ref).map(claim_ref_key);
        VolumeReferences {
            has_attachments: self.attachments_by_volume.has(volume.metadata.name.as_deref().unwrap_or_default())
                || unique_volume_name(volume)
                    .is_some_and(|unique_name| self.attachments_by_inline_volume.has(&unique_name)),
            has_pods: claims.any(|claim| self.pods_by_claim.has(&claim.to_string())),
        }
    }

    /// The nodes to which an attachment of this volume exists.
    pub(super) fn nodes_with_attachment(&self, unique_name: &str) -> BTreeSet<String> {
        self.attachments_of(unique_name).iter().map(|a| a.spec.node_name.clone()).collect()
    }

    /// The nodes of the attachments that name this PersistentVolume, which need not exist any more.
    pub(super) fn nodes_of_persistent_volume(&self, volume: &str) -> BTreeSet<String> {
        self.attachments_by_volume.get(volume).iter().map(|a| a.spec.node_name.clone()).collect()
    }

    fn attachments_of(&self, unique_name: &str) -> Vec<Arc<VolumeAttachment>> {
        let volumes = self.volumes_by_unique_name.get(unique_name);
        let names = volumes.iter().filter_map(|v| v.metadata.name.as_deref());
        let by_name = names.flat_map(|name| self.attachments_by_volume.get(name));
        by_name.chain(self.attachments_by_inline_volume.get(unique_name)).collect()
    }

    /// `None` if the unique name has no driver and handle that could be attached.
    pub(super) fn volume_snapshot(
        &self,
        memory: &AttachMemory,
        unique_name: &str,
        now: Timestamp,
    ) -> Option<AttachVolumeSnapshot> {
        let volumes = self.volumes_by_unique_name.get(unique_name);
        let inline = self.inline_definitions(unique_name);
        let (driver, handle) = flex::attacher_and_handle(unique_name)?;
        let allows_many_nodes = |v: &PersistentVolume| {
            // Migration can change the access modes; the driver gets the translated ones.
            let modes = migrate::translate_volume(v).ok().and_then(|v| v.spec.as_ref()?.access_modes.clone());
            access::allows_many_nodes(&modes.unwrap_or_default())
        };
        let mut attachments = self.attachments_of(unique_name);
        attachments.sort_by_key(|a| (a.metadata.creation_timestamp.clone(), a.metadata.name.clone()));
        let attachments = attachments.iter().map(|a| AttachmentSnapshot {
            node: a.spec.node_name.clone(),
            state: attachment_state(memory, a),
            error: a.status.as_ref().and_then(|s| s.attach_error.as_ref()?.message.clone()),
            age: a.metadata.creation_timestamp.as_ref().map_or_else(Duration::default, |t| elapsed(t.0, now)),
        });
        Some(AttachVolumeSnapshot {
            unique_name: unique_name.to_owned(),
            allows_many_nodes: volumes.iter().all(|v| allows_many_nodes(v))
                && inline.iter().all(|(_, v)| allows_many_nodes(v)),
            needs_attach: self.attach_requirement(driver, handle) == AttachRequirement::Required,
            users: self.users(unique_name),
            attachments: attachments.collect(),
        })
    }

    /// The running pods that need the volume, on nodes for which this controller attaches.
    fn users(&self, unique_name: &str) -> Vec<VolumeUser> {
        let by_claim = self.volumes_by_unique_name.get(unique_name).into_iter().flat_map(|v| self.users_by_claim(&v));
        let inline = self.inline_definitions(unique_name).into_iter().filter(|(pod, _)| !pod::is_terminated(pod));
        let inline =
            inline.filter_map(|(pod, volume)| self.user(&pod, AttachmentSource::Inline(Box::new(volume.spec?))));
        by_claim.chain(inline).collect()
    }

    fn user(&self, pod: &Pod, source: AttachmentSource) -> Option<VolumeUser> {
        let node = pod::node_name(pod).filter(|node| self.nodes.named(node).is_some_and(|node| is_managed(&node)))?;
        Some(VolumeUser {
            created: pod.metadata.creation_timestamp.as_ref().map(|t| t.0),
            pod: Key::of(&pod.metadata),
            node: node.to_owned(),
            source,
        })
    }

    /// The pods that define this volume inline, each with the definition as a PersistentVolume.
    fn inline_definitions(&self, unique_name: &str) -> Vec<(Arc<Pod>, PersistentVolume)> {
        let pods = self.pods_by_inline_volume.get(unique_name).into_iter();
        let with_definition = |pod: Arc<Pod>| {
            let volume = inline_volumes(&pod).into_iter().find(|(found, _)| found == unique_name)?.1;
            Some((pod, volume))
        };
        pods.filter_map(with_definition).collect()
    }

    fn users_by_claim(&self, volume: &PersistentVolume) -> Vec<VolumeUser> {
        let Some(key) = claim_ref(volume).map(claim_ref_key) else { return Vec::new() };
        let Some(claim) = self.claims.get(&key).filter(|c| is_bound_pair(volume, c)) else { return Vec::new() };
        let pods = self.pods_by_claim.get(&key.to_string());
        let needs_volume = |pod: &&Arc<Pod>| !pod::is_terminated(pod) && may_use(pod, &key, &claim);
        pods.iter()
            .filter(needs_volume)
            .filter_map(|pod| self.user(pod, attachment_source(volume, pod, &key)))
            .collect()
    }

    /// A driver without a CSIDriver object needs attachments, as in Kubernetes.
    fn attach_requirement(&self, driver: &str, handle: &str) -> AttachRequirement {
        if driver == flex::ATTACHER {
            let (driver, _) = flex::split_handle(handle).unwrap_or_default();
            return match self.flex.state(driver) {
                cleat_flex::DriverState::Ready(capabilities) if !capabilities.attach => AttachRequirement::NotRequired,
                cleat_flex::DriverState::Starting => AttachRequirement::Unknown,
                _ => AttachRequirement::Required,
            };
        }
        match self.drivers.named(driver).is_none_or(|d| d.spec.attach_required.unwrap_or(true)) {
            true => AttachRequirement::Required,
            false => AttachRequirement::NotRequired,
        }
    }

    /// Updates in `memory` since when the node's attachments are unneeded.
    pub(super) fn node_snapshot(&self, memory: &AttachMemory, name: &str, now: Timestamp) -> AttachNodeSnapshot {
        let node = self.nodes.named(name);
        let fields = node.as_deref().map(NodeFields::of);
        let last_in_use = if fields.is_none() { memory.last_volumes_in_use(name) } else { None };
        let in_use = fields.as_ref().map(|fields| &fields.in_use).or(last_in_use.as_ref());
        let in_use: Option<HashSet<&str>> = in_use.map(|names| names.iter().map(String::as_str).collect());
        let mut attachments = self.attachments_by_node.get(name);
        attachments.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let attachments = attachments.into_iter().filter_map(|attachment| {
            let unique_name = self.unique_name_of_attachment(&attachment)?;
            let (driver, handle) = flex::attacher_and_handle(&unique_name)?;
            let attachment_name = attachment.metadata.name.clone()?;
            let may_need_attach = self.attach_requirement(driver, handle) != AttachRequirement::NotRequired;
            let is_needed = may_need_attach && self.users(&unique_name).iter().any(|user| user.node == name);
            if !is_needed && !memory.is_owned(&attachment_name) {
                return None;
            }
            Some(NodeAttachment {
                device_path: device_path(&attachment),
                state: attachment_state(memory, &attachment),
                need: memory.track_need(&attachment_name, is_needed, now),
                usage: match &in_use {
                    None => VolumeUsage::Unknown,
                    Some(in_use) if in_use.contains(unique_name.as_str()) => VolumeUsage::InUse,
                    Some(_) => VolumeUsage::NotInUse,
                },
                name: attachment_name,
                unique_name,
            })
        });
        AttachNodeSnapshot {
            name: name.to_owned(),
            attachments: attachments.collect(),
            is_managed: fields.as_ref().is_none_or(|fields| fields.is_managed),
            is_ready: fields.as_ref().is_some_and(|fields| fields.is_ready),
            is_out_of_service: fields.as_ref().is_some_and(|fields| fields.is_out_of_service),
            reported: fields.map(|fields| fields.reported),
        }
    }

    /// The running pods on `node` that use the volume; they get its events.
    pub(super) fn pods_on_node(&self, unique_name: &str, node: &str) -> Vec<Arc<Pod>> {
        let volumes = self.volumes_by_unique_name.get(unique_name).into_iter();
        let claims = volumes.filter_map(|v| claim_ref(&v).map(|reference| claim_ref_key(reference).to_string()));
        let by_claim = claims.flat_map(|claim| self.pods_by_claim.get(&claim));
        let pods = by_claim.chain(self.pods_by_inline_volume.get(unique_name));
        pods.filter(|pod| pod::node_name(pod) == Some(node) && !pod::is_terminated(pod)).collect()
    }

    /// The volume's name in events: that of its PersistentVolume, or of the inline volume.
    pub(super) fn display_name(&self, unique_name: &str) -> String {
        let volumes = self.volumes_by_unique_name.get(unique_name);
        let inline = self.inline_definitions(unique_name);
        let volumes = volumes.iter().map(AsRef::as_ref).chain(inline.iter().map(|(_, volume)| volume));
        volumes.filter_map(|v| v.metadata.name.clone()).min().unwrap_or_else(|| unique_name.to_owned())
    }
}

/// Everything that a snapshot takes from a Node object. A change of a Node that leaves this equal, such as a heartbeat,
/// gives the same snapshots and therefore the same decisions.
#[derive(PartialEq, Eq)]
pub(super) struct NodeFields {
    reported: Vec<ReportedVolume>,
    in_use: Vec<String>,
    pub(super) is_managed: bool,
    is_ready: bool,
    is_out_of_service: bool,
}

impl NodeFields {
    pub(super) fn of(node: &Node) -> Self {
        Self {
            reported: reported_volumes(node),
            in_use: volumes_in_use(node),
            is_managed: is_managed(node),
            is_ready: condition::node_is_ready(node),
            is_out_of_service: is_out_of_service(node),
        }
    }
}

pub(super) fn elapsed(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}

/// A claim that was created for an ephemeral volume serves its owner pod only.
fn may_use(pod: &Pod, key: &Key, claim: &PersistentVolumeClaim) -> bool {
    let is_owner = || claim.metadata.owner_references.iter().flatten().any(|o| o.uid == pod.metadata.uid());
    pod::claim_volumes(pod).iter().filter(|v| v.claim == *key).all(|v| !v.ephemeral || is_owner())
}

/// Whether the volumes of a driver need VolumeAttachments.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AttachRequirement {
    Required,
    NotRequired,
    /// A FlexVolume driver that has not answered yet. Until then its volumes are neither attached nor detached.
    Unknown,
}

fn is_managed(node: &Node) -> bool {
    node.metadata.annotation(annotation::CONTROLLER_MANAGED_ATTACH).is_some()
}

/// An attachment whose delete request has an unknown result counts as detaching.
fn attachment_state(memory: &AttachMemory, attachment: &VolumeAttachment) -> AttachmentState {
    let name = attachment.metadata.name.as_deref().unwrap_or_default();
    let is_detaching = memory.is_delete_uncertain(name) || attachment.metadata.is_deleting();
    match (is_detaching, attachment.status.as_ref().is_some_and(|s| s.attached)) {
        (true, _) => AttachmentState::Detaching,
        (false, true) => AttachmentState::Attached,
        (false, false) => AttachmentState::Unconfirmed,
    }
}

pub(super) fn volumes_in_use(node: &Node) -> Vec<String> {
    node.status.as_ref().and_then(|s| s.volumes_in_use.clone()).unwrap_or_default()
}

pub(super) fn reported_volumes(node: &Node) -> Vec<ReportedVolume> {
    let attached = node.status.iter().flat_map(|s| s.volumes_attached.iter().flatten());
    attached.map(|v| ReportedVolume { unique_name: v.name.clone(), device_path: v.device_path.clone() }).collect()
}

fn is_out_of_service(node: &Node) -> bool {
    let mut taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    taints.any(|t| t.key == taint::OUT_OF_SERVICE)
}
