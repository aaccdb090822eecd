//! What expressions compute with. Lists and objects of the document stay where they are.

use std::borrow::Cow;
use std::cmp::Ordering;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

#[derive(Clone, Debug)]
pub(super) enum Datum<'a> {
    Null,
    Flag(bool),
    Int(i64),
    Double(f64),
    Text(Cow<'a, str>),
    /// A list or an object of the document.
    Json(&'a Value),
    List(Vec<Datum<'a>>),
    Map(Vec<(Datum<'a>, Datum<'a>)>),
    Time(Timestamp),
    Duration(SignedDuration),
    Optional(Option<Box<Datum<'a>>>),
    Type(&'static str),
}

impl<'a> Datum<'a> {
    pub(super) fn of(value: &'a Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(flag) => Self::Flag(*flag),
            Value::Number(number) => match number.as_i64() {
                Some(number) => Self::Int(number),
                None => Self::Double(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => Self::Text(Cow::Borrowed(text)),
            Value::Array(_) | Value::Object(_) => Self::Json(value),
        }
    }

    pub(super) fn text(text: impl Into<String>) -> Self {
        Self::Text(Cow::Owned(text.into()))
    }

    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null_type",
            Self::Flag(_) => "bool",
            Self::Int(_) => "int",
            Self::Double(_) => "double",
            Self::Text(_) => "string",
            Self::Json(Value::Array(_)) | Self::List(_) => "list",
            Self::Json(_) | Self::Map(_) => "map",
            Self::Time(_) => "google.protobuf.Timestamp",
            Self::Duration(_) => "google.protobuf.Duration",
            Self::Optional(_) => "optional_type",
            Self::Type(_) => "type",
        }
    }

    /// The elements of a list.
    pub(super) fn elements(&self) -> Option<Vec<Datum<'a>>> {
        match self {
            Self::Json(Value::Array(items)) => Some(items.iter().map(Datum::of).collect()),
            Self::List(items) => Some(items.clone()),
            _ => None,
        }
    }

    /// What `all` and its like go through: the elements of a list, the keys of a map.
    pub(super) fn members(&self) -> Option<Vec<Datum<'a>>> {
        match self {
            Self::Json(Value::Object(fields)) => Some(fields.keys().map(|k| Datum::Text(Cow::Borrowed(k))).collect()),
            Self::Map(entries) => Some(entries.iter().map(|(key, _)| key.clone()).collect()),
            other => other.elements(),
        }
    }

    pub(super) fn size(&self) -> Option<usize> {
        match self {
            Self::Text(text) => Some(text.chars().count()),
            Self::Json(Value::Array(items)) => Some(items.len()),
            Self::Json(Value::Object(fields)) => Some(fields.len()),
            Self::List(items) => Some(items.len()),
            Self::Map(entries) => Some(entries.len()),
            _ => None,
        }
    }

    /// The value under a key of a map; the outer nothing if this is no map.
    pub(super) fn get(&self, key: &Datum<'_>) -> Option<Option<Datum<'a>>> {
        match (self, key) {
            (Self::Json(Value::Object(fields)), Datum::Text(key)) => Some(fields.get(&**key).map(Datum::of)),
            (Self::Json(Value::Object(_)), _) => Some(None),
            (Self::Map(entries), key) => Some(entries.iter().find(|(k, _)| k.equals(key)).map(|(_, v)| v.clone())),
            _ => None,
        }
    }

    pub(super) fn equals(&self, other: &Datum<'_>) -> bool {
        match (self, other) {
            (Self::Json(a), Datum::Json(b)) => same(a, b),
            (Self::Null, Datum::Null) => true,
            (Self::Optional(a), Datum::Optional(b)) => match (a, b) {
                (Some(a), Some(b)) => a.equals(b),
                (a, b) => a.is_none() && b.is_none(),
            },
            (Self::Type(a), Datum::Type(b)) => a == b,
            _ => {
                if let (Some(a), Some(b)) = (self.elements(), other.elements()) {
                    return a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.equals(b));
                }
                if let (Some(a), Some(b)) = (self.members(), other.members()) {
                    let has = |key: &Datum<'_>| match (self.get(key), other.get(key)) {
                        (Some(Some(a)), Some(Some(b))) => a.equals(&b),
                        _ => false,
                    };
                    return a.len() == b.len() && a.iter().all(has);
                }
                self.order(other) == Some(Ordering::Equal)
            }
        }
    }

    /// Which comes first; nothing if the two cannot be compared.
    pub(super) fn order(&self, other: &Datum<'_>) -> Option<Ordering> {
        match (self, other) {
            (Self::Flag(a), Datum::Flag(b)) => Some(a.cmp(b)),
            (Self::Int(a), Datum::Int(b)) => Some(a.cmp(b)),
            (Self::Double(a), Datum::Double(b)) => a.partial_cmp(b),
            (Self::Int(a), Datum::Double(b)) => (*a as f64).partial_cmp(b),
            (Self::Double(a), Datum::Int(b)) => a.partial_cmp(&(*b as f64)),
            (Self::Text(a), Datum::Text(b)) => Some(a.cmp(b)),
            (Self::Time(a), Datum::Time(b)) => Some(a.cmp(b)),
            (Self::Duration(a), Datum::Duration(b)) => Some(a.cmp(b)),
            _ => None,
        }
    }
}

/// Like equality of documents, except that `1` and `1.0` are the same number.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        _ => a == b,
    }
}
