//! Why a pod has no node, in the words people know, and what could change it. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::BitOr;

/// What kind of change could make an unschedulable pod fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Causes(u8);

impl Causes {
    /// Nothing but a change of the pod itself or of its claims.
    pub const NONE: Self = Self(0);
    /// Labels of nodes.
    pub const LABELS: Self = Self(1);
    /// Taints, and what counts as one.
    pub const TAINTS: Self = Self(2);
    /// Room on nodes: resources, ports, disks.
    pub const ROOM: Self = Self(4);
    /// Another pod holds a claim that one pod may have.
    pub const EXCLUSIVE: Self = Self(8);
    /// Volumes, classes, free storage.
    pub const VOLUMES: Self = Self(16);
    /// Drivers on nodes, and how many volumes they take.
    pub const DRIVERS: Self = Self(32);
    pub const ANY: Self = Self(63);

    pub fn when(self, holds: bool) -> Self {
        if holds { self } else { Self::NONE }
    }

    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for Causes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Why one node does not take one pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    Cordoned,
    Taint,
    Affinity,
    Ports,
    TooManyPods,
    Insufficient(String),
    Disk,
    Exclusive,
    VolumeCount,
    DriverMissing(String),
    VolumeGone,
    VolumeAffinity,
    NoVolume,
    NoStorage,
    Zone,
}

impl Reason {
    pub fn cause(&self) -> Causes {
        match self {
            Self::Cordoned | Self::Taint => Causes::TAINTS,
            Self::Affinity => Causes::LABELS,
            Self::Ports | Self::TooManyPods | Self::Insufficient(_) | Self::Disk => Causes::ROOM,
            Self::Exclusive => Causes::EXCLUSIVE,
            Self::VolumeCount => Causes::DRIVERS | Causes::ROOM,
            Self::DriverMissing(_) => Causes::DRIVERS,
            Self::VolumeGone => Causes::VOLUMES,
            Self::VolumeAffinity | Self::NoVolume | Self::NoStorage | Self::Zone => Causes::VOLUMES | Causes::LABELS,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cordoned => "node(s) were unschedulable",
            // Which taints is the administrator's business, not that of everybody who may read the pod.
            Self::Taint => "node(s) had untolerated taint(s)",
            Self::Affinity => "node(s) didn't match Pod's node affinity/selector",
            Self::Ports => "node(s) didn't have free ports for the requested pod ports",
            Self::TooManyPods => "Too many pods",
            Self::Insufficient(resource) => return write!(f, "Insufficient {resource}"),
            Self::Disk => "node(s) had no available disk",
            Self::Exclusive => {
                "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by \
                 another pod"
            }
            Self::VolumeCount => "node(s) exceed max volume count",
            Self::DriverMissing(driver) => return write!(f, "{driver} CSI driver is not installed on the node"),
            Self::VolumeGone => "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)",
            Self::VolumeAffinity => "node(s) didn't match PersistentVolume's node affinity",
            Self::NoVolume => "node(s) didn't find available persistent volumes to bind",
            Self::NoStorage => "node(s) did not have enough free storage",
            Self::Zone => "node(s) had no available volume zone",
        })
    }
}

/// What is wrong with a pod's claims before any node is looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unready {
    Ephemeral(String),
    Missing(String),
    Lost { claim: String, volume: String },
    Deleting(String),
    Foreign { claim: String, pod: String },
    Unbound,
}

impl fmt::Display for Unready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ephemeral(claim) => {
                write!(f, "waiting for ephemeral volume controller to create the persistentvolumeclaim {claim:?}")
            }
            Self::Missing(claim) => write!(f, "persistentvolumeclaim {claim:?} not found"),
            Self::Lost { claim, volume } => {
                write!(f, "persistentvolumeclaim {claim:?} bound to non-existent persistentvolume {volume:?}")
            }
            Self::Deleting(claim) => write!(f, "persistentvolumeclaim {claim:?} is being deleted"),
            Self::Foreign { claim, pod } => {
                write!(f, "PVC {claim} was not created for pod {pod} (pod is not owner)")
            }
            Self::Unbound => f.write_str("pod has unbound immediate PersistentVolumeClaims"),
        }
    }
}

/// Why no node takes the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    NoNodes,
    Claims { nodes: usize, unready: Unready },
    Nodes { nodes: usize, reasons: BTreeMap<Reason, usize> },
}

impl Why {
    pub fn causes(&self) -> Causes {
        match self {
            Self::NoNodes => Causes::ANY,
            // Whether an unbound claim waits for its pod is up to its class.
            Self::Claims { unready: Unready::Unbound, .. } => Causes::VOLUMES,
            Self::Claims { .. } => Causes::NONE,
            Self::Nodes { reasons, .. } => reasons.keys().fold(Causes::NONE, |all, reason| all | reason.cause()),
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNodes => f.write_str("no nodes available to schedule pods"),
            Self::Claims { nodes, unready } => write!(f, "0/{nodes} nodes are available: {unready}."),
            Self::Nodes { nodes, reasons } => {
                let mut counted: Vec<String> =
                    reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
                counted.sort();
                write!(f, "0/{nodes} nodes are available: {}.", counted.join(", "))
            }
        }
    }
}
