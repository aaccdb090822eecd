//! Strategy of CSIStorageCapacity (storage.k8s.io/v1).

use cleat_api::Quantity;
use jiff::Timestamp;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;
use serde_json::Value;

use super::field_checks::{check_immutable, check_label_selector};
use cleat_apimachinery::column::{self, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct CsiStorageCapacityStrategy;

impl Strategy for CsiStorageCapacityStrategy {
    type Object = CSIStorageCapacity;

    fn descriptor() -> Descriptor {
        Descriptor::new("storage.k8s.io", "v1", "CSIStorageCapacity", "csistoragecapacities")
            .deletes_with_status()
            .put_needs_version()
    }

    fn set_defaults(capacity: &mut CSIStorageCapacity) {
        for raw in [&mut capacity.capacity, &mut capacity.maximum_volume_size].into_iter().flatten() {
            if let Ok(quantity) = raw.0.parse::<Quantity>() {
                raw.0 = quantity.to_string();
            }
        }
    }

    fn validate(capacity: &CSIStorageCapacity) -> Vec<FieldError> {
        let mut errors = Vec::new();
        if let Err(why) = names::validate_subdomain(&capacity.storage_class_name) {
            errors.push(FieldError::invalid("storageClassName", &capacity.storage_class_name, why));
        }
        if let Some(topology) = &capacity.node_topology {
            check_label_selector("nodeTopology", topology, &mut errors);
        }
        check_quantity("capacity", capacity.capacity.as_ref(), &mut errors);
        check_quantity("maximumVolumeSize", capacity.maximum_volume_size.as_ref(), &mut errors);
        errors
    }

    fn validate_update(new: &CSIStorageCapacity, old: &CSIStorageCapacity) -> Vec<FieldError> {
        let mut errors = Vec::new();
        check_immutable("nodeTopology", &new.node_topology, &old.node_topology, &mut errors);
        check_immutable("storageClassName", &new.storage_class_name, &old.storage_class_name, &mut errors);
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[NAME, column::CREATED];
        COLUMNS
    }

    fn cells(capacity: &CSIStorageCapacity, _now: Timestamp) -> Vec<Value> {
        vec![column::name(&capacity.metadata), column::created(&capacity.metadata)]
    }
}

fn check_quantity(path: &str, raw: Option<&RawQuantity>, errors: &mut Vec<FieldError>) {
    let Some(raw) = raw else { return };
    match raw.0.parse::<Quantity>() {
        Ok(quantity) if quantity.is_negative() => {
            errors.push(FieldError::invalid(path, &raw.0, "must be greater than or equal to 0"));
        }
        Ok(_) => {}
        Err(error) => errors.push(FieldError::invalid(path, &raw.0, error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn capacity(change: Value) -> CSIStorageCapacity {
        let mut object = json!({ "metadata": { "name": "c" }, "storageClassName": "fast", "capacity": "1024Mi" });
        json_patch::merge(&mut object, &change);
        let mut capacity = serde_json::from_value(object).unwrap();
        CsiStorageCapacityStrategy::set_defaults(&mut capacity);
        capacity
    }

    #[test]
    fn invalid_capacities_name_the_field_and_topology_is_immutable() {
        assert_eq!(capacity(json!({})).capacity.unwrap().0, "1Gi", "quantities are canonical");
        for (case, change, field) in [
            ("nothing", json!({}), None),
            ("no class", json!({ "storageClassName": "" }), Some("storageClassName")),
            ("a negative capacity", json!({ "capacity": "-1" }), Some("capacity")),
            ("a negative maximum", json!({ "maximumVolumeSize": "-1" }), Some("maximumVolumeSize")),
            (
                "an invalid topology",
                json!({ "nodeTopology": { "matchLabels": { "bad key": "x" } } }),
                Some("nodeTopology.matchLabels"),
            ),
        ] {
            let errors = CsiStorageCapacityStrategy::validate(&capacity(change));
            assert_eq!(errors.first().map(|e| e.field.as_str()), field, "{case}");
        }
        let moved = capacity(json!({ "storageClassName": "slow", "nodeTopology": {} }));
        let fields: Vec<_> = CsiStorageCapacityStrategy::validate_update(&moved, &capacity(json!({})))
            .into_iter()
            .map(|e| e.field)
            .collect();
        assert_eq!(fields, ["nodeTopology", "storageClassName"]);
    }
}
