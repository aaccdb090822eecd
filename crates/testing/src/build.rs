//! Objects with sensible defaults, for tables and tests.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, Container, ContainerState, ContainerStateRunning, ContainerStatus,
    EphemeralVolumeSource, Node, NodeCondition, NodeStatus, ObjectReference, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeClaimSpec, PersistentVolumeClaimStatus, PersistentVolumeClaimVolumeSource, PersistentVolumeSpec,
    PersistentVolumeStatus, Pod, PodSpec, PodStatus, Volume, VolumeResourceRequirements,
};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;

use cleat_api::names;
use cleat_api::well_known::annotation;

pub const DRIVER: &str = "block.cleat.dev";

/// A point in time, `seconds` after the epoch.
pub fn time(seconds: i64) -> Time {
    Time(Timestamp::from_second(seconds).unwrap_or_default())
}

fn meta(namespace: Option<&str>, name: &str) -> ObjectMeta {
    ObjectMeta {
        namespace: namespace.map(ToOwned::to_owned),
        name: Some(name.to_owned()),
        uid: Some(format!("uid-{name}")),
        resource_version: Some("1".to_owned()),
        creation_timestamp: Some(time(1000)),
        ..ObjectMeta::default()
    }
}

pub fn annotate(meta: &mut ObjectMeta, key: &str, value: &str) {
    meta.annotations.get_or_insert_default().insert(key.to_owned(), value.to_owned());
}

/// A pending ReadWriteOnce claim.
pub fn claim(namespace: &str, name: &str, class: Option<&str>, size: &str) -> PersistentVolumeClaim {
    PersistentVolumeClaim {
        metadata: meta(Some(namespace), name),
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
            resources: Some(VolumeResourceRequirements {
                requests: Some(BTreeMap::from([("storage".to_owned(), Quantity(size.to_owned()))])),
                ..VolumeResourceRequirements::default()
            }),
            storage_class_name: class.map(ToOwned::to_owned),
            ..PersistentVolumeClaimSpec::default()
        }),
        status: Some(PersistentVolumeClaimStatus {
            phase: Some("Pending".to_owned()),
            ..PersistentVolumeClaimStatus::default()
        }),
    }
}

/// An available ReadWriteOnce CSI volume whose handle is `handle-<name>`.
pub fn volume(name: &str, class: &str, size: &str) -> PersistentVolume {
    PersistentVolume {
        metadata: meta(None, name),
        spec: Some(PersistentVolumeSpec {
            access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
            capacity: Some(BTreeMap::from([("storage".to_owned(), Quantity(size.to_owned()))])),
            csi: Some(CSIPersistentVolumeSource {
                driver: DRIVER.to_owned(),
                volume_handle: format!("handle-{name}"),
                ..CSIPersistentVolumeSource::default()
            }),
            persistent_volume_reclaim_policy: Some("Delete".to_owned()),
            storage_class_name: Some(class.to_owned()),
            ..PersistentVolumeSpec::default()
        }),
        status: Some(PersistentVolumeStatus {
            phase: Some("Available".to_owned()),
            ..PersistentVolumeStatus::default()
        }),
    }
}

pub fn reference(claim: &PersistentVolumeClaim) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        namespace: claim.metadata.namespace.clone(),
        name: claim.metadata.name.clone(),
        uid: claim.metadata.uid.clone(),
        resource_version: claim.metadata.resource_version.clone(),
        ..ObjectReference::default()
    }
}

/// A claim and a volume bound to each other, as the binder leaves them.
pub fn bound(
    mut claim: PersistentVolumeClaim,
    mut volume: PersistentVolume,
) -> (PersistentVolumeClaim, PersistentVolume) {
    volume.spec.get_or_insert_default().claim_ref = Some(reference(&claim));
    volume.status.get_or_insert_default().phase = Some("Bound".to_owned());
    claim.spec.get_or_insert_default().volume_name = volume.metadata.name.clone();
    annotate(&mut claim.metadata, annotation::BIND_COMPLETED, annotation::YES);
    let status = claim.status.get_or_insert_default();
    status.phase = Some("Bound".to_owned());
    status.access_modes = volume.spec.as_ref().and_then(|s| s.access_modes.clone());
    status.capacity = volume.spec.as_ref().and_then(|s| s.capacity.clone());
    (claim, volume)
}

pub fn class(name: &str, provisioner: &str) -> StorageClass {
    StorageClass {
        metadata: meta(None, name),
        provisioner: provisioner.to_owned(),
        reclaim_policy: Some("Delete".to_owned()),
        volume_binding_mode: Some("Immediate".to_owned()),
        ..StorageClass::default()
    }
}

/// A pod on `node` (unscheduled if empty) with one volume per claim.
pub fn pod(namespace: &str, name: &str, node: &str, claims: &[&str]) -> Pod {
    let volumes = claims.iter().map(|claim| Volume {
        name: format!("v-{claim}"),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: (*claim).to_owned(),
            read_only: None,
        }),
        ..Volume::default()
    });
    Pod {
        metadata: meta(Some(namespace), name),
        spec: Some(PodSpec {
            containers: vec![Container {
                name: "main".to_owned(),
                image: Some("busybox".to_owned()),
                ..Container::default()
            }],
            node_name: (!node.is_empty()).then(|| node.to_owned()),
            volumes: Some(volumes.collect()),
            ..PodSpec::default()
        }),
        status: Some(PodStatus { phase: Some("Pending".to_owned()), ..PodStatus::default() }),
    }
}

pub fn ephemeral_volume(pod: &mut Pod, name: &str) {
    pod.spec.get_or_insert_default().volumes.get_or_insert_default().push(Volume {
        name: name.to_owned(),
        ephemeral: Some(EphemeralVolumeSource::default()),
        ..Volume::default()
    });
}

pub fn running(pod: &mut Pod, container: &str) {
    pod.status.get_or_insert_default().container_statuses.get_or_insert_default().push(ContainerStatus {
        name: container.to_owned(),
        state: Some(ContainerState { running: Some(ContainerStateRunning::default()), ..ContainerState::default() }),
        ..ContainerStatus::default()
    });
}

/// A ready node that the attach/detach controller manages.
pub fn node(name: &str) -> Node {
    let mut metadata = meta(None, name);
    annotate(&mut metadata, annotation::CONTROLLER_MANAGED_ATTACH, "true");
    let ready = NodeCondition { type_: "Ready".to_owned(), status: "True".to_owned(), ..NodeCondition::default() };
    Node {
        metadata,
        status: Some(NodeStatus { conditions: Some(vec![ready]), ..NodeStatus::default() }),
        ..Node::default()
    }
}

pub fn attachment(volume: &PersistentVolume, node: &str) -> VolumeAttachment {
    let csi = volume.spec.as_ref().and_then(|s| s.csi.clone()).unwrap_or_default();
    VolumeAttachment {
        metadata: meta(None, &names::attachment(&csi.volume_handle, &csi.driver, node)),
        spec: VolumeAttachmentSpec {
            attacher: csi.driver,
            node_name: node.to_owned(),
            source: VolumeAttachmentSource {
                persistent_volume_name: volume.metadata.name.clone(),
                ..VolumeAttachmentSource::default()
            },
        },
        status: None,
    }
}
