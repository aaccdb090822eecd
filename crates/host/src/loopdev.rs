//! Loop devices: a file as a block device. Owns the ioctls and the device nodes; must not create or remove the files.
//!
//! A device is found again by its file's identity (device and inode), never by its number, which the kernel hands to the
//! next caller as soon as it is free.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use linux_raw_sys::loop_device as sys;
use rustix::fs::{FileType, FlockOperation, Mode, flock, makedev, mknodat};
use rustix::io::Errno;

use crate::Access;
use crate::mount::last_errno;

const LOOP_MAJOR: u32 = 7;
const CONTROL: &str = "/dev/loop-control";
const PARTITIONS: &str = "/proc/partitions";
const PAGE: usize = 4096;
/// Of that file.
const LONGEST_LINE: usize = 128;
const SECTOR: u32 = 512;
/// Each lost race means that another caller won a device, so this many losses in a row mean something else.
const MOST_RACES: u32 = 512;
/// How long a detachment may be put off before it is taken for done: it will be, once the device is closed.
const DETACH_PATIENCE: Duration = Duration::from_millis(500);

/// A file attached as a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    pub path: PathBuf,
    pub number: u32,
    pub access: Access,
    /// Device and inode of the file behind it.
    pub backing: (u64, u64),
}

#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    #[error("open the backing file {file:?}")]
    Backing { file: PathBuf, source: io::Error },
    #[error("lock the backing file {file:?}")]
    Lock { file: PathBuf, source: io::Error },
    #[error("get a free loop device from {CONTROL}")]
    Free { source: io::Error },
    #[error("make the device node {node:?}")]
    Node { node: PathBuf, source: io::Error },
    #[error("open {node:?}")]
    Open { node: PathBuf, source: io::Error },
    #[error("attach {file:?} to {node:?}")]
    Configure { file: PathBuf, node: PathBuf, source: io::Error },
    #[error("attach {file:?}: lost {MOST_RACES} races for a free device")]
    Races { file: PathBuf },
    #[error("{file:?} is already attached as {node:?} with other access rights")]
    OtherAccess { file: PathBuf, node: PathBuf },
    #[error("list loop devices")]
    List { source: io::Error },
    #[error("{what} {node:?}")]
    Control { what: &'static str, node: PathBuf, source: io::Error },
}

/// Attaches `file` to a free loop device, with direct I/O where the file system below allows it.
pub fn attach(file: &Path, access: Access) -> Result<LoopDevice, LoopError> {
    attach_open(file, &open_backing(file, access)?, access)
}

/// The device `file` is attached to, attaching it if there is none. Callers racing for one file get the same device.
pub fn attach_or_find(file: &Path, access: Access) -> Result<LoopDevice, LoopError> {
    let backing = open_backing(file, access)?;
    let _locked = lock(file, &backing)?;
    match find(file)?.into_iter().next() {
        Some(device) if device.access == access => Ok(device),
        Some(device) => Err(LoopError::OtherAccess { file: file.into(), node: device.path }),
        None => attach_open(file, &backing, access),
    }
}

/// Detaches every device `file` is attached to; none is success. Excludes [`attach_or_find`] of the same file.
pub fn detach_file(file: &Path) -> Result<(), LoopError> {
    let _locked = match open_backing(file, Access::ReadOnly) {
        Ok(backing) => Some(lock(file, &backing)?),
        // A removed file can still be attached; nobody can attach it anew.
        Err(LoopError::Backing { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    find(file)?.iter().try_for_each(detach)
}

/// All devices attached to `file`. If the file is gone, those that were attached to it under this name.
pub fn find(file: &Path) -> Result<Vec<LoopDevice>, LoopError> {
    let looked = std::fs::symlink_metadata(file).and_then(|meta| match meta.is_symlink() {
        true => Ok((std::fs::metadata(file)?, file.canonicalize()?)),
        false => Ok((meta, file.to_owned())),
    });
    // A symbolic link to an image goes by the image's own name in /sys.
    let (identity, name) = match looked {
        Ok((meta, name)) => (Some((meta.dev(), meta.ino())), name),
        Err(e) if e.kind() == io::ErrorKind::NotFound => (None, crate::mountinfo::resolve_parent(file)),
        Err(source) => return Err(LoopError::Backing { file: file.into(), source }),
    };
    let mut found = Vec::new();
    for (number, attached) in attached()? {
        // Opening a device delays its detachment by others: only those that can match are opened. The directory is not
        // compared, it may look different from here than from where the file was attached.
        let shown = attached.strip_suffix(" (deleted)").map(Path::new);
        let candidate = match (identity, shown) {
            (Some(_), None) => Path::new(&attached).file_name() == name.file_name(),
            (None, Some(shown)) => shown == name,
            _ => false,
        };
        if !candidate {
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

/// Detaches the device, if it is still attached to the file it was attached to when found.
pub fn detach(device: &LoopDevice) -> Result<(), LoopError> {
    let opened = match File::open(&device.path) {
        Ok(opened) => opened,
        Err(e) if is_gone(&e) => return Ok(()),
        Err(source) => return Err(LoopError::Open { node: device.path.clone(), source }),
    };
    match status(&opened) {
        Ok(info) if (info.lo_device, info.lo_inode) == device.backing => {}
        Ok(_) | Err(Errno::NXIO) => return Ok(()),
        Err(e) => return Err(device.error("inspect", e)),
    }
    let shown = backing_file(device.number);
    match ioctl_value(&opened, sys::LOOP_CLR_FD, 0) {
        Ok(_) | Err(Errno::NXIO) => {}
        Err(e) => return Err(device.error("detach", e)),
    }
    drop(opened);
    // While somebody else has the device open, if only to look at it, the kernel puts the detachment off until they close it.
    let until = Instant::now() + DETACH_PATIENCE;
    while shown.is_some() && backing_file(device.number) == shown && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// What /sys says is attached; nothing while nothing is.
fn backing_file(number: u32) -> Option<Vec<u8>> {
    std::fs::read(format!("/sys/block/loop{number}/loop/backing_file")).ok()
}

/// Makes the device as large as its file has become.
pub fn set_capacity(device: &LoopDevice) -> Result<(), LoopError> {
    let opened = File::open(&device.path).map_err(|source| LoopError::Open { node: device.path.clone(), source })?;
    ioctl_value(&opened, sys::LOOP_SET_CAPACITY, 0).map(drop).map_err(|e| device.error("resize", e))
}

/// How many requests the device takes at once: the share of the disk below that it can claim.
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

/// Devices whose backing file lies in `directory`, with that file's path as the kernel shows it; a removed file's ends in
/// ` (deleted)`.
pub fn attached_below(directory: &Path) -> Result<Vec<(LoopDevice, PathBuf)>, LoopError> {
    let mut found = Vec::new();
    for (number, file) in attached()? {
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
        .write(!access.read_only())
        .open(file)
        .map_err(|source| LoopError::Backing { file: file.into(), source })
}

/// Holds an exclusive lock on the image until the returned file is closed.
fn lock(file: &Path, backing: &File) -> Result<File, LoopError> {
    // Through an open file of its own: the loop driver keeps the one it is given, and would keep the lock with it.
    let error = |source| LoopError::Lock { file: file.into(), source };
    let locked = File::open(format!("/proc/self/fd/{}", backing.as_raw_fd())).map_err(error)?;
    flock(&locked, FlockOperation::LockExclusive).map_err(|e| error(e.into()))?;
    Ok(locked)
}

fn attach_open(file: &Path, backing: &File, access: Access) -> Result<LoopDevice, LoopError> {
    let meta = backing.metadata().map_err(|source| LoopError::Backing { file: file.into(), source })?;
    let control =
        OpenOptions::new().read(true).write(true).open(CONTROL).map_err(|source| LoopError::Free { source })?;
    let mut config = configuration(file, backing, access);
    for race in 0..MOST_RACES {
        let number =
            ioctl_value(&control, sys::LOOP_CTL_GET_FREE, 0).map_err(|e| LoopError::Free { source: e.into() })?;
        let node = node(number)?;
        let device = match OpenOptions::new().read(true).write(true).open(&node) {
            Ok(device) => device,
            // Removed again between the two calls.
            Err(e) if is_gone(&e) => continue,
            Err(source) => return Err(LoopError::Open { node, source }),
        };
        match configure(&device, &config) {
            Ok(()) => return Ok(LoopDevice { path: node, number, access, backing: (meta.dev(), meta.ino()) }),
            Err(Errno::BUSY) => std::thread::sleep(Duration::from_micros(50 * u64::from(race.min(20)))),
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
    // Left to itself the kernel takes what direct I/O to the file needs, and that grows from 512 to 4096 once the file shares
    // blocks with another: a file system made before would not mount any more.
    config.block_size = SECTOR;
    config.info.lo_flags = sys::LO_FLAGS_DIRECT_IO as u32;
    if access.read_only() {
        config.info.lo_flags |= sys::LO_FLAGS_READ_ONLY as u32;
    }
    // Only for people who look with losetup; the last byte stays zero.
    let name = file.as_os_str().as_encoded_bytes();
    let room = config.info.lo_file_name.len() - 1;
    for (to, from) in config.info.lo_file_name.iter_mut().take(room).zip(name) {
        *to = *from;
    }
    config
}

/// The device node of loop device `number`, made if no one else makes them here.
fn node(number: u32) -> Result<PathBuf, LoopError> {
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

/// Number and backing file of every attached device, as /sys tells it.
fn attached() -> Result<Vec<(u32, String)>, LoopError> {
    let numbers = match sized() {
        Some(numbers) => numbers,
        None => present().map_err(|source| LoopError::List { source })?,
    };
    let mut all = Vec::new();
    for number in numbers {
        // Absent if it was detached meanwhile.
        if let Some(file) = backing_file(number) {
            all.push((number, String::from_utf8_lossy(&file).trim_end_matches('\n').to_owned()));
        }
    }
    all.sort();
    Ok(all)
}

/// The loop devices that have a size, which are those with a file. There can be a hundred others: whoever attaches makes
/// new ones, and nobody takes them away. Nothing if they do not fit in one page: from page to page the kernel goes by
/// count, and skips one when another has gone.
fn sized() -> Option<Vec<u32>> {
    let mut page = [0; PAGE];
    let mut file = File::open(PARTITIONS).ok()?;
    let length = file.read(&mut page).ok()?;
    let text = std::str::from_utf8(&page[..length]).ok().filter(|_| length < PAGE - LONGEST_LINE)?;
    Some(text.lines().filter_map(loop_number).collect())
}

/// All loop devices there are.
fn present() -> io::Result<Vec<u32>> {
    let names = std::fs::read_dir("/sys/block")?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    Ok(names.iter().filter_map(|name| name.to_str()?.strip_prefix("loop")?.parse().ok()).collect())
}

/// The number of the loop device in a line of `/proc/partitions`: its major and minor number, its size and its name.
fn loop_number(line: &str) -> Option<u32> {
    line.split_whitespace().nth(3)?.strip_prefix("loop")?.parse().ok()
}

fn inspect(number: u32) -> Result<Option<LoopDevice>, LoopError> {
    let node = node(number)?;
    // Read-only and non-exclusive: looking must not disturb.
    let opened = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&node) {
        Ok(opened) => opened,
        Err(e) if is_gone(&e) => return Ok(None),
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

fn is_gone(e: &io::Error) -> bool {
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
    // is open for the length of the call, after which the kernel holds its own reference.
    let result = unsafe {
        libc::ioctl(device.as_fd().as_raw_fd(), sys::LOOP_CONFIGURE as libc::Ioctl, std::ptr::from_ref(config))
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// The loop ioctls that take a number, or nothing, and return a number.
fn ioctl_value(device: &File, request: u32, argument: libc::c_ulong) -> Result<u32, Errno> {
    // SAFETY: the fd is open; the requests passed here take their argument by value and touch no memory of ours.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request as libc::Ioctl, argument) };
    u32::try_from(result).map_err(|_| last_errno())
}

#[cfg(test)]
mod tests {
    use super::loop_number;

    #[test]
    fn a_line_of_partitions_tells_the_loop_device() {
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
