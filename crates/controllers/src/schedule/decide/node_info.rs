//! One node as the scheduler sees it: what the node offers, and what the pods assigned to it use. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use cleat_api::condition::node_ready;
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{annotation, label, taint};
use cleat_api::{matching, migrate};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Taint};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};

use super::resources::{HostPort, InlineDisk, PodResources, ResourceAmounts, add, amounts, subtract};
use super::unschedulable::ClusterEvents;

/// A volume as its driver identifies it. For a volume that is not provisioned yet, the claim's key stands for the
/// handle.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct VolumeHandle {
    pub(super) driver: String,
    pub(super) id: String,
}

impl VolumeHandle {
    /// `None` for volumes without a CSI driver.
    pub(super) fn of(volume: &PersistentVolume) -> Option<Self> {
        let csi = migrate::csi_source(volume).ok().flatten()?;
        Some(Self { driver: csi.driver.clone(), id: csi.volume_handle.clone() })
    }

    /// `None` if the class's volumes are not provisioned by a CSI driver.
    pub(super) fn to_be_provisioned(claim: &PersistentVolumeClaim, class: &StorageClass) -> Option<Self> {
        let driver = provisioning_driver(class);
        let is_driver = !driver.starts_with("kubernetes.io/");
        let id = || format!("claim {}", Key::of(&claim.metadata));
        is_driver.then(|| Self { driver: driver.to_owned(), id: id() })
    }
}

/// The driver that provisions a class's volumes. For the class of a migrated in-tree plugin it is the CSI driver.
pub(super) fn provisioning_driver(class: &StorageClass) -> &str {
    migrate::driver_of(&class.provisioner).unwrap_or(&class.provisioner)
}

/// Everything about one node name. Pods, CSINodes and attachments may refer to it before the Node object arrives.
#[derive(Debug, Default)]
pub(super) struct NodeInfo {
    /// `None` if the Node object does not exist.
    pub(super) node: Option<ParsedNode>,
    pub(super) usage: NodeUsage,
    /// The drivers installed on the node, each with the number of volumes it can attach; `None` for no limit.
    pub(super) driver_limits: HashMap<String, Option<usize>>,
    /// In-tree plugins whose volumes are handled by their CSI drivers on this node.
    pub(super) migrated_plugins: BTreeSet<String>,
    /// Driver and PersistentVolume of the node's VolumeAttachments, by attachment name.
    pub(super) attachments: HashMap<String, (String, String)>,
}

/// A Node object, with the values parsed that every decision reads.
#[derive(Debug)]
pub(super) struct ParsedNode {
    pub(super) object: Arc<Node>,
    pub(super) taints: Vec<Taint>,
    pub(super) is_cordoned: bool,
    pub(super) allocatable: ResourceAmounts,
    /// The keys of the CSIStorageCapacity objects whose topology includes this node, by class.
    pub(super) capacities: HashMap<String, BTreeSet<Key>>,
}

/// What the pods assigned to a node use together.
#[derive(Debug, Default)]
pub(super) struct NodeUsage {
    pub(super) requests: ResourceAmounts,
    /// See [`PodResources::nonzero_requests`].
    pub(super) nonzero_requests: (i64, i64),
    pub(super) pods: HashSet<Key>,
    pub(super) ports: Vec<HostPort>,
    pub(super) disks: Vec<InlineDisk>,
    /// The number of pods that use each volume, by driver and handle.
    pub(super) volumes: HashMap<String, HashMap<String, usize>>,
}

impl NodeInfo {
    /// Returns true if the volume's node affinity includes the node. If the node handles the volume's in-tree plugin by
    /// its CSI driver, the affinity is translated to the driver's topology first.
    pub(super) fn can_reach(&self, node: &Node, volume: &PersistentVolume) -> bool {
        let translated = migrate::translate_volume(volume).ok().filter(|translated| {
            let driver = translated.spec.as_ref().and_then(|s| s.csi.as_ref()).map(|csi| csi.driver.as_str());
            let migration = migrate::MIGRATED_PLUGINS.iter().find(|migration| Some(migration.driver) == driver);
            migration.is_some_and(|migration| self.migrated_plugins.contains(migration.plugin))
        });
        matching::is_accessible_from(translated.as_deref().unwrap_or(volume), node)
    }
}

impl ParsedNode {
    pub(super) fn of(node: Arc<Node>) -> Self {
        let spec = node.spec.as_ref();
        let mut taints = spec.and_then(|s| s.taints.clone()).unwrap_or_default();
        // The node lifecycle controller may add the taint later; until then no pod may be scheduled there either.
        let implied = match node_ready(&node) {
            Some("True") => None,
            Some("Unknown") => Some(taint::UNREACHABLE),
            _ => Some(taint::NOT_READY),
        };
        if let Some(key) = implied.filter(|key| !taints.iter().any(|t| t.key == *key)) {
            taints.push(Taint { key: key.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() });
        }
        let is_cordoned = spec.and_then(|s| s.unschedulable).unwrap_or(false) || node.metadata.is_deleting();
        let allocatable = amounts(node.status.as_ref().and_then(|s| s.allocatable.as_ref()));
        Self { taints, is_cordoned, allocatable, capacities: HashMap::new(), object: node }
    }

    pub(super) fn label(&self, key: &str) -> Option<&str> {
        self.object.metadata.labels.as_ref()?.get(key).map(String::as_str)
    }

    pub(super) fn hostname(&self) -> Option<&str> {
        self.label(label::HOSTNAME)
    }

    /// The events that the change from `before` to this Node stands for.
    pub(super) fn events_since(&self, before: Option<&Self>) -> ClusterEvents {
        let Some(before) = before else { return ClusterEvents::ANY };
        ClusterEvents::NODE_LABELS.only_if(self.object.metadata.labels != before.object.metadata.labels)
            | ClusterEvents::NODE_TAINTS.only_if(self.taints != before.taints || self.is_cordoned != before.is_cordoned)
            | ClusterEvents::NODE_RESOURCES.only_if(self.allocatable != before.allocatable)
    }
}

pub(super) fn driver_limits(csi_node: &CSINode) -> HashMap<String, Option<usize>> {
    let limit = |count: Option<i32>| count.and_then(|count| usize::try_from(count).ok());
    let drivers = csi_node.spec.drivers.iter();
    drivers.map(|d| (d.name.clone(), limit(d.allocatable.as_ref().and_then(|a| a.count)))).collect()
}

pub(super) fn migrated_plugins(csi_node: &CSINode) -> BTreeSet<String> {
    let listed = csi_node.metadata.annotation(annotation::MIGRATED_PLUGINS).unwrap_or_default();
    listed.split(',').filter(|plugin| !plugin.is_empty()).map(ToOwned::to_owned).collect()
}

impl NodeUsage {
    pub(super) fn add_pod(&mut self, pod: &Key, resources: &PodResources) {
        self.pods.insert(pod.clone());
        add(&mut self.requests, &resources.requests);
        let (cpu, memory) = resources.nonzero_requests;
        self.nonzero_requests = (self.nonzero_requests.0 + cpu, self.nonzero_requests.1 + memory);
        self.ports.extend(resources.ports.iter().cloned());
        self.disks.extend(resources.disks.iter().cloned());
    }

    pub(super) fn remove_pod(&mut self, pod: &Key, resources: &PodResources) {
        self.pods.remove(pod);
        subtract(&mut self.requests, &resources.requests);
        let (cpu, memory) = resources.nonzero_requests;
        self.nonzero_requests = (self.nonzero_requests.0 - cpu, self.nonzero_requests.1 - memory);
        for port in &resources.ports {
            remove_one(&mut self.ports, port);
        }
        for disk in &resources.disks {
            remove_one(&mut self.disks, disk);
        }
    }

    pub(super) fn add_volumes(&mut self, volumes: &[VolumeHandle]) {
        for volume in volumes {
            let pods_by_id = self.volumes.entry(volume.driver.clone()).or_default();
            *pods_by_id.entry(volume.id.clone()).or_default() += 1;
        }
    }

    pub(super) fn remove_volumes(&mut self, volumes: &[VolumeHandle]) {
        for volume in volumes {
            let Some(pods_by_id) = self.volumes.get_mut(&volume.driver) else { continue };
            if let Some(pods) = pods_by_id.get_mut(&volume.id) {
                *pods -= 1;
                if *pods == 0 {
                    pods_by_id.remove(&volume.id);
                }
            }
        }
    }
}

fn remove_one<T: PartialEq>(list: &mut Vec<T>, item: &T) {
    if let Some(at) = list.iter().position(|other| other == item) {
        list.swap_remove(at);
    }
}
