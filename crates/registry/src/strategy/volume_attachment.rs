//! Strategy of VolumeAttachment (storage.k8s.io/v1).

use jiff::Timestamp;
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeError};
use serde_json::Value;

use super::field_checks::check_immutable;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct VolumeAttachmentStrategy;

const MAX_ERROR_MESSAGE_BYTES: usize = 1024;
const MAX_ATTACHMENT_METADATA_BYTES: usize = 256 << 10;

impl Strategy for VolumeAttachmentStrategy {
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
        // Unlike that of other kinds, this status endpoint does not change metadata either.
        new.metadata = old.metadata.clone();
        new.spec = old.spec.clone();
    }

    fn validate(attachment: &VolumeAttachment) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = &attachment.spec;
        match spec.attacher.as_str() {
            "" => errors.push(FieldError::required("spec.attacher", "")),
            attacher => {
                if let Err(why) = names::validate_csi_driver_name(attacher) {
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
                if let Err(why) = names::validate_subdomain(name) {
                    errors.push(FieldError::invalid("spec.source.persistentVolumeName", name, why));
                }
            }
            (Some(_), None) => {}
        }
        if let Err(why) = names::validate_subdomain(&spec.node_name) {
            errors.push(FieldError::invalid("spec.nodeName", &spec.node_name, why));
        }
        errors
    }

    fn validate_update(new: &VolumeAttachment, old: &VolumeAttachment) -> Vec<FieldError> {
        let mut errors = Vec::new();
        check_immutable("spec", &new.spec, &old.spec, &mut errors);
        errors
    }

    fn validate_status(new: &VolumeAttachment, _old: &VolumeAttachment) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let status = new.status.clone().unwrap_or_default();
        let total_bytes =
            |m: &std::collections::BTreeMap<String, String>| m.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>();
        if status.attachment_metadata.as_ref().map_or(0, total_bytes) > MAX_ATTACHMENT_METADATA_BYTES {
            errors.push(FieldError::too_long("status.attachmentMetadata", MAX_ATTACHMENT_METADATA_BYTES));
        }
        check_error_message("status.attachError", status.attach_error.as_ref(), &mut errors);
        check_error_message("status.detachError", status.detach_error.as_ref(), &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Attacher", "CSI driver that attaches the volume.").format("name"),
            Column::text("PV", "Volume that is attached."),
            Column::text("Node", "Node the volume is attached to."),
            Column::text("Attached", "Whether the volume is attached.").with_type("boolean"),
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

fn check_error_message(path: &str, error: Option<&VolumeError>, errors: &mut Vec<FieldError>) {
    if error.and_then(|e| e.message.as_ref()).is_some_and(|m| m.len() > MAX_ERROR_MESSAGE_BYTES) {
        errors.push(FieldError::too_long(format!("{path}.message"), MAX_ERROR_MESSAGE_BYTES));
    }
}
