//! Where things are under the kubelet's root directory, and the two `vol_data.json` files. Drivers, and a kubelet that takes
//! the node over, know these paths. Blocking file access only; decides nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use cleat_api::names;

const CSI: &str = "kubernetes.io/csi";
const CSI_ESCAPED: &str = "kubernetes.io~csi";
const DATA: &str = "vol_data.json";

/// A CSI volume as the node knows it: two PersistentVolumes with the same driver and handle are one volume.
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

/// A directory with the record of what is, or may be, mounted below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Holds the record and the mount point.
    pub dir: PathBuf,
    /// What the driver is told to mount at.
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

    pub fn plugins_registry(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    pub fn plugins(&self) -> PathBuf {
        self.root.join("plugins")
    }

    pub fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    pub fn pod(&self, uid: &str) -> PathBuf {
        self.pods().join(uid)
    }

    /// Where all staged volumes of all drivers are.
    pub fn all_staged(&self) -> PathBuf {
        self.plugins().join(CSI)
    }

    pub fn staged(&self, volume: &VolumeId) -> Place {
        let dir = self.all_staged().join(&volume.driver).join(names::sha256_hex(&volume.handle));
        Place { target: dir.join("globalmount"), dir }
    }

    /// Where all CSI volumes of one pod are.
    pub fn all_published(&self, uid: &str) -> PathBuf {
        self.pod(uid).join("volumes").join(CSI_ESCAPED)
    }

    /// `name` is the PersistentVolume's.
    pub fn published(&self, uid: &str, name: &str) -> Place {
        let dir = self.all_published(uid).join(escape(name));
        Place { target: dir.join("mount"), dir }
    }

    /// Removes the directories of a pod without volumes; what is not empty stays, with all that is in it.
    pub fn remove_pod(&self, uid: &str) -> io::Result<()> {
        for dir in [self.all_published(uid), self.pod(uid).join("volumes"), self.pod(uid)] {
            remove_empty(&dir)?;
        }
        Ok(())
    }
}

fn escape(name: &str) -> String {
    name.replace('/', "~")
}

/// Whether a name from an API object is safe as one component of a path.
pub fn is_component(name: &str) -> bool {
    !name.is_empty() && name.len() <= 253 && !name.starts_with('.') && !name.contains(['/', '\0', '\n'])
}

/// The content of a `vol_data.json`: strings by key, unknown keys tolerated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeData {
    pub volume: VolumeId,
    /// Only in a pod's record.
    pub published: Option<PublishedData>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedData {
    pub spec_name: String,
    pub node: String,
    pub attachment: String,
}

#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("read {path:?}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path:?} is not a record of a volume: {why}")]
    Content { path: PathBuf, why: String },
}

impl VolumeData {
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

    fn from_json(text: &str) -> Result<VolumeData, String> {
        let map: BTreeMap<String, String> = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let get = |key: &str| map.get(key).filter(|v| !v.is_empty()).cloned();
        let need = |key: &str| get(key).ok_or_else(|| format!("no {key}"));
        let volume = VolumeId::new(need("driverName")?, need("volumeHandle")?);
        if !is_component(&volume.driver) {
            return Err(format!("driver name {:?}", volume.driver));
        }
        let published = get("specVolID").map(|spec_name| PublishedData {
            spec_name,
            node: get("nodeName").unwrap_or_default(),
            attachment: get("attachmentID").unwrap_or_default(),
        });
        Ok(VolumeData { volume, published })
    }
}

impl Place {
    pub fn data(&self) -> PathBuf {
        self.dir.join(DATA)
    }

    pub fn read(&self) -> Result<VolumeData, DataError> {
        let path = self.data();
        let text = std::fs::read_to_string(&path).map_err(|source| DataError::Read { path: path.clone(), source })?;
        VolumeData::from_json(&text).map_err(|why| DataError::Content { path, why })
    }

    /// Writes the record, all or nothing for any later reader. It is not synced: a machine that loses power loses the mounts
    /// too, so the record has to outlive this process and no more.
    pub fn write(&self, data: &VolumeData) -> io::Result<()> {
        make_dir(&self.dir)?;
        let text = data.to_json();
        if std::fs::read_to_string(self.data()).is_ok_and(|old| old == text) {
            return Ok(());
        }
        let draft = self.dir.join(format!(".{DATA}"));
        std::fs::write(&draft, text)?;
        std::fs::rename(&draft, self.data())
    }

    /// Removes mount point, record and directory, in this order: as long as anything is left to do the record is there. The
    /// mount point must not be mounted; directories that are not empty are an error, never emptied.
    pub fn remove(&self) -> io::Result<()> {
        remove_empty(&self.target)?;
        for file in [self.data(), self.dir.join(format!(".{DATA}"))] {
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

/// Absent is fine. A file in place of the directory (raw block drivers leave one) goes too, if it is empty.
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
    fn paths_are_the_kubelets() {
        let layout = Layout::new("/var/lib/kubelet");
        let volume = VolumeId::new("block.cleat.dev", "h");
        let sha = "aaa9402664f1a41f40ebbc52c9993eb66aeb366602958fdfaa283b71e64db123";
        assert_eq!(
            layout.staged(&volume).target,
            Path::new(&format!("/var/lib/kubelet/plugins/kubernetes.io/csi/block.cleat.dev/{sha}/globalmount"))
        );
        let published = layout.published("uid-1", "pv-1");
        let dir = "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~csi/pv-1";
        assert_eq!(published.target, Path::new(dir).join("mount"));
        assert_eq!(published.data(), Path::new(dir).join("vol_data.json"));
        assert_eq!(volume.unique_name(), "kubernetes.io/csi/block.cleat.dev^h");
    }

    #[test]
    fn records_are_sorted_json_with_the_kubelets_keys() {
        let staged = VolumeData { volume: VolumeId::new("d", "h"), published: None };
        assert_eq!(staged.to_json(), "{\"driverName\":\"d\",\"volumeHandle\":\"h\"}\n");
        let published = VolumeData {
            published: Some(PublishedData { spec_name: "pv".into(), node: "n".into(), attachment: "csi-1".into() }),
            ..staged
        };
        assert_eq!(
            published.to_json(),
            "{\"attachmentID\":\"csi-1\",\"driverName\":\"d\",\"nodeName\":\"n\",\"specVolID\":\"pv\",\
             \"volumeHandle\":\"h\",\"volumeLifecycleMode\":\"Persistent\"}\n"
        );
        assert_eq!(VolumeData::from_json(&published.to_json()), Ok(published));
        for bad in ["", "[]", "{}", "{\"driverName\":\"../x\",\"volumeHandle\":\"h\"}"] {
            assert!(VolumeData::from_json(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn removal_never_empties_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let place = layout.published("u", "pv");
        place.write(&VolumeData { volume: VolumeId::new("d", "h"), published: None }).unwrap();
        std::fs::create_dir(&place.target).unwrap();
        std::fs::write(place.target.join("data"), "precious").unwrap();
        assert!(place.remove().is_err());
        assert!(place.read().is_ok(), "the record stays as long as anything is left to do");
        std::fs::remove_file(place.target.join("data")).unwrap();
        place.remove().unwrap();
        place.remove().unwrap();
        layout.remove_pod("u").unwrap();
        assert!(!layout.pod("u").exists());
    }

    #[test]
    fn names_that_leave_their_directory_are_not_components() {
        for (name, want) in [("pv-1", true), ("", false), ("..", false), ("a/b", false), (".hidden", false)] {
            assert_eq!(is_component(name), want, "{name}");
        }
    }
}
