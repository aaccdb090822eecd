//! Builds the kinds of a definition: one for each served version.

use std::sync::Arc;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion, CustomResourceSubresourceScale,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::custom_kind::{CustomColumn, CustomKind, VersionConversion};
use super::json_path::JsonPath;
use super::structural_schema::StructuralSchema;
use cleat_apimachinery::cache::KindCaches;
use cleat_apimachinery::descriptor::{Descriptor, ScalePaths, ScaleSelector};
use cleat_apimachinery::kind::Kind;

const CREATION_TIMESTAMP_PATH: &str = ".metadata.creationTimestamp";

/// The kinds of the definition, one for each served version, under the names in its spec.
pub fn build_kinds(definition: &CustomResourceDefinition) -> Vec<Arc<dyn Kind>> {
    let versions = definition.spec.versions.iter().filter(|v| v.served);
    versions.map(|version| Arc::new(build_kind(definition, version)) as Arc<dyn Kind>).collect()
}

fn build_kind(definition: &CustomResourceDefinition, version: &CustomResourceDefinitionVersion) -> CustomKind {
    let descriptor = build_descriptor(definition, version);
    let schema = version.schema.as_ref().and_then(|s| s.open_api_v3_schema.as_ref());
    let compiled = schema.map(StructuralSchema::compile).unwrap_or_default();
    let open_api_schema =
        schema.and_then(|s| serde_json::to_value(s).ok()).unwrap_or_else(|| json!({ "type": "object" }));
    let group = &definition.spec.group;
    let storage_version = definition.spec.versions.iter().find(|v| v.storage).map_or(&version.name, |v| &v.name);
    let deprecation = version.deprecated.filter(|d| *d).map(|_| {
        let default = || format!("{group}/{} {} is deprecated", version.name, descriptor.kind);
        version.deprecation_warning.clone().unwrap_or_else(default)
    });
    let selectable_fields = version.selectable_fields.iter().flatten().filter_map(|field| {
        Some((field.json_path.trim_start_matches('.').to_owned(), JsonPath::parse(&field.json_path).ok()?))
    });
    CustomKind {
        conversion: Arc::new(VersionConversion {
            api_version: descriptor.api_version(),
            kind: descriptor.kind.clone(),
            json_prefix: descriptor.head().to_owned(),
            has_defaults: compiled.has_defaults(),
            has_rules: compiled.has_rules(),
            schema: compiled,
            storage_api_version: format!("{group}/{storage_version}"),
        }),
        columns: build_columns(version),
        selectable_fields: selectable_fields.collect(),
        merge_schema: cleat_apimachinery::schema::Schema::from_open_api(&open_api_schema),
        open_api_schema,
        caches: KindCaches::default(),
        deprecation,
        is_terminating: definition.metadata.deletion_timestamp.is_some(),
        retired: CancellationToken::new(),
        descriptor,
    }
}

fn build_descriptor(definition: &CustomResourceDefinition, version: &CustomResourceDefinitionVersion) -> Descriptor {
    let (spec, names) = (&definition.spec, &definition.spec.names);
    let mut descriptor = Descriptor::new(&spec.group, &version.name, &names.kind, &names.plural)
        .stored_under(&format!("{}/{}", spec.group, names.plural))
        .deletes_with_status()
        .put_needs_version();
    descriptor.namespaced = spec.scope == "Namespaced";
    descriptor.singular = names.singular.clone().unwrap_or_else(|| names.kind.to_lowercase());
    descriptor.list_kind = names.list_kind.clone().unwrap_or_else(|| format!("{}List", names.kind));
    descriptor.short_names = names.short_names.clone().unwrap_or_default();
    descriptor.categories = names.categories.clone().unwrap_or_default();
    descriptor.custom = true;
    let subresources = version.subresources.as_ref();
    descriptor.has_status = subresources.is_some_and(|s| s.status.is_some());
    descriptor.scale = subresources.and_then(|s| s.scale.as_ref()).and_then(build_scale);
    descriptor
}

fn build_scale(scale: &CustomResourceSubresourceScale) -> Option<ScalePaths> {
    let fields = |text: &str| JsonPath::parse(text).ok()?.fields();
    Some(ScalePaths {
        spec_replicas: fields(&scale.spec_replicas_path)?,
        status_replicas: fields(&scale.status_replicas_path)?,
        selector: match scale.label_selector_path.as_deref().filter(|p| !p.is_empty()) {
            Some(path) => ScaleSelector::String(fields(path)?),
            None => ScaleSelector::None,
        },
    })
}

fn build_columns(version: &CustomResourceDefinitionVersion) -> Vec<CustomColumn> {
    let columns = version.additional_printer_columns.clone().unwrap_or_default();
    if columns.is_empty() {
        let description = "Time since the object was created, as the server saw it when it answered.".to_owned();
        return vec![CustomColumn {
            name: "Age".into(),
            value_type: "date".into(),
            format: String::new(),
            description,
            priority: 0,
            path: JsonPath::parse(CREATION_TIMESTAMP_PATH).unwrap_or_default(),
        }];
    }
    let default_description = |path: &str| format!("Custom resource definition column (in JSONPath format): {path}");
    columns
        .into_iter()
        .map(|column| CustomColumn {
            description: column
                .description
                .filter(|d| !d.is_empty())
                .unwrap_or_else(|| default_description(&column.json_path)),
            path: JsonPath::parse(&column.json_path).unwrap_or_default(),
            name: column.name,
            value_type: column.type_,
            format: column.format.unwrap_or_default(),
            priority: column.priority.unwrap_or(0),
        })
        .collect()
}
