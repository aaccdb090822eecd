//! What a finished stack must not leave behind, and how to clear it away if it did.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use cleat_host::{loopdev, mount};

use crate::up::layout::Layout;

/// Fails with a list if anything of the stack is still there.
pub(super) fn none(layout: &Layout) -> Result<()> {
    let mut found = mounts_below(layout.root())?;
    found.extend(volumes(&layout.pool())?);
    found.extend(devices(layout.root())?.into_iter().map(|(device, _)| device));
    if !found.is_empty() {
        bail!("left behind: {}", found.join(", "));
    }
    Ok(())
}

/// Unmounts and detaches whatever is left below `root`.
pub(super) fn sweep(root: &Path) -> Result<()> {
    let mut mounts = mounts_below(root)?;
    // The innermost first.
    mounts.sort_by_key(|path| std::cmp::Reverse(path.len()));
    for path in mounts {
        mount::unmount(Path::new(&path)).with_context(|| format!("unmounting {path}"))?;
    }
    for (_, file) in devices(root)? {
        loopdev::detach_file(&file).with_context(|| format!("detaching {}", file.display()))?;
    }
    Ok(())
}

fn mounts_below(root: &Path) -> Result<Vec<String>> {
    let table = mount::table().context("reading the mount table")?;
    let below = table.into_iter().filter(|m| m.target.starts_with(root));
    Ok(below.map(|m| m.target.display().to_string()).collect())
}

/// Everything in the pool that belongs to a volume. The nodes' announcements do not.
fn volumes(pool: &Path) -> Result<Vec<String>> {
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

/// Loop devices whose backing file is below `root`: the device and the file.
fn devices(root: &Path) -> Result<Vec<(String, std::path::PathBuf)>> {
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
