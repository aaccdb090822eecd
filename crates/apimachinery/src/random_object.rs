//! Objects for tests, made at random after the schema of their kind.

use serde_json::{Map, Value};

use crate::schema::{At, Scalar, Schema, Type};

/// Numbers that look random and are the same every time.
pub(crate) struct RandomObject(pub(crate) u64);

impl RandomObject {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    pub(crate) fn one_in(&mut self, chance: usize) -> bool {
        self.below(chance) == 0
    }

    fn text(&mut self) -> Value {
        ["", "a", "b", "c/d", "\"", "2026-01-01T00:00:00Z"][self.below(6)].into()
    }

    /// Some value that fits, or nearly.
    pub(crate) fn value(&mut self, at: At<'_>, depth: usize) -> Value {
        if self.one_in(20) {
            return Value::Null;
        }
        let many = if depth > 4 { 0 } else { self.below(4) };
        match at.of {
            Type::Scalar(Scalar::Flag) => self.one_in(2).into(),
            Type::Scalar(Scalar::Number) => (self.below(5) as f64 / 2.0).into(),
            Type::Scalar(Scalar::Integer) => self.below(5).into(),
            Type::Scalar(_) => self.text(),
            Type::Struct { fields, .. } if !fields.is_empty() => {
                let names = (0..many).map(|_| fields[self.below(fields.len())].name.to_string()).collect();
                self.members(at, names, depth)
            }
            Type::List { .. } => (0..many).map(|_| self.value(at.element(), depth + 1)).collect(),
            _ if depth > 4 || self.one_in(3) => self.text(),
            _ if matches!(at.of, Type::Untyped { .. }) && self.one_in(3) => {
                (0..many).map(|_| self.value(at.element(), depth + 1)).collect()
            }
            _ => {
                let names = (0..many).map(|_| ["a", "b/c", "d", "name"][self.below(4)].to_owned()).collect();
                self.members(at, names, depth)
            }
        }
    }

    fn members(&mut self, at: At<'_>, names: Vec<String>, depth: usize) -> Value {
        let mut made = Map::new();
        for name in names {
            let inner = at.member(&name).unwrap_or_else(|| Schema::unknown().root());
            let value = self.value(inner, depth + 1);
            made.insert(name, value);
        }
        made.into()
    }

    /// The same value, here and there another.
    pub(crate) fn changed(&mut self, at: At<'_>, old: &Value, depth: usize) -> Value {
        match old {
            _ if self.one_in(6) => self.value(at, depth),
            Value::Object(members) => {
                let mut made = match self.value(at, depth) {
                    Value::Object(more) if self.one_in(3) => more,
                    _ => Map::new(),
                };
                for (name, old) in members {
                    if !self.one_in(6) {
                        let inner = at.member(name).unwrap_or_else(|| Schema::unknown().root());
                        made.insert(name.clone(), self.changed(inner, old, depth + 1));
                    }
                }
                made.into()
            }
            Value::Array(elements) => elements.iter().map(|e| self.changed(at.element(), e, depth + 1)).collect(),
            other => other.clone(),
        }
    }
}
