//! What each verb does, for any kind. A verb decodes its options, runs the common rules, admission and the kind's
//! strategy, and writes to the store with compare-and-swap.

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

use crate::api::Api;
use crate::http::Call;
use crate::http::reply::Reply;
use cleat_apimachinery::descriptor::PutMissing;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_ownership::Operation;
use cleat_apimachinery::kind::{Kind, typed};
use cleat_apimachinery::managed_fields::{Document, Tracker, decode as decode_stored};
use cleat_apimachinery::selector::Selector;
use cleat_auth::request_info::ResourcePath;
use decode::Sent;

pub(crate) async fn dispatch(api: &Arc<Api>, call: Call, target: &ResourcePath) -> Result<Reply, ApiError> {
    let kinds = api.kinds();
    let redirected = binding::is_collection(&call, target).then(|| binding::redirected(&call, target)).transpose()?;
    let target = redirected.as_ref().unwrap_or(target);
    let kind = kinds.find(&target.group, &target.version, &target.plural).ok_or(ApiError::NoSuchResource)?;
    let mut reply = perform(api, call, target, kind).await?;
    reply.warnings.extend(kind.deprecation().map(Into::into));
    Ok(reply)
}

async fn perform(api: &Arc<Api>, call: Call, target: &ResourcePath, kind: &Arc<dyn Kind>) -> Result<Reply, ApiError> {
    let d = kind.descriptor();
    let namespace = target.namespace.as_deref();
    if namespace.is_some() && !d.namespaced {
        return Err(ApiError::NoSuchResource);
    }
    let Some(name) = target.name.as_deref() else {
        return collection(api, &call, kind, namespace).await;
    };
    if d.namespaced && namespace.is_none() {
        return Err(ApiError::NoSuchResource);
    }
    let at = ObjectAddress { kind: &**kind, namespace, name };
    match target.subresource.as_deref() {
        None => object(api, &call, at).await,
        Some("status") if d.has_status => status(api, &call, at).await,
        Some("scale") if let Some(paths) = &d.scale => scale::scale(api, &call, at, paths).await,
        Some("log") if d.plural == "pods" && d.group.is_empty() => match call.method {
            Method::GET => log(api, &call, at).await,
            _ => Err(ApiError::MethodNotAllowed),
        },
        Some("binding") if d.plural == "pods" && d.group.is_empty() => match call.method {
            Method::POST => binding::bind(api, &call, at).await,
            _ => Err(ApiError::MethodNotAllowed),
        },
        Some("token") if d.plural == "serviceaccounts" && d.group.is_empty() => match call.method {
            Method::POST => crate::review::request_token(api, &call, at).await,
            _ => Err(ApiError::MethodNotAllowed),
        },
        Some("finalize") if d.plural == "namespaces" => match call.method {
            Method::PUT => update::put(api, &call, at, ObjectPart::Finalize).await,
            _ => Err(ApiError::MethodNotAllowed),
        },
        Some(_) => Err(ApiError::NoSuchResource),
    }
}

async fn collection(
    api: &Arc<Api>,
    call: &Call,
    kind: &Arc<dyn Kind>,
    namespace: Option<&str>,
) -> Result<Reply, ApiError> {
    let d = kind.descriptor();
    let whole = !d.namespaced || namespace.is_some();
    match call.method {
        Method::GET => {
            let options = call.query.list_options()?;
            match options.watch {
                true => watch::watch(api, call, kind, namespace, options).await,
                false => list::list(api, call, kind, namespace, options).await,
            }
        }
        Method::POST if whole => create(api, call, &**kind, namespace).await,
        Method::DELETE if whole && d.verbs().contains(&"deletecollection") => {
            delete::delete_collection(api, call, kind, namespace).await
        }
        _ => Err(ApiError::MethodNotAllowed),
    }
}

async fn create(api: &Arc<Api>, call: &Call, kind: &dyn Kind, namespace: Option<&str>) -> Result<Reply, ApiError> {
    let effect = call.query.effect("CreateOptions")?;
    let validation = call.query.field_validation("CreateOptions")?;
    if let Some(why) = kind.closed() {
        return Err(ApiError::NotAllowedNow(why));
    }
    let manager = call.query.field_manager("CreateOptions", &call.agent)?;
    let Sent { mut object, warnings, text } = decode::body(call, kind, validation)?;
    let tracker = Tracker::new(kind, ObjectPart::Main, Operation::Update, &manager);
    let owners = tracker.created(&mut *object, text.as_deref());
    let written = write::insert(api, &call.actor, kind, namespace, Document { object, owners }, effect).await?;
    Ok(read::written(call, kind, StatusCode::CREATED, written)?.with_warnings(warnings))
}

async fn object(api: &Arc<Api>, call: &Call, at: ObjectAddress<'_>) -> Result<Reply, ApiError> {
    match call.method {
        Method::GET => read::get(api, call, at).await,
        Method::PUT => match update::put(api, call, at, ObjectPart::Main).await {
            Err(ApiError::NotFound { .. }) if at.descriptor().put_missing == PutMissing::Creates => {
                let validation = call.query.field_validation("UpdateOptions")?;
                let Sent { mut object, warnings, .. } = decode::body(call, at.kind, validation)?;
                object.meta_mut().name = Some(at.name.into());
                let manager = call.query.field_manager("UpdateOptions", &call.agent)?;
                let owners =
                    Tracker::new(at.kind, ObjectPart::Main, Operation::Update, &manager).created(&mut *object, None);
                let effect = call.query.effect("UpdateOptions")?;
                let document = Document { object, owners };
                let written = write::insert(api, &call.actor, at.kind, at.namespace, document, effect).await?;
                Ok(read::written(call, at.kind, StatusCode::CREATED, written)?.with_warnings(warnings))
            }
            other => other,
        },
        Method::PATCH => update::patch(api, call, at, ObjectPart::Main).await,
        Method::DELETE => delete::delete(api, call, at).await,
        _ => Err(ApiError::MethodNotAllowed),
    }
}

async fn status(api: &Arc<Api>, call: &Call, at: ObjectAddress<'_>) -> Result<Reply, ApiError> {
    match call.method {
        Method::GET => read::get(api, call, at).await,
        Method::PUT => update::put(api, call, at, ObjectPart::Status).await,
        Method::PATCH => update::patch(api, call, at, ObjectPart::Status).await,
        _ => Err(ApiError::MethodNotAllowed),
    }
}

/// Logs are with the node, and nothing runs there yet; so far only why there are none can be told.
async fn log(api: &Api, call: &Call, at: ObjectAddress<'_>) -> Result<Reply, ApiError> {
    let entry = api.of(at.kind).get(&at.key()).await?.ok_or_else(|| at.not_found())?;
    let object = decode_stored(at.kind, &entry)?;
    let spec = typed::<Pod>(&*object).spec.clone().unwrap_or_default();
    let names: Vec<&str> =
        spec.init_containers.iter().flatten().chain(&spec.containers).map(|c| c.name.as_str()).collect();
    let pod = at.name;
    let why = match (call.query.get("container").filter(|c| !c.is_empty()), names.as_slice()) {
        (Some(asked), names) if !names.contains(&asked) => format!("container {asked} is not valid for pod {pod}"),
        (None, [_, _, ..]) => {
            format!("a container name must be specified for pod {pod}, choose one of: [{}]", names.join(" "))
        }
        _ if spec.node_name.as_deref().unwrap_or_default().is_empty() => {
            format!("pod {pod} does not have a host assigned")
        }
        (asked, names) => {
            let container = asked.or(names.first().copied()).unwrap_or_default();
            format!("container {container:?} in pod {pod:?} is waiting to start: containers are not run here")
        }
    };
    Err(ApiError::BadRequest(why))
}

/// The key prefix that holds everything a selector can match.
fn narrowed(kind: &dyn Kind, namespace: Option<&str>, selector: &Selector) -> String {
    match (selector.name(), namespace) {
        (Some(name), Some(_)) => kind.descriptor().key(namespace, name),
        (Some(name), None) if !kind.descriptor().namespaced => kind.descriptor().key(None, name),
        _ => kind.descriptor().prefix(namespace),
    }
}
