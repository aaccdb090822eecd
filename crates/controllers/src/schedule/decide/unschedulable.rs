//! Why a pod gets no node, with the messages of Kubernetes, and which cluster events can change that. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::BitOr;

/// A set of kinds of changes in the cluster. A pending pod is queued again when one of the kinds happens that can
/// resolve its rejections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterEvents(u8);

impl ClusterEvents {
    /// Only a change of the pod itself or of its claims helps. Those always queue the pod.
    pub const NONE: Self = Self(0);
    pub const NODE_LABELS: Self = Self(1);
    /// Taints, readiness and cordons of nodes.
    pub const NODE_TAINTS: Self = Self(2);
    /// Allocatable or released resources, ports and disks of nodes.
    pub const NODE_RESOURCES: Self = Self(4);
    /// A pod that used a ReadWriteOncePod claim is gone.
    pub const CLAIM_RELEASED: Self = Self(8);
    /// Free volumes, storage classes, storage capacity.
    pub const STORAGE: Self = Self(16);
    /// Drivers on nodes, and their volume limits.
    pub const NODE_DRIVERS: Self = Self(32);
    pub const ANY: Self = Self(63);

    pub fn only_if(self, condition: bool) -> Self {
        if condition { self } else { Self::NONE }
    }

    pub fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for ClusterEvents {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Why one node cannot run a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeRejection {
    Unschedulable,
    UntoleratedTaint,
    NodeAffinity,
    PortConflict,
    TooManyPods,
    /// The name of the resource.
    Insufficient(String),
    DiskConflict,
    /// Another pod uses a ReadWriteOncePod claim of the pod.
    ClaimInUse,
    VolumeLimit,
    /// The name of the driver.
    DriverMissing(String),
    VolumeNotFound,
    VolumeAffinity,
    NoMatchingVolume,
    InsufficientStorage,
    VolumeZone,
}

impl NodeRejection {
    /// The events that can resolve this rejection.
    pub fn resolving_events(&self) -> ClusterEvents {
        match self {
            Self::Unschedulable | Self::UntoleratedTaint => ClusterEvents::NODE_TAINTS,
            Self::NodeAffinity => ClusterEvents::NODE_LABELS,
            Self::PortConflict | Self::TooManyPods | Self::Insufficient(_) | Self::DiskConflict => {
                ClusterEvents::NODE_RESOURCES
            }
            Self::ClaimInUse => ClusterEvents::CLAIM_RELEASED,
            Self::VolumeLimit => ClusterEvents::NODE_DRIVERS | ClusterEvents::NODE_RESOURCES,
            Self::DriverMissing(_) => ClusterEvents::NODE_DRIVERS,
            Self::VolumeNotFound => ClusterEvents::STORAGE,
            Self::VolumeAffinity | Self::NoMatchingVolume | Self::InsufficientStorage | Self::VolumeZone => {
                ClusterEvents::STORAGE | ClusterEvents::NODE_LABELS
            }
        }
    }
}

impl fmt::Display for NodeRejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unschedulable => "node(s) were unschedulable",
            // Does not name the taints: not every reader of the pod may read nodes.
            Self::UntoleratedTaint => "node(s) had untolerated taint(s)",
            Self::NodeAffinity => "node(s) didn't match Pod's node affinity/selector",
            Self::PortConflict => "node(s) didn't have free ports for the requested pod ports",
            Self::TooManyPods => "Too many pods",
            Self::Insufficient(resource) => return write!(f, "Insufficient {resource}"),
            Self::DiskConflict => "node(s) had no available disk",
            Self::ClaimInUse => {
                "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by \
                 another pod"
            }
            Self::VolumeLimit => "node(s) exceed max volume count",
            Self::DriverMissing(driver) => return write!(f, "{driver} CSI driver is not installed on the node"),
            Self::VolumeNotFound => "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)",
            Self::VolumeAffinity => "node(s) didn't match PersistentVolume's node affinity",
            Self::NoMatchingVolume => "node(s) didn't find available persistent volumes to bind",
            Self::InsufficientStorage => "node(s) did not have enough free storage",
            Self::VolumeZone => "node(s) had no available volume zone",
        })
    }
}

/// A problem with a pod's claims that excludes all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimProblem {
    EphemeralNotCreated(String),
    NotFound(String),
    Lost {
        claim: String,
        volume: String,
    },
    Deleting(String),
    /// The claim of an ephemeral volume belongs to another owner.
    NotOwned {
        claim: String,
        pod: String,
    },
    /// A claim is not bound, and its class does not wait for a consumer.
    Unbound,
}

impl fmt::Display for ClaimProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EphemeralNotCreated(claim) => {
                write!(f, "waiting for ephemeral volume controller to create the persistentvolumeclaim {claim:?}")
            }
            Self::NotFound(claim) => write!(f, "persistentvolumeclaim {claim:?} not found"),
            Self::Lost { claim, volume } => {
                write!(f, "persistentvolumeclaim {claim:?} bound to non-existent persistentvolume {volume:?}")
            }
            Self::Deleting(claim) => write!(f, "persistentvolumeclaim {claim:?} is being deleted"),
            Self::NotOwned { claim, pod } => {
                write!(f, "PVC {claim} was not created for pod {pod} (pod is not owner)")
            }
            Self::Unbound => f.write_str("pod has unbound immediate PersistentVolumeClaims"),
        }
    }
}

/// Why no node can run the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unschedulable {
    NoNodes,
    Claims {
        nodes: usize,
        problem: ClaimProblem,
    },
    /// With the number of nodes for each rejection.
    Nodes {
        nodes: usize,
        rejections: BTreeMap<NodeRejection, usize>,
    },
}

impl Unschedulable {
    /// The events after which the pod must be tried again.
    pub fn resolving_events(&self) -> ClusterEvents {
        match self {
            Self::NoNodes => ClusterEvents::ANY,
            // A change of the class can make an unbound claim one that waits for its consumer.
            Self::Claims { problem: ClaimProblem::Unbound, .. } => ClusterEvents::STORAGE,
            Self::Claims { .. } => ClusterEvents::NONE,
            Self::Nodes { rejections, .. } => {
                rejections.keys().fold(ClusterEvents::NONE, |all, rejection| all | rejection.resolving_events())
            }
        }
    }
}

impl fmt::Display for Unschedulable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNodes => f.write_str("no nodes available to schedule pods"),
            Self::Claims { nodes, problem } => write!(f, "0/{nodes} nodes are available: {problem}."),
            Self::Nodes { nodes, rejections } => {
                let mut counted: Vec<String> =
                    rejections.iter().map(|(rejection, count)| format!("{count} {rejection}")).collect();
                counted.sort();
                write!(f, "0/{nodes} nodes are available: {}.", counted.join(", "))
            }
        }
    }
}
