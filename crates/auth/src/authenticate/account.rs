//! Is a token's account still the one it was made for? A token is good only as long as everything it is bound to.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::token::{Bound, Reference, Signer, TokenError};
use super::{AUTHENTICATED, Caller};
use cleat_apimachinery::meta;
use cleat_registry::reader::ObjectReader;

/// How long a token may outlive the planned end of what it is bound to: pods use theirs while they stop.
const LEEWAY: i64 = 60;

/// A token that was found good.
pub struct Verified {
    pub caller: Caller,
    /// Those of the audiences asked for that the token is meant for.
    pub audiences: Vec<String>,
}

#[derive(Deserialize)]
struct Head {
    metadata: ObjectMeta,
}

pub fn user_name(namespace: &str, account: &str) -> String {
    format!("system:serviceaccount:{namespace}:{account}")
}

pub(super) async fn check(
    signer: &Signer,
    objects: &ObjectReader,
    token: &str,
    audiences: &[String],
) -> Result<Verified, TokenError> {
    let now = meta::now().as_second();
    let (claims, audiences) = signer.verify(token, audiences, now)?;
    let Bound { namespace, node, pod, secret, serviceaccount, .. } = &claims.bound;
    exists(objects, "serviceaccounts", Some(namespace), serviceaccount, now).await?;
    for (plural, namespace, reference) in
        [("pods", Some(namespace), pod), ("secrets", Some(namespace), secret), ("nodes", None, node)]
    {
        // A pod's token names its node for information; it dies with the pod, not with the node.
        let informative = plural == "nodes" && pod.is_some();
        if let Some(reference) = reference.as_ref().filter(|_| !informative) {
            exists(objects, plural, namespace.map(String::as_str), reference, now).await?;
        }
    }
    let mut extra = BTreeMap::new();
    let mut add = |key: &str, value: String| {
        extra.insert(format!("authentication.kubernetes.io/{key}"), vec![value]);
    };
    add("credential-id", format!("JTI={}", claims.jti));
    for (what, reference) in [("node", node), ("pod", pod)] {
        if let Some(reference) = reference {
            add(&format!("{what}-name"), reference.name.clone());
            add(&format!("{what}-uid"), reference.uid.clone());
        }
    }
    let groups =
        vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}"), AUTHENTICATED.into()];
    let name = user_name(namespace, &serviceaccount.name);
    let caller = Caller { name, uid: serviceaccount.uid.clone(), groups, extra };
    Ok(Verified { caller, audiences })
}

async fn exists(
    objects: &ObjectReader,
    plural: &str,
    namespace: Option<&str>,
    reference: &Reference,
    now: i64,
) -> Result<(), TokenError> {
    let gone = || TokenError::Gone(format!("the token's {plural} {:?} is gone", reference.name));
    let read = objects.entry("", plural, namespace, &reference.name).await;
    let entry = read.map_err(|e| TokenError::Gone(e.to_string()))?.ok_or_else(gone)?;
    let found: Head = serde_json::from_slice(&entry.value).map_err(|_| gone())?;
    let same = found.metadata.uid.as_deref() == Some(&reference.uid);
    let over = found.metadata.deletion_timestamp.is_some_and(|t| t.0.as_second() + LEEWAY < now);
    if same && !over { Ok(()) } else { Err(gone()) }
}
