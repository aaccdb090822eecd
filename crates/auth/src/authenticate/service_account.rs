//! Verifies service account tokens against the stored objects: a token is valid only as long as its service account and
//! every object that it is bound to exist with the same uid.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::token::{BoundObject, KubernetesClaims, TokenError, TokenSigner};
use super::{AUTHENTICATED_GROUP, Caller};
use cleat_apimachinery::meta;
use cleat_registry::reader::ObjectReader;

/// How long after the deletion timestamp of a bound object the token is still accepted: pods use their tokens while
/// they terminate.
const DELETION_LEEWAY_SECONDS: i64 = 60;

/// The result of a successful verification.
pub struct VerifiedToken {
    pub caller: Caller,
    /// Those of the requested audiences that the token is issued for.
    pub audiences: Vec<String>,
}

#[derive(Deserialize)]
struct PartialObjectMetadata {
    metadata: ObjectMeta,
}

/// The user name of a service account.
pub fn user_name(namespace: &str, account: &str) -> String {
    format!("system:serviceaccount:{namespace}:{account}")
}

/// Verifies the signature and the claims for one of the audiences, then the objects that the token is bound to.
pub(super) async fn verify_token(
    signer: &TokenSigner,
    objects: &ObjectReader,
    token: &str,
    audiences: &[String],
) -> Result<VerifiedToken, TokenError> {
    let now = meta::now().as_second();
    let (claims, audiences) = signer.verify(token, audiences, now)?;
    let KubernetesClaims { namespace, node, pod, secret, serviceaccount, .. } = &claims.kubernetes;
    check_exists(objects, "serviceaccounts", Some(namespace), serviceaccount, now).await?;
    for (plural, namespace, reference) in
        [("pods", Some(namespace), pod), ("secrets", Some(namespace), secret), ("nodes", None, node)]
    {
        // The token of a pod names the pod's node for information only: it is bound to the pod, not to the node.
        let is_informative = plural == "nodes" && pod.is_some();
        if let Some(reference) = reference.as_ref().filter(|_| !is_informative) {
            check_exists(objects, plural, namespace.map(String::as_str), reference, now).await?;
        }
    }
    let mut extra = BTreeMap::new();
    let mut add = |key: &str, value: String| {
        extra.insert(format!("authentication.kubernetes.io/{key}"), vec![value]);
    };
    add("credential-id", format!("JTI={}", claims.jti));
    for (kind, reference) in [("node", node), ("pod", pod)] {
        if let Some(reference) = reference {
            add(&format!("{kind}-name"), reference.name.clone());
            add(&format!("{kind}-uid"), reference.uid.clone());
        }
    }
    let groups = vec![
        "system:serviceaccounts".into(),
        format!("system:serviceaccounts:{namespace}"),
        AUTHENTICATED_GROUP.into(),
    ];
    let name = user_name(namespace, &serviceaccount.name);
    let caller = Caller { name, uid: serviceaccount.uid.clone(), groups, extra };
    Ok(VerifiedToken { caller, audiences })
}

/// Fails if the object does not exist, has another uid, or should have been gone for longer than the leeway.
async fn check_exists(
    objects: &ObjectReader,
    plural: &str,
    namespace: Option<&str>,
    reference: &BoundObject,
    now: i64,
) -> Result<(), TokenError> {
    let gone = || TokenError::Gone(format!("the token's {plural} {:?} is gone", reference.name));
    let entry = objects.entry("", plural, namespace, &reference.name).await;
    let entry = entry.map_err(|e| TokenError::Gone(e.to_string()))?.ok_or_else(gone)?;
    let found: PartialObjectMetadata = serde_json::from_slice(&entry.value).map_err(|_| gone())?;
    let is_same = found.metadata.uid.as_deref() == Some(&reference.uid);
    let is_past_leeway =
        found.metadata.deletion_timestamp.is_some_and(|t| t.0.as_second() + DELETION_LEEWAY_SECONDS < now);
    if is_same && !is_past_leeway { Ok(()) } else { Err(gone()) }
}
