//! Annotations, labels, finalizers and condition types, as they stand on the wire.

pub mod annotation {
    pub const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
    pub const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
    pub const PRE_RESIZE_CAPACITY: &str = "volume.alpha.kubernetes.io/pre-resize-capacity";
    pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
    pub const MIGRATED_TO: &str = "pv.kubernetes.io/migrated-to";
    pub const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
    pub const STORAGE_PROVISIONER_BETA: &str = "volume.beta.kubernetes.io/storage-provisioner";
    pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
    pub const SELECTED_NODE_ALPHA: &str = "volume.alpha.kubernetes.io/selected-node";
    pub const STORAGE_CLASS_BETA: &str = "volume.beta.kubernetes.io/storage-class";
    pub const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";
    pub const DEFAULT_CLASS_BETA: &str = "storageclass.beta.kubernetes.io/is-default-class";
    pub const DELETION_SECRET_NAME: &str = "volume.kubernetes.io/provisioner-deletion-secret-name";
    pub const DELETION_SECRET_NAMESPACE: &str = "volume.kubernetes.io/provisioner-deletion-secret-namespace";
    pub const MODIFY_SECRET_NAME: &str = "volume.kubernetes.io/controller-modify-secret-name";
    pub const MODIFY_SECRET_NAMESPACE: &str = "volume.kubernetes.io/controller-modify-secret-namespace";
    /// On a VolumeSnapshotContent: a volume of another mode may be made of it.
    pub const ALLOW_MODE_CHANGE: &str = "snapshot.storage.kubernetes.io/allow-volume-mode-change";
    /// On a VolumeAttachment: the CSI node id that ControllerPublishVolume was called with.
    pub const CSI_NODE_ID: &str = "csi.alpha.kubernetes.io/node-id";
    /// On a Node: a JSON map from driver name to CSI node id.
    pub const NODE_CSI_IDS: &str = "csi.volume.kubernetes.io/nodeid";
    /// On a Node: the attach/detach controller is in charge of its volumes.
    pub const CONTROLLER_MANAGED_ATTACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
    /// On a CSINode: the old plugins, with commas between them, whose volumes the node takes as their drivers' volumes.
    pub const MIGRATED_PLUGINS: &str = "storage.alpha.kubernetes.io/migrated-plugins";
    /// What the controllers write where only the presence of an annotation counts.
    pub const YES: &str = "yes";
}

pub mod finalizer {
    pub const PVC_PROTECTION: &str = "kubernetes.io/pvc-protection";
    pub const PV_PROTECTION: &str = "kubernetes.io/pv-protection";
    pub const VAC_PROTECTION: &str = "kubernetes.io/vac-protection";
    /// On a claim that others are cloned from.
    pub const CLONING: &str = "provisioner.storage.kubernetes.io/cloning-protection";
    /// On a snapshot that claims are restored from.
    pub const RESTORING: &str = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection";
    pub const PROVISIONER: &str = "external-provisioner.volume.kubernetes.io/finalizer";
    /// On a volume that a plugin inside Kubernetes was to delete.
    pub const IN_TREE: &str = "kubernetes.io/pv-controller";
    /// On a claim: a volume may be in the making for it that no PersistentVolume records yet.
    pub const PROVISIONING: &str = "cleat.dev/provisioning";
}

pub mod label {
    /// On a CSIStorageCapacity: the driver it is about, and who keeps it.
    pub const CAPACITY_DRIVER: &str = "csi.storage.k8s.io/drivername";
    pub const CAPACITY_MANAGER: &str = "csi.storage.k8s.io/managed-by";
    pub const HOSTNAME: &str = "kubernetes.io/hostname";
    pub const OS: &str = "kubernetes.io/os";
    pub const ARCH: &str = "kubernetes.io/arch";
    pub const ZONE: &str = "topology.kubernetes.io/zone";
    pub const REGION: &str = "topology.kubernetes.io/region";
    pub const ZONE_BETA: &str = "failure-domain.beta.kubernetes.io/zone";
    pub const REGION_BETA: &str = "failure-domain.beta.kubernetes.io/region";
}

pub mod taint {
    pub const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
    /// Every node is created with it.
    pub const NOT_READY: &str = "node.kubernetes.io/not-ready";
    pub const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
    pub const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
}

/// The claim condition that says whether no pod uses the claim.
pub const UNUSED: &str = "Unused";

/// The pod condition that says whether every volume of the pod is mounted on its node.
pub const VOLUMES_MOUNTED: &str = "cleat.dev/VolumesMounted";

/// The key in `spec.csi.volumeAttributes` that names the provisioner instance.
pub const PROVISIONER_IDENTITY: &str = "storage.kubernetes.io/csiProvisionerIdentity";

/// The prefix of StorageClass parameters that are meant for the provisioner and not for the driver.
pub const CSI_PARAMETER_PREFIX: &str = "csi.storage.k8s.io/";
