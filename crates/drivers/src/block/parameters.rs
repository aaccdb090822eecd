//! The parameters of StorageClasses and VolumeAttributesClasses: their names, allowed values and meaning. Pure. An
//! invalid parameter is refused with a status that names it.
use std::collections::{BTreeMap, HashMap};

use cleat_csi::Status;
use cleat_host::filesystem::Format;

pub(crate) const FS_TYPE: &str = "fsType";
pub(crate) const NO_FORMAT: &str = "noFormat";
pub(crate) const MKFS_OPTIONS: &str = "mkfsOptions";
pub(crate) const PROVISIONING: &str = "provisioning";
pub(crate) const POOL: &str = "pool";
pub(crate) const READ_ONLY: &str = "readOnly";
pub(crate) const BANDWIDTH: &str = "bandwidth";
/// Keys that sidecars add, for example the name of the claim. The driver ignores them.
const SIDECAR_PREFIX: &str = "csi.storage.k8s.io/";

type Parameters = BTreeMap<String, String>;

/// Validates the parameters of CreateVolume. Returns them without the keys of sidecars.
pub(crate) fn check(parameters: &HashMap<String, String>) -> Result<Parameters, Status> {
    let mut accepted = Parameters::new();
    for (key, value) in parameters {
        match key.as_str() {
            _ if key.starts_with(SIDECAR_PREFIX) => continue,
            FS_TYPE if Format::from_name(value).is_none() => {
                return Err(refuse(key, &format!("{value:?} is not supported; use ext4, xfs or btrfs")));
            }
            NO_FORMAT if !is_bool(value) => return Err(refuse(key, "must be true or false")),
            PROVISIONING if !matches!(value.as_str(), "thin" | "thick") => {
                return Err(refuse(key, "must be thin or thick"));
            }
            FS_TYPE | NO_FORMAT | PROVISIONING | POOL | MKFS_OPTIONS => {}
            _ => return Err(Status::invalid_argument(format!("parameters: {key:?} is not known"))),
        }
        accepted.insert(key.clone(), value.clone());
    }
    Ok(accepted)
}

/// Validates the parameters that ControllerModifyVolume can change.
pub(crate) fn check_mutable(parameters: &HashMap<String, String>) -> Result<Parameters, Status> {
    let mut accepted = Parameters::new();
    for (key, value) in parameters {
        match key.as_str() {
            READ_ONLY if !is_bool(value) => return Err(refuse(key, "must be true or false")),
            BANDWIDTH if queue_depth_of(value).is_none() => return Err(refuse(key, "must be low, normal or high")),
            READ_ONLY | BANDWIDTH => {}
            _ => return Err(Status::invalid_argument(format!("mutable_parameters: {key:?} is not known"))),
        }
        accepted.insert(key.clone(), value.clone());
    }
    Ok(accepted)
}

/// Validates the parameters of a snapshot class: only keys of sidecars are allowed.
pub(crate) fn check_snapshot(parameters: &HashMap<String, String>) -> Result<(), Status> {
    match parameters.keys().find(|key| !key.starts_with(SIDECAR_PREFIX)) {
        Some(key) => Err(Status::invalid_argument(format!("parameters: {key:?} is not known"))),
        None => Ok(()),
    }
}

pub(crate) fn is_thick(parameters: &Parameters) -> bool {
    parameters.get(PROVISIONING).is_some_and(|value| value == "thick")
}

pub(crate) fn forbids_format(parameters: &Parameters) -> bool {
    parameters.get(NO_FORMAT).is_some_and(|value| value == "true")
}

pub(crate) fn pool(parameters: &Parameters) -> Option<&str> {
    parameters.get(POOL).map(String::as_str).filter(|name| !name.is_empty())
}

pub(crate) fn is_read_only(mutable: &Parameters) -> bool {
    mutable.get(READ_ONLY).is_some_and(|value| value == "true")
}

/// The number of I/O requests that the device of the volume accepts at the same time, if its class limits it.
pub(crate) fn queue_depth(mutable: &Parameters) -> Option<u32> {
    mutable.get(BANDWIDTH).and_then(|class| queue_depth_of(class))
}

fn queue_depth_of(class: &str) -> Option<u32> {
    match class {
        // The minimum of the kernel.
        "low" => Some(4),
        "normal" => Some(64),
        // The default of the loop driver.
        "high" => Some(128),
        _ => None,
    }
}

/// The options that the class adds to the mkfs command.
pub(crate) fn mkfs_options(parameters: &Parameters) -> Vec<String> {
    let options = parameters.get(MKFS_OPTIONS).map_or("", String::as_str);
    options.split_ascii_whitespace().map(str::to_owned).collect()
}

/// Refuses options that name another device or a file, and force flags: a class may only set properties of the file
/// system.
pub(crate) fn check_mkfs_options(parameters: &Parameters, format: Option<Format>) -> Result<(), Status> {
    let options = mkfs_options(parameters);
    let Some(format) = format else {
        return if options.is_empty() { Ok(()) } else { Err(refuse(MKFS_OPTIONS, "a raw volume has no file system")) };
    };
    let allowed_flags = match format {
        Format::Ext4 => "bCeEgGiIJLmNOrTU",
        Format::Xfs => "bdilLmns",
        Format::Btrfs => "AdLmMnOsU",
    };
    let mut value_expected = false;
    for option in &options {
        let flag = option.strip_prefix('-').and_then(|rest| rest.chars().next());
        let is_allowed = match flag {
            Some(letter) => allowed_flags.contains(letter),
            None => value_expected,
        };
        let is_plain = option.chars().all(|c| c.is_ascii_alphanumeric() || "-_=,.^:+".contains(c));
        let names_other_file = ["name=", "file", "dev=", "device="].iter().any(|key| option.contains(key));
        if !is_allowed || !is_plain || names_other_file {
            return Err(refuse(MKFS_OPTIONS, &format!("{option:?} is not allowed with {}", format.name())));
        }
        value_expected = flag.is_some() && option.len() == 2;
    }
    Ok(())
}

fn is_bool(value: &str) -> bool {
    matches!(value, "true" | "false")
}

fn refuse(key: &str, why: &str) -> Status {
    Status::invalid_argument(format!("parameters: {key} {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(key: &str, value: &str) -> HashMap<String, String> {
        HashMap::from([(key.to_owned(), value.to_owned())])
    }

    #[test]
    fn unknown_keys_and_values_are_refused_and_sidecar_keys_are_ignored() {
        for (key, value, want) in [
            ("fsType", "xfs", true),
            ("fsType", "zfs", false),
            ("noFormat", "true", true),
            ("noFormat", "yes", false),
            ("provisioning", "thick", true),
            ("provisioning", "fat", false),
            ("pool", "fast", true),
            ("fstyp", "xfs", false),
            ("csi.storage.k8s.io/pvc/name", "a", true),
        ] {
            assert_eq!(check(&of(key, value)).is_ok(), want, "{key}={value}");
        }
        for (key, value, want) in [
            ("readOnly", "true", true),
            ("readOnly", "1", false),
            ("bandwidth", "low", true),
            ("bandwidth", "10M", false),
            ("fsType", "xfs", false),
        ] {
            assert_eq!(check_mutable(&of(key, value)).is_ok(), want, "{key}={value}");
        }
        assert!(check_snapshot(&of("csi.storage.k8s.io/volumesnapshot/name", "a")).is_ok());
        assert!(check_snapshot(&of("compress", "true")).is_err());
    }

    #[test]
    fn mkfs_options_only_set_properties_of_the_file_system() {
        use Format::{Btrfs, Ext4, Xfs};
        for (case, format, options, want) in [
            ("nothing", Ext4, "", true),
            ("block size and inode ratio", Ext4, "-b 4096 -i 65536", true),
            ("features", Ext4, "-O ^has_journal,metadata_csum", true),
            ("joined", Ext4, "-b4096", true),
            ("xfs geometry", Xfs, "-d agcount=4 -m crc=1", true),
            ("btrfs profile", Btrfs, "-m single -d single", true),
            ("force", Xfs, "-f", false),
            ("another device", Ext4, "/dev/sda", false),
            ("a bare word", Ext4, "sda", false),
            ("a second bare word", Ext4, "-b 4096 sda", false),
            ("a directory to copy in", Ext4, "-d etc", false),
            ("another target", Xfs, "-d name=etc", false),
            ("a log elsewhere", Xfs, "-l logdev=sda", false),
            ("a journal elsewhere", Ext4, "-J device=UUID=1", false),
            ("a shell", Ext4, "-L $(reboot)", false),
            ("a directory to copy in, btrfs", Btrfs, "--rootdir etc", false),
        ] {
            let parameters = BTreeMap::from([(MKFS_OPTIONS.to_owned(), options.to_owned())]);
            assert_eq!(check_mkfs_options(&parameters, Some(format)).is_ok(), want, "{case}");
        }
        let some = BTreeMap::from([(MKFS_OPTIONS.to_owned(), "-b 4096".to_owned())]);
        assert!(check_mkfs_options(&some, None).is_err(), "a raw volume has none");
    }
}
