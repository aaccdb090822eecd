//! PATCH by server-side apply: the body is everything its manager wants, and ownership decides what that means.

use bytes::BytesMut;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::Current;
use cleat_apimachinery::part::ObjectPart;
use http::StatusCode;
use serde_json::{Value, json};

use super::write::{Origin, insert, modify};
use super::{decode, read};
use crate::api::Api;
use crate::http::Call;
use crate::http::query::FieldValidation;
use crate::http::reply::Reply;
use cleat_apimachinery::error::{ApiError, ApplyCause};
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::field_ownership::{self, ApplyError, Conflict, Operation, RawManagedFields};
use cleat_apimachinery::kind::{Object, Source};
use cleat_apimachinery::managed_fields::{Document, Tracker};
use cleat_apimachinery::render;

/// The manager that keeps the annotation of client-side apply true.
const KUBECTL: &str = "kubectl";
/// Reading YAML takes much of the stack for every level; deeper objects are sent as JSON.
const DEPTH: usize = 48;
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

pub(crate) async fn apply(api: &Api, call: &Call, at: ObjectAddress<'_>, part: ObjectPart) -> Result<Reply, ApiError> {
    let effect = call.query.effect("PatchOptions")?;
    let validation = call.query.field_validation("PatchOptions")?;
    let manager = call.query.field_manager("PatchOptions", "")?;
    if manager.is_empty() {
        let error = FieldError::required("fieldManager", "is required for apply patch");
        return Err(ApiError::invalid_option("PatchOptions", error));
    }
    let (config, warnings) = configuration(at, call.text(), validation)?;
    let request = Request {
        at,
        tracker: Tracker::new(at.kind, part, Operation::Apply, &manager),
        is_kubectl: manager == KUBECTL,
        config,
        force: call.query.force().unwrap_or(false),
    };
    loop {
        let mut change = |current: &Current<'_>| request.onto(current);
        let outcome = modify(api, &call.actor, at, part, Origin::Patch, effect, &mut change).await;
        let (code, written) = match outcome {
            Err(ApiError::NotFound { .. }) if part == ObjectPart::Main => {
                match insert(api, &call.actor, at.kind, at.namespace, request.fresh()?, effect).await {
                    // Somebody else made it in between: then this is a change of theirs.
                    Err(ApiError::AlreadyExists { .. }) => continue,
                    made => (StatusCode::CREATED, made?),
                }
            }
            other => (StatusCode::OK, other?),
        };
        return Ok(read::written(call, at.kind, code, written)?.with_warnings(warnings));
    }
}

/// The body, checked for what must and must not be in it.
fn configuration(
    at: ObjectAddress<'_>,
    body: &[u8],
    validation: FieldValidation,
) -> Result<(Value, Vec<String>), ApiError> {
    let bad = |why: String| ApiError::BadRequest(why);
    // JSON is YAML, and the common case.
    let config: Value = match serde_json::from_slice(body) {
        Ok(config) => config,
        Err(_) => {
            let options = serde_saphyr::options! { budget: serde_saphyr::budget! { max_depth: DEPTH } };
            let read = serde_saphyr::from_slice_with_options(body, options);
            read.map_err(|e| {
                let text = e.to_string();
                bad(format!("error decoding YAML: {}", text.lines().next().unwrap_or_default()))
            })?
        }
    };
    if !config.is_object() {
        return Err(bad("error decoding YAML: the configuration is not an object".into()));
    }
    let repeated = decode::repeated(body, validation);
    if validation == FieldValidation::Strict && !repeated.is_empty() {
        return Err(bad(format!("error strict decoding YAML: {}", repeated.join(", "))));
    }
    let d = at.descriptor();
    let text = |pointer: &str| config.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (version, kind) = (text("/apiVersion"), text("/kind"));
    if version != d.api_version() {
        return Err(bad(format!(
            "Incorrect version specified in apply patch. Specified patch version: {version}, expected: {}",
            d.api_version()
        )));
    }
    if kind != d.kind {
        return Err(bad(format!(
            "Incorrect kind specified in apply patch. Specified patch kind: {kind}, expected: {}",
            d.kind
        )));
    }
    if config.pointer("/metadata/managedFields").is_some_and(|m| !m.is_null()) {
        return Err(bad("metadata.managedFields must be nil".into()));
    }
    Ok((config, repeated))
}

struct Request<'a> {
    at: ObjectAddress<'a>,
    tracker: Tracker<'a>,
    is_kubectl: bool,
    config: Value,
    force: bool,
}

impl Request<'_> {
    /// The object that applying to nothing makes.
    fn fresh(&self) -> Result<Document, ApiError> {
        if let Some(uid) = self.config.pointer("/metadata/uid").and_then(Value::as_str).filter(|u| !u.is_empty()) {
            let why =
                format!("uid mismatch: the provided object specified uid {uid}, and no existing object was found");
            return Err(ApiError::conflict(self.at.descriptor(), self.at.name, why));
        }
        let applied = self.tracker.apply(&json!({}), &RawManagedFields::default(), &self.config, self.force);
        let (object, owners) = applied.map_err(|e| self.refusal(e))?;
        let object = self.decoded(object.unwrap_or_else(|| json!({})))?;
        let name = object.meta().name.clone().unwrap_or_default();
        if name != self.at.name {
            let why = format!("the name of the object ({name}) does not match the name on the URL ({})", self.at.name);
            return Err(ApiError::BadRequest(why));
        }
        Ok(Document { object, owners })
    }

    fn onto(&self, current: &Current<'_>) -> Result<Document, ApiError> {
        let live = self.live(current)?;
        let try_with = |force| self.tracker.apply(&live, &current.divided.owners, &self.config, force);
        let applied = match try_with(self.force) {
            Err(ApplyError::Conflicts(conflicts)) if self.is_kubectl => {
                // What kubectl itself set by client-side apply, and nobody has changed since, is its own.
                let own = self.last_applied(&live);
                let left: Vec<Conflict> = conflicts.into_iter().filter(|c| !own.contains(&c.path)).collect();
                if left.is_empty() { try_with(true) } else { Err(ApplyError::Conflicts(left)) }
            }
            other => other,
        };
        let (object, owners) = applied.map_err(|e| self.refusal(e))?;
        let mut object = match object {
            Some(value) => self.decoded(value)?,
            None => current.object.copy(),
        };
        if self.is_kubectl
            && let Some(noted) = object.meta_mut().annotations.as_mut().and_then(|a| a.get_mut(LAST_APPLIED))
        {
            *noted = self.noted();
        }
        Ok(Document { object, owners })
    }

    fn live(&self, current: &Current<'_>) -> Result<Value, ApiError> {
        let damaged = |e: serde_json::Error| ApiError::Internal(format!("a stored object cannot be read: {e}"));
        let mut bytes = BytesMut::new();
        render::text(&mut bytes, self.at.descriptor(), &current.divided.text, current.stored.revision);
        serde_json::from_slice(&bytes).map_err(damaged)
    }

    fn decoded(&self, mut value: Value) -> Result<Box<dyn Object>, ApiError> {
        self.at.kind.schema().root().drop_zeros(&mut value);
        self.at.kind.decode(Source::Value(value)).map_err(|e| self.refusal(ApplyError::Shape(e.to_string())))
    }

    /// The fields client-side apply wrote and that still are as it wrote them.
    fn last_applied(&self, live: &Value) -> Vec<String> {
        let noted = live["metadata"]["annotations"][LAST_APPLIED].as_str().unwrap_or_default();
        let Ok(noted) = serde_json::from_str::<Value>(noted) else { return Vec::new() };
        let schema = self.at.kind.schema();
        let changed = field_ownership::difference(schema, &noted, live);
        field_ownership::fields(schema, &noted).difference(&changed.modified).difference(&changed.removed).paths()
    }

    /// The configuration as the annotation holds it.
    fn noted(&self) -> String {
        let mut config = self.config.clone();
        if let Some(Value::Object(annotations)) = config.pointer_mut("/metadata/annotations") {
            annotations.remove(LAST_APPLIED);
        }
        format!("{config}\n")
    }

    fn refusal(&self, error: ApplyError) -> ApiError {
        match error {
            ApplyError::Conflicts(conflicts) => conflict(conflicts),
            ApplyError::Shape(why) => {
                let d = self.at.descriptor();
                let name = match self.at.namespace {
                    Some(namespace) => format!("{namespace}/{}", self.at.name),
                    None => format!("/{}", self.at.name),
                };
                let version = d.api_version();
                ApiError::Unclassified(format!(
                    "failed to create typed patch object ({name}; {version}, Kind={}): {why}",
                    d.kind
                ))
            }
        }
    }
}

fn conflict(mut conflicts: Vec<Conflict>) -> ApiError {
    conflicts.sort_by(|a, b| {
        let key = |c: &Conflict| (c.with.manager.clone(), c.with.operation, c.with.subresource.clone());
        key(a).cmp(&key(b)).then_with(|| a.path.cmp(&b.path))
    });
    let message = match conflicts.as_slice() {
        [one] => format!("Apply failed with 1 conflict: conflict with {}: {}", one.with.shown(), one.path),
        many => {
            let mut message = format!("Apply failed with {} conflicts:", many.len());
            let mut separator = " ";
            for (i, conflict) in many.iter().enumerate() {
                if i == 0 || many[i - 1].with != conflict.with {
                    message += &format!("{separator}conflicts with {}:", conflict.with.shown());
                    separator = "\n";
                }
                message += &format!("\n- {}", conflict.path);
            }
            message
        }
    };
    let causes = conflicts
        .into_iter()
        .map(|c| ApplyCause { message: format!("conflict with {}", c.with.shown()), field: c.path })
        .collect();
    ApiError::ApplyConflict { message, causes }
}
