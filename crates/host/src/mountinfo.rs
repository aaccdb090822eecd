//! The mount table of this process, read from `/proc/self/mountinfo`. Changes nothing.
//!
//! The table is parsed as bytes: a mount point may contain any byte, and one path that is not UTF-8 must not make the
//! rest of the table unreadable.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

const MOUNTINFO: &str = "/proc/self/mountinfo";

/// One line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub id: u32,
    pub parent: u32,
    /// Major and minor number of the file system's device.
    pub device: (u32, u32),
    /// The directory of the file system that appears at `target`; `/` unless it is a bind mount.
    pub root: PathBuf,
    pub target: PathBuf,
    /// Options of this mount: `ro`, `noatime` …
    pub options: Vec<String>,
    /// Whether new mounts below `target` propagate to other mount namespaces and to bind mounts of it.
    pub shared: bool,
    pub fstype: String,
    /// The device, server path or name that was given when it was mounted.
    pub source: PathBuf,
    /// Options of the superblock.
    pub super_options: Vec<String>,
}

impl Mount {
    /// Whether writes through this mount fail because the mount or its superblock is read-only.
    pub fn is_read_only(&self) -> bool {
        self.options.iter().chain(&self.super_options).any(|o| o == "ro")
    }
}

#[derive(Debug, thiserror::Error)]
pub enum MountTableError {
    #[error("read {MOUNTINFO}")]
    Read(#[source] io::Error),
    #[error("mountinfo line not understood: {line:?}")]
    Line { line: String },
}

/// All mounts of this process's namespace, in mount order.
pub fn table() -> Result<Vec<Mount>, MountTableError> {
    parse(&std::fs::read(MOUNTINFO).map_err(MountTableError::Read)?)
}

/// The topmost mount at exactly `path`, if there is one. Symbolic links in the parent directories are resolved.
pub fn find(path: &Path) -> Result<Option<Mount>, MountTableError> {
    let path = resolve_parent(path);
    Ok(table()?.into_iter().rev().find(|m| m.target == path))
}

/// The other targets at which the directory mounted at `path` is mounted: those with the same device and root. Empty if
/// nothing is mounted at `path`.
pub fn references(path: &Path) -> Result<Vec<PathBuf>, MountTableError> {
    let path = resolve_parent(path);
    let table = table()?;
    let Some(mount) = table.iter().rev().find(|m| m.target == path) else { return Ok(Vec::new()) };
    let same = |m: &&Mount| m.device == mount.device && m.root == mount.root && m.target != path;
    Ok(table.iter().filter(same).map(|m| m.target.clone()).collect())
}

/// The mount that `path` is on: the one whose target is the longest prefix of `path`.
pub fn containing(path: &Path) -> Result<Option<Mount>, MountTableError> {
    let path = resolve_parent(path);
    // Of several mounts at one target, the last in the table is on top; max_by_key returns the last maximum.
    Ok(table()?.into_iter().filter(|m| path.starts_with(&m.target)).max_by_key(|m| m.target.components().count()))
}

/// The path as it appears in mountinfo, with symbolic links resolved in all components but the last. The last one is
/// not accessed: that may hang if a server mounted there does not respond.
pub(crate) fn resolve_parent(path: &Path) -> PathBuf {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => match parent.canonicalize() {
            Ok(parent) => parent.join(name),
            Err(_) => path.to_owned(),
        },
        _ => path.to_owned(),
    }
}

fn parse(table: &[u8]) -> Result<Vec<Mount>, MountTableError> {
    table
        .split(|b| *b == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            parse_line(line).ok_or_else(|| MountTableError::Line { line: String::from_utf8_lossy(line).into() })
        })
        .collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|b| *b == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let mut device = fields.next()?.split(|b| *b == b':');
    let device = (number(device.next()?)?, number(device.next()?)?);
    let root = path(fields.next()?);
    let target = path(fields.next()?);
    let options = list(fields.next()?);
    let mut shared = false;
    for field in fields.by_ref() {
        if field == b"-" {
            break;
        }
        shared |= field.starts_with(b"shared:");
    }
    let fstype = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = path(fields.next()?);
    let super_options = list(fields.next().unwrap_or_default());
    Some(Mount { id, parent, device, root, target, options, shared, fstype, source, super_options })
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn path(field: &[u8]) -> PathBuf {
    let bytes = unescape(field);
    // The kernel appends this suffix when the directory was removed. The path before the suffix still unmounts it.
    let bytes = bytes.strip_suffix(b"//deleted").map(<[u8]>::to_vec).unwrap_or(bytes);
    PathBuf::from(OsString::from_vec(bytes))
}

fn list(field: &[u8]) -> Vec<String> {
    let options = String::from_utf8_lossy(&unescape(field)).into_owned();
    // Commas inside double quotes do not separate options: SELinux contexts contain them.
    let mut quoted = false;
    let separated = options.split(|c: char| {
        quoted ^= c == '"';
        c == ',' && !quoted
    });
    separated.map(str::to_owned).collect()
}

/// Decodes the kernel's octal escapes: `\040` is a space.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..] => {
                out.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
                rest = tail;
            }
            _ => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_escapes_optional_fields_and_odd_bytes_are_parsed() {
        let text = b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue\n\
            40 36 0:33 / /x\\134y ro - tmpfs  rw,context=\"a:b:c1,c2\",size=4k\n\
            41 36 7:3 /a /gone//deleted rw unbindable - xfs /dev/loop3 ro\n\
            42 36 7:3 / /bad\xff\xfe rw - xfs /dev/loop3 rw\n";
        let mounts = parse(text).unwrap();
        assert_eq!(mounts[0].target, Path::new("/mnt 2"));
        assert_eq!((mounts[0].device, mounts[0].shared), ((98, 0), true));
        assert_eq!(mounts[0].root, Path::new("/mnt1"));
        assert_eq!(mounts[1].target, Path::new("/x\\y"));
        assert_eq!(mounts[1].super_options, ["rw", "context=\"a:b:c1,c2\"", "size=4k"]);
        assert!(mounts[1].is_read_only() && mounts[2].is_read_only() && !mounts[0].is_read_only());
        assert_eq!(mounts[2].target, Path::new("/gone"));
        assert_eq!(mounts[3].target.as_os_str().len(), 6);
    }

    #[test]
    fn the_mount_table_of_this_machine_is_readable() {
        assert!(find(Path::new("/proc")).unwrap().is_some());
        assert_eq!(containing(Path::new("/proc/self")).unwrap().unwrap().target, Path::new("/proc"));
    }
}
