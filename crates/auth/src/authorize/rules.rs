//! What one policy rule allows, and which parts of some rules other rules do not cover. Pure.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::{Attributes, RequestTarget};

const ALL: &str = "*";

/// Does the rule allow the request? The namespace is not part of a rule: the caller has checked it.
pub fn allows(rule: &PolicyRule, attributes: &Attributes<'_>) -> bool {
    if !contains(&rule.verbs, attributes.verb) {
        return false;
    }
    match attributes.target {
        RequestTarget::Path(path) => strings(&rule.non_resource_urls).iter().any(|url| covers_path(url, path)),
        RequestTarget::Resource { group, plural, subresource, name, .. } => {
            let names = strings(&rule.resource_names);
            contains(strings(&rule.api_groups), group)
                && strings(&rule.resources).iter().any(|r| covers_resource(r, plural, subresource))
                && (names.is_empty() || (!name.is_empty() && names.iter().any(|n| n == name)))
        }
    }
}

fn strings(values: &Option<Vec<String>>) -> &[String] {
    values.as_deref().unwrap_or_default()
}

/// Is the value, or `*`, among the values of a rule?
fn contains(values: &[String], wanted: &str) -> bool {
    values.iter().any(|v| v == ALL || v == wanted)
}

fn covers_path(url: &str, path: &str) -> bool {
    url == ALL || url == path || url.strip_suffix(ALL).is_some_and(|prefix| path.starts_with(prefix))
}

/// `pods` does not cover `pods/status`, `*` covers both, and `*/status` covers the status of every resource.
fn covers_resource(rule: &str, plural: &str, subresource: &str) -> bool {
    if rule == ALL {
        return true;
    }
    match rule.split_once('/') {
        Some((resource, rule_subresource)) => {
            !subresource.is_empty() && rule_subresource == subresource && (resource == ALL || resource == plural)
        }
        None => subresource.is_empty() && rule == plural,
    }
}

/// Rules that allow every verb on every resource and path.
pub fn full_access() -> Vec<PolicyRule> {
    let all = || vec![ALL.to_owned()];
    vec![
        PolicyRule { api_groups: Some(all()), resources: Some(all()), verbs: all(), ..PolicyRule::default() },
        PolicyRule { non_resource_urls: Some(all()), verbs: all(), ..PolicyRule::default() },
    ]
}

/// The parts of `wanted` that no single rule of `held` covers. Each part is one verb on one resource, resource name or
/// path.
pub fn uncovered(held: &[PolicyRule], wanted: &[PolicyRule]) -> Vec<PolicyRule> {
    let parts = wanted.iter().flat_map(split);
    parts.filter(|part| !held.iter().any(|rule| covers(rule, part))).collect()
}

/// Splits a rule into rules with one verb and one resource, resource name or path each.
fn split(rule: &PolicyRule) -> Vec<PolicyRule> {
    let one = |value: &String| Some(vec![value.clone()]);
    let mut parts = Vec::new();
    for verb in &rule.verbs {
        let verbs = vec![verb.clone()];
        for url in strings(&rule.non_resource_urls) {
            parts.push(PolicyRule { non_resource_urls: one(url), verbs: verbs.clone(), ..PolicyRule::default() });
        }
        for group in strings(&rule.api_groups) {
            for resource in strings(&rule.resources) {
                let base = PolicyRule {
                    api_groups: one(group),
                    resources: one(resource),
                    verbs: verbs.clone(),
                    ..PolicyRule::default()
                };
                match strings(&rule.resource_names) {
                    [] => parts.push(base),
                    names => {
                        parts.extend(names.iter().map(|n| PolicyRule { resource_names: one(n), ..base.clone() }));
                    }
                }
            }
        }
    }
    parts
}

/// Does the rule allow everything that the part allows?
fn covers(rule: &PolicyRule, part: &PolicyRule) -> bool {
    let all = |held: &[String], wanted: &[String]| wanted.iter().all(|w| contains(held, w));
    let resources = strings(&part.resources).iter().all(|wanted| {
        let (plural, subresource) = wanted.split_once('/').unwrap_or((wanted, ""));
        strings(&rule.resources).iter().any(|r| r == wanted || covers_resource(r, plural, subresource))
    });
    let names = match (strings(&rule.resource_names), strings(&part.resource_names)) {
        ([], _) => true,
        (_, []) => false,
        (held, wanted) => wanted.iter().all(|w| held.contains(w)),
    };
    let paths = strings(&part.non_resource_urls)
        .iter()
        .all(|wanted| strings(&rule.non_resource_urls).iter().any(|url| covers_path(url, wanted)));
    all(&rule.verbs, &part.verbs)
        && all(strings(&rule.api_groups), strings(&part.api_groups))
        && resources
        && names
        && paths
}

/// The rule in the form that an error about a refused grant contains.
pub fn format_rule(rule: &PolicyRule) -> String {
    let mut parts = Vec::new();
    for (label, values) in [
        ("APIGroups", strings(&rule.api_groups)),
        ("Resources", strings(&rule.resources)),
        ("ResourceNames", strings(&rule.resource_names)),
        ("NonResourceURLs", strings(&rule.non_resource_urls)),
        ("Verbs", &rule.verbs),
    ] {
        if !values.is_empty() {
            parts.push(format!("{label}:{values:?}"));
        }
    }
    format!("{{{}}}", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rule(value: Value) -> PolicyRule {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_rule_allows_what_it_names_and_nothing_else() {
        let pods = json!({ "apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"] });
        let named = json!({ "apiGroups": [""], "resources": ["pods"], "verbs": ["*"], "resourceNames": ["a"] });
        let status = json!({ "apiGroups": ["*"], "resources": ["*/status"], "verbs": ["update"] });
        let all = json!({ "apiGroups": ["*"], "resources": ["*"], "verbs": ["*"] });
        let resource = |plural, subresource, name| RequestTarget::Resource {
            group: "",
            plural,
            subresource,
            namespace: None,
            name,
        };
        for (case, value, verb, target, want) in [
            ("the verb and the resource", &pods, "get", resource("pods", "", "p"), true),
            ("another verb", &pods, "delete", resource("pods", "", "p"), false),
            ("a subresource is not its resource", &pods, "get", resource("pods", "log", "p"), false),
            (
                "another group",
                &pods,
                "get",
                RequestTarget::Resource { group: "x", plural: "pods", subresource: "", namespace: None, name: "" },
                false,
            ),
            ("the name", &named, "get", resource("pods", "", "a"), true),
            ("another name", &named, "get", resource("pods", "", "b"), false),
            ("no name at all, as in a create", &named, "create", resource("pods", "", ""), false),
            ("every status", &status, "update", resource("nodes", "status", "n"), true),
            ("but not the object", &status, "update", resource("nodes", "", "n"), false),
            ("everything", &all, "get", resource("pods", "log", "p"), true),
            ("but no path", &all, "get", RequestTarget::Path("/metrics"), false),
        ] {
            assert_eq!(allows(&rule(value.clone()), &Attributes::new(verb, target)), want, "{case}");
        }
        let paths = rule(json!({ "nonResourceURLs": ["/version", "/health/*"], "verbs": ["get"] }));
        for (path, want) in [("/version", true), ("/version/x", false), ("/health/a", true), ("/healthz", false)] {
            assert_eq!(allows(&paths, &Attributes::new("get", RequestTarget::Path(path))), want, "{path}");
        }
    }

    #[test]
    fn parts_that_are_not_held_are_uncovered() {
        let held = [
            rule(json!({ "apiGroups": [""], "resources": ["pods", "*/status"], "verbs": ["get", "list"] })),
            rule(json!({ "apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["a"] })),
            rule(json!({ "nonResourceURLs": ["/health/*"], "verbs": ["get"] })),
        ];
        let r = |group: &str, resource: &str, verb: &str| json!({ "apiGroups": [group], "resources": [resource], "verbs": [verb] });
        for (case, wanted, count) in [
            ("part of a rule", r("", "pods", "get"), 0),
            (
                "one name of it",
                json!({ "apiGroups": [""], "resources": ["pods"], "verbs": ["get"], "resourceNames": ["x"] }),
                0,
            ),
            ("a verb more", json!({ "apiGroups": [""], "resources": ["pods"], "verbs": ["get", "delete"] }), 1),
            ("all names where one is held", r("", "secrets", "get"), 1),
            ("all verbs", r("", "pods", "*"), 1),
            ("a status", r("", "nodes/status", "get"), 0),
            ("all of a group", r("", "*", "get"), 1),
            ("a path below", json!({ "nonResourceURLs": ["/health/x"], "verbs": ["get"] }), 0),
            ("all paths", json!({ "nonResourceURLs": ["*"], "verbs": ["get"] }), 1),
        ] {
            assert_eq!(uncovered(&held, &[rule(wanted.clone())]).len(), count, "{case}");
            assert_eq!(uncovered(&full_access(), &[rule(wanted)]), [], "{case}: full access covers it");
        }
    }
}
