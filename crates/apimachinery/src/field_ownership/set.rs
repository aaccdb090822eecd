//! A set of fields of an object, as `metadata.managedFields` writes it: a tree whose steps are `f:<field>`,
//! `k:<keys of a list element>`, `v:<value in a list>` and `i:<index>`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct FieldSet(BTreeMap<Box<str>, Node>);

/// A place in the tree: is the place itself in the set, and what is below it?
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    pub member: bool,
    pub below: FieldSet,
}

impl Node {
    pub fn is_empty(&self) -> bool {
        !self.member && self.below.is_empty()
    }
}

pub fn field(name: &str) -> Box<str> {
    format!("f:{name}").into()
}

impl FieldSet {
    /// A set of whole fields, each given as a path of names.
    pub fn of(paths: &[&[&str]]) -> Self {
        let mut made = Self::default();
        for path in paths {
            let mut set = &mut made;
            for (i, name) in path.iter().enumerate() {
                let node = set.0.entry(field(name)).or_default();
                node.member |= i + 1 == path.len();
                set = &mut node.below;
            }
        }
        made
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn get(&self, step: &str) -> Option<&Node> {
        self.0.get(step)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.0.iter().map(|(step, node)| (&**step, node))
    }

    /// Puts what is known about a step; nothing is not put.
    pub fn put(&mut self, step: &str, node: Node) {
        if !node.is_empty() {
            self.0.insert(step.into(), node);
        }
    }

    pub fn union(mut self, other: &Self) -> Self {
        for (step, theirs) in &other.0 {
            let ours = self.0.entry(step.clone()).or_default();
            ours.member |= theirs.member;
            ours.below = std::mem::take(&mut ours.below).union(&theirs.below);
        }
        self
    }

    /// Takes the places of the other set out, in place. What is below such a place stays.
    pub fn subtract(&mut self, other: &Self) {
        for (step, theirs) in &other.0 {
            let Some(ours) = self.0.get_mut(step) else { continue };
            ours.member &= !theirs.member;
            ours.below.subtract(&theirs.below);
            if ours.is_empty() {
                self.0.remove(step);
            }
        }
    }

    pub fn intersection(&self, other: &Self) -> Self {
        self.combined(other, |ours, theirs| Node {
            member: ours.member && theirs.is_some_and(|t| t.member),
            below: theirs.map(|t| ours.below.intersection(&t.below)).unwrap_or_default(),
        })
    }

    /// Without the places in the other set. What is below such a place stays.
    pub fn difference(&self, other: &Self) -> Self {
        self.combined(other, |ours, theirs| match theirs {
            None => ours.clone(),
            Some(t) => Node { member: ours.member && !t.member, below: ours.below.difference(&t.below) },
        })
    }

    /// Without the places in the other set and everything below them.
    pub fn without_trees(&self, other: &Self) -> Self {
        self.combined(other, |ours, theirs| match theirs {
            None => ours.clone(),
            Some(t) if t.member => Node::default(),
            Some(t) => Node { member: ours.member, below: ours.below.without_trees(&t.below) },
        })
    }

    fn combined(&self, other: &Self, join: impl Fn(&Node, Option<&Node>) -> Node) -> Self {
        let mut made = Self::default();
        for (step, ours) in &self.0 {
            made.put(step, join(ours, other.0.get(step)));
        }
        made
    }

    #[cfg(test)]
    pub fn to_value(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// What a client calls a set may be anything; only what is one is kept.
    pub fn from_value(value: &Value) -> Self {
        let mut made = Self::default();
        for (step, inner) in value.as_object().into_iter().flatten() {
            if step != ITSELF
                && let Some(step) = canonical(step)
            {
                made.put(&step, Node::from_value(inner));
            }
        }
        made
    }

    /// Every place as the API prints it: `.spec.containers[name="a"].image`.
    pub fn paths(&self) -> Vec<String> {
        fn collect(set: &FieldSet, prefix: &str, out: &mut Vec<String>) {
            for (step, node) in &set.0 {
                let path = format!("{prefix}{}", shown(step));
                if node.member {
                    out.push(path.clone());
                }
                collect(&node.below, &path, out);
            }
        }
        let mut out = Vec::new();
        collect(self, "", &mut out);
        out
    }
}

/// Stands for the place itself where there is something below it.
const ITSELF: &str = ".";

impl Serialize for FieldSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(&self.0)
    }
}

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if self.member && !self.below.is_empty() {
            map.serialize_entry(ITSELF, &Self::default())?;
        }
        for (step, node) in &self.below.0 {
            map.serialize_entry(step, node)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for FieldSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Node::deserialize(deserializer).map(|node| node.below)
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Steps)
    }
}

struct Steps;

impl<'de> Visitor<'de> for Steps {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a set of fields")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        #[derive(Deserialize)]
        struct Step<'a>(#[serde(borrow)] Cow<'a, str>);
        let mut node = Node::default();
        while let Some((Step(step), below)) = map.next_entry::<Step<'de>, Node>()? {
            if step == ITSELF {
                node.member = true;
            } else if let Some(step) = canonical(&step) {
                node.below.put(&step, below);
            }
        }
        node.member |= node.below.is_empty();
        Ok(node)
    }
}

impl Node {
    fn from_value(value: &Value) -> Self {
        let below = FieldSet::from_value(value);
        let marked = value.get(ITSELF).is_some();
        Self { member: marked || below.is_empty(), below }
    }
}

/// The one way a step is written: keys sorted, no spaces.
fn canonical(step: &str) -> Option<Box<str>> {
    let (kind, rest) = step.split_once(':')?;
    match kind {
        "f" => Some(step.into()),
        "k" => serde_json::from_str::<Map<String, Value>>(rest).ok().map(keyed),
        "v" => serde_json::from_str::<Value>(rest).ok().map(|value| valued(&value)),
        "i" => rest.parse::<usize>().ok().map(|_| step.into()),
        _ => None,
    }
}

pub fn keyed(keys: Map<String, Value>) -> Box<str> {
    format!("k:{}", Value::Object(keys)).into()
}

pub fn valued(value: &Value) -> Box<str> {
    format!("v:{value}").into()
}

fn shown(step: &str) -> String {
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
        assert_eq!(serde_json::from_str::<FieldSet>(&value.to_string()).unwrap(), set, "as a value and as a text");
        set
    }

    #[test]
    fn a_set_is_written_the_way_it_was_read() {
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
                "a place leaves without what is below it",
                a.difference(&set(json!({ "f:a": {} }))),
                json!({ "f:a": { "f:x": {}, "f:y": {} }, "f:b": {} }),
            ),
            ("or with it", a.without_trees(&FieldSet::of(&[&["a"]])), json!({ "f:b": {} })),
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
    fn places_are_shown_as_paths() {
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
