//! Strategy of CSIDriver (storage.k8s.io/v1).

use jiff::Timestamp;
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::Value;

use super::field_checks::{check_immutable, check_supported};
use super::table_cells::{or_none, or_unset};
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct CsiDriverStrategy;

impl Strategy for CsiDriverStrategy {
    type Object = CSIDriver;

    fn descriptor() -> Descriptor {
        Descriptor::new("storage.k8s.io", "v1", "CSIDriver", "csidrivers").cluster_scoped().put_needs_version()
    }

    fn set_defaults(driver: &mut CSIDriver) {
        let spec = &mut driver.spec;
        spec.attach_required.get_or_insert(true);
        spec.pod_info_on_mount.get_or_insert(false);
        spec.storage_capacity.get_or_insert(false);
        spec.fs_group_policy.get_or_insert_with(|| "ReadWriteOnceWithFSType".into());
        spec.requires_republish.get_or_insert(false);
        spec.se_linux_mount.get_or_insert(false);
        spec.prevent_pod_scheduling_if_missing.get_or_insert(false);
        let modes = spec.volume_lifecycle_modes.get_or_insert_default();
        if modes.is_empty() {
            modes.push("Persistent".into());
        }
    }

    fn prepare_update(new: &mut CSIDriver, old: &CSIDriver) {
        if new.spec != old.spec {
            new.metadata.generation = Some(old.metadata.generation.unwrap_or(0) + 1);
        }
    }

    fn validate(driver: &CSIDriver) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = &driver.spec;
        let policies = ["ReadWriteOnceWithFSType", "File", "None"];
        check_supported("spec.fsGroupPolicy", spec.fs_group_policy.as_ref(), &policies, &mut errors);
        for mode in spec.volume_lifecycle_modes.iter().flatten() {
            check_supported("spec.volumeLifecycleModes", Some(mode), &["Ephemeral", "Persistent"], &mut errors);
        }
        let mut audiences = std::collections::BTreeSet::new();
        for (i, request) in spec.token_requests.iter().flatten().enumerate() {
            let path = format!("spec.tokenRequests[{i}]");
            if !audiences.insert(&request.audience) {
                errors.push(FieldError::duplicate(format!("{path}.audience"), &request.audience));
            }
            if let Some(seconds) = request.expiration_seconds.filter(|s| !(600..=1 << 32).contains(s)) {
                let why = "may not specify a duration less than 10 minutes or larger than 2^32 seconds";
                errors.push(FieldError::invalid(format!("{path}.expirationSeconds"), seconds, why));
            }
        }
        if let Some(period) = spec.node_allocatable_update_period_seconds.filter(|p| *p < 10) {
            let why = "must be greater than or equal to 10 seconds";
            errors.push(FieldError::invalid("spec.nodeAllocatableUpdatePeriodSeconds", period, why));
        }
        if spec.service_account_token_in_secrets.is_some() && spec.token_requests.as_ref().is_none_or(Vec::is_empty) {
            let why = "can not be set without tokenRequests";
            let value = spec.service_account_token_in_secrets;
            errors.push(FieldError::invalid("spec.serviceAccountTokenInSecrets", value, why));
        }
        errors
    }

    fn validate_update(new: &CSIDriver, old: &CSIDriver) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let (new, old) = (&new.spec, &old.spec);
        check_immutable("spec.attachedRequired", &new.attach_required, &old.attach_required, &mut errors);
        let (new_modes, old_modes) = (&new.volume_lifecycle_modes, &old.volume_lifecycle_modes);
        check_immutable("spec.volumeLifecycleModes", new_modes, old_modes, &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("AttachRequired", "Whether volumes of the driver must be attached before use.")
                .with_type("boolean"),
            Column::text("PodInfoOnMount", "Whether the driver gets information about the pod at mount.")
                .with_type("boolean"),
            Column::text("StorageCapacity", "Whether the driver's capacity guides scheduling.").with_type("boolean"),
            Column::text("TokenRequests", "Audiences of the service account tokens the driver gets."),
            Column::text("RequiresRepublish", "Whether mounts are refreshed periodically.").with_type("boolean"),
            Column::text("Modes", "Lifecycles of volumes the driver supports."),
            AGE,
        ];
        COLUMNS
    }

    fn cells(driver: &CSIDriver, now: Timestamp) -> Vec<Value> {
        let spec = &driver.spec;
        let audiences: Vec<_> = spec.token_requests.iter().flatten().map(|t| t.audience.as_str()).collect();
        let modes = spec.volume_lifecycle_modes.as_ref().map(|m| m.join(","));
        vec![
            column::name(&driver.metadata),
            spec.attach_required.unwrap_or(true).into(),
            spec.pod_info_on_mount.unwrap_or(false).into(),
            spec.storage_capacity.unwrap_or(false).into(),
            or_unset(Some(&audiences.join(","))),
            spec.requires_republish.unwrap_or(false).into(),
            or_none(modes.as_deref()),
            column::age(&driver.metadata, now),
        ]
    }
}
