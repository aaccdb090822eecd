//! From a definition to the kinds it makes: one for each version it serves.

use std::sync::Arc;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion, CustomResourceSubresourceScale,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::path::Path;
use super::{Custom, CustomColumn, Schema, Shape};
use cleat_apimachinery::cache::KindCaches;
use cleat_apimachinery::descriptor::{Descriptor, Scale, ScaleSelector};
use cleat_apimachinery::kind::Kind;

const CREATED: &str = ".metadata.creationTimestamp";

/// The kinds that the definition makes, under the names it was given.
pub fn kinds(definition: &CustomResourceDefinition) -> Vec<Arc<dyn Kind>> {
    let versions = definition.spec.versions.iter().filter(|v| v.served);
    versions.map(|version| Arc::new(kind(definition, version)) as Arc<dyn Kind>).collect()
}

fn kind(definition: &CustomResourceDefinition, version: &CustomResourceDefinitionVersion) -> Custom {
    let descriptor = descriptor(definition, version);
    let schema = version.schema.as_ref().and_then(|s| s.open_api_v3_schema.as_ref());
    let compiled = schema.map(Schema::compile).unwrap_or_default();
    let published = schema.and_then(|s| serde_json::to_value(s).ok()).unwrap_or_else(|| json!({ "type": "object" }));
    let group = &definition.spec.group;
    let storage = definition.spec.versions.iter().find(|v| v.storage).map_or(&version.name, |v| &v.name);
    let deprecation = version.deprecated.filter(|d| *d).map(|_| {
        let default = || format!("{group}/{} {} is deprecated", version.name, descriptor.kind);
        version.deprecation_warning.clone().unwrap_or_else(default)
    });
    let selectable = version.selectable_fields.iter().flatten().filter_map(|field| {
        Some((field.json_path.trim_start_matches('.').to_owned(), Path::parse(&field.json_path).ok()?))
    });
    Custom {
        shape: Arc::new(Shape {
            api_version: descriptor.api_version(),
            kind: descriptor.kind.clone(),
            head: descriptor.head().to_owned(),
            fills: compiled.has_defaults(),
            has_rules: compiled.has_rules(),
            schema: compiled,
            storage_version: format!("{group}/{storage}"),
        }),
        columns: columns(version),
        selectable: selectable.collect(),
        joins: cleat_apimachinery::schema::Schema::from_open_api(&published),
        published,
        caches: KindCaches::default(),
        deprecation,
        terminating: definition.metadata.deletion_timestamp.is_some(),
        retired: CancellationToken::new(),
        descriptor,
    }
}

fn descriptor(definition: &CustomResourceDefinition, version: &CustomResourceDefinitionVersion) -> Descriptor {
    let (spec, names) = (&definition.spec, &definition.spec.names);
    let mut made = Descriptor::new(&spec.group, &version.name, &names.kind, &names.plural)
        .stored_under(&format!("{}/{}", spec.group, names.plural))
        .deletes_with_status()
        .put_needs_version();
    made.namespaced = spec.scope == "Namespaced";
    made.singular = names.singular.clone().unwrap_or_else(|| names.kind.to_lowercase());
    made.list_kind = names.list_kind.clone().unwrap_or_else(|| format!("{}List", names.kind));
    made.short_names = names.short_names.clone().unwrap_or_default();
    made.categories = names.categories.clone().unwrap_or_default();
    made.custom = true;
    let subresources = version.subresources.as_ref();
    made.has_status = subresources.is_some_and(|s| s.status.is_some());
    made.scale = subresources.and_then(|s| s.scale.as_ref()).and_then(scale);
    made
}

fn scale(from: &CustomResourceSubresourceScale) -> Option<Scale> {
    let fields = |text: &str| Path::parse(text).ok()?.fields();
    Some(Scale {
        wanted: fields(&from.spec_replicas_path)?,
        actual: fields(&from.status_replicas_path)?,
        selector: match from.label_selector_path.as_deref().filter(|p| !p.is_empty()) {
            Some(path) => ScaleSelector::Text(fields(path)?),
            None => ScaleSelector::None,
        },
    })
}

fn columns(version: &CustomResourceDefinitionVersion) -> Vec<CustomColumn> {
    let asked = version.additional_printer_columns.clone().unwrap_or_default();
    if asked.is_empty() {
        let description = "Time since the object was created, as the server saw it when it answered.".to_owned();
        return vec![CustomColumn {
            name: "Age".into(),
            kind: "date".into(),
            format: String::new(),
            description,
            priority: 0,
            path: Path::parse(CREATED).unwrap_or_default(),
        }];
    }
    let default = |path: &str| format!("Custom resource definition column (in JSONPath format): {path}");
    asked
        .into_iter()
        .map(|column| CustomColumn {
            description: column.description.filter(|d| !d.is_empty()).unwrap_or_else(|| default(&column.json_path)),
            path: Path::parse(&column.json_path).unwrap_or_default(),
            name: column.name,
            kind: column.type_,
            format: column.format.unwrap_or_default(),
            priority: column.priority.unwrap_or(0),
        })
        .collect()
}
