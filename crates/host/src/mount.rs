//! Mounting and unmounting by system call: the mount API of Linux 5.2 (fsopen, fsmount, open_tree, move_mount), and mount(2)
//! where the kernel or a sandbox lacks it. A mount appears complete, options and all, or not at all.
//!
//! Must not decide whether something should be mounted; mounting twice stacks, so callers look first.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_bind, mount_change,
    move_mount, open_tree,
};

use crate::Access;
pub use crate::mountinfo::{Mount, TableError, containing, find, references, table};
pub use crate::options::{OptionError, Options};

/// More layers than this at one path are not ours to guess about.
const MOST_LAYERS: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("mount {fstype} {device:?} at {at:?}: {step} failed{}", kernel_said(.said))]
    Mount { fstype: String, device: PathBuf, at: PathBuf, step: &'static str, said: String, source: io::Error },
    #[error("bind {from:?} at {at:?}: {step} failed")]
    Bind { from: PathBuf, at: PathBuf, step: &'static str, source: io::Error },
    #[error("unmount {at:?}")]
    Unmount { at: PathBuf, source: io::Error },
    #[error("unmount {at:?}: still mounted after {layers} layers were taken away")]
    StillMounted { at: PathBuf, layers: usize },
    #[error("look whether {at:?} is a mount point")]
    Look { at: PathBuf, source: io::Error },
    #[error("make {at:?} a shared mount")]
    Share { at: PathBuf, source: io::Error },
    #[error(transparent)]
    Table(#[from] TableError),
}

fn kernel_said(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(" ({said})") }
}

/// Mounts the file system of type `fstype` on `device` at the directory `at`.
pub fn mount_fs(device: &Path, at: &Path, fstype: &str, options: &Options) -> Result<(), MountError> {
    let error = |step, said: String, errno: Errno| MountError::Mount {
        fstype: fstype.into(),
        device: device.into(),
        at: at.into(),
        step,
        said,
        source: errno.into(),
    };
    let context = match fsopen(fstype, FsOpenFlags::FSOPEN_CLOEXEC) {
        Ok(context) => context,
        Err(Errno::NOSYS | Errno::PERM) => {
            return legacy_mount(device, at, fstype, options).map_err(|e| error("mount", String::new(), e));
        }
        Err(e) => return Err(error("fsopen", String::new(), e)),
    };
    // The kernel explains itself in the context; that text is worth more than the number.
    let explain = |step| move |e: Errno| (step, e);
    let configured = fsconfig_set_string(context.as_fd(), "source", device)
        .map_err(explain("set source"))
        .and_then(|()| configure(context.as_fd(), options).map_err(explain("set options")))
        .and_then(|()| fsconfig_create(context.as_fd()).map_err(explain("read the file system")))
        .and_then(|()| {
            fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, options.attributes).map_err(explain("fsmount"))
        })
        .and_then(|mounted| attach(&mounted, at).map_err(explain("move_mount")));
    configured.map_err(|(step, e)| error(step, messages(&context), e))
}

fn configure(context: BorrowedFd<'_>, options: &Options) -> Result<(), Errno> {
    for flag in &options.super_flags {
        fsconfig_set_flag(context, *flag)?;
    }
    for (key, value) in &options.data {
        match value {
            Some(value) => fsconfig_set_string(context, key.as_str(), value.as_str())?,
            None => fsconfig_set_flag(context, key.as_str())?,
        }
    }
    Ok(())
}

fn messages(context: &OwnedFd) -> String {
    let mut lines = Vec::new();
    let mut buffer = [0u8; 512];
    while let Ok(n @ 1..) = rustix::io::read(context, &mut buffer) {
        let line = String::from_utf8_lossy(&buffer[..n]);
        // "e ext4: bad option" → without its severity letter.
        let line = line.trim();
        lines.push(line.get(2..).unwrap_or(line).to_owned());
    }
    lines.join("; ")
}

fn attach(mounted: &OwnedFd, at: &Path) -> Result<(), Errno> {
    // Without T_SYMLINKS: a target replaced by a symbolic link must not redirect the mount.
    move_mount(mounted.as_fd(), "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

fn legacy_mount(device: &Path, at: &Path, fstype: &str, options: &Options) -> Result<(), Errno> {
    let data = CString::new(options.data_string()).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(device, at, fstype, options.mount_flags(), Some(data.as_c_str()))
}

/// Makes the file or directory `from` appear at `at`, which must exist and be of the same sort.
pub fn bind(from: &Path, at: &Path, access: Access) -> Result<(), MountError> {
    let error = |step, errno: Errno| MountError::Bind { from: from.into(), at: at.into(), step, source: errno.into() };
    let tree = match open_tree(CWD, from, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC) {
        Ok(tree) => tree,
        Err(Errno::NOSYS | Errno::PERM) => return legacy_bind(from, at, access).map_err(|(step, e)| error(step, e)),
        Err(e) => return Err(error("open_tree", e)),
    };
    if access.read_only() {
        match set_read_only(tree.as_fd()) {
            Ok(()) => {}
            Err(Errno::NOSYS) => return legacy_bind(from, at, access).map_err(|(step, e)| error(step, e)),
            Err(e) => return Err(error("mount_setattr", e)),
        }
    }
    attach(&tree, at).map_err(|e| error("move_mount", e))
}

fn set_read_only(tree: BorrowedFd<'_>) -> Result<(), Errno> {
    let attr = libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the fd is open for the length of the call, the path is a NUL-terminated literal, and `attr` is a fully
    // initialised mount_attr whose size is passed; the kernel only reads it.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

pub(crate) fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn legacy_bind(from: &Path, at: &Path, access: Access) -> Result<(), (&'static str, Errno)> {
    mount_bind(from, at).map_err(|e| ("bind", e))?;
    if access == Access::ReadWrite {
        return Ok(());
    }
    let remounted = rustix::fs::statvfs(at).and_then(|stat| {
        // A remount replaces all flags: those the source has are kept.
        let mut flags = MountFlags::BIND | MountFlags::RDONLY;
        for (has, keep) in [
            (rustix::fs::StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
            (rustix::fs::StatVfsMountFlags::NODEV, MountFlags::NODEV),
            (rustix::fs::StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
            (rustix::fs::StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
            (rustix::fs::StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
            (rustix::fs::StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
        ] {
            flags.set(keep, stat.f_flag.contains(has));
        }
        rustix::mount::mount_remount(at, flags, "")
    });
    remounted.map_err(|e| {
        // A writable mount where a read-only one was asked for is worse than none.
        let _ = rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        ("remount read-only", e)
    })
}

/// Takes away every mount at `at`; nothing mounted there, or nothing there at all, is success. Returns the layers removed.
pub fn unmount(at: &Path) -> Result<usize, MountError> {
    for layers in 0..MOST_LAYERS {
        match rustix::mount::unmount(at, UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(layers),
            // Not a mount point; or one that may not be unmounted, which mountinfo tells apart.
            Err(Errno::INVAL) => {
                return if find(at)?.is_none() {
                    Ok(layers)
                } else {
                    Err(MountError::Unmount { at: at.into(), source: Errno::INVAL.into() })
                };
            }
            Err(e) => return Err(MountError::Unmount { at: at.into(), source: e.into() }),
        }
    }
    Err(MountError::StillMounted { at: at.into(), layers: MOST_LAYERS })
}

/// Whether something is mounted at exactly `at`. A path that does not exist is not a mount point.
pub fn is_mount_point(at: &Path) -> Result<bool, MountError> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    match statx(CWD, at, flags, StatxFlags::TYPE) {
        Ok(stat) if stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) => {
            Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
        }
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        // A kernel without the attribute; or a mount that answers nothing any more: the table knows.
        Ok(_) | Err(Errno::NOSYS) => Ok(find(at)?.is_some()),
        Err(Errno::NOTCONN | Errno::STALE | Errno::IO | Errno::ACCESS | Errno::HOSTDOWN | Errno::NODEV) => {
            Ok(find(at)?.is_some())
        }
        Err(e) => Err(MountError::Look { at: at.into(), source: e.into() }),
    }
}

/// Makes mounts below the directory `at` visible in other mount namespaces: binds it to itself if it is not on a shared
/// mount yet, and marks that shared. Drivers in containers rely on it.
pub fn share(at: &Path) -> Result<(), MountError> {
    if containing(at)?.is_some_and(|m| m.shared) {
        return Ok(());
    }
    let error = |e: Errno| MountError::Share { at: at.into(), source: e.into() };
    if find(at)?.is_none() {
        rustix::mount::mount_bind_recursive(at, at).map_err(error)?;
    }
    mount_change(at, MountPropagationFlags::SHARED | MountPropagationFlags::REC).map_err(error)
}

/// Keeps the attribute type out of callers' sight.
pub(crate) type Attributes = MountAttrFlags;
