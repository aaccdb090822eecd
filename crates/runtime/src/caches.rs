//! The caches of a process: one per kind, each with its reflector, started at the first request for the kind.
//!
//! The watch code is generic and slow to compile. It is instantiated here, once for each kind, and nowhere else.

use std::sync::{Arc, OnceLock};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use kube::Resource;
use tokio_util::sync::CancellationToken;

use crate::Client;
use crate::cache::{Cache, Cached};
use crate::reflector::reflect;

/// A handle to the shared caches; clones share them. The reflectors end when `stop` is cancelled.
#[derive(Clone)]
pub struct Caches(Arc<CachesInner>);

struct CachesInner {
    client: Client,
    stop: CancellationToken,
    pods: OnceLock<Cache<Pod>>,
    nodes: OnceLock<Cache<Node>>,
    claims: OnceLock<Cache<PersistentVolumeClaim>>,
    volumes: OnceLock<Cache<PersistentVolume>>,
    classes: OnceLock<Cache<StorageClass>>,
    csi_drivers: OnceLock<Cache<CSIDriver>>,
    csi_nodes: OnceLock<Cache<CSINode>>,
    capacities: OnceLock<Cache<CSIStorageCapacity>>,
    attachments: OnceLock<Cache<VolumeAttachment>>,
    leases: OnceLock<Cache<Lease>>,
    attributes_classes: OnceLock<Cache<VolumeAttributesClass>>,
}

macro_rules! kinds {
    ($($field:ident: $kind:ty, $name:literal;)*) => {
        impl Caches {
            pub fn new(client: impl Into<Client>, stop: CancellationToken) -> Self {
                Self(Arc::new(CachesInner { client: client.into(), stop, $($field: OnceLock::new()),* }))
            }

            $(pub fn $field(&self) -> Cache<$kind> {
                self.0.$field.get_or_init(|| start_reflector::<$kind>(&self.0, $name)).clone()
            })*
        }
    };
}

kinds! {
    pods: Pod, "pods";
    nodes: Node, "nodes";
    claims: PersistentVolumeClaim, "persistentvolumeclaims";
    volumes: PersistentVolume, "persistentvolumes";
    classes: StorageClass, "storageclasses";
    csi_drivers: CSIDriver, "csidrivers";
    csi_nodes: CSINode, "csinodes";
    capacities: CSIStorageCapacity, "csistoragecapacities";
    attachments: VolumeAttachment, "volumeattachments";
    leases: Lease, "leases";
    attributes_classes: VolumeAttributesClass, "volumeattributesclasses";
}

fn start_reflector<K>(inner: &CachesInner, name: &'static str) -> Cache<K>
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    let cache = Cache::default();
    tokio::spawn(reflect(inner.client.clone(), cache.clone(), name, inner.stop.clone()));
    cache
}
