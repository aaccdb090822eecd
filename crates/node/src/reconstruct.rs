//! Reconstructs the volumes that earlier runs left on this node, from the records on disk and the mount table. It also
//! removes incomplete directories. It calls neither drivers nor the API server, so it works before they are available.
//!
//! It lists directories but does not access mount points: a network file system that does not respond must not block
//! the start.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use cleat_host::mount;

use crate::actual::{ActualVolume, MountState};
use crate::layout::{Layout, VolumeDir, VolumeId, VolumeRecord};

#[derive(Debug, thiserror::Error)]
pub enum ReconstructError {
    #[error("list {dir:?}")]
    List { dir: PathBuf, source: io::Error },
    #[error(transparent)]
    Mounts(#[from] mount::MountTableError),
}

/// The volumes that may be staged or published on this node.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReconstructedState {
    pub volumes: BTreeMap<VolumeId, ActualVolume>,
    /// Mount points whose record cannot be read. The volume is unknown, so every volume that was in use must stay in use.
    pub unreadable: Vec<PathBuf>,
}

/// Blocks. Must be called before this run mounts or unmounts anything.
pub fn reconstruct(layout: &Layout) -> Result<ReconstructedState, ReconstructError> {
    let mounted: HashSet<PathBuf> = mount::table()?.into_iter().map(|m| m.target).collect();
    from_disk(layout, &mounted)
}

fn from_disk(layout: &Layout, mounted: &HashSet<PathBuf>) -> Result<ReconstructedState, ReconstructError> {
    let mut reconstructed = ReconstructedState::default();
    for driver in list_dirs(&layout.staging_root())? {
        // Raw block volumes, and staged volumes of kubelets before 1.24: this agent does not handle them.
        if driver == "volumeDevices" || driver == "pv" {
            continue;
        }
        for dir in list_dirs(&layout.staging_root().join(&driver))? {
            let dir = layout.staging_root().join(&driver).join(dir);
            let volume_dir = VolumeDir { target: dir.join("globalmount"), dir };
            if let Some(record) = reconstructed.read_record(&volume_dir, mounted) {
                reconstructed.volumes.entry(record.volume).or_default().staged = MountState::reconstructed();
            }
        }
    }
    for uid in list_dirs(&layout.pods_dir())? {
        for name in list_dirs(&layout.publish_root(&uid))? {
            let volume_dir = layout.publish_dir(&uid, &name);
            let Some(record) = reconstructed.read_record(&volume_dir, mounted) else { continue };
            // The name of the directory, not the one in the record: the unpublish must find this directory.
            reconstructed.volumes.entry(record.volume).or_default().set_published(
                &uid,
                &name,
                MountState::reconstructed(),
            );
        }
        let used = reconstructed.volumes.values().any(|v| v.pods.contains_key(&uid));
        if !used && let Err(error) = layout.remove_pod_dirs(&uid) {
            tracing::debug!(uid, %error, "the directory of a pod without volumes was not removed");
        }
    }
    Ok(reconstructed)
}

impl ReconstructedState {
    fn read_record(&mut self, volume_dir: &VolumeDir, mounted: &HashSet<PathBuf>) -> Option<VolumeRecord> {
        match volume_dir.read_record() {
            Ok(record) => Some(record),
            Err(error) if mounted.contains(&volume_dir.target) => {
                tracing::error!(%error, target = ?volume_dir.target, "the record of a mounted volume cannot be read");
                self.unreadable.push(volume_dir.target.clone());
                None
            }
            Err(error) => {
                // An earlier run died before it had written the record, or after it had removed it. Nothing is mounted.
                match volume_dir.remove() {
                    Ok(()) => {
                        tracing::info!(%error, dir = ?volume_dir.dir, "removed the directory of an interrupted step")
                    }
                    Err(remove) => {
                        tracing::warn!(%error, %remove, dir = ?volume_dir.dir, "the directory of an interrupted step cannot be removed")
                    }
                }
                None
            }
        }
    }
}

/// The names of the directories in `dir`, sorted; empty if `dir` does not exist.
fn list_dirs(dir: &Path) -> Result<Vec<String>, ReconstructError> {
    let error = |source| ReconstructError::List { dir: dir.into(), source };
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(error(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(error)?;
        // The file type is part of the directory entry. A stat would block on a mount that does not respond.
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
    use crate::actual::{Presence, Provenance};
    use crate::layout::PublishedRecord;

    fn record(handle: &str, spec_name: Option<&str>) -> VolumeRecord {
        let published =
            spec_name.map(|n| PublishedRecord { spec_name: n.into(), node: "n".into(), attachment: "csi-x".into() });
        VolumeRecord { volume: VolumeId::new("d", handle), published }
    }

    fn stage(layout: &Layout, handle: &str) -> VolumeDir {
        let volume_dir = layout.staging_dir(&VolumeId::new("d", handle));
        volume_dir.write_record(&record(handle, None)).unwrap();
        std::fs::create_dir(&volume_dir.target).unwrap();
        volume_dir
    }

    #[test]
    fn volumes_with_records_are_reconstructed_as_uncertain() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        assert_eq!(reconstruct(&layout).unwrap(), ReconstructedState::default(), "a new node");
        stage(&layout, "used");
        stage(&layout, "staged-only");
        for uid in ["u1", "u2"] {
            layout.publish_dir(uid, "pv").write_record(&record("used", Some("pv"))).unwrap();
        }
        layout.publish_dir("u3", "pv-plain").write_record(&record("never-staged", Some("pv-plain"))).unwrap();

        let reconstructed = reconstruct(&layout).unwrap();
        assert!(reconstructed.unreadable.is_empty());
        assert_eq!(reconstructed.volumes.len(), 3);
        let used = &reconstructed.volumes[&VolumeId::new("d", "used")];
        assert_eq!((used.staged, used.pods.len()), (MountState::reconstructed(), 2));
        assert_eq!(used.pods["u1"].spec_name, "pv");
        assert_eq!(used.pods["u1"].state.provenance, Provenance::Reconstructed);
        let staged_only = &reconstructed.volumes[&VolumeId::new("d", "staged-only")];
        assert!(staged_only.staged.presence == Presence::Uncertain && staged_only.pods.is_empty());
        assert_eq!(reconstructed.volumes[&VolumeId::new("d", "never-staged")].staged.presence, Presence::Absent);
    }

    #[test]
    fn unreadable_records_are_removed_only_without_a_mount() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let (empty, corrupt, mounted_dir) =
            (layout.publish_dir("u1", "empty"), layout.publish_dir("u2", "corrupt"), layout.publish_dir("u3", "held"));
        for volume_dir in [&empty, &corrupt, &mounted_dir] {
            crate::layout::make_dir(&volume_dir.target).unwrap();
        }
        for volume_dir in [&corrupt, &mounted_dir] {
            std::fs::write(volume_dir.record_path(), "{ not json").unwrap();
        }
        let mounted = HashSet::from([mounted_dir.target.clone()]);
        let reconstructed = from_disk(&layout, &mounted).unwrap();
        assert_eq!(reconstructed.unreadable, std::slice::from_ref(&mounted_dir.target));
        assert!(reconstructed.volumes.is_empty());
        assert!(!layout.pod_dir("u1").exists() && !layout.pod_dir("u2").exists());
        assert!(mounted_dir.record_path().exists());
    }
}
