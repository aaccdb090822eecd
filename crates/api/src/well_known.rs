//! Well-known annotations, labels, finalizers, taints and condition types, as they appear in API objects.

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
    /// On a VolumeSnapshotContent: a volume of another volume mode may be created from it.
    pub const ALLOW_MODE_CHANGE: &str = "snapshot.storage.kubernetes.io/allow-volume-mode-change";
    /// On a VolumeAttachment: the CSI node id that ControllerPublishVolume was called with.
    pub const CSI_NODE_ID: &str = "csi.alpha.kubernetes.io/node-id";
    /// On a Node: a JSON map from driver name to CSI node id.
    pub const NODE_CSI_IDS: &str = "csi.volume.kubernetes.io/nodeid";
    /// On a Node: the attach/detach controller attaches its volumes, not the kubelet.
    pub const CONTROLLER_MANAGED_ATTACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
    /// On a CSINode: comma-separated names of the in-tree plugins whose volumes the node handles through CSI drivers.
    pub const MIGRATED_PLUGINS: &str = "storage.alpha.kubernetes.io/migrated-plugins";
    /// The value that controllers write where only the presence of an annotation matters.
    pub const YES: &str = "yes";
}

pub mod finalizer {
    pub const PVC_PROTECTION: &str = "kubernetes.io/pvc-protection";
    pub const PV_PROTECTION: &str = "kubernetes.io/pv-protection";
    pub const VAC_PROTECTION: &str = "kubernetes.io/vac-protection";
    /// On a claim that is the source of a clone in progress.
    pub const CLONING_PROTECTION: &str = "provisioner.storage.kubernetes.io/cloning-protection";
    /// On a VolumeSnapshot that is the source of a volume in progress.
    pub const SNAPSHOT_SOURCE_PROTECTION: &str =
        "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection";
    pub const PROVISIONER: &str = "external-provisioner.volume.kubernetes.io/finalizer";
    /// On a volume that an in-tree plugin is to delete.
    pub const IN_TREE_PV_CONTROLLER: &str = "kubernetes.io/pv-controller";
    /// On a claim: a volume may exist or be in creation for it that no PersistentVolume records yet.
    pub const PROVISIONING: &str = "cleat.dev/provisioning";
}

pub mod label {
    /// On a CSIStorageCapacity: the driver whose capacity it reports.
    pub const CAPACITY_DRIVER: &str = "csi.storage.k8s.io/drivername";
    /// On a CSIStorageCapacity: the component that maintains it.
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
    /// The API server puts it on every node that is created.
    pub const NOT_READY: &str = "node.kubernetes.io/not-ready";
    pub const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
    pub const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
}

/// The condition type of a claim whose status is True if no pod uses the claim.
pub const UNUSED_CONDITION: &str = "Unused";

/// The condition type of a pod whose status is True if every volume of the pod is mounted on its node.
pub const VOLUMES_MOUNTED_CONDITION: &str = "cleat.dev/VolumesMounted";

/// The key in `spec.csi.volumeAttributes` of the provisioner instance that created the volume.
pub const PROVISIONER_IDENTITY: &str = "storage.kubernetes.io/csiProvisionerIdentity";

/// The prefix of StorageClass parameters that are meant for the provisioner and not for the driver.
pub const CSI_PARAMETER_PREFIX: &str = "csi.storage.k8s.io/";
