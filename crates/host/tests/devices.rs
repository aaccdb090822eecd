//! Loop devices, probing, formatting and mounting, with real devices and mounts. Needs root; fails with an error that
//! says so.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use cleat_host::filesystem::{self, DeviceContents, FileSystemKind, Format, FsckOutcome, MkfsError, Overwrite, probe};
use cleat_host::loopdev::{self, LoopDevice, LoopError};
use cleat_host::mount::{self, MountOptions};
use cleat_host::{Access, OffloadError, offload};
use tempfile::TempDir;

/// A temporary directory. Dropping it removes the mounts below it and the loop devices of its images.
struct TestDir {
    root: TempDir,
    images: Vec<PathBuf>,
}

impl TestDir {
    fn new() -> TestDir {
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests mount file systems: run them as root (sudo -E cargo test)"
        );
        TestDir { root: tempfile::Builder::new().prefix("cleat-host-").tempdir().unwrap(), images: Vec::new() }
    }

    fn image(&mut self, name: &str, bytes: u64) -> PathBuf {
        let path = self.root.path().join(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        self.images.push(path.clone());
        path
    }

    fn directory(&self, name: &str) -> PathBuf {
        let path = self.root.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let mut mounts = mount::table().unwrap_or_default();
        mounts.retain(|m| m.target.starts_with(self.root.path()));
        for m in mounts.iter().rev() {
            let _ = mount::unmount(&m.target);
        }
        for image in &self.images {
            let _ = loopdev::detach_file(image);
        }
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn a_file_is_attached_formatted_mounted_and_detached() {
    for (format, options) in [(Format::Ext4, "noatime"), (Format::Xfs, "noatime,nouuid"), (Format::Btrfs, "noatime")] {
        let mut dir = TestDir::new();
        let image = dir.image("disk", 512 * MIB);
        let at = dir.directory("at");
        let device = loopdev::attach(&image, Access::ReadWrite).unwrap();
        assert_eq!(probe(&device.path).unwrap(), DeviceContents::Blank);

        filesystem::mkfs(&device.path, format, &[], Overwrite::IfBlank).unwrap();
        let DeviceContents::FileSystem { kind, uuid: Some(uuid) } = probe(&device.path).unwrap() else {
            panic!("{format:?}")
        };
        assert_eq!(kind, format.kind());
        assert_eq!(uuid.len(), 36);
        let again = filesystem::mkfs(&device.path, format, &[], Overwrite::IfBlank).unwrap_err();
        assert!(matches!(again, MkfsError::NotBlank { .. }), "{again}");
        let checked = filesystem::fsck(&device.path, kind).unwrap();
        assert_eq!(checked, if format == Format::Ext4 { FsckOutcome::Clean } else { FsckOutcome::CheckedByMount });

        let options = MountOptions::parse(&[options]).unwrap();
        mount::mount_fs(&device.path, &at, kind.name(), &options).unwrap();
        assert!(mount::is_mount_point(&at).unwrap());
        let mounted = mount::find(&at).unwrap().unwrap();
        assert_eq!((mounted.fstype.as_str(), mounted.source.as_path()), (kind.name(), device.path.as_path()));
        assert!(mounted.options.iter().any(|o| o == "noatime"));
        fs::write(at.join("file"), "kept").unwrap();
        let usage = filesystem::statfs(&at).unwrap();
        assert!(usage.total_bytes > 200 * MIB && usage.used_bytes < usage.total_bytes, "{usage:?}");

        assert_eq!(mount::unmount(&at).unwrap(), 1);
        assert_eq!(mount::unmount(&at).unwrap(), 0, "nothing mounted is success");
        mount::mount_fs(&device.path, &at, kind.name(), &options.with_access(Access::ReadOnly)).unwrap();
        assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "kept");
        assert!(fs::write(at.join("other"), "").is_err(), "read-only");
        mount::unmount(&at).unwrap();
        loopdev::detach(&device).unwrap();
        loopdev::detach(&device).unwrap();
        assert!(loopdev::find(&image).unwrap().is_empty());
    }
}

#[test]
fn the_kernels_reason_is_in_the_error() {
    let mut dir = TestDir::new();
    let image = dir.image("disk", 64 * MIB);
    let at = dir.directory("at");
    let device = loopdev::attach(&image, Access::ReadWrite).unwrap();
    filesystem::mkfs(&device.path, Format::Ext4, &[], Overwrite::IfBlank).unwrap();
    let nonsense = MountOptions::parse(&["nonsense"]).unwrap();
    let error = mount::mount_fs(&device.path, &at, "ext4", &nonsense).unwrap_err().to_string();
    assert!(error.contains("nonsense"), "{error}");
    assert!(!mount::is_mount_point(&at).unwrap());
}

#[test]
fn a_device_with_anything_on_it_is_never_formatted() {
    for (case, at) in [("first byte", 0), ("in the first MiB", 700_000), ("last byte", 64 * MIB - 1)] {
        let mut dir = TestDir::new();
        let image = dir.image("disk", 64 * MIB);
        let mut file = File::options().write(true).open(&image).unwrap();
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(b"x").unwrap();
        let device = loopdev::attach(&image, Access::ReadWrite).unwrap();
        let refused = filesystem::mkfs(&device.path, Format::Ext4, &[], Overwrite::IfBlank);
        assert!(matches!(refused, Err(MkfsError::NotBlank { holds: DeviceContents::Unknown, .. })), "{case}");
        filesystem::mkfs(&device.path, Format::Ext4, &[], Overwrite::OwnInterruptedFormat).unwrap();
    }
    let mut dir = TestDir::new();
    let empty = dir.image("empty", 0);
    assert!(probe(&empty).is_err(), "a device without a size is not blank");
}

#[test]
fn sixteen_parallel_attaches_get_sixteen_devices() {
    let mut dir = TestDir::new();
    let images: Vec<PathBuf> = (0..16).map(|i| dir.image(&format!("disk{i}"), MIB)).collect();
    let devices: Vec<LoopDevice> = thread::scope(|s| {
        let started: Vec<_> = images.iter().map(|i| s.spawn(|| loopdev::attach(i, Access::ReadWrite))).collect();
        started.into_iter().map(|t| t.join().unwrap().unwrap()).collect()
    });
    let mut numbers: Vec<u32> = devices.iter().map(|d| d.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 16);
    for (image, device) in images.iter().zip(&devices) {
        assert_eq!(loopdev::find(image).unwrap(), std::slice::from_ref(device));
    }
}

#[test]
fn concurrent_attaches_of_one_file_share_one_device() {
    let mut dir = TestDir::new();
    let image = dir.image("disk", MIB);
    let mut numbers: Vec<u32> = thread::scope(|s| {
        let started: Vec<_> =
            (0..8).map(|_| s.spawn(|| loopdev::attach_or_find(&image, Access::ReadWrite).unwrap().number)).collect();
        started.into_iter().map(|t| t.join().unwrap()).collect()
    });
    numbers.dedup();
    assert_eq!(numbers.len(), 1);
    let other = loopdev::attach_or_find(&image, Access::ReadOnly).unwrap_err();
    assert!(matches!(other, LoopError::OtherAccess { .. }));
}

#[test]
fn a_removed_file_is_still_found_and_detached() {
    let mut dir = TestDir::new();
    let image = dir.image("disk", MIB);
    let device = loopdev::attach(&image, Access::ReadOnly).unwrap();
    fs::remove_file(&image).unwrap();
    assert_eq!(loopdev::find(&image).unwrap(), [device]);
    // A new file of the same name is another file.
    File::create(&image).unwrap().set_len(MIB).unwrap();
    assert!(loopdev::find(&image).unwrap().is_empty());
    fs::remove_file(&image).unwrap();
    loopdev::detach_file(&image).unwrap();
    assert!(loopdev::find(&image).unwrap().is_empty());
}

#[test]
fn a_device_that_was_reused_for_another_file_is_not_detached() {
    let mut dir = TestDir::new();
    let (first, second) = (dir.image("first", MIB), dir.image("second", MIB));
    let device = loopdev::attach(&second, Access::ReadWrite).unwrap();
    let meta = fs::metadata(&first).unwrap();
    let stale = LoopDevice {
        backing: {
            use std::os::unix::fs::MetadataExt;
            (meta.dev(), meta.ino())
        },
        ..device.clone()
    };
    loopdev::detach(&stale).unwrap();
    assert_eq!(loopdev::find(&second).unwrap(), [device]);
}

#[test]
fn a_device_follows_the_size_of_its_file() {
    let mut dir = TestDir::new();
    let image = dir.image("disk", MIB);
    let device = loopdev::attach(&image, Access::ReadWrite).unwrap();
    File::options().write(true).open(&image).unwrap().set_len(3 * MIB).unwrap();
    loopdev::set_capacity(&device).unwrap();
    assert_eq!(File::open(&device.path).unwrap().seek(SeekFrom::End(0)).unwrap(), 3 * MIB);
}

#[test]
fn binds_of_directories_and_files_keep_their_access() {
    let dir = TestDir::new();
    let (from, at) = (dir.directory("from"), dir.directory("at"));
    fs::write(from.join("a"), "1").unwrap();

    mount::bind(&from, &at, Access::ReadOnly).unwrap();
    assert!(fs::write(at.join("a"), "2").is_err());
    assert!(mount::find(&at).unwrap().unwrap().is_read_only());
    fs::write(from.join("a"), "3").unwrap();
    assert_eq!(fs::read_to_string(at.join("a")).unwrap(), "3");

    mount::bind(&from, &at, Access::ReadWrite).unwrap();
    fs::write(at.join("a"), "4").unwrap();
    assert_eq!(mount::unmount(&at).unwrap(), 2, "stacked mounts are removed together");
    assert!(!mount::is_mount_point(&at).unwrap());

    let file = dir.root.path().join("file");
    File::create(&file).unwrap();
    mount::bind(&from.join("a"), &file, Access::ReadOnly).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "4");
    assert!(mount::is_mount_point(&file).unwrap());
    assert_eq!(mount::unmount(&file).unwrap(), 1);
    assert_eq!(mount::unmount(Path::new("/nonexistent/x")).unwrap(), 0);
}

#[test]
fn a_link_in_place_of_the_target_is_refused() {
    let dir = TestDir::new();
    let (from, elsewhere) = (dir.directory("from"), dir.directory("elsewhere"));
    let link = dir.root.path().join("link");
    std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
    assert!(mount::bind(&from, &link, Access::ReadWrite).is_err());
    assert!(!mount::is_mount_point(&elsewhere).unwrap());
}

#[test]
fn other_mounts_of_the_same_directory_are_listed() {
    let mut dir = TestDir::new();
    let image = dir.image("disk", 64 * MIB);
    let (staged, published) = (dir.directory("staged"), dir.directory("published"));
    let device = loopdev::attach(&image, Access::ReadWrite).unwrap();
    filesystem::mkfs(&device.path, Format::Ext4, &[], Overwrite::IfBlank).unwrap();
    mount::mount_fs(&device.path, &staged, FileSystemKind::Ext4.name(), &MountOptions::default()).unwrap();
    assert!(mount::references(&staged).unwrap().is_empty());
    mount::bind(&staged, &published, Access::ReadWrite).unwrap();
    assert_eq!(mount::references(&staged).unwrap(), [fs::canonicalize(&published).unwrap()]);
}

#[test]
fn a_shared_directory_propagates_and_is_shared_once() {
    let dir = TestDir::new();
    let root = dir.directory("root");
    mount::share(&root).unwrap();
    mount::share(&root).unwrap();
    assert!(mount::find(&root).unwrap().unwrap().shared);
    assert_eq!(mount::unmount(&root).unwrap(), 1);
}

#[tokio::test]
async fn host_calls_run_off_the_async_workers() {
    let listed = offload(Duration::from_secs(10), "read the mount table", mount::table).await.unwrap();
    assert!(!listed.is_empty());
    let failed = offload(Duration::from_secs(10), "probe", || probe(Path::new("/nonexistent"))).await;
    assert!(matches!(failed, Err(OffloadError::Failed(_))));
}
