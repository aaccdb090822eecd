//! The `scale` subresource: how many, shown and changed without knowing the kind.

use bytes::BytesMut;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::Current;
use cleat_apimachinery::part::ObjectPart;
use http::{Method, StatusCode};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde_json::{Map, Value, json};

use super::write::{Origin, modify};
use crate::api::Api;
use crate::http::Call;
use crate::http::reply::Reply;
use cleat_apimachinery::descriptor::{Scale, ScaleSelector};
use cleat_apimachinery::error::{ApiError, GroupKind};
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::Source;
use cleat_apimachinery::managed_fields::Document;
use cleat_apimachinery::patch::{Format, Patch};
use cleat_apimachinery::render::{self, Stored};
use cleat_apimachinery::schema::Schema;
use cleat_registry::strategy::shown_selector;

pub(crate) async fn scale(api: &Api, call: &Call, at: ObjectAddress<'_>, paths: &Scale) -> Result<Reply, ApiError> {
    let stored = match call.method {
        Method::GET => {
            let entry = api.of(at.kind).get(&at.key()).await?.ok_or_else(|| at.not_found())?;
            Stored::from(&entry)
        }
        Method::PUT | Method::PATCH => write(api, call, at, paths).await?,
        _ => return Err(ApiError::MethodNotAllowed),
    };
    Ok(Reply::json(StatusCode::OK, &shown(&value(at, &stored)?, paths)))
}

async fn write(api: &Api, call: &Call, at: ObjectAddress<'_>, paths: &Scale) -> Result<Stored, ApiError> {
    let options = if call.method == Method::PUT { "UpdateOptions" } else { "PatchOptions" };
    let effect = call.query.effect(options)?;
    let bad = |e: serde_json::Error| ApiError::BadRequest(format!("the scale cannot be read: {e}"));
    let patch = match call.method {
        Method::PATCH => Some(Patch::parse(Format::of(call.content_type.as_deref(), at.kind)?, call.text())?),
        _ => None,
    };
    let origin = if patch.is_some() { Origin::Patch } else { Origin::Put };
    let mut change = |current: &Current<'_>| {
        let mut object = value(at, current.stored)?;
        let wanted: Value = match &patch {
            Some(patch) => {
                let mut scale = shown(&object, paths);
                patch.merge(Schema::unknown(), &mut scale)?;
                scale
            }
            None => serde_json::from_slice(call.text()).map_err(bad)?,
        };
        let replicas = replicas(at, &wanted)?;
        put(&mut object, &paths.wanted, replicas.into());
        if let Some(metadata) = object["metadata"].as_object_mut() {
            let sent = |field: &str| wanted["metadata"].get(field).cloned();
            metadata.remove("resourceVersion");
            for field in ["resourceVersion", "uid", "name"] {
                if let Some(sent) = sent(field) {
                    metadata.insert(field.into(), sent);
                }
            }
        }
        let mut object = at.kind.decode(Source::Value(object)).map_err(|e| ApiError::BadRequest(e.to_string()))?;
        object.meta_mut().managed_fields = None;
        Ok(Document { object, owners: current.divided.owners.clone() })
    };
    modify(api, &call.actor, at, ObjectPart::Main, origin, effect, &mut change).await.map(|written| written.stored)
}

fn replicas(at: ObjectAddress<'_>, scale: &Value) -> Result<i64, ApiError> {
    let replicas = scale.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(0);
    if replicas >= 0 {
        return Ok(replicas);
    }
    let error = FieldError::invalid("spec.replicas", replicas, "must be greater than or equal to 0");
    let kind = GroupKind { group: "autoscaling".into(), kind: "Scale".into() };
    Err(ApiError::Invalid { kind, name: at.name.into(), errors: vec![error] })
}

fn value(at: ObjectAddress<'_>, stored: &Stored) -> Result<Value, ApiError> {
    let mut bytes = BytesMut::new();
    render::object(&mut bytes, at.descriptor(), stored);
    serde_json::from_slice(&bytes).map_err(|e| ApiError::Internal(format!("a stored object cannot be read: {e}")))
}

fn look<'a>(object: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(object, |value, field| value.get(field))
}

fn put(object: &mut Value, path: &[String], value: Value) {
    let mut place = object;
    for field in path {
        if !place.is_object() {
            *place = Value::Object(Map::new());
        }
        place = &mut place[field.as_str()];
    }
    *place = value;
}

fn shown(object: &Value, paths: &Scale) -> Value {
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
    let number = |path| look(object, path).and_then(Value::as_i64).unwrap_or(0);
    let mut spec = json!({});
    if number(&paths.wanted) != 0 {
        spec["replicas"] = number(&paths.wanted).into();
    }
    let mut status = json!({ "replicas": number(&paths.actual) });
    let selector = match &paths.selector {
        ScaleSelector::None => None,
        ScaleSelector::Text(path) => look(object, path).and_then(Value::as_str).map(Into::into),
        ScaleSelector::Labels(path) => look(object, path)
            .and_then(|s| serde_json::from_value::<LabelSelector>(s.clone()).ok())
            .map(|s| shown_selector(&s)),
    };
    if let Some(selector) = selector.filter(|s| !s.is_empty()) {
        status["selector"] = selector.into();
    }
    json!({ "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status })
}
