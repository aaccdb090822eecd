//! Random objects for tests, generated from the schema of their kind.

use serde_json::{Map, Value};

use crate::schema::{Scalar, Schema, TypeDef, TypeRef};

/// A generator of pseudo-random values. One seed always gives the same values.
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

    /// A value of this type. Some values are null, and some untyped ones are strings instead of objects.
    pub(crate) fn value(&mut self, ty: TypeRef<'_>, depth: usize) -> Value {
        if self.one_in(20) {
            return Value::Null;
        }
        let count = if depth > 4 { 0 } else { self.below(4) };
        match ty.def {
            TypeDef::Scalar(Scalar::Boolean) => self.one_in(2).into(),
            TypeDef::Scalar(Scalar::Number) => (self.below(5) as f64 / 2.0).into(),
            TypeDef::Scalar(Scalar::Integer) => self.below(5).into(),
            TypeDef::Scalar(_) => self.text(),
            TypeDef::Struct { fields, .. } if !fields.is_empty() => {
                let names = (0..count).map(|_| fields[self.below(fields.len())].name.to_string()).collect();
                self.members(ty, names, depth)
            }
            TypeDef::List { .. } => (0..count).map(|_| self.value(ty.element(), depth + 1)).collect(),
            _ if depth > 4 || self.one_in(3) => self.text(),
            _ if matches!(ty.def, TypeDef::Untyped { .. }) && self.one_in(3) => {
                (0..count).map(|_| self.value(ty.element(), depth + 1)).collect()
            }
            _ => {
                let names = (0..count).map(|_| ["a", "b/c", "d", "name"][self.below(4)].to_owned()).collect();
                self.members(ty, names, depth)
            }
        }
    }

    fn members(&mut self, ty: TypeRef<'_>, names: Vec<String>, depth: usize) -> Value {
        let mut result = Map::new();
        for name in names {
            let inner = ty.member(&name).unwrap_or_else(|| Schema::unknown().root());
            let value = self.value(inner, depth + 1);
            result.insert(name, value);
        }
        result.into()
    }

    /// A copy of the value with some changes.
    pub(crate) fn changed(&mut self, ty: TypeRef<'_>, old: &Value, depth: usize) -> Value {
        match old {
            _ if self.one_in(6) => self.value(ty, depth),
            Value::Object(members) => {
                let mut result = match self.value(ty, depth) {
                    Value::Object(more) if self.one_in(3) => more,
                    _ => Map::new(),
                };
                for (name, old) in members {
                    if !self.one_in(6) {
                        let inner = ty.member(name).unwrap_or_else(|| Schema::unknown().root());
                        result.insert(name.clone(), self.changed(inner, old, depth + 1));
                    }
                }
                result.into()
            }
            Value::Array(elements) => elements.iter().map(|e| self.changed(ty.element(), e, depth + 1)).collect(),
            other => other.clone(),
        }
    }
}
