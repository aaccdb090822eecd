//! The steps on a node: loop device, file system, mounts, and their way back. Everything blocks and may hang.
//!
//! What is staged or published is read from the kernel, never from memory: the kernel's word survives a crash of ours.
//! Must not unmount or detach anything that is not this volume.
use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
};

use cleat_crash::point;
use cleat_host::{
    Access as DeviceAccess,
    filesystem::{self, DeviceContents, Format, Overwrite},
    loopdev::{self, LoopDevice},
    mount::{self, MountOptions},
};

use super::{
    backend::{Locked, Pool},
    failure::Failure,
    health::{self, Complaint},
    parameters,
    record::{Contents, Record, Sharing},
    request::{Access, Capability, Range},
    seen::{Seen, is_node_of},
};

pub(crate) fn stage(pool: &Pool, node: &str, id: &str, at: &Path, capability: &Capability) -> Result<(), Failure> {
    let (volume, mut record) = pool.must_exist(id)?;
    let publication = *record.published.get(node).ok_or_else(|| not_published(id, node))?;
    let read_only = publication.read_only || capability.read_only;
    let (file_system, flags) = match &capability.access {
        Access::Block => return stage_block(&volume, &mut record, id, device_access(read_only)),
        Access::Mount { file_system, flags } => (file_system, flags),
    };
    let options = MountOptions::parse(flags)?;
    let read_only = read_only || options.access().is_read_only();
    let recorded = record.file_system.as_deref().and_then(Format::from_name);
    let format = file_system.or(recorded).unwrap_or(Format::Ext4);
    let mut options = options.with_access(device_access(read_only));
    if format == Format::Xfs {
        // A clone carries its origin's identity, and both may be staged on one node.
        options = options.with_fs_option("nouuid");
    }

    let seen = Seen::of_image(&volume.image())?;
    match seen.at(id, at)? {
        Some(here) if here.is_read_only() == read_only => return Ok(()),
        Some(_) => return Err(Failure::OtherAccess { id: id.to_owned(), at: at.to_owned() }),
        None => {}
    }
    if publication.sharing == Sharing::Exclusive {
        seen.refuse_uses(id)?;
    }
    volume.ensure_image(&record)?;
    let device = loopdev::attach_or_find(&volume.image(), DeviceAccess::ReadWrite)?;
    point("driver:loop-attached");
    let may_grow = record.grow && !read_only;
    let staged = apply_bandwidth(&record, &device)
        .and_then(|()| make_directory(at))
        .and_then(|_| fill(&volume, &mut record, id, &device, format, read_only, seen.uses.is_empty()))
        .and_then(|()| match may_grow && seen.uses.is_empty() && filesystem::grows_unmounted(format.kind()) {
            true => grow(&volume, &mut record, &device, format, None),
            false => Ok(()),
        })
        .and_then(|()| Ok(mount::mount_fs(&device.path, at, format.name(), &options)?));
    if staged.is_err() && seen.devices.is_empty() {
        undo("detach", loopdev::detach(&device));
    }
    staged?;
    point("driver:staged");
    if may_grow && record.grow {
        grow(&volume, &mut record, &device, format, Some(at))?;
    }
    Ok(())
}

/// Makes the file system as large as the image has become, and takes note.
fn grow(
    volume: &Locked<'_>,
    record: &mut Record,
    device: &LoopDevice,
    format: Format,
    mounted: Option<&Path>,
) -> Result<(), Failure> {
    loopdev::set_capacity(device)?;
    point("driver:device-grown");
    filesystem::grow(&device.path, format.kind(), mounted)?;
    point("driver:grown");
    if record.grow {
        record.grow = false;
        volume.write(record)?;
    }
    Ok(())
}

/// For NodeExpandVolume: the device and what is on it follow the image. Returns the size.
pub(crate) fn expand(pool: &Pool, id: &str, at: &Path, range: Range) -> Result<u64, Failure> {
    let (volume, mut record) = pool.must_exist(id)?;
    if !range.is_reached_by(record.capacity) {
        let why = format!("capacity_range: the volume has {} bytes; expand it first", record.capacity);
        return Err(Failure::Refused(tonic::Status::out_of_range(why)));
    }
    let seen = Seen::of_image(&volume.image())?;
    let not_here = || Failure::NoVolume(format!("{id} at {}", at.display()));
    let here = seen.at(id, at)?.ok_or_else(not_here)?;
    let device = seen.devices.first().ok_or_else(not_here)?;
    volume.ensure_image(&record)?;
    if is_node_of(here, &seen.devices) {
        loopdev::set_capacity(device)?;
        return Ok(record.capacity);
    }
    let format = Format::from_name(&here.fstype).ok_or_else(not_here)?;
    // Through the stage: a bind mount of it may be read-only.
    let stage = seen.uses.iter().find(|used| !is_node_of(used, &seen.devices) && !used.is_read_only());
    let stage = stage.ok_or_else(|| Failure::OtherAccess { id: id.to_owned(), at: at.to_owned() })?;
    grow(&volume, &mut record, device, format, Some(&stage.target))?;
    Ok(record.capacity)
}

/// The class that ControllerModifyVolume recorded.
fn apply_bandwidth(record: &Record, device: &LoopDevice) -> Result<(), Failure> {
    match parameters::queue_depth(&record.mutable) {
        Some(depth) => Ok(loopdev::set_queue_depth(device, depth)?),
        None => Ok(()),
    }
}

fn stage_block(volume: &Locked<'_>, record: &mut Record, id: &str, access: DeviceAccess) -> Result<(), Failure> {
    let seen = Seen::of_image(&volume.image())?;
    if seen.devices.iter().any(|device| device.access != access) {
        // Left over from an earlier stage; with a use it is a conflict.
        seen.refuse_uses(id)?;
        loopdev::detach_file(&volume.image())?;
    }
    volume.ensure_image(record)?;
    record_data(volume, record)?;
    let device = loopdev::attach_or_find(&volume.image(), access)?;
    point("driver:loop-attached");
    if !seen.devices.is_empty() {
        // Expanded while no node had it staged in full.
        loopdev::set_capacity(&device)?;
    }
    apply_bandwidth(record, &device)
}

/// Sees to it that the device holds the wanted file system. Formats only a blank device, or one whose format by us did not
/// end.
fn fill(
    volume: &Locked<'_>,
    record: &mut Record,
    id: &str,
    device: &LoopDevice,
    format: Format,
    read_only: bool,
    unused: bool,
) -> Result<(), Failure> {
    let overwrite = match (record.contents, filesystem::probe(&device.path)?) {
        (Contents::Formatting, _) => Overwrite::OwnInterruptedFormat,
        // Only we have the device: it was attached, and is probed, under the volume's lock.
        (_, DeviceContents::Blank) => Overwrite::ProbedBlank,
        (_, DeviceContents::FileSystem { kind, .. }) if kind == format.kind() => {
            if !read_only && unused {
                filesystem::fsck(&device.path, kind)?;
            }
            return record_data(volume, record);
        }
        (_, holds) => {
            let (holds, wanted) = (holds.to_string(), format.name().to_owned());
            return Err(Failure::Holds { id: id.to_owned(), holds, wanted });
        }
    };
    if read_only {
        return Err(Failure::Unformatted { id: id.to_owned(), why: "through a read-only stage" });
    }
    if parameters::forbids_format(&record.parameters) {
        return Err(Failure::Unformatted { id: id.to_owned(), why: "as its class says" });
    }
    if record.contents != Contents::Formatting {
        record.contents = Contents::Formatting;
        volume.write(record)?;
        point("driver:format-recorded");
    }
    filesystem::mkfs(&device.path, format, &parameters::mkfs_options(&record.parameters), overwrite)?;
    // It was made as large as its device.
    record.grow = false;
    point("driver:formatted");
    // Durable before the first mount: from here on a format would destroy data.
    record_data(volume, record)
}

fn record_data(volume: &Locked<'_>, record: &mut Record) -> Result<(), Failure> {
    if record.contents == Contents::Data {
        return Ok(());
    }
    record.contents = Contents::Data;
    volume.write(record)
}

pub(crate) fn unstage(pool: &Pool, node: &str, id: &str, at: &Path) -> Result<(), Failure> {
    let existing = pool.existing(id)?;
    let sharing = existing
        .as_ref()
        .and_then(|(_, record)| record.published.get(node))
        .map_or(Sharing::Exclusive, |publication| publication.sharing);
    let image = pool.image(id);
    let seen = Seen::of_image(&image)?;
    let here = seen.at(id, at)?;
    let elsewhere = seen.uses.iter().find(|used| here.is_none_or(|here| here.target != used.target));
    if let Some(used) = elsewhere
        && sharing == Sharing::Exclusive
    {
        return Err(Failure::InUse { id: id.to_owned(), at: used.target.clone() });
    }
    if here.is_some() {
        mount::unmount(at)?;
        point("driver:unstaged-mount");
    }
    // Other nodes on this machine share the device of a shared volume; the last one takes it away.
    if elsewhere.is_none() {
        loopdev::detach_file(&image)?;
    }
    Ok(())
}

/// Where NodePublish is to make a volume appear.
pub(crate) struct Target<'a> {
    pub(crate) staging: &'a Path,
    pub(crate) path: &'a Path,
    pub(crate) read_only: bool,
}

pub(crate) fn publish(
    pool: &Pool,
    node: &str,
    id: &str,
    target: &Target<'_>,
    capability: &Capability,
) -> Result<(), Failure> {
    let (volume, record) = pool.must_exist(id)?;
    let publication = record.published.get(node).ok_or_else(|| not_published(id, node))?;
    let seen = Seen::of_image(&volume.image())?;
    let not_staged = || Failure::NotStaged { id: id.to_owned(), at: target.staging.to_owned() };
    let mut read_only = target.read_only || publication.read_only || capability.read_only;
    let mut staged = None;
    let source = match &capability.access {
        Access::Block => &seen.devices.first().ok_or_else(not_staged)?.path,
        Access::Mount { flags, .. } => {
            staged = seen.at(id, target.staging)?;
            let staged = staged.ok_or_else(not_staged)?;
            read_only |= staged.is_read_only() || MountOptions::parse(flags)?.access().is_read_only();
            &staged.target
        }
    };
    if let Some(here) = seen.at(id, target.path)? {
        // A device node is as writable as its device, whatever the bind says.
        return if capability.access == Access::Block || here.is_read_only() == read_only {
            Ok(())
        } else {
            Err(Failure::OtherAccess { id: id.to_owned(), at: target.path.to_owned() })
        };
    }
    if capability.single_target
        && let Some(other) = seen.uses.iter().find(|used| staged.is_none_or(|staged| staged.target != used.target))
    {
        return Err(Failure::InUse { id: id.to_owned(), at: other.target.clone() });
    }
    let made = match capability.access {
        Access::Block => make_file(target.path),
        Access::Mount { .. } => make_directory(target.path),
    }?;
    if let Err(error) = mount::bind(source, target.path, device_access(read_only)) {
        if made == Made::Now {
            undo("remove the target", remove_target(target.path));
        }
        return Err(error.into());
    }
    point("driver:published");
    Ok(())
}

pub(crate) fn unpublish(pool: &Pool, id: &str, target: &Path) -> Result<(), Failure> {
    let _existing = pool.existing(id)?;
    if Seen::of_image(&pool.image(id))?.at(id, target)?.is_some() {
        mount::unmount(target)?;
        point("driver:unpublished");
    }
    remove_target(target)
}

/// For DeleteVolume: takes away a device that a crash left behind, refuses one that is in use.
pub(crate) fn release(id: &str, image: &Path) -> Result<(), Failure> {
    let seen = Seen::of_image(image)?;
    seen.refuse_uses(id)?;
    seen.devices.iter().try_for_each(loopdev::detach)?;
    Ok(())
}

/// Numbers for NodeGetVolumeStats.
pub(crate) enum Stats {
    FileSystem(filesystem::FileSystemUsage),
    Device { size: u64 },
}

pub(crate) fn stats(pool: &Pool, node: &str, id: &str, at: &Path) -> Result<(Stats, Vec<Complaint>), Failure> {
    let record = pool.peek(id)?.ok_or_else(|| Failure::NoVolume(id.to_owned()))?;
    let seen = Seen::of_image(&pool.image(id))?;
    let here = mount::find(at)?.filter(|here| seen.uses.iter().any(|used| used.id == here.id));
    let here = here.ok_or_else(|| Failure::NoVolume(format!("{id} at {}", at.display())))?;
    let complaints = health::on_node(pool, node, id, &record, &seen, Some(&here.target));
    if is_node_of(&here, &seen.devices) {
        return Ok((Stats::Device { size: record.capacity }, complaints));
    }
    Ok((Stats::FileSystem(filesystem::statfs(at)?), complaints))
}

/// For NodeGetVolumeHealth; the path is where the caller has it published or staged, if it says so.
pub(crate) fn complaints(pool: &Pool, node: &str, id: &str, at: Option<&Path>) -> Result<Vec<Complaint>, Failure> {
    let record = pool.peek(id)?.ok_or_else(|| Failure::NoVolume(id.to_owned()))?;
    let seen = Seen::of_image(&pool.image(id))?;
    Ok(health::on_node(pool, node, id, &record, &seen, at))
}

fn not_published(id: &str, node: &str) -> Failure {
    Failure::NotPublished { id: id.to_owned(), node: node.to_owned() }
}

fn device_access(read_only: bool) -> DeviceAccess {
    if read_only { DeviceAccess::ReadOnly } else { DeviceAccess::ReadWrite }
}

#[derive(PartialEq)]
enum Made {
    Now,
    Before,
}

fn make_directory(path: &Path) -> Result<Made, Failure> {
    match fs::DirBuilder::new().mode(0o750).create(path) {
        Ok(()) => Ok(Made::Now),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(Made::Before),
        Err(source) => Err(Failure::Files { step: "make the directory", path: path.to_owned(), source }),
    }
}

fn make_file(path: &Path) -> Result<Made, Failure> {
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o640).open(path) {
        Ok(_) => Ok(Made::Now),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_empty_file(path) => Ok(Made::Before),
        Err(source) => Err(Failure::Files { step: "make the file", path: path.to_owned(), source }),
    }
}

fn is_empty_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.len() == 0)
}

/// Never recursive: whatever else is there is not ours.
fn remove_target(path: &Path) -> Result<(), Failure> {
    let removed = if is_empty_file(path) { fs::remove_file(path) } else { fs::remove_dir(path) };
    match removed {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(Failure::Files { step: "remove the target", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

fn undo<E: std::error::Error + 'static>(step: &'static str, result: Result<(), E>) {
    if let Err(error) = result {
        tracing::warn!(step, error = &error as &dyn std::error::Error, "could not undo; the next call will");
    }
}
