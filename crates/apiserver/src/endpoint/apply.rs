//! PATCH by server-side apply. The body lists the fields that its manager wants to own. Field ownership decides which
//! fields change, which are removed, and which conflict with another manager.

use bytes::BytesMut;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::CurrentObject;
use cleat_apimachinery::part::ObjectPart;
use http::StatusCode;
use serde_json::{Value, json};

use super::write::{UpdateSource, insert, modify};
use super::{decode, read};
use crate::http::ResourceRequest;
use crate::http::query::FieldValidation;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::error::{ApiError, ApplyConflictCause};
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::field_ownership::{self, ApplyError, Conflict, Operation, RawManagedFields};
use cleat_apimachinery::kind::{DecodeSource, Object};
use cleat_apimachinery::managed_fields::{ManagedObject, OwnershipTracker};
use cleat_apimachinery::render;

/// kubectl's default manager name. Its applies also update the annotation of client-side apply.
const KUBECTL_MANAGER: &str = "kubectl";
/// The YAML parser uses much stack per level. Objects that are nested deeper must be sent as JSON.
const MAX_YAML_DEPTH: usize = 48;
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

pub(crate) async fn apply(
    state: &ServerState,
    request: &ResourceRequest,
    at: ObjectAddress<'_>,
    part: ObjectPart,
) -> Result<Reply, ApiError> {
    let mode = request.query.write_mode("PatchOptions")?;
    let validation = request.query.field_validation("PatchOptions")?;
    let manager = request.query.field_manager("PatchOptions", "")?;
    if manager.is_empty() {
        let error = FieldError::required("fieldManager", "is required for apply patch");
        return Err(ApiError::invalid_option("PatchOptions", error));
    }
    let (config, warnings) = parse_configuration(at, request.encoded_body(), validation)?;
    let apply = ApplyRequest {
        at,
        tracker: OwnershipTracker::new(at.kind, part, Operation::Apply, &manager),
        is_kubectl: manager == KUBECTL_MANAGER,
        config,
        force: request.query.force().unwrap_or(false),
    };
    loop {
        let mut change = |current: &CurrentObject<'_>| apply.to_current(current);
        let outcome = modify(state, &request.actor, at, part, UpdateSource::Patch, mode, &mut change).await;
        let (code, written) = match outcome {
            Err(ApiError::NotFound { .. }) if part == ObjectPart::Main => {
                match insert(state, &request.actor, at.kind, at.namespace, apply.to_new_object()?, mode).await {
                    // Another client created the object in the meantime: apply to that object.
                    Err(ApiError::AlreadyExists { .. }) => continue,
                    created => (StatusCode::CREATED, created?),
                }
            }
            other => (StatusCode::OK, other?),
        };
        return Ok(read::render_written(request, at.kind, code, written)?.with_warnings(warnings));
    }
}

/// Decodes the body and checks its apiVersion, its kind and that it has no managedFields. Returns it with the warnings
/// about duplicate fields.
fn parse_configuration(
    at: ObjectAddress<'_>,
    body: &[u8],
    validation: FieldValidation,
) -> Result<(Value, Vec<String>), ApiError> {
    let bad = |why: String| ApiError::BadRequest(why);
    // Most clients send JSON, which is also valid YAML; the JSON parser is faster.
    let config: Value = match serde_json::from_slice(body) {
        Ok(config) => config,
        Err(_) => {
            let options = serde_saphyr::options! { budget: serde_saphyr::budget! { max_depth: MAX_YAML_DEPTH } };
            let parsed = serde_saphyr::from_slice_with_options(body, options);
            parsed.map_err(|e| {
                let message = e.to_string();
                bad(format!("error decoding YAML: {}", message.lines().next().unwrap_or_default()))
            })?
        }
    };
    if !config.is_object() {
        return Err(bad("error decoding YAML: the configuration is not an object".into()));
    }
    let duplicates = decode::duplicate_fields(body, validation);
    if validation == FieldValidation::Strict && !duplicates.is_empty() {
        return Err(bad(format!("error strict decoding YAML: {}", duplicates.join(", "))));
    }
    let d = at.descriptor();
    let string_at = |pointer: &str| config.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (version, kind) = (string_at("/apiVersion"), string_at("/kind"));
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
    Ok((config, duplicates))
}

struct ApplyRequest<'a> {
    at: ObjectAddress<'a>,
    tracker: OwnershipTracker<'a>,
    is_kubectl: bool,
    config: Value,
    force: bool,
}

impl ApplyRequest<'_> {
    /// The object to create if none exists.
    fn to_new_object(&self) -> Result<ManagedObject, ApiError> {
        if let Some(uid) = self.config.pointer("/metadata/uid").and_then(Value::as_str).filter(|u| !u.is_empty()) {
            let why =
                format!("uid mismatch: the provided object specified uid {uid}, and no existing object was found");
            return Err(ApiError::conflict(self.at.descriptor(), self.at.name, why));
        }
        let applied = self.tracker.apply(&json!({}), &RawManagedFields::default(), &self.config, self.force);
        let (object, owners) = applied.map_err(|e| self.api_error(e))?;
        let object = self.decode(object.unwrap_or_else(|| json!({})))?;
        let name = object.meta().name.clone().unwrap_or_default();
        if name != self.at.name {
            let why = format!("the name of the object ({name}) does not match the name on the URL ({})", self.at.name);
            return Err(ApiError::BadRequest(why));
        }
        Ok(ManagedObject { object, owners })
    }

    /// The object after the configuration is applied to the stored one.
    fn to_current(&self, current: &CurrentObject<'_>) -> Result<ManagedObject, ApiError> {
        let live = self.live_value(current)?;
        let apply = |force| self.tracker.apply(&live, &current.split.owners, &self.config, force);
        let applied = match apply(self.force) {
            Err(ApplyError::Conflicts(conflicts)) if self.is_kubectl => {
                // Fields that kubectl set by client-side apply and that have not changed since belong to kubectl: they
                // are no conflict.
                let own = self.unchanged_since_client_side_apply(&live);
                let remaining: Vec<Conflict> = conflicts.into_iter().filter(|c| !own.contains(&c.path)).collect();
                if remaining.is_empty() { apply(true) } else { Err(ApplyError::Conflicts(remaining)) }
            }
            other => other,
        };
        let (object, owners) = applied.map_err(|e| self.api_error(e))?;
        let mut object = match object {
            Some(value) => self.decode(value)?,
            None => current.object.copy(),
        };
        if self.is_kubectl
            && let Some(annotation) = object.meta_mut().annotations.as_mut().and_then(|a| a.get_mut(LAST_APPLIED))
        {
            *annotation = self.last_applied_annotation();
        }
        Ok(ManagedObject { object, owners })
    }

    fn live_value(&self, current: &CurrentObject<'_>) -> Result<Value, ApiError> {
        let damaged = |e: serde_json::Error| ApiError::Internal(format!("a stored object cannot be read: {e}"));
        let mut bytes = BytesMut::new();
        render::write_json(&mut bytes, self.at.descriptor(), &current.split.json, current.stored.revision);
        serde_json::from_slice(&bytes).map_err(damaged)
    }

    fn decode(&self, mut value: Value) -> Result<Box<dyn Object>, ApiError> {
        self.at.kind.schema().root().remove_zero_values(&mut value);
        self.at
            .kind
            .decode(DecodeSource::Value(value))
            .map_err(|e| self.api_error(ApplyError::InvalidConfig(e.to_string())))
    }

    /// The paths of the fields that client-side apply wrote and whose values have not changed since.
    fn unchanged_since_client_side_apply(&self, live: &Value) -> Vec<String> {
        let annotation = live["metadata"]["annotations"][LAST_APPLIED].as_str().unwrap_or_default();
        let Ok(last_applied) = serde_json::from_str::<Value>(annotation) else { return Vec::new() };
        let schema = self.at.kind.schema();
        let changed = field_ownership::difference(schema, &last_applied, live);
        field_ownership::fields(schema, &last_applied)
            .difference(&changed.modified)
            .difference(&changed.removed)
            .paths()
    }

    /// The value of the annotation `last-applied-configuration` for this configuration.
    fn last_applied_annotation(&self) -> String {
        let mut config = self.config.clone();
        if let Some(Value::Object(annotations)) = config.pointer_mut("/metadata/annotations") {
            annotations.remove(LAST_APPLIED);
        }
        format!("{config}\n")
    }

    fn api_error(&self, error: ApplyError) -> ApiError {
        match error {
            ApplyError::Conflicts(conflicts) => conflict_error(conflicts),
            ApplyError::InvalidConfig(why) => {
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

fn conflict_error(mut conflicts: Vec<Conflict>) -> ApiError {
    conflicts.sort_by(|a, b| {
        let key = |c: &Conflict| (c.owner.manager.clone(), c.owner.operation, c.owner.subresource.clone());
        key(a).cmp(&key(b)).then_with(|| a.path.cmp(&b.path))
    });
    let message = match conflicts.as_slice() {
        [one] => format!("Apply failed with 1 conflict: conflict with {}: {}", one.owner.describe(), one.path),
        many => {
            let mut message = format!("Apply failed with {} conflicts:", many.len());
            let mut separator = " ";
            for (i, conflict) in many.iter().enumerate() {
                if i == 0 || many[i - 1].owner != conflict.owner {
                    message += &format!("{separator}conflicts with {}:", conflict.owner.describe());
                    separator = "\n";
                }
                message += &format!("\n- {}", conflict.path);
            }
            message
        }
    };
    let causes = conflicts
        .into_iter()
        .map(|c| ApplyConflictCause { message: format!("conflict with {}", c.owner.describe()), field: c.path })
        .collect();
    ApiError::ApplyConflict { message, causes }
}
