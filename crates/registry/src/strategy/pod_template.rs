//! What the kinds with a pod template share (DaemonSet, Deployment, Job, ReplicaSet, StatefulSet): defaults and
//! validation of the template and its selector, generations, and columns. Cleat stores these kinds for other
//! controllers; it has no controller that creates their pods.

use cleat_api::selector::labels_match;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::field_checks::{check_label_selector, check_non_negative};
use super::pod;
use cleat_apimachinery::column::Column;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::meta;
use cleat_apimachinery::names;

pub(super) const TEMPLATE_PATH: &str = "spec.template";

pub(super) const CONTAINERS_COLUMN: Column =
    Column::text("Containers", "Names of the containers in the template.").wide();
pub(super) const IMAGES_COLUMN: Column = Column::text("Images", "Images of the containers in the template.").wide();
pub(super) const SELECTOR_COLUMN: Column = Column::text("Selector", "Which pods belong to it.").wide();

pub(super) fn default_template(template: &mut PodTemplateSpec) {
    meta::normalise(template.metadata.get_or_insert_default());
    pod::default_template_spec(template.spec.get_or_insert_default());
}

/// Increments the generation of an updated object if its spec differs from the old one.
pub(super) fn bump_generation<T: PartialEq>(new: &mut ObjectMeta, old: &ObjectMeta, (new_spec, old_spec): (&T, &T)) {
    if new_spec != old_spec {
        new.generation = Some(old.generation.unwrap_or(0) + 1);
    }
}

/// The selector must not be empty and must match the labels of the template.
pub(super) fn check_selector_and_template(
    selector: &LabelSelector,
    template: &PodTemplateSpec,
    errors: &mut Vec<FieldError>,
) {
    if is_empty(selector) {
        errors.push(FieldError::required("spec.selector", ""));
    } else {
        check_label_selector("spec.selector", selector, errors);
    }
    check_selector_matches_template(selector, template, errors);
    check_template(template, errors);
}

pub(super) fn check_selector_matches_template(
    selector: &LabelSelector,
    template: &PodTemplateSpec,
    errors: &mut Vec<FieldError>,
) {
    let labels = template.metadata.as_ref().and_then(|m| m.labels.clone()).unwrap_or_default();
    if is_empty(selector) || !labels_match(selector, Some(&labels)) {
        let why = "`selector` does not match template `labels`";
        errors.push(FieldError::invalid(format!("{TEMPLATE_PATH}.metadata.labels"), labels, why));
    }
}

fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(|l| l.is_empty())
        && selector.match_expressions.as_ref().is_none_or(|e| e.is_empty())
}

pub(super) fn check_template(template: &PodTemplateSpec, errors: &mut Vec<FieldError>) {
    for (key, value) in template.metadata.iter().flat_map(|m| m.labels.iter().flatten()) {
        for (part, checked) in [(key, names::validate_qualified_name(key)), (value, names::validate_label_value(value))]
        {
            if let Err(why) = checked {
                errors.push(FieldError::invalid(format!("{TEMPLATE_PATH}.labels"), part, why));
            }
        }
    }
    let spec = template.spec.clone().unwrap_or_default();
    errors.extend(pod::validate_template_spec(&format!("{TEMPLATE_PATH}.spec"), &spec));
}

/// For kinds whose pods run until they are deleted: `restartPolicy` must be `Always`, without a deadline.
pub(super) fn check_always_restarts(template: &PodTemplateSpec, kind: &str, errors: &mut Vec<FieldError>) {
    let spec = template.spec.clone().unwrap_or_default();
    if let Some(policy) = spec.restart_policy.as_deref().filter(|p| *p != "Always") {
        errors.push(FieldError::not_supported(format!("{TEMPLATE_PATH}.spec.restartPolicy"), policy, &["Always"]));
    }
    if spec.active_deadline_seconds.is_some() {
        let why = format!("activeDeadlineSeconds in {kind} is not Supported");
        errors.push(FieldError::forbidden(format!("{TEMPLATE_PATH}.spec.activeDeadlineSeconds"), why));
    }
}

/// A number of pods such as `maxSurge`: a count, or a percentage such as `25%`.
pub(super) fn check_count_or_percent(path: &str, value: Option<&IntOrString>, errors: &mut Vec<FieldError>) {
    match value {
        Some(IntOrString::Int(count)) => check_non_negative(path, Some(i64::from(*count)), errors),
        Some(IntOrString::String(text)) => {
            let percent = text.strip_suffix('%').filter(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
            if percent.is_none() {
                let why = "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or \
                           '93%', regex used for validation is '[0-9]+%')";
                errors.push(FieldError::invalid(path, text, why));
            }
        }
        None => {}
    }
}

/// A missing value counts as zero.
pub(super) fn is_zero_count_or_percent(value: Option<&IntOrString>) -> bool {
    match value {
        Some(IntOrString::Int(count)) => *count == 0,
        Some(IntOrString::String(text)) => text.trim_end_matches('%').parse() == Ok(0),
        None => true,
    }
}

/// Cells for [`CONTAINERS_COLUMN`] and [`IMAGES_COLUMN`].
pub(super) fn container_cells(template: Option<&PodTemplateSpec>) -> [Value; 2] {
    let containers = template.and_then(|t| t.spec.as_ref()).map(|s| s.containers.as_slice()).unwrap_or_default();
    let names: Vec<&str> = containers.iter().map(|c| c.name.as_str()).collect();
    let images: Vec<&str> = containers.iter().filter_map(|c| c.image.as_deref()).collect();
    [names.join(",").into(), images.join(",").into()]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::super::table_cells::format_label_selector;
    use super::*;

    #[test]
    fn selectors_match_and_are_formatted() {
        let labels = BTreeMap::from([("app".to_owned(), "x".to_owned())]);
        for (selector, want, text) in [
            (json!({ "matchLabels": { "app": "x" } }), true, "app=x"),
            (json!({ "matchLabels": { "app": "y" } }), false, "app=y"),
            (
                json!({ "matchExpressions": [{ "key": "app", "operator": "In", "values": ["x", "z"] }] }),
                true,
                "app in (x,z)",
            ),
            (
                json!({ "matchExpressions": [{ "key": "app", "operator": "NotIn", "values": ["x"] }] }),
                false,
                "app notin (x)",
            ),
            (json!({ "matchExpressions": [{ "key": "app", "operator": "Exists" }] }), true, "app"),
            (json!({ "matchExpressions": [{ "key": "app", "operator": "DoesNotExist" }] }), false, "!app"),
        ] {
            let selector: LabelSelector = serde_json::from_value(selector).unwrap();
            assert_eq!(labels_match(&selector, Some(&labels)), want, "{text}");
            assert_eq!(format_label_selector(&selector), text);
        }
    }
}
