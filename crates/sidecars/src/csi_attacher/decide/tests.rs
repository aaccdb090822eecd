//! Tables of the attacher's decisions.

use std::sync::Arc;

use super::*;
use cleat_api::well_known::annotation;
use cleat_testing::build::{self, DRIVER};
use k8s_openapi::api::core::v1::{
    AWSElasticBlockStoreVolumeSource, CSIPersistentVolumeSource, GCEPersistentDiskVolumeSource, PersistentVolume,
    PersistentVolumeSpec,
};
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeAttachmentStatus};

const FINALIZER: &str = "external-attacher/block-cleat-dev";

fn snapshot(change: impl FnOnce(&mut VolumeAttachment, &mut PersistentVolume)) -> AttachmentSnapshot {
    let mut volume = build::volume("v", "", "1Gi");
    let mut attachment = build::attachment(&volume, "n1");
    change(&mut attachment, &mut volume);
    AttachmentSnapshot {
        attachment: Arc::new(attachment),
        volume: Some(Arc::new(volume)),
        node_id: Some("id-1".to_owned()),
        driver: DRIVER.to_owned(),
        capabilities: PublishCapabilities {
            publishes: true,
            publishes_read_only: true,
            single_node_multi_writer: false,
        },
        default_fs_type: String::new(),
        driver_disagrees: false,
    }
}

fn deleting(attachment: &mut VolumeAttachment) {
    attachment.metadata.deletion_timestamp = Some(build::time(1));
    attachment.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    build::annotate(&mut attachment.metadata, annotation::CSI_NODE_ID, "id-before");
}

fn attached(attachment: &mut VolumeAttachment) {
    attachment.status = Some(VolumeAttachmentStatus { attached: true, ..VolumeAttachmentStatus::default() });
}

fn describe(decision: &AttachmentDecision) -> String {
    match decision {
        AttachmentDecision::Nothing => "nothing".to_owned(),
        AttachmentDecision::Confirm => "confirm".to_owned(),
        AttachmentDecision::Publish(p) => format!(
            "publish {} to {} holding volume {} attachment {} readonly {}",
            p.request.volume_id,
            p.request.node_id,
            p.add_volume_finalizer.is_some(),
            p.add_attachment_finalizer,
            p.request.readonly
        ),
        AttachmentDecision::Unpublish(u) => format!("unpublish {} from {}", u.request.volume_id, u.request.node_id),
        AttachmentDecision::Refuse { attaching, why } => format!("refuse attaching {attaching}: {why}"),
    }
}

#[test]
fn an_attachment_is_published_once_and_never_forgotten() {
    let base = || snapshot(|_, _| {});
    let trivial = PublishCapabilities { publishes: false, publishes_read_only: false, single_node_multi_writer: false };
    let publish = "publish handle-v to id-1 holding volume true attachment true readonly false";
    for (case, snapshot, want) in [
        ("new", base(), publish),
        ("attached", snapshot(|a, _| attached(a)), "nothing"),
        ("of another driver", snapshot(|a, _| a.spec.attacher = "other".to_owned()), "nothing"),
        ("a driver that does not publish", AttachmentSnapshot { capabilities: trivial, ..base() }, "confirm"),
        (
            "finalizers written, the reply was lost",
            snapshot(|a, v| {
                a.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
                build::annotate(&mut a.metadata, annotation::CSI_NODE_ID, "id-1");
                v.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
            }),
            "publish handle-v to id-1 holding volume false attachment false readonly false",
        ),
        (
            "a read-only volume",
            snapshot(|_, v| v.spec.as_mut().unwrap().csi.as_mut().unwrap().read_only = Some(true)),
            "publish handle-v to id-1 holding volume true attachment true readonly true",
        ),
        (
            "the volume does not exist",
            AttachmentSnapshot { volume: None, ..base() },
            "refuse attaching true: persistentvolume \"v\" not found",
        ),
        (
            "the volume is being deleted",
            snapshot(|_, v| v.metadata.deletion_timestamp = Some(build::time(1))),
            "refuse attaching true: PersistentVolume \"v\" is marked for deletion",
        ),
        (
            "the driver is not on that node",
            AttachmentSnapshot { node_id: None, ..base() },
            "refuse attaching true: CSINode n1 does not contain driver block.cleat.dev",
        ),
        ("deleting", snapshot(|a, _| deleting(a)), "unpublish handle-v from id-1"),
        (
            "deleting, the node does not exist",
            AttachmentSnapshot { node_id: None, ..snapshot(|a, _| deleting(a)) },
            "unpublish handle-v from id-before",
        ),
        ("deleting, never published", snapshot(|a, _| a.metadata.deletion_timestamp = Some(build::time(1))), "nothing"),
        (
            "attached, but not in the driver's list",
            AttachmentSnapshot { driver_disagrees: true, ..snapshot(|a, _| attached(a)) },
            publish,
        ),
        (
            "finalizer removed, but still in the driver's list",
            AttachmentSnapshot {
                driver_disagrees: true,
                ..snapshot(|a, _| a.metadata.deletion_timestamp = Some(build::time(1)))
            },
            "unpublish handle-v from id-1",
        ),
        (
            "inline volume: no PersistentVolume needs a finalizer",
            AttachmentSnapshot {
                volume: None,
                ..snapshot(|a, v| {
                    a.spec.source.persistent_volume_name = None;
                    a.spec.source.inline_volume_spec = v.spec.clone();
                })
            },
            "publish handle-v to id-1 holding volume false attachment true readonly false",
        ),
        (
            "a volume of another driver",
            snapshot(|_, v| v.spec.as_mut().unwrap().csi.as_mut().unwrap().driver = "other".to_owned()),
            "refuse attaching true: persistentvolume \"v\" is not a volume of driver \"block.cleat.dev\"",
        ),
    ] {
        assert_eq!(describe(&attachment(&snapshot)), want, "{case}");
    }
}

#[test]
fn a_volume_loses_its_finalizer_when_no_attachment_needs_it() {
    let with = |deleting: bool, has_finalizer: bool| {
        let mut v = build::volume("v", "", "1Gi");
        v.metadata.deletion_timestamp = deleting.then(|| build::time(1));
        v.metadata.finalizers = has_finalizer.then(|| vec![FINALIZER.to_owned()]);
        v
    };
    for (case, v, attachments, want) in [
        ("not being deleted", with(false, true), 0, VolumeFinalizerDecision::Nothing),
        ("without the finalizer", with(true, false), 0, VolumeFinalizerDecision::Nothing),
        ("deleted and detached", with(true, true), 0, VolumeFinalizerDecision::Remove),
        ("deleted and attached", with(true, true), 1, VolumeFinalizerDecision::WaitForDetach),
    ] {
        assert_eq!(volume(&v, DRIVER, attachments), want, "{case}");
    }
}

fn ebs() -> AttachmentSnapshot {
    let old = AWSElasticBlockStoreVolumeSource {
        volume_id: "aws://zone/vol-1".to_owned(),
        ..AWSElasticBlockStoreVolumeSource::default()
    };
    let snapshot = snapshot(|a, v| {
        a.spec.attacher = "ebs.csi.aws.com".to_owned();
        let spec = v.spec.as_mut().unwrap();
        (spec.csi, spec.aws_elastic_block_store) = (None, Some(old));
    });
    AttachmentSnapshot { driver: "ebs.csi.aws.com".to_owned(), ..snapshot }
}

#[test]
fn a_volume_of_an_in_tree_plugin_is_published_by_the_driver_it_migrated_to() {
    let want = "publish vol-1 to id-1 holding volume true attachment true readonly false";
    assert_eq!(describe(&attachment(&ebs())), want);
    assert_eq!(listed_handle(&ebs()).as_deref(), Some("vol-1"));
}

#[test]
fn the_handle_of_a_migrated_disk_is_completed_from_the_node_id() {
    let old = GCEPersistentDiskVolumeSource { pd_name: "d".to_owned(), ..GCEPersistentDiskVolumeSource::default() };
    let mut gce = snapshot(|_, v| {
        let spec = v.spec.as_mut().unwrap();
        (spec.csi, spec.gce_persistent_disk) = (None, Some(old));
    });
    gce.driver = "pd.csi.storage.gke.io".to_owned();
    gce.node_id = Some("projects/p/zones/z/instances/i".to_owned());
    assert_eq!(listed_handle(&gce).as_deref(), Some("projects/p/zones/z/disks/d"));
}

#[test]
fn the_default_file_system_type_is_used_for_volumes_without_one() {
    use cleat_csi::v1::volume_capability::AccessType;
    for (own, want) in [(None, "xfs"), (Some(""), "xfs"), (Some("btrfs"), "btrfs")] {
        let snapshot = snapshot(|_, v| {
            let csi: &mut CSIPersistentVolumeSource = v.spec.as_mut().unwrap().csi.as_mut().unwrap();
            csi.fs_type = own.map(str::to_owned);
        });
        let AttachmentDecision::Publish(publish) =
            attachment(&AttachmentSnapshot { default_fs_type: "xfs".to_owned(), ..snapshot })
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
fn a_volume_that_is_no_longer_migrated_loses_its_finalizer() {
    let mut volume: PersistentVolume = build::volume("v", "", "1Gi");
    volume.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
    let spec: &mut PersistentVolumeSpec = volume.spec.as_mut().unwrap();
    (spec.csi, spec.gce_persistent_disk) = (None, Some(GCEPersistentDiskVolumeSource::default()));
    assert_eq!(super::volume(&volume, DRIVER, 0), VolumeFinalizerDecision::Remove);
    assert_eq!(super::volume(&volume, DRIVER, 1), VolumeFinalizerDecision::WaitForDetach);
    build::annotate(&mut volume.metadata, annotation::MIGRATED_TO, DRIVER);
    assert_eq!(super::volume(&volume, DRIVER, 0), VolumeFinalizerDecision::Nothing);
}
