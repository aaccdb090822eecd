//! Applies the validation rules of a schema to an object and every value in it. Values that did not change are not
//! validated again.

use serde_json::Value;

use super::cel::EvaluationBudget;
use super::schema_validation::{display_path, element_key, join_path};
use super::structural_schema::{AdditionalProperties, ListType, StructuralSchema};
use cleat_apimachinery::field_error::FieldError;

impl StructuralSchema {
    pub(super) fn has_rules(&self) -> bool {
        !self.rules.is_empty()
            || self.properties.values().any(Self::has_rules)
            || matches!(&self.additional_properties, AdditionalProperties::Schema(each) if each.has_rules())
            || self.items.as_ref().is_some_and(|items| items.has_rules())
    }

    /// The violations of all rules. One [`EvaluationBudget`] limits the evaluation of all of them together.
    pub(super) fn rule_violations(&self, value: &Value, old: Option<&Value>) -> Vec<FieldError> {
        let mut errors = Vec::new();
        self.apply_rules(value, old, "", &mut EvaluationBudget::default(), &mut errors);
        errors
    }

    fn apply_rules(
        &self,
        value: &Value,
        old: Option<&Value>,
        path: &str,
        budget: &mut EvaluationBudget,
        errors: &mut Vec<FieldError>,
    ) {
        if old == Some(value) || value.is_null() {
            return;
        }
        for rule in &self.rules {
            if let Some(message) = rule.violation(value, old, budget) {
                let error_path = format!("{path}{}", rule.field_path);
                let error_path = display_path(error_path.strip_prefix('.').unwrap_or(&error_path));
                let type_name = self.value_type.map_or("", |value_type| value_type.name());
                errors.push(FieldError::from_reason(&rule.reason, error_path, type_name, message));
            }
        }
        match value {
            Value::Object(fields) => {
                for (key, inner) in fields {
                    let schema = match (self.properties.get(key), &self.additional_properties) {
                        (Some(schema), _) => schema,
                        (None, AdditionalProperties::Schema(schema)) => schema,
                        (None, _) => continue,
                    };
                    let old_value = old.and_then(|old| old.get(key));
                    schema.apply_rules(inner, old_value, &join_path(path, key), budget, errors);
                }
            }
            Value::Array(items) => {
                let Some(schema) = &self.items else { return };
                let old_items = old.and_then(Value::as_array);
                for (i, item) in items.iter().enumerate() {
                    // Only the elements of a map list have an identity by which to find the old element.
                    let old_item = match &self.list_type {
                        ListType::Map(keys) => old_items.and_then(|old_items| {
                            let key = element_key(item, keys);
                            old_items.iter().find(|e| element_key(e, keys) == key)
                        }),
                        ListType::Atomic | ListType::Set => None,
                    };
                    schema.apply_rules(item, old_item, &format!("{path}[{i}]"), budget, errors);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema() -> StructuralSchema {
        let schema = json!({
            "type": "object",
            "x-kubernetes-validations": [
                { "rule": "self.metadata.name != 'forbidden'", "message": "another name, please", "reason": "FieldValueForbidden" },
            ],
            "properties": { "spec": { "type": "object",
                "x-kubernetes-validations": [
                    { "rule": "self.min <= self.max", "messageExpression": "'at most ' + string(self.max)", "fieldPath": ".min" },
                    { "rule": "!has(oldSelf.handle) || has(self.handle)", "message": "handle is required once set" },
                ],
                "properties": {
                    "min": { "type": "integer" }, "max": { "type": "integer" },
                    "handle": { "type": "string", "x-kubernetes-validations": [{ "rule": "self == oldSelf" }] },
                    "grows": { "type": "integer", "x-kubernetes-validations": [
                        { "rule": "self >= oldSelf.orValue(1)", "optionalOldSelf": true, "message": "it only grows" } ] },
                    "parts": { "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["key"],
                        "items": { "type": "object", "properties": {
                            "key": { "type": "string" },
                            "n": { "type": "integer", "x-kubernetes-validations": [{ "rule": "self == oldSelf", "message": "fixed" }] } } } },
                    "labels": { "type": "object", "additionalProperties": { "type": "string",
                        "x-kubernetes-validations": [{ "rule": "self.size() < 4", "message": "too long" }] } },
                } } },
        });
        StructuralSchema::compile(&serde_json::from_value(schema).unwrap())
    }

    fn object(spec: Value) -> Value {
        json!({ "metadata": { "name": "x" }, "spec": spec })
    }

    #[test]
    fn every_violation_names_its_path() {
        assert!(schema().has_rules());
        let base = json!({ "min": 1, "max": 3 });
        for (case, new, old, want) in [
            ("valid", json!({}), None, None),
            ("a comparison", json!({ "min": 4 }), None, Some(("spec.min", "Invalid value: \"object\": at most 3"))),
            ("set for the first time", json!({ "handle": "a" }), Some(json!({})), None),
            (
                "changed",
                json!({ "handle": "b" }),
                Some(json!({ "handle": "a" })),
                Some(("spec.handle", "Invalid value: \"string\": failed rule: self == oldSelf")),
            ),
            (
                "taken away",
                json!({}),
                Some(json!({ "handle": "a" })),
                Some(("spec", "Invalid value: \"object\": handle is required once set")),
            ),
            (
                "nothing before",
                json!({ "grows": 0 }),
                None,
                Some(("spec.grows", "Invalid value: \"integer\": it only grows")),
            ),
            (
                "less than before",
                json!({ "grows": 4 }),
                Some(json!({ "grows": 5 })),
                Some(("spec.grows", "Invalid value: \"integer\": it only grows")),
            ),
            (
                "an element that moved",
                json!({ "parts": [{ "key": "b", "n": 2 }, { "key": "a", "n": 1 }] }),
                Some(json!({ "parts": [{ "key": "a", "n": 1 }] })),
                None,
            ),
            (
                "an element that changed",
                json!({ "parts": [{ "key": "b", "n": 2 }, { "key": "a", "n": 7 }] }),
                Some(json!({ "parts": [{ "key": "a", "n": 1 }] })),
                Some(("spec.parts[1].n", "Invalid value: \"integer\": fixed")),
            ),
            (
                "a value of a map",
                json!({ "labels": { "k": "long" } }),
                None,
                Some(("spec.labels.k", "Invalid value: \"string\": too long")),
            ),
            (
                "broken before and not touched",
                json!({ "labels": { "k": "long" }, "min": 2 }),
                Some(json!({ "labels": { "k": "long" } })),
                None,
            ),
            (
                "a rule that cannot be evaluated",
                json!({ "max": null }),
                None,
                Some(("spec.min", "Invalid value: \"object\": rule evaluation error: no such key: max")),
            ),
        ] {
            let of = |change: &Value| {
                let mut spec = base.clone();
                json_patch::merge(&mut spec, change);
                object(spec)
            };
            let errors = schema().rule_violations(&of(&new), old.as_ref().map(of).as_ref());
            let error = errors.first().map(|e| (e.field.clone(), e.body()));
            let error = error.as_ref().map(|(field, body)| (field.as_str(), body.as_str()));
            assert_eq!(error, want, "{case}");
        }
        let named = json!({ "metadata": { "name": "forbidden" }, "spec": { "min": 1, "max": 2 } });
        let errors = schema().rule_violations(&named, None);
        assert_eq!((errors[0].field.as_str(), errors[0].body().as_str()), ("<nil>", "Forbidden: another name, please"));
    }
}
