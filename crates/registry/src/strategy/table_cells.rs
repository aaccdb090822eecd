//! Formats values for table cells, as kubectl shows them.

use cleat_api::access;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::Value;

/// The value, or `<none>` if it is missing or empty.
pub(super) fn or_none(value: Option<&str>) -> Value {
    value.filter(|v| !v.is_empty()).unwrap_or("<none>").into()
}

/// The value, or `<unset>` if it is missing or empty.
pub(super) fn or_unset(value: Option<&str>) -> Value {
    value.filter(|v| !v.is_empty()).unwrap_or("<unset>").into()
}

/// MemberAccess modes as `RWO,RWX`, in an order that does not depend on the object's.
pub(super) fn short_access_modes(modes: Option<&Vec<String>>) -> String {
    let has = |mode: &str| modes.is_some_and(|m| m.iter().any(|x| x == mode));
    let short = [
        (access::READ_WRITE_ONCE, "RWO"),
        (access::READ_ONLY_MANY, "ROX"),
        (access::READ_WRITE_MANY, "RWX"),
        (access::READ_WRITE_ONCE_POD, "RWOP"),
    ];
    short.iter().filter(|(mode, _)| has(mode)).map(|(_, short)| *short).collect::<Vec<_>>().join(",")
}

/// The selector in the syntax of the `labelSelector` query parameter: `app=x,tier in (a,b),!debug`.
pub fn format_label_selector(selector: &LabelSelector) -> String {
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

/// A cell with the selector, or `<none>`.
pub(super) fn selector_cell(selector: Option<&LabelSelector>) -> Value {
    or_none(Some(&selector.map(format_label_selector).unwrap_or_default()))
}
