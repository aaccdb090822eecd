//! Growing, copying and freezing with real devices. Needs root, xfsprogs and btrfs-progs.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use cleat_host::filesystem::{self, Format, GrowError, Overwrite, grow, statfs};
use cleat_host::loopdev::{self, LoopDevice};
use cleat_host::mount::{self, MountOptions};
use cleat_host::{Access, copy, freeze};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A formatted image, its device and a directory to mount it at. Dropping it unmounts and detaches everything.
struct TestDisk {
    dir: TempDir,
    image: PathBuf,
    at: PathBuf,
    device: LoopDevice,
}

impl TestDisk {
    fn new(format: Format, bytes: u64) -> TestDisk {
        assert!(rustix::process::geteuid().is_root(), "these tests mount file systems: run them as root");
        let dir = tempfile::Builder::new().prefix("cleat-host-").tempdir().unwrap();
        let (image, at) = (dir.path().join("disk"), dir.path().join("at"));
        File::create(&image).unwrap().set_len(bytes).unwrap();
        fs::create_dir(&at).unwrap();
        let device = loopdev::attach(&image, Access::ReadWrite).unwrap();
        filesystem::mkfs(&device.path, format, &[], Overwrite::IfBlank).unwrap();
        TestDisk { dir, image, at, device }
    }

    fn mount(&self, format: Format) {
        mount::mount_fs(&self.device.path, &self.at, format.name(), &MountOptions::default()).unwrap();
    }

    fn enlarge(&self, bytes: u64) {
        File::options().write(true).open(&self.image).unwrap().set_len(bytes).unwrap();
        loopdev::set_capacity(&self.device).unwrap();
        let size = File::open(&self.device.path).unwrap().seek(SeekFrom::End(0)).unwrap();
        assert_eq!(size, bytes, "the device follows its file");
    }
}

impl Drop for TestDisk {
    fn drop(&mut self) {
        let _ = freeze::thaw(&self.at);
        let _ = mount::unmount(&self.at);
        let _ = loopdev::detach_file(&self.image);
    }
}

#[test]
fn a_mounted_file_system_grows_and_keeps_its_files() {
    for format in [Format::Xfs, Format::Btrfs] {
        let disk = TestDisk::new(format, 320 * MIB);
        disk.mount(format);
        fs::write(disk.at.join("file"), "data").unwrap();
        let before = statfs(&disk.at).unwrap().total_bytes;
        disk.enlarge(640 * MIB);
        for _ in 0..2 {
            grow(&disk.device.path, format.kind(), Some(&disk.at)).unwrap();
        }
        let after = statfs(&disk.at).unwrap().total_bytes;
        assert!(after > before + 300 * MIB, "{format:?}: {before} then {after}");
        assert_eq!(fs::read(disk.at.join("file")).unwrap(), b"data");
        mount::unmount(&disk.at).unwrap();
        let refused = grow(&disk.device.path, format.kind(), None).unwrap_err();
        assert!(matches!(refused, GrowError::NeedsMount { .. }), "{refused}");
    }
}

#[test]
fn ext4_grows_unmounted_and_reports_if_growing_it_mounted_is_not_permitted() {
    let disk = TestDisk::new(Format::Ext4, 64 * MIB);
    disk.mount(Format::Ext4);
    fs::write(disk.at.join("file"), "data").unwrap();
    mount::unmount(&disk.at).unwrap();
    disk.enlarge(256 * MIB);
    for _ in 0..2 {
        grow(&disk.device.path, Format::Ext4.kind(), None).unwrap();
    }
    disk.mount(Format::Ext4);
    assert!(statfs(&disk.at).unwrap().total_bytes > 200 * MIB);
    assert_eq!(fs::read(disk.at.join("file")).unwrap(), b"data");

    disk.enlarge(512 * MIB);
    match grow(&disk.device.path, Format::Ext4.kind(), Some(&disk.at)) {
        Ok(()) => assert!(statfs(&disk.at).unwrap().total_bytes > 400 * MIB),
        Err(error) => assert!(matches!(error, GrowError::OnlineNotPermitted { .. }), "{error}"),
    }
}

#[test]
fn a_sparse_copy_has_the_data_and_the_holes() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let mut file = File::create(&from).unwrap();
    file.set_len(1 << 30).unwrap();
    for (at, byte) in [(0, b'a'), (100 * MIB, b'b'), ((1 << 30) - 4096, b'c')] {
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(&[byte; 4096]).unwrap();
    }
    file.sync_all().unwrap();
    copy::copy_sparse(&from, &to).unwrap();
    assert!(same(&from, &to));
    assert!(fs::metadata(&to).unwrap().blocks() * 512 < MIB, "holes stay holes");
    // Overwrites a larger file.
    fs::write(&to, vec![9; 2 << 20]).unwrap();
    copy::copy_sparse(&from, &to).unwrap();
    assert!(same(&from, &to));
}

fn same(one: &Path, other: &Path) -> bool {
    fs::read(one).unwrap() == fs::read(other).unwrap()
}

#[test]
fn a_reflink_shares_blocks_until_one_side_is_written() {
    let disk = TestDisk::new(Format::Xfs, 320 * MIB);
    disk.mount(Format::Xfs);
    assert!(copy::can_reflink(&disk.at).unwrap());
    let (from, to) = (disk.at.join("from"), disk.at.join("to"));
    fs::write(&from, vec![7; 100 << 20]).unwrap();
    freeze::flush(&disk.at).unwrap();
    let before = statfs(&disk.at).unwrap().available_bytes;
    assert!(copy::reflink(&from, &to).unwrap());
    assert!(same(&from, &to));
    let after = statfs(&disk.at).unwrap().available_bytes;
    assert!(before - after < 10 * MIB, "{before} then {after}");
    // A loop device on a reflinked file keeps its sector size; otherwise a file system on it would not mount any more.
    let device = loopdev::attach(&to, Access::ReadWrite).unwrap();
    let sectors = fs::read_to_string(format!("/sys/block/loop{}/queue/logical_block_size", device.number)).unwrap();
    assert_eq!(sectors.trim(), "512");
    loopdev::detach(&device).unwrap();
    fs::write(&from, "other").unwrap();
    assert_eq!(fs::metadata(&to).unwrap().len(), 100 << 20);

    let left: Vec<_> = fs::read_dir(&disk.at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "the probe leaves no files: {left:?}");
    assert!(!copy::reflink(&from, &disk.dir.path().join("elsewhere")).unwrap(), "not across file systems");
}

#[test]
fn allocate_reserves_all_blocks_or_fails() {
    let disk = TestDisk::new(Format::Xfs, 320 * MIB);
    disk.mount(Format::Xfs);
    let file = disk.at.join("file");
    File::create(&file).unwrap();
    copy::allocate(&file, 64 * MIB).unwrap();
    assert_eq!(copy::allocated_bytes(&file).unwrap(), 64 * MIB);
    assert!(copy::allocate(&file, 1 << 30).unwrap_err().is_disk_full());
}

#[test]
fn a_frozen_file_system_blocks_its_writers_until_it_is_thawed() {
    let disk = TestDisk::new(Format::Ext4, 64 * MIB);
    disk.mount(Format::Ext4);
    freeze::thaw(&disk.at).unwrap();
    freeze::freeze(&disk.at).unwrap();
    freeze::freeze(&disk.at).unwrap();
    let (done, written) = mpsc::channel();
    let file = disk.at.join("file");
    let writer = std::thread::spawn(move || {
        fs::write(file, "data").unwrap();
        done.send(()).unwrap();
    });
    assert!(written.recv_timeout(Duration::from_millis(100)).is_err(), "the writer went on");
    freeze::thaw(&disk.at).unwrap();
    written.recv_timeout(Duration::from_secs(30)).unwrap();
    writer.join().unwrap();
}

#[test]
fn the_queue_depth_of_a_device_can_be_set() {
    let disk = TestDisk::new(Format::Ext4, 64 * MIB);
    for depth in [4, 64] {
        loopdev::set_queue_depth(&disk.device, depth).unwrap();
        let shown = fs::read_to_string(format!("/sys/block/loop{}/queue/nr_requests", disk.device.number)).unwrap();
        assert_eq!(shown.trim(), depth.to_string());
    }
    let below = loopdev::attached_below(&disk.dir.path().canonicalize().unwrap()).unwrap();
    assert_eq!(below.iter().map(|(device, _)| device.number).collect::<Vec<_>>(), [disk.device.number]);
}
