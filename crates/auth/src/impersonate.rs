//! Impersonation (`kubectl --as`): a request is carried out as another user if the caller may impersonate that user.

use std::sync::Arc;

use http::HeaderMap;
use percent_encoding::percent_decode_str;

use crate::authenticate::{ANONYMOUS_USER, AUTHENTICATED_GROUP, Caller, UNAUTHENTICATED_GROUP};
use crate::authorize::{Attributes, Authorizer, RequestTarget};
use cleat_apimachinery::error::ApiError;

const USER_HEADER: &str = "impersonate-user";
const GROUP_HEADER: &str = "impersonate-group";
const UID_HEADER: &str = "impersonate-uid";
const EXTRA_HEADER_PREFIX: &str = "impersonate-extra-";

/// The caller that the request is carried out as. That is `caller` itself if there are no impersonation headers.
/// Otherwise it is the user of the headers; the caller needs the verb `impersonate` on that user and on each of the
/// groups, the uid and the extra values that the headers name, or the request fails with a 403.
pub async fn effective_caller(
    authorizer: &Authorizer,
    caller: Arc<Caller>,
    headers: &HeaderMap,
) -> Result<Arc<Caller>, ApiError> {
    let Some(impersonated) = parse_headers(headers)? else { return Ok(caller) };
    // Group, resource with subresource, namespace, name.
    let mut needed: Vec<(&str, String, Option<String>, String)> = Vec::new();
    match parse_service_account(&impersonated.name) {
        Some((namespace, name)) => {
            needed.push(("", "serviceaccounts".into(), Some(namespace.into()), name.into()));
        }
        None => needed.push(("", "users".into(), None, impersonated.name.clone())),
    }
    needed.extend(impersonated.groups.iter().map(|g| ("", "groups".into(), None, g.clone())));
    let group = "authentication.k8s.io";
    if !impersonated.uid.is_empty() {
        needed.push((group, "uids".into(), None, impersonated.uid.clone()));
    }
    for (key, values) in &impersonated.extra {
        needed.extend(values.iter().map(|value| (group, format!("userextras/{key}"), None, value.clone())));
    }
    for (group, resource, namespace, name) in &needed {
        let (plural, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let target = RequestTarget::Resource { group, plural, subresource, namespace: namespace.as_deref(), name };
        authorizer.require(&caller, &Attributes::new("impersonate", target)).await?;
    }
    Ok(Arc::new(with_implied_groups(impersonated)))
}

/// Namespace and name of the service account with this user name.
fn parse_service_account(user: &str) -> Option<(&str, &str)> {
    user.strip_prefix("system:serviceaccount:")?.split_once(':')
}

/// Adds the groups that follow from the user name.
fn with_implied_groups(mut caller: Caller) -> Caller {
    if let Some((namespace, _)) = parse_service_account(&caller.name).filter(|_| caller.groups.is_empty()) {
        caller.groups = vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")];
    }
    let implied = if caller.name == ANONYMOUS_USER { UNAUTHENTICATED_GROUP } else { AUTHENTICATED_GROUP };
    if !caller.is_member_of(implied) {
        caller.groups.push(implied.into());
    }
    caller
}

/// The user that the headers name. `None` if there are no impersonation headers.
fn parse_headers(headers: &HeaderMap) -> Result<Option<Caller>, ApiError> {
    if !headers.keys().any(|k| k.as_str().starts_with("impersonate-")) {
        return Ok(None);
    }
    let unreadable = || ApiError::BadRequest("the impersonation headers cannot be read".into());
    let to_string = |value: &http::HeaderValue| value.to_str().map(str::to_owned).map_err(|_| unreadable());
    let mut impersonated = Caller::default();
    for (name, value) in headers {
        match name.as_str() {
            USER_HEADER => impersonated.name = to_string(value)?,
            GROUP_HEADER => impersonated.groups.push(to_string(value)?),
            UID_HEADER => impersonated.uid = to_string(value)?,
            other => {
                if let Some(key) = other.strip_prefix(EXTRA_HEADER_PREFIX) {
                    let key = percent_decode_str(key).decode_utf8().map_err(|_| unreadable())?.to_lowercase();
                    impersonated.extra.entry(key).or_default().push(to_string(value)?);
                }
            }
        }
    }
    if impersonated.name.is_empty() {
        return Err(ApiError::Internal("requested impersonation without a user name".into()));
    }
    Ok(Some(impersonated))
}
