//! Detects what is on a block device. Reads the offsets at which file systems, volume managers and partition tables
//! have their magic numbers. Reports a device as blank only if every byte that was read is zero. Never writes.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// How many bytes are read at the start of the device, where almost all formats have their magic number, and how many
/// at its end (backup partition table, RAID superblocks of old formats).
const PROBED_BYTES: u64 = 1 << 20;

/// What a device holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceContents {
    /// Every byte that was read is zero.
    Blank,
    FileSystem {
        kind: FileSystemKind,
        uuid: Option<String>,
    },
    /// Part of a larger volume, or not a file system: swap, LVM, LUKS, RAID …
    Member {
        kind: &'static str,
    },
    PartitionTable {
        kind: &'static str,
    },
    /// Bytes that are not zero and match no known format. They must be treated as a user's data.
    Unknown,
}

/// The file systems that a probe detects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileSystemKind {
    Ext2,
    Ext3,
    Ext4,
    Xfs,
    Btrfs,
    Vfat,
    Exfat,
    Ntfs,
    F2fs,
    Squashfs,
    Erofs,
    Iso9660,
}

impl FileSystemKind {
    /// The name that mount(2) takes.
    pub fn name(self) -> &'static str {
        match self {
            FileSystemKind::Ext2 => "ext2",
            FileSystemKind::Ext3 => "ext3",
            FileSystemKind::Ext4 => "ext4",
            FileSystemKind::Xfs => "xfs",
            FileSystemKind::Btrfs => "btrfs",
            FileSystemKind::Vfat => "vfat",
            FileSystemKind::Exfat => "exfat",
            FileSystemKind::Ntfs => "ntfs3",
            FileSystemKind::F2fs => "f2fs",
            FileSystemKind::Squashfs => "squashfs",
            FileSystemKind::Erofs => "erofs",
            FileSystemKind::Iso9660 => "iso9660",
        }
    }
}

impl fmt::Display for FileSystemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for DeviceContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceContents::Blank => f.write_str("nothing"),
            DeviceContents::FileSystem { kind, uuid: Some(uuid) } => write!(f, "an {kind} file system ({uuid})"),
            DeviceContents::FileSystem { kind, uuid: None } => write!(f, "an {kind} file system"),
            DeviceContents::Member { kind } => write!(f, "{kind}"),
            DeviceContents::PartitionTable { kind } => write!(f, "a {kind} partition table"),
            DeviceContents::Unknown => f.write_str("data of unknown kind"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("probe {device:?}: {step}")]
    Read { device: PathBuf, step: &'static str, source: io::Error },
    /// A device of size 0 has no medium yet, or has lost it. It does not count as blank.
    #[error("probe {device:?}: it has no size")]
    Empty { device: PathBuf },
}

/// Detects what is on `device`, a block device or an image file.
pub fn probe(device: &Path) -> Result<DeviceContents, ProbeError> {
    let error = |step| move |source| ProbeError::Read { device: device.into(), step, source };
    let mut file = File::open(device).map_err(error("open"))?;
    let size = file.seek(SeekFrom::End(0)).map_err(error("find its size"))?;
    if size == 0 {
        return Err(ProbeError::Empty { device: device.into() });
    }
    let mut head = vec![0; size.min(PROBED_BYTES) as usize];
    file.seek(SeekFrom::Start(0)).map_err(error("seek"))?;
    file.read_exact(&mut head).map_err(error("read its start"))?;
    let mut tail = vec![0; (size - head.len() as u64).min(PROBED_BYTES) as usize];
    file.seek(SeekFrom::Start(size - tail.len() as u64)).map_err(error("seek"))?;
    file.read_exact(&mut tail).map_err(error("read its end"))?;
    Ok(identify(&head, &tail))
}

fn identify(head: &[u8], tail: &[u8]) -> DeviceContents {
    if head.iter().chain(tail).all(|b| *b == 0) {
        return DeviceContents::Blank;
    }
    // GPT is checked first: the space before its first partition may contain magic numbers of earlier contents. MBR is
    // checked last: its magic number is two bytes that boot sectors of file systems contain too.
    if has_magic(head, 512, b"EFI PART") || has_magic(head, 4096, b"EFI PART") || ends_with_gpt(tail) {
        return DeviceContents::PartitionTable { kind: "GPT" };
    }
    if let Some(kind) = detect_member(head, tail) {
        return DeviceContents::Member { kind };
    }
    if let Some((kind, uuid)) = detect_file_system(head) {
        return DeviceContents::FileSystem { kind, uuid };
    }
    if has_magic(head, 510, &[0x55, 0xaa]) {
        return DeviceContents::PartitionTable { kind: "MBR" };
    }
    DeviceContents::Unknown
}

fn detect_file_system(head: &[u8]) -> Option<(FileSystemKind, Option<String>)> {
    let magics: [(usize, &[u8], FileSystemKind, Option<usize>); 12] = [
        (0, b"XFSB", FileSystemKind::Xfs, Some(32)),
        (0x10040, b"_BHRfS_M", FileSystemKind::Btrfs, Some(0x10020)),
        (82, b"FAT32   ", FileSystemKind::Vfat, None),
        (54, b"FAT16   ", FileSystemKind::Vfat, None),
        (54, b"FAT12   ", FileSystemKind::Vfat, None),
        (54, b"FAT     ", FileSystemKind::Vfat, None),
        (3, b"EXFAT   ", FileSystemKind::Exfat, None),
        (3, b"NTFS    ", FileSystemKind::Ntfs, None),
        (1024, &[0x10, 0x20, 0xf5, 0xf2], FileSystemKind::F2fs, Some(1024 + 108)),
        (0, b"hsqs", FileSystemKind::Squashfs, None),
        (1024, &[0xe2, 0xe1, 0xf5, 0xe0], FileSystemKind::Erofs, Some(1024 + 48)),
        (0x8001, b"CD001", FileSystemKind::Iso9660, None),
    ];
    if has_magic(head, 1024 + 56, &[0x53, 0xef]) {
        return Some((ext_kind(head), uuid(head, 1024 + 104)));
    }
    magics
        .iter()
        .find(|(at, magic, _, _)| has_magic(head, *at, magic))
        .map(|(_, _, kind, id)| (*kind, id.and_then(|at| uuid(head, at))))
}

/// ext2, ext3 or ext4, by the feature bits that the kernel's drivers check too.
fn ext_kind(head: &[u8]) -> FileSystemKind {
    const HAS_JOURNAL: u32 = 0x4;
    // Extents, 64-bit, multi-mount protection, flexible block groups and all later features.
    const EXT4_INCOMPATIBLE: u32 = !0x1f;
    // Huge files, block group checksums and all later features.
    const EXT4_READ_ONLY: u32 = !0x7;
    let word = |at: usize| head.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
    let (compatible, incompatible, read_only) = (word(1024 + 92), word(1024 + 96), word(1024 + 100));
    if incompatible & EXT4_INCOMPATIBLE != 0 || read_only & EXT4_READ_ONLY != 0 {
        FileSystemKind::Ext4
    } else if compatible & HAS_JOURNAL != 0 {
        FileSystemKind::Ext3
    } else {
        FileSystemKind::Ext2
    }
}

fn detect_member(head: &[u8], tail: &[u8]) -> Option<&'static str> {
    const MD: &[u8] = &[0xfc, 0x4e, 0x2b, 0xa9];
    const BCACHE: &[u8] = &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca];
    if has_magic(head, 0, b"LUKS\xba\xbe") {
        return Some("a LUKS container");
    }
    if (0..4).any(|sector| has_magic(head, sector * 512, b"LABELONE")) {
        return Some("an LVM physical volume");
    }
    // Swap has its magic number at the end of its first page, and the page size depends on the machine.
    if [4096, 8192, 16384, 65536]
        .iter()
        .any(|page| has_magic(head, page - 10, b"SWAPSPACE2") || has_magic(head, page - 10, b"SWAP-SPACE"))
    {
        return Some("swap space");
    }
    // The superblock of formats 1.1 and 1.2 is at the start, that of 1.0 and 0.90 near the end, aligned to 4 and 64
    // KiB.
    let near_end = [8192, 12288, 65536, 131072]
        .iter()
        .any(|back| tail.len().checked_sub(*back).is_some_and(|at| has_magic(tail, at, MD)));
    if has_magic(head, 0, MD) || has_magic(head, 4096, MD) || near_end {
        return Some("a RAID member");
    }
    if has_magic(head, 4096 + 24, BCACHE) {
        return Some("a bcache device");
    }
    if has_magic(head, 0, b"bluestore block device") {
        return Some("a Ceph OSD");
    }
    None
}

fn ends_with_gpt(tail: &[u8]) -> bool {
    [512, 4096].iter().any(|sector| tail.len().checked_sub(*sector).is_some_and(|at| has_magic(tail, at, b"EFI PART")))
}

fn has_magic(data: &[u8], at: usize, magic: &[u8]) -> bool {
    data.get(at..at + magic.len()) == Some(magic)
}

fn uuid(head: &[u8], at: usize) -> Option<String> {
    let bytes = head.get(at..at + 16)?;
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    Some(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(magics: &[(usize, &[u8])]) -> Vec<u8> {
        let mut data = vec![0; PROBED_BYTES as usize];
        for (at, magic) in magics {
            data[*at..at + magic.len()].copy_from_slice(magic);
        }
        data
    }

    #[test]
    fn only_zeroes_are_blank() {
        let zero = region(&[]);
        assert_eq!(identify(&zero, &zero), DeviceContents::Blank);
        for (case, head, tail) in [
            ("one byte in the middle of the start", region(&[(777_777, &[1])]), zero.clone()),
            ("one byte at the very start", region(&[(0, &[1])]), zero.clone()),
            ("one byte at the very end", zero.clone(), region(&[(PROBED_BYTES as usize - 1, &[1])])),
        ] {
            assert_eq!(identify(&head, &tail), DeviceContents::Unknown, "{case}");
        }
    }

    #[test]
    fn formats_are_detected_by_their_magic_numbers() {
        let boot: &[u8] = &[0x55, 0xaa];
        let gpt = DeviceContents::PartitionTable { kind: "GPT" };
        for (case, head, want) in [
            ("protective MBR and GPT", region(&[(510, boot), (512, b"EFI PART")]), gpt.clone()),
            ("MBR", region(&[(510, boot)]), DeviceContents::PartitionTable { kind: "MBR" }),
            ("LUKS", region(&[(0, b"LUKS\xba\xbe")]), DeviceContents::Member { kind: "a LUKS container" }),
            ("LVM", region(&[(512, b"LABELONE")]), DeviceContents::Member { kind: "an LVM physical volume" }),
            ("swap", region(&[(4086, b"SWAPSPACE2")]), DeviceContents::Member { kind: "swap space" }),
            (
                "a FAT file system, which has the magic number of a boot sector too",
                region(&[(510, boot), (82, b"FAT32   ")]),
                DeviceContents::FileSystem { kind: FileSystemKind::Vfat, uuid: None },
            ),
        ] {
            assert_eq!(identify(&head, &region(&[])), want, "{case}");
        }
        let backup = region(&[(PROBED_BYTES as usize - 512, b"EFI PART")]);
        assert_eq!(identify(&region(&[]), &backup), gpt, "only the backup table is left");
    }

    #[test]
    fn devices_smaller_than_the_probed_range_are_detected() {
        assert_eq!(identify(&[0; 512], &[]), DeviceContents::Blank);
        assert_eq!(identify(&[7; 100], &[]), DeviceContents::Unknown);
    }
}
