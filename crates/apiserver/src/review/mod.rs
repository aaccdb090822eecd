//! Reviews: questions about tokens and rights that are answered and never stored. They look like resources that can
//! only be created.

mod access;
mod token;

pub(crate) use token::request as request_token;

use std::sync::{Arc, LazyLock};

use http::{Method, StatusCode};
use k8s_openapi::api::authentication::v1::{SelfSubjectReview, SelfSubjectReviewStatus, UserInfo};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http::ResourceRequest;
use crate::http::reply::{JSON, Reply};
use crate::state::ServerState;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::{ApiError, GroupKind};
use cleat_apimachinery::field::FieldError;
use cleat_auth::authenticate::Caller;
use cleat_auth::request_info::ResourcePath;

const AUTHENTICATION: &str = "authentication.k8s.io";
const AUTHORIZATION: &str = "authorization.k8s.io";

static DESCRIPTORS: LazyLock<Vec<Descriptor>> = LazyLock::new(|| {
    let of = |group, kind, plural| Descriptor::new(group, "v1", kind, plural).only_created();
    vec![
        of(AUTHENTICATION, "SelfSubjectReview", "selfsubjectreviews").cluster_scoped(),
        of(AUTHENTICATION, "TokenReview", "tokenreviews").cluster_scoped(),
        of(AUTHORIZATION, "LocalSubjectAccessReview", "localsubjectaccessreviews"),
        of(AUTHORIZATION, "SelfSubjectAccessReview", "selfsubjectaccessreviews").cluster_scoped(),
        of(AUTHORIZATION, "SelfSubjectRulesReview", "selfsubjectrulesreviews").cluster_scoped(),
        of(AUTHORIZATION, "SubjectAccessReview", "subjectaccessreviews").cluster_scoped(),
    ]
});

/// What discovery tells about reviews.
pub(crate) fn descriptors() -> &'static [Descriptor] {
    &DESCRIPTORS
}

/// The review a path names, if it names one.
pub(crate) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Descriptor> {
    DESCRIPTORS.iter().find(|d| d.group == group && d.version == version && d.plural == plural)
}

pub(crate) fn is_group(group: &str, version: &str) -> bool {
    DESCRIPTORS.iter().any(|d| d.group == group && d.version == version)
}

pub(crate) async fn answer(
    api: &Arc<ServerState>,
    call: &ResourceRequest,
    caller: &Caller,
    target: &ResourcePath,
) -> Result<Reply, ApiError> {
    let d = find(&target.group, &target.version, &target.plural).ok_or(ApiError::NoSuchResource)?;
    if target.name.is_some() || target.namespace.is_some() != d.namespaced {
        return Err(ApiError::NoSuchResource);
    }
    if call.method != Method::POST {
        return Err(ApiError::MethodNotAllowed);
    }
    call.query.write_mode("CreateOptions")?;
    match d.kind.as_str() {
        "SelfSubjectReview" => {
            let mut review: SelfSubjectReview = body(call, d)?;
            review.metadata.creation_timestamp = Some(k8s_time(cleat_apimachinery::meta::now()));
            review.status = Some(SelfSubjectReviewStatus { user_info: Some(user_info(caller)) });
            created(&review)
        }
        "TokenReview" => token::review(api, call, d).await,
        "LocalSubjectAccessReview" => {
            access::local(api, call, d, target.namespace.as_deref().unwrap_or_default()).await
        }
        "SelfSubjectAccessReview" => access::own(api, call, d, caller).await,
        "SelfSubjectRulesReview" => access::rules(api, call, d, caller).await,
        _ => access::subject(api, call, d).await,
    }
}

fn k8s_time(at: jiff::Timestamp) -> k8s_openapi::apimachinery::pkg::apis::meta::v1::Time {
    k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at)
}

fn user_info(caller: &Caller) -> UserInfo {
    UserInfo {
        username: Some(caller.name.clone()),
        uid: Some(caller.uid.clone()).filter(|u| !u.is_empty()),
        groups: Some(caller.groups.clone()),
        extra: Some(caller.extra.clone()).filter(|e| !e.is_empty()),
    }
}

fn created(object: &impl Serialize) -> Result<Reply, ApiError> {
    let body = serde_json::to_vec(object).map_err(|e| ApiError::Internal(e.to_string()))?;
    Ok(Reply::bytes(StatusCode::CREATED, body))
}

fn invalid<T>(d: &Descriptor, error: FieldError) -> Result<T, ApiError> {
    Err(ApiError::invalid(d, "", vec![error]))
}

/// The body, which must be of the kind the URL names, if it says what it is.
fn body<T: DeserializeOwned>(call: &ResourceRequest, d: &Descriptor) -> Result<T, ApiError> {
    let media = call.content_type.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !matches!(media, "" | "*/*" | JSON) {
        return Err(ApiError::UnsupportedMediaType(JSON));
    }
    let unreadable = |e: String| {
        ApiError::BadRequest(format!("{0} in version {1:?} cannot be handled as a {0}: {e}", d.kind, d.version))
    };
    let mut value: serde_json::Value =
        serde_json::from_slice(call.encoded_body()).map_err(|e| unreadable(e.to_string()))?;
    let object = value.as_object_mut().ok_or_else(|| unreadable("it is not an object".into()))?;
    for (key, wanted) in [("apiVersion", d.api_version()), ("kind", d.kind.clone())] {
        let sent = object.get(key).and_then(|v| v.as_str()).unwrap_or_default();
        if !sent.is_empty() && sent != wanted {
            return Err(ApiError::BadRequest(format!(
                "the {key} in the data ({sent}) does not match the expected {key} ({wanted})"
            )));
        }
        object.insert(key.into(), wanted.into());
    }
    // The types have every one of these, but leave out a `null`.
    object.retain(|_, value| !value.is_null());
    object.entry("metadata").or_insert_with(|| serde_json::json!({}));
    serde_json::from_value(value).map_err(|e| unreadable(e.to_string()))
}

/// What an error about a body names when it has no descriptor of its own.
fn group_kind(group: &str, kind: &str) -> GroupKind {
    GroupKind { group: group.into(), kind: kind.into() }
}
