//! Resolves the volumes of a pod. Pure: it takes a pod and the objects that its volumes refer to, and returns for each
//! volume what to mount, or why that cannot be determined yet.

use std::collections::BTreeMap;
use std::sync::Arc;

use cleat_api::Key;
use cleat_api::access::READ_WRITE_ONCE_POD;
use cleat_api::claim;
use cleat_api::key::Meta as _;
use cleat_api::pod::{self as api_pod, ClaimVolume};
use cleat_api::well_known::finalizer;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, SecretReference, Volume};
use k8s_openapi::api::storage::v1::CSIDriver;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::layout::{PodUid, VolumeId, is_path_component};

/// Reads the objects that the volumes of a pod refer to.
pub trait ObjectReader {
    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>>;
    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>>;
    fn driver(&self, name: &str) -> Option<Arc<CSIDriver>>;
}

/// The part of a pod's life, as far as its volumes are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodLifecycle {
    Running,
    /// The pod is being deleted and a container still runs.
    Terminating,
    /// No container runs or will run.
    Terminated,
}

/// A pod of this node with its resolved volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredPod {
    pub key: Key,
    pub uid: PodUid,
    pub service_account: String,
    pub created: Option<Time>,
    pub lifecycle: PodLifecycle,
    /// Only volumes that a container uses.
    pub volumes: Vec<PodVolume>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodVolume {
    /// The name in the pod's spec.
    pub name: String,
    pub spec: Result<Arc<VolumeSpec>, ResolveError>,
}

/// A volume that can be mounted: everything that the calls to its driver need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSpec {
    pub id: VolumeId,
    /// The name of the PersistentVolume.
    pub spec_name: String,
    pub read_only: bool,
    pub fs_type: String,
    pub mount_options: Vec<String>,
    pub access_modes: Vec<String>,
    pub attributes: BTreeMap<String, String>,
    pub stage_secret: Option<Key>,
    pub publish_secret: Option<Key>,
    /// `podInfoOnMount` of the CSIDriver: NodePublishVolume contains the name, namespace, uid and service account of
    /// the pod.
    pub pod_info: bool,
}

impl VolumeSpec {
    /// Only one pod at a time may use the volume.
    pub fn is_exclusive(&self) -> bool {
        self.access_modes == [READ_WRITE_ONCE_POD]
    }
}

/// Why a volume cannot be mounted yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    #[error("error processing PVC {0}: it does not exist")]
    ClaimMissing(Key),
    #[error("error processing PVC {0}: PVC is being deleted")]
    ClaimDeleting(Key),
    #[error("error processing PVC {0}: PVC is not bound")]
    ClaimNotBound(Key),
    #[error("error processing PVC {0}: it was not made for this pod")]
    ClaimNotOwned(Key),
    #[error("PV {0} does not exist")]
    VolumeMissing(String),
    #[error("found PV object {volume} but its pv.Spec.ClaimRef.UID {has} does not point to claim.UID {want}")]
    VolumeNotBound { volume: String, has: String, want: String },
    #[error("PV {volume}: {field} {value:?} cannot be part of a path")]
    InvalidName { volume: String, field: &'static str, value: String },
    #[error("volume {volume} has volumeMode {mode}, but is specified in {used_as}")]
    WrongVolumeMode { volume: String, mode: String, used_as: &'static str },
    #[error("{0} volumes are not supported by this node agent yet")]
    UnsupportedVolume(String),
}

impl ResolveError {
    /// The reason in the pod's condition.
    pub fn reason(&self) -> &'static str {
        match self {
            ResolveError::ClaimMissing(_) => "ClaimMissing",
            ResolveError::ClaimDeleting(_) => "ClaimDeleting",
            ResolveError::ClaimNotBound(_) => "ClaimNotBound",
            ResolveError::ClaimNotOwned(_) => "ClaimNotOwned",
            ResolveError::VolumeMissing(_) => "VolumeMissing",
            ResolveError::VolumeNotBound { .. } => "VolumeNotBound",
            ResolveError::InvalidName { .. } => "InvalidName",
            ResolveError::WrongVolumeMode { .. } => "WrongVolumeMode",
            ResolveError::UnsupportedVolume(_) => "UnsupportedVolume",
        }
    }

    /// Whether the control plane is expected to resolve it without a user's help.
    pub fn is_transient(&self) -> bool {
        matches!(self, ResolveError::ClaimMissing(_) | ResolveError::ClaimNotBound(_) | ResolveError::VolumeMissing(_))
    }
}

/// Resolves all volumes of the pod that a container uses.
pub fn resolve_pod(pod: &Pod, objects: &dyn ObjectReader) -> DesiredPod {
    let lifecycle = match (api_pod::is_terminated(pod), pod.metadata.is_deleting()) {
        (true, _) => PodLifecycle::Terminated,
        (false, true) => PodLifecycle::Terminating,
        (false, false) => PodLifecycle::Running,
    };
    let claims = api_pod::claim_volumes(pod);
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    let volumes = volumes.filter_map(|v| {
        let used = used_as(pod, &v.name)?;
        let spec = match claims.iter().find(|c| c.volume == v.name) {
            Some(source) => resolve_claim(pod, source, used, objects).map(Arc::new),
            None => Err(ResolveError::UnsupportedVolume(source_kind(v))),
        };
        Some(PodVolume { name: v.name.clone(), spec })
    });
    DesiredPod {
        key: Key::of(&pod.metadata),
        uid: pod.metadata.uid().to_owned(),
        service_account: pod.spec.as_ref().and_then(|s| s.service_account_name.clone()).unwrap_or_default(),
        created: pod.metadata.creation_timestamp.clone(),
        lifecycle,
        volumes: volumes.collect(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum UsedAs {
    Mount,
    Device,
}

/// How the containers use the volume; `None` if no container does.
fn used_as(pod: &Pod, name: &str) -> Option<UsedAs> {
    let spec = pod.spec.as_ref()?;
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| (&c.volume_mounts, &c.volume_devices));
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut uses = containers.map(|c| (&c.volume_mounts, &c.volume_devices)).chain(ephemeral).filter_map(|(m, d)| {
        let mounted = m.iter().flatten().any(|m| m.name == name);
        let mapped = d.iter().flatten().any(|d| d.name == name);
        if mounted { Some(UsedAs::Mount) } else { mapped.then_some(UsedAs::Device) }
    });
    uses.next()
}

fn resolve_claim(
    pod: &Pod,
    source: &ClaimVolume,
    used: UsedAs,
    objects: &dyn ObjectReader,
) -> Result<VolumeSpec, ResolveError> {
    let key = &source.claim;
    let found = objects.claim(key).ok_or_else(|| ResolveError::ClaimMissing(key.clone()))?;
    let owners = found.metadata.owner_references.iter().flatten();
    if source.ephemeral && !owners.into_iter().any(|o| o.controller == Some(true) && o.uid == pod.metadata.uid()) {
        return Err(ResolveError::ClaimNotOwned(key.clone()));
    }
    if found.metadata.is_deleting() && !found.metadata.has_finalizer(finalizer::PVC_PROTECTION) {
        return Err(ResolveError::ClaimDeleting(key.clone()));
    }
    let name = match claim::volume_name(&found) {
        Some(name) if claim::claim_phase(&found) == "Bound" => name,
        _ => return Err(ResolveError::ClaimNotBound(key.clone())),
    };
    let volume = objects.volume(name).ok_or_else(|| ResolveError::VolumeMissing(name.to_owned()))?;
    if !claim::is_bound_pair(&volume, &found) {
        let has = claim::claim_ref(&volume).and_then(|r| r.uid.clone()).unwrap_or_default();
        let want = found.metadata.uid().to_owned();
        return Err(ResolveError::VolumeNotBound { volume: name.to_owned(), has, want });
    }
    let mode = claim::volume_mode(&volume);
    match (mode, used) {
        (claim::BLOCK, UsedAs::Device) => return Err(ResolveError::UnsupportedVolume("raw block".to_owned())),
        (claim::BLOCK, UsedAs::Mount) | (claim::FILESYSTEM, UsedAs::Device) => {
            let used_as = if used == UsedAs::Mount { "volumeMounts" } else { "volumeDevices" };
            return Err(ResolveError::WrongVolumeMode {
                volume: source.volume.clone(),
                mode: mode.to_owned(),
                used_as,
            });
        }
        _ => {}
    }
    csi_volume_spec(name, &volume, source.read_only, objects)
}

fn csi_volume_spec(
    name: &str,
    volume: &PersistentVolume,
    read_only: bool,
    objects: &dyn ObjectReader,
) -> Result<VolumeSpec, ResolveError> {
    let spec = volume.spec.as_ref();
    let Some(csi) = spec.and_then(|s| s.csi.as_ref()) else {
        return Err(ResolveError::UnsupportedVolume(format!("{} persistent", persistent_kind(volume))));
    };
    for (field, value) in [("name", name), ("driver", csi.driver.as_str())] {
        if !is_path_component(value) {
            return Err(ResolveError::InvalidName { volume: name.to_owned(), field, value: value.to_owned() });
        }
    }
    if csi.volume_handle.is_empty() {
        return Err(ResolveError::InvalidName { volume: name.to_owned(), field: "volumeHandle", value: String::new() });
    }
    let driver = objects.driver(&csi.driver);
    Ok(VolumeSpec {
        id: VolumeId::new(&csi.driver, &csi.volume_handle),
        spec_name: name.to_owned(),
        read_only,
        fs_type: csi.fs_type.clone().unwrap_or_default(),
        mount_options: spec.and_then(|s| s.mount_options.clone()).unwrap_or_default(),
        access_modes: spec.and_then(|s| s.access_modes.clone()).unwrap_or_default(),
        attributes: csi.volume_attributes.clone().unwrap_or_default(),
        stage_secret: csi.node_stage_secret_ref.as_ref().and_then(secret),
        publish_secret: csi.node_publish_secret_ref.as_ref().and_then(secret),
        pod_info: driver.is_some_and(|d| d.spec.pod_info_on_mount == Some(true)),
    })
}

fn secret(reference: &SecretReference) -> Option<Key> {
    Some(Key::namespaced(reference.namespace.clone()?, reference.name.clone()?))
}

/// The name of the field that holds the volume's source: `emptyDir`, `configMap` …
fn source_kind(volume: &Volume) -> String {
    first_field_except(volume, &["name"])
}

/// The same for a PersistentVolume: `nfs`, `hostPath` …
fn persistent_kind(volume: &PersistentVolume) -> String {
    const COMMON_FIELDS: [&str; 9] = [
        "accessModes",
        "capacity",
        "claimRef",
        "mountOptions",
        "nodeAffinity",
        "persistentVolumeReclaimPolicy",
        "storageClassName",
        "volumeAttributesClassName",
        "volumeMode",
    ];
    volume.spec.as_ref().map(|s| first_field_except(s, &COMMON_FIELDS)).unwrap_or_default()
}

fn first_field_except(source: &impl serde::Serialize, common: &[&str]) -> String {
    let fields = serde_json::to_value(source).ok();
    let fields = fields.as_ref().and_then(|v| v.as_object()).into_iter().flat_map(|o| o.keys());
    fields.into_iter().find(|k| !common.contains(&k.as_str())).cloned().unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests;
