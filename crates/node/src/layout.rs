//! The paths below the kubelet's root directory, and the records (`vol_data.json`) of staged and published volumes.
//! Drivers, and a kubelet that takes over the node, rely on these paths and on the record format. All file access
//! blocks; no decisions.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleat_api::names;

/// The name of the CSI plugin, as a directory below `plugins`.
const CSI_PLUGIN: &str = "kubernetes.io/csi";
/// The same below a pod's `volumes`, with `/` escaped.
const CSI_PLUGIN_ESCAPED: &str = "kubernetes.io~csi";
const RECORD_FILE: &str = "vol_data.json";

/// The deadline of one file operation below the root. A local file system that needs longer is broken.
pub(crate) const FILE_TIMEOUT: Duration = Duration::from_secs(30);

/// The identity of a CSI volume on a node: two PersistentVolumes with the same driver and handle are the same volume.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId {
    pub driver: String,
    pub handle: String,
}

impl VolumeId {
    pub fn new(driver: impl Into<String>, handle: impl Into<String>) -> VolumeId {
        VolumeId { driver: driver.into(), handle: handle.into() }
    }

    /// The name in `node.status.volumesInUse` and `volumesAttached`.
    pub fn unique_name(&self) -> String {
        names::unique_volume_name(&self.driver, &self.handle)
    }

    pub fn attachment_name(&self, node: &str) -> String {
        names::attachment(&self.handle, &self.driver, node)
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}^{}", self.driver, self.handle)
    }
}

pub type PodUid = String;

/// The directory of one staged or published volume. It contains the record and the mount point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeDir {
    pub dir: PathBuf,
    /// The mount point: the staging or target path of the driver's calls.
    pub target: PathBuf,
}

#[derive(Clone, Debug)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    pub fn new(root: impl Into<PathBuf>) -> Layout {
        Layout { root: root.into() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn plugins_registry_dir(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    pub fn plugins_dir(&self) -> PathBuf {
        self.root.join("plugins")
    }

    pub fn pods_dir(&self) -> PathBuf {
        self.root.join("pods")
    }

    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.pods_dir().join(uid)
    }

    /// The directory of the staged volumes of all drivers.
    pub fn staging_root(&self) -> PathBuf {
        self.plugins_dir().join(CSI_PLUGIN)
    }

    pub fn staging_dir(&self, volume: &VolumeId) -> VolumeDir {
        let dir = self.staging_root().join(&volume.driver).join(names::sha256_hex(&volume.handle));
        VolumeDir { target: dir.join("globalmount"), dir }
    }

    /// The directory of the CSI volumes of one pod.
    pub fn publish_root(&self, uid: &str) -> PathBuf {
        self.pod_dir(uid).join("volumes").join(CSI_PLUGIN_ESCAPED)
    }

    /// `name` is the name of the PersistentVolume.
    pub fn publish_dir(&self, uid: &str, name: &str) -> VolumeDir {
        let dir = self.publish_root(uid).join(escape(name));
        VolumeDir { target: dir.join("mount"), dir }
    }

    /// Removes the directories of a pod. A directory that is not empty is an error and stays unchanged.
    pub fn remove_pod_dirs(&self, uid: &str) -> io::Result<()> {
        for dir in [self.publish_root(uid), self.pod_dir(uid).join("volumes"), self.pod_dir(uid)] {
            remove_empty(&dir)?;
        }
        Ok(())
    }
}

fn escape(name: &str) -> String {
    name.replace('/', "~")
}

/// Whether a name from an API object is safe to use as one component of a path.
pub fn is_path_component(name: &str) -> bool {
    !name.is_empty() && name.len() <= 253 && !name.starts_with('.') && !name.contains(['/', '\0', '\n'])
}

/// The content of a `vol_data.json`: a JSON object of strings. Unknown keys are ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    pub volume: VolumeId,
    /// `None` in the record of a staged volume.
    pub published: Option<PublishedRecord>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedRecord {
    /// The name of the PersistentVolume.
    pub spec_name: String,
    pub node: String,
    pub attachment: String,
}

#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("read {path:?}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path:?} is not a record of a volume: {why}")]
    Content { path: PathBuf, why: String },
}

impl VolumeRecord {
    fn to_json(&self) -> String {
        let mut map = BTreeMap::from([
            ("driverName", self.volume.driver.as_str()),
            ("volumeHandle", self.volume.handle.as_str()),
        ]);
        if let Some(published) = &self.published {
            map.insert("attachmentID", &published.attachment);
            map.insert("nodeName", &published.node);
            map.insert("specVolID", &published.spec_name);
            map.insert("volumeLifecycleMode", "Persistent");
        }
        format!("{}\n", serde_json::json!(map))
    }

    fn from_json(json: &str) -> Result<VolumeRecord, String> {
        let map: BTreeMap<String, String> = serde_json::from_str(json).map_err(|e| e.to_string())?;
        let get = |key: &str| map.get(key).filter(|v| !v.is_empty()).cloned();
        let need = |key: &str| get(key).ok_or_else(|| format!("no {key}"));
        let volume = VolumeId::new(need("driverName")?, need("volumeHandle")?);
        if !is_path_component(&volume.driver) {
            return Err(format!("driver name {:?}", volume.driver));
        }
        let published = get("specVolID").map(|spec_name| PublishedRecord {
            spec_name,
            node: get("nodeName").unwrap_or_default(),
            attachment: get("attachmentID").unwrap_or_default(),
        });
        Ok(VolumeRecord { volume, published })
    }
}

impl VolumeDir {
    pub fn record_path(&self) -> PathBuf {
        self.dir.join(RECORD_FILE)
    }

    pub fn read_record(&self) -> Result<VolumeRecord, RecordError> {
        let path = self.record_path();
        let json = std::fs::read_to_string(&path).map_err(|source| RecordError::Read { path: path.clone(), source })?;
        VolumeRecord::from_json(&json).map_err(|why| RecordError::Content { path, why })
    }

    /// Writes the record atomically: a reader finds the old or the new one. It is not synced to disk: the record must
    /// survive a crash of this process; after a loss of power the mounts are gone too.
    pub fn write_record(&self, record: &VolumeRecord) -> io::Result<()> {
        make_dir(&self.dir)?;
        let json = record.to_json();
        if std::fs::read_to_string(self.record_path()).is_ok_and(|old| old == json) {
            return Ok(());
        }
        let draft = self.dir.join(format!(".{RECORD_FILE}"));
        std::fs::write(&draft, json)?;
        std::fs::rename(&draft, self.record_path())
    }

    /// Removes the mount point, the record and the directory, in this order, so that a mount point always has a record.
    /// The caller must have checked that nothing is mounted. A directory that is not empty is an error and stays
    /// unchanged.
    pub fn remove(&self) -> io::Result<()> {
        remove_empty(&self.target)?;
        for file in [self.record_path(), self.dir.join(format!(".{RECORD_FILE}"))] {
            match std::fs::remove_file(file) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        remove_empty(&self.dir)
    }
}

pub(crate) fn make_dir(dir: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o750).create(dir)
}

/// Succeeds if the path does not exist. An empty file at the path, which raw block drivers leave, is removed too.
fn remove_empty(path: &Path) -> io::Result<()> {
    let result = match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_file() && meta.len() == 0 => std::fs::remove_file(path),
        Ok(_) => std::fs::remove_dir(path),
        Err(e) => Err(e),
    };
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_kubelet() {
        let layout = Layout::new("/var/lib/kubelet");
        let volume = VolumeId::new("block.cleat.dev", "h");
        let sha = "aaa9402664f1a41f40ebbc52c9993eb66aeb366602958fdfaa283b71e64db123";
        assert_eq!(
            layout.staging_dir(&volume).target,
            Path::new(&format!("/var/lib/kubelet/plugins/kubernetes.io/csi/block.cleat.dev/{sha}/globalmount"))
        );
        let published = layout.publish_dir("uid-1", "pv-1");
        let dir = "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~csi/pv-1";
        assert_eq!(published.target, Path::new(dir).join("mount"));
        assert_eq!(published.record_path(), Path::new(dir).join("vol_data.json"));
        assert_eq!(volume.unique_name(), "kubernetes.io/csi/block.cleat.dev^h");
    }

    #[test]
    fn records_are_sorted_json_with_the_keys_of_the_kubelet() {
        let staged = VolumeRecord { volume: VolumeId::new("d", "h"), published: None };
        assert_eq!(staged.to_json(), "{\"driverName\":\"d\",\"volumeHandle\":\"h\"}\n");
        let published = VolumeRecord {
            published: Some(PublishedRecord { spec_name: "pv".into(), node: "n".into(), attachment: "csi-1".into() }),
            ..staged
        };
        assert_eq!(
            published.to_json(),
            "{\"attachmentID\":\"csi-1\",\"driverName\":\"d\",\"nodeName\":\"n\",\"specVolID\":\"pv\",\
             \"volumeHandle\":\"h\",\"volumeLifecycleMode\":\"Persistent\"}\n"
        );
        assert_eq!(VolumeRecord::from_json(&published.to_json()), Ok(published));
        for bad in ["", "[]", "{}", "{\"driverName\":\"../x\",\"volumeHandle\":\"h\"}"] {
            assert!(VolumeRecord::from_json(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn directories_with_content_are_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let volume_dir = layout.publish_dir("u", "pv");
        volume_dir.write_record(&VolumeRecord { volume: VolumeId::new("d", "h"), published: None }).unwrap();
        std::fs::create_dir(&volume_dir.target).unwrap();
        std::fs::write(volume_dir.target.join("data"), "precious").unwrap();
        assert!(volume_dir.remove().is_err());
        assert!(volume_dir.read_record().is_ok(), "the record stays as long as the mount point does");
        std::fs::remove_file(volume_dir.target.join("data")).unwrap();
        volume_dir.remove().unwrap();
        volume_dir.remove().unwrap();
        layout.remove_pod_dirs("u").unwrap();
        assert!(!layout.pod_dir("u").exists());
    }

    #[test]
    fn names_that_leave_their_directory_are_not_path_components() {
        for (name, want) in [("pv-1", true), ("", false), ("..", false), ("a/b", false), (".hidden", false)] {
            assert_eq!(is_path_component(name), want, "{name}");
        }
    }
}
