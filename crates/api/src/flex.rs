//! FlexVolumes, and how a VolumeAttachment records that one is attached.
//!
//! A VolumeAttachment can describe only volumes of CSI. There a FlexVolume is a volume of the driver [`ATTACHER`], whose handle
//! is the FlexVolume driver's name and the volume's: all that a detach needs, also when the PersistentVolume is gone.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, PersistentVolume, PersistentVolumeSpec, Volume};
use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::access::READ_WRITE_MANY;
use crate::names;

/// Who attaches FlexVolumes, as VolumeAttachments name it.
pub const ATTACHER: &str = "flexvolume.cleat.dev";
/// The key in `status.attachmentMetadata` under which a VolumeAttachment has the device.
pub const DEVICE: &str = "devicePath";
/// What the names of FlexVolumes in node status begin with.
const PREFIX: &str = "flexvolume-";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlexVolume {
    /// With its vendor, if it has one: `vendor/driver`.
    pub driver: String,
    /// The PersistentVolume's name, or that of a pod's own volume.
    pub volume: String,
    pub fs_type: String,
    pub read_only: bool,
    pub options: BTreeMap<String, String>,
    access_modes: Vec<String>,
}

impl FlexVolume {
    /// `read_only` is the pod's word: that of the PersistentVolume is not looked at.
    pub fn of_volume(volume: &PersistentVolume, read_only: bool) -> Option<Self> {
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

    /// A pod's own volume. Nobody says how many nodes may have it, so none is refused.
    pub fn of_pod(volume: &Volume) -> Option<Self> {
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

    /// What [`FlexVolume::record`] put there.
    pub fn of_attachment(attachment: &VolumeAttachment) -> Option<Self> {
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

    /// The name in node status.
    pub fn unique(&self) -> String {
        format!("{PREFIX}{}", self.handle())
    }

    fn handle(&self) -> String {
        format!("{}/{}", self.driver, self.volume)
    }

    /// The volume as a VolumeAttachment describes it.
    pub fn record(&self) -> PersistentVolumeSpec {
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

/// The FlexVolume driver and the volume's name in a handle. Drivers' names have slashes, volumes' have none.
pub fn split_handle(handle: &str) -> Option<(&str, &str)> {
    handle.rsplit_once('/').filter(|(driver, volume)| !driver.is_empty() && !volume.is_empty())
}

/// Who attaches a volume of this name in node status, and the handle it is known by there.
pub fn attacher_and_handle(unique: &str) -> Option<(&str, &str)> {
    match unique.strip_prefix(PREFIX) {
        Some(handle) => split_handle(handle).map(|_| (ATTACHER, handle)),
        None => names::split_unique_volume(unique),
    }
}

/// The name in node status of what an attachment describes itself.
pub fn inline_unique(attachment: &VolumeAttachment) -> Option<String> {
    if let Some(flex) = FlexVolume::of_attachment(attachment) {
        return Some(flex.unique());
    }
    let csi = attachment.spec.source.inline_volume_spec.as_ref()?.csi.as_ref()?;
    Some(names::unique_volume(&csi.driver, &csi.volume_handle))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stored(source: serde_json::Value) -> PersistentVolume {
        let spec = json!({ "accessModes": ["ReadWriteOnce"], "flexVolume": source });
        serde_json::from_value(json!({ "metadata": { "name": "pv-1" }, "spec": spec })).unwrap()
    }

    fn attachment(flex: &FlexVolume) -> VolumeAttachment {
        let spec = json!({ "attacher": ATTACHER, "nodeName": "n", "source": { "inlineVolumeSpec": flex.record() } });
        serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap()
    }

    #[test]
    fn what_is_recorded_is_read_again() {
        let inline = json!({ "name": "data", "flexVolume": { "driver": "plain", "readOnly": true } });
        for (case, flex, unique) in [
            (
                "a volume",
                FlexVolume::of_volume(
                    &stored(json!({ "driver": "acme/disk", "fsType": "xfs", "options": { "lun": "7" } })),
                    true,
                ),
                "flexvolume-acme/disk/pv-1",
            ),
            (
                "the volume's own word on reading only",
                FlexVolume::of_volume(&stored(json!({ "driver": "acme/disk", "readOnly": true })), false),
                "flexvolume-acme/disk/pv-1",
            ),
            (
                "a pod's own volume, of a driver without a vendor",
                FlexVolume::of_pod(&serde_json::from_value(inline).unwrap()),
                "flexvolume-plain/data",
            ),
        ] {
            let flex = flex.unwrap();
            assert_eq!(flex.unique(), unique, "{case}");
            assert_eq!(FlexVolume::of_attachment(&attachment(&flex)).as_ref(), Some(&flex), "{case}");
            assert_eq!(inline_unique(&attachment(&flex)).as_deref(), Some(unique), "{case}");
            assert_eq!(attacher_and_handle(unique), Some((ATTACHER, &unique["flexvolume-".len()..])), "{case}");
        }
    }

    #[test]
    fn reading_only_is_the_pods_word() {
        let volume = stored(json!({ "driver": "d", "readOnly": true }));
        assert!(!FlexVolume::of_volume(&volume, false).unwrap().read_only);
        assert!(FlexVolume::of_volume(&volume, true).unwrap().read_only);
    }

    #[test]
    fn other_names_are_other_volumes() {
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
