//! Validation errors of single fields, with the messages of Kubernetes.

use std::fmt;

use serde::Serialize;

/// Why one field is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    pub field: String,
    problem: Problem,
    detail: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Problem {
    Required,
    Invalid(String),
    NotSupported(String),
    Forbidden,
    Duplicate(String),
    NotFound(String),
    TooLong,
    TypeInvalid(String),
    TooMany(String),
}

fn to_json(value: impl Serialize) -> String {
    serde_json::to_string(&value).unwrap_or_default()
}

impl FieldError {
    fn new(field: impl Into<String>, problem: Problem, detail: impl Into<String>) -> Self {
        Self { field: field.into(), problem, detail: detail.into() }
    }

    pub fn required(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(field, Problem::Required, detail)
    }

    pub fn invalid(field: impl Into<String>, value: impl Serialize, detail: impl Into<String>) -> Self {
        Self::new(field, Problem::Invalid(to_json(value)), detail)
    }

    /// The value is none of the supported ones. The message lists them sorted.
    pub fn not_supported(field: impl Into<String>, value: &str, supported: &[&str]) -> Self {
        let mut sorted: Vec<_> = supported.iter().map(|s| format!("\"{s}\"")).collect();
        sorted.sort();
        Self::new(field, Problem::NotSupported(to_json(value)), sorted.join(", "))
    }

    /// As `not_supported`, but the message lists the supported values in the given order.
    pub fn not_supported_in_order(field: impl Into<String>, value: impl Serialize, supported: &[&str]) -> Self {
        let quoted: Vec<_> = supported.iter().map(|s| format!("\"{s}\"")).collect();
        Self::new(field, Problem::NotSupported(to_json(value)), quoted.join(", "))
    }

    pub fn forbidden(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(field, Problem::Forbidden, detail)
    }

    pub fn duplicate(field: impl Into<String>, value: impl Serialize) -> Self {
        Self::new(field, Problem::Duplicate(to_json(value)), "")
    }

    pub fn not_found(field: impl Into<String>, value: impl Serialize) -> Self {
        Self::new(field, Problem::NotFound(to_json(value)), "")
    }

    pub fn too_long(field: impl Into<String>, limit: usize) -> Self {
        Self::new(field, Problem::TooLong, format!("may not be more than {limit} bytes"))
    }

    /// The value has another type than the field; `found` is the type of the value.
    pub fn type_invalid(field: impl Into<String>, found: &str, detail: impl Into<String>) -> Self {
        Self::new(field, Problem::TypeInvalid(to_json(found)), detail)
    }

    pub fn too_many(field: impl Into<String>, found: i64, limit: i64) -> Self {
        Self::new(field, Problem::TooMany(found.to_string()), format!("must have at most {limit} items"))
    }

    /// The error of a CEL rule with the given `reason`. The message contains `type_name` in place of the value.
    pub fn from_reason(reason: &str, field: impl Into<String>, type_name: &str, detail: String) -> Self {
        match reason {
            "FieldValueRequired" => Self::required(field, detail),
            "FieldValueForbidden" => Self::forbidden(field, detail),
            "FieldValueDuplicate" => Self::duplicate(field, type_name),
            _ => Self::invalid(field, type_name, detail),
        }
    }

    /// The machine-readable reason in `details.causes`.
    pub fn reason(&self) -> &'static str {
        match self.problem {
            Problem::Required => "FieldValueRequired",
            Problem::Invalid(_) => "FieldValueInvalid",
            Problem::NotSupported(_) => "FieldValueNotSupported",
            Problem::Forbidden => "FieldValueForbidden",
            Problem::Duplicate(_) => "FieldValueDuplicate",
            Problem::NotFound(_) => "FieldValueNotFound",
            Problem::TooLong => "FieldValueTooLong",
            Problem::TypeInvalid(_) => "FieldValueTypeInvalid",
            Problem::TooMany(_) => "FieldValueTooMany",
        }
    }

    /// The message without the field's path.
    pub fn body(&self) -> String {
        let detail = &self.detail;
        let head = match &self.problem {
            Problem::Required => "Required value".to_owned(),
            Problem::Invalid(value) => format!("Invalid value: {value}"),
            Problem::NotSupported(value) => return format!("Unsupported value: {value}: supported values: {detail}"),
            Problem::Forbidden => "Forbidden".to_owned(),
            Problem::Duplicate(value) => format!("Duplicate value: {value}"),
            Problem::NotFound(value) => format!("Not found: {value}"),
            Problem::TooLong => "Too long".to_owned(),
            Problem::TypeInvalid(value) => format!("Invalid value: {value}"),
            Problem::TooMany(count) => format!("Too many: {count}"),
        };
        if detail.is_empty() { head } else { format!("{head}: {detail}") }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.body())
    }
}
