//! VolumeAttachment.

use jiff::Timestamp;
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeError};
use serde_json::Value;

use super::immutable;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct Attachments;

const MESSAGE: usize = 1024;
const METADATA: usize = 256 << 10;

impl Strategy for Attachments {
    type Object = VolumeAttachment;

    fn descriptor() -> Descriptor {
        Descriptor::new("storage.k8s.io", "v1", "VolumeAttachment", "volumeattachments")
            .cluster_scoped()
            .with_status()
            .put_needs_version()
    }

    fn prepare_create(attachment: &mut VolumeAttachment, _now: Timestamp) {
        attachment.status = Some(Default::default());
    }

    fn prepare_update(new: &mut VolumeAttachment, old: &VolumeAttachment) {
        new.status = old.status.clone();
    }

    fn prepare_status(new: &mut VolumeAttachment, old: &VolumeAttachment, _now: Timestamp) {
        // Unlike elsewhere, the status endpoint of this kind changes nothing but the status.
        new.metadata = old.metadata.clone();
        new.spec = old.spec.clone();
    }

    fn validate(attachment: &VolumeAttachment) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = &attachment.spec;
        match spec.attacher.as_str() {
            "" => errors.push(FieldError::required("spec.attacher", "")),
            attacher => {
                if let Err(why) = names::csi_driver(attacher) {
                    errors.push(FieldError::invalid("spec.attacher", attacher, why));
                }
            }
        }
        match (&spec.source.inline_volume_spec, spec.source.persistent_volume_name.as_deref()) {
            (None, None) => {
                let why = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
                errors.push(FieldError::required("spec.source", why));
            }
            (Some(_), Some(_)) => {
                let why = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
                errors.push(FieldError::invalid("spec.source", &spec.source, why));
            }
            (None, Some(name)) => {
                if let Err(why) = names::subdomain(name) {
                    errors.push(FieldError::invalid("spec.source.persistentVolumeName", name, why));
                }
            }
            (Some(_), None) => {}
        }
        if let Err(why) = names::subdomain(&spec.node_name) {
            errors.push(FieldError::invalid("spec.nodeName", &spec.node_name, why));
        }
        errors
    }

    fn validate_update(new: &VolumeAttachment, old: &VolumeAttachment) -> Vec<FieldError> {
        let mut errors = Vec::new();
        immutable("spec", &new.spec, &old.spec, &mut errors);
        errors
    }

    fn validate_status(new: &VolumeAttachment, _old: &VolumeAttachment) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let status = new.status.clone().unwrap_or_default();
        let size =
            |m: &std::collections::BTreeMap<String, String>| m.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>();
        if status.attachment_metadata.as_ref().map_or(0, size) > METADATA {
            errors.push(FieldError::too_long("status.attachmentMetadata", METADATA));
        }
        check_message("status.attachError", status.attach_error.as_ref(), &mut errors);
        check_message("status.detachError", status.detach_error.as_ref(), &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Attacher", "CSI driver that attaches the volume.").format("name"),
            Column::text("PV", "Volume that is attached."),
            Column::text("Node", "Node the volume is attached to."),
            Column::text("Attached", "Whether the volume is attached.").of("boolean"),
            AGE,
        ];
        COLUMNS
    }

    fn cells(attachment: &VolumeAttachment, now: Timestamp) -> Vec<Value> {
        let spec = &attachment.spec;
        vec![
            column::name(&attachment.metadata),
            spec.attacher.clone().into(),
            spec.source.persistent_volume_name.clone().unwrap_or_default().into(),
            spec.node_name.clone().into(),
            attachment.status.as_ref().is_some_and(|s| s.attached).into(),
            column::age(&attachment.metadata, now),
        ]
    }
}

fn check_message(path: &str, error: Option<&VolumeError>, errors: &mut Vec<FieldError>) {
    if error.and_then(|e| e.message.as_ref()).is_some_and(|m| m.len() > MESSAGE) {
        errors.push(FieldError::too_long(format!("{path}.message"), MESSAGE));
    }
}
