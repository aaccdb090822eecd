//! What an attachment needs next. Pure.

use std::sync::Arc;

use cleat_api::access::{self, SingleNodeModes};
use cleat_api::claim::{self, BLOCK};
use cleat_api::key::Meta as _;
use cleat_api::keys::annotation;
use cleat_api::names;
use cleat_csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use cleat_csi::v1::{ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, VolumeCapability};
use k8s_openapi::api::core::v1::{CSIPersistentVolumeSource, PersistentVolume, SecretReference};
use k8s_openapi::api::storage::v1::VolumeAttachment;

use super::Abilities;

#[derive(Clone, Debug)]
pub struct AttachmentSeen {
    pub attachment: Arc<VolumeAttachment>,
    pub volume: Option<Arc<PersistentVolume>>,
    /// What the driver calls the node, as its CSINode has it.
    pub node_id: Option<String>,
    pub driver: String,
    pub abilities: Abilities,
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
    pub volume: Arc<PersistentVolume>,
    pub hold_volume: bool,
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
    if (attaching && attached) || (!attaching && !held) {
        return Decision::Nothing;
    }
    let next = if attaching { publish(seen) } else { unpublish(seen) };
    next.unwrap_or_else(|why| Decision::Refuse { attaching, why })
}

fn source(seen: &AttachmentSeen) -> Result<(&Arc<PersistentVolume>, &CSIPersistentVolumeSource), String> {
    let name = seen.attachment.spec.source.persistent_volume_name.as_deref();
    let name = name.ok_or("attachments of inline volumes are not supported")?;
    let volume = seen.volume.as_ref().ok_or_else(|| format!("persistentvolume {name:?} not found"))?;
    let csi = volume.spec.as_ref().and_then(|s| s.csi.as_ref()).filter(|csi| csi.driver == seen.driver);
    Ok((volume, csi.ok_or_else(|| format!("persistentvolume {name:?} is not a volume of driver {:?}", seen.driver))?))
}

fn publish(seen: &AttachmentSeen) -> Result<Decision, String> {
    let (volume, csi) = source(seen)?;
    let finalizer = names::attacher_finalizer(&seen.driver);
    if volume.metadata.is_deleting() {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        return Err(format!("PersistentVolume \"{name}\" is marked for deletion"));
    }
    let node = &seen.attachment.spec.node_name;
    let node_id =
        seen.node_id.clone().ok_or_else(|| format!("CSINode {node} does not contain driver {}", seen.driver))?;
    let meta = &seen.attachment.metadata;
    let hold_attachment = !meta.has_finalizer(&finalizer) || meta.annotation(annotation::CSI_NODE_ID) != Some(&node_id);
    Ok(Decision::Publish(Box::new(Publish {
        hold_volume: !volume.metadata.has_finalizer(&finalizer),
        hold_attachment,
        request: ControllerPublishVolumeRequest {
            volume_id: csi.volume_handle.clone(),
            node_id,
            volume_capability: Some(capability(volume, csi, seen.abilities)?),
            readonly: seen.abilities.publishes_read_only && csi.read_only.unwrap_or(false),
            volume_context: csi.volume_attributes.clone().unwrap_or_default().into_iter().collect(),
            ..ControllerPublishVolumeRequest::default()
        },
        secret: csi.controller_publish_secret_ref.clone(),
        volume: volume.clone(),
    })))
}

fn capability(
    volume: &PersistentVolume,
    csi: &CSIPersistentVolumeSource,
    abilities: Abilities,
) -> Result<VolumeCapability, String> {
    let spec = volume.spec.as_ref();
    let modes = spec.and_then(|s| s.access_modes.clone()).unwrap_or_default();
    let single = if abilities.tells_writers_apart { SingleNodeModes::Distinguished } else { SingleNodeModes::One };
    let mode = access::reduced(&modes, single).map_err(|e| e.to_string())?;
    let access_type = if claim::volume_mode(volume) == BLOCK {
        AccessType::Block(BlockVolume {})
    } else {
        AccessType::Mount(MountVolume {
            fs_type: csi.fs_type.clone().unwrap_or_default(),
            mount_flags: spec.and_then(|s| s.mount_options.clone()).unwrap_or_default(),
            volume_mount_group: String::new(),
        })
    };
    Ok(VolumeCapability { access_mode: Some(AccessMode { mode: mode as i32 }), access_type: Some(access_type) })
}

/// The node id the attachment remembers serves where the node has gone from the cluster meanwhile.
fn unpublish(seen: &AttachmentSeen) -> Result<Decision, String> {
    let (_, csi) = source(seen)?;
    let remembered = seen.attachment.metadata.annotation(annotation::CSI_NODE_ID);
    let node_id = seen
        .node_id
        .as_deref()
        .or(remembered)
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
    match (meta.is_deleting() && meta.has_finalizer(&names::attacher_finalizer(driver)), attachments) {
        (false, _) => VolumeDecision::Nothing,
        (true, 0) => VolumeDecision::LetGo,
        (true, _) => VolumeDecision::WaitForDetach,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_api::build::{self, DRIVER};
    use k8s_openapi::api::storage::v1::VolumeAttachmentStatus;

    const FINALIZER: &str = "external-attacher/block-cleat-dev";

    fn seen(change: impl FnOnce(&mut VolumeAttachment, &mut PersistentVolume)) -> AttachmentSeen {
        let mut volume = build::volume("v", "", "1Gi");
        let mut attachment = build::attachment(&volume, "n1");
        change(&mut attachment, &mut volume);
        AttachmentSeen {
            attachment: Arc::new(attachment),
            volume: Some(Arc::new(volume)),
            node_id: Some("id-1".to_owned()),
            driver: DRIVER.to_owned(),
            abilities: Abilities { publishes: true, publishes_read_only: true, tells_writers_apart: false },
        }
    }

    fn leaving(attachment: &mut VolumeAttachment) {
        attachment.metadata.deletion_timestamp = Some(build::time(1));
        attachment.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
        build::annotate(&mut attachment.metadata, annotation::CSI_NODE_ID, "id-before");
    }

    fn attached(attachment: &mut VolumeAttachment) {
        attachment.status = Some(VolumeAttachmentStatus { attached: true, ..VolumeAttachmentStatus::default() });
    }

    fn named(decision: &Decision) -> String {
        match decision {
            Decision::Nothing => "nothing".to_owned(),
            Decision::Confirm => "confirm".to_owned(),
            Decision::Publish(p) => format!(
                "publish {} to {} holding volume {} attachment {} readonly {}",
                p.request.volume_id, p.request.node_id, p.hold_volume, p.hold_attachment, p.request.readonly
            ),
            Decision::Unpublish(u) => format!("unpublish {} from {}", u.request.volume_id, u.request.node_id),
            Decision::Refuse { attaching, why } => format!("refuse attaching {attaching}: {why}"),
        }
    }

    #[test]
    fn an_attachment_is_published_once_and_never_forgotten() {
        let base = || seen(|_, _| {});
        let trivial = Abilities { publishes: false, publishes_read_only: false, tells_writers_apart: false };
        let publish = "publish handle-v to id-1 holding volume true attachment true readonly false";
        for (case, seen, want) in [
            ("new", base(), publish),
            ("attached", seen(|a, _| attached(a)), "nothing"),
            ("another driver's", seen(|a, _| a.spec.attacher = "other".to_owned()), "nothing"),
            ("a driver that does not publish", AttachmentSeen { abilities: trivial, ..base() }, "confirm"),
            (
                "held already, the answer was lost",
                seen(|a, v| {
                    a.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
                    build::annotate(&mut a.metadata, annotation::CSI_NODE_ID, "id-1");
                    v.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
                }),
                "publish handle-v to id-1 holding volume false attachment false readonly false",
            ),
            (
                "a read-only volume",
                seen(|_, v| v.spec.as_mut().unwrap().csi.as_mut().unwrap().read_only = Some(true)),
                "publish handle-v to id-1 holding volume true attachment true readonly true",
            ),
            (
                "the volume is gone",
                AttachmentSeen { volume: None, ..base() },
                "refuse attaching true: persistentvolume \"v\" not found",
            ),
            (
                "the volume is being deleted",
                seen(|_, v| v.metadata.deletion_timestamp = Some(build::time(1))),
                "refuse attaching true: PersistentVolume \"v\" is marked for deletion",
            ),
            (
                "the driver is not on that node",
                AttachmentSeen { node_id: None, ..base() },
                "refuse attaching true: CSINode n1 does not contain driver block.cleat.dev",
            ),
            ("leaving", seen(|a, _| leaving(a)), "unpublish handle-v from id-1"),
            (
                "leaving a node that is gone",
                AttachmentSeen { node_id: None, ..seen(|a, _| leaving(a)) },
                "unpublish handle-v from id-before",
            ),
            ("leaving, never published", seen(|a, _| a.metadata.deletion_timestamp = Some(build::time(1))), "nothing"),
        ] {
            assert_eq!(named(&attachment(&seen)), want, "{case}");
        }
    }

    #[test]
    fn a_volume_is_let_go_when_no_attachment_needs_it() {
        let with = |deleting: bool, held: bool| {
            let mut v = build::volume("v", "", "1Gi");
            v.metadata.deletion_timestamp = deleting.then(|| build::time(1));
            v.metadata.finalizers = held.then(|| vec![FINALIZER.to_owned()]);
            v
        };
        for (case, v, attachments, want) in [
            ("living", with(false, true), 0, VolumeDecision::Nothing),
            ("not held", with(true, false), 0, VolumeDecision::Nothing),
            ("deleted and detached", with(true, true), 0, VolumeDecision::LetGo),
            ("deleted and attached", with(true, true), 1, VolumeDecision::WaitForDetach),
        ] {
            assert_eq!(volume(&v, DRIVER, attachments), want, "{case}");
        }
    }
}
