//! The verbs of resources, for every kind. A verb decodes its options, applies the common rules, admission and the
//! kind's strategy, and writes to the store with compare-and-swap. Authentication and authorization have already
//! succeeded.

mod apply;
pub(crate) mod binding;
mod decode;
pub(crate) mod delete;
mod list;
mod read;
mod scale;
mod update;
mod watch;
pub(crate) mod write;

use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::part::ObjectPart;
use std::sync::Arc;

use http::{Method, StatusCode};
use k8s_openapi::api::core::v1::Pod;

use crate::http::ResourceRequest;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::descriptor::PutMissing;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_ownership::Operation;
use cleat_apimachinery::kind::{Kind, typed};
use cleat_apimachinery::managed_fields::{ManagedObject, OwnershipTracker, decode as decode_stored};
use cleat_apimachinery::selector::Selector;
use cleat_auth::request_info::ResourcePath;
use decode::DecodedBody;

pub(crate) async fn dispatch(
    state: &Arc<ServerState>,
    request: ResourceRequest,
    target: &ResourcePath,
) -> Result<Reply, ApiError> {
    let kinds = state.kinds();
    let pod_binding = match binding::is_bindings_collection(&request, target) {
        true => Some(binding::pod_binding_path(&request, target)?),
        false => None,
    };
    let target = pod_binding.as_ref().unwrap_or(target);
    let kind = kinds.find(&target.group, &target.version, &target.plural).ok_or(ApiError::NoSuchResource)?;
    let mut reply = dispatch_to_kind(state, request, target, kind).await?;
    reply.warnings.extend(kind.deprecation().map(Into::into));
    Ok(reply)
}

async fn dispatch_to_kind(
    state: &Arc<ServerState>,
    request: ResourceRequest,
    target: &ResourcePath,
    kind: &Arc<dyn Kind>,
) -> Result<Reply, ApiError> {
    let d = kind.descriptor();
    let namespace = target.namespace.as_deref();
    if namespace.is_some() && !d.namespaced {
        return Err(ApiError::NoSuchResource);
    }
    let Some(name) = target.name.as_deref() else {
        return collection(state, &request, kind, namespace).await;
    };
    if d.namespaced && namespace.is_none() {
        return Err(ApiError::NoSuchResource);
    }
    let at = ObjectAddress { kind: &**kind, namespace, name };
    match target.subresource.as_deref() {
        None => object(state, &request, at).await,
        Some("status") if d.has_status => status(state, &request, at).await,
        Some("scale") if let Some(paths) = &d.scale => scale::scale(state, &request, at, paths).await,
        Some("log") if d.plural == "pods" && d.group.is_empty() => match request.method {
            Method::GET => pod_log(state, &request, at).await,
            _ => Err(ApiError::MethodNotAllowed),
        },
        Some("binding") if d.plural == "pods" && d.group.is_empty() => match request.method {
            Method::POST => binding::bind(state, &request, at).await,
            _ => Err(ApiError::MethodNotAllowed),
        },
        Some("token") if d.plural == "serviceaccounts" && d.group.is_empty() => match request.method {
            Method::POST => crate::review::request_token(state, &request, at).await,
            _ => Err(ApiError::MethodNotAllowed),
        },
        Some("finalize") if d.plural == "namespaces" => match request.method {
            Method::PUT => update::put(state, &request, at, ObjectPart::Finalize).await,
            _ => Err(ApiError::MethodNotAllowed),
        },
        Some(_) => Err(ApiError::NoSuchResource),
    }
}

async fn collection(
    state: &Arc<ServerState>,
    request: &ResourceRequest,
    kind: &Arc<dyn Kind>,
    namespace: Option<&str>,
) -> Result<Reply, ApiError> {
    let d = kind.descriptor();
    // Only lists and watches may span namespaces.
    let is_writable = !d.namespaced || namespace.is_some();
    match request.method {
        Method::GET => {
            let options = request.query.list_options()?;
            match options.watch {
                true => watch::watch(state, request, kind, namespace, options).await,
                false => list::list(state, request, kind, namespace, options).await,
            }
        }
        Method::POST if is_writable => create(state, request, &**kind, namespace).await,
        Method::DELETE if is_writable && d.verbs().contains(&"deletecollection") => {
            delete::delete_collection(state, request, kind, namespace).await
        }
        _ => Err(ApiError::MethodNotAllowed),
    }
}

async fn create(
    state: &Arc<ServerState>,
    request: &ResourceRequest,
    kind: &dyn Kind,
    namespace: Option<&str>,
) -> Result<Reply, ApiError> {
    let mode = request.query.write_mode("CreateOptions")?;
    let validation = request.query.field_validation("CreateOptions")?;
    if let Some(why) = kind.create_disabled_reason() {
        return Err(ApiError::CreateNotAllowed(why));
    }
    let manager = request.query.field_manager("CreateOptions", &request.user_agent)?;
    let DecodedBody { mut object, warnings, encoded } = decode::decode_body(request, kind, validation)?;
    let tracker = OwnershipTracker::new(kind, ObjectPart::Main, Operation::Update, &manager);
    let owners = tracker.owners_after_create(&mut *object, encoded.as_deref());
    let written = write::insert(state, &request.actor, kind, namespace, ManagedObject { object, owners }, mode).await?;
    Ok(read::render_written(request, kind, StatusCode::CREATED, written)?.with_warnings(warnings))
}

async fn object(state: &Arc<ServerState>, request: &ResourceRequest, at: ObjectAddress<'_>) -> Result<Reply, ApiError> {
    match request.method {
        Method::GET => read::get(state, request, at).await,
        Method::PUT => match update::put(state, request, at, ObjectPart::Main).await {
            Err(ApiError::NotFound { .. }) if at.descriptor().put_missing == PutMissing::Creates => {
                let validation = request.query.field_validation("UpdateOptions")?;
                let DecodedBody { mut object, warnings, .. } = decode::decode_body(request, at.kind, validation)?;
                object.meta_mut().name = Some(at.name.into());
                let manager = request.query.field_manager("UpdateOptions", &request.user_agent)?;
                let owners = OwnershipTracker::new(at.kind, ObjectPart::Main, Operation::Update, &manager)
                    .owners_after_create(&mut *object, None);
                let mode = request.query.write_mode("UpdateOptions")?;
                let document = ManagedObject { object, owners };
                let written = write::insert(state, &request.actor, at.kind, at.namespace, document, mode).await?;
                Ok(read::render_written(request, at.kind, StatusCode::CREATED, written)?.with_warnings(warnings))
            }
            other => other,
        },
        Method::PATCH => update::patch(state, request, at, ObjectPart::Main).await,
        Method::DELETE => delete::delete(state, request, at).await,
        _ => Err(ApiError::MethodNotAllowed),
    }
}

async fn status(state: &Arc<ServerState>, request: &ResourceRequest, at: ObjectAddress<'_>) -> Result<Reply, ApiError> {
    match request.method {
        Method::GET => read::get(state, request, at).await,
        Method::PUT => update::put(state, request, at, ObjectPart::Status).await,
        Method::PATCH => update::patch(state, request, at, ObjectPart::Status).await,
        _ => Err(ApiError::MethodNotAllowed),
    }
}

/// Always an error that says why there is no log: containers are not run yet.
async fn pod_log(state: &ServerState, request: &ResourceRequest, at: ObjectAddress<'_>) -> Result<Reply, ApiError> {
    let entry = state.store_of(at.kind).get(&at.key()).await?.ok_or_else(|| at.not_found())?;
    let object = decode_stored(at.kind, &entry)?;
    let spec = typed::<Pod>(&*object).spec.clone().unwrap_or_default();
    let names: Vec<&str> =
        spec.init_containers.iter().flatten().chain(&spec.containers).map(|c| c.name.as_str()).collect();
    let pod = at.name;
    let why = match (request.query.get("container").filter(|c| !c.is_empty()), names.as_slice()) {
        (Some(wanted), names) if !names.contains(&wanted) => format!("container {wanted} is not valid for pod {pod}"),
        (None, [_, _, ..]) => {
            format!("a container name must be specified for pod {pod}, choose one of: [{}]", names.join(" "))
        }
        _ if spec.node_name.as_deref().unwrap_or_default().is_empty() => {
            format!("pod {pod} does not have a host assigned")
        }
        (wanted, names) => {
            let container = wanted.or(names.first().copied()).unwrap_or_default();
            format!("container {container:?} in pod {pod:?} is waiting to start: containers are not run here")
        }
    };
    Err(ApiError::BadRequest(why))
}

/// The longest key prefix that contains every object the selector can match: one key if the selector requires a name.
fn selected_prefix(kind: &dyn Kind, namespace: Option<&str>, selector: &Selector) -> String {
    match (selector.name(), namespace) {
        (Some(name), Some(_)) => kind.descriptor().key(namespace, name),
        (Some(name), None) if !kind.descriptor().namespaced => kind.descriptor().key(None, name),
        _ => kind.descriptor().prefix(namespace),
    }
}
