//! Which secrets a class asks for, with the names of claim and volume filled in.

use std::collections::BTreeMap;

use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::CSI_PARAMETER_PREFIX;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, SecretReference};

/// The keys of one purpose: without the prefix, and in their old form, which has no prefix.
struct Purpose {
    key: &'static str,
    deprecated: Option<&'static str>,
}

const DEFAULT: Purpose = Purpose { key: "secret", deprecated: None };
const PROVISION: Purpose = Purpose { key: "provisioner-secret", deprecated: Some("csiProvisionerSecret") };
const PUBLISH: Purpose = Purpose { key: "controller-publish-secret", deprecated: Some("csiControllerPublishSecret") };
const STAGE: Purpose = Purpose { key: "node-stage-secret", deprecated: Some("csiNodeStageSecret") };
const NODE_PUBLISH: Purpose = Purpose { key: "node-publish-secret", deprecated: Some("csiNodePublishSecret") };
const EXPAND: Purpose = Purpose { key: "controller-expand-secret", deprecated: None };
const NODE_EXPAND: Purpose = Purpose { key: "node-expand-secret", deprecated: None };
const MODIFY: Purpose = Purpose { key: "controller-modify-secret", deprecated: None };

/// The secrets of one volume, by the call that carries them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Secrets {
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

pub fn all(parameters: &Parameters, volume: &str, claim: &PersistentVolumeClaim) -> Result<Secrets, String> {
    let find = |purpose: &Purpose| {
        Ok::<_, String>(match resolve(parameters, purpose, volume, Some(claim))? {
            Some(key) => Some(key),
            None => resolve(parameters, &DEFAULT, volume, Some(claim))?,
        })
    };
    let reference = |purpose| Ok::<_, String>(find(purpose)?.map(reference));
    Ok(Secrets {
        provision: find(&PROVISION)?,
        publish: reference(&PUBLISH)?,
        stage: reference(&STAGE)?,
        node_publish: reference(&NODE_PUBLISH)?,
        expand: reference(&EXPAND)?,
        node_expand: reference(&NODE_EXPAND)?,
        modify: find(&MODIFY)?,
    })
}

/// The secret for the deletion of a volume whose record does not name one. Its claim is gone: only its name and
/// namespace are known.
pub fn deletion(parameters: &Parameters, volume: &str, claim: &PersistentVolumeClaim) -> Result<Option<Key>, String> {
    match resolve(parameters, &PROVISION, volume, Some(claim))? {
        Some(key) => Ok(Some(key)),
        None => resolve(parameters, &DEFAULT, volume, Some(claim)),
    }
}

/// A key, without the prefix, that only the provisioner reads.
pub fn is_known(key: &str) -> bool {
    let purposes = [DEFAULT, PROVISION, PUBLISH, STAGE, NODE_PUBLISH, EXPAND, NODE_EXPAND, MODIFY];
    purposes.iter().any(|p| key.strip_prefix(p.key).is_some_and(|rest| rest == "-name" || rest == "-namespace"))
}

fn reference(key: Key) -> SecretReference {
    SecretReference { name: Some(key.name), namespace: key.namespace }
}

fn resolve(
    parameters: &Parameters,
    purpose: &Purpose,
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
    if !is_label(&namespace) {
        return Err(format!("{} namespace {namespace:?} is not a valid namespace name", purpose.key));
    }
    if !name.split('.').all(is_label) || name.len() > 253 {
        return Err(format!("{} name {name:?} is not a valid secret name", purpose.key));
    }
    Ok(Some(Key::namespaced(namespace, name)))
}

fn template<'a>(
    parameters: &'a Parameters,
    purpose: &Purpose,
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

/// Replaces `${token}` and `$token`.
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

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.len() <= 63 && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;

    fn class(pairs: &[(&str, &str)]) -> Parameters {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn a_template_is_filled_in_from_claim_and_volume() {
        let mut claim = build::claim("team", "data", None, "1Gi");
        build::annotate(&mut claim.metadata, "example.com/key", "from-annotation");
        let name = "csi.storage.k8s.io/provisioner-secret-name";
        let namespace = "csi.storage.k8s.io/provisioner-secret-namespace";
        let good = |n: &str, ns: &str| Ok(Some(Key::namespaced(ns, n)));
        let bad = |why: &str| Err(why.to_owned());
        for (case, parameters, want) in [
            ("nothing asked for", class(&[]), Ok(None)),
            ("plain", class(&[(name, "s"), (namespace, "ns")]), good("s", "ns")),
            ("the claim's", class(&[(name, "${pvc.name}"), (namespace, "${pvc.namespace}")]), good("data", "team")),
            ("the volume's", class(&[(name, "x-${pv.name}.y"), (namespace, "n-${pv.name}")]), good("x-v.y", "n-v")),
            (
                "an annotation's",
                class(&[(name, "${pvc.annotations['example.com/key']}"), (namespace, "ns")]),
                good("from-annotation", "ns"),
            ),
            (
                "the old form",
                class(&[("csiProvisionerSecretName", "s"), ("csiProvisionerSecretNamespace", "ns")]),
                good("s", "ns"),
            ),
            (
                "the default for all",
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
                "a token nobody knows",
                class(&[(name, "${pod.name}"), (namespace, "ns")]),
                bad("invalid tokens: [\"pod.name\"]"),
            ),
            (
                "a claim's name is no part of a namespace",
                class(&[(name, "s"), (namespace, "${pvc.name}")]),
                bad("invalid tokens: [\"pvc.name\"]"),
            ),
            (
                "not a namespace",
                class(&[(name, "s"), (namespace, "No")]),
                bad("provisioner-secret namespace \"No\" is not a valid namespace name"),
            ),
            (
                "not a name",
                class(&[(name, "a..b"), (namespace, "ns")]),
                bad("provisioner-secret name \"a..b\" is not a valid secret name"),
            ),
        ] {
            assert_eq!(deletion(&parameters, "v", &claim), want, "{case}");
            assert_eq!(all(&parameters, "v", &claim).map(|s| s.provision), want, "{case}");
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
        let secrets = all(&parameters, "v", &claim).unwrap();
        let names = [secrets.publish, secrets.stage, secrets.node_publish, secrets.expand, secrets.node_expand];
        assert_eq!(names.map(|s| s.unwrap().name.unwrap()), purposes);
        assert_eq!((secrets.provision, secrets.modify), (None, None));
        parameters.insert("csi.storage.k8s.io/secret-name".to_owned(), "d".to_owned());
        parameters.insert("csi.storage.k8s.io/secret-namespace".to_owned(), "ns".to_owned());
        let secrets = all(&parameters, "v", &claim).unwrap();
        assert_eq!(secrets.modify, Some(Key::namespaced("ns", "d")));
        assert_eq!(secrets.stage.unwrap().name.as_deref(), Some("node-stage"));
    }

    #[test]
    fn only_keys_of_secrets_are_known() {
        for (key, want) in
            [("secret-name", true), ("node-stage-secret-namespace", true), ("fstype", false), ("secret", false)]
        {
            assert_eq!(is_known(key), want, "{key}");
        }
    }
}
