//! Errors of API requests, and the HTTP status code and Status object of each. The mapping is one exhaustive match.

use cleat_store::{ListError, ReadError, WriteError};
use http::StatusCode;
use serde_json::{Value, json};

use crate::descriptor::{Descriptor, Resource};
use crate::field_error::FieldError;

#[derive(Clone, Debug, thiserror::Error)]
pub enum ApiError {
    #[error("{0}")]
    BadRequest(String),
    #[error("Unauthorized")]
    Unauthorized,
    #[error("{}forbidden: {why}", target_prefix(resource, name))]
    Forbidden { resource: Resource, name: String, why: String, cause: Option<Box<StatusCause>> },
    #[error("{resource} \"{name}\" not found")]
    NotFound { resource: Resource, name: String },
    #[error("the server could not find the requested resource")]
    NoSuchResource,
    #[error("the server does not allow this method on the requested resource")]
    MethodNotAllowed,
    /// The kind exists, but objects of it cannot be created now.
    #[error("{0}")]
    CreateNotAllowed(&'static str),
    #[error("only the following media types are accepted: application/json")]
    NotAcceptable,
    #[error("the body of the request was in an unknown format - accepted media types include: {0}")]
    UnsupportedMediaType(&'static str),
    #[error("{}{resource} \"{name}\" already exists", if *deleting { "object is being deleted: " } else { "" })]
    AlreadyExists { resource: Resource, name: String, deleting: bool },
    #[error("Operation cannot be fulfilled on {resource} \"{name}\": {why}")]
    Conflict { resource: Resource, name: String, why: String },
    /// The requested revision is no longer in the history.
    #[error("{0}")]
    Expired(String),
    /// As `Expired`, with a new token that continues the list at the current revision.
    #[error("The provided continue parameter is too old to display a consistent list result.")]
    ContinueExpired { new_token: String },
    #[error("Request entity too large: limit is {limit}")]
    TooLarge { limit: usize },
    #[error("{kind} \"{name}\" is invalid: {}", join_messages(errors))]
    Invalid { kind: GroupKind, name: String, errors: Vec<FieldError> },
    #[error("the server rejected our request due to an error in our request")]
    PatchRejected,
    #[error("Timeout: Too large resource version: {requested}, current: {current}")]
    VersionTooLarge { requested: u64, current: u64 },
    #[error("Timeout: the request's body did not come in time")]
    BodyTimeout,
    #[error("{message}")]
    ApplyConflict { message: String, causes: Vec<ApplyConflictCause> },
    /// A failure with status code 500 and no reason.
    #[error("{0}")]
    Unclassified(String),
    #[error("Internal error occurred: {0}")]
    Internal(String),
    #[error("the server is shutting down")]
    Unavailable,
}

/// An entry of `details.causes` in a Status with the reason Forbidden.
#[derive(Clone, Debug)]
pub struct StatusCause {
    pub reason: &'static str,
    pub message: String,
    pub field: &'static str,
}

/// A field of an applied configuration that another manager owns.
#[derive(Clone, Debug)]
pub struct ApplyConflictCause {
    pub message: String,
    pub field: String,
}

/// A kind in the form of validation messages: `Pod`, `StorageClass.storage.k8s.io`.
#[derive(Clone, Debug)]
pub struct GroupKind {
    pub group: String,
    pub kind: String,
}

impl std::fmt::Display for GroupKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.kind)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        Ok(())
    }
}

/// The beginning of a Forbidden message: the object, the resource, or nothing if the request is about neither.
fn target_prefix(resource: &Resource, name: &str) -> String {
    match (resource.plural.as_str(), name) {
        ("", _) => String::new(),
        (_, "") => format!("{resource} is "),
        _ => format!("{resource} \"{name}\" is "),
    }
}

fn join_messages(errors: &[FieldError]) -> String {
    match errors {
        [one] => one.to_string(),
        many => format!("[{}]", many.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}

impl ApiError {
    pub fn not_found(descriptor: &Descriptor, name: &str) -> Self {
        Self::NotFound { resource: descriptor.resource(), name: name.into() }
    }

    /// The object was changed after the client read it.
    pub fn modified(descriptor: &Descriptor, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(descriptor, name, why)
    }

    pub fn conflict(descriptor: &Descriptor, name: &str, why: impl Into<String>) -> Self {
        Self::Conflict { resource: descriptor.resource(), name: name.into(), why: why.into() }
    }

    /// A precondition of the request does not hold. Unlike other conflicts, the message contains the kind instead of the
    /// plural.
    pub fn precondition(descriptor: &Descriptor, name: &str, what: &str, wanted: &str, found: &str) -> Self {
        let resource = Resource { group: descriptor.group.clone(), plural: descriptor.kind.clone() };
        let why = format!("Precondition failed: {what} in precondition: {wanted}, {what} in object meta: {found}");
        Self::Conflict { resource, name: name.into(), why }
    }

    pub fn invalid(descriptor: &Descriptor, name: &str, errors: Vec<FieldError>) -> Self {
        let kind = GroupKind { group: descriptor.group.clone(), kind: descriptor.kind.clone() };
        Self::Invalid { kind, name: name.into(), errors }
    }

    /// A query parameter or an option in the body is invalid.
    pub fn invalid_option(kind: &str, error: FieldError) -> Self {
        let kind = GroupKind { group: "meta.k8s.io".into(), kind: kind.into() };
        Self::Invalid { kind, name: String::new(), errors: vec![error] }
    }

    pub fn forbidden(descriptor: &Descriptor, name: &str, why: impl Into<String>) -> Self {
        Self::Forbidden { resource: descriptor.resource(), name: name.into(), why: why.into(), cause: None }
    }

    /// The HTTP status code and the Status object.
    pub fn status(&self) -> (StatusCode, Value) {
        let message = self.to_string();
        let about = |r: &Resource, name: &str| details(&r.group, &r.plural, name);
        let (code, reason, details, metadata) = match self {
            Self::BadRequest(_) => (400, "BadRequest", None, None),
            Self::Unauthorized => (401, "Unauthorized", None, None),
            Self::Forbidden { resource, name, cause, .. } => {
                let mut details = about(resource, name);
                if let Some(cause) = cause {
                    let StatusCause { reason, message, field } = &**cause;
                    details["causes"] = json!([{ "reason": reason, "message": message, "field": field }]);
                }
                (403, "Forbidden", Some(details), None)
            }
            Self::NotFound { resource, name } => (404, "NotFound", Some(about(resource, name)), None),
            Self::NoSuchResource => (404, "NotFound", Some(json!({})), None),
            Self::MethodNotAllowed | Self::CreateNotAllowed(_) => (405, "MethodNotAllowed", None, None),
            Self::NotAcceptable => (406, "NotAcceptable", None, None),
            Self::UnsupportedMediaType(_) => (415, "UnsupportedMediaType", None, None),
            Self::AlreadyExists { resource, name, .. } => (409, "AlreadyExists", Some(about(resource, name)), None),
            Self::Conflict { resource, name, .. } => (409, "Conflict", Some(about(resource, name)), None),
            Self::Expired(_) => (410, "Expired", None, None),
            Self::ContinueExpired { new_token } => (410, "Expired", None, Some(json!({ "continue": new_token }))),
            Self::TooLarge { .. } => (413, "RequestEntityTooLarge", None, None),
            Self::Invalid { kind, name, errors } => {
                let mut details = details(&kind.group, &kind.kind, name);
                details["causes"] = errors
                    .iter()
                    .map(|e| json!({ "reason": e.reason(), "message": e.body(), "field": e.field }))
                    .collect();
                (422, "Invalid", Some(details), None)
            }
            Self::PatchRejected => (422, "Invalid", None, None),
            Self::VersionTooLarge { .. } => {
                let cause = json!({ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" });
                (504, "Timeout", Some(json!({ "causes": [cause], "retryAfterSeconds": 1 })), None)
            }
            Self::BodyTimeout => (504, "Timeout", None, None),
            Self::ApplyConflict { causes, .. } => {
                let causes: Vec<Value> = causes
                    .iter()
                    .map(|c| json!({ "reason": "FieldManagerConflict", "message": c.message, "field": c.field }))
                    .collect();
                (409, "Conflict", Some(json!({ "causes": causes })), None)
            }
            Self::Unclassified(_) => (500, "", None, None),
            Self::Internal(_) => (500, "InternalError", None, None),
            Self::Unavailable => (503, "ServiceUnavailable", Some(json!({ "retryAfterSeconds": 1 })), None),
        };
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": metadata.unwrap_or_else(|| json!({})),
            "status": "Failure", "message": message, "reason": reason, "code": code,
        });
        if let Some(details) = details {
            status["details"] = details;
        }
        if reason.is_empty()
            && let Value::Object(fields) = &mut status
        {
            fields.remove("reason");
        }
        (StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), status)
    }
}

fn details(group: &str, kind: &str, name: &str) -> Value {
    let mut details = json!({});
    for (key, value) in [("name", name), ("group", group), ("kind", kind)] {
        if !value.is_empty() {
            details[key] = value.into();
        }
    }
    details
}

impl From<ReadError> for ApiError {
    fn from(error: ReadError) -> Self {
        Self::Internal(error.to_string())
    }
}

impl From<ListError> for ApiError {
    fn from(error: ListError) -> Self {
        match error {
            ListError::TooOld { .. } => Self::Expired("The resourceVersion for the provided list is too old.".into()),
            ListError::Future { asked, current } => Self::VersionTooLarge { requested: asked, current },
            ListError::Read(error) => error.into(),
        }
    }
}

/// For callers that handle `Exists`, `Missing` and `Conflict` before they convert the error.
impl From<WriteError> for ApiError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Closed => Self::Unavailable,
            WriteError::Exists { .. }
            | WriteError::Missing { .. }
            | WriteError::Conflict { .. }
            | WriteError::Uncertain { .. } => Self::Internal(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_code_and_details() {
        let resource = || Resource { group: "coordination.k8s.io".into(), plural: "leases".into() };
        let name = || "x".to_owned();
        let kind = GroupKind { group: String::new(), kind: "PersistentVolumeClaim".into() };
        let error = FieldError::required("spec.accessModes", "at least 1 access mode is required");
        for (error, code, reason, message) in [
            (
                ApiError::AlreadyExists { resource: resource(), name: name(), deleting: false },
                409,
                "AlreadyExists",
                r#"leases.coordination.k8s.io "x" already exists"#,
            ),
            (
                ApiError::NotFound { resource: resource(), name: name() },
                404,
                "NotFound",
                r#"leases.coordination.k8s.io "x" not found"#,
            ),
            (
                ApiError::Invalid { kind, name: "p".into(), errors: vec![error] },
                422,
                "Invalid",
                "PersistentVolumeClaim \"p\" is invalid: spec.accessModes: Required value: at least 1 access mode is \
                 required",
            ),
            (
                ApiError::VersionTooLarge { requested: 9999, current: 813 },
                504,
                "Timeout",
                "Timeout: Too large resource version: 9999, current: 813",
            ),
        ] {
            let (status, body) = error.status();
            assert_eq!(status.as_u16(), code, "{body}");
            assert_eq!(body["reason"], reason);
            assert_eq!(body["message"], message);
            assert_eq!(body["code"], code);
        }
    }
}
