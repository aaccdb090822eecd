//! Strategy of CustomResourceDefinition (apiextensions.k8s.io/v1): the definition itself. The kinds that definitions add are in
//! `crate::custom`.

mod structural_check;

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceColumnDefinition, CustomResourceConversion, CustomResourceDefinition, CustomResourceDefinitionNames,
    CustomResourceDefinitionStatus, CustomResourceDefinitionVersion, JSONSchemaProps,
};
use serde_json::Value;

use crate::custom::{CLEANUP_FINALIZER, JsonPath, StructuralSchema};
use crate::strategy::field_checks::{check_immutable, check_supported};
use cleat_apimachinery::column::{self, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct CustomResourceDefinitionStrategy;

const APPROVAL_ANNOTATION: &str = "api-approved.kubernetes.io";

impl Strategy for CustomResourceDefinitionStrategy {
    type Object = CustomResourceDefinition;

    fn descriptor() -> Descriptor {
        Descriptor::new("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")
            .short_names(&["crd", "crds"])
            .category("api-extensions")
            .cluster_scoped()
            .with_status()
            .deletes_with_status()
            .put_needs_version()
    }

    fn set_defaults(definition: &mut CustomResourceDefinition) {
        let spec = &mut definition.spec;
        let kind = spec.names.kind.clone();
        if !kind.is_empty() {
            spec.names.singular.get_or_insert_with(|| kind.to_lowercase());
            spec.names.list_kind.get_or_insert_with(|| format!("{kind}List"));
        }
        spec.preserve_unknown_fields.take_if(|p| !*p);
        spec.conversion.get_or_insert_with(|| CustomResourceConversion { strategy: "None".into(), webhook: None });
        definition.status.get_or_insert_default().accepted_names.get_or_insert_default();
    }

    fn prepare_create(definition: &mut CustomResourceDefinition, _now: Timestamp) {
        definition.metadata.generation = Some(1);
        let finalizers = definition.metadata.finalizers.get_or_insert_default();
        if !finalizers.iter().any(|f| f == CLEANUP_FINALIZER) {
            finalizers.push(CLEANUP_FINALIZER.into());
        }
        definition.status = Some(CustomResourceDefinitionStatus {
            accepted_names: Some(CustomResourceDefinitionNames::default()),
            stored_versions: storage_version(definition).map(|v| vec![v.into()]),
            ..Default::default()
        });
    }

    fn prepare_update(new: &mut CustomResourceDefinition, old: &CustomResourceDefinition) {
        new.status = old.status.clone();
        if let Some(version) = storage_version(new).map(ToOwned::to_owned) {
            let stored = new.status.get_or_insert_default().stored_versions.get_or_insert_default();
            if !stored.contains(&version) {
                stored.push(version);
            }
        }
        if new.spec != old.spec {
            new.metadata.generation = Some(old.metadata.generation.unwrap_or(0) + 1);
        }
    }

    fn prepare_status(new: &mut CustomResourceDefinition, old: &CustomResourceDefinition, _now: Timestamp) {
        let status = new.status.take();
        *new = CustomResourceDefinition { status, ..old.clone() };
    }

    fn validate(definition: &CustomResourceDefinition) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = &definition.spec;
        let expected_name = format!("{}.{}", spec.names.plural, spec.group);
        let name = definition.metadata.name.as_deref().unwrap_or_default();
        if name != expected_name {
            errors.push(FieldError::invalid("metadata.name", name, r#"must be spec.names.plural+"."+spec.group"#));
        }
        check_approval(definition, &mut errors);
        check_group(&spec.group, &mut errors);
        match spec.scope.as_str() {
            "" => errors.push(FieldError::required("spec.scope", "")),
            _ => check_supported("spec.scope", Some(&spec.scope), &["Cluster", "Namespaced"], &mut errors),
        }
        check_names(&spec.names, &mut errors);
        check_versions(definition, &mut errors);
        let conversion = spec.conversion.as_ref().map(|c| c.strategy.clone());
        check_supported("spec.conversion.strategy", conversion.as_ref(), &["None", "Webhook"], &mut errors);
        if conversion.as_deref() == Some("Webhook") {
            let why = "this server converts nothing by webhook";
            errors.push(FieldError::forbidden("spec.conversion.strategy", why));
        }
        errors
    }

    fn validate_update(new: &CustomResourceDefinition, old: &CustomResourceDefinition) -> Vec<FieldError> {
        let mut errors = Vec::new();
        check_immutable("spec.group", &new.spec.group, &old.spec.group, &mut errors);
        check_immutable("spec.names.plural", &new.spec.names.plural, &old.spec.names.plural, &mut errors);
        if is_established(old) {
            check_immutable("spec.scope", &new.spec.scope, &old.spec.scope, &mut errors);
            check_immutable("spec.names.kind", &new.spec.names.kind, &old.spec.names.kind, &mut errors);
        }
        let stored = old.status.as_ref().and_then(|s| s.stored_versions.clone()).unwrap_or_default();
        for (i, version) in stored.iter().enumerate() {
            if !new.spec.versions.iter().any(|v| v.name == *version) {
                let why = format!(
                    "missing from spec.versions; {version} was previously a storage version, and must remain in \
                     spec.versions until a storage migration ensures no data remains persisted in {version} and \
                     removes {version} from status.storedVersions"
                );
                errors.push(FieldError::invalid(format!("status.storedVersions[{i}]"), version, why));
            }
        }
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Scope", "Whether the objects are in namespaces."),
            Column::text("Versions", "Versions that are served."),
            column::CREATED,
            Column::text("Group", "Group of the kind.").wide(),
            Column::text("Kind", "Kind that is defined.").wide(),
            Column::text("ShortNames", "Other names for the kind.").wide(),
            Column::text("Established", "Whether the kind is served.").with_type("boolean").wide(),
        ];
        COLUMNS
    }

    fn cells(definition: &CustomResourceDefinition, _now: Timestamp) -> Vec<Value> {
        let spec = &definition.spec;
        let served: Vec<&str> = spec.versions.iter().filter(|v| v.served).map(|v| v.name.as_str()).collect();
        vec![
            column::name(&definition.metadata),
            spec.scope.clone().into(),
            served.join(",").into(),
            column::created(&definition.metadata),
            spec.group.clone().into(),
            spec.names.kind.clone().into(),
            spec.names.short_names.clone().unwrap_or_default().join(",").into(),
            is_established(definition).into(),
        ]
    }
}

fn storage_version(definition: &CustomResourceDefinition) -> Option<&str> {
    definition.spec.versions.iter().find(|v| v.storage).map(|v| v.name.as_str())
}

fn is_established(definition: &CustomResourceDefinition) -> bool {
    let conditions = definition.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions.is_some_and(|c| c.iter().any(|c| c.type_ == "Established" && c.status == "True"))
}

/// Groups under `k8s.io` and `kubernetes.io` are protected: their definitions need an annotation about API review.
fn check_approval(definition: &CustomResourceDefinition, errors: &mut Vec<FieldError>) {
    let group = &definition.spec.group;
    let is_protected = ["k8s.io", "kubernetes.io"].iter().any(|d| group == d || group.ends_with(&format!(".{d}")));
    let annotated = definition.metadata.annotations.as_ref().and_then(|a| a.get(APPROVAL_ANNOTATION));
    let path = format!("metadata.annotations[{APPROVAL_ANNOTATION}]");
    match annotated {
        _ if !is_protected => {}
        None => {
            let why = format!(
                "protected groups must have approval annotation \"{APPROVAL_ANNOTATION}\", see \
                 https://github.com/kubernetes/enhancements/pull/1111"
            );
            errors.push(FieldError::required(path, why));
        }
        Some(text) if text.starts_with("http://") || text.starts_with("https://") => {}
        Some(text) if text.starts_with("unapproved") => {}
        Some(text) => {
            let why = "protected groups must have approval annotation with either a URL or a reason starting with \
                       \"unapproved\", see https://github.com/kubernetes/enhancements/pull/1111";
            errors.push(FieldError::invalid(path, text, why));
        }
    }
}

fn check_group(group: &str, errors: &mut Vec<FieldError>) {
    if group.is_empty() {
        errors.push(FieldError::required("spec.group", ""));
    } else if let Err(why) = names::validate_subdomain(group) {
        errors.push(FieldError::invalid("spec.group", group, why));
    } else if !group.contains('.') {
        errors.push(FieldError::invalid("spec.group", group, "should be a domain with at least one dot"));
    }
}

fn check_names(requested: &CustomResourceDefinitionNames, errors: &mut Vec<FieldError>) {
    let mut check = |field: &str, name: &str| match name {
        "" => errors.push(FieldError::required(format!("spec.names.{field}"), "")),
        name => {
            if let Err(why) = names::validate_dns_1035_label(&name.to_lowercase()) {
                errors.push(FieldError::invalid(format!("spec.names.{field}"), name, why));
            }
        }
    };
    check("plural", &requested.plural);
    check("singular", requested.singular.as_deref().unwrap_or_default());
    check("kind", &requested.kind);
    check("listKind", requested.list_kind.as_deref().unwrap_or_default());
    for (i, name) in requested.short_names.iter().flatten().enumerate() {
        check(&format!("shortNames[{i}]"), name);
    }
    for (i, name) in requested.categories.iter().flatten().enumerate() {
        check(&format!("categories[{i}]"), name);
    }
    if !requested.kind.is_empty() && requested.list_kind.as_deref() == Some(&requested.kind) {
        let why = "kind and listKind may not be the same";
        errors.push(FieldError::invalid("spec.names.listKind", &requested.kind, why));
    }
}

fn open_api_schema(version: &CustomResourceDefinitionVersion) -> Option<&JSONSchemaProps> {
    version.schema.as_ref().and_then(|s| s.open_api_v3_schema.as_ref())
}

fn check_versions(definition: &CustomResourceDefinition, errors: &mut Vec<FieldError>) {
    let spec = &definition.spec;
    let preserves = spec.preserve_unknown_fields == Some(true);
    if preserves {
        let why = "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema \
                   instead";
        errors.push(FieldError::invalid("spec.preserveUnknownFields", true, why));
    }
    let mut version_names = BTreeSet::new();
    // If all versions have the same schema, its errors are reported once, at `spec.validation`, where the v1beta1 API had it.
    let is_shared = spec.versions.windows(2).all(|pair| open_api_schema(&pair[0]) == open_api_schema(&pair[1]));
    for (i, version) in spec.versions.iter().enumerate() {
        let path = format!("spec.versions[{i}]");
        if let Err(why) = names::validate_dns_1035_label(&version.name) {
            errors.push(FieldError::invalid(format!("{path}.name"), &version.name, why));
        }
        if !version_names.insert(&version.name) {
            errors.push(FieldError::invalid("spec.versions", &version.name, "must contain unique version names"));
        }
        match open_api_schema(version) {
            None => errors.push(FieldError::required(format!("{path}.schema.openAPIV3Schema"), "schemas are required")),
            Some(_) if is_shared && i > 0 => {}
            Some(schema) => {
                let at = if is_shared { "spec.validation".to_owned() } else { format!("{path}.schema") };
                structural_check::check_structural(&format!("{at}.openAPIV3Schema"), schema, errors);
                if preserves && StructuralSchema::compile(schema).has_defaults() {
                    let why = "must be false in order to use defaults in the schema";
                    errors.push(FieldError::invalid("spec.preserveUnknownFields", true, why));
                }
            }
        }
        check_subresources(&path, version, errors);
        for (i, column) in version.additional_printer_columns.iter().flatten().enumerate() {
            check_column(&format!("{path}.additionalPrinterColumns[{i}]"), column, errors);
        }
        for (i, field) in version.selectable_fields.iter().flatten().enumerate() {
            check_json_path(&format!("{path}.selectableFields[{i}].jsonPath"), &field.json_path, errors);
        }
    }
    if spec.versions.iter().filter(|v| v.storage).count() != 1 {
        let names: Vec<&str> = spec.versions.iter().map(|v| v.name.as_str()).collect();
        let why = "must have exactly one version marked as storage version";
        errors.push(FieldError::invalid("spec.versions", names, why));
    }
}

fn check_json_path(path: &str, text: &str, errors: &mut Vec<FieldError>) {
    if text.is_empty() {
        errors.push(FieldError::required(path, ""));
    } else if let Err(why) = JsonPath::parse(text) {
        errors.push(FieldError::invalid(path, text, why));
    }
}

fn check_column(path: &str, column: &CustomResourceColumnDefinition, errors: &mut Vec<FieldError>) {
    if column.name.is_empty() {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    }
    let types = ["boolean", "date", "integer", "number", "string"];
    match column.type_.as_str() {
        "" => errors.push(FieldError::required(format!("{path}.type"), "must be one of the known types")),
        _ => check_supported(&format!("{path}.type"), Some(&column.type_), &types, errors),
    }
    check_json_path(&format!("{path}.jsonPath"), &column.json_path, errors);
}

fn check_subresources(path: &str, version: &CustomResourceDefinitionVersion, errors: &mut Vec<FieldError>) {
    let Some(scale) = version.subresources.as_ref().and_then(|s| s.scale.as_ref()) else { return };
    let mut check = |field: &str, text: &str, roots: &[&str]| {
        let path = format!("{path}.subresources.scale.{field}");
        let first = JsonPath::parse(text).ok().and_then(|p| p.fields()).and_then(|f| f.first().cloned());
        match first {
            None if text.is_empty() => errors.push(FieldError::required(path, "")),
            None => errors.push(FieldError::invalid(path, text, "should be a path of fields, such as .spec.replicas")),
            Some(first) if roots.contains(&first.as_str()) => {}
            Some(_) => {
                let why = format!("should be a json path under .{}", roots.join(" or ."));
                errors.push(FieldError::invalid(path, text, why));
            }
        }
    };
    check("specReplicasPath", &scale.spec_replicas_path, &["spec"]);
    check("statusReplicasPath", &scale.status_replicas_path, &["status"]);
    if let Some(selector) = scale.label_selector_path.as_deref().filter(|s| !s.is_empty()) {
        check("labelSelectorPath", selector, &["spec", "status"]);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn definition(change: Value) -> CustomResourceDefinition {
        let mut object = json!({
            "metadata": { "name": "things.example.com" },
            "spec": {
                "group": "example.com", "scope": "Namespaced", "names": { "plural": "things", "kind": "Thing" },
                "versions": [{ "name": "v1", "served": true, "storage": true,
                               "schema": { "openAPIV3Schema": { "type": "object" } } }],
            },
        });
        json_patch::merge(&mut object, &change);
        let mut definition = serde_json::from_value(object).unwrap();
        CustomResourceDefinitionStrategy::set_defaults(&mut definition);
        definition
    }

    #[test]
    fn invalid_definitions_name_the_field() {
        let version = |name: &str, storage: bool, schema: Value| json!({ "name": name, "served": true, "storage": storage, "schema": { "openAPIV3Schema": schema } });
        let plain = json!({ "type": "object" });
        for (case, change, field) in [
            ("valid", json!({}), None),
            ("another name", json!({ "metadata": { "name": "x.example.com" } }), Some("metadata.name")),
            ("no scope", json!({ "spec": { "scope": "" } }), Some("spec.scope")),
            (
                "no storage version",
                json!({ "spec": { "versions": [version("v1", false, plain.clone())] } }),
                Some("spec.versions"),
            ),
            (
                "two storage versions",
                json!({ "spec": { "versions": [version("v1", true, plain.clone()), version("v2", true, plain.clone())] } }),
                Some("spec.versions"),
            ),
            (
                "no schema",
                json!({ "spec": { "versions": [{ "name": "v1", "served": true, "storage": true }] } }),
                Some("spec.versions[0].schema.openAPIV3Schema"),
            ),
            (
                "a protected group",
                json!({ "metadata": { "name": "things.x.k8s.io" }, "spec": { "group": "x.k8s.io" } }),
                Some("metadata.annotations[api-approved.kubernetes.io]"),
            ),
            (
                "an approved group",
                json!({ "metadata": { "name": "things.x.k8s.io", "annotations": { APPROVAL_ANNOTATION: "https://x" } }, "spec": { "group": "x.k8s.io" } }),
                None,
            ),
            (
                "a webhook",
                json!({ "spec": { "conversion": { "strategy": "Webhook" } } }),
                Some("spec.conversion.strategy"),
            ),
        ] {
            let errors = CustomResourceDefinitionStrategy::validate(&definition(change));
            assert_eq!(errors.first().map(|e| e.field.as_str()), field, "{case}: {errors:?}");
        }
    }

    #[test]
    fn stored_versions_cannot_be_removed() {
        let mut old = definition(json!({}));
        CustomResourceDefinitionStrategy::prepare_create(&mut old, Timestamp::UNIX_EPOCH);
        let version = |name: &str, storage: bool| json!({ "name": name, "served": true, "storage": storage, "schema": { "openAPIV3Schema": { "type": "object" } } });
        let mut both = definition(json!({ "spec": { "versions": [version("v1", false), version("v2", true)] } }));
        assert!(CustomResourceDefinitionStrategy::validate_update(&both, &old).is_empty());
        CustomResourceDefinitionStrategy::prepare_update(&mut both, &old);
        assert_eq!(both.status.clone().unwrap().stored_versions.unwrap(), ["v1", "v2"]);
        assert_eq!(both.metadata.generation, Some(2));
        let only = definition(json!({ "spec": { "versions": [version("v2", true)] } }));
        assert_eq!(
            CustomResourceDefinitionStrategy::validate_update(&only, &both)[0].field,
            "status.storedVersions[0]"
        );
    }
}
