//! `pods/binding`: sets a pod's node. A pod that has a node already is refused.

use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::managed_fields::CurrentObject;
use cleat_apimachinery::part::ObjectPart;
use http::{Method, StatusCode};
use k8s_openapi::api::core::v1::{Binding, Pod};
use serde_json::json;

use super::write::{UpdateSource, modify};
use crate::http::ResourceRequest;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::kind::typed_mut;
use cleat_apimachinery::meta;
use cleat_auth::request_info::ResourcePath;

pub(crate) async fn bind(
    state: &ServerState,
    request: &ResourceRequest,
    at: ObjectAddress<'_>,
) -> Result<Reply, ApiError> {
    let mode = request.query.write_mode("CreateOptions")?;
    let binding: Binding = serde_json::from_slice(request.encoded_body())
        .map_err(|e| ApiError::BadRequest(format!("the binding cannot be read: {e}")))?;
    let node = binding.target.name.clone().unwrap_or_default();
    if node.is_empty() {
        let error = cleat_apimachinery::field_error::FieldError::required("target.name", "");
        let kind = cleat_apimachinery::error::GroupKind { group: String::new(), kind: "Binding".into() };
        return Err(ApiError::Invalid { kind, name: at.name.into(), errors: vec![error] });
    }
    let mut change = |current: &CurrentObject<'_>| {
        let mut new = current.edited(|_| {});
        assign(at, typed_mut::<Pod>(&mut *new.object), &binding, &node)?;
        Ok(new)
    };
    modify(state, &request.actor, at, ObjectPart::Whole, UpdateSource::Server, mode, &mut change).await?;
    let status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201 });
    Ok(Reply::json(StatusCode::CREATED, &status))
}

/// Returns true for a POST to `bindings`. Such a request means `pods/NAME/binding`, with the pod's name from the body.
pub(crate) fn is_bindings_collection(request: &ResourceRequest, target: &ResourcePath) -> bool {
    target.group.is_empty() && target.plural == "bindings" && target.name.is_none() && request.method == Method::POST
}

pub(crate) fn pod_binding_path(request: &ResourceRequest, target: &ResourcePath) -> Result<ResourcePath, ApiError> {
    let binding: Binding = serde_json::from_slice(request.encoded_body())
        .map_err(|e| ApiError::BadRequest(format!("the binding cannot be read: {e}")))?;
    let name = binding.metadata.name;
    Ok(ResourcePath { plural: "pods".into(), name, subresource: Some("binding".into()), ..target.clone() })
}

fn assign(at: ObjectAddress<'_>, pod: &mut Pod, binding: &Binding, node: &str) -> Result<(), ApiError> {
    let conflict = |why: String| Err(ApiError::conflict(at.descriptor(), at.name, why));
    if let (Some(wanted), Some(found)) = (&binding.metadata.uid, &pod.metadata.uid)
        && wanted != found
    {
        return Err(ApiError::precondition(at.descriptor(), at.name, "UID", wanted, found));
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return conflict(format!("pod {} is being deleted, cannot be assigned to a host", at.name));
    }
    let spec = pod.spec.get_or_insert_default();
    if let Some(assigned) = spec.node_name.as_deref().filter(|n| !n.is_empty()) {
        return conflict(format!("pod {} is already assigned to node {assigned:?}", at.name));
    }
    if spec.scheduling_gates.as_ref().is_some_and(|g| !g.is_empty()) {
        return conflict(format!("pod {} has non-empty .spec.schedulingGates", at.name));
    }
    spec.node_name = Some(node.into());
    let annotations = binding.metadata.annotations.clone().unwrap_or_default();
    if !annotations.is_empty() {
        pod.metadata.annotations.get_or_insert_default().extend(annotations);
    }
    let status = pod.status.get_or_insert_default();
    status.nominated_node_name = None;
    let condition = k8s_openapi::api::core::v1::PodCondition {
        type_: "PodScheduled".into(),
        status: "True".into(),
        last_transition_time: Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(meta::now())),
        ..Default::default()
    };
    let conditions = status.conditions.get_or_insert_default();
    conditions.retain(|c| c.type_ != condition.type_);
    conditions.push(condition);
    Ok(())
}
