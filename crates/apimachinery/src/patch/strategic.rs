//! Strategic merge patches: merge patches that merge some lists by element. Directives such as `$patch` delete, replace and
//! order elements; they are not part of the result.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::schema::{PatchStrategy, Schema, TypeRef};

const PATCH_DIRECTIVE: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const ORDER_PREFIX: &str = "$setElementOrder/";
const DELETE_PREFIX: &str = "$deleteFromPrimitiveList/";

pub(super) fn merge(schema: &Schema, target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let (Value::Object(target), Value::Object(patch)) = (target, patch) else {
        return Err(bad_request("a strategic merge patch must be an object"));
    };
    merge_object(schema.root(), target, patch)
}

fn bad_request(why: impl Into<String>) -> ApiError {
    ApiError::BadRequest(why.into())
}

fn merge_object(ty: TypeRef<'_>, target: &mut Map<String, Value>, patch: &Map<String, Value>) -> Result<(), ApiError> {
    match directive(patch)? {
        Some("replace") => {
            *target = without_directive_members(patch);
            return Ok(());
        }
        Some("delete") => {
            target.clear();
            return Ok(());
        }
        _ => {}
    }
    if let Some(keep) = patch.get(RETAIN_KEYS) {
        let keep = keep.as_array().ok_or_else(|| bad_request("$retainKeys must be a list"))?;
        target.retain(|key, _| keep.iter().any(|k| k == key));
    }
    for (key, removed) in with_prefix(patch, DELETE_PREFIX) {
        let removed = removed.as_array().ok_or_else(|| bad_request(format!("{DELETE_PREFIX}{key} must be a list")))?;
        if let Some(Value::Array(list)) = target.get_mut(key) {
            list.retain(|v| !removed.contains(v));
        }
    }
    for (key, change) in patch.iter().filter(|(key, _)| !key.starts_with('$')) {
        let inner = ty.member(key).unwrap_or_else(|| Schema::unknown().root());
        match change {
            Value::Null => {
                target.remove(key);
            }
            Value::Object(change) => match target.get_mut(key) {
                Some(Value::Object(current)) => merge_object(inner, current, change)?,
                _ => {
                    if directive(change)? == Some("delete") {
                        target.remove(key);
                        continue;
                    }
                    let mut fresh = Map::new();
                    merge_object(inner, &mut fresh, change)?;
                    target.insert(key.clone(), fresh.into());
                }
            },
            Value::Array(change) => {
                let current = match target.remove(key) {
                    Some(Value::Array(current)) => current,
                    _ => Vec::new(),
                };
                let order = patch.get(&format!("{ORDER_PREFIX}{key}"));
                let merged = merge_list(inner, patch_strategy(ty, key), current, change, order)?;
                target.insert(key.clone(), merged.into());
            }
            scalar => {
                target.insert(key.clone(), scalar.clone());
            }
        }
    }
    // `$setElementOrder` also sorts a list that the patch does not change.
    for (key, order) in with_prefix(patch, ORDER_PREFIX).filter(|(key, _)| !patch.contains_key(*key)) {
        let inner = ty.member(key).unwrap_or_else(|| Schema::unknown().root());
        if let Some(Value::Array(current)) = target.remove(key) {
            target
                .insert(key.to_owned(), merge_list(inner, patch_strategy(ty, key), current, &[], Some(order))?.into());
        }
    }
    Ok(())
}

fn merge_list(
    ty: TypeRef<'_>,
    strategy: &PatchStrategy,
    current: Vec<Value>,
    change: &[Value],
    order: Option<&Value>,
) -> Result<Vec<Value>, ApiError> {
    let order = match order {
        Some(Value::Array(order)) => Some(order.as_slice()),
        Some(_) => return Err(bad_request("$setElementOrder must be a list")),
        None => None,
    };
    match strategy {
        PatchStrategy::Plain | PatchStrategy::RetainKeys if change.is_empty() && order.is_some() => Ok(current),
        PatchStrategy::Plain | PatchStrategy::RetainKeys => {
            Ok(change.iter().filter(|v| !is_directive(v)).map(|v| without_directives(v.clone())).collect())
        }
        PatchStrategy::MergeSet => {
            check_order(change.iter(), order, |a, b| a == b)?;
            let mut merged = current;
            for value in change {
                if !merged.contains(value) {
                    merged.push(value.clone());
                }
            }
            Ok(sort_by_order(merged, order, |a, b| a == b))
        }
        PatchStrategy::MergeByKey(key) | PatchStrategy::MergeByKeyRetainKeys(key) => {
            let key = &**key;
            let named = |v: &&Value| v.get(PATCH_DIRECTIVE).is_none_or(|p| p == "merge") && v.get(key).is_some();
            check_order(change.iter().filter(named), order, |element, wanted| element.get(key) == wanted.get(key))?;
            let merged = merge_by_key(ty, current, change, key)?;
            Ok(sort_by_order(merged, order, |element, wanted| element.get(key) == wanted.get(key)))
        }
    }
}

fn merge_by_key(ty: TypeRef<'_>, current: Vec<Value>, change: &[Value], key: &str) -> Result<Vec<Value>, ApiError> {
    // An element `$patch: replace` without a key replaces the whole list.
    if change.iter().any(|v| v.get(PATCH_DIRECTIVE).is_some_and(|p| p == "replace") && v.get(key).is_none()) {
        return Ok(change.iter().filter(|v| !is_directive(v)).map(|v| without_directives(v.clone())).collect());
    }
    let mut merged = current;
    for element in change {
        let Value::Object(fields) = element else {
            return Err(bad_request(format!("an element of a list merged by {key} must be an object")));
        };
        let id = fields
            .get(key)
            .ok_or_else(|| bad_request(format!("map: {element} does not contain declared merge key: {key}")))?;
        let found = merged.iter().position(|e| e.get(key) == Some(id));
        match (directive(fields)?, found) {
            (Some("delete"), _) => merged.retain(|e| e.get(key) != Some(id)),
            (Some("replace"), Some(found)) => merged[found] = without_directive_members(fields).into(),
            (_, Some(found)) => {
                if let Value::Object(target) = &mut merged[found] {
                    merge_object(ty.element(), target, fields)?;
                }
            }
            (_, None) => {
                let mut fresh = Map::new();
                merge_object(ty.element(), &mut fresh, fields)?;
                merged.push(fresh.into());
            }
        }
    }
    Ok(merged)
}

fn patch_strategy<'a>(ty: TypeRef<'a>, key: &str) -> &'a PatchStrategy {
    ty.declared(key).map_or(&PatchStrategy::Plain, |field| &field.patch_strategy)
}

/// Checks that the elements of the patch are in the order of `$setElementOrder`.
fn check_order<'a>(
    elements: impl Iterator<Item = &'a Value>,
    order: Option<&[Value]>,
    same: impl Fn(&Value, &Value) -> bool,
) -> Result<(), ApiError> {
    let Some(order) = order else { return Ok(()) };
    let mut rest = order.iter();
    for element in elements {
        if !rest.any(|wanted| same(element, wanted)) {
            return Err(bad_request(format!(
                "The order in patch list doesn't match $setElementOrder list: {}",
                Value::from(order)
            )));
        }
    }
    Ok(())
}

/// The `$patch` directive of an object.
fn directive(patch: &Map<String, Value>) -> Result<Option<&str>, ApiError> {
    match patch.get(PATCH_DIRECTIVE) {
        None => Ok(None),
        Some(Value::String(name)) if ["merge", "replace", "delete"].contains(&name.as_str()) => Ok(Some(name)),
        Some(other) => Err(bad_request(format!("unknown patch type: {other}"))),
    }
}

/// Returns true for an element that contains nothing but a `$patch` directive.
fn is_directive(value: &Value) -> bool {
    value.as_object().is_some_and(|o| o.len() == 1 && o.contains_key(PATCH_DIRECTIVE))
}

fn with_prefix<'a>(patch: &'a Map<String, Value>, prefix: &'static str) -> impl Iterator<Item = (&'a str, &'a Value)> {
    patch.iter().filter_map(move |(key, value)| key.strip_prefix(prefix).map(|key| (key, value)))
}

fn without_directive_members(patch: &Map<String, Value>) -> Map<String, Value> {
    patch
        .iter()
        .filter(|(key, value)| !key.starts_with('$') && !value.is_null())
        .map(|(key, value)| (key.clone(), without_directives(value.clone())))
        .collect()
}

fn without_directives(value: Value) -> Value {
    match value {
        Value::Object(fields) => without_directive_members(&fields).into(),
        Value::Array(list) => {
            list.into_iter().filter(|v| !is_directive(v)).map(without_directives).collect::<Vec<_>>().into()
        }
        scalar => scalar,
    }
}

/// Sorts elements by `$setElementOrder`. An element that is not in the order stays behind the element that it followed.
fn sort_by_order(merged: Vec<Value>, order: Option<&[Value]>, same: impl Fn(&Value, &Value) -> bool) -> Vec<Value> {
    let Some(order) = order else { return merged };
    let rank = |element: &Value| order.iter().position(|wanted| same(element, wanted));
    let mut last = None;
    let mut ranked: Vec<(Option<usize>, Value)> = merged
        .into_iter()
        .map(|element| {
            last = rank(&element).or(last);
            (last, element)
        })
        .collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.into_iter().map(|(_, element)| element).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ConfigMap, Node, PersistentVolume, Pod};
    use serde_json::json;

    use super::*;

    fn schema(kind: &str) -> Schema {
        match kind {
            "Pod" => Schema::of::<Pod>(),
            "Node" => Schema::of::<Node>(),
            "PersistentVolume" => Schema::of::<PersistentVolume>(),
            "ConfigMap" => Schema::of::<ConfigMap>(),
            other => panic!("no schema for {other}"),
        }
    }

    fn merged(kind: &str, mut target: Value, patch: Value) -> Value {
        merge(&schema(kind), &mut target, &patch).unwrap();
        target
    }

    #[test]
    fn lists_merge_by_their_key() {
        for (case, kind, target, patch, want) in [
            (
                "containers by name, their env by name",
                "Pod",
                json!({"spec":{"containers":[{"name":"a","image":"1","env":[{"name":"X","value":"1"}]},{"name":"b"}]}}),
                json!({"spec":{"containers":[{"name":"a","image":"2","env":[{"name":"Y","value":"2"}]}]}}),
                json!({"spec":{"containers":[
                    {"name":"a","image":"2","env":[{"name":"X","value":"1"},{"name":"Y","value":"2"}]},{"name":"b"}]}}),
            ),
            (
                "an element is deleted by its key",
                "Pod",
                json!({"spec":{"volumes":[{"name":"a","emptyDir":{}},{"name":"b"}]}}),
                json!({"spec":{"volumes":[{"$patch":"delete","name":"a"}]}}),
                json!({"spec":{"volumes":[{"name":"b"}]}}),
            ),
            (
                "retainKeys swaps a volume's source",
                "Pod",
                json!({"spec":{"volumes":[{"name":"a","emptyDir":{}}]}}),
                json!({"spec":{"volumes":[{"$retainKeys":["name","hostPath"],"name":"a","hostPath":{"path":"/x"}}]}}),
                json!({"spec":{"volumes":[{"name":"a","hostPath":{"path":"/x"}}]}}),
            ),
            (
                "elements are sorted by $setElementOrder",
                "Node",
                json!({"status":{"conditions":[{"type":"A"},{"type":"B"}]}}),
                json!({"status":{"$setElementOrder/conditions":[{"type":"B"},{"type":"A"}],"conditions":[{"type":"B","status":"True"}]}}),
                json!({"status":{"conditions":[{"type":"B","status":"True"},{"type":"A"}]}}),
            ),
            (
                "finalizers are a set with deletions",
                "PersistentVolume",
                json!({"metadata":{"finalizers":["a/x","b/y"]}}),
                json!({"metadata":{"finalizers":["c/z"],"$deleteFromPrimitiveList/finalizers":["a/x"]}}),
                json!({"metadata":{"finalizers":["b/y","c/z"]}}),
            ),
            (
                "other lists are replaced",
                "PersistentVolume",
                json!({"spec":{"accessModes":["ReadWriteOnce"],"capacity":{"storage":"1Gi"}}}),
                json!({"spec":{"accessModes":["ReadWriteMany"],"capacity":{"storage":null}}}),
                json!({"spec":{"accessModes":["ReadWriteMany"],"capacity":{}}}),
            ),
            (
                "a map is replaced whole on request",
                "ConfigMap",
                json!({"data":{"a":"1","b":"2"}}),
                json!({"data":{"$patch":"replace","c":"3"}}),
                json!({"data":{"c":"3"}}),
            ),
        ] {
            assert_eq!(merged(kind, target, patch), want, "{case}");
        }
    }

    #[test]
    fn an_element_without_its_key_is_refused() {
        let mut target = json!({});
        let patch = json!({"spec":{"containers":[{"image":"x"}]}});
        let error = merge(&schema("Pod"), &mut target, &patch).unwrap_err();
        assert!(error.to_string().contains("does not contain declared merge key: name"), "{error}");
    }

    #[test]
    fn elements_in_another_order_than_the_directive_are_refused() {
        let mut target = json!({"spec":{"containers":[{"name":"a"},{"name":"b"}]}});
        let patch = json!({"spec":{
            "$setElementOrder/containers":[{"name":"a"},{"name":"b"}],
            "containers":[{"name":"b","image":"x"},{"name":"a","image":"x"}]}});
        let error = merge(&schema("Pod"), &mut target, &patch).unwrap_err();
        assert!(error.to_string().contains("$setElementOrder"), "{error}");
    }
}
