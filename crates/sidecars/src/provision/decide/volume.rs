//! What becomes of a volume of this driver.

use std::sync::Arc;

use cleat_api::claim::{claim_ref, claim_ref_key, volume_phase};
use cleat_api::key::{Key, Meta as _};
use cleat_api::keys::{annotation, finalizer};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::secrets;

#[derive(Clone, Debug)]
pub struct VolumeSeen {
    pub volume: Arc<PersistentVolume>,
    /// Nodes that a VolumeAttachment of this volume names.
    pub attached_to: Vec<String>,
    /// The class it was made for, if that is still there.
    pub class: Option<Arc<StorageClass>>,
    pub driver: String,
    pub deletes_volumes: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeDecision {
    Nothing,
    /// Hold the record, so that it cannot go before the volume.
    Hold,
    /// The volume is to be kept: the record may go when it likes.
    Release,
    Delete {
        handle: String,
        secret: Credentials,
    },
    /// Released, and still attached to this node.
    WaitForDetach(String),
    /// The driver cannot do it.
    Refuse(String),
}

/// Where DeleteVolume's secrets come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credentials {
    None,
    /// Named by the record. A secret that is gone does not keep the volume: the call is made without it.
    Recorded(Key),
    /// Named by the class.
    OfClass(Key),
}

pub fn volume(seen: &VolumeSeen) -> VolumeDecision {
    let meta = &seen.volume.metadata;
    let Some(spec) = &seen.volume.spec else { return VolumeDecision::Nothing };
    let Some(csi) = spec.csi.as_ref().filter(|csi| csi.driver == seen.driver) else {
        return VolumeDecision::Nothing;
    };
    if meta.annotation(annotation::PROVISIONED_BY).is_some_and(|by| by != seen.driver) {
        return VolumeDecision::Nothing;
    }
    let held = meta.has_finalizer(finalizer::PROVISIONER);
    let deletes = spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete");
    match volume_phase(&seen.volume) {
        _ if held && !deletes => VolumeDecision::Release,
        "Released" if deletes && (held || !meta.is_deleting()) => match seen.attached_to.first() {
            _ if !seen.deletes_volumes => {
                VolumeDecision::Refuse(format!("driver {:?} does not delete volumes", seen.driver))
            }
            Some(node) => VolumeDecision::WaitForDetach(node.clone()),
            None => match credentials(seen) {
                Ok(secret) => VolumeDecision::Delete { handle: csi.volume_handle.clone(), secret },
                Err(why) => VolumeDecision::Refuse(why),
            },
        },
        "Bound" if deletes && !held && !meta.is_deleting() => VolumeDecision::Hold,
        _ => VolumeDecision::Nothing,
    }
}

fn credentials(seen: &VolumeSeen) -> Result<Credentials, String> {
    let meta = &seen.volume.metadata;
    let recorded = [annotation::DELETION_SECRET_NAME, annotation::DELETION_SECRET_NAMESPACE];
    if let [Some(name), Some(namespace)] = recorded.map(|key| meta.annotation(key)) {
        let named = !name.is_empty() && !namespace.is_empty();
        return Ok(if named { Credentials::Recorded(Key::namespaced(namespace, name)) } else { Credentials::None });
    }
    let (Some(class), Some(reference)) = (&seen.class, claim_ref(&seen.volume)) else { return Ok(Credentials::None) };
    let Some(parameters) = &class.parameters else { return Ok(Credentials::None) };
    let key = claim_ref_key(reference);
    let mut claim = PersistentVolumeClaim::default();
    claim.metadata.name = Some(key.name);
    claim.metadata.namespace = key.namespace;
    let name = meta.name.as_deref().unwrap_or_default();
    Ok(secrets::deletion(parameters, name, &claim)?.map_or(Credentials::None, Credentials::OfClass))
}
