//! Strategy of VolumeAttributesClass (storage.k8s.io/v1).

use jiff::Timestamp;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use serde_json::Value;

use super::field_checks::check_class_parameters;
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct VolumeAttributesClassStrategy;

impl Strategy for VolumeAttributesClassStrategy {
    type Object = VolumeAttributesClass;

    fn descriptor() -> Descriptor {
        Descriptor::new("storage.k8s.io", "v1", "VolumeAttributesClass", "volumeattributesclasses")
            .short_names(&["vac"])
            .cluster_scoped()
    }

    fn validate(class: &VolumeAttributesClass) -> Vec<FieldError> {
        let mut errors = Vec::new();
        match class.driver_name.as_str() {
            "" => errors.push(FieldError::required("driverName", "")),
            driver => {
                if let Err(why) = names::validate_csi_driver_name(driver) {
                    errors.push(FieldError::invalid("driverName", driver, why));
                }
            }
        }
        if class.parameters.as_ref().is_none_or(|p| p.is_empty()) {
            errors.push(FieldError::required("parameters", "must contain at least one key/value pair"));
        }
        check_class_parameters(class.parameters.as_ref(), &mut errors);
        errors
    }

    fn validate_update(new: &VolumeAttributesClass, old: &VolumeAttributesClass) -> Vec<FieldError> {
        let mut errors = Vec::new();
        if new.driver_name != old.driver_name {
            errors.push(FieldError::forbidden("driverName", "updates to driverName are forbidden."));
        }
        if new.parameters != old.parameters {
            errors.push(FieldError::forbidden("parameters", "updates to parameters are forbidden."));
        }
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[NAME, Column::text("DriverName", "CSI driver the class is for."), AGE];
        COLUMNS
    }

    fn cells(class: &VolumeAttributesClass, now: Timestamp) -> Vec<Value> {
        vec![column::name(&class.metadata), class.driver_name.clone().into(), column::age(&class.metadata, now)]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_volume_attributes_class_is_complete_and_immutable() {
        let class = |driver: &str, parameters: Value| -> VolumeAttributesClass {
            serde_json::from_value(json!({ "driverName": driver, "parameters": parameters })).unwrap()
        };
        let good = class("block.cleat.dev", json!({ "iops": "100" }));
        for (case, class, want) in [
            ("complete", good.clone(), None),
            ("no driver", class("", json!({ "a": "b" })), Some("driverName")),
            ("no parameters", class("d", json!({})), Some("parameters")),
            ("a parameter without a name", class("d", json!({ "": "b" })), Some("parameters")),
        ] {
            let errors = VolumeAttributesClassStrategy::validate(&class);
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{case}");
        }
        let other = class("other.dev", json!({ "iops": "200" }));
        assert_eq!(VolumeAttributesClassStrategy::validate_update(&other, &good).len(), 2);
    }
}
