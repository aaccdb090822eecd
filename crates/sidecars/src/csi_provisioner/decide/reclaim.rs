//! Decides whether a volume of the driver is deleted, and whether it keeps the provisioner's finalizer. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use cleat_api::claim::{claim_ref, claim_ref_key, volume_phase};
use cleat_api::key::{Key, Meta as _};
use cleat_api::migrate;
use cleat_api::well_known::{annotation, finalizer};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::{DriverCapabilities, LocalNode, secrets};

#[derive(Clone, Debug)]
pub struct ReclaimSnapshot {
    pub volume: Arc<PersistentVolume>,
    /// The nodes of the VolumeAttachments of this volume.
    pub attached_to: Vec<String>,
    /// The volume's StorageClass, if it exists.
    pub class: Option<Arc<StorageClass>>,
    pub driver: String,
    pub deletes_volumes: bool,
    /// If set, only volumes that are accessible from this node are deleted.
    pub local: Option<LocalNode>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReclaimDecision {
    Nothing,
    /// The PersistentVolume must not disappear before the driver's volume is deleted.
    AddFinalizer,
    /// The reclaim policy keeps the driver's volume: the PersistentVolume may be deleted at any time.
    RemoveFinalizer,
    Delete {
        handle: String,
        secret: DeletionSecret,
    },
    /// The volume is released and still attached to this node.
    WaitForDetach(String),
    /// The volume cannot be deleted, for this reason.
    Refuse(String),
}

/// Which secret DeleteVolume gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeletionSecret {
    None,
    /// Named by annotations of the PersistentVolume. If the secret does not exist, the call is made without it.
    FromVolume(Key),
    /// Named by parameters of the StorageClass. If the secret does not exist, the call is not made.
    FromClass(Key),
}

pub fn reclaim(snapshot: &ReclaimSnapshot) -> ReclaimDecision {
    let meta = &snapshot.volume.metadata;
    let Some(spec) = &snapshot.volume.spec else { return ReclaimDecision::Nothing };
    if !is_ours(snapshot) {
        return ReclaimDecision::Nothing;
    }
    let has_finalizer = meta.has_finalizer(finalizer::PROVISIONER);
    let deletes = spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete");
    match volume_phase(&snapshot.volume) {
        _ if has_finalizer && !deletes => ReclaimDecision::RemoveFinalizer,
        "Released" if deletes && (has_finalizer || !meta.is_deleting()) => match snapshot.attached_to.first() {
            _ if snapshot.local.as_ref().is_some_and(|local| !local.can_access(&snapshot.volume)) => {
                ReclaimDecision::Nothing
            }
            _ if !snapshot.deletes_volumes => {
                ReclaimDecision::Refuse(format!("driver {:?} does not delete volumes", snapshot.driver))
            }
            Some(node) => ReclaimDecision::WaitForDetach(node.clone()),
            None => match (migrate::csi_source(&snapshot.volume), deletion_secret(snapshot)) {
                (Ok(Some(csi)), Ok(secret)) => ReclaimDecision::Delete { handle: csi.volume_handle.clone(), secret },
                (Ok(None), _) => ReclaimDecision::Nothing,
                (Ok(Some(_)), Err(why)) => ReclaimDecision::Refuse(why),
                (Err(error), _) => ReclaimDecision::Refuse(error.to_string()),
            },
        },
        "Bound" if deletes && !has_finalizer && !meta.is_deleting() => ReclaimDecision::AddFinalizer,
        _ => ReclaimDecision::Nothing,
    }
}

/// Returns true if a reconcile of this volume would do nothing, whatever is attached and whatever its class is.
///
/// It asks [`reclaim`] for a detached volume whose class is missing: attachments and classes change how a volume is
/// deleted, but never whether anything is to be done.
pub fn is_noop(volume: &Arc<PersistentVolume>, driver: &DriverCapabilities, local: Option<&LocalNode>) -> bool {
    let snapshot = ReclaimSnapshot {
        volume: volume.clone(),
        attached_to: Vec::new(),
        class: None,
        driver: driver.name.clone(),
        deletes_volumes: driver.creates_volumes,
        local: local.cloned(),
    };
    reclaim(&snapshot) == ReclaimDecision::Nothing
}

/// Returns true for volumes that the driver or its in-tree plugin provisioned, and for volumes of theirs that an
/// administrator created.
fn is_ours(snapshot: &ReclaimSnapshot) -> bool {
    let meta = &snapshot.volume.metadata;
    match (meta.annotation(annotation::PROVISIONED_BY), snapshot.volume.spec.as_ref().and_then(|s| s.csi.as_ref())) {
        (Some(by), csi) => {
            let is_drivers_volume = csi.is_none_or(|csi| csi.driver == snapshot.driver);
            is_drivers_volume && (by == snapshot.driver || migrate::driver_of(by) == Some(&snapshot.driver))
        }
        (None, Some(csi)) => csi.driver == snapshot.driver,
        (None, None) => meta.annotation(annotation::MIGRATED_TO) == Some(&snapshot.driver),
    }
}

fn deletion_secret(snapshot: &ReclaimSnapshot) -> Result<DeletionSecret, String> {
    let meta = &snapshot.volume.metadata;
    let annotations = [annotation::DELETION_SECRET_NAME, annotation::DELETION_SECRET_NAMESPACE];
    if let [Some(name), Some(namespace)] = annotations.map(|key| meta.annotation(key)) {
        let is_set = !name.is_empty() && !namespace.is_empty();
        return Ok(if is_set {
            DeletionSecret::FromVolume(Key::namespaced(namespace, name))
        } else {
            DeletionSecret::None
        });
    }
    let (Some(class), Some(reference)) = (&snapshot.class, claim_ref(&snapshot.volume)) else {
        return Ok(DeletionSecret::None);
    };
    let Some(parameters) = &class.parameters else { return Ok(DeletionSecret::None) };
    let key = claim_ref_key(reference);
    let mut claim = PersistentVolumeClaim::default();
    claim.metadata.name = Some(key.name);
    claim.metadata.namespace = key.namespace;
    let name = meta.name.as_deref().unwrap_or_default();
    Ok(secrets::resolve_for_deletion(parameters, name, &claim)?.map_or(DeletionSecret::None, DeletionSecret::FromClass))
}

/// The secrets of DeleteVolume. `found` is the content of the secret that `secret` names, if that exists.
pub fn deletion_secrets(
    secret: &DeletionSecret,
    found: Option<HashMap<String, String>>,
) -> Result<HashMap<String, String>, String> {
    match (secret, found) {
        (DeletionSecret::FromClass(key), None) => Err(format!("error getting secret {key}: not found")),
        (DeletionSecret::None | DeletionSecret::FromVolume(_), None) => Ok(HashMap::new()),
        (_, Some(secrets)) => Ok(secrets),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build::{self, DRIVER};

    fn with(parameters: &[(&str, &str)]) -> Option<StorageClass> {
        let mut class = build::class("fast", DRIVER);
        class.parameters = Some(parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect());
        Some(class)
    }

    fn volume(phase: &str, policy: &str, has_finalizer: bool) -> PersistentVolume {
        let mut v = build::volume("v", "fast", "1Gi");
        v.spec.as_mut().unwrap().persistent_volume_reclaim_policy = Some(policy.to_owned());
        v.status.as_mut().unwrap().phase = Some(phase.to_owned());
        v.metadata.finalizers = has_finalizer.then(|| vec![finalizer::PROVISIONER.to_owned()]);
        v
    }

    fn snapshot_of(volume: PersistentVolume, nodes: &[&str], class: Option<StorageClass>) -> ReclaimSnapshot {
        ReclaimSnapshot {
            volume: Arc::new(volume),
            attached_to: nodes.iter().map(ToString::to_string).collect(),
            class: class.map(Arc::new),
            driver: DRIVER.to_owned(),
            deletes_volumes: true,
            local: None,
        }
    }

    fn noop(volume: &PersistentVolume) -> bool {
        let driver =
            DriverCapabilities { name: DRIVER.to_owned(), creates_volumes: true, ..DriverCapabilities::default() };
        is_noop(&Arc::new(volume.clone()), &driver, None)
    }

    #[test]
    fn a_volume_is_deleted_only_when_released_and_detached() {
        let deleting = |mut v: PersistentVolume| {
            v.metadata.deletion_timestamp = Some(build::time(1));
            v
        };
        let mut foreign = volume("Released", "Delete", true);
        foreign.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned();
        let mut provisioned_elsewhere = volume("Released", "Delete", true);
        build::annotate(&mut provisioned_elsewhere.metadata, annotation::PROVISIONED_BY, "other");
        let mut mislabelled = foreign.clone();
        build::annotate(&mut mislabelled.metadata, annotation::PROVISIONED_BY, DRIVER);
        let delete = ReclaimDecision::Delete { handle: "handle-v".to_owned(), secret: DeletionSecret::None };
        let nothing = ReclaimDecision::Nothing;
        for (case, v, nodes, want) in [
            ("bound", volume("Bound", "Delete", true), &[][..], nothing.clone()),
            ("bound, without the finalizer", volume("Bound", "Delete", false), &[], ReclaimDecision::AddFinalizer),
            ("released", volume("Released", "Delete", true), &[], delete.clone()),
            ("released, being deleted", deleting(volume("Released", "Delete", true)), &[], delete.clone()),
            ("volume deleted, being deleted", deleting(volume("Released", "Delete", false)), &[], nothing.clone()),
            (
                "still attached",
                volume("Released", "Delete", true),
                &["n1"],
                ReclaimDecision::WaitForDetach("n1".to_owned()),
            ),
            ("failed", volume("Failed", "Delete", true), &[], nothing.clone()),
            ("retained", volume("Released", "Retain", false), &[], nothing.clone()),
            ("retained, with the finalizer", volume("Released", "Retain", true), &[], ReclaimDecision::RemoveFinalizer),
            ("deleted while bound", deleting(volume("Bound", "Delete", true)), &[], nothing.clone()),
            ("of another driver", foreign, &[], nothing.clone()),
            ("provisioned by another driver", provisioned_elsewhere, &[], nothing.clone()),
            ("annotated as ours, but of another driver", mislabelled, &[], nothing),
        ] {
            assert!(want == ReclaimDecision::Nothing || !noop(&v), "{case}");
            assert_eq!(reclaim(&snapshot_of(v, nodes, None)), want, "{case}");
        }
        let local = LocalNode {
            name: "n1".to_owned(),
            topology: Some([("zone".to_owned(), "a".to_owned())].into()),
            immediate: true,
        };
        let at = |zone: &str| {
            let mut v = volume("Released", "Delete", true);
            let topology = cleat_csi::v1::Topology { segments: [("zone".to_owned(), zone.to_owned())].into() };
            v.spec.as_mut().unwrap().node_affinity = super::super::topology::affinity(&[topology]);
            ReclaimSnapshot { local: Some(local.clone()), ..snapshot_of(v, &[], None) }
        };
        assert_eq!(reclaim(&at("b")), ReclaimDecision::Nothing, "not accessible from this node");
        assert_eq!(reclaim(&at("a")), delete, "accessible from this node");
        let without_deletion =
            ReclaimSnapshot { deletes_volumes: false, ..snapshot_of(volume("Released", "Delete", true), &[], None) };
        assert!(matches!(reclaim(&without_deletion), ReclaimDecision::Refuse(_)));
    }

    #[test]
    fn is_noop_agrees_with_the_decision() {
        for phase in ["Pending", "Available", "Bound", "Released", "Failed"] {
            for policy in ["Delete", "Retain"] {
                for (has_finalizer, deleting) in [(false, false), (false, true), (true, false), (true, true)] {
                    let mut v = volume(phase, policy, has_finalizer);
                    v.metadata.deletion_timestamp = deleting.then(|| build::time(1));
                    let decision = reclaim(&snapshot_of(v.clone(), &[], None));
                    let case = format!("{phase} {policy} finalizer {has_finalizer} deleting {deleting}");
                    assert_eq!(noop(&v), decision == ReclaimDecision::Nothing, "{case}: {decision:?}");
                    let other_context = reclaim(&snapshot_of(v.clone(), &["n1"], with(&[])));
                    assert_eq!(
                        noop(&v),
                        other_context == ReclaimDecision::Nothing,
                        "{case}, attached: {other_context:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn volumes_of_an_in_tree_plugin_are_deleted_by_the_driver_it_migrated_to() {
        let in_tree = |by: Option<&str>, migrated: bool, id: &str| {
            let mut v = volume("Released", "Delete", true);
            let spec = v.spec.as_mut().unwrap();
            spec.csi = None;
            spec.aws_elastic_block_store = Some(serde_json::from_value(serde_json::json!({ "volumeID": id })).unwrap());
            by.into_iter().for_each(|by| build::annotate(&mut v.metadata, annotation::PROVISIONED_BY, by));
            if migrated {
                build::annotate(&mut v.metadata, annotation::MIGRATED_TO, "ebs.csi.aws.com");
            }
            ReclaimSnapshot { driver: "ebs.csi.aws.com".to_owned(), ..snapshot_of(v, &[], None) }
        };
        let plugin = Some("kubernetes.io/aws-ebs");
        let delete = ReclaimDecision::Delete { handle: "vol-1".to_owned(), secret: DeletionSecret::None };
        for (case, snapshot, want) in [
            ("provisioned for its plugin", in_tree(plugin, true, "vol-1"), delete.clone()),
            (
                "provisioned for another plugin",
                in_tree(Some("kubernetes.io/gce-pd"), true, "vol-1"),
                ReclaimDecision::Nothing,
            ),
            ("created by an administrator, migrated", in_tree(None, true, "vol-1"), delete),
            ("created by an administrator, not migrated", in_tree(None, false, "vol-1"), ReclaimDecision::Nothing),
        ] {
            assert_eq!(reclaim(&snapshot), want, "{case}");
        }
        assert!(
            matches!(reclaim(&in_tree(plugin, true, "aws://x/y/z")), ReclaimDecision::Refuse(_)),
            "invalid volume id"
        );
    }

    #[test]
    fn a_deletion_uses_the_secret_of_the_volume_or_the_class() {
        let named = |name: &str, namespace: &str| {
            let mut v = volume("Released", "Delete", true);
            build::annotate(&mut v.metadata, annotation::DELETION_SECRET_NAME, name);
            build::annotate(&mut v.metadata, annotation::DELETION_SECRET_NAMESPACE, namespace);
            v
        };
        let mut claimed = volume("Released", "Delete", true);
        claimed.spec.as_mut().unwrap().claim_ref = Some(build::reference(&build::claim("team", "data", None, "1Gi")));
        let name = ("csi.storage.k8s.io/provisioner-secret-name", "${pvc.name}");
        let class = || with(&[name, ("csi.storage.k8s.io/provisioner-secret-namespace", "${pvc.namespace}")]);
        let broken = with(&[name]);
        for (case, v, class, want) in [
            (
                "named by the volume",
                named("s", "ns"),
                class(),
                Some(DeletionSecret::FromVolume(Key::namespaced("ns", "s"))),
            ),
            ("the volume names none", named("", ""), class(), Some(DeletionSecret::None)),
            (
                "named by the class",
                claimed.clone(),
                class(),
                Some(DeletionSecret::FromClass(Key::namespaced("team", "data"))),
            ),
            ("the class is missing", claimed.clone(), None, Some(DeletionSecret::None)),
            ("without a claim reference", volume("Released", "Delete", true), class(), Some(DeletionSecret::None)),
            ("the class gives a name without a namespace", claimed, broken, None),
        ] {
            let got = match reclaim(&snapshot_of(v, &[], class)) {
                ReclaimDecision::Delete { secret, .. } => Some(secret),
                ReclaimDecision::Refuse(_) => None,
                other => panic!("{case}: {other:?}"),
            };
            assert_eq!(got, want, "{case}");
        }
    }
}
