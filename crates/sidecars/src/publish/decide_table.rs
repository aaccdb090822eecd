//! Cases of the attacher's decisions.

use std::sync::Arc;

use super::Abilities;
use super::decide::*;
use cleat_api::well_known::annotation;
use cleat_testing::build::{self, DRIVER};
use k8s_openapi::api::core::v1::{
    AWSElasticBlockStoreVolumeSource, CSIPersistentVolumeSource, GCEPersistentDiskVolumeSource, PersistentVolume,
    PersistentVolumeSpec,
};
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentStatus};

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
        default_fs_type: String::new(),
        disputed: false,
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
            p.request.volume_id,
            p.request.node_id,
            p.hold_volume.is_some(),
            p.hold_attachment,
            p.request.readonly
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
        (
            "attached, but the driver does not show it",
            AttachmentSeen { disputed: true, ..seen(|a, _| attached(a)) },
            publish,
        ),
        (
            "let go, but the driver still shows it",
            AttachmentSeen { disputed: true, ..seen(|a, _| a.metadata.deletion_timestamp = Some(build::time(1))) },
            "unpublish handle-v from id-1",
        ),
        (
            "described in the attachment: there is no volume to hold",
            AttachmentSeen {
                volume: None,
                ..seen(|a, v| {
                    a.spec.source.persistent_volume_name = None;
                    a.spec.source.inline_volume_spec = v.spec.clone();
                })
            },
            "publish handle-v to id-1 holding volume false attachment true readonly false",
        ),
        (
            "another driver's volume",
            seen(|_, v| v.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned()),
            "refuse attaching true: persistentvolume \"v\" is not a volume of driver \"block.cleat.dev\"",
        ),
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

fn ebs() -> AttachmentSeen {
    let old = AWSElasticBlockStoreVolumeSource {
        volume_id: "aws://zone/vol-1".to_owned(),
        ..AWSElasticBlockStoreVolumeSource::default()
    };
    let seen = seen(|a, v| {
        a.spec.attacher = "ebs.csi.aws.com".to_owned();
        let spec = v.spec.as_mut().unwrap();
        (spec.csi, spec.aws_elastic_block_store) = (None, Some(old));
    });
    AttachmentSeen { driver: "ebs.csi.aws.com".to_owned(), ..seen }
}

#[test]
fn a_disk_of_an_old_plugin_is_published_by_the_driver_that_took_over() {
    let want = "publish vol-1 to id-1 holding volume true attachment true readonly false";
    assert_eq!(named(&attachment(&ebs())), want);
    assert_eq!(handle(&ebs()).as_deref(), Some("vol-1"));
}

#[test]
fn the_handle_of_a_moved_disk_is_completed_by_the_node() {
    let old = GCEPersistentDiskVolumeSource { pd_name: "d".to_owned(), ..GCEPersistentDiskVolumeSource::default() };
    let mut gce = seen(|_, v| {
        let spec = v.spec.as_mut().unwrap();
        (spec.csi, spec.gce_persistent_disk) = (None, Some(old));
    });
    gce.driver = "pd.csi.storage.gke.io".to_owned();
    gce.node_id = Some("projects/p/zones/z/instances/i".to_owned());
    assert_eq!(handle(&gce).as_deref(), Some("projects/p/zones/z/disks/d"));
}

#[test]
fn the_default_file_system_fills_in_where_the_volume_has_none() {
    use cleat_csi::v1::volume_capability::AccessType;
    for (own, want) in [(None, "xfs"), (Some(""), "xfs"), (Some("btrfs"), "btrfs")] {
        let seen = seen(|_, v| {
            let csi: &mut CSIPersistentVolumeSource = v.spec.as_mut().unwrap().csi.as_mut().unwrap();
            csi.fs_type = own.map(str::to_owned);
        });
        let Decision::Publish(publish) = attachment(&AttachmentSeen { default_fs_type: "xfs".to_owned(), ..seen })
        else {
            panic!("not published");
        };
        let Some(AccessType::Mount(mount)) = publish.request.volume_capability.unwrap().access_type else {
            panic!("not mounted");
        };
        assert_eq!(mount.fs_type, want, "{own:?}");
    }
}

#[test]
fn a_volume_that_an_old_plugin_took_back_is_let_go() {
    let mut volume: PersistentVolume = build::volume("v", "", "1Gi");
    volume.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    let spec: &mut PersistentVolumeSpec = volume.spec.as_mut().unwrap();
    (spec.csi, spec.gce_persistent_disk) = (None, Some(GCEPersistentDiskVolumeSource::default()));
    assert_eq!(super::decide::volume(&volume, DRIVER, 0), VolumeDecision::LetGo);
    assert_eq!(super::decide::volume(&volume, DRIVER, 1), VolumeDecision::WaitForDetach);
    build::annotate(&mut volume.metadata, annotation::MIGRATED_TO, DRIVER);
    assert_eq!(super::decide::volume(&volume, DRIVER, 0), VolumeDecision::Nothing);
}
