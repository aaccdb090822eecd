//! Strategy of CSINode (storage.k8s.io/v1).

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver};
use serde_json::Value;

use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct CsiNodeStrategy;

const MAX_NODE_ID_BYTES: usize = 256;

impl Strategy for CsiNodeStrategy {
    type Object = CSINode;

    fn descriptor() -> Descriptor {
        Descriptor::new("storage.k8s.io", "v1", "CSINode", "csinodes").cluster_scoped().put_needs_version()
    }

    fn validate(node: &CSINode) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let mut names = BTreeSet::new();
        for (i, driver) in node.spec.drivers.iter().enumerate() {
            let path = format!("spec.drivers[{i}]");
            if !names.insert(&driver.name) {
                errors.push(FieldError::duplicate(format!("{path}.name"), &driver.name));
            }
            check_driver(&path, driver, &mut errors);
        }
        errors
    }

    fn validate_update(new: &CSINode, old: &CSINode) -> Vec<FieldError> {
        let mut errors = Vec::new();
        for (i, driver) in new.spec.drivers.iter().enumerate() {
            let Some(registered) = old.spec.drivers.iter().find(|d| d.name == driver.name) else { continue };
            // Only the number of volumes may change while the driver is registered.
            let allowed = CSINodeDriver { allocatable: driver.allocatable.clone(), ..registered.clone() };
            if *driver != allowed {
                let why = "field is immutable";
                errors.push(FieldError::invalid(format!("spec.drivers[{i}]"), driver, why));
            }
        }
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] =
            &[NAME, Column::text("Drivers", "How many CSI drivers the node has.").with_type("integer"), AGE];
        COLUMNS
    }

    fn cells(node: &CSINode, now: Timestamp) -> Vec<Value> {
        vec![column::name(&node.metadata), node.spec.drivers.len().into(), column::age(&node.metadata, now)]
    }
}

fn check_driver(path: &str, driver: &CSINodeDriver, errors: &mut Vec<FieldError>) {
    match driver.name.as_str() {
        "" => errors.push(FieldError::required(format!("{path}.name"), "")),
        name => {
            if let Err(why) = names::validate_csi_driver_name(name) {
                errors.push(FieldError::invalid(format!("{path}.name"), name, why));
            }
        }
    }
    match driver.node_id.len() {
        0 => errors.push(FieldError::required(format!("{path}.nodeID"), "")),
        length if length > MAX_NODE_ID_BYTES => {
            let why = format!("must be {MAX_NODE_ID_BYTES} characters or less");
            errors.push(FieldError::invalid(format!("{path}.nodeID"), &driver.node_id, why));
        }
        _ => {}
    }
    let mut keys = BTreeSet::new();
    for key in driver.topology_keys.iter().flatten() {
        if !keys.insert(key) {
            errors.push(FieldError::duplicate(format!("{path}.topologyKeys"), key));
        }
        if let Err(why) = names::validate_qualified_name(key) {
            errors.push(FieldError::invalid(format!("{path}.topologyKeys"), key, why));
        }
    }
    if let Some(count) = driver.allocatable.as_ref().and_then(|a| a.count).filter(|c| *c < 0) {
        let why = "must be greater than or equal to 0";
        errors.push(FieldError::invalid(format!("{path}.allocatable.count"), count, why));
    }
}
