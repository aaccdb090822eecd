//! Decides the next step for an attachment, and whether a volume keeps the attacher's finalizer. Pure.

use std::borrow::Cow;
use std::sync::Arc;

use cleat_api::access::{self, MultiWriterSupport};
use cleat_api::claim::{self, BLOCK};
use cleat_api::key::Meta as _;
use cleat_api::well_known::annotation;
use cleat_api::{migrate, names};
use cleat_csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use cleat_csi::v1::{ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, VolumeCapability};
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, PersistentVolume, SecretReference};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The capabilities of the driver that matter for publishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishCapabilities {
    pub publishes: bool,
    pub publishes_read_only: bool,
    pub single_node_multi_writer: bool,
}

#[derive(Clone, Debug)]
pub struct AttachmentSnapshot {
    pub attachment: Arc<VolumeAttachment>,
    pub volume: Option<Arc<PersistentVolume>>,
    /// The driver's id of the node, from the CSINode.
    pub node_id: Option<String>,
    pub driver: String,
    pub capabilities: PublishCapabilities,
    /// The file system type for a volume that names none.
    pub default_fs_type: String,
    /// The driver's list of published volumes contradicts the attachment: the call is made whatever the status says.
    pub driver_disagrees: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AttachmentDecision {
    Nothing,
    /// The driver does not publish volumes: only the status is written.
    Confirm,
    Publish(Box<PublishPlan>),
    Unpublish(Box<UnpublishPlan>),
    /// The call cannot be made. The reason goes into the status; the attachment is tried again with backoff, and when its
    /// volume or CSINode appears.
    Refuse {
        attaching: bool,
        why: String,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct PublishPlan {
    /// The volume that needs the finalizer. `None` for an inline volume, and for a volume that has it.
    pub add_volume_finalizer: Option<Arc<PersistentVolume>>,
    pub add_attachment_finalizer: bool,
    pub request: ControllerPublishVolumeRequest,
    pub secret: Option<SecretReference>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct UnpublishPlan {
    pub request: ControllerUnpublishVolumeRequest,
    pub secret: Option<SecretReference>,
}

pub fn attachment(snapshot: &AttachmentSnapshot) -> AttachmentDecision {
    let attachment = &snapshot.attachment;
    if attachment.spec.attacher != snapshot.driver {
        return AttachmentDecision::Nothing;
    }
    let attached = attachment.status.as_ref().is_some_and(|s| s.attached);
    if !snapshot.capabilities.publishes {
        return if attached { AttachmentDecision::Nothing } else { AttachmentDecision::Confirm };
    }
    let attaching = !attachment.metadata.is_deleting();
    let has_finalizer = attachment.metadata.has_finalizer(&names::attacher_finalizer(&snapshot.driver));
    if !snapshot.driver_disagrees && ((attaching && attached) || (!attaching && !has_finalizer)) {
        return AttachmentDecision::Nothing;
    }
    let next = if attaching { publish(snapshot) } else { unpublish(snapshot) };
    next.unwrap_or_else(|why| AttachmentDecision::Refuse { attaching, why })
}

/// The volume of an attachment, in the form that the driver understands.
struct TargetVolume<'a> {
    /// `None` for an inline volume.
    stored: Option<&'a Arc<PersistentVolume>>,
    /// `stored` or the inline volume; volumes of in-tree plugins are translated to CSI.
    volume: Cow<'a, PersistentVolume>,
}

impl TargetVolume<'_> {
    fn csi(&self) -> Option<&CSIPersistentVolumeSource> {
        self.volume.spec.as_ref()?.csi.as_ref()
    }
}

fn target(snapshot: &AttachmentSnapshot) -> Result<TargetVolume<'_>, String> {
    let source = &snapshot.attachment.spec.source;
    let target = match (&source.persistent_volume_name, &source.inline_volume_spec) {
        (Some(name), _) => {
            let stored = snapshot.volume.as_ref().ok_or_else(|| format!("persistentvolume {name:?} not found"))?;
            TargetVolume {
                stored: Some(stored),
                volume: migrate::translate_volume(stored).map_err(|error| error.to_string())?,
            }
        }
        (None, Some(spec)) => {
            let volume = PersistentVolume { metadata: ObjectMeta::default(), spec: Some(spec.clone()), status: None };
            TargetVolume { stored: None, volume: Cow::Owned(volume) }
        }
        (None, None) => return Err("neither a PersistentVolume nor an inline volume is named".to_owned()),
    };
    if target.csi().is_none_or(|csi| csi.driver != snapshot.driver) {
        let name = source.persistent_volume_name.as_deref().unwrap_or("inline");
        return Err(format!("persistentvolume {name:?} is not a volume of driver {:?}", snapshot.driver));
    }
    Ok(target)
}

/// The volume's handle as the driver lists it. `None` if the volume or the node id is unknown.
pub fn listed_handle(snapshot: &AttachmentSnapshot) -> Option<String> {
    let target = target(snapshot).ok()?;
    let handle = &target.csi()?.volume_handle;
    let node_id = node_id(snapshot)?;
    let migrated = target.stored.is_none_or(|stored| matches!(migrate::translate_volume(stored), Ok(Cow::Owned(_))));
    if !migrated {
        return Some(handle.clone());
    }
    migrate::repair_handle(&snapshot.driver, handle, node_id).ok()
}

/// The node id of the CSINode or, if the node has left the cluster, the one recorded on the attachment.
pub fn node_id(snapshot: &AttachmentSnapshot) -> Option<&str> {
    snapshot.node_id.as_deref().or_else(|| snapshot.attachment.metadata.annotation(annotation::CSI_NODE_ID))
}

fn publish(snapshot: &AttachmentSnapshot) -> Result<AttachmentDecision, String> {
    let target = target(snapshot)?;
    let csi = target.csi().ok_or("no volume of a CSI driver")?;
    let finalizer = names::attacher_finalizer(&snapshot.driver);
    if let Some(stored) = target.stored.filter(|stored| stored.metadata.is_deleting()) {
        let name = stored.metadata.name.as_deref().unwrap_or_default();
        return Err(format!("PersistentVolume \"{name}\" is marked for deletion"));
    }
    let node = &snapshot.attachment.spec.node_name;
    // Not the recorded id: a node of the same name may be another machine by now.
    let node_id = snapshot
        .node_id
        .clone()
        .ok_or_else(|| format!("CSINode {node} does not contain driver {}", snapshot.driver))?;
    let meta = &snapshot.attachment.metadata;
    let add_attachment_finalizer =
        !meta.has_finalizer(&finalizer) || meta.annotation(annotation::CSI_NODE_ID) != Some(&node_id);
    Ok(AttachmentDecision::Publish(Box::new(PublishPlan {
        add_volume_finalizer: target.stored.filter(|stored| !stored.metadata.has_finalizer(&finalizer)).cloned(),
        add_attachment_finalizer,
        request: ControllerPublishVolumeRequest {
            volume_id: csi.volume_handle.clone(),
            node_id,
            volume_capability: Some(capability(&target.volume, csi, snapshot)?),
            readonly: snapshot.capabilities.publishes_read_only && csi.read_only.unwrap_or(false),
            volume_context: csi.volume_attributes.clone().unwrap_or_default().into_iter().collect(),
            ..ControllerPublishVolumeRequest::default()
        },
        secret: csi.controller_publish_secret_ref.clone(),
    })))
}

fn capability(
    volume: &PersistentVolume,
    csi: &CSIPersistentVolumeSource,
    snapshot: &AttachmentSnapshot,
) -> Result<VolumeCapability, String> {
    let spec = volume.spec.as_ref();
    let modes = spec.and_then(|s| s.access_modes.clone()).unwrap_or_default();
    let single = if snapshot.capabilities.single_node_multi_writer {
        MultiWriterSupport::Supported
    } else {
        MultiWriterSupport::Unsupported
    };
    let mode = access::combine_to_csi_mode(&modes, single).map_err(|e| e.to_string())?;
    let access_type = if claim::volume_mode(volume) == BLOCK {
        AccessType::Block(BlockVolume {})
    } else {
        let fs_type = csi.fs_type.clone().filter(|name| !name.is_empty());
        AccessType::Mount(MountVolume {
            fs_type: fs_type.unwrap_or_else(|| snapshot.default_fs_type.clone()),
            mount_flags: spec.and_then(|s| s.mount_options.clone()).unwrap_or_default(),
            volume_mount_group: String::new(),
        })
    };
    Ok(VolumeCapability { access_mode: Some(AccessMode { mode: mode as i32 }), access_type: Some(access_type) })
}

fn unpublish(snapshot: &AttachmentSnapshot) -> Result<AttachmentDecision, String> {
    let target = target(snapshot)?;
    let csi = target.csi().ok_or("no volume of a CSI driver")?;
    let node_id = node_id(snapshot).ok_or_else(|| {
        format!("node {:?} has no id for driver {}", snapshot.attachment.spec.node_name, snapshot.driver)
    })?;
    Ok(AttachmentDecision::Unpublish(Box::new(UnpublishPlan {
        request: ControllerUnpublishVolumeRequest {
            volume_id: csi.volume_handle.clone(),
            node_id: node_id.to_owned(),
            ..ControllerUnpublishVolumeRequest::default()
        },
        secret: csi.controller_publish_secret_ref.clone(),
    })))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeFinalizerDecision {
    Nothing,
    /// The volume is being deleted or no longer belongs to the driver, and no attachment needs its handle.
    Remove,
    WaitForDetach,
}

pub fn volume(volume: &PersistentVolume, driver: &str, attachments: usize) -> VolumeFinalizerDecision {
    let meta = &volume.metadata;
    // A volume of an in-tree plugin that is not, or no longer, marked as migrated to this driver.
    let not_migrated = volume.spec.as_ref().is_none_or(|spec| spec.csi.is_none())
        && meta.annotation(annotation::MIGRATED_TO) != Some(driver);
    let unneeded = meta.is_deleting() || not_migrated;
    match (unneeded && meta.has_finalizer(&names::attacher_finalizer(driver)), attachments) {
        (false, _) => VolumeFinalizerDecision::Nothing,
        (true, 0) => VolumeFinalizerDecision::Remove,
        (true, _) => VolumeFinalizerDecision::WaitForDetach,
    }
}

#[cfg(test)]
mod tests;
