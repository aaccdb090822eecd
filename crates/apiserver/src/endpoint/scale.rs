//! The `scale` subresource: reads and sets the number of replicas at the paths that the kind's descriptor names.

use bytes::BytesMut;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::CurrentObject;
use cleat_apimachinery::part::ObjectPart;
use http::{Method, StatusCode};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde_json::{Map, Value, json};

use super::write::{UpdateSource, modify};
use crate::http::ResourceRequest;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::descriptor::{ScalePaths, ScaleSelector};
use cleat_apimachinery::error::{ApiError, GroupKind};
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::DecodeSource;
use cleat_apimachinery::managed_fields::ManagedObject;
use cleat_apimachinery::patch::{Patch, PatchFormat};
use cleat_apimachinery::render::{self, StoredObject};
use cleat_apimachinery::schema::Schema;
use cleat_registry::strategy::format_label_selector;

pub(crate) async fn scale(
    state: &ServerState,
    request: &ResourceRequest,
    at: ObjectAddress<'_>,
    paths: &ScalePaths,
) -> Result<Reply, ApiError> {
    let stored = match request.method {
        Method::GET => {
            let entry = state.store_of(at.kind).get(&at.key()).await?.ok_or_else(|| at.not_found())?;
            StoredObject::from(&entry)
        }
        Method::PUT | Method::PATCH => update_replicas(state, request, at, paths).await?,
        _ => return Err(ApiError::MethodNotAllowed),
    };
    Ok(Reply::json(StatusCode::OK, &to_scale(&to_value(at, &stored)?, paths)))
}

async fn update_replicas(
    state: &ServerState,
    request: &ResourceRequest,
    at: ObjectAddress<'_>,
    paths: &ScalePaths,
) -> Result<StoredObject, ApiError> {
    let options = if request.method == Method::PUT { "UpdateOptions" } else { "PatchOptions" };
    let mode = request.query.write_mode(options)?;
    let bad = |e: serde_json::Error| ApiError::BadRequest(format!("the scale cannot be read: {e}"));
    let patch = match request.method {
        Method::PATCH => {
            Some(Patch::parse(PatchFormat::of(request.content_type.as_deref(), at.kind)?, request.encoded_body())?)
        }
        _ => None,
    };
    let source = if patch.is_some() { UpdateSource::Patch } else { UpdateSource::Put };
    let mut change = |current: &CurrentObject<'_>| {
        let mut object = to_value(at, current.stored)?;
        let wanted: Value = match &patch {
            Some(patch) => {
                let mut scale = to_scale(&object, paths);
                patch.merge(Schema::unknown(), &mut scale)?;
                scale
            }
            None => serde_json::from_slice(request.encoded_body()).map_err(bad)?,
        };
        let replicas = wanted_replicas(at, &wanted)?;
        set_path(&mut object, &paths.spec_replicas, replicas.into());
        if let Some(metadata) = object["metadata"].as_object_mut() {
            let sent = |field: &str| wanted["metadata"].get(field).cloned();
            metadata.remove("resourceVersion");
            for field in ["resourceVersion", "uid", "name"] {
                if let Some(sent) = sent(field) {
                    metadata.insert(field.into(), sent);
                }
            }
        }
        let mut object =
            at.kind.decode(DecodeSource::Value(object)).map_err(|e| ApiError::BadRequest(e.to_string()))?;
        object.meta_mut().managed_fields = None;
        Ok(ManagedObject { object, owners: current.split.owners.clone() })
    };
    modify(state, &request.actor, at, ObjectPart::Main, source, mode, &mut change).await.map(|written| written.stored)
}

fn wanted_replicas(at: ObjectAddress<'_>, scale: &Value) -> Result<i64, ApiError> {
    let replicas = scale.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(0);
    if replicas >= 0 {
        return Ok(replicas);
    }
    let error = FieldError::invalid("spec.replicas", replicas, "must be greater than or equal to 0");
    let kind = GroupKind { group: "autoscaling".into(), kind: "Scale".into() };
    Err(ApiError::Invalid { kind, name: at.name.into(), errors: vec![error] })
}

fn to_value(at: ObjectAddress<'_>, stored: &StoredObject) -> Result<Value, ApiError> {
    let mut bytes = BytesMut::new();
    render::write_object(&mut bytes, at.descriptor(), stored);
    serde_json::from_slice(&bytes).map_err(|e| ApiError::Internal(format!("a stored object cannot be read: {e}")))
}

fn get_path<'a>(object: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(object, |value, field| value.get(field))
}

fn set_path(object: &mut Value, path: &[String], value: Value) {
    let mut target = object;
    for field in path {
        if !target.is_object() {
            *target = Value::Object(Map::new());
        }
        target = &mut target[field.as_str()];
    }
    *target = value;
}

/// The object's `autoscaling/v1` form.
fn to_scale(object: &Value, paths: &ScalePaths) -> Value {
    let meta: ObjectMeta = serde_json::from_value(object["metadata"].clone()).unwrap_or_default();
    let mut metadata = json!({});
    for (field, value) in [
        ("name", json!(meta.name)),
        ("namespace", json!(meta.namespace)),
        ("uid", json!(meta.uid)),
        ("resourceVersion", json!(meta.resource_version)),
        ("creationTimestamp", json!(meta.creation_timestamp)),
    ] {
        if !value.is_null() {
            metadata[field] = value;
        }
    }
    let number = |path| get_path(object, path).and_then(Value::as_i64).unwrap_or(0);
    let mut spec = json!({});
    if number(&paths.spec_replicas) != 0 {
        spec["replicas"] = number(&paths.spec_replicas).into();
    }
    let mut status = json!({ "replicas": number(&paths.status_replicas) });
    let selector = match &paths.selector {
        ScaleSelector::None => None,
        ScaleSelector::String(path) => get_path(object, path).and_then(Value::as_str).map(Into::into),
        ScaleSelector::LabelSelector(path) => get_path(object, path)
            .and_then(|s| serde_json::from_value::<LabelSelector>(s.clone()).ok())
            .map(|s| format_label_selector(&s)),
    };
    if let Some(selector) = selector.filter(|s| !s.is_empty()) {
        status["selector"] = selector.into();
    }
    json!({ "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status })
}
