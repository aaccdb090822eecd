//! The values of expressions. Lists and maps of the JSON document are borrowed, not converted.

use std::borrow::Cow;
use std::cmp::Ordering;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

/// The result of an evaluation; the error is the message for the client.
pub(super) type CelResult<'a> = Result<CelValue<'a>, String>;

#[derive(Clone, Debug)]
pub(super) enum CelValue<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Double(f64),
    String(Cow<'a, str>),
    /// A list or an object of the JSON document.
    Json(&'a Value),
    List(Vec<CelValue<'a>>),
    Map(Vec<(CelValue<'a>, CelValue<'a>)>),
    Timestamp(Timestamp),
    Duration(SignedDuration),
    Optional(Option<Box<CelValue<'a>>>),
    Type(&'static str),
}

impl<'a> CelValue<'a> {
    pub(super) fn from_json(value: &'a Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(flag) => Self::Bool(*flag),
            Value::Number(number) => match number.as_i64() {
                Some(number) => Self::Int(number),
                None => Self::Double(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => Self::String(Cow::Borrowed(text)),
            Value::Array(_) | Value::Object(_) => Self::Json(value),
        }
    }

    pub(super) fn string(text: impl Into<String>) -> Self {
        Self::String(Cow::Owned(text.into()))
    }

    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null_type",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Double(_) => "double",
            Self::String(_) => "string",
            Self::Json(Value::Array(_)) | Self::List(_) => "list",
            Self::Json(_) | Self::Map(_) => "map",
            Self::Timestamp(_) => "google.protobuf.Timestamp",
            Self::Duration(_) => "google.protobuf.Duration",
            Self::Optional(_) => "optional_type",
            Self::Type(_) => "type",
        }
    }

    /// The elements of a list; `None` for other types.
    pub(super) fn elements(&self) -> Option<Vec<CelValue<'a>>> {
        match self {
            Self::Json(Value::Array(items)) => Some(items.iter().map(CelValue::from_json).collect()),
            Self::List(items) => Some(items.clone()),
            _ => None,
        }
    }

    /// What macros such as `all` iterate over: the elements of a list or the keys of a map; `None` for other types.
    pub(super) fn iteration_range(&self) -> Option<Vec<CelValue<'a>>> {
        match self {
            Self::Json(Value::Object(fields)) => {
                Some(fields.keys().map(|k| CelValue::String(Cow::Borrowed(k))).collect())
            }
            Self::Map(entries) => Some(entries.iter().map(|(key, _)| key.clone()).collect()),
            other => other.elements(),
        }
    }

    /// Characters of a string, elements of a list, entries of a map; `None` for other types.
    pub(super) fn size(&self) -> Option<usize> {
        match self {
            Self::String(text) => Some(text.chars().count()),
            Self::Json(Value::Array(items)) => Some(items.len()),
            Self::Json(Value::Object(fields)) => Some(fields.len()),
            Self::List(items) => Some(items.len()),
            Self::Map(entries) => Some(entries.len()),
            _ => None,
        }
    }

    /// The value of a map's key. The outer `None`: this is not a map; the inner: the map has no such key.
    pub(super) fn get(&self, key: &CelValue<'_>) -> Option<Option<CelValue<'a>>> {
        match (self, key) {
            (Self::Json(Value::Object(fields)), CelValue::String(key)) => {
                Some(fields.get(&**key).map(CelValue::from_json))
            }
            (Self::Json(Value::Object(_)), _) => Some(None),
            (Self::Map(entries), key) => Some(entries.iter().find(|(k, _)| k.equals(key)).map(|(_, v)| v.clone())),
            _ => None,
        }
    }

    pub(super) fn equals(&self, other: &CelValue<'_>) -> bool {
        match (self, other) {
            (Self::Json(a), CelValue::Json(b)) => json_equals(a, b),
            (Self::Null, CelValue::Null) => true,
            (Self::Optional(a), CelValue::Optional(b)) => match (a, b) {
                (Some(a), Some(b)) => a.equals(b),
                (a, b) => a.is_none() && b.is_none(),
            },
            (Self::Type(a), CelValue::Type(b)) => a == b,
            _ => {
                if let (Some(a), Some(b)) = (self.elements(), other.elements()) {
                    return a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.equals(b));
                }
                if let (Some(a), Some(b)) = (self.iteration_range(), other.iteration_range()) {
                    let has = |key: &CelValue<'_>| match (self.get(key), other.get(key)) {
                        (Some(Some(a)), Some(Some(b))) => a.equals(&b),
                        _ => false,
                    };
                    return a.len() == b.len() && a.iter().all(has);
                }
                self.compare(other) == Some(Ordering::Equal)
            }
        }
    }

    /// `None` if values of these types, or a NaN, cannot be compared.
    pub(super) fn compare(&self, other: &CelValue<'_>) -> Option<Ordering> {
        match (self, other) {
            (Self::Bool(a), CelValue::Bool(b)) => Some(a.cmp(b)),
            (Self::Int(a), CelValue::Int(b)) => Some(a.cmp(b)),
            (Self::Double(a), CelValue::Double(b)) => a.partial_cmp(b),
            (Self::Int(a), CelValue::Double(b)) => (*a as f64).partial_cmp(b),
            (Self::Double(a), CelValue::Int(b)) => a.partial_cmp(&(*b as f64)),
            (Self::String(a), CelValue::String(b)) => Some(a.cmp(b)),
            (Self::Timestamp(a), CelValue::Timestamp(b)) => Some(a.cmp(b)),
            (Self::Duration(a), CelValue::Duration(b)) => Some(a.cmp(b)),
            _ => None,
        }
    }
}

/// JSON equality, except that `1` and `1.0` are the same number.
fn json_equals(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| json_equals(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| json_equals(a, b)))
        }
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        _ => a == b,
    }
}
