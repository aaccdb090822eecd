//! The kinds that make pods from a template: stored, defaulted, validated and shown. Nobody here runs them.

mod daemon_set;
mod deployment;
mod job;
mod replica_set;
mod stateful_set;

pub(super) use daemon_set::DaemonSets;
pub(super) use deployment::Deployments;
pub(super) use job::Jobs;
pub(super) use replica_set::ReplicaSets;
pub(super) use stateful_set::StatefulSets;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::{check_selector, pod};
use cleat_apimachinery::column::Column;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::meta;
use cleat_apimachinery::names;

const TEMPLATE: &str = "spec.template";

const CONTAINERS: Column = Column::text("Containers", "Names of the containers in the template.").wide();
const IMAGES: Column = Column::text("Images", "Images of the containers in the template.").wide();
const SELECTOR: Column = Column::text("Selector", "Which pods belong to it.").wide();

fn default_template(template: &mut PodTemplateSpec) {
    meta::normalise(template.metadata.get_or_insert_default());
    pod::default_template(template.spec.get_or_insert_default());
}

/// A new specification is a new generation; the first is 1.
fn count_generation<T: PartialEq>(new: &mut ObjectMeta, old: &ObjectMeta, spec: (&T, &T)) {
    if spec.0 != spec.1 {
        new.generation = Some(old.generation.unwrap_or(0) + 1);
    }
}

fn check_count(path: &str, count: Option<i64>, errors: &mut Vec<FieldError>) {
    if let Some(count) = count.filter(|c| *c < 0) {
        errors.push(FieldError::invalid(path, count, "must be greater than or equal to 0"));
    }
}

fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(|l| l.is_empty())
        && selector.match_expressions.as_ref().is_none_or(|e| e.is_empty())
}

fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let by_label = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let by_expression = selector.match_expressions.iter().flatten().all(|e| {
        let found = labels.get(&e.key);
        let listed = || found.is_some_and(|value| e.values.iter().flatten().any(|v| v == value));
        match e.operator.as_str() {
            "In" => listed(),
            "NotIn" => !listed(),
            "Exists" => found.is_some(),
            "DoesNotExist" => found.is_none(),
            _ => false,
        }
    });
    by_label && by_expression
}

/// The selector must be there, and select what the template makes.
fn check_pods(selector: &LabelSelector, template: &PodTemplateSpec, errors: &mut Vec<FieldError>) {
    if is_empty(selector) {
        errors.push(FieldError::required("spec.selector", ""));
    } else {
        check_selector("spec.selector", selector, errors);
    }
    check_labels(selector, template, errors);
    check_template(template, errors);
}

fn check_labels(selector: &LabelSelector, template: &PodTemplateSpec, errors: &mut Vec<FieldError>) {
    let labels = template.metadata.as_ref().and_then(|m| m.labels.clone()).unwrap_or_default();
    if is_empty(selector) || !selects(selector, &labels) {
        let why = "`selector` does not match template `labels`";
        errors.push(FieldError::invalid(format!("{TEMPLATE}.metadata.labels"), labels, why));
    }
}

fn check_template(template: &PodTemplateSpec, errors: &mut Vec<FieldError>) {
    for (key, value) in template.metadata.iter().flat_map(|m| m.labels.iter().flatten()) {
        for (part, checked) in [(key, names::qualified(key)), (value, names::label_value(value))] {
            if let Err(why) = checked {
                errors.push(FieldError::invalid(format!("{TEMPLATE}.labels"), part, why));
            }
        }
    }
    let spec = template.spec.clone().unwrap_or_default();
    errors.extend(pod::check_template(&format!("{TEMPLATE}.spec"), &spec));
}

/// Pods that are to run for ever start again whenever they end.
fn check_always(template: &PodTemplateSpec, kind: &str, errors: &mut Vec<FieldError>) {
    let spec = template.spec.clone().unwrap_or_default();
    if let Some(policy) = spec.restart_policy.as_deref().filter(|p| *p != "Always") {
        errors.push(FieldError::not_supported(format!("{TEMPLATE}.spec.restartPolicy"), policy, &["Always"]));
    }
    if spec.active_deadline_seconds.is_some() {
        let why = format!("activeDeadlineSeconds in {kind} is not Supported");
        errors.push(FieldError::forbidden(format!("{TEMPLATE}.spec.activeDeadlineSeconds"), why));
    }
}

fn check_portion(path: &str, portion: Option<&IntOrString>, errors: &mut Vec<FieldError>) {
    match portion {
        Some(IntOrString::Int(count)) => check_count(path, Some(i64::from(*count)), errors),
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

fn is_zero(portion: Option<&IntOrString>) -> bool {
    match portion {
        Some(IntOrString::Int(count)) => *count == 0,
        Some(IntOrString::String(text)) => text.trim_end_matches('%').parse() == Ok(0),
        None => true,
    }
}

/// Cells for [`CONTAINERS`] and [`IMAGES`].
fn container_cells(template: Option<&PodTemplateSpec>) -> [Value; 2] {
    let containers = template.and_then(|t| t.spec.as_ref()).map(|s| s.containers.as_slice()).unwrap_or_default();
    let names: Vec<&str> = containers.iter().map(|c| c.name.as_str()).collect();
    let images: Vec<&str> = containers.iter().filter_map(|c| c.image.as_deref()).collect();
    [names.join(",").into(), images.join(",").into()]
}

/// A selector in the words a label selector is written in.
pub fn shown_selector(selector: &LabelSelector) -> String {
    let mut terms: Vec<String> =
        selector.match_labels.iter().flatten().map(|(key, value)| format!("{key}={value}")).collect();
    for e in selector.match_expressions.iter().flatten() {
        let values = e.values.clone().unwrap_or_default().join(",");
        terms.push(match e.operator.as_str() {
            "In" => format!("{} in ({values})", e.key),
            "NotIn" => format!("{} notin ({values})", e.key),
            "DoesNotExist" => format!("!{}", e.key),
            _ => e.key.clone(),
        });
    }
    terms.join(",")
}

fn selector_cell(selector: Option<&LabelSelector>) -> Value {
    super::or_none(Some(&selector.map(shown_selector).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_select_and_are_shown() {
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
            assert_eq!(selects(&selector, &labels), want, "{text}");
            assert_eq!(shown_selector(&selector), text);
        }
    }
}
