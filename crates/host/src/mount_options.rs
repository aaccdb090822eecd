//! Mount options as users write them ("ro,noatime,nouuid"), split into the three groups that the kernel takes
//! separately: attributes of the mount, flags of the superblock, and options of the file system. Parses only; mounts
//! nothing.

use rustix::mount::{MountAttrFlags, MountFlags};

use crate::access::Access;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MountOptionError {
    #[error("mount option {0:?} asks for another operation than a mount")]
    Operation(String),
    #[error("mount option {0:?} contains a NUL byte")]
    Nul(String),
}

/// Parsed mount options. The default is a read-write mount without further options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    pub(crate) attributes: MountAttrFlags,
    pub(crate) super_flags: Vec<&'static str>,
    /// Options of the file system itself: `data=ordered` is `("data", Some("ordered"))`.
    pub(crate) fs_options: Vec<(String, Option<String>)>,
}

impl Default for MountOptions {
    fn default() -> Self {
        MountOptions { attributes: MountAttrFlags::empty(), super_flags: Vec::new(), fs_options: Vec::new() }
    }
}

impl MountOptions {
    /// Parses a list in which each entry is one option or several options separated by commas. Of options that
    /// contradict each other, the last one applies.
    pub fn parse<S: AsRef<str>>(entries: &[S]) -> Result<MountOptions, MountOptionError> {
        let mut options = MountOptions::default();
        for entry in entries {
            for option in split(entry.as_ref()) {
                options.add(option)?;
            }
        }
        Ok(options)
    }

    pub fn access(&self) -> Access {
        if self.super_flags.contains(&"ro") { Access::ReadOnly } else { Access::ReadWrite }
    }

    /// The same options with the access changed.
    pub fn with_access(mut self, access: Access) -> MountOptions {
        self.set_flag("ro", access.is_read_only());
        self.attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, access.is_read_only());
        self
    }

    /// Adds an option of the file system that has no value, unless it is present already.
    pub fn with_fs_option(mut self, name: &str) -> MountOptions {
        if !self.fs_options.iter().any(|(key, _)| key == name) {
            self.fs_options.push((name.into(), None));
        }
        self
    }

    fn add(&mut self, option: &str) -> Result<(), MountOptionError> {
        if option.contains('\0') {
            return Err(MountOptionError::Nul(option.into()));
        }
        type A = MountAttrFlags;
        let atime = A::MOUNT_ATTR__ATIME;
        match option {
            "" | "defaults" => {}
            // Options for mount(8), fstab and init, which the kernel does not know.
            "_netdev" | "nofail" | "auto" | "noauto" | "user" | "nouser" | "users" | "owner" | "group" => {}
            _ if option.starts_with("x-") || option.starts_with("X-") || option.starts_with("comment=") => {}
            "bind" | "rbind" | "move" | "remount" | "shared" | "rshared" | "private" | "rprivate" | "slave"
            | "rslave" | "unbindable" | "runbindable" | "loop" => {
                return Err(MountOptionError::Operation(option.into()));
            }
            "ro" => *self = std::mem::take(self).with_access(Access::ReadOnly),
            "rw" => *self = std::mem::take(self).with_access(Access::ReadWrite),
            "suid" | "nosuid" => self.attributes.set(A::MOUNT_ATTR_NOSUID, option == "nosuid"),
            "dev" | "nodev" => self.attributes.set(A::MOUNT_ATTR_NODEV, option == "nodev"),
            "exec" | "noexec" => self.attributes.set(A::MOUNT_ATTR_NOEXEC, option == "noexec"),
            "diratime" | "nodiratime" => self.attributes.set(A::MOUNT_ATTR_NODIRATIME, option == "nodiratime"),
            "symfollow" | "nosymfollow" => self.attributes.set(A::MOUNT_ATTR_NOSYMFOLLOW, option == "nosymfollow"),
            "noatime" => self.attributes = (self.attributes - atime) | A::MOUNT_ATTR_NOATIME,
            "strictatime" => self.attributes = (self.attributes - atime) | A::MOUNT_ATTR_STRICTATIME,
            // relatime is the kernel's default; the other names select it too.
            "relatime" | "atime" | "nostrictatime" | "norelatime" => self.attributes -= atime,
            "sync" => self.set_flag("sync", true),
            "async" => self.set_flag("sync", false),
            "dirsync" => self.set_flag("dirsync", true),
            "lazytime" => self.set_flag("lazytime", true),
            "nolazytime" => self.set_flag("lazytime", false),
            _ => {
                let (key, value) = match option.split_once('=') {
                    Some((key, value)) => (key, Some(value.to_owned())),
                    None => (option, None),
                };
                self.fs_options.push((key.to_owned(), value));
            }
        }
        Ok(())
    }

    fn set_flag(&mut self, flag: &'static str, on: bool) {
        self.super_flags.retain(|f| *f != flag);
        if on {
            self.super_flags.push(flag);
        }
    }

    /// The flags argument of mount(2).
    pub(crate) fn mount_flags(&self) -> MountFlags {
        let mut flags = MountFlags::empty();
        for (attribute, flag) in [
            (MountAttrFlags::MOUNT_ATTR_RDONLY, MountFlags::RDONLY),
            (MountAttrFlags::MOUNT_ATTR_NOSUID, MountFlags::NOSUID),
            (MountAttrFlags::MOUNT_ATTR_NODEV, MountFlags::NODEV),
            (MountAttrFlags::MOUNT_ATTR_NOEXEC, MountFlags::NOEXEC),
            (MountAttrFlags::MOUNT_ATTR_NODIRATIME, MountFlags::NODIRATIME),
            (MountAttrFlags::MOUNT_ATTR_NOATIME, MountFlags::NOATIME),
            (MountAttrFlags::MOUNT_ATTR_STRICTATIME, MountFlags::STRICTATIME),
            (MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW, MountFlags::NOSYMFOLLOW),
        ] {
            flags.set(flag, self.attributes.contains(attribute));
        }
        for flag in &self.super_flags {
            flags |= match *flag {
                "sync" => MountFlags::SYNCHRONOUS,
                "dirsync" => MountFlags::DIRSYNC,
                "lazytime" => MountFlags::LAZYTIME,
                _ => MountFlags::empty(),
            };
        }
        flags
    }

    /// The data argument of mount(2): the options of the file system, separated by commas.
    pub(crate) fn fs_options_string(&self) -> String {
        let options: Vec<String> = self
            .fs_options
            .iter()
            .map(|(key, value)| value.as_ref().map_or_else(|| key.clone(), |value| format!("{key}={value}")))
            .collect();
        options.join(",")
    }
}

/// Splits at the commas that are not inside double quotes: SELinux contexts contain commas. The quotes stay.
fn split(entry: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    entry
        .split(move |c: char| {
            quoted ^= c == '"';
            c == ',' && !quoted
        })
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_split_into_attributes_flags_and_file_system_options() {
        let o = MountOptions::parse(&["ro,noatime,nouuid", "data=ordered", "defaults", "_netdev,x-systemd.automount"])
            .unwrap();
        assert_eq!(o.access(), Access::ReadOnly);
        assert_eq!(o.attributes, MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOATIME);
        assert_eq!(o.fs_options_string(), "nouuid,data=ordered");
        assert_eq!(o.mount_flags(), MountFlags::RDONLY | MountFlags::NOATIME);
        assert_eq!(o.clone().with_fs_option("nouuid"), o, "an option is not added twice");
    }

    #[test]
    fn the_last_of_contradicting_options_applies() {
        let o = MountOptions::parse(&["ro", "rw", "noatime", "relatime", "sync,async", "nosuid,suid"]).unwrap();
        assert_eq!(o, MountOptions::default());
    }

    #[test]
    fn options_that_ask_for_another_operation_are_refused() {
        for word in ["bind", "remount", "rshared", "loop"] {
            assert_eq!(MountOptions::parse(&[word]), Err(MountOptionError::Operation(word.into())));
        }
    }

    #[test]
    fn commas_inside_quotes_do_not_separate_options() {
        let o = MountOptions::parse(&["context=\"system_u:object_r:x:c1,c2\",ro"]).unwrap();
        assert_eq!(o.fs_options_string(), "context=\"system_u:object_r:x:c1,c2\"");
    }
}
