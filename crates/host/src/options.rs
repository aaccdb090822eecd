//! Mount options as users write them ("ro,noatime,nouuid"), sorted into what the kernel takes separately: attributes of the mount,
//! flags of the file system, and the file system's own words. Parses only.

use rustix::mount::MountFlags;

use crate::Access;
use crate::mount::Attributes;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum OptionError {
    #[error("mount option {0:?} asks for another operation than a mount")]
    Operation(String),
    #[error("mount option {0:?} contains a NUL byte")]
    Nul(String),
}

/// Parsed mount options; the default is read-write with nothing special.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub(crate) attributes: Attributes,
    pub(crate) super_flags: Vec<&'static str>,
    pub(crate) data: Vec<(String, Option<String>)>,
}

impl Default for Options {
    fn default() -> Self {
        Options { attributes: Attributes::empty(), super_flags: Vec::new(), data: Vec::new() }
    }
}

impl Options {
    /// Parses a list in which each entry is one option or several separated by commas; later entries win.
    pub fn parse<S: AsRef<str>>(entries: &[S]) -> Result<Options, OptionError> {
        let mut options = Options::default();
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
    pub fn with_access(mut self, access: Access) -> Options {
        self.set_flag("ro", access.read_only());
        self.attributes.set(Attributes::MOUNT_ATTR_RDONLY, access.read_only());
        self
    }

    /// The same options and one word for the file system, unless the caller gave it already.
    pub fn with_data(mut self, word: &str) -> Options {
        if !self.data.iter().any(|(key, _)| key == word) {
            self.data.push((word.into(), None));
        }
        self
    }

    fn add(&mut self, option: &str) -> Result<(), OptionError> {
        if option.contains('\0') {
            return Err(OptionError::Nul(option.into()));
        }
        type A = Attributes;
        let atime = A::MOUNT_ATTR__ATIME;
        match option {
            "" | "defaults" => {}
            // Words for mount(8), fstab and init; the kernel has no use for them.
            "_netdev" | "nofail" | "auto" | "noauto" | "user" | "nouser" | "users" | "owner" | "group" => {}
            _ if option.starts_with("x-") || option.starts_with("X-") || option.starts_with("comment=") => {}
            "bind" | "rbind" | "move" | "remount" | "shared" | "rshared" | "private" | "rprivate" | "slave"
            | "rslave" | "unbindable" | "runbindable" | "loop" => return Err(OptionError::Operation(option.into())),
            "ro" => *self = std::mem::take(self).with_access(Access::ReadOnly),
            "rw" => *self = std::mem::take(self).with_access(Access::ReadWrite),
            "suid" | "nosuid" => self.attributes.set(A::MOUNT_ATTR_NOSUID, option == "nosuid"),
            "dev" | "nodev" => self.attributes.set(A::MOUNT_ATTR_NODEV, option == "nodev"),
            "exec" | "noexec" => self.attributes.set(A::MOUNT_ATTR_NOEXEC, option == "noexec"),
            "diratime" | "nodiratime" => self.attributes.set(A::MOUNT_ATTR_NODIRATIME, option == "nodiratime"),
            "symfollow" | "nosymfollow" => self.attributes.set(A::MOUNT_ATTR_NOSYMFOLLOW, option == "nosymfollow"),
            "noatime" => self.attributes = (self.attributes - atime) | A::MOUNT_ATTR_NOATIME,
            "strictatime" => self.attributes = (self.attributes - atime) | A::MOUNT_ATTR_STRICTATIME,
            // The kernel's default, by its three names.
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
                self.data.push((key.to_owned(), value));
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

    /// For mount(2): the flags in one word.
    pub(crate) fn mount_flags(&self) -> MountFlags {
        let mut flags = MountFlags::empty();
        for (attribute, flag) in [
            (Attributes::MOUNT_ATTR_RDONLY, MountFlags::RDONLY),
            (Attributes::MOUNT_ATTR_NOSUID, MountFlags::NOSUID),
            (Attributes::MOUNT_ATTR_NODEV, MountFlags::NODEV),
            (Attributes::MOUNT_ATTR_NOEXEC, MountFlags::NOEXEC),
            (Attributes::MOUNT_ATTR_NODIRATIME, MountFlags::NODIRATIME),
            (Attributes::MOUNT_ATTR_NOATIME, MountFlags::NOATIME),
            (Attributes::MOUNT_ATTR_STRICTATIME, MountFlags::STRICTATIME),
            (Attributes::MOUNT_ATTR_NOSYMFOLLOW, MountFlags::NOSYMFOLLOW),
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

    /// For mount(2): the file system's words in one string.
    pub(crate) fn data_string(&self) -> String {
        let words: Vec<String> = self
            .data
            .iter()
            .map(|(key, value)| value.as_ref().map_or_else(|| key.clone(), |value| format!("{key}={value}")))
            .collect();
        words.join(",")
    }
}

/// Splits at commas outside double quotes, and drops the quotes: SELinux contexts contain commas.
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
    fn options_are_sorted_by_who_understands_them() {
        let o =
            Options::parse(&["ro,noatime,nouuid", "data=ordered", "defaults", "_netdev,x-systemd.automount"]).unwrap();
        assert_eq!(o.access(), Access::ReadOnly);
        assert_eq!(o.attributes, Attributes::MOUNT_ATTR_RDONLY | Attributes::MOUNT_ATTR_NOATIME);
        assert_eq!(o.data_string(), "nouuid,data=ordered");
        assert_eq!(o.mount_flags(), MountFlags::RDONLY | MountFlags::NOATIME);
        assert_eq!(o.clone().with_data("nouuid"), o, "not twice");
    }

    #[test]
    fn the_last_word_wins() {
        let o = Options::parse(&["ro", "rw", "noatime", "relatime", "sync,async", "nosuid,suid"]).unwrap();
        assert_eq!(o, Options::default());
    }

    #[test]
    fn operations_are_not_options() {
        for word in ["bind", "remount", "rshared", "loop"] {
            assert_eq!(Options::parse(&[word]), Err(OptionError::Operation(word.into())));
        }
    }

    #[test]
    fn quoted_commas_stay() {
        let o = Options::parse(&["context=\"system_u:object_r:x:c1,c2\",ro"]).unwrap();
        assert_eq!(o.data_string(), "context=\"system_u:object_r:x:c1,c2\"");
    }
}
