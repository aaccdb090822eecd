//! Decodes request bodies and patch results into objects of the kind that the URL names, and applies `fieldValidation`.

use bytes::Bytes;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::cache::body_shape::{BodyShape, BodySource};
use serde::Deserialize;
use serde_json::error::Category;

use crate::http::ResourceRequest;
use crate::http::body::MAX_BODY_BYTES;
use crate::http::query::FieldValidation;
use crate::http::reply::JSON;
use cleat_apimachinery::error::{ApiError, GroupKind};
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::{DecodeSource, Kind, Object};
use cleat_apimachinery::meta;
use cleat_apimachinery::schema::Schema;
use cleat_apimachinery::strict_decoding::{self, StrictFindings};

#[derive(Deserialize)]
struct TypeMeta {
    #[serde(default, rename = "apiVersion")]
    api_version: Option<String>,
    #[serde(default)]
    kind: Option<String>,
}

/// The object of a request body.
pub(crate) struct DecodedBody {
    pub(crate) object: Box<dyn Object>,
    pub(crate) warnings: Vec<String>,
    /// The object with its defaults, encoded. Set only if the body came as an object and was encoded for a check
    /// anyway.
    pub(crate) encoded: Option<Bytes>,
}

pub(crate) fn decode_body(
    request: &ResourceRequest,
    kind: &dyn Kind,
    validation: FieldValidation,
) -> Result<DecodedBody, ApiError> {
    let media = request.content_type.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !matches!(media, "" | JSON | "*/*") {
        return Err(ApiError::UnsupportedMediaType(JSON));
    }
    let typed = request.take_object(kind, |mut object| {
        meta::normalise(object.meta_mut());
        kind.set_defaults(&mut *object);
        let encoded = Bytes::from(object.encode());
        // The object is used without decoding only if decoding its JSON would change nothing and give no warnings: it
        // has no managedFields, and the shape cache says that a body of this shape has no findings and no zero values
        // to drop.
        let is_plain = object.meta().managed_fields.is_none()
            && BodyShape::of(BodySource::Request, &encoded).cached(kind.caches()) == Some(false);
        (is_plain.then(|| DecodedBody { object, warnings: Vec::new(), encoded: Some(encoded.clone()) }), encoded)
    });
    if request.encoded_body().len() > MAX_BODY_BYTES {
        return Err(ApiError::TooLarge { limit: MAX_BODY_BYTES });
    }
    if let Some(decoded) = typed.flatten() {
        return Ok(decoded);
    }
    let (object, warnings) = decode_json(request.encoded_body(), kind, validation)?;
    Ok(DecodedBody { object, warnings, encoded: None })
}

/// The object of an encoded body, and the warnings about it.
fn decode_json(
    body: &[u8],
    kind: &dyn Kind,
    validation: FieldValidation,
) -> Result<(Box<dyn Object>, Vec<String>), ApiError> {
    // The body `null` means the same as an object without fields.
    let json: &[u8] = if body.trim_ascii() == b"null" { b"{}" } else { body };
    let shape = BodyShape::of(BodySource::Request, json);
    // A body of a cached shape has no findings. If it cannot be decoded, the full check below finds the error to
    // report.
    if let Some(zeros) = shape.cached(kind.caches())
        && let Ok(object) = decode_without_zeros(kind, DecodeSource::Bytes(json), zeros)
    {
        return Ok((object, Vec::new()));
    }
    check_type(kind, json)?;
    let mut object = kind.decode(DecodeSource::Bytes(json)).map_err(|e| decode_error(kind, e))?;
    let findings = strict_decoding::check_body(kind.schema(), json);
    shape.insert(kind.caches(), &findings);
    if let Some(fault) = findings.decode_error {
        return Err(decode_error(kind, fault));
    }
    if findings.has_omitted_zeros {
        object = decode_without_zeros(kind, DecodeSource::Bytes(json), true).map_err(|e| decode_error(kind, e))?;
    }
    let warnings = match validation {
        FieldValidation::Ignore => Vec::new(),
        FieldValidation::Warn | FieldValidation::Strict => findings.strict_errors,
    };
    refuse_if_strict(kind, object, warnings, validation)
}

/// Decodes JSON. If `zeros` is true the JSON has zero values that Kubernetes does not store; they are removed first.
fn decode_without_zeros(
    kind: &dyn Kind,
    source: DecodeSource<'_>,
    zeros: bool,
) -> Result<Box<dyn Object>, serde_json::Error> {
    let json = match source {
        DecodeSource::Bytes(json) if zeros => json,
        DecodeSource::Generated(json) if zeros => json.as_bytes(),
        whole => return kind.decode(whole),
    };
    let mut value = serde_json::from_slice(json)?;
    kind.schema().root().remove_zero_values(&mut value);
    kind.decode(DecodeSource::Value(value))
}

fn check_type(kind: &dyn Kind, body: &[u8]) -> Result<(), ApiError> {
    let d = kind.descriptor();
    let found: TypeMeta = serde_json::from_slice(body).map_err(|e| unknown_type_error(kind, body, &e))?;
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

/// Warnings about fields that occur twice in a patch. None if unknown fields are ignored.
pub(crate) fn duplicate_fields(patch: &[u8], validation: FieldValidation) -> Vec<String> {
    match validation {
        FieldValidation::Ignore => Vec::new(),
        FieldValidation::Warn | FieldValidation::Strict => {
            strict_decoding::check_body(Schema::unknown(), patch).strict_errors
        }
    }
}

/// Decodes the result of a patch, `patched`, and adds warnings about it to those about the patch itself.
pub(crate) fn decode_patched(
    at: ObjectAddress<'_>,
    patched: String,
    patch: &[u8],
    duplicates: Vec<String>,
    validation: FieldValidation,
) -> Result<(Box<dyn Object>, Vec<String>), ApiError> {
    // The error is about the patch: it names neither the kind nor the object.
    let invalid_patch = |value: &str, why: String| {
        let kind = GroupKind { group: String::new(), kind: String::new() };
        ApiError::Invalid { kind, name: String::new(), errors: vec![FieldError::invalid("patch", value, why)] }
    };
    let shape = BodyShape::of(BodySource::Patch, patched.as_bytes());
    let findings = match shape.cached(at.kind.caches()) {
        Some(zeros) => StrictFindings { has_omitted_zeros: zeros, ..StrictFindings::default() },
        None => {
            let findings = strict_decoding::check_body(at.kind.schema(), patched.as_bytes());
            shape.insert(at.kind.caches(), &findings);
            findings
        }
    };
    if let Some(fault) = findings.decode_error {
        return Err(invalid_patch(&patched, fault));
    }
    let unknown = if validation == FieldValidation::Ignore { Vec::new() } else { findings.strict_errors };
    let decoded = decode_without_zeros(at.kind, DecodeSource::Generated(&patched), findings.has_omitted_zeros);
    let object = decoded.map_err(|e| invalid_patch(&patched, e.to_string()))?;
    // Unknown fields are reported with the patched object, duplicate fields with the patch.
    let reported = if unknown.is_empty() { String::from_utf8_lossy(patch) } else { patched.into() };
    let mut warnings = duplicates;
    warnings.extend(unknown);
    if validation == FieldValidation::Strict && !warnings.is_empty() {
        return Err(invalid_patch(&reported, format!("strict decoding error: {}", warnings.join(", "))));
    }
    Ok((object, warnings))
}

/// Returns the object with its warnings, or an error if there are warnings and the validation is strict.
fn refuse_if_strict(
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

/// The error for a body whose apiVersion and kind cannot be read. Clients know its text from the Go implementation.
fn unknown_type_error(kind: &dyn Kind, body: &[u8], error: &serde_json::Error) -> ApiError {
    let start = body.trim_ascii_start().first().copied();
    if start == Some(b'{') && error.is_data() {
        return decode_error(kind, error);
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

fn decode_error(kind: &dyn Kind, error: impl std::fmt::Display) -> ApiError {
    let d = kind.descriptor();
    ApiError::BadRequest(format!("{0} in version {1:?} cannot be handled as a {0}: {error}", d.kind, d.version))
}
