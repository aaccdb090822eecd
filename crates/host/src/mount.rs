//! Mounts and unmounts by system call: with the mount API of Linux 5.2 (fsopen, fsmount, open_tree, move_mount), or
//! with mount(2) where the kernel or a sandbox does not offer it. A mount becomes visible with all its options, or not
//! at all.
//!
//! Must not decide whether something should be mounted. A second mount at the same path is stacked on the first, so
//! callers check first.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_bind, mount_change, move_mount,
    open_tree,
};

use crate::access::Access;
use crate::errno::last_errno;
pub use crate::mount_options::{MountOptionError, MountOptions};
pub use crate::mountinfo::{Mount, MountTableError, containing, find, references, table};

/// How many mounts stacked at one path `unmount` removes before it reports an error.
const MAX_STACKED_MOUNTS: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("mount {fstype} {device:?} at {at:?}: {step} failed{}", in_parentheses(.kernel_message))]
    Mount {
        fstype: String,
        device: PathBuf,
        at: PathBuf,
        step: &'static str,
        kernel_message: String,
        source: io::Error,
    },
    #[error("bind {from:?} at {at:?}: {step} failed")]
    Bind { from: PathBuf, at: PathBuf, step: &'static str, source: io::Error },
    #[error("unmount {at:?}")]
    Unmount { at: PathBuf, source: io::Error },
    #[error("unmount {at:?}: still mounted after {layers} stacked mounts were removed")]
    StillMounted { at: PathBuf, layers: usize },
    #[error("check whether {at:?} is a mount point")]
    Inspect { at: PathBuf, source: io::Error },
    #[error("make {at:?} a shared mount")]
    Share { at: PathBuf, source: io::Error },
    #[error(transparent)]
    Table(#[from] MountTableError),
}

fn in_parentheses(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}

/// Mounts the file system of type `fstype` on `device` at the directory `at`.
pub fn mount_fs(device: &Path, at: &Path, fstype: &str, options: &MountOptions) -> Result<(), MountError> {
    let error = |step, kernel_message: String, errno: Errno| MountError::Mount {
        fstype: fstype.into(),
        device: device.into(),
        at: at.into(),
        step,
        kernel_message,
        source: errno.into(),
    };
    let context = match fsopen(fstype, FsOpenFlags::FSOPEN_CLOEXEC) {
        Ok(context) => context,
        Err(Errno::NOSYS | Errno::PERM) => {
            return legacy_mount(device, at, fstype, options).map_err(|e| error("mount", String::new(), e));
        }
        Err(e) => return Err(error("fsopen", String::new(), e)),
    };
    // On failure the messages that the kernel left in the context are added to the error: they say more than the errno.
    let at_step = |step| move |e: Errno| (step, e);
    let mounted = fsconfig_set_string(context.as_fd(), "source", device)
        .map_err(at_step("set source"))
        .and_then(|()| configure(context.as_fd(), options).map_err(at_step("set options")))
        .and_then(|()| fsconfig_create(context.as_fd()).map_err(at_step("read the file system")))
        .and_then(|()| {
            fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, options.attributes).map_err(at_step("fsmount"))
        })
        .and_then(|mount| attach(&mount, at).map_err(at_step("move_mount")));
    mounted.map_err(|(step, e)| error(step, read_messages(&context), e))
}

fn configure(context: BorrowedFd<'_>, options: &MountOptions) -> Result<(), Errno> {
    for flag in &options.super_flags {
        fsconfig_set_flag(context, *flag)?;
    }
    for (key, value) in &options.fs_options {
        match value {
            Some(value) => fsconfig_set_string(context, key.as_str(), value.as_str())?,
            None => fsconfig_set_flag(context, key.as_str())?,
        }
    }
    Ok(())
}

fn read_messages(context: &OwnedFd) -> String {
    let mut lines = Vec::new();
    let mut buffer = [0u8; 512];
    while let Ok(n @ 1..) = rustix::io::read(context, &mut buffer) {
        let line = String::from_utf8_lossy(&buffer[..n]);
        // A line starts with a letter for its severity and a space: "e ext4: bad option".
        let line = line.trim();
        lines.push(line.get(2..).unwrap_or(line).to_owned());
    }
    lines.join("; ")
}

fn attach(mount: &OwnedFd, at: &Path) -> Result<(), Errno> {
    // Without MOVE_MOUNT_T_SYMLINKS: a symbolic link in place of the target must not redirect the mount.
    move_mount(mount.as_fd(), "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

fn legacy_mount(device: &Path, at: &Path, fstype: &str, options: &MountOptions) -> Result<(), Errno> {
    let data = CString::new(options.fs_options_string()).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(device, at, fstype, options.mount_flags(), Some(data.as_c_str()))
}

/// Bind-mounts the file or directory `from` at `at`, which must exist and be of the same type.
pub fn bind(from: &Path, at: &Path, access: Access) -> Result<(), MountError> {
    let error = |step, errno: Errno| MountError::Bind { from: from.into(), at: at.into(), step, source: errno.into() };
    let tree = match open_tree(CWD, from, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC) {
        Ok(tree) => tree,
        Err(Errno::NOSYS | Errno::PERM) => return legacy_bind(from, at, access).map_err(|(step, e)| error(step, e)),
        Err(e) => return Err(error("open_tree", e)),
    };
    if access.is_read_only() {
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

fn legacy_bind(from: &Path, at: &Path, access: Access) -> Result<(), (&'static str, Errno)> {
    mount_bind(from, at).map_err(|e| ("bind", e))?;
    if access == Access::ReadWrite {
        return Ok(());
    }
    let remounted = rustix::fs::statvfs(at).and_then(|stat| {
        // A remount replaces all flags, so the flags that the source has are passed again.
        let mut flags = MountFlags::BIND | MountFlags::RDONLY;
        for (current, flag) in [
            (rustix::fs::StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
            (rustix::fs::StatVfsMountFlags::NODEV, MountFlags::NODEV),
            (rustix::fs::StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
            (rustix::fs::StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
            (rustix::fs::StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
            (rustix::fs::StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
        ] {
            flags.set(flag, stat.f_flag.contains(current));
        }
        rustix::mount::mount_remount(at, flags, "")
    });
    remounted.map_err(|e| {
        // The mount must not stay writable where the caller asked for a read-only one.
        let _ = rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        ("remount read-only", e)
    })
}

/// Unmounts everything that is mounted at `at`, and returns how many stacked mounts it removed. Returns 0 if nothing is
/// mounted there or the path does not exist.
pub fn unmount(at: &Path) -> Result<usize, MountError> {
    for layers in 0..MAX_STACKED_MOUNTS {
        match rustix::mount::unmount(at, UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(layers),
            // EINVAL means that this is no mount point, or one that may not be unmounted; mountinfo says which.
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
    Err(MountError::StillMounted { at: at.into(), layers: MAX_STACKED_MOUNTS })
}

/// Whether something is mounted at exactly `at`. A path that does not exist is not a mount point.
pub fn is_mount_point(at: &Path) -> Result<bool, MountError> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    match statx(CWD, at, flags, StatxFlags::TYPE) {
        Ok(stat) if stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) => {
            Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
        }
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        // The kernel does not know the attribute, or the mounted file system does not respond: read the mount table.
        Ok(_) | Err(Errno::NOSYS) => Ok(find(at)?.is_some()),
        Err(Errno::NOTCONN | Errno::STALE | Errno::IO | Errno::ACCESS | Errno::HOSTDOWN | Errno::NODEV) => {
            Ok(find(at)?.is_some())
        }
        Err(e) => Err(MountError::Inspect { at: at.into(), source: e.into() }),
    }
}

/// Makes mounts below the directory `at` visible in other mount namespaces: if `at` is not on a shared mount, it is
/// bind-mounted on itself and that mount is marked shared. Drivers in containers depend on this.
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
