//! Strategy of PersistentVolume (v1).

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    NodeSelectorTerm, PersistentVolume, PersistentVolumeSpec, PersistentVolumeStatus, SecretReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

use super::field_checks::{
    check_access_modes, check_flex_options, check_immutable, check_storage_quantity, check_supported,
};
use super::quantity::canonicalize_quantities;
use super::table_cells::{or_unset, short_access_modes};
use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names;

pub(super) struct PersistentVolumeStrategy;

impl Strategy for PersistentVolumeStrategy {
    type Object = PersistentVolume;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "PersistentVolume", "persistentvolumes")
            .short_names(&["pv"])
            .cluster_scoped()
            .with_status()
    }

    fn set_defaults(volume: &mut PersistentVolume) {
        let spec = volume.spec.get_or_insert_default();
        spec.persistent_volume_reclaim_policy.get_or_insert_with(|| "Retain".into());
        spec.volume_mode.get_or_insert_with(|| "Filesystem".into());
        if let Some(path) = &mut spec.host_path {
            path.type_.get_or_insert_default();
        }
        if let Some(iscsi) = &mut spec.iscsi {
            iscsi.iscsi_interface.get_or_insert_with(|| "default".into());
        }
        canonicalize_quantities(&mut spec.capacity);
        volume.status.get_or_insert_default().phase.get_or_insert_with(|| "Pending".into());
    }

    fn prepare_create(volume: &mut PersistentVolume, now: Timestamp) {
        volume.status = Some(PersistentVolumeStatus {
            phase: Some("Pending".into()),
            last_phase_transition_time: Some(Time(now)),
            ..Default::default()
        });
    }

    fn prepare_update(new: &mut PersistentVolume, old: &PersistentVolume) {
        new.status = old.status.clone();
    }

    fn prepare_status(new: &mut PersistentVolume, old: &PersistentVolume, now: Timestamp) {
        new.spec = old.spec.clone();
        let old_status = old.status.clone().unwrap_or_default();
        let status = new.status.get_or_insert_default();
        // The API stores this time in whole seconds; compare what would be stored.
        let sent =
            status.last_phase_transition_time.as_ref().and_then(|t| Timestamp::from_second(t.0.as_second()).ok());
        status.last_phase_transition_time = sent.map(Time);
        let is_unchanged = status.last_phase_transition_time.is_none()
            || status.last_phase_transition_time == old_status.last_phase_transition_time;
        if is_unchanged {
            status.last_phase_transition_time = match status.phase == old_status.phase {
                true => old_status.last_phase_transition_time,
                false => Some(Time(now)),
            };
        }
    }

    fn validate(volume: &PersistentVolume) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let unspecified = PersistentVolumeSpec::default();
        let spec = volume.spec.as_ref().unwrap_or(&unspecified);
        check_access_modes(spec.access_modes.as_ref(), "spec.accessModes", &mut errors);
        if spec.capacity.as_ref().is_none_or(|c| c.is_empty()) {
            errors.push(FieldError::required("spec.capacity", ""));
        } else {
            check_storage_quantity(spec.capacity.as_ref(), "spec.capacity[storage]", &mut errors);
            for key in spec.capacity.iter().flatten().map(|(k, _)| k).filter(|k| *k != "storage") {
                errors.push(FieldError::not_supported("spec.capacity", key, &["storage"]));
            }
        }
        let policies = ["Delete", "Recycle", "Retain"];
        let policy = spec.persistent_volume_reclaim_policy.as_ref();
        check_supported("spec.persistentVolumeReclaimPolicy", policy, &policies, &mut errors);
        check_supported("spec.volumeMode", spec.volume_mode.as_ref(), &["Block", "Filesystem"], &mut errors);
        check_volume_source(spec, &mut errors);
        if let Some(class) = spec.storage_class_name.as_deref().filter(|c| !c.is_empty())
            && let Err(why) = names::validate_subdomain(class)
        {
            errors.push(FieldError::invalid("spec.storageClassName", class, why));
        }
        match spec.volume_attributes_class_name.as_deref() {
            Some("") => {
                let why = "an empty string is disallowed";
                errors.push(FieldError::required("spec.volumeAttributesClassName", why));
            }
            Some(_) if spec.csi.is_none() => {
                let why = "has to be specified when using volumeAttributesClassName";
                errors.push(FieldError::required("spec.csi", why));
            }
            _ => {}
        }
        errors
    }

    fn validate_update(new: &PersistentVolume, old: &PersistentVolume) -> Vec<FieldError> {
        let mut errors = Vec::new();
        if new.spec == old.spec {
            return errors;
        }
        let unspecified = PersistentVolumeSpec::default();
        let [new, old] = [new, old].map(|volume| volume.spec.as_ref().unwrap_or(&unspecified));
        let mut allowed = only_source(old);
        if let (Some(allowed), Some(new)) = (&mut allowed.csi, &new.csi)
            && allowed.controller_expand_secret_ref.is_none()
        {
            allowed.controller_expand_secret_ref = new.controller_expand_secret_ref.clone();
        }
        if only_source(new) != allowed {
            let why = "spec.persistentvolumesource is immutable after creation";
            errors.push(FieldError::forbidden("spec.persistentvolumesource", why));
        }
        check_immutable("spec.volumeMode", &new.volume_mode, &old.volume_mode, &mut errors);
        if old.node_affinity.is_some() && new.node_affinity != old.node_affinity && !only_replaces_beta_labels(new, old)
        {
            errors.push(FieldError::invalid("spec.nodeAffinity", &new.node_affinity, "field is immutable"));
        }
        if old.volume_attributes_class_name.is_some() && new.volume_attributes_class_name.is_none() {
            let why = "update from non-nil value to nil is forbidden";
            errors.push(FieldError::forbidden("spec.volumeAttributesClassName", why));
        }
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[
            NAME,
            Column::text("Capacity", "Size of the volume."),
            Column::text("Access Modes", "Ways the volume can be mounted."),
            Column::text("Reclaim Policy", "What happens to the volume when its claim is deleted."),
            Column::text("Status", "Phase of the volume."),
            Column::text("Claim", "Claim the volume is bound to or reserved for."),
            Column::text("StorageClass", "Storage class of the volume."),
            Column::text("VolumeAttributesClass", "Volume attributes class of the volume."),
            Column::text("Reason", "Why the volume is in its phase."),
            AGE,
            Column::text("VolumeMode", "Whether the volume is a file system or a block device.").wide(),
        ];
        COLUMNS
    }

    fn cells(volume: &PersistentVolume, now: Timestamp) -> Vec<Value> {
        let spec = volume.spec.clone().unwrap_or_default();
        let status = volume.status.clone().unwrap_or_default();
        let claim = spec.claim_ref.as_ref().map(|c| {
            format!("{}/{}", c.namespace.as_deref().unwrap_or_default(), c.name.as_deref().unwrap_or_default())
        });
        let phase = match volume.metadata.deletion_timestamp {
            Some(_) => "Terminating".into(),
            None => status.phase.unwrap_or_default(),
        };
        let capacity = spec.capacity.as_ref().and_then(|c| c.get("storage")).map(|q| q.0.clone());
        vec![
            column::name(&volume.metadata),
            capacity.unwrap_or_default().into(),
            short_access_modes(spec.access_modes.as_ref()).into(),
            spec.persistent_volume_reclaim_policy.clone().unwrap_or_default().into(),
            phase.into(),
            claim.unwrap_or_default().into(),
            cleat_api::claim::volume_class(volume).into(),
            or_unset(spec.volume_attributes_class_name.as_deref()),
            status.reason.unwrap_or_default().into(),
            column::age(&volume.metadata, now),
            or_unset(spec.volume_mode.as_deref()),
        ]
    }
}

/// The names of the volume sources that are set.
fn present_sources(spec: &PersistentVolumeSpec) -> Vec<&'static str> {
    let present = [
        ("hostPath", spec.host_path.is_some()),
        ("gcePersistentDisk", spec.gce_persistent_disk.is_some()),
        ("awsElasticBlockStore", spec.aws_elastic_block_store.is_some()),
        ("glusterfs", spec.glusterfs.is_some()),
        ("flocker", spec.flocker.is_some()),
        ("nfs", spec.nfs.is_some()),
        ("rbd", spec.rbd.is_some()),
        ("quobyte", spec.quobyte.is_some()),
        ("cephfs", spec.cephfs.is_some()),
        ("iscsi", spec.iscsi.is_some()),
        ("cinder", spec.cinder.is_some()),
        ("fc", spec.fc.is_some()),
        ("flexVolume", spec.flex_volume.is_some()),
        ("azureFile", spec.azure_file.is_some()),
        ("vsphereVolume", spec.vsphere_volume.is_some()),
        ("photonPersistentDisk", spec.photon_persistent_disk.is_some()),
        ("portworxVolume", spec.portworx_volume.is_some()),
        ("azureDisk", spec.azure_disk.is_some()),
        ("scaleIO", spec.scale_io.is_some()),
        ("local", spec.local.is_some()),
        ("storageos", spec.storageos.is_some()),
        ("csi", spec.csi.is_some()),
    ];
    present.into_iter().filter(|(_, set)| *set).map(|(name, _)| name).collect()
}

/// The spec with every field cleared that is not a volume source.
fn only_source(spec: &PersistentVolumeSpec) -> PersistentVolumeSpec {
    PersistentVolumeSpec {
        access_modes: None,
        capacity: None,
        claim_ref: None,
        mount_options: None,
        node_affinity: None,
        persistent_volume_reclaim_policy: None,
        storage_class_name: None,
        volume_attributes_class_name: None,
        volume_mode: None,
        ..spec.clone()
    }
}

fn check_volume_source(spec: &PersistentVolumeSpec, errors: &mut Vec<FieldError>) {
    let sources = present_sources(spec);
    if sources.is_empty() {
        errors.push(FieldError::required("spec", "must specify a volume type"));
    }
    for extra in sources.iter().skip(1) {
        errors.push(FieldError::forbidden(format!("spec.{extra}"), "may not specify more than 1 volume type"));
    }
    if let Some(csi) = &spec.csi {
        match csi.driver.as_str() {
            "" => errors.push(FieldError::required("spec.csi.driver", "")),
            long if long.len() > names::MAX_CSI_DRIVER_NAME_BYTES => {
                errors.push(FieldError::too_long("spec.csi.driver", names::MAX_CSI_DRIVER_NAME_BYTES));
            }
            driver => {
                if let Err(why) = names::validate_csi_driver_name(driver) {
                    errors.push(FieldError::invalid("spec.csi.driver", driver, why));
                }
            }
        }
        if csi.volume_handle.is_empty() {
            errors.push(FieldError::required("spec.csi.volumeHandle", ""));
        }
        for (name, reference) in [
            ("controllerPublishSecretRef", &csi.controller_publish_secret_ref),
            ("controllerExpandSecretRef", &csi.controller_expand_secret_ref),
            ("nodePublishSecretRef", &csi.node_publish_secret_ref),
            ("nodeStageSecretRef", &csi.node_stage_secret_ref),
            ("nodeExpandSecretRef", &csi.node_expand_secret_ref),
        ] {
            check_secret_reference(&format!("spec.csi.{name}"), reference.as_ref(), errors);
        }
    }
    if let Some(flex) = &spec.flex_volume {
        if flex.driver.is_empty() {
            errors.push(FieldError::required("spec.flexVolume.driver", ""));
        }
        check_flex_options("spec.flexVolume.options", flex.options.as_ref(), errors);
    }
    if let Some(path) = &spec.host_path {
        if path.path.is_empty() {
            errors.push(FieldError::required("spec.hostPath.path", ""));
        } else if path.path.split('/').any(|part| part == "..") {
            errors.push(FieldError::invalid("spec.hostPath.path", &path.path, "must not contain '..'"));
        } else if path.path == "/" && spec.persistent_volume_reclaim_policy.as_deref() == Some("Recycle") {
            let why = "may not be 'recycle' for a hostPath mount of '/'";
            errors.push(FieldError::forbidden("spec.persistentVolumeReclaimPolicy", why));
        }
    }
    if let Some(local) = &spec.local {
        if local.path.is_empty() {
            errors.push(FieldError::required("spec.local.path", ""));
        }
        if spec.node_affinity.as_ref().is_none_or(|a| a.required.is_none()) {
            errors.push(FieldError::required("spec.nodeAffinity", "Local volume requires node affinity"));
        }
    }
    if let Some(nfs) = &spec.nfs {
        if nfs.server.is_empty() {
            errors.push(FieldError::required("spec.nfs.server", ""));
        }
        if nfs.path.is_empty() {
            errors.push(FieldError::required("spec.nfs.path", ""));
        } else if !nfs.path.starts_with('/') {
            errors.push(FieldError::invalid("spec.nfs.path", &nfs.path, "must be an absolute path"));
        }
    }
}

/// Beta labels of nodes and the labels that replaced them.
const REPLACED_NODE_LABELS: [(&str, &str); 5] = [
    ("beta.kubernetes.io/os", "kubernetes.io/os"),
    ("beta.kubernetes.io/arch", "kubernetes.io/arch"),
    ("beta.kubernetes.io/instance-type", "node.kubernetes.io/instance-type"),
    ("failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"),
    ("failure-domain.beta.kubernetes.io/region", "topology.kubernetes.io/region"),
];

/// True if the two node affinities differ only in beta labels that were replaced by their successors.
fn only_replaces_beta_labels(new: &PersistentVolumeSpec, old: &PersistentVolumeSpec) -> bool {
    let terms = |spec: &PersistentVolumeSpec| {
        let required = spec.node_affinity.as_ref().and_then(|a| a.required.clone());
        required.map(|r| r.node_selector_terms).unwrap_or_default()
    };
    let (new, old) = (terms(new), terms(old));
    let is_same_term = |(new, old): (&NodeSelectorTerm, &NodeSelectorTerm)| {
        let (new_rules, old_rules) = (new.match_expressions.iter().flatten(), old.match_expressions.iter().flatten());
        new_rules.clone().count() == old_rules.clone().count()
            && new.match_fields == old.match_fields
            && new_rules.zip(old_rules).all(|(new, old)| {
                let is_same_label =
                    new.key == old.key || REPLACED_NODE_LABELS.contains(&(old.key.as_str(), new.key.as_str()));
                is_same_label && new.operator == old.operator && new.values == old.values
            })
    };
    new.len() == old.len() && new.iter().zip(&old).all(is_same_term)
}

fn check_secret_reference(path: &str, reference: Option<&SecretReference>, errors: &mut Vec<FieldError>) {
    let Some(reference) = reference else { return };
    for (part, value) in [("name", &reference.name), ("namespace", &reference.namespace)] {
        if value.as_deref().is_none_or(str::is_empty) {
            errors.push(FieldError::required(format!("{path}.{part}"), ""));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn volume(change: Value) -> PersistentVolume {
        let mut spec = json!({
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" },
            "csi": { "driver": "block.cleat.dev", "volumeHandle": "h" },
        });
        json_patch::merge(&mut spec, &change);
        let mut volume: PersistentVolume =
            serde_json::from_value(json!({ "metadata": { "name": "v" }, "spec": spec })).unwrap();
        PersistentVolumeStrategy::set_defaults(&mut volume);
        volume
    }

    #[test]
    fn transition_times_are_compared_in_whole_seconds() {
        let at = |text: &str, phase: &str| {
            let mut volume = volume(json!({}));
            let status = json!({ "phase": phase, "lastPhaseTransitionTime": text });
            volume.status = serde_json::from_value(status).unwrap();
            volume
        };
        let now = "2026-01-01T00:00:09Z";
        for (case, old, sent, want) in [
            ("sent back as it was received", "2026-01-01T00:00:05.5Z", "2026-01-01T00:00:05Z", now),
            ("sent back with a fraction", "2026-01-01T00:00:05Z", "2026-01-01T00:00:05.5Z", now),
            ("the client's own", "2026-01-01T00:00:05Z", "2026-01-01T00:00:06.5Z", "2026-01-01T00:00:06Z"),
        ] {
            let mut old = at(old, "Available");
            // Truncates the time as a write to the store does.
            PersistentVolumeStrategy::prepare_status(&mut old, &volume(json!({})), now.parse().unwrap());
            let mut new = at(sent, "Bound");
            PersistentVolumeStrategy::prepare_status(&mut new, &old, now.parse().unwrap());
            let time = new.status.unwrap().last_phase_transition_time.unwrap();
            assert_eq!(time.0, want.parse().unwrap(), "{case}");
        }
    }

    #[test]
    fn invalid_volumes_name_the_field() {
        for (case, change, field) in [
            ("no source", json!({ "csi": null }), "spec"),
            ("two sources", json!({ "hostPath": { "path": "/x" } }), "spec.csi"),
            ("no handle", json!({ "csi": { "volumeHandle": "" } }), "spec.csi.volumeHandle"),
            ("no capacity", json!({ "capacity": null }), "spec.capacity"),
            ("other capacity", json!({ "capacity": { "cpu": "1" } }), "spec.capacity"),
            (
                "unknown policy",
                json!({ "persistentVolumeReclaimPolicy": "Burn" }),
                "spec.persistentVolumeReclaimPolicy",
            ),
            ("flex without a driver", json!({ "csi": null, "flexVolume": {} }), "spec.flexVolume.driver"),
            (
                "a flex option with a key of Kubernetes' own",
                json!({ "csi": null, "flexVolume": { "driver": "d", "options": { "Kubernetes.io/fsType": "x" } } }),
                "spec.flexVolume.options[Kubernetes.io/fsType]",
            ),
            ("local without affinity", json!({ "csi": null, "local": { "path": "/x" } }), "spec.nodeAffinity"),
        ] {
            let errors = PersistentVolumeStrategy::validate(&volume(change));
            assert_eq!(errors.first().map(|e| e.field.as_str()), Some(field), "{case}: {errors:?}");
        }
        assert!(PersistentVolumeStrategy::validate(&volume(json!({}))).is_empty());
    }

    #[test]
    fn a_node_affinity_changes_only_from_beta_labels() {
        let at = |key: &str, zone: &str| {
            let rule = json!({ "key": key, "operator": "In", "values": [zone] });
            json!({ "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [rule] }] } } })
        };
        let (beta, now) = ("failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone");
        let field = Some("spec.nodeAffinity");
        for (case, before, after, want) in [
            ("set", json!({}), at(now, "a"), None),
            ("the same", at(now, "a"), at(now, "a"), None),
            ("its label's new name", at(beta, "a"), at(now, "a"), None),
            ("its label's old name", at(now, "a"), at(beta, "a"), field),
            ("another zone, with the new name", at(beta, "a"), at(now, "b"), field),
            ("another label", at(beta, "a"), at("rack", "a"), field),
            ("none any more", at(now, "a"), json!({}), field),
        ] {
            let errors = PersistentVolumeStrategy::validate_update(&volume(after), &volume(before));
            assert_eq!(errors.first().map(|e| e.field.as_str()), want, "{case}: {errors:?}");
        }
    }

    #[test]
    fn the_source_of_a_volume_is_immutable() {
        let old = volume(json!({}));
        for (case, change, field) in [
            ("nothing", json!({}), None),
            ("the handle", json!({ "csi": { "volumeHandle": "other" } }), Some("spec.persistentvolumesource")),
            (
                "an expand secret where none was",
                json!({ "csi": { "controllerExpandSecretRef": { "name": "s", "namespace": "n" } } }),
                None,
            ),
            ("the claim and the size", json!({ "claimRef": { "name": "c" }, "capacity": { "storage": "2Gi" } }), None),
            ("the mode", json!({ "volumeMode": "Block" }), Some("spec.volumeMode")),
        ] {
            let errors = PersistentVolumeStrategy::validate_update(&volume(change), &old);
            assert_eq!(errors.first().map(|e| e.field.as_str()), field, "{case}: {errors:?}");
        }
    }
}
