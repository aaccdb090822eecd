//! Builds the PersistentVolume for a volume that the driver created. Pure.

use std::collections::BTreeMap;

use cleat_api::claim::{claim_class, claim_volume_mode};
use cleat_api::migrate::{self, MigrateError};
use cleat_api::quantity::Quantity;
use cleat_api::well_known::{PROVISIONER_IDENTITY, annotation, finalizer};
use cleat_csi::v1::Volume;
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource as _;

use super::{ProvisionPlan, topology};

/// The driver's reply to CreateVolume, checked.
#[derive(Clone, Debug, PartialEq)]
pub enum CreateReply {
    Accepted(Box<PersistentVolume>),
    /// The reply cannot be used. The volume, if the reply names one, must be deleted, and the call be repeated.
    Rejected {
        volume_id: Option<String>,
        why: String,
    },
}

pub fn check_reply(
    claim: &PersistentVolumeClaim,
    plan: &ProvisionPlan,
    driver: &str,
    identity: &str,
    volume: Option<Volume>,
) -> CreateReply {
    let Some(volume) = volume else {
        return CreateReply::Rejected { volume_id: None, why: "driver answered without a volume".to_owned() };
    };
    let volume_id = Some(volume.volume_id.clone());
    if let Some(why) = defect(plan, &volume) {
        return CreateReply::Rejected { volume_id, why };
    }
    match build(claim, plan, driver, identity, volume) {
        Ok(object) => CreateReply::Accepted(Box::new(object)),
        Err(error) => CreateReply::Rejected { volume_id, why: error.to_string() },
    }
}

/// Why a created volume is not what the plan requested.
pub fn defect(plan: &ProvisionPlan, volume: &Volume) -> Option<String> {
    let requested = plan.request.capacity_range.map_or(0, |range| range.required_bytes);
    let got = volume.capacity_bytes;
    if got != 0 && got < requested {
        return Some(format!("created volume capacity {got} less than requested capacity {requested}"));
    }
    let is_copy = plan.request.volume_content_source.is_some();
    (is_copy && volume.content_source.is_none()).then(|| "volume content source missing".to_owned())
}

/// A volume for a class of an in-tree plugin is written in that plugin's form. Fails if it has no such form.
pub fn build(
    claim: &PersistentVolumeClaim,
    plan: &ProvisionPlan,
    driver: &str,
    identity: &str,
    volume: Volume,
) -> Result<PersistentVolume, MigrateError> {
    let requested = plan.request.capacity_range.map_or(0, |range| range.required_bytes);
    let bytes = if volume.capacity_bytes == 0 { requested } else { volume.capacity_bytes };
    let capacity = resource::Quantity(Quantity::from_bytes(bytes).to_string());
    let mut attributes = BTreeMap::from([(PROVISIONER_IDENTITY.to_owned(), identity.to_owned())]);
    attributes.extend(volume.volume_context);
    let spec = claim.spec.as_ref();
    let object = PersistentVolume {
        metadata: ObjectMeta {
            name: Some(plan.request.name.clone()),
            annotations: Some(annotations(plan)),
            finalizers: Some(vec![finalizer::PROVISIONER.to_owned()]),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: spec.and_then(|s| s.access_modes.clone()),
            capacity: Some(BTreeMap::from([("storage".to_owned(), capacity)])),
            claim_ref: Some(ObjectReference {
                resource_version: claim.metadata.resource_version.clone(),
                ..claim.object_ref(&())
            }),
            csi: Some(CSIPersistentVolumeSource {
                driver: driver.to_owned(),
                volume_handle: volume.volume_id,
                volume_attributes: Some(attributes),
                fs_type: plan.fs_type.clone(),
                read_only: plan.read_only.then_some(true),
                controller_publish_secret_ref: plan.secrets.publish.clone(),
                node_stage_secret_ref: plan.secrets.stage.clone(),
                node_publish_secret_ref: plan.secrets.node_publish.clone(),
                controller_expand_secret_ref: plan.secrets.expand.clone(),
                node_expand_secret_ref: plan.secrets.node_expand.clone(),
            }),
            mount_options: plan.mount_options.clone(),
            node_affinity: topology::affinity(&volume.accessible_topology),
            persistent_volume_reclaim_policy: Some(plan.reclaim_policy.clone()),
            storage_class_name: claim_class(claim).map(ToOwned::to_owned),
            volume_attributes_class_name: spec
                .and_then(|s| s.volume_attributes_class_name.clone())
                .filter(|n| !n.is_empty()),
            volume_mode: Some(claim_volume_mode(claim).to_owned()),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    };
    migrate::to_in_tree_volume(&plan.provisioner, object)
}

fn annotations(plan: &ProvisionPlan) -> BTreeMap<String, String> {
    let name_and_namespace = |key: Option<&cleat_api::Key>| {
        let name = key.map(|k| k.name.clone()).unwrap_or_default();
        (name, key.and_then(|k| k.namespace.clone()).unwrap_or_default())
    };
    let (name, namespace) = name_and_namespace(plan.secrets.provision.as_ref());
    let mut all = BTreeMap::from([
        (annotation::PROVISIONED_BY.to_owned(), plan.provisioner.clone()),
        // Written even if empty: a deletion then does not look for a secret in the class.
        (annotation::DELETION_SECRET_NAME.to_owned(), name),
        (annotation::DELETION_SECRET_NAMESPACE.to_owned(), namespace),
    ]);
    if plan.secrets.modify.is_some() {
        let (name, namespace) = name_and_namespace(plan.secrets.modify.as_ref());
        all.insert(annotation::MODIFY_SECRET_NAME.to_owned(), name);
        all.insert(annotation::MODIFY_SECRET_NAMESPACE.to_owned(), namespace);
    }
    all
}
