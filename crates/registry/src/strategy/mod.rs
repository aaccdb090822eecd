//! One file per kind: its descriptor, defaults, what each endpoint may change, what is valid, and its columns.

mod attachment;
mod attributes_class;
mod capacity;
mod claim;
mod class;
mod config_map;
mod csi_driver;
mod csi_node;
mod definition;
mod event;
mod event_v1;
mod lease;
mod namespace;
mod node;
mod pod;
mod quantity;
pub mod rbac;
mod secret;
mod service_account;
mod volume;
mod workload;

pub use workload::shown_selector;

use std::collections::BTreeMap;
use std::sync::Arc;

use cleat_api::{Quantity, access};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Written;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::Value;

use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::{Erased, Kind};
use cleat_apimachinery::names;

pub fn all() -> Vec<Arc<dyn Kind>> {
    vec![
        Arc::new(Erased::<config_map::ConfigMaps>::new()),
        Arc::new(Erased::<event::Events>::new()),
        Arc::new(Erased::<namespace::Namespaces>::new()),
        Arc::new(Erased::<node::Nodes>::new()),
        Arc::new(Erased::<claim::Claims>::new()),
        Arc::new(Erased::<volume::Volumes>::new()),
        Arc::new(Erased::<pod::Pods>::new()),
        Arc::new(Erased::<secret::Secrets>::new()),
        Arc::new(Erased::<service_account::ServiceAccounts>::new()),
        Arc::new(Erased::<lease::Leases>::new()),
        Arc::new(Erased::<workload::DaemonSets>::new()),
        Arc::new(Erased::<workload::Deployments>::new()),
        Arc::new(Erased::<workload::ReplicaSets>::new()),
        Arc::new(Erased::<workload::StatefulSets>::new()),
        Arc::new(Erased::<workload::Jobs>::new()),
        Arc::new(Erased::<event_v1::Events>::new()),
        Arc::new(Erased::<definition::Definitions>::new()),
        Arc::new(Erased::<rbac::ClusterRoleBindings>::new()),
        Arc::new(Erased::<rbac::ClusterRoles>::new()),
        Arc::new(Erased::<rbac::RoleBindings>::new()),
        Arc::new(Erased::<rbac::Roles>::new()),
        Arc::new(Erased::<csi_driver::CsiDrivers>::new()),
        Arc::new(Erased::<csi_node::CsiNodes>::new()),
        Arc::new(Erased::<capacity::Capacities>::new()),
        Arc::new(Erased::<class::Classes>::new()),
        Arc::new(Erased::<attachment::Attachments>::new()),
        Arc::new(Erased::<attributes_class::AttributesClasses>::new()),
    ]
}

type Quantities = BTreeMap<String, Written>;

/// Rewrites quantities in canonical form; what is no quantity is left for validation to name.
fn canonical(quantities: &mut Option<Quantities>) {
    for written in quantities.iter_mut().flat_map(|q| q.values_mut()) {
        if let Ok(quantity) = written.0.parse::<Quantity>()
            && !quantity::is_kept(&written.0)
        {
            written.0 = quantity.to_string();
        }
    }
}

/// The `storage` entry of a list of resources, which must be there and positive.
fn check_storage(quantities: Option<&Quantities>, path: &str, errors: &mut Vec<FieldError>) {
    let Some(written) = quantities.and_then(|q| q.get("storage")) else {
        errors.push(FieldError::required(path, ""));
        return;
    };
    match written.0.parse::<Quantity>() {
        Ok(quantity) if quantity.is_positive() => {}
        Ok(_) => errors.push(FieldError::invalid(path, &written.0, "must be greater than zero")),
        Err(error) => errors.push(FieldError::invalid(path, &written.0, error.to_string())),
    }
}

fn check_access_modes(modes: Option<&Vec<String>>, path: &str, errors: &mut Vec<FieldError>) {
    let modes = modes.map(Vec::as_slice).unwrap_or_default();
    if modes.is_empty() {
        errors.push(FieldError::required(path, "at least 1 access mode is required"));
    }
    for mode in modes.iter().filter(|m| !access::ALL_MODES.contains(&m.as_str())) {
        errors.push(FieldError::not_supported(path, mode, &access::ALL_MODES));
    }
    if modes.len() > 1 && modes.iter().any(|m| m == access::READ_WRITE_ONCE_POD) {
        let why = "may not use ReadWriteOncePod with other access modes";
        errors.push(FieldError::forbidden(path, why));
    }
}

/// Access modes as `RWO,RWX`, always in the same order.
fn short_access_modes(modes: Option<&Vec<String>>) -> String {
    let has = |mode: &str| modes.is_some_and(|m| m.iter().any(|x| x == mode));
    let short = [
        (access::READ_WRITE_ONCE, "RWO"),
        (access::READ_ONLY_MANY, "ROX"),
        (access::READ_WRITE_MANY, "RWX"),
        (access::READ_WRITE_ONCE_POD, "RWOP"),
    ];
    short.iter().filter(|(mode, _)| has(mode)).map(|(_, short)| *short).collect::<Vec<_>>().join(",")
}

const PARAMETERS: usize = 512;
const PARAMETERS_BYTES: usize = 256 << 10;

/// What a class hands to its driver.
fn check_parameters(parameters: Option<&BTreeMap<String, String>>, errors: &mut Vec<FieldError>) {
    let Some(parameters) = parameters else { return };
    if parameters.len() > PARAMETERS {
        errors.push(FieldError::too_long("parameters", PARAMETERS));
    }
    if parameters.keys().any(String::is_empty) {
        errors.push(FieldError::invalid("parameters", "", "field can not be empty."));
    }
    if parameters.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>() > PARAMETERS_BYTES {
        errors.push(FieldError::too_long("parameters", PARAMETERS_BYTES));
    }
}

fn check_choice(path: &str, value: Option<&String>, allowed: &[&str], errors: &mut Vec<FieldError>) {
    if let Some(value) = value.filter(|v| !allowed.contains(&v.as_str())) {
        errors.push(FieldError::not_supported(path, value, allowed));
    }
}

fn check_selector(path: &str, selector: &LabelSelector, errors: &mut Vec<FieldError>) {
    for (key, value) in selector.match_labels.iter().flatten() {
        for (part, checked) in [(key, names::qualified(key)), (value, names::label_value(value))] {
            if let Err(why) = checked {
                errors.push(FieldError::invalid(format!("{path}.matchLabels"), part, why));
            }
        }
    }
    for (i, expression) in selector.match_expressions.iter().flatten().enumerate() {
        let path = format!("{path}.matchExpressions[{i}]");
        let has_values = expression.values.as_ref().is_some_and(|v| !v.is_empty());
        match (expression.operator.as_str(), has_values) {
            ("In" | "NotIn", false) => {
                let why = "must be specified when `operator` is 'In' or 'NotIn'";
                errors.push(FieldError::required(format!("{path}.values"), why));
            }
            ("Exists" | "DoesNotExist", true) => {
                let why = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                errors.push(FieldError::forbidden(format!("{path}.values"), why));
            }
            ("In" | "NotIn" | "Exists" | "DoesNotExist", _) => {}
            (other, _) => {
                let why = "not a valid selector operator";
                errors.push(FieldError::invalid(format!("{path}.operator"), other, why));
            }
        }
        if let Err(why) = names::qualified(&expression.key) {
            errors.push(FieldError::invalid(format!("{path}.key"), &expression.key, why));
        }
    }
}

/// A cell that shows `<none>` where there is nothing.
fn or_none(value: Option<&str>) -> Value {
    value.filter(|v| !v.is_empty()).unwrap_or("<none>").into()
}

/// A cell that shows `<unset>` where there is nothing.
fn or_unset(value: Option<&str>) -> Value {
    value.filter(|v| !v.is_empty()).unwrap_or("<unset>").into()
}

fn immutable<T: PartialEq + serde::Serialize>(path: &str, new: &T, old: &T, errors: &mut Vec<FieldError>) {
    if new != old {
        errors.push(FieldError::invalid(path, new, "field is immutable"));
    }
}

/// Keys of Kubernetes' own are what it tells drivers itself.
fn check_flex_options(path: &str, options: Option<&BTreeMap<String, String>>, errors: &mut Vec<FieldError>) {
    for key in options.into_iter().flat_map(BTreeMap::keys) {
        let namespace = format!(".{}", key.split('/').next().unwrap_or_default().to_lowercase());
        if [".kubernetes.io", ".k8s.io"].iter().any(|reserved| namespace.ends_with(reserved)) {
            let why = "kubernetes.io and k8s.io namespaces are reserved";
            errors.push(FieldError::invalid(format!("{path}[{key}]"), key, why));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_kinds_that_are_kept_are_stored_in_one_place() {
        let mut places = HashSet::new();
        for kind in all().iter().filter(|kind| kind.is_cacheable()) {
            assert!(places.insert(kind.descriptor().prefix(None)), "{}", kind.descriptor().kind);
        }
        assert!(places.len() > 10);
    }
}
