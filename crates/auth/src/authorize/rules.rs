//! What one rule allows, and whether some rules allow all that another does. Pure.

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::{Attributes, What};

const ALL: &str = "*";

pub fn allows(rule: &PolicyRule, asked: &Attributes<'_>) -> bool {
    if !has(&rule.verbs, asked.verb) {
        return false;
    }
    match asked.what {
        What::Path(path) => list(&rule.non_resource_urls).iter().any(|url| covers_path(url, path)),
        What::Resource { group, plural, subresource, name, .. } => {
            let names = list(&rule.resource_names);
            has(list(&rule.api_groups), group)
                && list(&rule.resources).iter().any(|r| covers_resource(r, plural, subresource))
                && (names.is_empty() || (!name.is_empty() && names.iter().any(|n| n == name)))
        }
    }
}

fn list(values: &Option<Vec<String>>) -> &[String] {
    values.as_deref().unwrap_or_default()
}

fn has(values: &[String], wanted: &str) -> bool {
    values.iter().any(|v| v == ALL || v == wanted)
}

fn covers_path(url: &str, path: &str) -> bool {
    url == ALL || url == path || url.strip_suffix(ALL).is_some_and(|prefix| path.starts_with(prefix))
}

/// `pods` is not `pods/status`; `*` is both, and `*/status` every status.
fn covers_resource(rule: &str, plural: &str, subresource: &str) -> bool {
    if rule == ALL {
        return true;
    }
    match rule.split_once('/') {
        Some((resource, sub)) => {
            !subresource.is_empty() && sub == subresource && (resource == ALL || resource == plural)
        }
        None => subresource.is_empty() && rule == plural,
    }
}

/// The rules of those who may do everything.
pub fn everything() -> Vec<PolicyRule> {
    let all = || vec![ALL.to_owned()];
    vec![
        PolicyRule { api_groups: Some(all()), resources: Some(all()), verbs: all(), ..PolicyRule::default() },
        PolicyRule { non_resource_urls: Some(all()), verbs: all(), ..PolicyRule::default() },
    ]
}

/// The parts of `wanted` that nothing in `held` covers; each part is one verb on one resource or path.
pub fn missing(held: &[PolicyRule], wanted: &[PolicyRule]) -> Vec<PolicyRule> {
    let parts = wanted.iter().flat_map(atoms);
    parts.filter(|atom| !held.iter().any(|rule| covers(rule, atom))).collect()
}

fn atoms(rule: &PolicyRule) -> Vec<PolicyRule> {
    let one = |value: &String| Some(vec![value.clone()]);
    let mut out = Vec::new();
    for verb in &rule.verbs {
        let verbs = vec![verb.clone()];
        for url in list(&rule.non_resource_urls) {
            out.push(PolicyRule { non_resource_urls: one(url), verbs: verbs.clone(), ..PolicyRule::default() });
        }
        for group in list(&rule.api_groups) {
            for resource in list(&rule.resources) {
                let base = PolicyRule {
                    api_groups: one(group),
                    resources: one(resource),
                    verbs: verbs.clone(),
                    ..PolicyRule::default()
                };
                match list(&rule.resource_names) {
                    [] => out.push(base),
                    names => {
                        out.extend(names.iter().map(|n| PolicyRule { resource_names: one(n), ..base.clone() }));
                    }
                }
            }
        }
    }
    out
}

fn covers(rule: &PolicyRule, atom: &PolicyRule) -> bool {
    let all = |held: &[String], wanted: &[String]| wanted.iter().all(|w| has(held, w));
    let resources = list(&atom.resources).iter().all(|wanted| {
        let (plural, sub) = wanted.split_once('/').unwrap_or((wanted, ""));
        list(&rule.resources).iter().any(|r| r == wanted || covers_resource(r, plural, sub))
    });
    let names = match (list(&rule.resource_names), list(&atom.resource_names)) {
        ([], _) => true,
        (_, []) => false,
        (held, wanted) => wanted.iter().all(|w| held.contains(w)),
    };
    let paths = list(&atom.non_resource_urls)
        .iter()
        .all(|wanted| list(&rule.non_resource_urls).iter().any(|url| covers_path(url, wanted)));
    all(&rule.verbs, &atom.verbs) && all(list(&rule.api_groups), list(&atom.api_groups)) && resources && names && paths
}

/// A rule as the refusal of a grant shows it.
pub fn shown(rule: &PolicyRule) -> String {
    let mut parts = Vec::new();
    for (label, values) in [
        ("APIGroups", list(&rule.api_groups)),
        ("Resources", list(&rule.resources)),
        ("ResourceNames", list(&rule.resource_names)),
        ("NonResourceURLs", list(&rule.non_resource_urls)),
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
    fn a_rule_allows_what_it_names_and_nothing_beside() {
        let pods = json!({ "apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"] });
        let named = json!({ "apiGroups": [""], "resources": ["pods"], "verbs": ["*"], "resourceNames": ["a"] });
        let status = json!({ "apiGroups": ["*"], "resources": ["*/status"], "verbs": ["update"] });
        let all = json!({ "apiGroups": ["*"], "resources": ["*"], "verbs": ["*"] });
        let resource =
            |plural, subresource, name| What::Resource { group: "", plural, subresource, namespace: None, name };
        for (case, value, verb, what, want) in [
            ("the verb and the resource", &pods, "get", resource("pods", "", "p"), true),
            ("another verb", &pods, "delete", resource("pods", "", "p"), false),
            ("a subresource is not its resource", &pods, "get", resource("pods", "log", "p"), false),
            (
                "another group",
                &pods,
                "get",
                What::Resource { group: "x", plural: "pods", subresource: "", namespace: None, name: "" },
                false,
            ),
            ("the name", &named, "get", resource("pods", "", "a"), true),
            ("another name", &named, "get", resource("pods", "", "b"), false),
            ("no name at all, as in a create", &named, "create", resource("pods", "", ""), false),
            ("every status", &status, "update", resource("nodes", "status", "n"), true),
            ("but not the object", &status, "update", resource("nodes", "", "n"), false),
            ("everything", &all, "get", resource("pods", "log", "p"), true),
            ("but no path", &all, "get", What::Path("/metrics"), false),
        ] {
            assert_eq!(allows(&rule(value.clone()), &Attributes::new(verb, what)), want, "{case}");
        }
        let paths = rule(json!({ "nonResourceURLs": ["/version", "/health/*"], "verbs": ["get"] }));
        for (path, want) in [("/version", true), ("/version/x", false), ("/health/a", true), ("/healthz", false)] {
            assert_eq!(allows(&paths, &Attributes::new("get", What::Path(path))), want, "{path}");
        }
    }

    #[test]
    fn only_what_is_held_can_be_given() {
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
            assert_eq!(missing(&held, &[rule(wanted.clone())]).len(), count, "{case}");
            assert_eq!(missing(&everything(), &[rule(wanted)]), [], "{case}: who holds everything can give it");
        }
    }
}
