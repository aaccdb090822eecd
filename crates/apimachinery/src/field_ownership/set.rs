//! A set of fields of an object in the structure of `fieldsV1` of `metadata.managedFields`: a tree with the path steps
//! `f:<field>`, `k:<keys of a list element>`, `v:<value of a list element>` and `i:<index of a list element>`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct FieldSet(BTreeMap<Box<str>, FieldNode>);

/// A path in the tree: whether the set includes it, and the paths below it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FieldNode {
    pub included: bool,
    pub children: FieldSet,
}

impl FieldNode {
    pub fn is_empty(&self) -> bool {
        !self.included && self.children.is_empty()
    }
}

/// The path step of a field.
pub fn field_step(name: &str) -> Box<str> {
    format!("f:{name}").into()
}

impl FieldSet {
    /// The set of these paths, each a list of field names.
    pub fn from_paths(paths: &[&[&str]]) -> Self {
        let mut result = Self::default();
        for path in paths {
            let mut set = &mut result;
            for (i, name) in path.iter().enumerate() {
                let node = set.0.entry(field_step(name)).or_default();
                node.included |= i + 1 == path.len();
                set = &mut node.children;
            }
        }
        result
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn get(&self, step: &str) -> Option<&FieldNode> {
        self.0.get(step)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &FieldNode)> {
        self.0.iter().map(|(step, node)| (&**step, node))
    }

    /// Inserts the node at a step, unless the node is empty.
    pub fn insert(&mut self, step: &str, node: FieldNode) {
        if !node.is_empty() {
            self.0.insert(step.into(), node);
        }
    }

    pub fn union(mut self, other: &Self) -> Self {
        for (step, theirs) in &other.0 {
            let ours = self.0.entry(step.clone()).or_default();
            ours.included |= theirs.included;
            ours.children = std::mem::take(&mut ours.children).union(&theirs.children);
        }
        self
    }

    /// As `difference`, in place.
    pub fn subtract(&mut self, other: &Self) {
        for (step, theirs) in &other.0 {
            let Some(ours) = self.0.get_mut(step) else { continue };
            ours.included &= !theirs.included;
            ours.children.subtract(&theirs.children);
            if ours.is_empty() {
                self.0.remove(step);
            }
        }
    }

    pub fn intersection(&self, other: &Self) -> Self {
        self.combined(other, |ours, theirs| FieldNode {
            included: ours.included && theirs.is_some_and(|t| t.included),
            children: theirs.map(|t| ours.children.intersection(&t.children)).unwrap_or_default(),
        })
    }

    /// The set without the paths that the other set includes. Paths below them stay.
    pub fn difference(&self, other: &Self) -> Self {
        self.combined(other, |ours, theirs| match theirs {
            None => ours.clone(),
            Some(t) => {
                FieldNode { included: ours.included && !t.included, children: ours.children.difference(&t.children) }
            }
        })
    }

    /// The set without the paths that the other set includes, and without everything below them.
    pub fn without_subtrees(&self, other: &Self) -> Self {
        self.combined(other, |ours, theirs| match theirs {
            None => ours.clone(),
            Some(t) if t.included => FieldNode::default(),
            Some(t) => FieldNode { included: ours.included, children: ours.children.without_subtrees(&t.children) },
        })
    }

    fn combined(&self, other: &Self, join: impl Fn(&FieldNode, Option<&FieldNode>) -> FieldNode) -> Self {
        let mut result = Self::default();
        for (step, ours) in &self.0 {
            result.insert(step, join(ours, other.0.get(step)));
        }
        result
    }

    #[cfg(test)]
    pub fn to_value(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Decodes the set that a client sent. Invalid steps are ignored.
    pub fn from_value(value: &Value) -> Self {
        let mut result = Self::default();
        for (step, inner) in value.as_object().into_iter().flatten() {
            if step != SELF_MARKER
                && let Some(step) = canonical(step)
            {
                result.insert(&step, FieldNode::from_value(inner));
            }
        }
        result
    }

    /// All paths of the set, in the form of messages: `.spec.containers[name="a"].image`.
    pub fn paths(&self) -> Vec<String> {
        fn collect(set: &FieldSet, prefix: &str, out: &mut Vec<String>) {
            for (step, node) in &set.0 {
                let path = format!("{prefix}{}", format_step(step));
                if node.included {
                    out.push(path.clone());
                }
                collect(&node.children, &path, out);
            }
        }
        let mut out = Vec::new();
        collect(self, "", &mut out);
        out
    }
}

/// The step that says that the set includes the path itself, if it contains paths below, too.
const SELF_MARKER: &str = ".";

impl Serialize for FieldSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(&self.0)
    }
}

impl Serialize for FieldNode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if self.included && !self.children.is_empty() {
            map.serialize_entry(SELF_MARKER, &Self::default())?;
        }
        for (step, node) in &self.children.0 {
            map.serialize_entry(step, node)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for FieldSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        FieldNode::deserialize(deserializer).map(|node| node.children)
    }
}

impl<'de> Deserialize<'de> for FieldNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldNodeVisitor)
    }
}

struct FieldNodeVisitor;

impl<'de> Visitor<'de> for FieldNodeVisitor {
    type Value = FieldNode;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a set of fields")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FieldNode, A::Error> {
        #[derive(Deserialize)]
        struct Step<'a>(#[serde(borrow)] Cow<'a, str>);
        let mut node = FieldNode::default();
        while let Some((Step(step), children)) = map.next_entry::<Step<'de>, FieldNode>()? {
            if step == SELF_MARKER {
                node.included = true;
            } else if let Some(step) = canonical(&step) {
                node.children.insert(&step, children);
            }
        }
        node.included |= node.children.is_empty();
        Ok(node)
    }
}

impl FieldNode {
    fn from_value(value: &Value) -> Self {
        let children = FieldSet::from_value(value);
        let marked = value.get(SELF_MARKER).is_some();
        Self { included: marked || children.is_empty(), children }
    }
}

/// The canonical form of a step: sorted keys, no spaces. `None` if the step is invalid.
fn canonical(step: &str) -> Option<Box<str>> {
    let (kind, rest) = step.split_once(':')?;
    match kind {
        "f" => Some(step.into()),
        "k" => serde_json::from_str::<Map<String, Value>>(rest).ok().map(key_step),
        "v" => serde_json::from_str::<Value>(rest).ok().map(|value| value_step(&value)),
        "i" => rest.parse::<usize>().ok().map(|_| step.into()),
        _ => None,
    }
}

/// The path step of an element of a list of type map.
pub fn key_step(keys: Map<String, Value>) -> Box<str> {
    format!("k:{}", Value::Object(keys)).into()
}

/// The path step of an element of a list of type set.
pub fn value_step(value: &Value) -> Box<str> {
    format!("v:{value}").into()
}

/// A step in the form of messages.
fn format_step(step: &str) -> String {
    match step.split_once(':') {
        Some(("k", keys)) => {
            let keys: Map<String, Value> = serde_json::from_str(keys).unwrap_or_default();
            let keys: Vec<String> = keys.iter().map(|(name, value)| format!("{name}={value}")).collect();
            format!("[{}]", keys.join(","))
        }
        Some(("v", value)) => format!("[={value}]"),
        Some(("i", index)) => format!("[{index}]"),
        Some((_, name)) => format!(".{name}"),
        None => step.into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(value: Value) -> FieldSet {
        let set = FieldSet::from_value(&value);
        assert_eq!(serde_json::from_str::<FieldSet>(&value.to_string()).unwrap(), set, "from a value and from JSON");
        set
    }

    #[test]
    fn decoding_and_encoding_a_set_gives_the_same_json() {
        let written = json!({
            "f:data": { ".": {}, "f:k": {} },
            "f:metadata": { "f:finalizers": { ".": {}, "v:\"example.com/f\"": {} } },
            "f:spec": { "f:containers": { "k:{\"name\":\"a\"}": { ".": {}, "f:image": {} } } },
        });
        assert_eq!(set(written.clone()).to_value(), written);
        let spaced = json!({ "f:ports": { "k:{ \"protocol\": \"TCP\", \"containerPort\": 80 }": {} } });
        assert_eq!(
            set(spaced).to_value(),
            json!({ "f:ports": { "k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {} } })
        );
        assert!(set(json!({ "x": {}, "nonsense:": {}, "k:1": {} })).is_empty());
    }

    #[test]
    fn sets_combine() {
        let a = set(json!({ "f:a": { ".": {}, "f:x": {}, "f:y": {} }, "f:b": {} }));
        let b = set(json!({ "f:a": { "f:x": {} }, "f:c": {} }));
        for (case, got, want) in [
            ("union", a.clone().union(&b), json!({ "f:a": { ".": {}, "f:x": {}, "f:y": {} }, "f:b": {}, "f:c": {} })),
            ("intersection", a.intersection(&b), json!({ "f:a": { "f:x": {} } })),
            ("difference", a.difference(&b), json!({ "f:a": { ".": {}, "f:y": {} }, "f:b": {} })),
            (
                "a path is removed without the paths below it",
                a.difference(&set(json!({ "f:a": {} }))),
                json!({ "f:a": { "f:x": {}, "f:y": {} }, "f:b": {} }),
            ),
            (
                "a path is removed with the paths below it",
                a.without_subtrees(&FieldSet::from_paths(&[&["a"]])),
                json!({ "f:b": {} }),
            ),
        ] {
            assert_eq!(got.to_value(), want, "{case}");
        }
        for other in [&a, &b, &set(json!({ "f:a": {} })), &set(json!({ "f:a": { "f:x": {}, "f:y": {} } }))] {
            let mut left = a.clone();
            left.subtract(other);
            assert_eq!(left, a.difference(other), "in place");
        }
    }

    #[test]
    fn paths_have_the_form_of_messages() {
        let set = set(json!({
            "f:spec": { "f:ports": { "k:{\"port\":80,\"protocol\":\"TCP\"}": { ".": {}, "f:name": {} } } },
            "f:metadata": { "f:finalizers": { "v:\"a/b\"": {} } },
        }));
        assert_eq!(
            set.paths(),
            [
                ".metadata.finalizers[=\"a/b\"]",
                ".spec.ports[port=80,protocol=\"TCP\"]",
                ".spec.ports[port=80,protocol=\"TCP\"].name"
            ]
        );
    }
}
