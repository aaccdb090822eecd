//! Loop devices: files attached as block devices. Owns the ioctls and the device nodes; must not create or remove the
//! files.
//!
//! An attached device is identified by the device and inode number of its backing file, never by its loop number: the
//! kernel reuses a number as soon as it is free.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use linux_raw_sys::loop_device as sys;
use rustix::fs::{FileType, FlockOperation, Mode, flock, makedev, mknodat};
use rustix::io::Errno;

use crate::access::Access;
use crate::errno::last_errno;

const LOOP_MAJOR: u32 = 7;
const LOOP_CONTROL: &str = "/dev/loop-control";
const PROC_PARTITIONS: &str = "/proc/partitions";
const PAGE_BYTES: usize = 4096;
const MAX_PARTITIONS_LINE_BYTES: usize = 128;
const SECTOR_BYTES: u32 = 512;
/// How often `attach` retries when another process takes the free device first.
const MAX_ATTACH_ATTEMPTS: u32 = 512;
/// How long `detach` waits for the kernel to complete a detachment that it defers while another process has the device
/// open.
const DETACH_TIMEOUT: Duration = Duration::from_millis(500);

/// A file attached as a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    pub path: PathBuf,
    pub number: u32,
    pub access: Access,
    /// Device and inode number of the backing file.
    pub backing: (u64, u64),
}

#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    #[error("open the backing file {file:?}")]
    Backing { file: PathBuf, source: io::Error },
    #[error("lock the backing file {file:?}")]
    Lock { file: PathBuf, source: io::Error },
    #[error("get a free loop device from {LOOP_CONTROL}")]
    Free { source: io::Error },
    #[error("make the device node {node:?}")]
    Node { node: PathBuf, source: io::Error },
    #[error("open {node:?}")]
    Open { node: PathBuf, source: io::Error },
    #[error("attach {file:?} to {node:?}")]
    Configure { file: PathBuf, node: PathBuf, source: io::Error },
    #[error("attach {file:?}: lost {MAX_ATTACH_ATTEMPTS} races for a free device")]
    Races { file: PathBuf },
    #[error("{file:?} is already attached as {node:?} with other access rights")]
    OtherAccess { file: PathBuf, node: PathBuf },
    #[error("list loop devices")]
    List { source: io::Error },
    #[error("{what} {node:?}")]
    Control { what: &'static str, node: PathBuf, source: io::Error },
}

/// Attaches `file` to a free loop device, with direct I/O if the file system that contains it supports that.
pub fn attach(file: &Path, access: Access) -> Result<LoopDevice, LoopError> {
    attach_open(file, &open_backing(file, access)?, access)
}

/// Returns the device that `file` is attached to, and attaches it first if there is none. Concurrent callers for one
/// file get the same device.
pub fn attach_or_find(file: &Path, access: Access) -> Result<LoopDevice, LoopError> {
    let backing = open_backing(file, access)?;
    let _lock = lock(file, &backing)?;
    match find(file)?.into_iter().next() {
        Some(device) if device.access == access => Ok(device),
        Some(device) => Err(LoopError::OtherAccess { file: file.into(), node: device.path }),
        None => attach_open(file, &backing, access),
    }
}

/// Detaches every device that `file` is attached to. Succeeds if there is none. Holds the lock that [`attach_or_find`]
/// of the same file takes.
pub fn detach_file(file: &Path) -> Result<(), LoopError> {
    let _lock = match open_backing(file, Access::ReadOnly) {
        Ok(backing) => Some(lock(file, &backing)?),
        // A removed file can still be attached, but it cannot be attached again, so no lock is needed.
        Err(LoopError::Backing { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    find(file)?.iter().try_for_each(detach)
}

/// All devices attached to `file`. If the file was removed: those that were attached to it under this path.
pub fn find(file: &Path) -> Result<Vec<LoopDevice>, LoopError> {
    let inspected = std::fs::symlink_metadata(file).and_then(|meta| match meta.is_symlink() {
        true => Ok((std::fs::metadata(file)?, file.canonicalize()?)),
        false => Ok((meta, file.to_owned())),
    });
    // /sys shows the resolved path: for a symbolic link, compare with the path of its target.
    let (identity, name) = match inspected {
        Ok((meta, name)) => (Some((meta.dev(), meta.ino())), name),
        Err(e) if e.kind() == io::ErrorKind::NotFound => (None, crate::mountinfo::resolve_parent(file)),
        Err(source) => return Err(LoopError::Backing { file: file.into(), source }),
    };
    let mut found = Vec::new();
    for (number, attached) in attached_devices()? {
        // Opening a device defers its detachment by other processes, so only devices whose file name matches are
        // opened. The directory is not compared: in the mount namespace that attached the file its path may be
        // different.
        let deleted_path = attached.strip_suffix(" (deleted)").map(Path::new);
        let is_candidate = match (identity, deleted_path) {
            (Some(_), None) => Path::new(&attached).file_name() == name.file_name(),
            (None, Some(path)) => path == name,
            _ => false,
        };
        if !is_candidate {
            continue;
        }
        if let Some(device) = inspect(number)?
            && identity.is_none_or(|identity| identity == device.backing)
        {
            found.push(device);
        }
    }
    Ok(found)
}

/// Detaches the device, unless it has been attached to another file since `device` was read.
pub fn detach(device: &LoopDevice) -> Result<(), LoopError> {
    let opened = match File::open(&device.path) {
        Ok(opened) => opened,
        Err(e) if is_device_missing(&e) => return Ok(()),
        Err(source) => return Err(LoopError::Open { node: device.path.clone(), source }),
    };
    match status(&opened) {
        Ok(info) if (info.lo_device, info.lo_inode) == device.backing => {}
        Ok(_) | Err(Errno::NXIO) => return Ok(()),
        Err(e) => return Err(device.error("inspect", e)),
    }
    let attached = backing_file(device.number);
    match ioctl_value(&opened, sys::LOOP_CLR_FD, 0) {
        Ok(_) | Err(Errno::NXIO) => {}
        Err(e) => return Err(device.error("detach", e)),
    }
    drop(opened);
    // While another process has the device open, the kernel defers the detachment until that process closes it. After
    // the timeout the call succeeds all the same: the detachment is certain to happen.
    let deadline = Instant::now() + DETACH_TIMEOUT;
    while attached.is_some() && backing_file(device.number) == attached && Instant::now() < deadline {
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// The path of the backing file in /sys; `None` if the device is not attached.
fn backing_file(number: u32) -> Option<Vec<u8>> {
    std::fs::read(format!("/sys/block/loop{number}/loop/backing_file")).ok()
}

/// Updates the size of the device to that of its backing file.
pub fn set_capacity(device: &LoopDevice) -> Result<(), LoopError> {
    let opened = File::open(&device.path).map_err(|source| LoopError::Open { node: device.path.clone(), source })?;
    ioctl_value(&opened, sys::LOOP_SET_CAPACITY, 0).map(drop).map_err(|e| device.error("resize", e))
}

/// Sets how many I/O requests the device accepts at the same time. This limits its share of the disk that it is stored
/// on.
pub fn set_queue_depth(device: &LoopDevice, requests: u32) -> Result<(), LoopError> {
    let path = PathBuf::from(format!("/sys/block/loop{}/queue/nr_requests", device.number));
    let current = std::fs::read_to_string(&path).unwrap_or_default();
    if current.trim().parse() == Ok(requests) {
        return Ok(());
    }
    std::fs::write(&path, requests.to_string()).map_err(|source| LoopError::Control {
        what: "limit the requests of",
        node: device.path.clone(),
        source,
    })
}

/// Devices whose backing file is below `directory`, with the path of that file as the kernel shows it: if the file was
/// removed, the path ends in ` (deleted)`.
pub fn attached_below(directory: &Path) -> Result<Vec<(LoopDevice, PathBuf)>, LoopError> {
    let mut found = Vec::new();
    for (number, file) in attached_devices()? {
        if Path::new(&file).starts_with(directory)
            && let Some(device) = inspect(number)?
        {
            found.push((device, PathBuf::from(file)));
        }
    }
    Ok(found)
}

impl LoopDevice {
    fn error(&self, what: &'static str, errno: Errno) -> LoopError {
        LoopError::Control { what, node: self.path.clone(), source: errno.into() }
    }
}

fn open_backing(file: &Path, access: Access) -> Result<File, LoopError> {
    OpenOptions::new()
        .read(true)
        .write(!access.is_read_only())
        .open(file)
        .map_err(|source| LoopError::Backing { file: file.into(), source })
}

/// Holds an exclusive lock on the image until the returned file is closed.
fn lock(file: &Path, backing: &File) -> Result<File, LoopError> {
    // The lock is taken on a second open file: the loop driver keeps a reference to `backing`, and would keep its lock
    // too.
    let error = |source| LoopError::Lock { file: file.into(), source };
    let lock = File::open(format!("/proc/self/fd/{}", backing.as_raw_fd())).map_err(error)?;
    flock(&lock, FlockOperation::LockExclusive).map_err(|e| error(e.into()))?;
    Ok(lock)
}

fn attach_open(file: &Path, backing: &File, access: Access) -> Result<LoopDevice, LoopError> {
    let meta = backing.metadata().map_err(|source| LoopError::Backing { file: file.into(), source })?;
    let control =
        OpenOptions::new().read(true).write(true).open(LOOP_CONTROL).map_err(|source| LoopError::Free { source })?;
    let mut config = configuration(file, backing, access);
    for attempt in 0..MAX_ATTACH_ATTEMPTS {
        let number =
            ioctl_value(&control, sys::LOOP_CTL_GET_FREE, 0).map_err(|e| LoopError::Free { source: e.into() })?;
        let node = ensure_device_node(number)?;
        let device = match OpenOptions::new().read(true).write(true).open(&node) {
            Ok(device) => device,
            // The device was removed after LOOP_CTL_GET_FREE.
            Err(e) if is_device_missing(&e) => continue,
            Err(source) => return Err(LoopError::Open { node, source }),
        };
        match configure(&device, &config) {
            Ok(()) => return Ok(LoopDevice { path: node, number, access, backing: (meta.dev(), meta.ino()) }),
            Err(Errno::BUSY) => std::thread::sleep(Duration::from_micros(50 * u64::from(attempt.min(20)))),
            Err(Errno::INVAL) if config.info.lo_flags & sys::LO_FLAGS_DIRECT_IO as u32 != 0 => {
                config.info.lo_flags &= !(sys::LO_FLAGS_DIRECT_IO as u32);
            }
            Err(e) => return Err(LoopError::Configure { file: file.into(), node, source: e.into() }),
        }
    }
    Err(LoopError::Races { file: file.into() })
}

fn configuration(file: &Path, backing: &File, access: Access) -> sys::loop_config {
    // SAFETY: loop_config is a C struct of integers and integer arrays, for which all zeroes is a valid value.
    let mut config: sys::loop_config = unsafe { std::mem::zeroed() };
    config.fd = backing.as_raw_fd() as u32;
    // By default the kernel chooses the block size that direct I/O to the file requires. That changes from 512 to 4096
    // once the file shares blocks with another one, and a file system that was created with 512 would not mount any
    // more.
    config.block_size = SECTOR_BYTES;
    config.info.lo_flags = sys::LO_FLAGS_DIRECT_IO as u32;
    if access.is_read_only() {
        config.info.lo_flags |= sys::LO_FLAGS_READ_ONLY as u32;
    }
    // Only displayed by losetup. The last byte stays zero.
    let name = file.as_os_str().as_encoded_bytes();
    let max_bytes = config.info.lo_file_name.len() - 1;
    for (to, from) in config.info.lo_file_name.iter_mut().take(max_bytes).zip(name) {
        *to = *from;
    }
    config
}

/// The path of the device node of loop device `number`. Creates the node if it is missing, as in a container without
/// udev.
fn ensure_device_node(number: u32) -> Result<PathBuf, LoopError> {
    let node = PathBuf::from(format!("/dev/loop{number}"));
    let device = makedev(LOOP_MAJOR, number);
    match std::fs::metadata(&node) {
        Ok(meta) if meta.file_type().is_block_device() && meta.rdev() == device => return Ok(node),
        Ok(_) => {
            let source = io::Error::other("something else is there");
            return Err(LoopError::Node { node, source });
        }
        Err(_) => {}
    }
    match mknodat(rustix::fs::CWD, &node, FileType::BlockDevice, Mode::from_raw_mode(0o660), device) {
        Ok(()) | Err(Errno::EXIST) => Ok(node),
        Err(e) => Err(LoopError::Node { node, source: e.into() }),
    }
}

/// Number and backing file of every attached device, from /sys.
fn attached_devices() -> Result<Vec<(u32, String)>, LoopError> {
    let numbers = match numbers_from_partitions() {
        Some(numbers) => numbers,
        None => numbers_from_sysfs().map_err(|source| LoopError::List { source })?,
    };
    let mut all = Vec::new();
    for number in numbers {
        // `None` if the device was detached in the meantime.
        if let Some(file) = backing_file(number) {
            all.push((number, String::from_utf8_lossy(&file).trim_end_matches('\n').to_owned()));
        }
    }
    all.sort();
    Ok(all)
}

/// The numbers of the loop devices that have a size, which are the attached ones. A machine may have hundreds of
/// unattached ones, because they are created on demand and never removed; `/proc/partitions` does not list them.
///
/// Returns `None` if the list does not fit in one page: the kernel continues a second read by index, and skips a device
/// if an earlier one was removed between the reads.
fn numbers_from_partitions() -> Option<Vec<u32>> {
    let mut page = [0; PAGE_BYTES];
    let mut file = File::open(PROC_PARTITIONS).ok()?;
    let length = file.read(&mut page).ok()?;
    let lines =
        std::str::from_utf8(&page[..length]).ok().filter(|_| length < PAGE_BYTES - MAX_PARTITIONS_LINE_BYTES)?;
    Some(lines.lines().filter_map(loop_number).collect())
}

/// The numbers of all loop devices, attached or not.
fn numbers_from_sysfs() -> io::Result<Vec<u32>> {
    let names = std::fs::read_dir("/sys/block")?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    Ok(names.iter().filter_map(|name| name.to_str()?.strip_prefix("loop")?.parse().ok()).collect())
}

/// Parses the number of a loop device from a line of `/proc/partitions`, whose columns are major number, minor number,
/// size and name. `None` if the line describes another device.
fn loop_number(line: &str) -> Option<u32> {
    line.split_whitespace().nth(3)?.strip_prefix("loop")?.parse().ok()
}

fn inspect(number: u32) -> Result<Option<LoopDevice>, LoopError> {
    let node = ensure_device_node(number)?;
    // Read-only and non-blocking, so that other users of the device are not affected.
    let opened = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&node) {
        Ok(opened) => opened,
        Err(e) if is_device_missing(&e) => return Ok(None),
        Err(source) => return Err(LoopError::Open { node, source }),
    };
    match status(&opened) {
        Ok(info) => {
            let read_only = info.lo_flags & sys::LO_FLAGS_READ_ONLY as u32 != 0;
            let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
            Ok(Some(LoopDevice { path: node, number, access, backing: (info.lo_device, info.lo_inode) }))
        }
        Err(Errno::NXIO) => Ok(None),
        Err(e) => Err(LoopError::Control { what: "inspect", node, source: e.into() }),
    }
}

fn is_device_missing(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENXIO | libc::ENODEV | libc::ENOENT))
}

fn status(device: &File) -> Result<sys::loop_info64, Errno> {
    // SAFETY: loop_info64 is a C struct of integers and integer arrays, for which all zeroes is a valid value.
    let mut info: sys::loop_info64 = unsafe { std::mem::zeroed() };
    // SAFETY: the fd is open, and LOOP_GET_STATUS64 writes exactly one loop_info64 to the pointer, which is valid for that.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), sys::LOOP_GET_STATUS64 as libc::Ioctl, &raw mut info) };
    if result == 0 { Ok(info) } else { Err(last_errno()) }
}

fn configure(device: &File, config: &sys::loop_config) -> Result<(), Errno> {
    // SAFETY: the fd is open, and LOOP_CONFIGURE reads exactly one loop_config from the pointer; the backing fd named in it
    // is open during the call, and afterwards the kernel holds a reference of its own.
    let result = unsafe {
        libc::ioctl(device.as_fd().as_raw_fd(), sys::LOOP_CONFIGURE as libc::Ioctl, std::ptr::from_ref(config))
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Calls a loop ioctl that takes a number or no argument, and returns a number.
fn ioctl_value(device: &File, request: u32, argument: libc::c_ulong) -> Result<u32, Errno> {
    // SAFETY: the fd is open; the requests passed here take their argument by value and touch no memory of ours.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request as libc::Ioctl, argument) };
    u32::try_from(result).map_err(|_| last_errno())
}

#[cfg(test)]
mod tests {
    use super::loop_number;

    #[test]
    fn loop_numbers_are_parsed_from_proc_partitions() {
        for (line, number) in [
            ("   7        12   20971520 loop12", Some(12)),
            ("   7        0       4 loop0", Some(0)),
            (" 259        3   1024 loop0p1", None),
            (" 254        0  268435456 vda", None),
            ("major minor  #blocks  name", None),
            ("", None),
        ] {
            assert_eq!(loop_number(line), number, "{line:?}");
        }
    }
}
