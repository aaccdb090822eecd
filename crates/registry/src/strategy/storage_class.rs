//! Strategy of StorageClass (storage.k8s.io/v1).

use cleat_api::well_known::annotation;
use jiff::Timestamp;
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::Value;

use super::field_checks::{check_class_parameters, check_immutable, check_supported};
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct StorageClassStrategy;

impl Strategy for StorageClassStrategy {
    type Object = StorageClass;

    fn descriptor() -> Descriptor {
        Descriptor::new("storage.k8s.io", "v1", "StorageClass", "storageclasses").short_names(&["sc"]).cluster_scoped()
    }

    fn set_defaults(class: &mut StorageClass) {
        class.reclaim_policy.get_or_insert_with(|| "Delete".into());
        class.volume_binding_mode.get_or_insert_with(|| "Immediate".into());
    }

    fn validate(class: &StorageClass) -> Vec<FieldError> {
        let mut errors = Vec::new();
        match class.provisioner.as_str() {
            "" => errors.push(FieldError::required("provisioner", "")),
            provisioner => {
                if let Err(why) = names::validate_qualified_name(&provisioner.to_ascii_lowercase()) {
                    errors.push(FieldError::invalid("provisioner", provisioner, why));
                }
            }
        }
        check_class_parameters(class.parameters.as_ref(), &mut errors);
        let terms = class.allowed_topologies.as_deref().unwrap_or_default();
        for i in (0..terms.len()).filter(|i| terms[..*i].contains(&terms[*i])) {
            errors.push(FieldError::duplicate(format!("allowedTopologies[{i}].matchLabelExpressions"), ""));
        }
        check_supported("reclaimPolicy", class.reclaim_policy.as_ref(), &["Delete", "Retain"], &mut errors);
        let modes = ["Immediate", "WaitForFirstConsumer"];
        check_supported("volumeBindingMode", class.volume_binding_mode.as_ref(), &modes, &mut errors);
        errors
    }

    fn validate_update(new: &StorageClass, old: &StorageClass) -> Vec<FieldError> {
        let mut errors = Vec::new();
        if new.parameters.clone().unwrap_or_default() != old.parameters.clone().unwrap_or_default() {
            errors.push(FieldError::forbidden("parameters", "updates to parameters are forbidden."));
        }
        if new.provisioner != old.provisioner {
            errors.push(FieldError::forbidden("provisioner", "updates to provisioner are forbidden."));
        }
        if new.reclaim_policy != old.reclaim_policy {
            errors.push(FieldError::forbidden("reclaimPolicy", "updates to reclaimPolicy are forbidden."));
        }
        check_immutable("volumeBindingMode", &new.volume_binding_mode, &old.volume_binding_mode, &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Provisioner", "Provisioner that creates volumes of this class."),
            Column::text("ReclaimPolicy", "What happens to a volume of this class when its claim is deleted."),
            Column::text("VolumeBindingMode", "When volumes of this class are created and bound."),
            Column::text("AllowVolumeExpansion", "Whether claims of this class may grow."),
            AGE,
        ];
        COLUMNS
    }

    fn cells(class: &StorageClass, now: Timestamp) -> Vec<Value> {
        let is_default = [annotation::DEFAULT_CLASS, annotation::DEFAULT_CLASS_BETA].iter().any(|key| {
            class.metadata.annotations.as_ref().and_then(|a| a.get(*key)).is_some_and(|value| value == "true")
        });
        let mut name = class.metadata.name.clone().unwrap_or_default();
        if is_default {
            name += " (default)";
        }
        vec![
            name.into(),
            class.provisioner.clone().into(),
            class.reclaim_policy.clone().unwrap_or_default().into(),
            class.volume_binding_mode.clone().unwrap_or_default().into(),
            class.allow_volume_expansion.unwrap_or(false).into(),
            column::age(&class.metadata, now),
        ]
    }
}
