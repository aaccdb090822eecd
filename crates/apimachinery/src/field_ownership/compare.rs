//! The fields of an object, and the difference of two versions of it, both as field sets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::set::{FieldNode, FieldSet, field_step, key_step, value_step};
use crate::json_scanner;
use crate::schema::{ListType, Schema, TypeDef, TypeRef};

/// The value of an embedded struct that the JSON does not contain.
static EMPTY: LazyLock<Value> = LazyLock::new(|| json!({}));

/// The fields in which two versions of an object differ.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Difference {
    pub added: FieldSet,
    pub removed: FieldSet,
    pub modified: FieldSet,
}

impl Difference {
    /// The difference without the given fields and everything inside them.
    pub fn ignoring(self, ignored: &FieldSet) -> Self {
        if ignored.is_empty() {
            return self;
        }
        Self {
            added: self.added.without_subtrees(ignored),
            removed: self.removed.without_subtrees(ignored),
            modified: self.modified.without_subtrees(ignored),
        }
    }
}

pub fn difference(schema: &Schema, old: &Value, new: &Value) -> Difference {
    let found = compare_values(schema.root(), Some(old), Some(new));
    Difference { added: found.added.children, removed: found.removed.children, modified: found.modified.children }
}

/// As [`difference`], for two encoded objects. Members with the same bytes in both are not parsed.
pub fn difference_of_json(schema: &Schema, old: &[u8], new: &[u8]) -> Difference {
    let [old, new] = [old, new].map(|json| std::str::from_utf8(json).unwrap_or_default());
    match without_common_members(old, new) {
        Some((old, new)) => difference(schema, &old, &new),
        None => Difference::default(),
    }
}

/// Both objects without the members that have the same bytes in both. `None` if the objects are equal.
fn without_common_members(old: &str, new: &str) -> Option<(Value, Value)> {
    if old == new {
        return None;
    }
    let (Some(old_members), Some(new_members)) = (json_scanner::parse_members(old), json_scanner::parse_members(new))
    else {
        return Some((json_scanner::parse_value(old), json_scanner::parse_value(new)));
    };
    let (mut only_old, mut only_new) = (Map::new(), Map::new());
    for (name, old) in &old_members {
        match json_scanner::find_member(&new_members, name) {
            Some(new) => {
                if let Some((old, new)) = without_common_members(old, new) {
                    only_old.insert(name.to_string(), old);
                    only_new.insert(name.to_string(), new);
                }
            }
            None => {
                only_old.insert(name.to_string(), json_scanner::parse_value(old));
            }
        }
    }
    for (name, new) in new_members.iter().filter(|(name, _)| json_scanner::find_member(&old_members, name).is_none()) {
        only_new.insert(name.to_string(), json_scanner::parse_value(new));
    }
    Some((only_old.into(), only_new.into()))
}

/// The fields of an object. An element of a map or list is a field of its own; a struct is one only if it is empty.
pub fn fields(schema: &Schema, object: &Value) -> FieldSet {
    fields_at(schema.root(), object).children
}

/// The difference at one path and below it.
#[derive(Default)]
struct NodeDifference {
    added: FieldNode,
    removed: FieldNode,
    modified: FieldNode,
}

impl NodeDifference {
    fn insert(&mut self, step: &str, children: NodeDifference) {
        self.added.children.insert(step, children.added);
        self.removed.children.insert(step, children.removed);
        self.modified.children.insert(step, children.modified);
    }

    fn mark(&mut self, old: Option<&Value>, new: Option<&Value>) {
        self.added.included |= old.is_none();
        self.removed.included |= new.is_none();
    }
}

/// How a value is compared: as a whole, by member, or by element.
enum ValueForm {
    Leaf,
    Object,
    List,
}

fn value_form(ty: TypeRef<'_>, old: Option<&Value>, new: Option<&Value>) -> ValueForm {
    let all = |is_type: fn(&Value) -> bool| [old, new].into_iter().flatten().all(|v| v.is_null() || is_type(v));
    match ty.def {
        TypeDef::Scalar(_) => ValueForm::Leaf,
        TypeDef::List { list_type: ListType::Atomic, .. } => ValueForm::Leaf,
        TypeDef::List { .. } if all(Value::is_array) => ValueForm::List,
        TypeDef::Struct { .. } | TypeDef::Map { .. } | TypeDef::Untyped { .. }
            if !ty.is_atomic_object() && all(Value::is_object) =>
        {
            ValueForm::Object
        }
        _ => ValueForm::Leaf,
    }
}

fn compare_values(ty: TypeRef<'_>, old: Option<&Value>, new: Option<&Value>) -> NodeDifference {
    let mut found = NodeDifference::default();
    if old.is_none() && new.is_none() {
        return found;
    }
    let is_empty = |value: Option<&Value>| match value {
        None | Some(Value::Null) => true,
        Some(Value::Object(fields)) => fields.is_empty() && ty.embedded().next().is_none(),
        Some(Value::Array(elements)) => elements.is_empty(),
        Some(_) => false,
    };
    match value_form(ty, old, new) {
        // An empty and a missing value differ. The difference is that of the field itself.
        ValueForm::Object | ValueForm::List if is_empty(old) && is_empty(new) => compare_leaf(&mut found, old, new),
        ValueForm::Leaf => compare_leaf(&mut found, old, new),
        ValueForm::Object => {
            let (old_fields, new_fields) = (old.and_then(Value::as_object), new.and_then(Value::as_object));
            compare_members(ty, old_fields, new_fields, &mut found);
            found.mark(old, new);
        }
        ValueForm::List => {
            let old_elements = group_by_step(ty, old.and_then(Value::as_array));
            let new_elements = group_by_step(ty, new.and_then(Value::as_array));
            let steps: BTreeSet<&Box<str>> = old_elements.keys().chain(new_elements.keys()).collect();
            for step in steps {
                found.insert(step, compare_elements(ty, old_elements.get(step), new_elements.get(step)));
            }
            found.mark(old, new);
        }
    }
    found
}

fn compare_leaf(found: &mut NodeDifference, old: Option<&Value>, new: Option<&Value>) {
    found.mark(old, new);
    found.modified.included |= old.is_some() && new.is_some() && old != new;
}

fn compare_members(
    ty: TypeRef<'_>,
    old: Option<&Map<String, Value>>,
    new: Option<&Map<String, Value>>,
    found: &mut NodeDifference,
) {
    let mut names: BTreeSet<&str> = BTreeSet::new();
    for map in [old, new].into_iter().flatten() {
        names.extend(map.keys().map(String::as_str));
    }
    names.extend(ty.embedded().map(|f| &*f.name));
    for name in names {
        let embedded = ty.declared(name).is_some_and(|f| f.embedded);
        let (old, new) = (member(old, name, embedded), member(new, name, embedded));
        // Most members are equal: comparing them first avoids the recursion.
        if old != new {
            let ty = ty.member(name).unwrap_or_else(|| Schema::unknown().root());
            found.insert(&field_step(name), compare_values(ty, old, new));
        }
    }
}

fn member<'a>(map: Option<&'a Map<String, Value>>, name: &str, embedded: bool) -> Option<&'a Value> {
    map?.get(name).or_else(|| embedded.then_some(&*EMPTY))
}

fn compare_elements(ty: TypeRef<'_>, old: Option<&Vec<&Value>>, new: Option<&Vec<&Value>>) -> NodeDifference {
    let is_single = |list: Option<&Vec<&Value>>| list.is_none_or(|l| l.len() == 1);
    if is_single(old) && is_single(new) {
        let (old, new) = (old.and_then(|l| l.first().copied()), new.and_then(|l| l.first().copied()));
        return compare_values(ty.element(), old, new);
    }
    // Elements with equal keys are compared together, as one value.
    let mut found = NodeDifference::default();
    found.added.included = old.is_none();
    found.removed.included = new.is_none();
    found.modified.included = old.is_some() && new.is_some() && old != new;
    found
}

fn group_by_step<'a>(ty: TypeRef<'_>, list: Option<&'a Vec<Value>>) -> BTreeMap<Box<str>, Vec<&'a Value>> {
    let mut groups: BTreeMap<Box<str>, Vec<&Value>> = BTreeMap::new();
    for (i, element) in list.into_iter().flatten().enumerate() {
        groups.entry(list_element_step(ty, i, element)).or_default().push(element);
    }
    groups
}

/// The path step of a list element: its value, its keys, or its index if it has no keys.
pub fn list_element_step(ty: TypeRef<'_>, index: usize, element: &Value) -> Box<str> {
    match ty.list_type() {
        ListType::Set => value_step(element),
        ListType::Map(keys) => {
            let found: Map<String, Value> = keys
                .iter()
                .filter_map(|key| {
                    let value = element.get(&key.name).filter(|v| !v.is_null()).or(key.default.as_ref())?;
                    Some((key.name.clone(), value.clone()))
                })
                .collect();
            if found.is_empty() { format!("i:{index}").into() } else { key_step(found) }
        }
        ListType::Atomic => format!("i:{index}").into(),
    }
}

/// The fields of a value of type `ty`.
pub fn fields_at(ty: TypeRef<'_>, value: &Value) -> FieldNode {
    match value_form(ty, None, Some(value)) {
        ValueForm::Leaf => FieldNode { included: true, children: FieldSet::default() },
        ValueForm::List => {
            let mut node = FieldNode::default();
            for (i, element) in value.as_array().into_iter().flatten().enumerate() {
                let mut children = fields_at(ty.element(), element);
                children.included = true;
                node.children.insert(&list_element_step(ty, i, element), children);
            }
            node
        }
        ValueForm::Object => {
            let mut node = FieldNode::default();
            for (name, value) in value.as_object().into_iter().flatten() {
                let inner = ty.member(name).unwrap_or_else(|| Schema::unknown().root());
                let mut children = fields_at(inner, value);
                let is_empty = value.is_null() || value.as_object().is_some_and(Map::is_empty);
                children.included |= is_empty || ty.declared(name).is_none();
                node.children.insert(&field_step(name), children);
            }
            node
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::apps::v1::Deployment;
    use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};

    use super::*;

    #[test]
    fn all_fields_of_a_new_object_are_added() {
        let empty = json!({});
        let pod = json!({
            "metadata": { "name": "p", "labels": { "a": "b" }, "finalizers": ["x/y"] },
            "spec": {
                "nodeSelector": { "a": "b" },
                "containers": [{ "name": "c", "image": "i", "ports": [{ "containerPort": 80 }], "command": ["x"] }],
            },
        });
        assert_eq!(
            difference(&Schema::of::<Pod>(), &empty, &pod).added.to_value(),
            json!({
                "f:metadata": {
                    "f:name": {}, "f:labels": { ".": {}, "f:a": {} }, "f:finalizers": { ".": {}, "v:\"x/y\"": {} } },
                "f:spec": {
                    "f:nodeSelector": {},
                    "f:containers": { ".": {}, "k:{\"name\":\"c\"}": {
                        ".": {}, "f:name": {}, "f:image": {}, "f:command": {}, "f:resources": {},
                        "f:ports": { ".": {}, "k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {
                            ".": {}, "f:containerPort": {} } },
                    } },
                },
            })
        );
        let claim = json!({ "spec": { "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Gi" } } } });
        assert_eq!(
            difference(&Schema::of::<PersistentVolumeClaim>(), &empty, &claim).added.to_value(),
            json!({ "f:spec": { "f:accessModes": {},
                "f:resources": { "f:requests": { ".": {}, "f:storage": {} } } } })
        );
        let deployment = json!({ "spec": { "selector": { "matchLabels": { "a": "b" } },
            "template": { "metadata": { "labels": { "a": "b" } }, "spec": { "dnsPolicy": "Default" } } } });
        assert_eq!(
            difference(&Schema::of::<Deployment>(), &empty, &deployment).added.to_value(),
            json!({ "f:spec": { "f:selector": {}, "f:template": {
                "f:metadata": { "f:labels": { ".": {}, "f:a": {} } }, "f:spec": { "f:dnsPolicy": {} } } } })
        );
    }

    #[test]
    fn the_fields_of_a_configuration_are_those_it_lists() {
        let pod = json!({
            "metadata": { "labels": { "a": "b" }, "annotations": {} },
            "spec": { "containers": [{ "name": "c", "image": "i", "env": [] }] },
        });
        assert_eq!(
            fields(&Schema::of::<Pod>(), &pod).to_value(),
            json!({
                "f:metadata": { "f:labels": { "f:a": {} }, "f:annotations": {} },
                "f:spec": { "f:containers": { "k:{\"name\":\"c\"}": { ".": {}, "f:name": {}, "f:image": {} } } },
            })
        );
    }

    #[test]
    fn changes_have_the_path_of_the_changed_field() {
        let schema = Schema::of::<Pod>();
        let old = json!({ "spec": { "containers": [{ "name": "a", "image": "1" }, { "name": "b" }], "hostIPC": true },
            "metadata": { "labels": { "x": "1" } } });
        let new = json!({ "spec": { "containers": [{ "name": "b" }, { "name": "a", "image": "2" }] },
            "metadata": { "labels": { "y": "1" } } });
        let found = difference(&schema, &old, &new);
        for (a, b) in [(&old, &new), (&new, &old), (&old, &old)] {
            let encoded = difference_of_json(&schema, a.to_string().as_bytes(), b.to_string().as_bytes());
            assert_eq!(encoded, difference(&schema, a, b), "parsed and encoded objects give the same difference");
        }
        assert_eq!(
            found.modified.to_value(),
            json!({ "f:spec": { "f:containers": { "k:{\"name\":\"a\"}": { "f:image": {} } } } })
        );
        assert_eq!(found.added.to_value(), json!({ "f:metadata": { "f:labels": { "f:y": {} } } }));
        assert_eq!(
            found.removed.to_value(),
            json!({ "f:metadata": { "f:labels": { "f:x": {} } }, "f:spec": { "f:hostIPC": {} } })
        );
        assert_eq!(difference(&schema, &old, &old), Difference::default());
        let (labelled, bare) = (json!({ "metadata": { "labels": { "x": "1" } } }), json!({ "metadata": {} }));
        let gone = difference(&schema, &labelled, &bare);
        let encoded = difference_of_json(&schema, labelled.to_string().as_bytes(), bare.to_string().as_bytes());
        assert_eq!(encoded, gone);
        assert_eq!(gone.removed.to_value(), json!({ "f:metadata": { "f:labels": { ".": {}, "f:x": {} } } }));
    }
}
