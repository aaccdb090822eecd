//! What a stopped stack must not leave behind, and how to remove it.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use cleat_host::{loopdev, mount};

use crate::up::layout::Layout;

/// Fails with a list if a mount, a volume's file or a loop device of the stack is left.
pub(super) fn check_nothing_left(layout: &Layout) -> Result<()> {
    let mut found = mounts_below(layout.root())?;
    found.extend(volume_files(&layout.pool())?);
    found.extend(loop_devices(layout.root())?.into_iter().map(|(device, _)| device));
    if !found.is_empty() {
        bail!("left behind: {}", found.join(", "));
    }
    Ok(())
}

/// Unmounts all file systems and detaches all loop devices below `root`.
pub(super) fn release_mounts_and_devices(root: &Path) -> Result<()> {
    let mut mounts = mounts_below(root)?;
    // A mount below another has the longer path and must be unmounted first.
    mounts.sort_by_key(|path| std::cmp::Reverse(path.len()));
    for path in mounts {
        mount::unmount(Path::new(&path)).with_context(|| format!("unmounting {path}"))?;
    }
    for (_, file) in loop_devices(root)? {
        loopdev::detach_file(&file).with_context(|| format!("detaching {}", file.display()))?;
    }
    Ok(())
}

fn mounts_below(root: &Path) -> Result<Vec<String>> {
    let table = mount::table().context("reading the mount table")?;
    let below = table.into_iter().filter(|m| m.target.starts_with(root));
    Ok(below.map(|m| m.target.display().to_string()).collect())
}

/// The files in the pool that belong to volumes: all that are not empty, except the nodes' announcements.
fn volume_files(pool: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut directories = vec![pool.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).with_context(|| format!("reading {}", directory.display()))? {
            let entry = entry?;
            if entry.file_name() == "nodes" && directory == pool {
                continue;
            }
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            } else if entry.metadata()?.len() > 0 {
                found.push(entry.path().display().to_string());
            }
        }
    }
    Ok(found)
}

/// Loop devices whose backing file is below `root`: the device's name and the file.
fn loop_devices(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/sys/block").context("reading /sys/block")? {
        let entry = entry?;
        let Ok(backing) = std::fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let file = Path::new(backing.trim_end()).to_owned();
        if file.starts_with(root) {
            found.push((entry.file_name().to_string_lossy().into_owned(), file));
        }
    }
    Ok(found)
}
