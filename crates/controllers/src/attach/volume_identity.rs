//! How drivers and Node status identify a volume: unique names, driver names, and the volumes that pods define inline.
//! Pure.

use cleat_api::flex::{self, FlexVolume};
use cleat_api::key::Key;
use cleat_api::{migrate, names, pod};
use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::decide::AttachmentSource;

/// `None` for volumes that neither CSI nor FlexVolume drivers attach, and for those that migration cannot translate.
pub(super) fn unique_volume_name(volume: &PersistentVolume) -> Option<String> {
    let flex = FlexVolume::from_volume(volume, false).map(|flex| flex.unique_volume_name());
    flex.or_else(|| map_csi(volume, names::unique_volume_name))
}

/// The attacher of the volume: the CSI driver, or one name for all FlexVolume drivers.
pub(super) fn driver_name(volume: &PersistentVolume) -> Option<String> {
    let is_flex = volume.spec.as_ref().is_some_and(|spec| spec.flex_volume.is_some());
    is_flex.then(|| flex::ATTACHER.to_owned()).or_else(|| map_csi(volume, |driver, _| driver.to_owned()))
}

/// An attachment of a FlexVolume contains the volume's definition, so that it can be detached after the
/// PersistentVolume is gone.
pub(super) fn attachment_source(volume: &PersistentVolume, pod: &Pod, claim: &Key) -> AttachmentSource {
    let read_only = pod::claim_volumes(pod).iter().any(|v| v.claim == *claim && v.read_only);
    match FlexVolume::from_volume(volume, read_only) {
        Some(flex) => AttachmentSource::Inline(Box::new(flex.to_inline_spec())),
        None => AttachmentSource::PersistentVolume(volume.metadata.name.clone().unwrap_or_default()),
    }
}

/// The volumes that the pod defines inline and that need a driver to attach them: FlexVolumes, and disks of in-tree
/// plugins that were migrated to CSI. Each with its unique name.
pub(super) fn inline_volumes(pod: &Pod) -> Vec<(String, PersistentVolume)> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|s| s.volumes.iter().flatten());
    let definitions = volumes.filter_map(|volume| match FlexVolume::from_pod_volume(volume) {
        Some(flex) => Some((flex.unique_volume_name(), flex_as_persistent_volume(&flex))),
        None => {
            let translated = migrate::translate_inline_volume(volume, namespace).ok().flatten()?;
            Some((unique_volume_name(&translated)?, translated))
        }
    });
    definitions.collect()
}

fn flex_as_persistent_volume(flex: &FlexVolume) -> PersistentVolume {
    let metadata = ObjectMeta { name: Some(flex.volume.clone()), ..ObjectMeta::default() };
    PersistentVolume { metadata, spec: Some(flex.to_inline_spec()), status: None }
}

/// The device path that a FlexVolume driver returned. CSI drivers pass device paths in `publishContext` instead.
pub(super) fn device_path(attachment: &VolumeAttachment) -> String {
    let status = FlexVolume::from_attachment(attachment).and(attachment.status.as_ref());
    let metadata = status.and_then(|status| status.attachment_metadata.as_ref());
    metadata.and_then(|metadata| metadata.get(flex::DEVICE_PATH_KEY).cloned()).unwrap_or_default()
}

/// Calls `name` with the driver and the handle of a CSI volume or of a volume that migration translates to one.
fn map_csi<T>(volume: &PersistentVolume, name: impl FnOnce(&str, &str) -> T) -> Option<T> {
    let csi = migrate::csi_source(volume).ok().flatten()?;
    Some(name(&csi.driver, &csi.volume_handle))
}
