//! Acting as somebody else (`kubectl --as`): who may, and as whom.

use std::sync::Arc;

use http::HeaderMap;
use percent_encoding::percent_decode_str;

use crate::authenticate::{ANONYMOUS, AUTHENTICATED, Caller, UNAUTHENTICATED};
use crate::authorize::{Attributes, Authorizer, What};
use cleat_apimachinery::error::ApiError;

const USER: &str = "impersonate-user";
const GROUP: &str = "impersonate-group";
const UID: &str = "impersonate-uid";
const EXTRA: &str = "impersonate-extra-";

/// The caller the request is to be judged as: itself, unless its headers name another and it may act as that one.
pub async fn effective(
    authorizer: &Authorizer,
    caller: Arc<Caller>,
    headers: &HeaderMap,
) -> Result<Arc<Caller>, ApiError> {
    let Some(wanted) = wanted(headers)? else { return Ok(caller) };
    let mut needed: Vec<(&str, String, Option<String>, String)> = Vec::new();
    match account(&wanted.name) {
        Some((namespace, name)) => {
            needed.push(("", "serviceaccounts".into(), Some(namespace.into()), name.into()));
        }
        None => needed.push(("", "users".into(), None, wanted.name.clone())),
    }
    needed.extend(wanted.groups.iter().map(|g| ("", "groups".into(), None, g.clone())));
    let group = "authentication.k8s.io";
    if !wanted.uid.is_empty() {
        needed.push((group, "uids".into(), None, wanted.uid.clone()));
    }
    for (key, values) in &wanted.extra {
        needed.extend(values.iter().map(|value| (group, format!("userextras/{key}"), None, value.clone())));
    }
    for (group, resource, namespace, name) in &needed {
        let (plural, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let what = What::Resource { group, plural, subresource, namespace: namespace.as_deref(), name };
        authorizer.require(&caller, &Attributes::new("impersonate", what)).await?;
    }
    Ok(Arc::new(complete(wanted)))
}

fn account(user: &str) -> Option<(&str, &str)> {
    user.strip_prefix("system:serviceaccount:")?.split_once(':')
}

/// Adds the groups that follow from the name.
fn complete(mut wanted: Caller) -> Caller {
    if let Some((namespace, _)) = account(&wanted.name).filter(|_| wanted.groups.is_empty()) {
        wanted.groups = vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")];
    }
    let base = if wanted.name == ANONYMOUS { UNAUTHENTICATED } else { AUTHENTICATED };
    if !wanted.is_in(base) {
        wanted.groups.push(base.into());
    }
    wanted
}

fn wanted(headers: &HeaderMap) -> Result<Option<Caller>, ApiError> {
    if !headers.keys().any(|k| k.as_str().starts_with("impersonate-")) {
        return Ok(None);
    }
    let unreadable = || ApiError::BadRequest("the impersonation headers cannot be read".into());
    let text = |value: &http::HeaderValue| value.to_str().map(str::to_owned).map_err(|_| unreadable());
    let mut found = Caller::default();
    for (name, value) in headers {
        match name.as_str() {
            USER => found.name = text(value)?,
            GROUP => found.groups.push(text(value)?),
            UID => found.uid = text(value)?,
            other => {
                if let Some(key) = other.strip_prefix(EXTRA) {
                    let key = percent_decode_str(key).decode_utf8().map_err(|_| unreadable())?.to_lowercase();
                    found.extra.entry(key).or_default().push(text(value)?);
                }
            }
        }
    }
    if found.name.is_empty() {
        return Err(ApiError::Internal("requested impersonation without a user name".into()));
    }
    Ok(Some(found))
}
