//! FlexVolumes, and how a VolumeAttachment records that one is attached.
//!
//! The inline spec of a VolumeAttachment can describe only a CSI volume. A FlexVolume is recorded there as a volume of the
//! driver [`ATTACHER`] with the handle `<FlexVolume driver>/<volume name>`. A detach needs no more than that, also after the
//! PersistentVolume was deleted.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, PersistentVolume, PersistentVolumeSpec, Volume};
use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::access::READ_WRITE_MANY;
use crate::names;

/// The attacher in VolumeAttachments of FlexVolumes.
pub const ATTACHER: &str = "flexvolume.cleat.dev";
/// The key of the device path in the `status.attachmentMetadata` of a VolumeAttachment.
pub const DEVICE_PATH_KEY: &str = "devicePath";
/// The prefix of unique volume names of FlexVolumes.
const UNIQUE_NAME_PREFIX: &str = "flexvolume-";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlexVolume {
    /// `driver`, or `vendor/driver` if it has a vendor.
    pub driver: String,
    /// The name of the PersistentVolume, or of the volume in the pod's spec.
    pub volume: String,
    pub fs_type: String,
    pub read_only: bool,
    pub options: BTreeMap<String, String>,
    access_modes: Vec<String>,
}

impl FlexVolume {
    /// `read_only` comes from the pod. The PersistentVolume's own `readOnly` is ignored.
    pub fn from_volume(volume: &PersistentVolume, read_only: bool) -> Option<Self> {
        let spec = volume.spec.as_ref()?;
        let flex = spec.flex_volume.as_ref()?;
        Some(Self {
            driver: flex.driver.clone(),
            volume: volume.metadata.name.clone()?,
            fs_type: flex.fs_type.clone().unwrap_or_default(),
            read_only,
            options: flex.options.clone().unwrap_or_default(),
            access_modes: spec.access_modes.clone().unwrap_or_default(),
        })
    }

    /// A volume in a pod's spec. It has no access modes, so that any number of nodes may attach it.
    pub fn from_pod_volume(volume: &Volume) -> Option<Self> {
        let flex = volume.flex_volume.as_ref()?;
        Some(Self {
            driver: flex.driver.clone(),
            volume: volume.name.clone(),
            fs_type: flex.fs_type.clone().unwrap_or_default(),
            read_only: flex.read_only.unwrap_or(false),
            options: flex.options.clone().unwrap_or_default(),
            access_modes: vec![READ_WRITE_MANY.to_owned()],
        })
    }

    /// Reads what [`FlexVolume::to_inline_spec`] recorded; `None` if the attachment is not for a FlexVolume.
    pub fn from_attachment(attachment: &VolumeAttachment) -> Option<Self> {
        let spec = attachment.spec.source.inline_volume_spec.as_ref()?;
        let csi = spec.csi.as_ref().filter(|csi| csi.driver == ATTACHER)?;
        let (driver, volume) = split_handle(&csi.volume_handle)?;
        Some(Self {
            driver: driver.to_owned(),
            volume: volume.to_owned(),
            fs_type: csi.fs_type.clone().unwrap_or_default(),
            read_only: csi.read_only.unwrap_or(false),
            options: csi.volume_attributes.clone().unwrap_or_default(),
            access_modes: spec.access_modes.clone().unwrap_or_default(),
        })
    }

    /// The name in `node.status.volumesAttached` and `volumesInUse`.
    pub fn unique_volume_name(&self) -> String {
        format!("{UNIQUE_NAME_PREFIX}{}", self.handle())
    }

    fn handle(&self) -> String {
        format!("{}/{}", self.driver, self.volume)
    }

    /// The `spec.source.inlineVolumeSpec` of a VolumeAttachment for this volume.
    pub fn to_inline_spec(&self) -> PersistentVolumeSpec {
        let csi = CSIPersistentVolumeSource {
            driver: ATTACHER.to_owned(),
            volume_handle: self.handle(),
            fs_type: Some(self.fs_type.clone()).filter(|t| !t.is_empty()),
            read_only: Some(self.read_only).filter(|only| *only),
            volume_attributes: Some(self.options.clone()).filter(|options| !options.is_empty()),
            ..CSIPersistentVolumeSource::default()
        };
        PersistentVolumeSpec {
            csi: Some(csi),
            access_modes: Some(self.access_modes.clone()),
            ..PersistentVolumeSpec::default()
        }
    }
}

/// Splits a handle into FlexVolume driver and volume name. A driver's name may contain a slash, a volume's cannot.
pub fn split_handle(handle: &str) -> Option<(&str, &str)> {
    handle.rsplit_once('/').filter(|(driver, volume)| !driver.is_empty() && !volume.is_empty())
}

/// Splits a unique volume name of a CSI volume or FlexVolume into the attacher and its handle for the volume.
pub fn attacher_and_handle(unique_name: &str) -> Option<(&str, &str)> {
    match unique_name.strip_prefix(UNIQUE_NAME_PREFIX) {
        Some(handle) => split_handle(handle).map(|_| (ATTACHER, handle)),
        None => names::split_unique_volume_name(unique_name),
    }
}

/// The unique volume name of the volume in an attachment's inline spec; `None` if it has none.
pub fn inline_unique_volume_name(attachment: &VolumeAttachment) -> Option<String> {
    if let Some(flex) = FlexVolume::from_attachment(attachment) {
        return Some(flex.unique_volume_name());
    }
    let csi = attachment.spec.source.inline_volume_spec.as_ref()?.csi.as_ref()?;
    Some(names::unique_volume_name(&csi.driver, &csi.volume_handle))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn flex_volume(source: serde_json::Value) -> PersistentVolume {
        let spec = json!({ "accessModes": ["ReadWriteOnce"], "flexVolume": source });
        serde_json::from_value(json!({ "metadata": { "name": "pv-1" }, "spec": spec })).unwrap()
    }

    fn attachment(flex: &FlexVolume) -> VolumeAttachment {
        let spec =
            json!({ "attacher": ATTACHER, "nodeName": "n", "source": { "inlineVolumeSpec": flex.to_inline_spec() } });
        serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap()
    }

    #[test]
    fn a_recorded_volume_is_read_back() {
        let inline = json!({ "name": "data", "flexVolume": { "driver": "plain", "readOnly": true } });
        for (case, flex, unique) in [
            (
                "a volume",
                FlexVolume::from_volume(
                    &flex_volume(json!({ "driver": "acme/disk", "fsType": "xfs", "options": { "lun": "7" } })),
                    true,
                ),
                "flexvolume-acme/disk/pv-1",
            ),
            (
                "the volume's own readOnly",
                FlexVolume::from_volume(&flex_volume(json!({ "driver": "acme/disk", "readOnly": true })), false),
                "flexvolume-acme/disk/pv-1",
            ),
            (
                "an inline volume, of a driver without a vendor",
                FlexVolume::from_pod_volume(&serde_json::from_value(inline).unwrap()),
                "flexvolume-plain/data",
            ),
        ] {
            let flex = flex.unwrap();
            assert_eq!(flex.unique_volume_name(), unique, "{case}");
            assert_eq!(FlexVolume::from_attachment(&attachment(&flex)).as_ref(), Some(&flex), "{case}");
            assert_eq!(inline_unique_volume_name(&attachment(&flex)).as_deref(), Some(unique), "{case}");
            assert_eq!(attacher_and_handle(unique), Some((ATTACHER, &unique["flexvolume-".len()..])), "{case}");
        }
    }

    #[test]
    fn read_only_comes_from_the_pod() {
        let volume = flex_volume(json!({ "driver": "d", "readOnly": true }));
        assert!(!FlexVolume::from_volume(&volume, false).unwrap().read_only);
        assert!(FlexVolume::from_volume(&volume, true).unwrap().read_only);
    }

    #[test]
    fn unique_names_split_into_attacher_and_handle() {
        for (unique, want) in [
            ("kubernetes.io/csi/d^h", Some(("d", "h"))),
            ("flexvolume-d", None),
            ("flexvolume-/v", None),
            ("flexvolume-d/", None),
            ("kubernetes.io/nfs/x", None),
        ] {
            assert_eq!(attacher_and_handle(unique), want, "{unique}");
        }
    }
}
