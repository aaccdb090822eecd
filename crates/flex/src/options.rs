//! The options of a volume that a call passes to the driver: one JSON object of strings.

use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeOptions {
    /// The name of the PersistentVolume, or of the volume in the pod's spec.
    pub volume: String,
    pub fs_type: String,
    pub read_only: bool,
    /// The options from the volume's spec. They override the others.
    pub user_options: BTreeMap<String, String>,
}

impl VolumeOptions {
    pub(crate) fn to_json(&self) -> String {
        let mut all = BTreeMap::from([
            ("kubernetes.io/fsType", self.fs_type.as_str()),
            ("kubernetes.io/readwrite", if self.read_only { "ro" } else { "rw" }),
            ("kubernetes.io/pvOrVolumeName", self.volume.as_str()),
        ]);
        all.extend(self.user_options.iter().map(|(key, value)| (key.as_str(), value.as_str())));
        serde_json::Value::from_iter(all).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_options_override_the_others() {
        let more = [("size", "5g"), ("kubernetes.io/fsType", "btrfs")];
        let user_options = more.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let plain = VolumeOptions { volume: "pv".to_owned(), fs_type: "ext4".to_owned(), ..VolumeOptions::default() };
        for (options, want) in [
            (
                plain.clone(),
                r#"{"kubernetes.io/fsType":"ext4","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw"}"#,
            ),
            (
                VolumeOptions { read_only: true, user_options, ..plain },
                r#"{"kubernetes.io/fsType":"btrfs","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"ro","size":"5g"}"#,
            ),
        ] {
            assert_eq!(options.to_json(), want);
        }
    }
}
