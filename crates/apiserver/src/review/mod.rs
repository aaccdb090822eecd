//! Reviews: resources that can only be created and are never stored. The response to the create has the result in its
//! status.

mod access;
mod token;

pub(crate) use token::request_token;

use std::sync::{Arc, LazyLock};

use http::{Method, StatusCode};
use k8s_openapi::api::authentication::v1::{SelfSubjectReview, SelfSubjectReviewStatus, UserInfo};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::http::ResourceRequest;
use crate::http::reply::{JSON, Reply};
use crate::state::ServerState;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::meta;
use cleat_auth::authenticate::Caller;
use cleat_auth::request_info::ResourcePath;

const AUTHENTICATION: &str = "authentication.k8s.io";
const AUTHORIZATION: &str = "authorization.k8s.io";

static DESCRIPTORS: LazyLock<Vec<Descriptor>> = LazyLock::new(|| {
    let review = |group, kind, plural| Descriptor::new(group, "v1", kind, plural).create_only();
    vec![
        review(AUTHENTICATION, "SelfSubjectReview", "selfsubjectreviews").cluster_scoped(),
        review(AUTHENTICATION, "TokenReview", "tokenreviews").cluster_scoped(),
        review(AUTHORIZATION, "LocalSubjectAccessReview", "localsubjectaccessreviews"),
        review(AUTHORIZATION, "SelfSubjectAccessReview", "selfsubjectaccessreviews").cluster_scoped(),
        review(AUTHORIZATION, "SelfSubjectRulesReview", "selfsubjectrulesreviews").cluster_scoped(),
        review(AUTHORIZATION, "SubjectAccessReview", "subjectaccessreviews").cluster_scoped(),
    ]
});

/// The review resources, for discovery.
pub(crate) fn descriptors() -> &'static [Descriptor] {
    &DESCRIPTORS
}

/// The review resource with this group, version and plural. `None` if there is none.
pub(crate) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Descriptor> {
    DESCRIPTORS.iter().find(|d| d.group == group && d.version == version && d.plural == plural)
}

/// Is there a review resource in this group and version?
pub(crate) fn is_group_version(group: &str, version: &str) -> bool {
    DESCRIPTORS.iter().any(|d| d.group == group && d.version == version)
}

pub(crate) async fn handle(
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
            let mut review: SelfSubjectReview = decode_body(call, d)?;
            review.metadata.creation_timestamp = Some(Time(meta::now()));
            review.status = Some(SelfSubjectReviewStatus { user_info: Some(user_info(caller)) });
            reply_created(&review)
        }
        "TokenReview" => token::review_token(api, call, d).await,
        "LocalSubjectAccessReview" => {
            access::review_local_access(api, call, d, target.namespace.as_deref().unwrap_or_default()).await
        }
        "SelfSubjectAccessReview" => access::review_own_access(api, call, d, caller).await,
        "SelfSubjectRulesReview" => access::review_own_rules(api, call, d, caller).await,
        _ => access::review_access(api, call, d).await,
    }
}

fn user_info(caller: &Caller) -> UserInfo {
    UserInfo {
        username: Some(caller.name.clone()),
        uid: Some(caller.uid.clone()).filter(|u| !u.is_empty()),
        groups: Some(caller.groups.clone()),
        extra: Some(caller.extra.clone()).filter(|e| !e.is_empty()),
    }
}

fn reply_created(object: &impl Serialize) -> Result<Reply, ApiError> {
    let body = serde_json::to_vec(object).map_err(|e| ApiError::Internal(e.to_string()))?;
    Ok(Reply::bytes(StatusCode::CREATED, body))
}

fn invalid<T>(d: &Descriptor, error: FieldError) -> Result<T, ApiError> {
    Err(ApiError::invalid(d, "", vec![error]))
}

/// Decodes the body. Its apiVersion and kind may be missing; otherwise they must be those of the descriptor.
fn decode_body<T: DeserializeOwned>(call: &ResourceRequest, d: &Descriptor) -> Result<T, ApiError> {
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
    // A field that is `null` is the same as a missing one, but not every type accepts `null`.
    object.retain(|_, value| !value.is_null());
    object.entry("metadata").or_insert_with(|| serde_json::json!({}));
    serde_json::from_value(value).map_err(|e| unreadable(e.to_string()))
}
