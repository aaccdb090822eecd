//! From a request body to an object of the kind the URL names.

use bytes::Bytes;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::cache::body_shape::{BodyShape, BodySource};
use serde::Deserialize;
use serde_json::error::Category;

use crate::http::Call;
use crate::http::body::REQUEST_LIMIT;
use crate::http::query::FieldValidation;
use cleat_apimachinery::error::{ApiError, GroupKind};
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::{Kind, Object, Source};
use cleat_apimachinery::meta;
use cleat_apimachinery::schema::Schema;
use cleat_apimachinery::strict::{self, Findings};

const ACCEPTED: &str = "application/json";

#[derive(Deserialize)]
struct TypeMeta {
    #[serde(default, rename = "apiVersion")]
    api_version: Option<String>,
    #[serde(default)]
    kind: Option<String>,
}

/// What a client wants to be stored.
pub(crate) struct Sent {
    pub(crate) object: Box<dyn Object>,
    pub(crate) warnings: Vec<String>,
    /// The object as it is encoded with its defaults, if that is known already.
    pub(crate) text: Option<Bytes>,
}

pub(crate) fn body(call: &Call, kind: &dyn Kind, validation: FieldValidation) -> Result<Sent, ApiError> {
    let media = call.content_type.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !matches!(media, "" | "application/json" | "*/*") {
        return Err(ApiError::UnsupportedMediaType(ACCEPTED));
    }
    let adopted = call.adopted(kind, |mut object| {
        meta::normalise(object.meta_mut());
        kind.default(&mut *object);
        let text = Bytes::from(object.encode());
        // What else would be said about the text, and what is not kept of it, is for those who read it.
        let plain = object.meta().managed_fields.is_none()
            && BodyShape::of(BodySource::Request, &text).cached(kind.caches()) == Some(false);
        (plain.then(|| Sent { object, warnings: Vec::new(), text: Some(text.clone()) }), text)
    });
    if call.text().len() > REQUEST_LIMIT {
        return Err(ApiError::TooLarge { limit: REQUEST_LIMIT });
    }
    if let Some(sent) = adopted.flatten() {
        return Ok(sent);
    }
    let (object, warnings) = read(call.text(), kind, validation)?;
    Ok(Sent { object, warnings, text: None })
}

/// The object of a text, and the warnings about it.
fn read(body: &[u8], kind: &dyn Kind, validation: FieldValidation) -> Result<(Box<dyn Object>, Vec<String>), ApiError> {
    // A body that says `null` says nothing, like an object without fields.
    let text: &[u8] = if body.trim_ascii() == b"null" { b"{}" } else { body };
    let shape = BodyShape::of(BodySource::Request, text);
    // A text that cannot be read says why only when it is looked at anew.
    if let Some(zeros) = shape.cached(kind.caches())
        && let Ok(object) = kept(kind, Source::Bytes(text), zeros)
    {
        return Ok((object, Vec::new()));
    }
    check_type(kind, text)?;
    let mut object = kind.decode(Source::Bytes(text)).map_err(|e| unreadable(kind, e))?;
    let findings = strict::of_text(kind.schema(), text);
    shape.insert(kind.caches(), &findings);
    if let Some(fault) = findings.fault {
        return Err(unreadable(kind, fault));
    }
    if findings.zeros {
        object = kept(kind, Source::Bytes(text), true).map_err(|e| unreadable(kind, e))?;
    }
    let found = match validation {
        FieldValidation::Ignore => Vec::new(),
        FieldValidation::Warn | FieldValidation::Strict => findings.complaints,
    };
    judge(kind, object, found, validation)
}

/// The object of a text, which may hold values that are not kept.
fn kept(kind: &dyn Kind, source: Source<'_>, zeros: bool) -> Result<Box<dyn Object>, serde_json::Error> {
    let text = match source {
        Source::Bytes(text) if zeros => text,
        Source::Made(text) if zeros => text.as_bytes(),
        whole => return kind.decode(whole),
    };
    let mut value = serde_json::from_slice(text)?;
    kind.schema().root().drop_zeros(&mut value);
    kind.decode(Source::Value(value))
}

fn check_type(kind: &dyn Kind, body: &[u8]) -> Result<(), ApiError> {
    let d = kind.descriptor();
    let found: TypeMeta = serde_json::from_slice(body).map_err(|e| unrecognized(kind, body, &e))?;
    let version = d.api_version();
    if let Some(sent) = found.api_version.filter(|v| !v.is_empty() && *v != version) {
        return Err(ApiError::BadRequest(format!(
            "the API version in the data ({sent}) does not match the expected API version ({version})"
        )));
    }
    if let Some(sent) = found.kind.filter(|k| !k.is_empty() && *k != d.kind) {
        let wanted = &d.kind;
        return Err(ApiError::BadRequest(format!(
            "{sent} in version {version:?} cannot be handled as a {wanted}: the kind in the data does not match the URL"
        )));
    }
    Ok(())
}

/// What a patch itself says twice.
pub(crate) fn repeated(patch: &[u8], validation: FieldValidation) -> Vec<String> {
    match validation {
        FieldValidation::Ignore => Vec::new(),
        FieldValidation::Warn | FieldValidation::Strict => strict::of_text(Schema::unknown(), patch).complaints,
    }
}

/// The object a patch has made.
pub(crate) fn patched(
    at: ObjectAddress<'_>,
    shown: String,
    patch: &[u8],
    repeated: Vec<String>,
    validation: FieldValidation,
) -> Result<(Box<dyn Object>, Vec<String>), ApiError> {
    // What is wrong here is the patch, not yet an object with a kind and a name.
    let refused = |shown: &str, why: String| {
        let kind = GroupKind { group: String::new(), kind: String::new() };
        ApiError::Invalid { kind, name: String::new(), errors: vec![FieldError::invalid("patch", shown, why)] }
    };
    let shape = BodyShape::of(BodySource::Patch, shown.as_bytes());
    let findings = match shape.cached(at.kind.caches()) {
        Some(zeros) => Findings { zeros, ..Findings::default() },
        None => {
            let found = strict::of_text(at.kind.schema(), shown.as_bytes());
            shape.insert(at.kind.caches(), &found);
            found
        }
    };
    if let Some(fault) = findings.fault {
        return Err(refused(&shown, fault));
    }
    let unknown = if validation == FieldValidation::Ignore { Vec::new() } else { findings.complaints };
    let decoded = kept(at.kind, Source::Made(&shown), findings.zeros);
    let object = decoded.map_err(|e| refused(&shown, e.to_string()))?;
    let blamed = if unknown.is_empty() { String::from_utf8_lossy(patch) } else { shown.into() };
    let mut warnings = repeated;
    warnings.extend(unknown);
    if validation == FieldValidation::Strict && !warnings.is_empty() {
        return Err(refused(&blamed, format!("strict decoding error: {}", warnings.join(", "))));
    }
    Ok((object, warnings))
}

/// Acts on unknown and duplicate fields.
fn judge(
    kind: &dyn Kind,
    object: Box<dyn Object>,
    warnings: Vec<String>,
    validation: FieldValidation,
) -> Result<(Box<dyn Object>, Vec<String>), ApiError> {
    if validation == FieldValidation::Strict && !warnings.is_empty() {
        let d = kind.descriptor();
        return Err(ApiError::BadRequest(format!(
            "{0} in version {1:?} cannot be handled as a {0}: strict decoding error: {2}",
            d.kind,
            d.version,
            warnings.join(", ")
        )));
    }
    Ok((object, warnings))
}

/// What is said of a body that does not even show what kind it is of.
fn unrecognized(kind: &dyn Kind, body: &[u8], error: &serde_json::Error) -> ApiError {
    let start = body.trim_ascii_start().first().copied();
    if start == Some(b'{') && error.is_data() {
        return unreadable(kind, error);
    }
    let not_an_object = |what: &str| {
        let wanted =
            r#"struct { APIVersion string "json:\"apiVersion,omitempty\""; Kind string "json:\"kind,omitempty\"" }"#;
        format!("json: cannot unmarshal {what} into Go value of type {wanted}")
    };
    let why = match (error.classify(), start) {
        (Category::Eof, _) => "unexpected end of JSON input".to_owned(),
        (Category::Data, Some(b'[')) => not_an_object("array"),
        (Category::Data, Some(b'"')) => not_an_object("string"),
        (Category::Data, Some(b't' | b'f')) => not_an_object("bool"),
        (Category::Data, _) => not_an_object("number"),
        (Category::Syntax | Category::Io, _) => error.to_string(),
    };
    let shown = match (body, start) {
        ([], _) => "<empty>".to_owned(),
        (_, Some(b'{')) => String::from_utf8_lossy(body).into_owned(),
        _ => body.iter().map(|byte| format!("{byte:02x}")).collect(),
    };
    ApiError::BadRequest(format!(
        "the object provided is unrecognized (must be of type {}): couldn't get version/kind; json parse error: {why} \
         ({shown})",
        kind.descriptor().kind
    ))
}

fn unreadable(kind: &dyn Kind, error: impl std::fmt::Display) -> ApiError {
    let d = kind.descriptor();
    ApiError::BadRequest(format!("{0} in version {1:?} cannot be handled as a {0}: {error}", d.kind, d.version))
}
