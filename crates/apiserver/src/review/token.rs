//! TokenRequest, which issues a token for a service account, and TokenReview, which verifies one.

use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, TokenRequest, TokenRequestStatus, TokenReview, TokenReviewStatus,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::Deserialize;

use super::{AUTHENTICATION, decode_body, reply_created, user_info};
use crate::http::ResourceRequest;
use crate::http::query::WriteMode;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::error::{ApiError, GroupKind};
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::meta;
use cleat_auth::actor::Actor;
use cleat_auth::authenticate::Caller;
use cleat_auth::authenticate::service_account::user_name;
use cleat_auth::authenticate::token::{BoundObject, ISSUER, KubernetesClaims, TokenClaims};

const DEFAULT_LIFETIME_SECONDS: i64 = 3600;
const MIN_LIFETIME_SECONDS: i64 = 600;
const MAX_LIFETIME_SECONDS: i64 = 1 << 32;
/// The lifetime that kubelets request for the default token volume of pods. Old clients read the file only once, so
/// such a token gets the extended lifetime; its claim `warnafter` has the time at which the requested lifetime ends.
const POD_VOLUME_LIFETIME_SECONDS: i64 = 3607;
const EXTENDED_LIFETIME_SECONDS: i64 = 365 * 86_400;

#[derive(Deserialize)]
struct PartialObjectMetadata {
    metadata: ObjectMeta,
}

pub(super) async fn review_token(api: &ServerState, call: &ResourceRequest, d: &Descriptor) -> Result<Reply, ApiError> {
    let mut review: TokenReview = decode_body(call, d)?;
    if review.spec.token.is_empty() {
        return Err(ApiError::BadRequest("token is required for TokenReview in authentication".into()));
    }
    let audiences = review.spec.audiences.clone().filter(|a| !a.is_empty()).unwrap_or_else(|| vec![ISSUER.into()]);
    review.status = Some(match api.security.authenticator.verify_token(&review.spec.token, &audiences).await {
        Ok(verified) => TokenReviewStatus {
            authenticated: Some(true),
            user: Some(user_info(&verified.caller)),
            audiences: Some(verified.audiences),
            error: None,
        },
        Err(error) => TokenReviewStatus {
            authenticated: None,
            user: Some(Default::default()),
            audiences: None,
            error: Some(error.to_string()),
        },
    });
    reply_created(&review)
}

/// `POST …/serviceaccounts/NAME/token`: issues a token. A dry run has an empty one.
pub(crate) async fn request_token(
    api: &ServerState,
    call: &ResourceRequest,
    at: ObjectAddress<'_>,
) -> Result<Reply, ApiError> {
    let mode = call.query.write_mode("CreateOptions")?;
    let descriptor = Descriptor::new(AUTHENTICATION, "v1", "TokenRequest", "tokenrequests");
    let mut request: TokenRequest = decode_body(call, &descriptor)?;
    let namespace = at.namespace.unwrap_or_default();
    let entry = api.store.get(&at.key()).await?.ok_or_else(|| at.not_found())?;
    let found: PartialObjectMetadata =
        serde_json::from_slice(&entry.value).map_err(|e| ApiError::Internal(e.to_string()))?;
    let spec = request.spec.get_or_insert_default();
    let audiences = spec.audiences.take().filter(|a| !a.is_empty()).unwrap_or_else(|| vec![ISSUER.into()]);
    let seconds = spec.expiration_seconds.unwrap_or(DEFAULT_LIFETIME_SECONDS);
    check_lifetime(seconds)?;
    let account_uid = found.metadata.uid.unwrap_or_default();
    let mut kubernetes = KubernetesClaims {
        namespace: namespace.into(),
        serviceaccount: BoundObject { name: at.name.into(), uid: account_uid.clone() },
        ..KubernetesClaims::default()
    };
    bind(api, at, spec.bound_object_ref.as_ref(), &mut kubernetes).await?;
    check_node_may_request(&call.actor, at, &kubernetes)?;
    let now = meta::now();
    let start = now.as_second();
    let is_extended = seconds == POD_VOLUME_LIFETIME_SECONDS && kubernetes.pod.is_some() && audiences == [ISSUER];
    kubernetes.warnafter = is_extended.then_some(start + POD_VOLUME_LIFETIME_SECONDS);
    let claims = TokenClaims {
        exp: start + if is_extended { EXTENDED_LIFETIME_SECONDS } else { seconds },
        iat: start,
        nbf: start,
        iss: ISSUER.into(),
        jti: uuid::Uuid::new_v4().to_string(),
        sub: user_name(namespace, at.name),
        aud: audiences.clone(),
        kubernetes,
    };
    let sign = || {
        api.security
            .authenticator
            .signer
            .sign(&claims)
            .ok_or_else(|| ApiError::Internal("the token cannot be signed".into()))
    };
    let token = if mode == WriteMode::DryRun { String::new() } else { sign()? };
    spec.audiences = Some(audiences);
    spec.expiration_seconds = Some(seconds);
    // The client sees the lifetime that it requested, also if the token lives longer.
    let expiration = jiff::Timestamp::from_second(start + seconds).unwrap_or(jiff::Timestamp::MAX);
    request.status = Some(TokenRequestStatus { token: Some(token), expiration_timestamp: Some(Time(expiration)) });
    request.metadata = ObjectMeta {
        name: Some(at.name.into()),
        namespace: Some(namespace.into()),
        uid: Some(account_uid),
        creation_timestamp: Some(Time(now)),
        ..ObjectMeta::default()
    };
    reply_created(&request)
}

fn check_lifetime(seconds: i64) -> Result<(), ApiError> {
    let why = match seconds {
        short if short < MIN_LIFETIME_SECONDS => "may not specify a duration less than 10 minutes",
        long if long > MAX_LIFETIME_SECONDS => "may not specify a duration larger than 2^32 seconds",
        _ => return Ok(()),
    };
    let errors = vec![FieldError::invalid("spec.expirationSeconds", seconds, why)];
    let kind = GroupKind { group: AUTHENTICATION.into(), kind: "TokenRequest".into() };
    Err(ApiError::Invalid { kind, name: String::new(), errors })
}

/// Adds the object that the token is to be bound to, which must exist, to the claims.
async fn bind(
    api: &ServerState,
    at: ObjectAddress<'_>,
    wanted: Option<&BoundObjectReference>,
    claims: &mut KubernetesClaims,
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
    let found: PartialObjectMetadata = serde_json::from_slice(&entry.value).map_err(damaged)?;
    let uid = found.metadata.uid.unwrap_or_default();
    if let Some(sent) = wanted.uid.as_deref().filter(|u| !u.is_empty() && *u != uid) {
        let why = format!(
            "the UID in the bound object reference ({sent}) does not match the UID in record. The object might have been \
             deleted and then recreated"
        );
        return Err(ApiError::conflict(d, name, why));
    }
    let reference = Some(BoundObject { name: name.into(), uid });
    match plural {
        "pods" => {
            let spec = serde_json::from_slice::<Pod>(&entry.value).map_err(damaged)?.spec.unwrap_or_default();
            if spec.service_account_name.as_deref() != Some(at.name) {
                let why = "to pod running with different serviceaccount name.";
                return Err(ApiError::BadRequest(format!("cannot bind token for serviceaccount {:?} {why}", at.name)));
            }
            claims.pod = reference;
            if let Some(node) = spec.node_name.filter(|n| !n.is_empty()) {
                claims.node = Some(node_reference(api, node).await?);
            }
        }
        "secrets" => claims.secret = reference,
        _ => claims.node = reference,
    }
    Ok(())
}

/// Name and uid of the node. The uid is empty if the node does not exist.
async fn node_reference(api: &ServerState, name: String) -> Result<BoundObject, ApiError> {
    let kinds = api.kinds();
    let kind = kinds.find("", "v1", "nodes").ok_or(ApiError::NoSuchResource)?;
    let entry = api.store.get(&kind.descriptor().key(None, &name)).await?;
    let node = entry.and_then(|e| serde_json::from_slice::<PartialObjectMetadata>(&e.value).ok());
    Ok(BoundObject { name, uid: node.and_then(|n| n.metadata.uid).unwrap_or_default() })
}

/// A node may request only tokens that are bound to pods assigned to it.
fn check_node_may_request(actor: &Actor, at: ObjectAddress<'_>, claims: &KubernetesClaims) -> Result<(), ApiError> {
    let Some(node) = actor.caller().and_then(Caller::node_name) else { return Ok(()) };
    let why = match (&claims.pod, &claims.node) {
        (None, _) => format!("node requested token not bound to a pod: {node:?}"),
        (Some(_), Some(found)) if found.name == node => return Ok(()),
        (Some(_), _) => "node requested token bound to a pod scheduled on a different node".into(),
    };
    Err(ApiError::forbidden(at.descriptor(), at.name, why))
}
