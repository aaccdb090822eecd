//! Making tokens for service accounts, and telling others whether a token is good.

use cleat_apimachinery::address::ObjectAddress;
use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, TokenRequest, TokenRequestStatus, TokenReview, TokenReviewStatus,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::{AUTHENTICATION, body, created, group_kind, k8s_time, user_info};
use crate::http::ResourceRequest;
use crate::http::query::WriteMode;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::meta;
use cleat_auth::actor::Actor;
use cleat_auth::authenticate::Caller;
use cleat_auth::authenticate::account::user_name;
use cleat_auth::authenticate::token::{Bound, Claims, ISSUER, Reference};

const DEFAULT: i64 = 3600;
const SHORTEST: i64 = 600;
const LONGEST: i64 = 1 << 32;
/// What the volumes that old clients get their tokens from ask for. Such clients may never read the file again, so the
/// token lives on; it says when it should have been renewed.
const WARNED: i64 = 3607;
const EXTENDED: i64 = 365 * 86_400;

#[derive(Deserialize)]
struct Head {
    metadata: ObjectMeta,
}

pub(super) async fn review(api: &ServerState, call: &ResourceRequest, d: &Descriptor) -> Result<Reply, ApiError> {
    let mut review: TokenReview = body(call, d)?;
    if review.spec.token.is_empty() {
        return Err(ApiError::BadRequest("token is required for TokenReview in authentication".into()));
    }
    let audiences = review.spec.audiences.clone().filter(|a| !a.is_empty()).unwrap_or_else(|| vec![ISSUER.into()]);
    review.status = Some(match api.security.authenticator.check_token(&review.spec.token, &audiences).await {
        Ok(found) => TokenReviewStatus {
            authenticated: Some(true),
            user: Some(user_info(&found.caller)),
            audiences: Some(found.audiences),
            error: None,
        },
        Err(error) => TokenReviewStatus {
            authenticated: None,
            user: Some(Default::default()),
            audiences: None,
            error: Some(error.to_string()),
        },
    });
    created(&review)
}

/// `POST …/serviceaccounts/NAME/token`
pub(crate) async fn request(
    api: &ServerState,
    call: &ResourceRequest,
    at: ObjectAddress<'_>,
) -> Result<Reply, ApiError> {
    let effect = call.query.write_mode("CreateOptions")?;
    let descriptor = Descriptor::new(AUTHENTICATION, "v1", "TokenRequest", "tokenrequests");
    let mut request: TokenRequest = body(call, &descriptor)?;
    let namespace = at.namespace.unwrap_or_default();
    let entry = api.store.get(&at.key()).await?.ok_or_else(|| at.not_found())?;
    let found: Head = serde_json::from_slice(&entry.value).map_err(|e| ApiError::Internal(e.to_string()))?;
    let spec = request.spec.get_or_insert_default();
    let audiences = spec.audiences.take().filter(|a| !a.is_empty()).unwrap_or_else(|| vec![ISSUER.into()]);
    let seconds = spec.expiration_seconds.unwrap_or(DEFAULT);
    check_duration(seconds)?;
    let account_uid = found.metadata.uid.unwrap_or_default();
    let mut bound = Bound {
        namespace: namespace.into(),
        serviceaccount: Reference { name: at.name.into(), uid: account_uid.clone() },
        ..Bound::default()
    };
    bind(api, at, spec.bound_object_ref.as_ref(), &mut bound).await?;
    check_node(&call.actor, at, &bound)?;
    let now = meta::now();
    let start = now.as_second();
    let extended = seconds == WARNED && bound.pod.is_some() && audiences == [ISSUER];
    bound.warnafter = extended.then_some(start + WARNED);
    let claims = Claims {
        exp: start + if extended { EXTENDED } else { seconds },
        iat: start,
        nbf: start,
        iss: ISSUER.into(),
        jti: uuid::Uuid::new_v4().to_string(),
        sub: user_name(namespace, at.name),
        aud: audiences.clone(),
        bound,
    };
    let signed = || {
        api.security
            .authenticator
            .signer
            .sign(&claims)
            .ok_or_else(|| ApiError::Internal("the token cannot be signed".into()))
    };
    let token = if effect == WriteMode::DryRun { String::new() } else { signed()? };
    spec.audiences = Some(audiences);
    spec.expiration_seconds = Some(seconds);
    let shown = jiff::Timestamp::from_second(start + seconds).unwrap_or(jiff::Timestamp::MAX);
    request.status = Some(TokenRequestStatus { token: Some(token), expiration_timestamp: Some(k8s_time(shown)) });
    request.metadata = ObjectMeta {
        name: Some(at.name.into()),
        namespace: Some(namespace.into()),
        uid: Some(account_uid),
        creation_timestamp: Some(k8s_time(now)),
        ..ObjectMeta::default()
    };
    created(&request)
}

fn check_duration(seconds: i64) -> Result<(), ApiError> {
    let why = match seconds {
        short if short < SHORTEST => "may not specify a duration less than 10 minutes",
        long if long > LONGEST => "may not specify a duration larger than 2^32 seconds",
        _ => return Ok(()),
    };
    let errors = vec![FieldError::invalid("spec.expirationSeconds", seconds, why)];
    Err(ApiError::Invalid { kind: group_kind(AUTHENTICATION, "TokenRequest"), name: String::new(), errors })
}

async fn bind(
    api: &ServerState,
    at: ObjectAddress<'_>,
    wanted: Option<&BoundObjectReference>,
    bound: &mut Bound,
) -> Result<(), ApiError> {
    let Some(wanted) = wanted else { return Ok(()) };
    let (kind, version) = (wanted.kind.as_deref().unwrap_or_default(), wanted.api_version.as_deref().unwrap_or("v1"));
    let (plural, namespace) = match (kind, version) {
        ("Pod", "v1") => ("pods", at.namespace),
        ("Secret", "v1") => ("secrets", at.namespace),
        ("Node", "v1") => ("nodes", None),
        _ => {
            let (group, version) = version.split_once('/').unwrap_or(("", version));
            let why = format!("cannot bind token to object of type {group}/{version}, Kind={kind}");
            return Err(ApiError::BadRequest(why));
        }
    };
    let name = wanted.name.as_deref().unwrap_or_default();
    let kinds = api.kinds();
    let kind = kinds.find("", "v1", plural).ok_or(ApiError::NoSuchResource)?;
    let d = kind.descriptor();
    let entry = api.store.get(&d.key(namespace, name)).await?.ok_or_else(|| ApiError::not_found(d, name))?;
    let damaged = |e: serde_json::Error| ApiError::Internal(e.to_string());
    let found: Head = serde_json::from_slice(&entry.value).map_err(damaged)?;
    let uid = found.metadata.uid.unwrap_or_default();
    if let Some(sent) = wanted.uid.as_deref().filter(|u| !u.is_empty() && *u != uid) {
        let why = format!(
            "the UID in the bound object reference ({sent}) does not match the UID in record. The object might have been \
             deleted and then recreated"
        );
        return Err(ApiError::conflict(d, name, why));
    }
    let reference = Some(Reference { name: name.into(), uid });
    match plural {
        "pods" => {
            let spec = serde_json::from_slice::<Pod>(&entry.value).map_err(damaged)?.spec.unwrap_or_default();
            if spec.service_account_name.as_deref() != Some(at.name) {
                let why = "to pod running with different serviceaccount name.";
                return Err(ApiError::BadRequest(format!("cannot bind token for serviceaccount {:?} {why}", at.name)));
            }
            bound.pod = reference;
            if let Some(node) = spec.node_name.filter(|n| !n.is_empty()) {
                bound.node = Some(node_reference(api, node).await?);
            }
        }
        "secrets" => bound.secret = reference,
        _ => bound.node = reference,
    }
    Ok(())
}

async fn node_reference(api: &ServerState, name: String) -> Result<Reference, ApiError> {
    let kinds = api.kinds();
    let kind = kinds.find("", "v1", "nodes").ok_or(ApiError::NoSuchResource)?;
    let entry = api.store.get(&kind.descriptor().key(None, &name)).await?;
    let head = entry.and_then(|e| serde_json::from_slice::<Head>(&e.value).ok());
    Ok(Reference { name, uid: head.and_then(|h| h.metadata.uid).unwrap_or_default() })
}

/// A node gets tokens only for the pods it runs.
fn check_node(actor: &Actor, at: ObjectAddress<'_>, bound: &Bound) -> Result<(), ApiError> {
    let Some(node) = actor.caller().and_then(Caller::node) else { return Ok(()) };
    let why = match (&bound.pod, &bound.node) {
        (None, _) => format!("node requested token not bound to a pod: {node:?}"),
        (Some(_), Some(found)) if found.name == node => return Ok(()),
        (Some(_), _) => "node requested token bound to a pod scheduled on a different node".into(),
    };
    Err(ApiError::forbidden(at.descriptor(), at.name, why))
}
