//! Validation of the source of a pod's volume.

use k8s_openapi::api::core::v1::{HostPathVolumeSource, Volume};

use crate::strategy::field_checks::check_flex_options;
use crate::strategy::persistent_volume_claim;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::names;

const HOST_PATH_TYPES: [&str; 8] =
    ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

pub(super) fn check_volume_source(path: &str, volume: &Volume, errors: &mut Vec<FieldError>) {
    let required = |errors: &mut Vec<FieldError>, field: &str, value: Option<&str>| {
        if value.is_none_or(str::is_empty) {
            errors.push(FieldError::required(format!("{path}.{field}"), ""));
        }
    };
    if let Some(source) = &volume.host_path {
        check_host_path(&format!("{path}.hostPath"), source, errors);
    }
    if let Some(source) = &volume.persistent_volume_claim {
        required(errors, "persistentVolumeClaim.claimName", Some(&source.claim_name));
    }
    if let Some(source) = &volume.secret {
        required(errors, "secret.secretName", source.secret_name.as_deref());
        check_file_mode(&format!("{path}.secret.defaultMode"), source.default_mode, errors);
    }
    if let Some(source) = &volume.config_map {
        required(errors, "configMap.name", Some(&source.name));
        check_file_mode(&format!("{path}.configMap.defaultMode"), source.default_mode, errors);
    }
    if let Some(source) = &volume.nfs {
        required(errors, "nfs.server", Some(&source.server));
        required(errors, "nfs.path", Some(&source.path));
        if !source.path.is_empty() && !source.path.starts_with('/') {
            errors.push(FieldError::invalid(format!("{path}.nfs.path"), &source.path, "must be an absolute path"));
        }
    }
    if let Some(source) = &volume.flex_volume {
        required(errors, "flexVolume.driver", Some(&source.driver));
        check_flex_options(&format!("{path}.flexVolume.options"), source.options.as_ref(), errors);
    }
    if let Some(source) = &volume.iscsi {
        required(errors, "iscsi.targetPortal", Some(&source.target_portal));
        required(errors, "iscsi.iqn", Some(&source.iqn));
    }
    if let Some(csi) = &volume.csi {
        match names::validate_csi_driver_name(&csi.driver) {
            _ if csi.driver.is_empty() => errors.push(FieldError::required(format!("{path}.csi.driver"), "")),
            Ok(()) => {}
            Err(why) => errors.push(FieldError::invalid(format!("{path}.csi.driver"), &csi.driver, why)),
        }
    }
    if let Some(ephemeral) = &volume.ephemeral {
        let path = format!("{path}.ephemeral.volumeClaimTemplate");
        match &ephemeral.volume_claim_template {
            None => errors.push(FieldError::required(path, "")),
            Some(template) => persistent_volume_claim::validate_spec(&template.spec, &format!("{path}.spec"), errors),
        }
    }
}

fn check_host_path(path: &str, source: &HostPathVolumeSource, errors: &mut Vec<FieldError>) {
    if source.path.is_empty() {
        errors.push(FieldError::required(format!("{path}.path"), ""));
    } else if source.path.split('/').any(|part| part == "..") {
        errors.push(FieldError::invalid(format!("{path}.path"), &source.path, "must not contain '..'"));
    }
    if let Some(kind) = source.type_.as_deref().filter(|t| !HOST_PATH_TYPES.contains(t)) {
        errors.push(FieldError::not_supported(format!("{path}.type"), kind, &HOST_PATH_TYPES));
    }
}

fn check_file_mode(path: &str, mode: Option<i32>, errors: &mut Vec<FieldError>) {
    if let Some(mode) = mode.filter(|m| !(0..=0o777).contains(m)) {
        let why = "must be a number between 0 and 0777 (octal), both inclusive";
        errors.push(FieldError::invalid(path, mode, why));
    }
}
