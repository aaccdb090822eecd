//! Resolves the secrets that a StorageClass names: its parameters are templates with the names of claim and volume.

use std::collections::BTreeMap;

use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::CSI_PARAMETER_PREFIX;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, SecretReference};

/// The parameter keys of the secret for one kind of call.
struct SecretPurpose {
    /// Without the prefix `csi.storage.k8s.io/` and the suffix `-name` or `-namespace`.
    key: &'static str,
    /// The old key, which has no prefix, without the suffix `Name` or `Namespace`.
    deprecated: Option<&'static str>,
}

const DEFAULT: SecretPurpose = SecretPurpose { key: "secret", deprecated: None };
const PROVISION: SecretPurpose = SecretPurpose { key: "provisioner-secret", deprecated: Some("csiProvisionerSecret") };
const PUBLISH: SecretPurpose =
    SecretPurpose { key: "controller-publish-secret", deprecated: Some("csiControllerPublishSecret") };
const STAGE: SecretPurpose = SecretPurpose { key: "node-stage-secret", deprecated: Some("csiNodeStageSecret") };
const NODE_PUBLISH: SecretPurpose =
    SecretPurpose { key: "node-publish-secret", deprecated: Some("csiNodePublishSecret") };
const EXPAND: SecretPurpose = SecretPurpose { key: "controller-expand-secret", deprecated: None };
const NODE_EXPAND: SecretPurpose = SecretPurpose { key: "node-expand-secret", deprecated: None };
const MODIFY: SecretPurpose = SecretPurpose { key: "controller-modify-secret", deprecated: None };

const MAX_LABEL_BYTES: usize = 63;
const MAX_NAME_BYTES: usize = 253;

/// The secrets of one volume, by the call that uses them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SecretRefs {
    /// CreateVolume and DeleteVolume.
    pub provision: Option<Key>,
    pub publish: Option<SecretReference>,
    pub stage: Option<SecretReference>,
    pub node_publish: Option<SecretReference>,
    pub expand: Option<SecretReference>,
    pub node_expand: Option<SecretReference>,
    pub modify: Option<Key>,
}

pub type Parameters = BTreeMap<String, String>;

/// Every purpose that the class gives no secret for gets the default secret, if the class gives one.
pub fn resolve_all(parameters: &Parameters, volume: &str, claim: &PersistentVolumeClaim) -> Result<SecretRefs, String> {
    let find = |purpose: &SecretPurpose| {
        Ok::<_, String>(match resolve(parameters, purpose, volume, Some(claim))? {
            Some(key) => Some(key),
            None => resolve(parameters, &DEFAULT, volume, Some(claim))?,
        })
    };
    let reference = |purpose| Ok::<_, String>(find(purpose)?.map(reference));
    Ok(SecretRefs {
        provision: find(&PROVISION)?,
        publish: reference(&PUBLISH)?,
        stage: reference(&STAGE)?,
        node_publish: reference(&NODE_PUBLISH)?,
        expand: reference(&EXPAND)?,
        node_expand: reference(&NODE_EXPAND)?,
        modify: find(&MODIFY)?,
    })
}

/// The secret for the deletion of a volume whose PersistentVolume names none. The claim no longer exists: the caller
/// passes one that has only a name and a namespace.
pub fn resolve_for_deletion(
    parameters: &Parameters,
    volume: &str,
    claim: &PersistentVolumeClaim,
) -> Result<Option<Key>, String> {
    match resolve(parameters, &PROVISION, volume, Some(claim))? {
        Some(key) => Ok(Some(key)),
        None => resolve(parameters, &DEFAULT, volume, Some(claim)),
    }
}

/// Returns true for a key, without the prefix, that names a secret: only the provisioner reads it.
pub fn is_secret_parameter(key: &str) -> bool {
    let purposes = [DEFAULT, PROVISION, PUBLISH, STAGE, NODE_PUBLISH, EXPAND, NODE_EXPAND, MODIFY];
    purposes.iter().any(|p| key.strip_prefix(p.key).is_some_and(|rest| rest == "-name" || rest == "-namespace"))
}

fn reference(key: Key) -> SecretReference {
    SecretReference { name: Some(key.name), namespace: key.namespace }
}

fn resolve(
    parameters: &Parameters,
    purpose: &SecretPurpose,
    volume: &str,
    claim: Option<&PersistentVolumeClaim>,
) -> Result<Option<Key>, String> {
    let name = template(parameters, purpose, "-name", "Name")?;
    let namespace = template(parameters, purpose, "-namespace", "Namespace")?;
    let (name, namespace) = match (name, namespace) {
        (None, None) => return Ok(None),
        (Some(name), Some(namespace)) if !name.is_empty() && !namespace.is_empty() => (name, namespace),
        _ => return Err(format!("class gives only one of name and namespace of its {}", purpose.key)),
    };
    let token = |token: &str, of_namespace: bool| {
        let meta = claim.map(|c| &c.metadata);
        match token {
            "pv.name" => Some(volume.to_owned()),
            "pvc.namespace" => meta.and_then(|m| m.namespace.clone()),
            "pvc.name" if !of_namespace => meta.and_then(|m| m.name.clone()),
            _ if of_namespace => None,
            _ => {
                let key = token.strip_prefix("pvc.annotations['")?.strip_suffix("']")?;
                Some(meta.and_then(|m| m.annotation(key)).unwrap_or_default().to_owned())
            }
        }
    };
    let namespace = expand(namespace, |t| token(t, true))?;
    let name = expand(name, |t| token(t, false))?;
    if !is_dns_label(&namespace) {
        return Err(format!("{} namespace {namespace:?} is not a valid namespace name", purpose.key));
    }
    if !name.split('.').all(is_dns_label) || name.len() > MAX_NAME_BYTES {
        return Err(format!("{} name {name:?} is not a valid secret name", purpose.key));
    }
    Ok(Some(Key::namespaced(namespace, name)))
}

fn template<'a>(
    parameters: &'a Parameters,
    purpose: &SecretPurpose,
    suffix: &str,
    old_suffix: &str,
) -> Result<Option<&'a String>, String> {
    let new = parameters.get(&format!("{CSI_PARAMETER_PREFIX}{}{suffix}", purpose.key));
    let old = purpose.deprecated.and_then(|key| parameters.get(&format!("{key}{old_suffix}")));
    match (new, old) {
        (Some(_), Some(_)) => Err(format!("class gives its {}{suffix} in the old form and in the new", purpose.key)),
        (new, old) => Ok(new.or(old)),
    }
}

/// Replaces `${token}` and `$token`. Fails if `value` does not know a token.
fn expand(template: &str, value: impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let (mut out, mut unknown, mut rest) = (String::new(), Vec::new(), template);
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let (token, after) = match rest.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some(found) => found,
            None => {
                let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
                rest.split_at(end)
            }
        };
        match value(token) {
            Some(value) => out.push_str(&value),
            None => unknown.push(format!("{token:?}")),
        }
        rest = after;
    }
    out.push_str(rest);
    if unknown.is_empty() { Ok(out) } else { Err(format!("invalid tokens: [{}]", unknown.join(" "))) }
}

fn is_dns_label(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty()
        && name.len() <= MAX_LABEL_BYTES
        && name.chars().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    fn class(pairs: &[(&str, &str)]) -> Parameters {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn a_template_is_expanded_with_the_names_of_claim_and_volume() {
        let mut claim = build::claim("team", "data", None, "1Gi");
        build::annotate(&mut claim.metadata, "example.com/key", "from-annotation");
        let name = "csi.storage.k8s.io/provisioner-secret-name";
        let namespace = "csi.storage.k8s.io/provisioner-secret-namespace";
        let good = |n: &str, ns: &str| Ok(Some(Key::namespaced(ns, n)));
        let bad = |why: &str| Err(why.to_owned());
        for (case, parameters, want) in [
            ("no secret named", class(&[]), Ok(None)),
            ("plain", class(&[(name, "s"), (namespace, "ns")]), good("s", "ns")),
            ("from the claim", class(&[(name, "${pvc.name}"), (namespace, "${pvc.namespace}")]), good("data", "team")),
            ("from the volume", class(&[(name, "x-${pv.name}.y"), (namespace, "n-${pv.name}")]), good("x-v.y", "n-v")),
            (
                "from an annotation",
                class(&[(name, "${pvc.annotations['example.com/key']}"), (namespace, "ns")]),
                good("from-annotation", "ns"),
            ),
            (
                "the old form",
                class(&[("csiProvisionerSecretName", "s"), ("csiProvisionerSecretNamespace", "ns")]),
                good("s", "ns"),
            ),
            (
                "the default secret",
                class(&[("csi.storage.k8s.io/secret-name", "d"), ("csi.storage.k8s.io/secret-namespace", "ns")]),
                good("d", "ns"),
            ),
            (
                "old and new",
                class(&[(name, "s"), (namespace, "ns"), ("csiProvisionerSecretName", "s")]),
                bad("class gives its provisioner-secret-name in the old form and in the new"),
            ),
            (
                "a name alone",
                class(&[(name, "s")]),
                bad("class gives only one of name and namespace of its provisioner-secret"),
            ),
            (
                "an unknown token",
                class(&[(name, "${pod.name}"), (namespace, "ns")]),
                bad("invalid tokens: [\"pod.name\"]"),
            ),
            (
                "a claim's name is no part of a namespace",
                class(&[(name, "s"), (namespace, "${pvc.name}")]),
                bad("invalid tokens: [\"pvc.name\"]"),
            ),
            (
                "an invalid namespace",
                class(&[(name, "s"), (namespace, "No")]),
                bad("provisioner-secret namespace \"No\" is not a valid namespace name"),
            ),
            (
                "an invalid name",
                class(&[(name, "a..b"), (namespace, "ns")]),
                bad("provisioner-secret name \"a..b\" is not a valid secret name"),
            ),
        ] {
            assert_eq!(resolve_for_deletion(&parameters, "v", &claim), want, "{case}");
            assert_eq!(resolve_all(&parameters, "v", &claim).map(|s| s.provision), want, "{case}");
        }
    }

    #[test]
    fn each_call_has_its_own_secret_or_the_default() {
        let claim = build::claim("team", "data", None, "1Gi");
        let purposes = ["controller-publish", "node-stage", "node-publish", "controller-expand", "node-expand"];
        let mut parameters = class(&[]);
        for purpose in purposes {
            parameters.insert(format!("csi.storage.k8s.io/{purpose}-secret-name"), purpose.to_owned());
            parameters.insert(format!("csi.storage.k8s.io/{purpose}-secret-namespace"), "ns".to_owned());
        }
        let secrets = resolve_all(&parameters, "v", &claim).unwrap();
        let names = [secrets.publish, secrets.stage, secrets.node_publish, secrets.expand, secrets.node_expand];
        assert_eq!(names.map(|s| s.unwrap().name.unwrap()), purposes);
        assert_eq!((secrets.provision, secrets.modify), (None, None));
        parameters.insert("csi.storage.k8s.io/secret-name".to_owned(), "d".to_owned());
        parameters.insert("csi.storage.k8s.io/secret-namespace".to_owned(), "ns".to_owned());
        let secrets = resolve_all(&parameters, "v", &claim).unwrap();
        assert_eq!(secrets.modify, Some(Key::namespaced("ns", "d")));
        assert_eq!(secrets.stage.unwrap().name.as_deref(), Some("node-stage"));
    }

    #[test]
    fn only_keys_that_name_secrets_are_secret_parameters() {
        for (key, want) in
            [("secret-name", true), ("node-stage-secret-namespace", true), ("fstype", false), ("secret", false)]
        {
            assert_eq!(is_secret_parameter(key), want, "{key}");
        }
    }
}
