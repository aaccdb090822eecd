//! The data source of a claim: what it is, and whether a volume can be created from it now. Pure.

use std::sync::Arc;

use cleat_api::claim::{self, claim_class, volume_phase};
use cleat_api::key::{Key, Meta as _};
use cleat_api::quantity::Quantity;
use cleat_api::well_known::{annotation, finalizer};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

use super::ProvisionPolicy;
use crate::csi_provisioner::snapshots::{VolumeSnapshot, VolumeSnapshotContent};

#[derive(Clone, Debug, Default, PartialEq)]
pub enum DataSource {
    #[default]
    Unset,
    /// The volume of another claim; `None` for what does not exist.
    Claim {
        name: String,
        claim: Option<Arc<PersistentVolumeClaim>>,
        volume: Option<Arc<PersistentVolume>>,
    },
    Snapshot(Key),
    /// A kind that an external populator creates volumes from.
    OtherKind,
    /// Any kind, in another namespace.
    OtherNamespace,
}

/// Kind, group and name of the claim's data source. `dataSourceRef` takes precedence; the API server keeps both fields
/// equal.
fn reference(claim: &PersistentVolumeClaim) -> Option<(&str, &str, &str)> {
    let spec = claim.spec.as_ref()?;
    let data_source_ref = spec.data_source_ref.as_ref().map(|r| (&r.kind, &r.api_group, &r.name));
    let (kind, group, name) =
        data_source_ref.or_else(|| spec.data_source.as_ref().map(|r| (&r.kind, &r.api_group, &r.name)))?;
    Some((kind, group.as_deref().unwrap_or_default(), name))
}

fn source_of_kind(claim: &PersistentVolumeClaim, wanted: (&str, &str)) -> Option<Key> {
    if is_in_other_namespace(claim) {
        return None;
    }
    let (kind, group, name) = reference(claim)?;
    ((kind, group) == wanted).then(|| Key { namespace: claim.metadata.namespace.clone(), name: name.to_owned() })
}

pub fn is_in_other_namespace(claim: &PersistentVolumeClaim) -> bool {
    let source = claim.spec.as_ref().and_then(|s| s.data_source_ref.as_ref());
    source.and_then(|s| s.namespace.as_deref()).is_some_and(|namespace| !namespace.is_empty())
}

/// The claim that this claim is to be cloned from.
pub fn clone_source(claim: &PersistentVolumeClaim) -> Option<Key> {
    source_of_kind(claim, ("PersistentVolumeClaim", ""))
}

/// The VolumeSnapshot that this claim is to be restored from.
pub fn restore_source(claim: &PersistentVolumeClaim) -> Option<Key> {
    source_of_kind(claim, ("VolumeSnapshot", "snapshot.storage.k8s.io"))
}

pub fn has_data_source(claim: &PersistentVolumeClaim) -> bool {
    reference(claim).is_some()
}

/// The handle of the volume to clone, or the reason why it cannot be cloned for this claim now.
pub fn clone_handle(
    wanted: &PersistentVolumeClaim,
    driver: &str,
    name: &str,
    source: Option<&PersistentVolumeClaim>,
    volume: Option<&PersistentVolume>,
) -> Result<String, String> {
    let source = source.ok_or_else(|| format!("claim in dataSource not found: {name:?}"))?;
    if claim::claim_phase(source) != "Bound" {
        return Err(format!("the PVC DataSource {name} must be bound to clone it"));
    }
    if source.metadata.is_deleting() {
        return Err(format!("the PVC DataSource {name} is currently being deleted"));
    }
    if claim_class(source).is_none() {
        return Err(format!("the source PVC {name} has no storage class"));
    }
    if claim::requested_storage(wanted) < claim::requested_storage(source) {
        return Err(format!("new PVC request must be greater than or equal in size to the source PVC {name}"));
    }
    if claim::claim_volume_mode(wanted) != claim::claim_volume_mode(source) {
        return Err(format!("the source PVC {name} has another volume mode"));
    }
    let volume = volume.ok_or_else(|| format!("the volume of the source PVC {name} is not found"))?;
    let csi = volume.spec.as_ref().and_then(|s| s.csi.as_ref()).filter(|csi| csi.driver == driver);
    let csi = csi.ok_or_else(|| format!("the source PVC {name} is not a volume of driver {driver:?}"))?;
    if !claim::is_bound_pair(volume, source) || volume_phase(volume) != "Bound" {
        return Err(format!("the volume of the source PVC {name} is not bound to it"));
    }
    Ok(csi.volume_handle.clone())
}

/// A VolumeSnapshot and the content it is bound to; `None` for what does not exist.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RestoreSource {
    pub snapshot: Option<VolumeSnapshot>,
    pub content: Option<VolumeSnapshotContent>,
}

/// The handle of the snapshot, or the reason why this claim cannot be restored from it now.
pub fn snapshot_handle(
    wanted: &PersistentVolumeClaim,
    driver: &str,
    key: &Key,
    source: &RestoreSource,
    policy: &ProvisionPolicy,
) -> Result<String, String> {
    let name = &key.name;
    let snapshot = source.snapshot.as_ref().ok_or_else(|| format!("snapshot {name} not found"))?;
    if snapshot.metadata.is_deleting() && !snapshot.metadata.has_finalizer(finalizer::SNAPSHOT_SOURCE_PROTECTION) {
        return Err(format!("snapshot {name} is currently being deleted"));
    }
    let status = snapshot.status.as_ref();
    if status.and_then(|s| s.bound_volume_snapshot_content_name.as_deref()).is_none_or(str::is_empty) {
        return Err(format!("snapshot {name} is not bound"));
    }
    let content = source.content.as_ref().ok_or_else(|| format!("the content of snapshot {name} is not found"))?;
    let reference = &content.spec.volume_snapshot_ref;
    let uid = reference.uid.as_deref().unwrap_or_default();
    let is_bound_pair =
        reference.namespace == key.namespace && reference.name.as_ref() == Some(name) && uid == snapshot.metadata.uid();
    if !is_bound_pair {
        return Err(format!("snapshot {name} is not bound to its content"));
    }
    if content.spec.driver != driver {
        return Err(format!("snapshot {name} is not of driver {driver:?}"));
    }
    if status.and_then(|s| s.ready_to_use) != Some(true) {
        return Err(format!("snapshot {name} is not Ready"));
    }
    let size = status.and_then(|s| s.restore_size.as_ref()).and_then(|size| size.0.parse::<Quantity>().ok());
    if let (Some(size), Some(requested)) = (size, claim::requested_storage(wanted))
        && requested < size
    {
        return Err(format!(
            "requested volume size {requested} is less than the size {size} for the source snapshot {name}"
        ));
    }
    let mode = content.spec.source_volume_mode.as_deref();
    let convertible = content.metadata.annotation(annotation::ALLOW_MODE_CHANGE).is_some_and(is_true);
    let keeps_mode = mode.is_none_or(|mode| mode == claim::claim_volume_mode(wanted));
    if policy.prevent_volume_mode_conversion && !keeps_mode && !convertible {
        return Err(format!(
            "requested volume {} modifies the mode of the source volume but does not have permission to do so. {} annotation \
             is not present on snapshotcontent {}",
            wanted.metadata.name.as_deref().unwrap_or_default(),
            annotation::ALLOW_MODE_CHANGE,
            content.metadata.name.as_deref().unwrap_or_default(),
        ));
    }
    let handle = content.status.as_ref().and_then(|s| s.snapshot_handle.clone());
    handle.ok_or_else(|| format!("snapshot handle {name} is not available"))
}

/// The strings that Go's `strconv.ParseBool` parses as true.
fn is_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True")
}

/// Returns true if the snapshot no longer needs the restoring finalizer. `claims` are the claims that name it as their
/// data source.
pub fn is_restored(claims: &[Arc<PersistentVolumeClaim>]) -> bool {
    claims.iter().all(|c| claim::claim_phase(c) != "Pending")
}
