//! Requests that the driver must refuse, and data that it must never change.
use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::Path,
};

use cleat_csi::{Code, v1, v1::volume_capability::access_mode::Mode};
use cleat_host::mount;

use crate::fixture::{BlockFixture, Volume, create_request, mounted, raw, writer};

#[tokio::test]
async fn a_volume_is_never_on_two_nodes() {
    let fixture = BlockFixture::new();
    let (a, b) = (fixture.driver("a").await, fixture.driver("b").await);
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    let (on_a, on_b) = (fixture.create_dir("staging-a"), fixture.create_dir("staging-b"));
    let error = volume.stage(&a, &on_a).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "staged before it is published: {error}");
    volume.attach(&a, "a").await.unwrap();
    volume.stage(&a, &on_a).await.unwrap();

    let error = volume.attach(&b, "b").await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert!(error.to_string().contains("published to a"), "{error}");
    let error = volume.stage(&b, &on_b).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");

    // After a forced unpublish from an unresponsive node the other node may have it, but not while it is mounted on the
    // first.
    volume.detach(&b, "a").await.unwrap();
    volume.attach(&b, "b").await.unwrap();
    let error = volume.stage(&b, &on_b).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    volume.unstage(&a, &on_a).await.unwrap();
    volume.stage(&b, &on_b).await.unwrap();
}

#[tokio::test]
async fn nodes_on_one_machine_unstage_a_shared_volume_independently() {
    let fixture = BlockFixture::new();
    let (a, b) = (fixture.driver("a").await, fixture.driver("b").await);
    let (on_a, on_b) = (fixture.create_dir("staging-a"), fixture.create_dir("staging-b"));
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    volume.publish_and_stage(&a, "a", &on_a).await;
    fs::write(Path::new(&on_a).join("file"), "shared").unwrap();
    volume.unstage_and_unpublish(&a, "a", &on_a).await;

    let readers = Volume { id: volume.id.clone(), capability: mounted("ext4", Mode::MultiNodeReaderOnly) };
    readers.publish_and_stage(&a, "a", &on_a).await;
    readers.publish_and_stage(&b, "b", &on_b).await;
    readers.unstage_and_unpublish(&a, "a", &on_a).await;
    assert_eq!(
        fs::read_to_string(Path::new(&on_b).join("file")).unwrap(),
        "shared",
        "the other keeps mount and device"
    );
    assert_eq!((fixture.mounts().len(), fixture.loop_devices("pvc-1")), (1, 1));
    readers.unstage_and_unpublish(&b, "b", &on_b).await;
    assert_eq!((fixture.mounts().len(), fixture.loop_devices("pvc-1")), (0, 0), "the last takes the device along");
}

#[tokio::test]
async fn a_volume_in_use_is_not_deleted() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    volume.attach(&a, "a").await.unwrap();
    assert_eq!(volume.delete(&a).await.unwrap_err().code(), Code::FailedPrecondition, "published");
    volume.stage(&a, &staging).await.unwrap();
    volume.detach(&a, "a").await.unwrap();
    assert_eq!(volume.delete(&a).await.unwrap_err().code(), Code::FailedPrecondition, "staged");
    assert!(fixture.image("pvc-1").exists());
    // A crash may leave the device attached without its mount.
    mount::unmount(Path::new(&staging)).unwrap();
    assert_eq!(fixture.loop_devices("pvc-1"), 1);
    volume.delete(&a).await.unwrap();
    fixture.assert_nothing_left("pvc-1");
}

#[tokio::test]
async fn ids_with_path_components_name_no_volume() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let outside = fixture.path("precious.img");
    fs::write(&outside, "data").unwrap();
    fs::write(fixture.path("precious.json"), "{}").unwrap();
    let (staging, target) = (fixture.create_dir("staging"), fixture.path_string("target"));
    for id in ["../../precious", "..", ".", "/etc/passwd", "a/../b", "x\n", &to_string(&outside)] {
        let volume = Volume { id: id.to_owned(), capability: writer("ext4") };
        assert_eq!(volume.attach(&a, "a").await.unwrap_err().code(), Code::NotFound, "{id:?}");
        assert_eq!(volume.stage(&a, &staging).await.unwrap_err().code(), Code::NotFound, "{id:?}");
        assert_eq!(volume.publish(&a, &staging, &target).await.unwrap_err().code(), Code::NotFound, "{id:?}");
        volume.detach(&a, "a").await.unwrap();
        volume.delete(&a).await.unwrap();
        volume.unstage(&a, &staging).await.unwrap();
    }
    assert_eq!(fs::read(&outside).unwrap(), b"data");

    let created = a.create_volume(create_request("../../precious", writer(""))).await.unwrap().volume.unwrap();
    assert!(created.volume_id.starts_with("h-"), "{}", created.volume_id);
    assert!(fixture.image(&created.volume_id).exists());
    assert_eq!(fs::read(&outside).unwrap(), b"data");

    for path in ["relative", "/tmp/../etc", ""] {
        let volume = Volume { id: created.volume_id.clone(), capability: writer("") };
        assert_eq!(volume.stage(&a, path).await.unwrap_err().code(), Code::InvalidArgument, "{path:?}");
        assert_eq!(volume.unpublish(&a, path).await.unwrap_err().code(), Code::InvalidArgument, "{path:?}");
    }
}

fn to_string(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn foreign_data_is_never_formatted() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    volume.attach(&a, "a").await.unwrap();
    for (case, offset, bytes) in [
        ("unknown data", 100_000, b"somebody's letters".as_slice()),
        ("LUKS", 0, b"LUKS\xba\xbe".as_slice()),
        ("an xfs file system where ext4 is wanted", 0, b"XFSB".as_slice()),
    ] {
        let mut image = fs::OpenOptions::new().write(true).open(fixture.image("pvc-1")).unwrap();
        image.seek(SeekFrom::Start(offset)).unwrap();
        image.write_all(bytes).unwrap();
        let error = volume.stage(&a, &staging).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{case}: {error}");
        assert_eq!(fixture.bytes("pvc-1", offset, bytes.len()), bytes, "{case}");
        assert_eq!(fixture.loop_devices("pvc-1"), 0, "{case}: a failed stage leaves no device");
        image.set_len(0).unwrap();
    }
    volume.stage(&a, &staging).await.unwrap();
}

#[tokio::test]
async fn a_class_can_forbid_formatting() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    let request = v1::CreateVolumeRequest {
        parameters: [("noFormat".to_owned(), "true".to_owned())].into(),
        ..create_request("pvc-1", writer("ext4"))
    };
    a.create_volume(request).await.unwrap();
    let volume = Volume { id: "pvc-1".to_owned(), capability: writer("ext4") };
    volume.attach(&a, "a").await.unwrap();
    let error = volume.stage(&a, &staging).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    assert_eq!(fixture.loop_devices("pvc-1"), 0);
}

#[tokio::test]
async fn only_mounts_of_the_volume_are_changed() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let (staging_1, staging_2) = (fixture.create_dir("staging-1"), fixture.create_dir("staging-2"));
    let one = Volume::create(&a, "one", writer("ext4")).await.unwrap();
    let two = Volume::create(&a, "two", writer("ext4")).await.unwrap();
    one.attach(&a, "a").await.unwrap();
    two.attach(&a, "a").await.unwrap();
    one.stage(&a, &staging_1).await.unwrap();
    two.stage(&a, &staging_2).await.unwrap();
    for (case, result) in [
        ("stage over another volume", one.stage(&a, &staging_2).await),
        ("unstage another volume", one.unstage(&a, &staging_2).await),
        ("unpublish another volume", one.unpublish(&a, &staging_2).await),
        ("publish from another volume's stage", one.publish(&a, &staging_2, &fixture.path_string("t")).await),
        ("stage at a second path", one.stage(&a, &fixture.create_dir("elsewhere")).await),
    ] {
        assert_eq!(result.unwrap_err().code(), Code::FailedPrecondition, "{case}");
    }
    assert_eq!(fixture.mounts().len(), 2);

    let kept = fixture.create_dir("kept");
    fs::write(Path::new(&kept).join("file"), "data").unwrap();
    assert!(one.unpublish(&a, &kept).await.is_err(), "a directory with files in it is not removed");
    assert_eq!(fs::read(Path::new(&kept).join("file")).unwrap(), b"data");
}

#[tokio::test]
async fn a_lost_image_that_had_data_is_not_created_again() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let staging = fixture.create_dir("staging");
    for (name, capability) in [("fs", writer("ext4")), ("raw", raw(Mode::SingleNodeWriter))] {
        let volume = Volume::create(&a, name, capability.clone()).await.unwrap();
        volume.attach(&a, "a").await.unwrap();
        fs::remove_file(fixture.image(name)).unwrap();
        // It has no data yet: a power failure can remove an image whose record exists.
        volume.stage(&a, &staging).await.unwrap();
        volume.unstage(&a, &staging).await.unwrap();
        fs::remove_file(fixture.image(name)).unwrap();
        assert_eq!(volume.stage(&a, &staging).await.unwrap_err().code(), Code::DataLoss, "{name}");
        let again = Volume::create(&a, name, capability).await;
        assert_eq!(again.err().map(|error| error.code()), Some(Code::DataLoss), "{name}");
    }
}

#[tokio::test]
async fn an_image_with_data_outlives_the_loss_of_its_record() {
    let fixture = BlockFixture::new();
    let a = fixture.driver("a").await;
    let volume = Volume::create(&a, "pvc-1", writer("ext4")).await.unwrap();
    fs::write(fixture.image("pvc-1"), "data").unwrap();
    // As a power failure leaves a record that was not acknowledged; this one was acknowledged.
    fs::write(fixture.record("pvc-1"), "").unwrap();
    assert_eq!(volume.delete(&a).await.unwrap_err().code(), Code::FailedPrecondition);
    let again = Volume::create(&a, "pvc-1", writer("ext4")).await;
    assert_eq!(again.err().map(|error| error.code()), Some(Code::FailedPrecondition));
    assert_eq!(fs::read(fixture.image("pvc-1")).unwrap(), b"data");

    fs::write(fixture.image("pvc-1"), "").unwrap();
    volume.delete(&a).await.unwrap();
    fixture.assert_nothing_left("pvc-1");
}
