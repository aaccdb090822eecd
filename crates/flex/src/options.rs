//! What a driver is told about a volume: one JSON object of strings.

use std::collections::BTreeMap;

/// A volume as its driver is to see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The PersistentVolume's name, or that of a pod's own volume.
    pub volume: String,
    pub fs_type: String,
    pub read_only: bool,
    /// The user's own. They win over everything else.
    pub more: BTreeMap<String, String>,
}

impl Options {
    pub(crate) fn json(&self) -> String {
        let mut all = BTreeMap::from([
            ("kubernetes.io/fsType", self.fs_type.as_str()),
            ("kubernetes.io/readwrite", if self.read_only { "ro" } else { "rw" }),
            ("kubernetes.io/pvOrVolumeName", self.volume.as_str()),
        ]);
        all.extend(self.more.iter().map(|(key, value)| (key.as_str(), value.as_str())));
        serde_json::Value::from_iter(all).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_options_win() {
        let more = [("size", "5g"), ("kubernetes.io/fsType", "btrfs")];
        let more = more.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let plain = Options { volume: "pv".to_owned(), fs_type: "ext4".to_owned(), ..Options::default() };
        for (options, want) in [
            (
                plain.clone(),
                r#"{"kubernetes.io/fsType":"ext4","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"rw"}"#,
            ),
            (
                Options { read_only: true, more, ..plain },
                r#"{"kubernetes.io/fsType":"btrfs","kubernetes.io/pvOrVolumeName":"pv","kubernetes.io/readwrite":"ro","size":"5g"}"#,
            ),
        ] {
            assert_eq!(options.json(), want);
        }
    }
}
