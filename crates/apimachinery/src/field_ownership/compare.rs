//! Which fields an object has, and how two versions of it differ, both in terms of its schema.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::set::{FieldNode, FieldSet, field_step, key_step, value_step};
use crate::json_scanner;
use crate::schema::{ListType, Schema, TypeDef, TypeRef};

/// What stands in for a struct that is there although nobody wrote it.
static EMPTY: LazyLock<Value> = LazyLock::new(|| json!({}));

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Difference {
    pub added: FieldSet,
    pub removed: FieldSet,
    pub modified: FieldSet,
}

impl Difference {
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
    let found = compared(schema.root(), Some(old), Some(new));
    Difference { added: found.added.children, removed: found.removed.children, modified: found.modified.children }
}

/// The same for two encoded objects. What has the same text on both sides is not taken apart.
pub fn difference_of_json(schema: &Schema, old: &[u8], new: &[u8]) -> Difference {
    let [old, new] = [old, new].map(|text| std::str::from_utf8(text).unwrap_or_default());
    match differing(old, new) {
        Some((old, new)) => difference(schema, &old, &new),
        None => Difference::default(),
    }
}

/// The two without the members that are the same in both.
fn differing(old: &str, new: &str) -> Option<(Value, Value)> {
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
                if let Some((old, new)) = differing(old, new) {
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

/// The fields an object has. A struct is not a field of its own unless it is empty, an element of a map or list is.
pub fn fields(schema: &Schema, object: &Value) -> FieldSet {
    fields_at(schema.root(), object).children
}

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

/// How a value ty a place is looked ty.
enum ValueForm {
    Leaf,
    Object,
    List,
}

fn value_form(ty: TypeRef<'_>, old: Option<&Value>, new: Option<&Value>) -> ValueForm {
    let all = |test: fn(&Value) -> bool| [old, new].into_iter().flatten().all(|v| v.is_null() || test(v));
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

fn compared(ty: TypeRef<'_>, old: Option<&Value>, new: Option<&Value>) -> NodeDifference {
    let mut found = NodeDifference::default();
    if old.is_none() && new.is_none() {
        return found;
    }
    let is_bare = |value: Option<&Value>| match value {
        None | Some(Value::Null) => true,
        Some(Value::Object(fields)) => fields.is_empty() && ty.embedded().next().is_none(),
        Some(Value::Array(elements)) => elements.is_empty(),
        Some(_) => false,
    };
    match value_form(ty, old, new) {
        // The difference between empty and absent is kept, as a difference of the place itself.
        ValueForm::Object | ValueForm::List if is_bare(old) && is_bare(new) => leaf(&mut found, old, new),
        ValueForm::Leaf => leaf(&mut found, old, new),
        ValueForm::Object => {
            let (old_fields, new_fields) = (old.and_then(Value::as_object), new.and_then(Value::as_object));
            members(ty, old_fields, new_fields, &mut found);
            found.mark(old, new);
        }
        ValueForm::List => {
            let old_elements = grouped(ty, old.and_then(Value::as_array));
            let new_elements = grouped(ty, new.and_then(Value::as_array));
            let steps: BTreeSet<&Box<str>> = old_elements.keys().chain(new_elements.keys()).collect();
            for step in steps {
                found.insert(step, elements(ty, old_elements.get(step), new_elements.get(step)));
            }
            found.mark(old, new);
        }
    }
    found
}

fn leaf(found: &mut NodeDifference, old: Option<&Value>, new: Option<&Value>) {
    found.mark(old, new);
    found.modified.included |= old.is_some() && new.is_some() && old != new;
}

fn members(
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
        // What has not changed has no fields to report, and most has not.
        if old != new {
            let ty = ty.member(name).unwrap_or_else(|| Schema::unknown().root());
            found.insert(&field_step(name), compared(ty, old, new));
        }
    }
}

fn member<'a>(map: Option<&'a Map<String, Value>>, name: &str, embedded: bool) -> Option<&'a Value> {
    map?.get(name).or_else(|| embedded.then_some(&*EMPTY))
}

fn elements(ty: TypeRef<'_>, old: Option<&Vec<&Value>>, new: Option<&Vec<&Value>>) -> NodeDifference {
    let one = |list: Option<&Vec<&Value>>| list.is_none_or(|l| l.len() == 1);
    if one(old) && one(new) {
        let (old, new) = (old.and_then(|l| l.first().copied()), new.and_then(|l| l.first().copied()));
        return compared(ty.element(), old, new);
    }
    // Elements that claim to be the same one cannot be told apart: they change together.
    let mut found = NodeDifference::default();
    found.added.included = old.is_none();
    found.removed.included = new.is_none();
    found.modified.included = old.is_some() && new.is_some() && old != new;
    found
}

fn grouped<'a>(ty: TypeRef<'_>, list: Option<&'a Vec<Value>>) -> BTreeMap<Box<str>, Vec<&'a Value>> {
    let mut groups: BTreeMap<Box<str>, Vec<&Value>> = BTreeMap::new();
    for (i, element) in list.into_iter().flatten().enumerate() {
        groups.entry(list_element_step(ty, i, element)).or_default().push(element);
    }
    groups
}

/// What identifies an element of a list.
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
                let is_bare = value.is_null() || value.as_object().is_some_and(Map::is_empty);
                children.included |= is_bare || ty.declared(name).is_none();
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
    fn a_new_object_is_all_addition() {
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
    fn what_an_applier_lists_is_what_it_has() {
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
    fn changes_are_named_where_they_are() {
        let schema = Schema::of::<Pod>();
        let old = json!({ "spec": { "containers": [{ "name": "a", "image": "1" }, { "name": "b" }], "hostIPC": true },
            "metadata": { "labels": { "x": "1" } } });
        let new = json!({ "spec": { "containers": [{ "name": "b" }, { "name": "a", "image": "2" }] },
            "metadata": { "labels": { "y": "1" } } });
        let found = difference(&schema, &old, &new);
        for (a, b) in [(&old, &new), (&new, &old), (&old, &old)] {
            let texts = difference_of_json(&schema, a.to_string().as_bytes(), b.to_string().as_bytes());
            assert_eq!(texts, difference(&schema, a, b), "as values and as texts");
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
        let texts = difference_of_json(&schema, labelled.to_string().as_bytes(), bare.to_string().as_bytes());
        assert_eq!(texts, gone);
        assert_eq!(gone.removed.to_value(), json!({ "f:metadata": { "f:labels": { ".": {}, "f:x": {} } } }));
    }
}
