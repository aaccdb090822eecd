//! Merges an applied configuration into an object, removes fields from an object, and checks configurations.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::compare::{fields_at, list_element_step};
use super::set::{FieldSet, field_step};
use crate::schema::{ListType, Scalar, Schema, TypeDef, TypeRef};

/// Merges `applied` into `live`. Values of `applied` replace those of `live`; what `applied` does not contain stays.
pub(super) fn merge_values(ty: TypeRef<'_>, live: &Value, applied: &Value) -> Value {
    match (live, applied) {
        (Value::Object(live), Value::Object(applied)) if !ty.is_atomic_object() => {
            let mut out = live.clone();
            for (name, value) in applied {
                let inner = ty.member(name).unwrap_or_else(|| Schema::unknown().root());
                let merged = live.get(name).map_or_else(|| value.clone(), |live| merge_values(inner, live, value));
                out.insert(name.clone(), merged);
            }
            Value::Object(out)
        }
        (Value::Array(live), Value::Array(applied)) if *ty.list_type() != ListType::Atomic => {
            Value::Array(merge_lists(ty, live, applied))
        }
        _ => applied.clone(),
    }
}

/// Elements of both lists are in the order of `applied`. An element that only `live` has stays before the common element
/// that it preceded, and before new elements at this position.
fn merge_lists(ty: TypeRef<'_>, live: &[Value], applied: &[Value]) -> Vec<Value> {
    let steps = |list: &[Value]| list.iter().enumerate().map(|(i, v)| list_element_step(ty, i, v)).collect::<Vec<_>>();
    let (live_steps, applied_steps) = (steps(live), steps(applied));
    let live_at: HashMap<&str, usize> = live_steps.iter().enumerate().map(|(i, s)| (&**s, i)).collect();
    let wanted: HashSet<&str> = applied_steps.iter().map(|s| &**s).collect();
    let shared: Vec<&str> = applied_steps.iter().map(|s| &**s).filter(|s| live_at.contains_key(s)).collect();
    let mut shared = shared.into_iter().peekable();
    let mut out = Vec::with_capacity(live.len() + applied.len());
    let mut next = 0;
    let mut live_only_until = |stop: Option<&str>, out: &mut Vec<Value>| {
        while next < live.len() && stop != Some(&*live_steps[next]) {
            if !wanted.contains(&*live_steps[next]) {
                out.push(live[next].clone());
            }
            next += 1;
        }
    };
    for (value, step) in applied.iter().zip(&applied_steps) {
        live_only_until(shared.peek().copied(), &mut out);
        match live_at.get(&**step) {
            None => out.push(value.clone()),
            Some(found) => {
                out.push(merge_values(ty.element(), &live[*found], value));
                shared.next();
            }
        }
    }
    live_only_until(None, &mut out);
    out
}

/// The value without the fields in the set. An object or list that becomes empty becomes null.
pub(super) fn without(ty: TypeRef<'_>, value: &Value, set: &FieldSet) -> Value {
    match value {
        Value::Object(fields) if !fields.is_empty() && !ty.is_atomic_object() => {
            let mut out = Map::new();
            for (name, value) in fields {
                match set.get(&field_step(name)) {
                    Some(node) if node.included => {}
                    Some(node) => {
                        let inner = ty.member(name).unwrap_or_else(|| Schema::unknown().root());
                        out.insert(name.clone(), without(inner, value, &node.children));
                    }
                    None => {
                        out.insert(name.clone(), value.clone());
                    }
                }
            }
            if out.is_empty() { Value::Null } else { Value::Object(out) }
        }
        Value::Array(list) if !list.is_empty() && *ty.list_type() != ListType::Atomic => {
            let mut out = Vec::new();
            for (i, element) in list.iter().enumerate() {
                match set.get(&list_element_step(ty, i, element)) {
                    Some(node) if node.included => {}
                    Some(node) => out.push(without(ty.element(), element, &node.children)),
                    None => out.push(element.clone()),
                }
            }
            if out.is_empty() { Value::Null } else { Value::Array(out) }
        }
        other => other.clone(),
    }
}

/// Adds to the set every declared field of which it contains inner fields. Removing such a field removes the whole struct.
pub(super) fn with_structs(ty: TypeRef<'_>, set: &FieldSet) -> FieldSet {
    let mut out = FieldSet::default();
    for (step, node) in set.iter() {
        let name = step.strip_prefix("f:");
        let declared = name.is_some_and(|name| ty.declared(name).is_some());
        let inner = match name {
            Some(name) => ty.member(name).unwrap_or_else(|| Schema::unknown().root()),
            None => ty.element(),
        };
        let mut node = node.clone();
        node.included |= declared && !node.children.is_empty();
        node.children = with_structs(inner, &node.children);
        out.insert(step, node);
    }
    out
}

/// All fields of a value, including structs.
pub(super) fn all_fields(ty: TypeRef<'_>, value: &Value) -> FieldSet {
    with_structs(ty, &fields_at(ty, value).children)
}

/// Checks that a configuration matches the schema. The error contains the path of the first mismatch.
pub(super) fn check(ty: TypeRef<'_>, value: &Value, path: &str) -> Result<(), String> {
    let wrong = |wanted: &str| Err(format!("{path}: expected {wanted}, got {value}"));
    match (ty.def, value) {
        (_, Value::Null) | (TypeDef::Untyped { .. }, _) => Ok(()),
        (TypeDef::Scalar(Scalar::String | Scalar::MicroTime), Value::String(_)) => Ok(()),
        (TypeDef::Scalar(Scalar::String | Scalar::MicroTime), _) => wrong("string"),
        (TypeDef::Scalar(Scalar::Boolean), Value::Bool(_)) => Ok(()),
        (TypeDef::Scalar(Scalar::Boolean), _) => wrong("boolean"),
        (TypeDef::Scalar(Scalar::Integer | Scalar::Number), Value::Number(_)) => Ok(()),
        (TypeDef::Scalar(Scalar::Integer | Scalar::Number), _) => wrong("numeric (int or float)"),
        (TypeDef::Scalar(Scalar::IntOrString), Value::String(_) | Value::Number(_)) => Ok(()),
        (TypeDef::Scalar(Scalar::IntOrString), _) => wrong("string or number"),
        (TypeDef::Struct { .. } | TypeDef::Map { .. }, Value::Object(fields)) => {
            fields.iter().try_for_each(|(name, value)| {
                let path = format!("{path}.{name}");
                match ty.member(name) {
                    Some(inner) => check(inner, value, &path),
                    None => Err(format!("{path}: field not declared in schema")),
                }
            })
        }
        (TypeDef::Struct { .. } | TypeDef::Map { .. }, _) => wrong("map"),
        (TypeDef::List { list_type, .. }, Value::Array(elements)) => {
            let mut steps = HashSet::new();
            for (i, element) in elements.iter().enumerate() {
                let step = list_element_step(ty, i, element);
                let shown = element_path(&step, i);
                if matches!(list_type, ListType::Map(_)) && step.starts_with("i:") {
                    return Err(format!(
                        "{path}: element {i}: associative list with keys has an element that omits key field"
                    ));
                }
                check(ty.element(), element, &format!("{path}{shown}"))?;
                if *list_type != ListType::Atomic && !steps.insert(step) {
                    return Err(format!("{path}: duplicate entries for key {shown}"));
                }
            }
            Ok(())
        }
        (TypeDef::List { .. }, _) => wrong("list"),
    }
}

/// The path of a list element in the form of error messages.
fn element_path(step: &str, index: usize) -> String {
    let mut set = FieldSet::default();
    set.insert(step, super::set::FieldNode { included: true, children: FieldSet::default() });
    set.paths().pop().unwrap_or_else(|| format!("[{index}]"))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_keep_the_applied_order_and_their_own_elements() {
        let schema = Schema::of::<Pod>();
        let list = |names: &[&str]| -> Value {
            json!({ "spec": { "containers": names.iter().map(|n| json!({ "name": n })).collect::<Vec<_>>() } })
        };
        for (live, applied, want) in [
            (&["a", "b", "c"][..], &["b"][..], &["a", "b", "c"][..]),
            (&["a", "b"], &["b", "a"], &["b", "a"]),
            (&["a", "b"], &["n", "b"], &["a", "n", "b"]),
            (&["x", "a", "y", "b"], &["b", "a"], &["x", "y", "b", "a"]),
            (&[], &["a"], &["a"]),
        ] {
            let got = merge_values(schema.root(), &list(live), &list(applied));
            assert_eq!(got, list(want), "{live:?} {applied:?}");
        }
    }

    #[test]
    fn atomic_fields_are_replaced_and_others_merged() {
        let schema = Schema::of::<Pod>();
        let live = json!({ "spec": { "nodeSelector": { "a": "1" }, "tolerations": [{ "key": "x" }],
            "containers": [{ "name": "c", "image": "1", "env": [{ "name": "A", "value": "1" }] }] } });
        let applied = json!({ "spec": { "nodeSelector": { "b": "1" }, "tolerations": [],
            "containers": [{ "name": "c", "env": [{ "name": "B", "value": "2" }] }] } });
        assert_eq!(
            merge_values(schema.root(), &live, &applied),
            json!({ "spec": { "nodeSelector": { "b": "1" }, "tolerations": [], "containers": [
                { "name": "c", "image": "1", "env": [{ "name": "A", "value": "1" }, { "name": "B", "value": "2" }] }] } })
        );
    }

    #[test]
    fn a_configuration_must_match_the_schema() {
        let schema = Schema::of::<Pod>();
        let container = |fields: Value| json!({ "spec": { "containers": [fields] } });
        for (value, want) in [
            (json!({ "bogus": 1 }), ".bogus: field not declared in schema"),
            (json!({ "metadata": { "labels": { "a": 1 } } }), ".metadata.labels.a: expected string, got 1"),
            (
                container(json!({ "name": "a", "imagee": "x" })),
                ".spec.containers[name=\"a\"].imagee: field not declared in schema",
            ),
            (
                container(json!({ "image": "x" })),
                ".spec.containers: element 0: associative list with keys has an element that omits key field",
            ),
            (
                json!({ "metadata": { "finalizers": ["a/b", "a/b"] } }),
                ".metadata.finalizers: duplicate entries for key [=\"a/b\"]",
            ),
        ] {
            assert_eq!(check(schema.root(), &value, "").unwrap_err(), want);
        }
        let fine = container(
            json!({ "name": "a", "ports": [{ "containerPort": 1 }, { "containerPort": 1, "protocol": "UDP" }] }),
        );
        assert_eq!(check(schema.root(), &fine, ""), Ok(()));
    }
}
