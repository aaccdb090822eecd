//! One reflector per kind per process, started when somebody first asks for the kind.
//!
//! The watch machinery is generic and heavy to compile, so it is instantiated here, once for each kind, and nowhere
//! else.

use std::sync::{Arc, OnceLock};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use kube::{Client, Resource};
use tokio_util::sync::CancellationToken;

use crate::cache::{Cache, Cached};
use crate::reflect::reflect;

#[derive(Clone)]
pub struct Caches(Arc<Shared>);

struct Shared {
    client: Client,
    stop: CancellationToken,
    pods: OnceLock<Cache<Pod>>,
    nodes: OnceLock<Cache<Node>>,
    claims: OnceLock<Cache<PersistentVolumeClaim>>,
    volumes: OnceLock<Cache<PersistentVolume>>,
    classes: OnceLock<Cache<StorageClass>>,
    drivers: OnceLock<Cache<CSIDriver>>,
    csi_nodes: OnceLock<Cache<CSINode>>,
    capacities: OnceLock<Cache<CSIStorageCapacity>>,
    attachments: OnceLock<Cache<VolumeAttachment>>,
    leases: OnceLock<Cache<Lease>>,
    attributes: OnceLock<Cache<VolumeAttributesClass>>,
}

macro_rules! kinds {
    ($($field:ident: $kind:ty, $name:literal;)*) => {
        impl Caches {
            pub fn new(client: Client, stop: CancellationToken) -> Self {
                Self(Arc::new(Shared { client, stop, $($field: OnceLock::new()),* }))
            }

            $(pub fn $field(&self) -> Cache<$kind> {
                self.0.$field.get_or_init(|| start::<$kind>(&self.0, $name)).clone()
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
    drivers: CSIDriver, "csidrivers";
    csi_nodes: CSINode, "csinodes";
    capacities: CSIStorageCapacity, "csistoragecapacities";
    attachments: VolumeAttachment, "volumeattachments";
    leases: Lease, "leases";
    attributes: VolumeAttributesClass, "volumeattributesclasses";
}

fn start<K>(shared: &Shared, name: &'static str) -> Cache<K>
where
    K: Cached + Resource<DynamicType = ()> + Clone,
{
    let cache = Cache::default();
    tokio::spawn(reflect(shared.client.clone(), cache.clone(), name, shared.stop.clone()));
    cache
}
