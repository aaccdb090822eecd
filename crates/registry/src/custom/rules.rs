//! The rules a definition states in expressions, applied to an object and all that is in it.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::ValidationRule;
use serde_json::Value;

use super::cel::{Budget, Old, Program};
use super::check::{inside, place};
use super::schema::{Additional, List, Schema};
use cleat_apimachinery::field::FieldError;

#[derive(Debug)]
pub(super) struct Rule {
    program: Program,
    message: String,
    /// Makes the message, if it can.
    telling: Option<Program>,
    reason: String,
    /// Where below the value the fault is, as it is appended to a path.
    below: String,
    optional_old: bool,
}

impl Rule {
    /// Nothing for a rule that cannot be compiled: no definition with one is accepted.
    pub(super) fn compile(from: &ValidationRule) -> Option<Self> {
        let given = from.message.clone().filter(|m| !m.is_empty());
        Some(Self {
            program: Program::compile(&from.rule).ok()?,
            message: given.unwrap_or_else(|| format!("failed rule: {}", from.rule)),
            telling: from.message_expression.as_deref().and_then(|e| Program::compile(e).ok()),
            reason: from.reason.clone().unwrap_or_default(),
            below: from.field_path.clone().unwrap_or_default(),
            optional_old: from.optional_old_self == Some(true),
        })
    }

    /// The message about a value that breaks the rule.
    fn broken(&self, value: &Value, old: Option<&Value>, budget: &mut Budget) -> Option<String> {
        let seen = if self.optional_old { Old::Optional(old) } else { Old::Plain(old) };
        // A rule about a change has nothing to say where nothing was.
        if self.program.compares && !self.optional_old && old.is_none() {
            return None;
        }
        match self.program.holds(seen, value, budget) {
            Ok(true) => None,
            Ok(false) => {
                let told = self.telling.as_ref().and_then(|telling| telling.text(seen, value, budget));
                Some(told.unwrap_or_else(|| self.message.clone()))
            }
            Err(why) => Some(format!("rule evaluation error: {why}")),
        }
    }
}

impl Schema {
    pub(super) fn has_rules(&self) -> bool {
        !self.rules.is_empty()
            || self.properties.values().any(Self::has_rules)
            || matches!(&self.additional, Additional::Each(each) if each.has_rules())
            || self.items.as_ref().is_some_and(|items| items.has_rules())
    }

    /// Every rule that the object breaks. What did not change breaks none.
    pub(super) fn broken_rules(&self, value: &Value, old: Option<&Value>) -> Vec<FieldError> {
        let mut errors = Vec::new();
        self.apply_rules(value, old, "", &mut Budget::default(), &mut errors);
        errors
    }

    fn apply_rules(
        &self,
        value: &Value,
        old: Option<&Value>,
        path: &str,
        budget: &mut Budget,
        errors: &mut Vec<FieldError>,
    ) {
        if old == Some(value) || value.is_null() {
            return;
        }
        for rule in &self.rules {
            if let Some(message) = rule.broken(value, old, budget) {
                let at = format!("{path}{}", rule.below);
                let at = place(at.strip_prefix('.').unwrap_or(&at));
                let type_name = self.kind.map_or("", |kind| kind.name());
                errors.push(FieldError::of_reason(&rule.reason, at, type_name, message));
            }
        }
        match value {
            Value::Object(fields) => {
                for (key, inner) in fields {
                    let schema = match (self.properties.get(key), &self.additional) {
                        (Some(schema), _) => schema,
                        (None, Additional::Each(schema)) => schema,
                        (None, _) => continue,
                    };
                    let before = old.and_then(|old| old.get(key));
                    schema.apply_rules(inner, before, &inside(path, key), budget, errors);
                }
            }
            Value::Array(items) => {
                let Some(schema) = &self.items else { return };
                let before = old.and_then(Value::as_array);
                for (i, item) in items.iter().enumerate() {
                    // Elements have a past only where something tells them apart.
                    let before = match &self.list {
                        List::Map(keys) => before.and_then(|b| {
                            let identity = self.identity(item, keys);
                            b.iter().find(|e| self.identity(e, keys) == identity)
                        }),
                        List::Atomic | List::Set => None,
                    };
                    schema.apply_rules(item, before, &format!("{path}[{i}]"), budget, errors);
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

    fn schema() -> Schema {
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
        Schema::compile(&serde_json::from_value(schema).unwrap())
    }

    fn object(spec: Value) -> Value {
        json!({ "metadata": { "name": "x" }, "spec": spec })
    }

    #[test]
    fn every_broken_rule_is_told_where_it_is() {
        assert!(schema().has_rules());
        let base = json!({ "min": 1, "max": 3 });
        for (case, new, old, want) in [
            ("fine", json!({}), None, None),
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
            let errors = schema().broken_rules(&of(&new), old.as_ref().map(of).as_ref());
            let told = errors.first().map(|e| (e.field.clone(), e.body()));
            let told = told.as_ref().map(|(field, body)| (field.as_str(), body.as_str()));
            assert_eq!(told, want, "{case}");
        }
        let named = json!({ "metadata": { "name": "forbidden" }, "spec": { "min": 1, "max": 2 } });
        let errors = schema().broken_rules(&named, None);
        assert_eq!((errors[0].field.as_str(), errors[0].body().as_str()), ("<nil>", "Forbidden: another name, please"));
    }
}
