//! Strategy of PersistentVolumeClaim (v1), and the claim spec that StatefulSets and ephemeral volumes embed.

use cleat_api::claim::{claim_class, claim_phase, requested_storage};
use cleat_api::well_known::annotation;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus, TypedLocalObjectReference,
    TypedObjectReference,
};
use serde_json::Value;

use super::field_checks::{check_access_modes, check_label_selector, check_storage_quantity, check_supported};
use super::quantity::canonicalize_quantities;
use super::table_cells::{or_unset, short_access_modes};
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct PersistentVolumeClaimStrategy;

const SNAPSHOT_GROUP: &str = "snapshot.storage.k8s.io";
const IMMUTABLE_SPEC: &str =
    "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";
const RESIZE_STATES: [&str; 5] = [
    "ControllerResizeInProgress",
    "ControllerResizeInfeasible",
    "NodeResizePending",
    "NodeResizeInProgress",
    "NodeResizeInfeasible",
];

impl Strategy for PersistentVolumeClaimStrategy {
    type Object = PersistentVolumeClaim;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
            .short_names(&["pvc"])
            .with_status()
            .always_stores_first_update()
    }

    fn set_defaults(claim: &mut PersistentVolumeClaim) {
        default_spec(claim.spec.get_or_insert_default());
        let status = claim.status.get_or_insert_default();
        status.phase.get_or_insert_with(|| "Pending".into());
        canonicalize_quantities(&mut status.capacity);
        canonicalize_quantities(&mut status.allocated_resources);
    }

    fn prepare_create(claim: &mut PersistentVolumeClaim, _now: Timestamp) {
        mirror_data_source(claim.spec.get_or_insert_default());
        claim.status = Some(PersistentVolumeClaimStatus { phase: Some("Pending".into()), ..Default::default() });
    }

    fn prepare_update(new: &mut PersistentVolumeClaim, old: &PersistentVolumeClaim) {
        new.status = old.status.clone();
        mirror_data_source(new.spec.get_or_insert_default());
    }

    fn prepare_status(new: &mut PersistentVolumeClaim, old: &PersistentVolumeClaim, _now: Timestamp) {
        new.spec = old.spec.clone();
    }

    fn validate(claim: &PersistentVolumeClaim) -> Vec<FieldError> {
        let mut errors = Vec::new();
        if let Some(spec) = &claim.spec {
            validate_spec(spec, "spec", &mut errors);
        }
        errors
    }

    fn validate_update(new: &PersistentVolumeClaim, old: &PersistentVolumeClaim) -> Vec<FieldError> {
        let mut errors = Vec::new();
        check_spec_update(new, old, &mut errors);
        let beta = |c: &PersistentVolumeClaim| {
            c.metadata.annotations.as_ref().and_then(|a| a.get(annotation::STORAGE_CLASS_BETA)).cloned()
        };
        if beta(new) != beta(old) {
            let path = format!("metadata.annotations[{}]", annotation::STORAGE_CLASS_BETA);
            errors.push(FieldError::invalid(path, beta(new), "field is immutable"));
        }
        errors
    }

    fn validate_status(new: &PersistentVolumeClaim, _old: &PersistentVolumeClaim) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let status = new.status.clone().unwrap_or_default();
        for (key, state) in status.allocated_resource_statuses.iter().flatten() {
            if !RESIZE_STATES.contains(&state.as_str()) {
                let path = format!("status.allocatedResourceStatuses[{key}]");
                errors.push(FieldError::not_supported(path, state, &RESIZE_STATES));
            }
        }
        for (part, quantities) in [("capacity", &status.capacity), ("allocatedResources", &status.allocated_resources)]
        {
            for (key, raw) in quantities.iter().flatten() {
                match raw.0.parse::<cleat_api::Quantity>() {
                    Ok(quantity) if !quantity.is_negative() => {}
                    _ => {
                        let why = "must be a quantity greater than or equal to 0";
                        errors.push(FieldError::invalid(format!("status.{part}[{key}]"), &raw.0, why));
                    }
                }
            }
        }
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Status", "Phase of the claim."),
            Column::text("Volume", "Volume the claim is bound to."),
            Column::text("Capacity", "Size of the volume behind the claim."),
            Column::text("Access Modes", "Ways the volume behind the claim can be mounted."),
            Column::text("StorageClass", "Storage class the claim asks for."),
            Column::text("VolumeAttributesClass", "Volume attributes class the claim asks for."),
            AGE,
            Column::text("VolumeMode", "Whether the claim wants a file system or a block device.").wide(),
        ];
        COLUMNS
    }

    fn cells(claim: &PersistentVolumeClaim, now: Timestamp) -> Vec<Value> {
        let spec = claim.spec.clone().unwrap_or_default();
        let status = claim.status.clone().unwrap_or_default();
        let phase = match claim.metadata.deletion_timestamp {
            Some(_) => "Terminating".into(),
            None => status.phase.clone().unwrap_or_default(),
        };
        let volume = spec.volume_name.clone().unwrap_or_default();
        let (capacity, modes) = match volume.as_str() {
            "" => (String::new(), String::new()),
            _ => (
                status.capacity.as_ref().and_then(|c| c.get("storage")).map(|q| q.0.clone()).unwrap_or_default(),
                short_access_modes(status.access_modes.as_ref()),
            ),
        };
        vec![
            column::name(&claim.metadata),
            phase.into(),
            volume.into(),
            capacity.into(),
            modes.into(),
            claim_class(claim).unwrap_or_default().into(),
            or_unset(spec.volume_attributes_class_name.as_deref()),
            column::age(&claim.metadata, now),
            or_unset(spec.volume_mode.as_deref()),
        ]
    }
}

/// Also used for the claim templates of ephemeral volumes.
pub(super) fn default_spec(spec: &mut PersistentVolumeClaimSpec) {
    spec.volume_mode.get_or_insert_with(|| "Filesystem".into());
    let resources = spec.resources.get_or_insert_default();
    canonicalize_quantities(&mut resources.requests);
    canonicalize_quantities(&mut resources.limits);
}

pub(super) fn validate_spec(spec: &PersistentVolumeClaimSpec, path: &str, errors: &mut Vec<FieldError>) {
    check_access_modes(spec.access_modes.as_ref(), &format!("{path}.accessModes"), errors);
    let requests = spec.resources.as_ref().and_then(|r| r.requests.as_ref());
    check_storage_quantity(requests, &format!("{path}.resources[storage]"), errors);
    check_supported(&format!("{path}.volumeMode"), spec.volume_mode.as_ref(), &["Block", "Filesystem"], errors);
    if let Some(class) = spec.storage_class_name.as_deref().filter(|c| !c.is_empty())
        && let Err(why) = names::validate_subdomain(class)
    {
        errors.push(FieldError::invalid(format!("{path}.storageClassName"), class, why));
    }
    if let Some(selector) = &spec.selector {
        check_label_selector(&format!("{path}.selector"), selector, errors);
    }
    if let Some(source) = &spec.data_source {
        let at = format!("{path}.dataSource");
        check_data_source(&at, source.api_group.as_deref(), &source.kind, &source.name, errors);
    }
    if let Some(source) = &spec.data_source_ref {
        let at = format!("{path}.dataSourceRef");
        check_data_source(&at, source.api_group.as_deref(), &source.kind, &source.name, errors);
        let is_same_source = spec.data_source.as_ref().is_none_or(|s| *s == to_local_reference(source));
        if !is_same_source {
            errors.push(FieldError::invalid(path, "", "must match dataSourceRef"));
        }
    }
}

fn check_data_source(path: &str, group: Option<&str>, kind: &str, name: &str, errors: &mut Vec<FieldError>) {
    if name.is_empty() {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    }
    if kind.is_empty() {
        errors.push(FieldError::required(format!("{path}.kind"), ""));
    }
    if group.is_none_or(str::is_empty) && kind != "PersistentVolumeClaim" {
        let why = "must be 'PersistentVolumeClaim' when referencing the default apiGroup";
        errors.push(FieldError::invalid(path, kind, why));
    }
}

fn to_local_reference(source: &TypedObjectReference) -> TypedLocalObjectReference {
    TypedLocalObjectReference {
        api_group: source.api_group.clone(),
        kind: source.kind.clone(),
        name: source.name.clone(),
    }
}

/// Copies the one of `dataSource` and `dataSourceRef` that is set to the other. A client that sets only `dataSource` may
/// name a claim or a VolumeSnapshot there; any other kind is dropped and must be set in `dataSourceRef`.
fn mirror_data_source(spec: &mut PersistentVolumeClaimSpec) {
    if spec.data_source_ref.is_none()
        && let Some(source) = &spec.data_source
    {
        let core = source.api_group.as_deref().is_none_or(str::is_empty);
        let is_supported = (core && source.kind == "PersistentVolumeClaim")
            || (source.api_group.as_deref() == Some(SNAPSHOT_GROUP) && source.kind == "VolumeSnapshot");
        if !is_supported {
            spec.data_source = None;
        }
    }
    // Sources in another namespace are dropped, as in a Kubernetes without the CrossNamespaceVolumeDataSource feature.
    spec.data_source_ref.take_if(|s| s.namespace.as_ref().is_some_and(|n| !n.is_empty()));
    match (&spec.data_source, &spec.data_source_ref) {
        (Some(source), None) => {
            spec.data_source_ref = Some(TypedObjectReference {
                api_group: source.api_group.clone(),
                kind: source.kind.clone(),
                name: source.name.clone(),
                namespace: None,
            });
        }
        (None, Some(source)) => spec.data_source = Some(to_local_reference(source)),
        _ => {}
    }
}

/// The spec is immutable, except: the volume and the class may be set once; a bound claim may request another size and
/// another VolumeAttributesClass. A smaller request must still exceed the current capacity.
fn check_spec_update(new: &PersistentVolumeClaim, old: &PersistentVolumeClaim, errors: &mut Vec<FieldError>) {
    let unspecified = PersistentVolumeClaimSpec::default();
    let spec = new.spec.as_ref().unwrap_or(&unspecified);
    let mut allowed = old.spec.clone().unwrap_or_default();
    if allowed.volume_name.as_deref().is_none_or(str::is_empty) {
        allowed.volume_name = spec.volume_name.clone();
    }
    if allowed.storage_class_name.is_none() && spec.storage_class_name.is_some() {
        let beta = old.metadata.annotations.as_ref().and_then(|a| a.get(annotation::STORAGE_CLASS_BETA));
        if beta.is_none_or(|b| Some(b) == spec.storage_class_name.as_ref()) {
            allowed.storage_class_name = spec.storage_class_name.clone();
        }
    }
    let requests = |spec: &PersistentVolumeClaimSpec| spec.resources.as_ref().and_then(|r| r.requests.clone());
    let count =
        |spec: &PersistentVolumeClaimSpec| spec.resources.as_ref().and_then(|r| Some(r.requests.as_ref()?.len()));
    // `1Gi` and `1024Mi` are the same size.
    let same_size = count(spec) == count(&allowed)
        && requested_storage(new).zip(requested_storage(old)).is_some_and(|(new, old)| new == old);
    if same_size {
        allowed.resources.get_or_insert_default().requests = requests(spec);
    }
    if claim_phase(old) == "Bound" {
        allowed.resources.get_or_insert_default().requests = requests(spec);
        allowed.volume_attributes_class_name = spec.volume_attributes_class_name.clone();
    }
    if *spec != allowed {
        errors.push(FieldError::forbidden("spec", IMMUTABLE_SPEC));
        return;
    }
    if let (Some(new_size), Some(old_size)) = (requested_storage(new), requested_storage(old))
        && new_size < old_size
    {
        let capacity = old.status.as_ref().and_then(|s| s.capacity.as_ref()).and_then(|c| c.get("storage"));
        let capacity = capacity.and_then(|q| q.0.parse::<cleat_api::Quantity>().ok());
        if capacity.is_none_or(|c| new_size <= c) {
            let why = "field can not be less than status.capacity";
            errors.push(FieldError::forbidden("spec.resources.requests.storage", why));
        }
    }
    let current = old.status.as_ref().and_then(|s| s.current_volume_attributes_class_name.as_ref());
    if current.is_some() && spec.volume_attributes_class_name.as_deref().is_none_or(str::is_empty) {
        let why = "update from non-empty value to empty is forbidden";
        errors.push(FieldError::forbidden("spec.volumeAttributesClassName", why));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claim(spec: Value, phase: &str, capacity: &str) -> PersistentVolumeClaim {
        let status = json!({ "phase": phase, "capacity": { "storage": capacity } });
        let mut claim: PersistentVolumeClaim =
            serde_json::from_value(json!({ "metadata": { "name": "c" }, "spec": spec, "status": status })).unwrap();
        PersistentVolumeClaimStrategy::set_defaults(&mut claim);
        claim
    }

    fn spec(change: Value) -> Value {
        let mut spec = json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": "fast",
            "resources": { "requests": { "storage": "2Gi" } },
        });
        json_patch::merge(&mut spec, &change);
        spec
    }

    #[test]
    fn only_some_fields_of_a_claim_may_change() {
        let gold = json!({ "volumeAttributesClassName": "gold" });
        let larger = json!({ "resources": { "requests": { "storage": "3Gi" } } });
        for (case, phase, before, after, field) in [
            ("nothing", "Pending", json!({}), json!({}), None),
            ("the volume, once", "Pending", json!({}), json!({ "volumeName": "v" }), None),
            ("the volume again", "Pending", json!({ "volumeName": "v" }), json!({ "volumeName": "w" }), Some("spec")),
            ("a class where none was", "Pending", json!({ "storageClassName": null }), json!({}), None),
            ("the class", "Pending", json!({}), json!({ "storageClassName": "slow" }), Some("spec")),
            ("the size while pending", "Pending", json!({}), larger.clone(), Some("spec")),
            ("the size when bound", "Bound", json!({}), larger.clone(), None),
            ("the mode", "Bound", json!({}), json!({ "volumeMode": "Block" }), Some("spec")),
            ("no class any more", "Pending", json!({}), json!({ "storageClassName": null }), Some("spec")),
            ("a class where none was wanted", "Pending", json!({ "storageClassName": "" }), json!({}), Some("spec")),
            ("the attributes while pending", "Pending", json!({}), gold.clone(), Some("spec")),
            ("the attributes when bound", "Bound", json!({}), gold.clone(), None),
            (
                "shrink below the capacity",
                "Bound",
                larger.clone(),
                json!({ "resources": { "requests": { "storage": "1Gi" } } }),
                Some("spec.resources.requests.storage"),
            ),
            (
                "shrink above the capacity",
                "Bound",
                larger,
                json!({ "resources": { "requests": { "storage": "2500Mi" } } }),
                None,
            ),
        ] {
            let old = claim(spec(before), phase, "2Gi");
            let new = claim(spec(after), phase, "2Gi");
            let errors = PersistentVolumeClaimStrategy::validate_update(&new, &old);
            assert_eq!(errors.first().map(|e| e.field.as_str()), field, "{case}: {errors:?}");
        }
    }

    #[test]
    fn an_applied_attributes_class_cannot_be_removed() {
        let with = |class: Option<&str>, current: Option<&str>| {
            let mut c = claim(spec(json!({ "volumeAttributesClassName": class })), "Bound", "2Gi");
            c.status.as_mut().unwrap().current_volume_attributes_class_name = current.map(ToOwned::to_owned);
            c
        };
        let field = Some("spec.volumeAttributesClassName");
        for (case, current, after, want) in [
            ("another class", Some("gold"), Some("silver"), None),
            ("none", Some("gold"), None, field),
            ("none, as an empty string", Some("gold"), Some(""), field),
            ("none, before one was applied", None, None, None),
        ] {
            let errors =
                PersistentVolumeClaimStrategy::validate_update(&with(after, current), &with(Some("gold"), current));
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{case}: {errors:?}");
        }
    }

    #[test]
    fn the_class_of_the_beta_annotation_may_be_set_in_the_spec() {
        let with = |class: Option<&str>| {
            let mut c = claim(spec(json!({ "storageClassName": class })), "Pending", "0");
            c.metadata.annotations = Some([(annotation::STORAGE_CLASS_BETA.to_owned(), "fast".to_owned())].into());
            c
        };
        for (class, want) in [("fast", None), ("slow", Some("spec"))] {
            let errors = PersistentVolumeClaimStrategy::validate_update(&with(Some(class)), &with(None));
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{class}: {errors:?}");
        }
    }

    #[test]
    fn data_source_and_data_source_ref_are_mirrored() {
        let known = json!({ "apiGroup": SNAPSHOT_GROUP, "kind": "VolumeSnapshot", "name": "s" });
        let other = json!({ "apiGroup": "example.com", "kind": "Backup", "name": "b" });
        let elsewhere = json!({ "kind": "PersistentVolumeClaim", "name": "c", "namespace": "elsewhere" });
        for (case, change, want) in [
            ("the older field", json!({ "dataSource": known }), Some("VolumeSnapshot")),
            ("the newer field", json!({ "dataSourceRef": other }), Some("Backup")),
            ("a kind that the older field does not support", json!({ "dataSource": other }), None),
            ("another namespace", json!({ "dataSourceRef": elsewhere }), None),
        ] {
            let mut claim = claim(spec(change), "Pending", "0");
            PersistentVolumeClaimStrategy::prepare_create(&mut claim, Timestamp::UNIX_EPOCH);
            let spec = claim.spec.unwrap();
            assert_eq!(spec.data_source.as_ref().map(|s| s.kind.as_str()), want, "{case}");
            assert_eq!(spec.data_source_ref.as_ref().map(|s| s.kind.as_str()), want, "{case}");
        }
    }

    #[test]
    fn invalid_claims_name_the_field() {
        for (case, change, field) in [
            ("no access mode", json!({ "accessModes": [] }), "spec.accessModes"),
            ("an unknown mode", json!({ "accessModes": ["Sometimes"] }), "spec.accessModes"),
            ("exclusive mode", json!({ "accessModes": ["ReadWriteOncePod", "ReadWriteOnce"] }), "spec.accessModes"),
            ("no size", json!({ "resources": null }), "spec.resources[storage]"),
            ("size zero", json!({ "resources": { "requests": { "storage": "0" } } }), "spec.resources[storage]"),
            ("unknown volume mode", json!({ "volumeMode": "Tape" }), "spec.volumeMode"),
            ("bad class name", json!({ "storageClassName": "Not_Good" }), "spec.storageClassName"),
        ] {
            let errors = PersistentVolumeClaimStrategy::validate(&claim(spec(change), "Pending", "0"));
            assert_eq!(errors.first().map(|e| e.field.as_str()), Some(field), "{case}");
        }
    }
}
