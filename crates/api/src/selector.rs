//! Label selectors, node selectors and topology terms: whether labels or a node match them.
//!
//! The only implementation of selector matching in the workspace. It does not parse the `labelSelector` and
//! `fieldSelector` of a query string: the API server does, and evaluates the result with [`ValueRequirement`].
//!
//! A requirement that is not valid (an unknown operator, a missing or superfluous value) matches nothing, as in
//! Kubernetes, where such a selector is an error.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, TopologySelectorTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

pub type Labels = BTreeMap<String, String>;

/// What one requirement of a selector demands of the value of a label or field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueRequirement<'a> {
    In(Cow<'a, [String]>),
    /// Also matches if the label is absent.
    NotIn(Cow<'a, [String]>),
    Exists,
    DoesNotExist,
    GreaterThan(i64),
    LessThan(i64),
}

impl<'a> ValueRequirement<'a> {
    /// Returns `None` if the requirement is not valid. Label selectors have no `Gt` and `Lt`.
    pub fn of_label(requirement: &'a LabelSelectorRequirement) -> Option<Self> {
        Self::new(&requirement.operator, requirement.values.as_deref().unwrap_or_default())
            .filter(|valid| !matches!(valid, Self::GreaterThan(_) | Self::LessThan(_)))
    }

    /// Returns `None` if the requirement is not valid.
    pub fn of_node(requirement: &'a NodeSelectorRequirement) -> Option<Self> {
        Self::new(&requirement.operator, requirement.values.as_deref().unwrap_or_default())
    }

    fn new(operator: &str, values: &'a [String]) -> Option<Self> {
        Some(match (operator, values) {
            ("In", [_, ..]) => Self::In(Cow::Borrowed(values)),
            ("NotIn", [_, ..]) => Self::NotIn(Cow::Borrowed(values)),
            ("Exists", []) => Self::Exists,
            ("DoesNotExist", []) => Self::DoesNotExist,
            ("Gt", [bound]) => Self::GreaterThan(bound.parse().ok()?),
            ("Lt", [bound]) => Self::LessThan(bound.parse().ok()?),
            _ => return None,
        })
    }

    /// `value` is `None` if the label or field is absent.
    pub fn matches(&self, value: Option<&str>) -> bool {
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match self {
            Self::In(values) => value.is_some_and(|value| values.iter().any(|listed| listed == value)),
            Self::NotIn(values) => value.is_none_or(|value| values.iter().all(|listed| listed != value)),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
            Self::GreaterThan(bound) => number().is_some_and(|number| number > *bound),
            Self::LessThan(bound) => number().is_some_and(|number| number < *bound),
        }
    }
}

/// Returns true if the labels meet all of the selector's requirements. An empty selector matches everything. For a field
/// whose absence means "nothing", the caller handles `None`.
pub fn labels_match(selector: &LabelSelector, labels: Option<&Labels>) -> bool {
    let label = |key: &str| labels.and_then(|l| l.get(key)).map(String::as_str);
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| label(key) == Some(value));
    let mut expressions = selector.match_expressions.iter().flatten();
    equal && expressions.all(|e| ValueRequirement::of_label(e).is_some_and(|r| r.matches(label(&e.key))))
}

/// Returns true if the node matches any of the terms. A selector without terms matches no node.
pub fn node_matches(selector: &NodeSelector, node: &Node) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, node))
}

/// Returns true if the node meets all of the term's requirements. A term without requirements matches no node.
pub fn term_matches(term: &NodeSelectorTerm, node: &Node) -> bool {
    let (labels, fields) = (term.match_expressions.as_deref(), term.match_fields.as_deref());
    let (labels, fields) = (labels.unwrap_or_default(), fields.unwrap_or_default());
    if labels.is_empty() && fields.is_empty() {
        return false;
    }
    let meets = |requirement: &NodeSelectorRequirement, value: Option<&str>| {
        ValueRequirement::of_node(requirement).is_some_and(|r| r.matches(value))
    };
    let label = |key: &str| node.metadata.labels.as_ref().and_then(|l| l.get(key)).map(String::as_str);
    // `metadata.name` is the only field that the API defines here.
    let field = |key: &str| node.metadata.name.as_deref().filter(|_| key == "metadata.name");
    labels.iter().all(|r| meets(r, label(&r.key))) && fields.iter().all(|r| meets(r, field(&r.key)))
}

/// Returns true if a StorageClass with these `allowedTopologies` allows a volume where these labels are: any of the terms,
/// with all of its keys. No terms allow every topology.
pub fn topology_matches(terms: &[TopologySelectorTerm], labels: Option<&Labels>) -> bool {
    let label = |key: &str| labels.and_then(|l| l.get(key));
    let allows = |term: &TopologySelectorTerm| {
        let mut expressions = term.match_label_expressions.iter().flatten();
        expressions.all(|e| label(&e.key).is_some_and(|value| e.values.contains(value)))
    };
    terms.is_empty() || terms.iter().any(allows)
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
            ("an unknown operator", expression("zone", "Near", &["a"]), false),
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
    fn a_class_allows_topologies_by_any_term() {
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
    fn a_label_selector_matches_labels_that_meet_all_requirements() {
        let labels = node().metadata.labels;
        for (case, selector, want) in [
            ("nothing named", json!({}), true),
            ("a label", json!({"matchLabels": {"zone": "a"}}), true),
            ("another value", json!({"matchLabels": {"zone": "b"}}), false),
            (
                "an expression",
                json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b", "a"]}]}),
                true,
            ),
            (
                "a missing label is not excluded",
                json!({"matchExpressions": [{"key": "rack", "operator": "NotIn", "values": ["1"]}]}),
                true,
            ),
            ("absent", json!({"matchExpressions": [{"key": "rack", "operator": "DoesNotExist"}]}), true),
            (
                "comparisons are for nodes only",
                json!({"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["4"]}]}),
                false,
            ),
            (
                "NotIn without values is not valid",
                json!({"matchExpressions": [{"key": "rack", "operator": "NotIn"}]}),
                false,
            ),
            (
                "Exists with values is not valid",
                json!({"matchExpressions": [{"key": "zone", "operator": "Exists", "values": ["a"]}]}),
                false,
            ),
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
