//! The directory that holds the store's files.

use std::fs;
use std::io;
use std::path::Path;

pub(super) fn parent_dir(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes the directory entry of `path` durable, after the file was created or linked.
pub(super) fn sync_parent_dir(path: &Path) -> io::Result<()> {
    fs::File::open(parent_dir(path))?.sync_all()
}
