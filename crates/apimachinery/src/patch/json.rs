//! JSON patches with limits. Without limits a few short copy operations create an object that exceeds the memory, or one
//! that is nested too deeply for recursive functions.

use json_patch::{Patch, PatchOperation};
use serde_json::Value;

use crate::error::ApiError;

/// The limit for all copy operations of a patch together, in bytes of JSON.
const MAX_COPIED_BYTES: usize = 3 << 20;
/// The nesting limit of an object. The JSON decoder has the same limit for bodies.
const MAX_DEPTH: usize = 128;

pub(super) fn apply(value: &mut Value, patch: &Patch) -> Result<(), ApiError> {
    let mut copied = 0;
    for operation in &patch.0 {
        let (path, put) = match operation {
            PatchOperation::Add(op) => (&op.path, Some(&op.value)),
            PatchOperation::Replace(op) => (&op.path, Some(&op.value)),
            PatchOperation::Move(op) => (&op.path, value.pointer(op.from.as_str())),
            PatchOperation::Copy(op) => {
                let source = value.pointer(op.from.as_str());
                copied += source.map_or(0, json_bytes);
                (&op.path, source)
            }
            PatchOperation::Remove(_) | PatchOperation::Test(_) => {
                apply_operation(value, operation)?;
                continue;
            }
        };
        if copied > MAX_COPIED_BYTES {
            return Err(ApiError::TooLarge { limit: MAX_COPIED_BYTES });
        }
        if put.map_or(0, depth) + path.as_str().matches('/').count() > MAX_DEPTH {
            return Err(ApiError::PatchRejected);
        }
        apply_operation(value, operation)?;
    }
    Ok(())
}

fn apply_operation(value: &mut Value, operation: &PatchOperation) -> Result<(), ApiError> {
    json_patch::patch(value, std::slice::from_ref(operation)).map_err(|_| ApiError::PatchRejected)
}

fn json_bytes(value: &Value) -> usize {
    match value {
        Value::Array(items) => 2 + items.iter().map(|item| 1 + json_bytes(item)).sum::<usize>(),
        Value::Object(fields) => 2 + fields.iter().map(|(key, item)| key.len() + 4 + json_bytes(item)).sum::<usize>(),
        Value::String(text) => 2 + text.len(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 4,
    }
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(operations: Value) -> Result<Value, ApiError> {
        let mut value = json!({ "a": { "k": "v" } });
        apply(&mut value, &serde_json::from_value(operations).unwrap())?;
        Ok(value)
    }

    #[test]
    fn ordinary_patches_apply() {
        let copy = json!([{ "op": "copy", "from": "/a", "path": "/b" }, { "op": "remove", "path": "/a" }]);
        assert_eq!(run(copy).unwrap(), json!({ "b": { "k": "v" } }));
        assert!(matches!(run(json!([{ "op": "remove", "path": "/x" }])), Err(ApiError::PatchRejected)));
    }

    #[test]
    fn copied_bytes_are_limited() {
        let doubling: Vec<Value> =
            (0..60).map(|i| json!({ "op": "copy", "from": "/a", "path": format!("/a/x{i}") })).collect();
        assert!(matches!(run(doubling.into()), Err(ApiError::TooLarge { .. })));
    }

    #[test]
    fn patched_objects_have_the_nesting_limit_of_bodies() {
        let path = |n: usize| "/a".to_owned() + &"/x".repeat(n);
        let deeper: Vec<Value> = (1..300).map(|n| json!({ "op": "add", "path": path(n), "value": {} })).collect();
        assert!(matches!(run(deeper.into()), Err(ApiError::PatchRejected)));
        let mut doubling = vec![json!({ "op": "add", "path": "/a/x", "value": {} })];
        for i in 0..20 {
            doubling.push(json!({ "op": "copy", "from": "/a", "path": path((1 << i) + 1) }));
        }
        assert!(run(doubling.into()).is_err());
    }
}
