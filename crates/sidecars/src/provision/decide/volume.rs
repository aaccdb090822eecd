//! What becomes of a volume of this driver.

use std::sync::Arc;

use cleat_api::claim::{claim_ref, claim_ref_key, volume_phase};
use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::{annotation, finalizer};
use cleat_api::migrate;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::{Local, secrets};

#[derive(Clone, Debug)]
pub struct VolumeSeen {
    pub volume: Arc<PersistentVolume>,
    /// Nodes that a VolumeAttachment of this volume names.
    pub attached_to: Vec<String>,
    /// The class it was made for, if that is still there.
    pub class: Option<Arc<StorageClass>>,
    pub driver: String,
    pub deletes_volumes: bool,
    /// The node whose volumes are ours to delete; all are if `None`.
    pub local: Option<Local>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeDecision {
    Nothing,
    /// Hold the record, so that it cannot go before the volume.
    Hold,
    /// The volume is to be kept: the record may go when it likes.
    Release,
    Delete {
        handle: String,
        secret: Credentials,
    },
    /// Released, and still attached to this node.
    WaitForDetach(String),
    /// The driver cannot do it.
    Refuse(String),
}

/// Where DeleteVolume's secrets come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credentials {
    None,
    /// Named by the record. A secret that is gone does not keep the volume: the call is made without it.
    Recorded(Key),
    /// Named by the class.
    OfClass(Key),
}

pub fn volume(seen: &VolumeSeen) -> VolumeDecision {
    let meta = &seen.volume.metadata;
    let Some(spec) = &seen.volume.spec else { return VolumeDecision::Nothing };
    if !is_ours(seen) {
        return VolumeDecision::Nothing;
    }
    let held = meta.has_finalizer(finalizer::PROVISIONER);
    let deletes = spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete");
    match volume_phase(&seen.volume) {
        _ if held && !deletes => VolumeDecision::Release,
        "Released" if deletes && (held || !meta.is_deleting()) => match seen.attached_to.first() {
            _ if seen.local.as_ref().is_some_and(|local| !local.reaches(&seen.volume)) => VolumeDecision::Nothing,
            _ if !seen.deletes_volumes => {
                VolumeDecision::Refuse(format!("driver {:?} does not delete volumes", seen.driver))
            }
            Some(node) => VolumeDecision::WaitForDetach(node.clone()),
            None => match (migrate::csi_source(&seen.volume), credentials(seen)) {
                (Ok(Some(csi)), Ok(secret)) => VolumeDecision::Delete { handle: csi.volume_handle.clone(), secret },
                (Ok(None), _) => VolumeDecision::Nothing,
                (Ok(Some(_)), Err(why)) => VolumeDecision::Refuse(why),
                (Err(error), _) => VolumeDecision::Refuse(error.to_string()),
            },
        },
        "Bound" if deletes && !held && !meta.is_deleting() => VolumeDecision::Hold,
        _ => VolumeDecision::Nothing,
    }
}

/// Is there nothing to do about the volume, whosever it is and wherever it is attached?
pub fn rests(volume: &PersistentVolume) -> bool {
    let meta = &volume.metadata;
    let held = meta.has_finalizer(finalizer::PROVISIONER);
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    match (volume_phase(volume), policy == Some("Delete")) {
        (_, false) => !held,
        ("Released", true) => meta.is_deleting() && !held,
        ("Bound", true) => held || meta.is_deleting(),
        (_, true) => true,
    }
}

/// Made by the driver or for the old plugin that it took over from; or an administrator's volume of one of them.
fn is_ours(seen: &VolumeSeen) -> bool {
    let meta = &seen.volume.metadata;
    match (meta.annotation(annotation::PROVISIONED_BY), seen.volume.spec.as_ref().and_then(|s| s.csi.as_ref())) {
        (Some(by), csi) => {
            let is_drivers = csi.is_none_or(|csi| csi.driver == seen.driver);
            is_drivers && (by == seen.driver || migrate::driver_of(by) == Some(&seen.driver))
        }
        (None, Some(csi)) => csi.driver == seen.driver,
        (None, None) => meta.annotation(annotation::MIGRATED_TO) == Some(&seen.driver),
    }
}

fn credentials(seen: &VolumeSeen) -> Result<Credentials, String> {
    let meta = &seen.volume.metadata;
    let recorded = [annotation::DELETION_SECRET_NAME, annotation::DELETION_SECRET_NAMESPACE];
    if let [Some(name), Some(namespace)] = recorded.map(|key| meta.annotation(key)) {
        let named = !name.is_empty() && !namespace.is_empty();
        return Ok(if named { Credentials::Recorded(Key::namespaced(namespace, name)) } else { Credentials::None });
    }
    let (Some(class), Some(reference)) = (&seen.class, claim_ref(&seen.volume)) else { return Ok(Credentials::None) };
    let Some(parameters) = &class.parameters else { return Ok(Credentials::None) };
    let key = claim_ref_key(reference);
    let mut claim = PersistentVolumeClaim::default();
    claim.metadata.name = Some(key.name);
    claim.metadata.namespace = key.namespace;
    let name = meta.name.as_deref().unwrap_or_default();
    Ok(secrets::deletion(parameters, name, &claim)?.map_or(Credentials::None, Credentials::OfClass))
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

    fn released(phase: &str, policy: &str, held: bool) -> PersistentVolume {
        let mut v = build::volume("v", "fast", "1Gi");
        v.spec.as_mut().unwrap().persistent_volume_reclaim_policy = Some(policy.to_owned());
        v.status.as_mut().unwrap().phase = Some(phase.to_owned());
        v.metadata.finalizers = held.then(|| vec![finalizer::PROVISIONER.to_owned()]);
        v
    }

    fn volume_seen(volume: PersistentVolume, nodes: &[&str], class: Option<StorageClass>) -> VolumeSeen {
        VolumeSeen {
            volume: Arc::new(volume),
            attached_to: nodes.iter().map(ToString::to_string).collect(),
            class: class.map(Arc::new),
            driver: DRIVER.to_owned(),
            deletes_volumes: true,
            local: None,
        }
    }

    #[test]
    fn a_volume_is_deleted_only_when_released_and_detached() {
        let deleting = |mut v: PersistentVolume| {
            v.metadata.deletion_timestamp = Some(build::time(1));
            v
        };
        let mut foreign = released("Released", "Delete", true);
        foreign.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned();
        let mut adopted = released("Released", "Delete", true);
        build::annotate(&mut adopted.metadata, annotation::PROVISIONED_BY, "other");
        let mut disguised = foreign.clone();
        build::annotate(&mut disguised.metadata, annotation::PROVISIONED_BY, DRIVER);
        let delete = VolumeDecision::Delete { handle: "handle-v".to_owned(), secret: Credentials::None };
        let nothing = VolumeDecision::Nothing;
        for (case, v, nodes, want) in [
            ("in use", released("Bound", "Delete", true), &[][..], nothing.clone()),
            ("bound and not held yet", released("Bound", "Delete", false), &[], VolumeDecision::Hold),
            ("released", released("Released", "Delete", true), &[], delete.clone()),
            ("released, its record going", deleting(released("Released", "Delete", true)), &[], delete.clone()),
            ("deleted already, the record goes", deleting(released("Released", "Delete", false)), &[], nothing.clone()),
            (
                "still attached",
                released("Released", "Delete", true),
                &["n1"],
                VolumeDecision::WaitForDetach("n1".to_owned()),
            ),
            ("failed", released("Failed", "Delete", true), &[], nothing.clone()),
            ("to be kept", released("Released", "Retain", false), &[], nothing.clone()),
            ("to be kept after all", released("Released", "Retain", true), &[], VolumeDecision::Release),
            ("deleted while bound", deleting(released("Bound", "Delete", true)), &[], nothing.clone()),
            ("another driver's", foreign, &[], nothing.clone()),
            ("made by another provisioner", adopted, &[], nothing.clone()),
            ("made by us, and of another driver", disguised, &[], nothing),
        ] {
            assert!(want == VolumeDecision::Nothing || !rests(&v), "{case}");
            assert_eq!(volume(&volume_seen(v, nodes, None)), want, "{case}");
        }
        let elsewhere =
            Local { node: "n1".to_owned(), place: Some([("zone".to_owned(), "a".to_owned())].into()), immediate: true };
        let at = |zone: &str| {
            let mut v = released("Released", "Delete", true);
            let place = cleat_csi::v1::Topology { segments: [("zone".to_owned(), zone.to_owned())].into() };
            v.spec.as_mut().unwrap().node_affinity = super::super::topology::affinity(&[place]);
            VolumeSeen { local: Some(elsewhere.clone()), ..volume_seen(v, &[], None) }
        };
        assert_eq!(volume(&at("b")), VolumeDecision::Nothing, "another node's to delete");
        assert_eq!(volume(&at("a")), delete, "our node's");
        let unable =
            VolumeSeen { deletes_volumes: false, ..volume_seen(released("Released", "Delete", true), &[], None) };
        assert!(matches!(volume(&unable), VolumeDecision::Refuse(_)));
    }

    #[test]
    fn a_volume_that_rests_needs_nothing_and_one_of_ours_that_does_not_needs_something() {
        for phase in ["Pending", "Available", "Bound", "Released", "Failed"] {
            for policy in ["Delete", "Retain"] {
                for (held, deleting) in [(false, false), (false, true), (true, false), (true, true)] {
                    let mut v = released(phase, policy, held);
                    v.metadata.deletion_timestamp = deleting.then(|| build::time(1));
                    let decision = volume(&volume_seen(v.clone(), &[], None));
                    let case = format!("{phase} {policy} held {held} deleting {deleting}");
                    assert_eq!(rests(&v), decision == VolumeDecision::Nothing, "{case}: {decision:?}");
                }
            }
        }
    }

    #[test]
    fn volumes_of_an_old_plugin_are_deleted_by_the_driver_that_took_over() {
        let old = |by: Option<&str>, told: bool, id: &str| {
            let mut v = released("Released", "Delete", true);
            let spec = v.spec.as_mut().unwrap();
            spec.csi = None;
            spec.aws_elastic_block_store = Some(serde_json::from_value(serde_json::json!({ "volumeID": id })).unwrap());
            by.into_iter().for_each(|by| build::annotate(&mut v.metadata, annotation::PROVISIONED_BY, by));
            if told {
                build::annotate(&mut v.metadata, annotation::MIGRATED_TO, "ebs.csi.aws.com");
            }
            VolumeSeen { driver: "ebs.csi.aws.com".to_owned(), ..volume_seen(v, &[], None) }
        };
        let plugin = Some("kubernetes.io/aws-ebs");
        let delete = VolumeDecision::Delete { handle: "vol-1".to_owned(), secret: Credentials::None };
        for (case, seen, want) in [
            ("made for it", old(plugin, true, "vol-1"), delete.clone()),
            ("made for another", old(Some("kubernetes.io/gce-pd"), true, "vol-1"), VolumeDecision::Nothing),
            ("an administrator's, handed over", old(None, true, "vol-1"), delete),
            ("an administrator's", old(None, false, "vol-1"), VolumeDecision::Nothing),
        ] {
            assert_eq!(volume(&seen), want, "{case}");
        }
        assert!(matches!(volume(&old(plugin, true, "aws://x/y/z")), VolumeDecision::Refuse(_)), "no such disk");
    }

    #[test]
    fn a_deletion_carries_the_secret_of_the_record_or_the_class() {
        let named = |name: &str, namespace: &str| {
            let mut v = released("Released", "Delete", true);
            build::annotate(&mut v.metadata, annotation::DELETION_SECRET_NAME, name);
            build::annotate(&mut v.metadata, annotation::DELETION_SECRET_NAMESPACE, namespace);
            v
        };
        let mut claimed = released("Released", "Delete", true);
        claimed.spec.as_mut().unwrap().claim_ref = Some(build::reference(&build::claim("team", "data", None, "1Gi")));
        let name = ("csi.storage.k8s.io/provisioner-secret-name", "${pvc.name}");
        let class = || with(&[name, ("csi.storage.k8s.io/provisioner-secret-namespace", "${pvc.namespace}")]);
        let broken = with(&[name]);
        for (case, v, class, want) in [
            ("the record's", named("s", "ns"), class(), Some(Credentials::Recorded(Key::namespaced("ns", "s")))),
            ("the record says none", named("", ""), class(), Some(Credentials::None)),
            ("the class's", claimed.clone(), class(), Some(Credentials::OfClass(Key::namespaced("team", "data")))),
            ("the class is gone", claimed.clone(), None, Some(Credentials::None)),
            ("nobody's claim", released("Released", "Delete", true), class(), Some(Credentials::None)),
            ("the class names half a secret", claimed, broken, None),
        ] {
            let got = match volume(&volume_seen(v, &[], class)) {
                VolumeDecision::Delete { secret, .. } => Some(secret),
                VolumeDecision::Refuse(_) => None,
                other => panic!("{case}: {other:?}"),
            };
            assert_eq!(got, want, "{case}");
        }
    }
}
