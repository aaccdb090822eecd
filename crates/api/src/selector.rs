//! Selectors: which labels, and which nodes, they let through.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, TopologySelectorTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

pub type Labels = BTreeMap<String, String>;

/// An empty selector lets everything through.
pub fn labels_match(selector: &LabelSelector, labels: Option<&Labels>) -> bool {
    let label = |key: &str| labels.and_then(|l| l.get(key)).map(String::as_str);
    let exact = selector.match_labels.iter().flatten().all(|(key, value)| label(key) == Some(value));
    let mut expressions = selector.match_expressions.iter().flatten();
    exact && expressions.all(|e| holds(&e.operator, e.values.as_deref().unwrap_or_default(), label(&e.key)))
}

/// Any of the terms; a selector without terms lets no node through.
pub fn node_matches(selector: &NodeSelector, node: &Node) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, node))
}

/// All of the term's requirements; a term without any lets no node through.
pub fn term_matches(term: &NodeSelectorTerm, node: &Node) -> bool {
    let (labels, fields) = (term.match_expressions.as_deref(), term.match_fields.as_deref());
    let (labels, fields) = (labels.unwrap_or_default(), fields.unwrap_or_default());
    if labels.is_empty() && fields.is_empty() {
        return false;
    }
    let met = |r: &NodeSelectorRequirement, value: Option<&str>| {
        holds(&r.operator, r.values.as_deref().unwrap_or_default(), value)
    };
    let label = |key: &str| node.metadata.labels.as_ref().and_then(|l| l.get(key)).map(String::as_str);
    // The name is the only field there is.
    let field = |key: &str| node.metadata.name.as_deref().filter(|_| key == "metadata.name");
    labels.iter().all(|r| met(r, label(&r.key))) && fields.iter().all(|r| met(r, field(&r.key)))
}

/// Where a class allows its volumes: any of the terms, all of a term's keys; no terms allow everywhere.
pub fn topology_matches(terms: &[TopologySelectorTerm], labels: Option<&Labels>) -> bool {
    let label = |key: &str| labels.and_then(|l| l.get(key));
    let allows = |term: &TopologySelectorTerm| {
        let mut keys = term.match_label_expressions.iter().flatten();
        keys.all(|e| label(&e.key).is_some_and(|value| e.values.contains(value)))
    };
    terms.is_empty() || terms.iter().any(allows)
}

fn holds(operator: &str, values: &[String], has: Option<&str>) -> bool {
    let listed = |value: &str| values.iter().any(|v| v == value);
    let numbers = || Some((has?.parse::<i64>().ok()?, values.first()?.parse::<i64>().ok()?));
    match operator {
        "In" => has.is_some_and(listed),
        "NotIn" => !has.is_some_and(listed),
        "Exists" => has.is_some(),
        "DoesNotExist" => has.is_none(),
        "Gt" => numbers().is_some_and(|(has, than)| has > than),
        "Lt" => numbers().is_some_and(|(has, than)| has < than),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;
    use serde_json::json;

    fn node() -> Node {
        let mut node = build::node("n1");
        let labels = [("zone", "a"), ("cores", "8")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        node.metadata.labels = Some(labels.into());
        node
    }

    #[test]
    fn a_node_must_meet_all_of_one_term() {
        let expression = |key: &str, operator: &str, values: &[&str]| json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]});
        for (case, selector, want) in [
            ("listed", expression("zone", "In", &["b", "a"]), true),
            ("not listed", expression("zone", "In", &["b"]), false),
            ("excluded", expression("zone", "NotIn", &["a"]), false),
            ("a missing label is not excluded", expression("rack", "NotIn", &["a"]), true),
            ("exists", expression("zone", "Exists", &[]), true),
            ("does not exist", expression("zone", "DoesNotExist", &[]), false),
            ("greater", expression("cores", "Gt", &["4"]), true),
            ("not greater", expression("cores", "Gt", &["8"]), false),
            ("less", expression("cores", "Lt", &["9"]), true),
            ("no number", expression("zone", "Lt", &["9"]), false),
            ("an operator nobody knows", expression("zone", "Near", &["a"]), false),
            ("no terms", json!({"nodeSelectorTerms": []}), false),
            ("an empty term", json!({"nodeSelectorTerms": [{}]}), false),
            (
                "by name",
                json!({"nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]}),
                true,
            ),
            (
                "one term of two",
                json!({"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}),
                true,
            ),
            (
                "half a term",
                json!({"nodeSelectorTerms": [{"matchExpressions": [
                    {"key": "zone", "operator": "In", "values": ["a"]},
                    {"key": "rack", "operator": "Exists"}]}]}),
                false,
            ),
        ] {
            let selector: NodeSelector = serde_json::from_value(selector).unwrap();
            assert_eq!(node_matches(&selector, &node()), want, "{case}");
        }
    }

    #[test]
    fn a_class_allows_places_by_any_term() {
        let term = |key: &str, values: &[&str]| -> TopologySelectorTerm {
            serde_json::from_value(json!({"matchLabelExpressions": [{"key": key, "values": values}]})).unwrap()
        };
        for (case, terms, want) in [
            ("everywhere", vec![], true),
            ("here", vec![term("zone", &["a", "b"])], true),
            ("elsewhere", vec![term("zone", &["b"])], false),
            ("elsewhere or here", vec![term("zone", &["b"]), term("zone", &["a"])], true),
            ("a label the node lacks", vec![term("rack", &["1"])], false),
        ] {
            assert_eq!(topology_matches(&terms, node().metadata.labels.as_ref()), want, "{case}");
        }
    }

    #[test]
    fn label_selectors_want_everything_they_name() {
        let labels = node().metadata.labels;
        for (case, selector, want) in [
            ("nothing named", json!({}), true),
            ("a label", json!({"matchLabels": {"zone": "a"}}), true),
            ("another value", json!({"matchLabels": {"zone": "b"}}), false),
            (
                "label and expression",
                json!({"matchLabels": {"zone": "a"}, "matchExpressions": [{"key": "rack", "operator": "Exists"}]}),
                false,
            ),
        ] {
            let selector: LabelSelector = serde_json::from_value(selector).unwrap();
            assert_eq!(labels_match(&selector, labels.as_ref()), want, "{case}");
        }
    }
}
