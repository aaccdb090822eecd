//! The operations on a node: attach the loop device, create the file system, mount, and the reverse. Every function
//! blocks, and may hang.
//!
//! Whether a volume is staged or published is read from the kernel, never remembered: the state of the kernel survives
//! a crash of the driver. Must not unmount or detach anything that does not belong to the volume.
use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
};

use cleat_crash::point;
use cleat_host::{
    Access,
    filesystem::{self, DeviceContents, Format, Overwrite},
    loopdev::{self, LoopDevice},
    mount::{self, MountOptions},
};

use super::{
    failure::Failure,
    health::{self, HealthProblem},
    kernel_state::{KernelState, is_device_node_mount},
    parameters,
    pool::{LockedVolume, Pool},
    record::{ImageContents, Sharing, VolumeRecord},
    request::{Capability, SizeRange, VolumeAccess},
};

pub(crate) fn stage(pool: &Pool, node: &str, id: &str, at: &Path, capability: &Capability) -> Result<(), Failure> {
    let (volume, mut record) = pool.lock_existing(id)?;
    let publication = *record.published.get(node).ok_or_else(|| not_published(id, node))?;
    let read_only = publication.read_only || capability.read_only;
    let (file_system, flags) = match &capability.access {
        VolumeAccess::Block => return stage_block(&volume, &mut record, id, device_access(read_only)),
        VolumeAccess::Mount { file_system, flags } => (file_system, flags),
    };
    let options = MountOptions::parse(flags)?;
    let read_only = read_only || options.access().is_read_only();
    let recorded = record.file_system.as_deref().and_then(Format::from_name);
    let format = file_system.or(recorded).unwrap_or(Format::Ext4);
    let mut options = options.with_access(device_access(read_only));
    if format == Format::Xfs {
        // A clone has the UUID of its source, and both may be staged on one node.
        options = options.with_fs_option("nouuid");
    }

    let kernel = KernelState::of_image(&volume.image_path())?;
    match kernel.mount_at(id, at)? {
        Some(mounted) if mounted.is_read_only() == read_only => return Ok(()),
        Some(_) => return Err(Failure::MountedWithOtherAccess { id: id.to_owned(), at: at.to_owned() }),
        None => {}
    }
    if publication.sharing == Sharing::Exclusive {
        kernel.require_unmounted(id)?;
    }
    volume.ensure_image(&record)?;
    let device = loopdev::attach_or_find(&volume.image_path(), Access::ReadWrite)?;
    point("driver:loop-attached");
    let may_grow = record.needs_grow && !read_only;
    let staged = apply_bandwidth(&record, &device)
        .and_then(|()| ensure_target_dir(at))
        .and_then(|_| {
            ensure_file_system(&volume, &mut record, id, &device, format, read_only, kernel.mounts.is_empty())
        })
        .and_then(|()| match may_grow && kernel.mounts.is_empty() && filesystem::grows_unmounted(format.kind()) {
            true => grow(&volume, &mut record, &device, format, None),
            false => Ok(()),
        })
        .and_then(|()| Ok(mount::mount_fs(&device.path, at, format.name(), &options)?));
    if staged.is_err() && kernel.devices.is_empty() {
        log_failed_undo("detach", loopdev::detach(&device));
    }
    staged?;
    point("driver:staged");
    if may_grow && record.needs_grow {
        grow(&volume, &mut record, &device, format, Some(at))?;
    }
    Ok(())
}

/// Grows the device and the file system to the size of the image, and records that.
fn grow(
    volume: &LockedVolume<'_>,
    record: &mut VolumeRecord,
    device: &LoopDevice,
    format: Format,
    mounted: Option<&Path>,
) -> Result<(), Failure> {
    loopdev::set_capacity(device)?;
    point("driver:device-grown");
    filesystem::grow(&device.path, format.kind(), mounted)?;
    point("driver:grown");
    if record.needs_grow {
        record.needs_grow = false;
        volume.write(record)?;
    }
    Ok(())
}

/// NodeExpandVolume: grows the device and its file system to the size of the image. Returns that size.
pub(crate) fn expand(pool: &Pool, id: &str, at: &Path, range: SizeRange) -> Result<u64, Failure> {
    let (volume, mut record) = pool.lock_existing(id)?;
    if !range.is_satisfied_by(record.capacity) {
        let why = format!("capacity_range: the volume has {} bytes; expand it first", record.capacity);
        return Err(Failure::Refused(tonic::Status::out_of_range(why)));
    }
    let kernel = KernelState::of_image(&volume.image_path())?;
    let not_mounted = || Failure::VolumeNotFound(format!("{id} at {}", at.display()));
    let mounted = kernel.mount_at(id, at)?.ok_or_else(not_mounted)?;
    let device = kernel.devices.first().ok_or_else(not_mounted)?;
    volume.ensure_image(&record)?;
    if is_device_node_mount(mounted, &kernel.devices) {
        loopdev::set_capacity(device)?;
        return Ok(record.capacity);
    }
    let format = Format::from_name(&mounted.fstype).ok_or_else(not_mounted)?;
    // Grown through the staging mount: a bind mount of it may be read-only.
    let stage =
        kernel.mounts.iter().find(|mount| !is_device_node_mount(mount, &kernel.devices) && !mount.is_read_only());
    let stage = stage.ok_or_else(|| Failure::MountedWithOtherAccess { id: id.to_owned(), at: at.to_owned() })?;
    grow(&volume, &mut record, device, format, Some(&stage.target))?;
    Ok(record.capacity)
}

/// Applies the bandwidth class that CreateVolume or ControllerModifyVolume recorded.
fn apply_bandwidth(record: &VolumeRecord, device: &LoopDevice) -> Result<(), Failure> {
    match parameters::queue_depth(&record.mutable_parameters) {
        Some(depth) => Ok(loopdev::set_queue_depth(device, depth)?),
        None => Ok(()),
    }
}

fn stage_block(volume: &LockedVolume<'_>, record: &mut VolumeRecord, id: &str, access: Access) -> Result<(), Failure> {
    let kernel = KernelState::of_image(&volume.image_path())?;
    if kernel.devices.iter().any(|device| device.access != access) {
        // The device is left over from an earlier stage. If it is in use, this stage conflicts with that one.
        kernel.require_unmounted(id)?;
        loopdev::detach_file(&volume.image_path())?;
    }
    volume.ensure_image(record)?;
    mark_contains_data(volume, record)?;
    let device = loopdev::attach_or_find(&volume.image_path(), access)?;
    point("driver:loop-attached");
    if !kernel.devices.is_empty() {
        // The device was attached before this call, and the image may have been expanded since.
        loopdev::set_capacity(&device)?;
    }
    apply_bandwidth(record, &device)
}

/// Makes sure that the device contains the wanted file system. Formats only a blank device, or one whose format by the
/// driver was interrupted.
fn ensure_file_system(
    volume: &LockedVolume<'_>,
    record: &mut VolumeRecord,
    id: &str,
    device: &LoopDevice,
    format: Format,
    read_only: bool,
    is_unmounted: bool,
) -> Result<(), Failure> {
    let overwrite = match (record.contents, filesystem::probe(&device.path)?) {
        (ImageContents::Formatting, _) => Overwrite::OwnInterruptedFormat,
        // No other process uses the device: it was attached, and is probed, under the lock of the volume.
        (_, DeviceContents::Blank) => Overwrite::ProbedBlank,
        (_, DeviceContents::FileSystem { kind, .. }) if kind == format.kind() => {
            if !read_only && is_unmounted {
                filesystem::fsck(&device.path, kind)?;
            }
            return mark_contains_data(volume, record);
        }
        (_, holds) => {
            let (holds, wanted) = (holds.to_string(), format.name().to_owned());
            return Err(Failure::UnexpectedContents { id: id.to_owned(), holds, wanted });
        }
    };
    if read_only {
        return Err(Failure::FormatForbidden { id: id.to_owned(), why: "through a read-only stage" });
    }
    if parameters::forbids_format(&record.parameters) {
        return Err(Failure::FormatForbidden { id: id.to_owned(), why: "as its class says" });
    }
    if record.contents != ImageContents::Formatting {
        record.contents = ImageContents::Formatting;
        volume.write(record)?;
        point("driver:format-recorded");
    }
    filesystem::mkfs(&device.path, format, &parameters::mkfs_options(&record.parameters), overwrite)?;
    // mkfs uses the whole device.
    record.needs_grow = false;
    point("driver:formatted");
    // Recorded durably before the first mount: after that a format would destroy user data.
    mark_contains_data(volume, record)
}

fn mark_contains_data(volume: &LockedVolume<'_>, record: &mut VolumeRecord) -> Result<(), Failure> {
    if record.contents == ImageContents::Data {
        return Ok(());
    }
    record.contents = ImageContents::Data;
    volume.write(record)
}

pub(crate) fn unstage(pool: &Pool, node: &str, id: &str, at: &Path) -> Result<(), Failure> {
    let existing = pool.lock_if_exists(id)?;
    let sharing = existing
        .as_ref()
        .and_then(|(_, record)| record.published.get(node))
        .map_or(Sharing::Exclusive, |publication| publication.sharing);
    let image = pool.image_path(id);
    let kernel = KernelState::of_image(&image)?;
    let mounted = kernel.mount_at(id, at)?;
    let other_mount = kernel.mounts.iter().find(|mount| mounted.is_none_or(|mounted| mounted.target != mount.target));
    if let Some(mount) = other_mount
        && sharing == Sharing::Exclusive
    {
        return Err(Failure::InUse { id: id.to_owned(), at: mount.target.clone() });
    }
    if mounted.is_some() {
        mount::unmount(at)?;
        point("driver:unstaged-mount");
    }
    // Nodes on one machine share the device of a shared volume; the last one that unstages it detaches the device.
    if other_mount.is_none() {
        loopdev::detach_file(&image)?;
    }
    Ok(())
}

/// The paths and the access of a NodePublishVolume request.
pub(crate) struct PublishTarget<'a> {
    pub(crate) staging: &'a Path,
    pub(crate) path: &'a Path,
    pub(crate) read_only: bool,
}

pub(crate) fn publish(
    pool: &Pool,
    node: &str,
    id: &str,
    target: &PublishTarget<'_>,
    capability: &Capability,
) -> Result<(), Failure> {
    let (volume, record) = pool.lock_existing(id)?;
    let publication = record.published.get(node).ok_or_else(|| not_published(id, node))?;
    let kernel = KernelState::of_image(&volume.image_path())?;
    let not_staged = || Failure::NotStaged { id: id.to_owned(), at: target.staging.to_owned() };
    let mut read_only = target.read_only || publication.read_only || capability.read_only;
    let mut staged = None;
    let source = match &capability.access {
        VolumeAccess::Block => &kernel.devices.first().ok_or_else(not_staged)?.path,
        VolumeAccess::Mount { flags, .. } => {
            staged = kernel.mount_at(id, target.staging)?;
            let staged = staged.ok_or_else(not_staged)?;
            read_only |= staged.is_read_only() || MountOptions::parse(flags)?.access().is_read_only();
            &staged.target
        }
    };
    if let Some(mounted) = kernel.mount_at(id, target.path)? {
        // The access of a device node is that of its device; the read-only flag of the bind mount does not matter.
        return if capability.access == VolumeAccess::Block || mounted.is_read_only() == read_only {
            Ok(())
        } else {
            Err(Failure::MountedWithOtherAccess { id: id.to_owned(), at: target.path.to_owned() })
        };
    }
    if capability.single_target
        && let Some(other) =
            kernel.mounts.iter().find(|mount| staged.is_none_or(|staged| staged.target != mount.target))
    {
        return Err(Failure::InUse { id: id.to_owned(), at: other.target.clone() });
    }
    let ensured = match capability.access {
        VolumeAccess::Block => ensure_target_file(target.path),
        VolumeAccess::Mount { .. } => ensure_target_dir(target.path),
    }?;
    if let Err(error) = mount::bind(source, target.path, device_access(read_only)) {
        if ensured == Ensured::Created {
            log_failed_undo("remove the target", remove_target(target.path));
        }
        return Err(error.into());
    }
    point("driver:published");
    Ok(())
}

pub(crate) fn unpublish(pool: &Pool, id: &str, target: &Path) -> Result<(), Failure> {
    let _existing = pool.lock_if_exists(id)?;
    if KernelState::of_image(&pool.image_path(id))?.mount_at(id, target)?.is_some() {
        mount::unmount(target)?;
        point("driver:unpublished");
    }
    remove_target(target)
}

/// Detaches the loop devices of a volume, which a crash may have left. Fails if the volume is in use.
pub(crate) fn detach_unused(id: &str, image: &Path) -> Result<(), Failure> {
    let kernel = KernelState::of_image(image)?;
    kernel.require_unmounted(id)?;
    kernel.devices.iter().try_for_each(loopdev::detach)?;
    Ok(())
}

/// The numbers of NodeGetVolumeStats.
pub(crate) enum VolumeStats {
    FileSystem(filesystem::FileSystemUsage),
    Device { size: u64 },
}

pub(crate) fn stats(
    pool: &Pool,
    node: &str,
    id: &str,
    at: &Path,
) -> Result<(VolumeStats, Vec<HealthProblem>), Failure> {
    let record = pool.read_record(id)?.ok_or_else(|| Failure::VolumeNotFound(id.to_owned()))?;
    let kernel = KernelState::of_image(&pool.image_path(id))?;
    let mounted = mount::find(at)?.filter(|mounted| kernel.mounts.iter().any(|mount| mount.id == mounted.id));
    let mounted = mounted.ok_or_else(|| Failure::VolumeNotFound(format!("{id} at {}", at.display())))?;
    let problems = health::check_on_node(pool, node, id, &record, &kernel, Some(&mounted.target));
    if is_device_node_mount(&mounted, &kernel.devices) {
        return Ok((VolumeStats::Device { size: record.capacity }, problems));
    }
    Ok((VolumeStats::FileSystem(filesystem::statfs(at)?), problems))
}

/// NodeGetVolumeHealth. `at` is the path at which the volume is published or staged, if the request contains one.
pub(crate) fn health_problems(
    pool: &Pool,
    node: &str,
    id: &str,
    at: Option<&Path>,
) -> Result<Vec<HealthProblem>, Failure> {
    let record = pool.read_record(id)?.ok_or_else(|| Failure::VolumeNotFound(id.to_owned()))?;
    let kernel = KernelState::of_image(&pool.image_path(id))?;
    Ok(health::check_on_node(pool, node, id, &record, &kernel, at))
}

fn not_published(id: &str, node: &str) -> Failure {
    Failure::NotPublished { id: id.to_owned(), node: node.to_owned() }
}

fn device_access(read_only: bool) -> Access {
    if read_only { Access::ReadOnly } else { Access::ReadWrite }
}

/// Whether a target existed before the call.
#[derive(PartialEq)]
enum Ensured {
    Created,
    Existed,
}

fn ensure_target_dir(path: &Path) -> Result<Ensured, Failure> {
    match fs::DirBuilder::new().mode(0o750).create(path) {
        Ok(()) => Ok(Ensured::Created),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(Ensured::Existed),
        Err(source) => Err(Failure::Io { step: "make the directory", path: path.to_owned(), source }),
    }
}

fn ensure_target_file(path: &Path) -> Result<Ensured, Failure> {
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o640).open(path) {
        Ok(_) => Ok(Ensured::Created),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_empty_file(path) => Ok(Ensured::Existed),
        Err(source) => Err(Failure::Io { step: "make the file", path: path.to_owned(), source }),
    }
}

fn is_empty_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0)
}

/// Not recursive: a directory with files in it was not created by the driver, and is an error.
fn remove_target(path: &Path) -> Result<(), Failure> {
    let removed = if is_empty_file(path) { fs::remove_file(path) } else { fs::remove_dir(path) };
    match removed {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(Failure::Io { step: "remove the target", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Logs a failed cleanup after another failure, which the caller reports.
fn log_failed_undo<E: std::error::Error + 'static>(step: &'static str, result: Result<(), E>) {
    if let Err(error) = result {
        tracing::warn!(
            step,
            error = &error as &dyn std::error::Error,
            "could not undo a step; the next call for the volume retries"
        );
    }
}
