//! From caches to one volume's or one node's snapshot.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cleat_api::claim::{claim_ref, claim_ref_key, is_bound_pair, volume_name};
use cleat_api::flex::{self, FlexVolume};
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{annotation, taint};
use cleat_api::{access, condition, migrate, names, pod};
use cleat_flex::Drivers;
use cleat_runtime::{Cache, Caches, Change, Index};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use parking_lot::Mutex;

use super::decide::{Attached, Need, NodeSeen, NodeVolume, Source, State, Told, Usage, VolumeSeen, Wanted};

#[derive(Clone)]
pub(super) struct Observed {
    pub(super) pods: Cache<Pod>,
    pub(super) nodes: Cache<Node>,
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) attachments: Cache<VolumeAttachment>,
    pub(super) drivers: Cache<CSIDriver>,
    pub(super) flex: Drivers,
    pods_by_claim: Index<Pod>,
    pods_by_node: Index<Pod>,
    pods_by_inline: Index<Pod>,
    attachments_by_volume: Index<VolumeAttachment>,
    attachments_by_inline: Index<VolumeAttachment>,
    attachments_by_node: Index<VolumeAttachment>,
    volumes_by_driver: Index<PersistentVolume>,
    volumes_by_unique: Index<PersistentVolume>,
    /// What nodes that are gone last said they had in use: the machine may still be there.
    last_words: Arc<Mutex<HashMap<String, Vec<String>>>>,
    /// Attachments that were there when this controller began, or that it asked for. Others are somebody else's: they hold
    /// their place, but are not taken away.
    ours: Arc<Mutex<HashSet<String>>>,
    /// Since when nobody has wanted an attachment. A restart forgets it, and waits longer than it must.
    unwanted: Arc<Mutex<HashMap<String, Timestamp>>>,
    /// Attachments that were asked for without an answer, by volume: they may exist.
    intents: Arc<Mutex<HashMap<String, Vec<VolumeAttachment>>>>,
    /// Attachments whose deletion was asked for without an answer: they may be leaving.
    doubted: Arc<Mutex<HashSet<String>>>,
}

impl Observed {
    pub(super) fn new(caches: &Caches, flex: Drivers) -> Self {
        let (pods, attachments, volumes) = (caches.pods(), caches.attachments(), caches.volumes());
        Self {
            pods_by_claim: pods.index(|p| pod::claim_volumes(p).into_iter().map(|v| v.claim.to_string()).collect()),
            pods_by_node: pods.index(|p| pod::node_name(p).map(ToOwned::to_owned).into_iter().collect()),
            pods_by_inline: pods.index(|p| inline_volumes(p).into_iter().map(|(unique, _)| unique).collect()),
            attachments_by_inline: attachments.index(|a| flex::inline_unique_volume_name(a).into_iter().collect()),
            attachments_by_volume: attachments
                .index(|a| a.spec.source.persistent_volume_name.clone().into_iter().collect()),
            attachments_by_node: attachments.index(|a| vec![a.spec.node_name.clone()]),
            volumes_by_driver: volumes.index(|v| driver(v).into_iter().collect()),
            volumes_by_unique: volumes.index(|v| unique(v).into_iter().collect()),
            nodes: caches.nodes(),
            claims: caches.claims(),
            drivers: caches.csi_drivers(),
            flex,
            last_words: Arc::default(),
            ours: Arc::default(),
            unwanted: Arc::default(),
            doubted: Arc::default(),
            intents: Arc::default(),
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
        self.ours.lock().extend(self.attachments.each().filter_map(|a| a.metadata.name.clone()));
    }

    /// From here on the attachment may exist, and is ours.
    pub(super) fn intend(&self, unique: &str, attachment: &VolumeAttachment) {
        self.ours.lock().extend(attachment.metadata.name.clone());
        let mut intents = self.intents.lock();
        let wished = intents.entry(unique.to_owned()).or_default();
        if !wished.iter().any(|other| other.metadata.name == attachment.metadata.name) {
            wished.push(attachment.clone());
        }
    }

    pub(super) fn settle_intent(&self, unique: &str, attachment: &VolumeAttachment) {
        let mut intents = self.intents.lock();
        if let Some(wished) = intents.get_mut(unique) {
            wished.retain(|other| other.metadata.name != attachment.metadata.name);
            if wished.is_empty() {
                intents.remove(unique);
            }
        }
    }

    pub(super) fn intended(&self, unique: &str) -> Vec<VolumeAttachment> {
        self.intents.lock().get(unique).cloned().unwrap_or_default()
    }

    pub(super) fn note_attachment(&self, change: &Change<VolumeAttachment>) {
        if let Change::Deleted(gone) = change {
            let name = gone.metadata.name.as_deref().unwrap_or_default();
            self.ours.lock().remove(name);
            self.unwanted.lock().remove(name);
            self.doubted.lock().remove(name);
        }
    }

    pub(super) fn doubt(&self, attachment: &str) {
        self.doubted.lock().insert(attachment.to_owned());
    }

    /// What the server says now ends the doubt. An attachment that is gone stays doubted until the cache knows it too.
    pub(super) fn resolve(&self, live: VolumeAttachment) {
        self.doubted.lock().remove(live.metadata.name.as_deref().unwrap_or_default());
        self.attachments.observe_write(live);
    }

    pub(super) fn doubted_on(&self, node: &str) -> Vec<Key> {
        if self.doubted.lock().is_empty() {
            return Vec::new();
        }
        let attachments = self.attachments_by_node.get(node);
        let doubted = self.doubted.lock();
        let names = attachments.iter().filter_map(|a| a.metadata.name.as_ref());
        names.filter(|name| doubted.contains(*name)).map(Key::cluster).collect()
    }

    fn state(&self, attachment: &VolumeAttachment) -> State {
        let name = attachment.metadata.name.as_deref().unwrap_or_default();
        if self.doubted.lock().contains(name) { State::Leaving } else { state(attachment) }
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

    /// The volume of an attachment. One whose PersistentVolume is gone says nothing any more.
    pub(super) fn unique_of_attachment(&self, attachment: &VolumeAttachment) -> Option<String> {
        match attachment.spec.source.persistent_volume_name.as_deref() {
            Some(volume) => self.unique_of_volume(volume),
            None => flex::inline_unique_volume_name(attachment),
        }
    }

    /// The volumes of a pod that a driver may have to attach.
    pub(super) fn uniques_of_pod(&self, pod: &Pod) -> Vec<String> {
        let claims = pod::claim_volumes(pod).into_iter().filter_map(|v| self.unique_of_claim(&v.claim));
        claims.chain(inline_volumes(pod).into_iter().map(|(unique, _)| unique)).collect()
    }

    /// Volumes that need another look when the node comes, goes, or changes who attaches for it.
    pub(super) fn volumes_near(&self, node: &str) -> BTreeSet<String> {
        let attached = self.attachments_by_node.get(node);
        let attached = attached.iter().filter_map(|a| self.unique_of_attachment(a));
        let pods = self.pods_by_node.get(node);
        attached.chain(pods.iter().flat_map(|p| self.uniques_of_pod(p))).collect()
    }

    /// The volumes that this driver attaches, or would: stored ones, and those that pods describe themselves.
    pub(super) fn volumes_of_driver(&self, driver: &str) -> BTreeSet<String> {
        let stored = self.volumes_by_driver.get(driver).into_iter().filter_map(|v| unique(&v));
        let inline = self.pods.each().flat_map(|pod| inline_volumes(&pod)).map(|(unique, _)| unique);
        let attached_by =
            |unique: &String| flex::attacher_and_handle(unique).map(|(attacher, _)| attacher) == Some(driver);
        stored.chain(inline.filter(attached_by)).collect()
    }

    /// Has no pod the claim, and no node its volume? Then it is nothing to us what becomes of them.
    pub(super) fn is_claim_at_rest(&self, claim: &PersistentVolumeClaim) -> bool {
        let attached = volume_name(claim).is_some_and(|name| {
            let unique = self.unique_of_volume(name);
            self.attachments_by_volume.has(name) || unique.is_some_and(|unique| self.attachments_by_inline.has(&unique))
        });
        !attached && !self.pods_by_claim.has(&Key::of(&claim.metadata).to_string())
    }

    /// The same of a volume, and of the claims that it was and is meant for.
    pub(super) fn is_volume_at_rest(&self, change: &Change<PersistentVolume>) -> bool {
        let old = match change {
            Change::Applied { old, .. } => old.as_deref(),
            Change::Deleted(_) => None,
        };
        let volume = change.object().as_ref();
        let mut claims = old.into_iter().chain([volume]).filter_map(claim_ref).map(claim_ref_key);
        !self.attachments_by_volume.has(volume.metadata.name.as_deref().unwrap_or_default())
            && !unique(volume).is_some_and(|unique| self.attachments_by_inline.has(&unique))
            && !claims.any(|claim| self.pods_by_claim.has(&claim.to_string()))
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
        let named = names.flat_map(|name| self.attachments_by_volume.get(name));
        named.chain(self.attachments_by_inline.get(unique)).collect()
    }

    /// `None` for a volume whose name is that of nothing that can be attached.
    pub(super) fn volume(&self, unique: &str, now: Timestamp) -> Option<VolumeSeen> {
        let volumes = self.volumes_by_unique.get(unique);
        let inline = self.inline(unique);
        let (driver, handle) = flex::attacher_and_handle(unique)?;
        let shared = |v: &PersistentVolume| {
            // The modes as the driver is told them.
            let modes = migrate::translate_volume(v).ok().and_then(|v| v.spec.as_ref()?.access_modes.clone());
            access::allows_many_nodes(&modes.unwrap_or_default())
        };
        let mut attachments = self.attachments_of(unique);
        attachments.sort_by_key(|a| (a.metadata.creation_timestamp.clone(), a.metadata.name.clone()));
        let attached = attachments.iter().map(|a| Attached {
            node: a.spec.node_name.clone(),
            state: self.state(a),
            error: a.status.as_ref().and_then(|s| s.attach_error.as_ref()?.message.clone()),
            age: a.metadata.creation_timestamp.as_ref().map_or_else(Duration::default, |made| elapsed(made.0, now)),
        });
        Some(VolumeSeen {
            unique: unique.to_owned(),
            many_nodes: volumes.iter().all(|v| shared(v)) && inline.iter().all(|(_, v)| shared(v)),
            attachable: self.attaches(driver, handle) == Attaches::Yes,
            wanted: self.wanted(unique),
            attached: attached.collect(),
        })
    }

    /// The pods that need the volume, on nodes that leave attaching to this controller.
    fn wanted(&self, unique: &str) -> Vec<Wanted> {
        let claimed = self.volumes_by_unique.get(unique).into_iter().flat_map(|v| self.wanted_by_claim(&v));
        let inline = self.inline(unique).into_iter().filter(|(pod, _)| !pod::is_terminated(pod));
        let inline = inline.filter_map(|(pod, volume)| self.want(&pod, Source::Inline(Box::new(volume.spec?))));
        claimed.chain(inline).collect()
    }

    fn want(&self, pod: &Pod, source: Source) -> Option<Wanted> {
        let node = pod::node_name(pod).filter(|n| self.is_managed(n))?;
        Some(Wanted {
            since: pod.metadata.creation_timestamp.as_ref().map(|t| t.0),
            pod: Key::of(&pod.metadata),
            node: node.to_owned(),
            source,
        })
    }

    /// The pods that describe this volume themselves.
    fn inline(&self, unique: &str) -> Vec<(Arc<Pod>, PersistentVolume)> {
        let pods = self.pods_by_inline.get(unique).into_iter();
        let described = |pod: Arc<Pod>| {
            let volume = inline_volumes(&pod).into_iter().find(|(found, _)| found == unique)?.1;
            Some((pod, volume))
        };
        pods.filter_map(described).collect()
    }

    fn wanted_by_claim(&self, volume: &PersistentVolume) -> Vec<Wanted> {
        let Some(claim) = claim_ref(volume).map(claim_ref_key) else { return Vec::new() };
        let Some(bound) = self.claims.get(&claim).filter(|c| is_bound_pair(volume, c)) else { return Vec::new() };
        let pods = self.pods_by_claim.get(&claim.to_string());
        let needs = |pod: &&Arc<Pod>| !pod::is_terminated(pod) && may_use(pod, &claim, &bound);
        pods.iter().filter(needs).filter_map(|pod| self.want(pod, source(volume, pod, &claim))).collect()
    }

    fn is_managed(&self, node: &str) -> bool {
        self.nodes.named(node).is_some_and(|n| is_managed(&n))
    }

    /// A driver nobody described is taken to need attaching.
    fn attaches(&self, driver: &str, handle: &str) -> Attaches {
        if driver == flex::ATTACHER {
            let (driver, _) = flex::split_handle(handle).unwrap_or_default();
            return match self.flex.state(driver) {
                cleat_flex::DriverState::Ready(capabilities) if !capabilities.attach => Attaches::No,
                cleat_flex::DriverState::Starting => Attaches::Unknown,
                _ => Attaches::Yes,
            };
        }
        match self.drivers.named(driver).is_none_or(|d| d.spec.attach_required.unwrap_or(true)) {
            true => Attaches::Yes,
            false => Attaches::No,
        }
    }

    pub(super) fn node(&self, name: &str, now: Timestamp) -> NodeSeen {
        let node = self.nodes.named(name);
        let in_use = node.as_deref().map(in_use).or_else(|| self.last_words.lock().get(name).cloned());
        let in_use: Option<HashSet<String>> = in_use.map(|names| names.into_iter().collect());
        let mut attachments = self.attachments_by_node.get(name);
        attachments.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let volumes = attachments.into_iter().filter_map(|attachment| {
            let unique = self.unique_of_attachment(&attachment)?;
            let (driver, handle) = flex::attacher_and_handle(&unique)?;
            let name_of_it = attachment.metadata.name.clone()?;
            let attaches = self.attaches(driver, handle) != Attaches::No;
            let wanted = attaches && self.wanted(&unique).iter().any(|w| w.node == name);
            if !wanted && !self.ours.lock().contains(&name_of_it) {
                return None;
            }
            Some(NodeVolume {
                device: device(&attachment),
                state: self.state(&attachment),
                wanted: self.need(&name_of_it, wanted, now),
                usage: match &in_use {
                    None => Usage::Unknown,
                    Some(in_use) if in_use.contains(&unique) => Usage::InUse,
                    Some(_) => Usage::NotInUse,
                },
                attachment: name_of_it,
                unique,
            })
        });
        NodeSeen {
            name: name.to_owned(),
            volumes: volumes.collect(),
            reported: node.as_deref().map(reported),
            managed: node.as_deref().is_none_or(is_managed),
            ready: node.as_deref().is_some_and(condition::node_is_ready),
            out_of_service: node.as_deref().is_some_and(is_out_of_service),
        }
    }

    fn need(&self, attachment: &str, wanted: bool, now: Timestamp) -> Need {
        let mut unwanted = self.unwanted.lock();
        if wanted {
            unwanted.remove(attachment);
            return Need::Wanted;
        }
        Need::Unwanted(elapsed(*unwanted.entry(attachment.to_owned()).or_insert(now), now))
    }

    /// The pods that wait for the volume on `node`; for events.
    pub(super) fn waiting(&self, unique: &str, node: &str) -> Vec<Arc<Pod>> {
        let claims = self.volumes_by_unique.get(unique).into_iter();
        let claims = claims.filter_map(|v| claim_ref(&v).map(|reference| claim_ref_key(reference).to_string()));
        let pods = claims.flat_map(|claim| self.pods_by_claim.get(&claim)).chain(self.pods_by_inline.get(unique));
        pods.filter(|pod| pod::node_name(pod) == Some(node) && !pod::is_terminated(pod)).collect()
    }

    /// The name of this volume that people know.
    pub(super) fn shown(&self, unique: &str) -> String {
        let volumes = self.volumes_by_unique.get(unique);
        let inline = self.inline(unique);
        let volumes = volumes.iter().map(AsRef::as_ref).chain(inline.iter().map(|(_, volume)| volume));
        volumes.filter_map(|v| v.metadata.name.clone()).min().unwrap_or_else(|| unique.to_owned())
    }
}

fn elapsed(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}

/// A claim made for one pod serves that pod only.
fn may_use(pod: &Pod, claim: &Key, bound: &PersistentVolumeClaim) -> bool {
    let owned = || bound.metadata.owner_references.iter().flatten().any(|o| o.uid == pod.metadata.uid());
    pod::claim_volumes(pod).iter().filter(|v| v.claim == *claim).all(|v| !v.ephemeral || owned())
}

/// A volume that cannot be understood is nobody's.
fn csi_name<T>(volume: &PersistentVolume, name: impl FnOnce(&str, &str) -> T) -> Option<T> {
    let csi = migrate::csi_source(volume).ok().flatten()?;
    Some(name(&csi.driver, &csi.volume_handle))
}

fn unique(volume: &PersistentVolume) -> Option<String> {
    let flex = FlexVolume::from_volume(volume, false).map(|flex| flex.unique_volume_name());
    flex.or_else(|| csi_name(volume, names::unique_volume_name))
}

fn driver(volume: &PersistentVolume) -> Option<String> {
    let flex = volume.spec.as_ref().is_some_and(|spec| spec.flex_volume.is_some());
    flex.then(|| flex::ATTACHER.to_owned()).or_else(|| csi_name(volume, |driver, _| driver.to_owned()))
}

/// How a pod's volume is to be described to whoever attaches it.
fn source(volume: &PersistentVolume, pod: &Pod, claim: &Key) -> Source {
    let read_only = pod::claim_volumes(pod).iter().any(|v| v.claim == *claim && v.read_only);
    match FlexVolume::from_volume(volume, read_only) {
        Some(flex) => Source::Inline(Box::new(flex.to_inline_spec())),
        None => Source::Volume(volume.metadata.name.clone().unwrap_or_default()),
    }
}

/// What the pod describes itself and somebody attaches: FlexVolumes, and the disks of plugins that moved.
fn inline_volumes(pod: &Pod) -> Vec<(String, PersistentVolume)> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    let described = volumes.filter_map(|volume| match FlexVolume::from_pod_volume(volume) {
        Some(flex) => Some((flex.unique_volume_name(), stored(&flex))),
        None => {
            let translated = migrate::translate_inline_volume(volume, namespace).ok().flatten()?;
            Some((unique(&translated)?, translated))
        }
    });
    described.collect()
}

/// A pod's own volume as a PersistentVolume that nobody stored.
fn stored(flex: &FlexVolume) -> PersistentVolume {
    let metadata = ObjectMeta { name: Some(flex.volume.clone()), ..ObjectMeta::default() };
    PersistentVolume { metadata, spec: Some(flex.to_inline_spec()), status: None }
}

/// Whether volumes of a driver are attached to nodes at all.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attaches {
    Yes,
    No,
    /// It will say soon. Until then nothing is begun, and nothing taken away.
    Unknown,
}

fn device(attachment: &VolumeAttachment) -> String {
    // Drivers of CSI tell their nodes in other ways.
    let told = FlexVolume::from_attachment(attachment).and(attachment.status.as_ref());
    let metadata = told.and_then(|status| status.attachment_metadata.as_ref());
    metadata.and_then(|metadata| metadata.get(flex::DEVICE_PATH_KEY).cloned()).unwrap_or_default()
}

pub(super) fn is_managed(node: &Node) -> bool {
    node.metadata.annotation(annotation::CONTROLLER_MANAGED_ATTACH).is_some()
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

pub(super) fn reported(node: &Node) -> Vec<Told> {
    let attached = node.status.iter().flat_map(|s| s.volumes_attached.iter().flatten());
    attached.map(|v| Told { unique: v.name.clone(), device: v.device_path.clone() }).collect()
}

fn is_out_of_service(node: &Node) -> bool {
    let mut taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    taints.any(|t| t.key == taint::OUT_OF_SERVICE)
}
