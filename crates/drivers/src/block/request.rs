//! Parses and validates requests, which are untrusted. Pure. An invalid request is refused with a status that names the
//! field.
use std::collections::{BTreeMap, HashMap};

use cleat_csi::{
    Status,
    v1::{
        CapacityRange, VolumeCapability, VolumeContentSource,
        volume_capability::{AccessType, MountVolume, access_mode::Mode},
        volume_content_source,
    },
    validate,
};
use cleat_host::filesystem::Format;
use sha2::{Digest, Sha256};

use super::{
    parameters,
    record::{ContentSource, Publication, Sharing},
};

const MIB: u64 = 1 << 20;
const DEFAULT_VOLUME_BYTES: u64 = 1 << 30;
/// Below this size mkfs.ext4 creates no journal.
const MIN_EXT4_BYTES: u64 = 4 * MIB;
/// The minimum of mkfs.xfs.
const MIN_XFS_BYTES: u64 = 300 * MIB;
/// The minimum of mkfs.btrfs.
const MIN_BTRFS_BYTES: u64 = 128 * MIB;
/// Below the maximum size of a file on ext4, which is 16 TiB.
pub(crate) const MAX_VOLUME_BYTES: u64 = 8 << 40;

/// How a volume is accessed: as a raw device, or as a mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VolumeAccess {
    Block,
    Mount { file_system: Option<Format>, flags: Vec<String> },
}

/// A VolumeCapability that the driver supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Capability {
    pub(crate) access: VolumeAccess,
    pub(crate) sharing: Sharing,
    pub(crate) read_only: bool,
    /// Whether the volume may be published at one target path only.
    pub(crate) single_target: bool,
}

impl Capability {
    pub(crate) fn parse(field: &'static str, capability: &VolumeCapability) -> Result<Capability, Status> {
        let refuse = |why: String| Err(Status::invalid_argument(format!("{field}: {why}")));
        let access = match &capability.access_type {
            None => return refuse("access_type is missing".into()),
            Some(AccessType::Block(_)) => VolumeAccess::Block,
            Some(AccessType::Mount(MountVolume { fs_type, mount_flags, .. })) => {
                let file_system = match (fs_type.as_str(), Format::from_name(fs_type)) {
                    ("", _) => None,
                    (_, None) => {
                        return refuse(format!("fs_type {fs_type:?} is not supported; use ext4, xfs or btrfs"));
                    }
                    (_, format) => format,
                };
                VolumeAccess::Mount { file_system, flags: mount_flags.clone() }
            }
        };
        let mode = validate::present(field, &capability.access_mode)?.mode();
        let (sharing, read_only) = match (mode, &access) {
            (Mode::SingleNodeWriter | Mode::SingleNodeSingleWriter | Mode::SingleNodeMultiWriter, _) => {
                (Sharing::Exclusive, false)
            }
            (Mode::SingleNodeReaderOnly, _) => (Sharing::Exclusive, true),
            (Mode::MultiNodeReaderOnly, _) => (Sharing::Readers, true),
            (Mode::MultiNodeMultiWriter, VolumeAccess::Block) => (Sharing::Writers, false),
            (Mode::MultiNodeMultiWriter | Mode::MultiNodeSingleWriter, _) => {
                return refuse(format!("{} needs a cluster file system", mode.as_str_name()));
            }
            (Mode::Unknown, _) => return refuse("access_mode is missing".into()),
        };
        Ok(Capability { access, sharing, read_only, single_target: mode == Mode::SingleNodeSingleWriter })
    }

    pub(crate) fn publication(&self, read_only: bool) -> Publication {
        Publication { read_only: read_only || self.read_only, sharing: self.sharing }
    }
}

/// The properties that a CreateVolume request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeRequirements {
    pub(crate) size: SizeRange,
    pub(crate) parameters: BTreeMap<String, String>,
    pub(crate) mutable_parameters: BTreeMap<String, String>,
    pub(crate) file_system: Option<Format>,
    /// Whether the capability or the class names the file system; otherwise it is the default.
    pub(crate) file_system_requested: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SizeRange {
    required: u64,
    /// 0 means no limit.
    limit: u64,
}

impl SizeRange {
    pub(crate) fn parse(range: Option<&CapacityRange>) -> Result<SizeRange, Status> {
        let CapacityRange { required_bytes, limit_bytes } = range.copied().unwrap_or_default();
        let (Ok(required), Ok(limit)) = (u64::try_from(required_bytes), u64::try_from(limit_bytes)) else {
            return Err(Status::invalid_argument("capacity_range: a size is negative"));
        };
        if limit != 0 && required > limit {
            return Err(Status::invalid_argument("capacity_range: required_bytes is above limit_bytes"));
        }
        Ok(SizeRange { required, limit })
    }

    pub(crate) fn admits(&self, capacity: u64) -> bool {
        self.required <= capacity && (self.limit == 0 || capacity <= self.limit)
    }

    /// Whether a volume of this size has at least the required size.
    pub(crate) fn is_satisfied_by(&self, capacity: u64) -> bool {
        self.required <= capacity
    }

    /// The size of a new volume: at least what the file system and the source need, rounded up, and never above the
    /// limit.
    pub(crate) fn choose(&self, file_system: Option<Format>, source: Option<u64>) -> Result<u64, Status> {
        let minimum = min_volume_bytes(file_system).max(source.unwrap_or(0));
        let wanted = match (self.required, self.limit) {
            (0, _) if source.is_some() => minimum,
            (0, 0) => DEFAULT_VOLUME_BYTES,
            (0, limit) => DEFAULT_VOLUME_BYTES.min(limit / MIB * MIB),
            (required, _) => required,
        };
        self.round_up(wanted.max(minimum))
    }

    /// The size to expand a volume to. A volume that is large enough keeps its size.
    pub(crate) fn choose_expanded(&self, current: u64) -> Result<u64, Status> {
        if self.required <= current && self.admits(current) {
            Ok(current)
        } else {
            self.round_up(self.required.max(current))
        }
    }

    /// Rounds up to a whole MiB. Fails if that exceeds the maximum or the limit.
    fn round_up(&self, wanted: u64) -> Result<u64, Status> {
        let size = wanted.checked_next_multiple_of(MIB).unwrap_or(u64::MAX);
        if size > MAX_VOLUME_BYTES {
            return Err(Status::out_of_range(format!("capacity_range: at most {MAX_VOLUME_BYTES} bytes are possible")));
        }
        if self.admits(size) {
            Ok(size)
        } else {
            Err(Status::out_of_range(format!("capacity_range: limit_bytes is below {size} bytes, the least possible")))
        }
    }
}

/// The minimum size of a volume with this file system; of a raw volume if it is `None`.
pub(crate) fn min_volume_bytes(file_system: Option<Format>) -> u64 {
    match file_system {
        None => MIB,
        Some(Format::Ext4) => MIN_EXT4_BYTES,
        Some(Format::Xfs) => MIN_XFS_BYTES,
        Some(Format::Btrfs) => MIN_BTRFS_BYTES,
    }
}

impl VolumeRequirements {
    pub(crate) fn parse(
        range: Option<&CapacityRange>,
        capabilities: &[VolumeCapability],
        class: &HashMap<String, String>,
        mutable_parameters: &HashMap<String, String>,
    ) -> Result<VolumeRequirements, Status> {
        let parameters = parameters::check(class)?;
        let mutable_parameters = parameters::check_mutable(mutable_parameters)?;
        let class_file_system = parameters.get(parameters::FS_TYPE).and_then(|name| Format::from_name(name));
        let mut capability_file_system = None;
        let (mut has_block, mut has_mount) = (false, false);
        for capability in validate::not_empty("volume_capabilities", capabilities)? {
            match Capability::parse("volume_capabilities", capability)?.access {
                VolumeAccess::Block => has_block = true,
                VolumeAccess::Mount { file_system, .. } => {
                    has_mount = true;
                    capability_file_system = capability_file_system.or(file_system);
                }
            }
        }
        if has_block && has_mount {
            return Err(Status::invalid_argument("volume_capabilities: block and mount exclude each other"));
        }
        let requested = capability_file_system.or(class_file_system);
        let file_system = has_mount.then(|| requested.unwrap_or(Format::Ext4));
        parameters::check_mkfs_options(&parameters, file_system)?;
        Ok(VolumeRequirements {
            size: SizeRange::parse(range)?,
            parameters,
            mutable_parameters,
            file_system,
            file_system_requested: requested.is_some(),
        })
    }
}

/// The source that CreateVolume is to copy.
pub(crate) fn parse_source(source: Option<&VolumeContentSource>) -> Result<Option<ContentSource>, Status> {
    use volume_content_source::Type;
    let Some(source) = source else { return Ok(None) };
    match &source.r#type {
        Some(Type::Snapshot(from)) => {
            let id = validate::text("volume_content_source.snapshot.snapshot_id", &from.snapshot_id)?;
            Ok(Some(ContentSource::Snapshot(id.to_owned())))
        }
        Some(Type::Volume(from)) => {
            let id = validate::text("volume_content_source.volume.volume_id", &from.volume_id)?;
            Ok(Some(ContentSource::Volume(id.to_owned())))
        }
        None => Err(Status::invalid_argument("volume_content_source is of unknown type")),
    }
}

/// The id of an object, derived from its name: a repeated create call gets the same id. A name that is not a valid id
/// is hashed.
pub(crate) fn id_for(name: &str) -> String {
    let looks_hashed = |name: &str| name.strip_prefix("h-").is_some_and(|rest| rest.len() == 64);
    if is_id(name) && !looks_hashed(name) {
        name.to_owned()
    } else {
        let digest: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("h-{digest}")
    }
}

/// Whether the string can be an id. Ids are used as file names: no separators, no leading dot, and short enough for a
/// suffix.
pub(crate) fn is_id(id: &str) -> bool {
    id.len() <= validate::MAX_STRING_BYTES
        && id.starts_with(|first: char| first.is_ascii_alphanumeric())
        && id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

#[cfg(test)]
mod tests;
