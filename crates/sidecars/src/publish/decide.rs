//! What an attachment needs next. Pure.

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

use super::Abilities;

#[derive(Clone, Debug)]
pub struct AttachmentSeen {
    pub attachment: Arc<VolumeAttachment>,
    pub volume: Option<Arc<PersistentVolume>>,
    /// What the driver calls the node, as its CSINode has it.
    pub node_id: Option<String>,
    pub driver: String,
    pub abilities: Abilities,
    /// What a volume is formatted with where nothing else says so.
    pub default_fs_type: String,
    /// The driver shows another state than the attachment: the call is made whatever the attachment says.
    pub disputed: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Nothing,
    /// The driver has nothing to do: just say that it is attached.
    Confirm,
    Publish(Box<Publish>),
    Unpublish(Box<Unpublish>),
    /// Cannot be tried; said in the status. A change of the volume or the node wakes it.
    Refuse {
        attaching: bool,
        why: String,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Publish {
    /// To be held; none for a volume that is described in the attachment, or held already.
    pub hold_volume: Option<Arc<PersistentVolume>>,
    pub hold_attachment: bool,
    pub request: ControllerPublishVolumeRequest,
    pub secret: Option<SecretReference>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Unpublish {
    pub request: ControllerUnpublishVolumeRequest,
    pub secret: Option<SecretReference>,
}

pub fn attachment(seen: &AttachmentSeen) -> Decision {
    let attachment = &seen.attachment;
    if attachment.spec.attacher != seen.driver {
        return Decision::Nothing;
    }
    let attached = attachment.status.as_ref().is_some_and(|s| s.attached);
    if !seen.abilities.publishes {
        return if attached { Decision::Nothing } else { Decision::Confirm };
    }
    let attaching = !attachment.metadata.is_deleting();
    let held = attachment.metadata.has_finalizer(&names::attacher_finalizer(&seen.driver));
    if !seen.disputed && ((attaching && attached) || (!attaching && !held)) {
        return Decision::Nothing;
    }
    let next = if attaching { publish(seen) } else { unpublish(seen) };
    next.unwrap_or_else(|why| Decision::Refuse { attaching, why })
}

/// The volume of an attachment as its driver is to see it.
struct Target<'a> {
    /// Where there is one.
    stored: Option<&'a Arc<PersistentVolume>>,
    volume: Cow<'a, PersistentVolume>,
}

impl Target<'_> {
    fn csi(&self) -> Option<&CSIPersistentVolumeSource> {
        self.volume.spec.as_ref()?.csi.as_ref()
    }
}

fn target(seen: &AttachmentSeen) -> Result<Target<'_>, String> {
    let source = &seen.attachment.spec.source;
    let target = match (&source.persistent_volume_name, &source.inline_volume_spec) {
        (Some(name), _) => {
            let stored = seen.volume.as_ref().ok_or_else(|| format!("persistentvolume {name:?} not found"))?;
            Target { stored: Some(stored), volume: migrate::translate_volume(stored).map_err(|error| error.to_string())? }
        }
        (None, Some(spec)) => {
            let volume = PersistentVolume { metadata: ObjectMeta::default(), spec: Some(spec.clone()), status: None };
            Target { stored: None, volume: Cow::Owned(volume) }
        }
        (None, None) => return Err("neither a PersistentVolume nor an inline volume is named".to_owned()),
    };
    if target.csi().is_none_or(|csi| csi.driver != seen.driver) {
        let name = source.persistent_volume_name.as_deref().unwrap_or("inline");
        return Err(format!("persistentvolume {name:?} is not a volume of driver {:?}", seen.driver));
    }
    Ok(target)
}

/// The volume's handle, for who compares it with what the driver lists.
pub fn handle(seen: &AttachmentSeen) -> Option<String> {
    let target = target(seen).ok()?;
    let handle = &target.csi()?.volume_handle;
    let node_id = node_id(seen)?;
    let migrated = target.stored.is_none_or(|stored| matches!(migrate::translate_volume(stored), Ok(Cow::Owned(_))));
    if !migrated {
        return Some(handle.clone());
    }
    migrate::repair_handle(&seen.driver, handle, node_id).ok()
}

/// The node id the attachment remembers serves where the node has gone from the cluster meanwhile.
pub fn node_id(seen: &AttachmentSeen) -> Option<&str> {
    seen.node_id.as_deref().or_else(|| seen.attachment.metadata.annotation(annotation::CSI_NODE_ID))
}

fn publish(seen: &AttachmentSeen) -> Result<Decision, String> {
    let target = target(seen)?;
    let csi = target.csi().ok_or("no volume of a CSI driver")?;
    let finalizer = names::attacher_finalizer(&seen.driver);
    if let Some(stored) = target.stored.filter(|stored| stored.metadata.is_deleting()) {
        let name = stored.metadata.name.as_deref().unwrap_or_default();
        return Err(format!("PersistentVolume \"{name}\" is marked for deletion"));
    }
    let node = &seen.attachment.spec.node_name;
    // Only what the node says now: a remembered id may be another machine's.
    let node_id =
        seen.node_id.clone().ok_or_else(|| format!("CSINode {node} does not contain driver {}", seen.driver))?;
    let meta = &seen.attachment.metadata;
    let hold_attachment = !meta.has_finalizer(&finalizer) || meta.annotation(annotation::CSI_NODE_ID) != Some(&node_id);
    Ok(Decision::Publish(Box::new(Publish {
        hold_volume: target.stored.filter(|stored| !stored.metadata.has_finalizer(&finalizer)).cloned(),
        hold_attachment,
        request: ControllerPublishVolumeRequest {
            volume_id: csi.volume_handle.clone(),
            node_id,
            volume_capability: Some(capability(&target.volume, csi, seen)?),
            readonly: seen.abilities.publishes_read_only && csi.read_only.unwrap_or(false),
            volume_context: csi.volume_attributes.clone().unwrap_or_default().into_iter().collect(),
            ..ControllerPublishVolumeRequest::default()
        },
        secret: csi.controller_publish_secret_ref.clone(),
    })))
}

fn capability(
    volume: &PersistentVolume,
    csi: &CSIPersistentVolumeSource,
    seen: &AttachmentSeen,
) -> Result<VolumeCapability, String> {
    let spec = volume.spec.as_ref();
    let modes = spec.and_then(|s| s.access_modes.clone()).unwrap_or_default();
    let single = if seen.abilities.tells_writers_apart { MultiWriterSupport::Supported } else { MultiWriterSupport::Unsupported };
    let mode = access::combine_to_csi_mode(&modes, single).map_err(|e| e.to_string())?;
    let access_type = if claim::volume_mode(volume) == BLOCK {
        AccessType::Block(BlockVolume {})
    } else {
        let fs_type = csi.fs_type.clone().filter(|name| !name.is_empty());
        AccessType::Mount(MountVolume {
            fs_type: fs_type.unwrap_or_else(|| seen.default_fs_type.clone()),
            mount_flags: spec.and_then(|s| s.mount_options.clone()).unwrap_or_default(),
            volume_mount_group: String::new(),
        })
    };
    Ok(VolumeCapability { access_mode: Some(AccessMode { mode: mode as i32 }), access_type: Some(access_type) })
}

fn unpublish(seen: &AttachmentSeen) -> Result<Decision, String> {
    let target = target(seen)?;
    let csi = target.csi().ok_or("no volume of a CSI driver")?;
    let node_id = node_id(seen)
        .ok_or_else(|| format!("node {:?} has no id for driver {}", seen.attachment.spec.node_name, seen.driver))?;
    Ok(Decision::Unpublish(Box::new(Unpublish {
        request: ControllerUnpublishVolumeRequest {
            volume_id: csi.volume_handle.clone(),
            node_id: node_id.to_owned(),
            ..ControllerUnpublishVolumeRequest::default()
        },
        secret: csi.controller_publish_secret_ref.clone(),
    })))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeDecision {
    Nothing,
    /// Deleted, and no attachment needs its handle any more.
    LetGo,
    WaitForDetach,
}

pub fn volume(volume: &PersistentVolume, driver: &str, attachments: usize) -> VolumeDecision {
    let meta = &volume.metadata;
    // A volume of an old plugin that is not marked as ours, or not any more.
    let taken_back = volume.spec.as_ref().is_none_or(|spec| spec.csi.is_none())
        && meta.annotation(annotation::MIGRATED_TO) != Some(driver);
    let unneeded = meta.is_deleting() || taken_back;
    match (unneeded && meta.has_finalizer(&names::attacher_finalizer(driver)), attachments) {
        (false, _) => VolumeDecision::Nothing,
        (true, 0) => VolumeDecision::LetGo,
        (true, _) => VolumeDecision::WaitForDetach,
    }
}
