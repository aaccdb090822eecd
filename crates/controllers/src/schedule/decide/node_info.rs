//! One node as the scheduler sees it: what it offers, and what the pods placed there take. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use cleat_api::condition::node_ready;
use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::{annotation, label, taint};
use cleat_api::{matching, migrate};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Taint};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};

use super::demand::{Amounts, Demand, Disk, Port, add, amounts, subtract};
use super::why::Causes;

/// A volume as a driver knows it; for one that is still to be made, its claim stands for the handle.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Handle {
    pub(super) driver: String,
    pub(super) id: String,
}

impl Handle {
    pub(super) fn of(volume: &PersistentVolume) -> Option<Self> {
        let csi = migrate::csi(volume).ok().flatten()?;
        Some(Self { driver: csi.driver.clone(), id: csi.volume_handle.clone() })
    }

    pub(super) fn to_be_made(claim: &PersistentVolumeClaim, class: &StorageClass) -> Option<Self> {
        let driver = driver_of(class);
        let is_driver = !driver.starts_with("kubernetes.io/");
        let id = || format!("claim {}", Key::of(&claim.metadata));
        is_driver.then(|| Self { driver: driver.to_owned(), id: id() })
    }
}

/// The driver that makes a class's volumes; that of an old plugin's class is the one that took over.
pub(super) fn driver_of(class: &StorageClass) -> &str {
    migrate::driver_of(&class.provisioner).unwrap_or(&class.provisioner)
}

/// Everything under one node's name. What pods, drivers and attachments say can be known before the Node itself.
#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) facts: Option<Facts>,
    pub(super) load: Load,
    /// How many volumes each installed driver takes here; none is no limit.
    pub(super) drivers: HashMap<String, Option<usize>>,
    /// Old plugins whose volumes are taken for their drivers' here.
    pub(super) migrated: BTreeSet<String>,
    /// The volumes of VolumeAttachments for this node, by attachment: driver and PersistentVolume.
    pub(super) attached: HashMap<String, (String, String)>,
}

#[derive(Debug)]
pub(super) struct Facts {
    pub(super) node: Arc<Node>,
    pub(super) taints: Vec<Taint>,
    pub(super) is_cordoned: bool,
    pub(super) allocatable: Amounts,
    /// The CSIStorageCapacity objects that speak of this node, by class.
    pub(super) capacities: HashMap<String, BTreeSet<Key>>,
}

/// What the pods of a node take together.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) used: Amounts,
    pub(super) usual: (i64, i64),
    pub(super) pods: HashSet<Key>,
    pub(super) ports: Vec<Port>,
    pub(super) disks: Vec<Disk>,
    /// Volumes by driver, each with the number of pods that have it.
    pub(super) volumes: HashMap<String, HashMap<String, usize>>,
}

impl Host {
    /// The volume can be had here. One of an old plugin is in the zones of the driver that took over, if the node says so.
    pub(super) fn reaches(&self, node: &Node, volume: &PersistentVolume) -> bool {
        let moved = migrate::volume(volume).ok().filter(|moved| {
            let driver = moved.spec.as_ref().and_then(|s| s.csi.as_ref()).map(|csi| csi.driver.as_str());
            let plugin = migrate::ALL.iter().find(|moved| Some(moved.driver) == driver);
            plugin.is_some_and(|moved| self.migrated.contains(moved.plugin))
        });
        matching::reaches(moved.as_deref().unwrap_or(volume), node)
    }
}

impl Facts {
    pub(super) fn of(node: Arc<Node>) -> Self {
        let spec = node.spec.as_ref();
        let mut taints = spec.and_then(|s| s.taints.clone()).unwrap_or_default();
        // The taint that says so may come later; nobody is sent there meanwhile.
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
        Self { taints, is_cordoned, allocatable, capacities: HashMap::new(), node }
    }

    pub(super) fn label(&self, key: &str) -> Option<&str> {
        self.node.metadata.labels.as_ref()?.get(key).map(String::as_str)
    }

    pub(super) fn hostname(&self) -> Option<&str> {
        self.label(label::HOSTNAME)
    }

    /// What pods could hope for from this change.
    pub(super) fn news(&self, before: Option<&Self>) -> Causes {
        let Some(before) = before else { return Causes::ANY };
        Causes::LABELS.when(self.node.metadata.labels != before.node.metadata.labels)
            | Causes::TAINTS.when(self.taints != before.taints || self.is_cordoned != before.is_cordoned)
            | Causes::ROOM.when(self.allocatable != before.allocatable)
    }
}

pub(super) fn drivers(csi_node: &CSINode) -> HashMap<String, Option<usize>> {
    let limit = |count: Option<i32>| count.and_then(|count| usize::try_from(count).ok());
    let drivers = csi_node.spec.drivers.iter();
    drivers.map(|d| (d.name.clone(), limit(d.allocatable.as_ref().and_then(|a| a.count)))).collect()
}

pub(super) fn migrated(csi_node: &CSINode) -> BTreeSet<String> {
    let listed = csi_node.metadata.annotation(annotation::MIGRATED_PLUGINS).unwrap_or_default();
    listed.split(',').filter(|plugin| !plugin.is_empty()).map(ToOwned::to_owned).collect()
}

impl Load {
    pub(super) fn take(&mut self, pod: &Key, demand: &Demand) {
        self.pods.insert(pod.clone());
        add(&mut self.used, &demand.requests);
        self.usual = (self.usual.0 + demand.usual.0, self.usual.1 + demand.usual.1);
        self.ports.extend(demand.ports.iter().cloned());
        self.disks.extend(demand.disks.iter().cloned());
    }

    pub(super) fn give_back(&mut self, pod: &Key, demand: &Demand) {
        self.pods.remove(pod);
        subtract(&mut self.used, &demand.requests);
        self.usual = (self.usual.0 - demand.usual.0, self.usual.1 - demand.usual.1);
        for port in &demand.ports {
            remove_one(&mut self.ports, port);
        }
        for disk in &demand.disks {
            remove_one(&mut self.disks, disk);
        }
    }

    pub(super) fn take_volumes(&mut self, volumes: &[Handle]) {
        for volume in volumes {
            let of_driver = self.volumes.entry(volume.driver.clone()).or_default();
            *of_driver.entry(volume.id.clone()).or_default() += 1;
        }
    }

    pub(super) fn give_back_volumes(&mut self, volumes: &[Handle]) {
        for volume in volumes {
            let Some(of_driver) = self.volumes.get_mut(&volume.driver) else { continue };
            if let Some(pods) = of_driver.get_mut(&volume.id) {
                *pods -= 1;
                if *pods == 0 {
                    of_driver.remove(&volume.id);
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
