//! What earlier runs left on this node, from the records on disk and the mount table. Reads and removes leftovers; talks to
//! no driver and no server, so it works before either is there.
//!
//! Directories are listed but mount points are not looked into: a dead server behind one must not stop the start.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use cleat_host::mount;

use crate::actual::{Actual, Effect};
use crate::layout::{Layout, Place, VolumeId};

#[derive(Debug, thiserror::Error)]
pub enum ReconstructError {
    #[error("list {dir:?}")]
    List { dir: PathBuf, source: io::Error },
    #[error(transparent)]
    Mounts(#[from] mount::MountTableError),
}

/// All that may be staged or published here.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub volumes: BTreeMap<VolumeId, Actual>,
    /// Something is mounted here and its record cannot be read: which volume it is nobody knows, so nothing that was in use
    /// before may be given up.
    pub unreadable: Vec<PathBuf>,
}

/// Blocking; call it before anything is mounted or unmounted by this run.
pub fn reconstruct(layout: &Layout) -> Result<Found, ReconstructError> {
    let mounted: HashSet<PathBuf> = mount::table()?.into_iter().map(|m| m.target).collect();
    from_disk(layout, &mounted)
}

fn from_disk(layout: &Layout, mounted: &HashSet<PathBuf>) -> Result<Found, ReconstructError> {
    let mut found = Found::default();
    for driver in list(&layout.all_staged())? {
        // Raw block volumes, and the layout of kubelets before 1.24: not ours to touch.
        if driver == "volumeDevices" || driver == "pv" {
            continue;
        }
        for dir in list(&layout.all_staged().join(&driver))? {
            let dir = layout.all_staged().join(&driver).join(dir);
            let place = Place { target: dir.join("globalmount"), dir };
            if let Some(data) = found.read(&place, mounted) {
                found.volumes.entry(data.volume).or_default().staged = Effect::found();
            }
        }
    }
    for uid in list(&layout.pods())? {
        for name in list(&layout.all_published(&uid))? {
            let place = layout.published(&uid, &name);
            let Some(data) = found.read(&place, mounted) else { continue };
            // The directory's name is what leads back here; the record's is the same unless someone moved things.
            found.volumes.entry(data.volume).or_default().set_published(&uid, &name, Effect::found());
        }
        let used = found.volumes.values().any(|v| v.pods.contains_key(&uid));
        if !used && let Err(error) = layout.remove_pod(&uid) {
            tracing::debug!(uid, %error, "the directory of a pod without volumes stays");
        }
    }
    Ok(found)
}

impl Found {
    fn read(&mut self, place: &Place, mounted: &HashSet<PathBuf>) -> Option<crate::layout::VolumeData> {
        match place.read() {
            Ok(data) => Some(data),
            Err(error) if mounted.contains(&place.target) => {
                tracing::error!(%error, target = ?place.target, "a volume is mounted here and its record cannot be read");
                self.unreadable.push(place.target.clone());
                None
            }
            Err(error) => {
                // A run died between writing or removing the record and the directory; nothing is mounted.
                match place.remove() {
                    Ok(()) => tracing::info!(%error, dir = ?place.dir, "removed what an interrupted run left"),
                    Err(remove) => tracing::warn!(%error, %remove, dir = ?place.dir, "leftover cannot be removed"),
                }
                None
            }
        }
    }
}

/// The directories in `dir`; none if it does not exist.
fn list(dir: &Path) -> Result<Vec<String>, ReconstructError> {
    let error = |source| ReconstructError::List { dir: dir.into(), source };
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(error(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(error)?;
        // The type comes with the listing: no stat of what may be a dead mount.
        let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
        if let (true, Ok(name)) = (is_dir, entry.file_name().into_string()) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actual::{Origin, Presence};
    use crate::layout::{PublishedData, VolumeData};

    fn data(handle: &str, spec_name: Option<&str>) -> VolumeData {
        let published =
            spec_name.map(|n| PublishedData { spec_name: n.into(), node: "n".into(), attachment: "csi-x".into() });
        VolumeData { volume: VolumeId::new("d", handle), published }
    }

    fn stage(layout: &Layout, handle: &str) -> Place {
        let place = layout.staged(&VolumeId::new("d", handle));
        place.write(&data(handle, None)).unwrap();
        std::fs::create_dir(&place.target).unwrap();
        place
    }

    #[test]
    fn records_come_back_as_uncertain_effects() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert_eq!(reconstruct(&layout).unwrap(), Found::default(), "a new node");
        stage(&layout, "used");
        stage(&layout, "staged-only");
        for uid in ["u1", "u2"] {
            layout.published(uid, "pv").write(&data("used", Some("pv"))).unwrap();
        }
        layout.published("u3", "pv-plain").write(&data("never-staged", Some("pv-plain"))).unwrap();

        let found = reconstruct(&layout).unwrap();
        assert!(found.unreadable.is_empty());
        assert_eq!(found.volumes.len(), 3);
        let used = &found.volumes[&VolumeId::new("d", "used")];
        assert_eq!((used.staged, used.pods.len()), (Effect::found(), 2));
        assert_eq!(used.pods["u1"].spec_name, "pv");
        assert_eq!(used.pods["u1"].effect.origin, Origin::Found);
        let staged_only = &found.volumes[&VolumeId::new("d", "staged-only")];
        assert!(staged_only.staged.presence == Presence::Uncertain && staged_only.pods.is_empty());
        assert_eq!(found.volumes[&VolumeId::new("d", "never-staged")].staged.presence, Presence::Absent);
    }

    #[test]
    fn leftovers_without_a_mount_are_removed_and_with_one_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let (empty, corrupt, held) =
            (layout.published("u1", "empty"), layout.published("u2", "corrupt"), layout.published("u3", "held"));
        for place in [&empty, &corrupt, &held] {
            crate::layout::make_dir(&place.target).unwrap();
        }
        for place in [&corrupt, &held] {
            std::fs::write(place.data(), "{ not json").unwrap();
        }
        let mounted = HashSet::from([held.target.clone()]);
        let found = from_disk(&layout, &mounted).unwrap();
        assert_eq!(found.unreadable, std::slice::from_ref(&held.target));
        assert!(found.volumes.is_empty());
        assert!(!layout.pod("u1").exists() && !layout.pod("u2").exists());
        assert!(held.data().exists());
    }
}
