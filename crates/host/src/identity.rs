//! What is on a block device? Reads the places where file systems, volume managers and partition tables leave their marks, and
//! calls a device blank only if every byte it read is zero. Never writes.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The start of the device, where all but a few formats have their mark, and as much of its end (backup partition table,
/// RAID members of old formats).
const REGION: u64 = 1 << 20;

/// What a device holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Nothing: every probed byte is zero.
    Blank,
    FileSystem {
        kind: Kind,
        uuid: Option<String>,
    },
    /// Part of something larger, or not for files: swap, LVM, LUKS, RAID …
    Member {
        kind: &'static str,
    },
    PartitionTable {
        kind: &'static str,
    },
    /// Something that is none of the above. It is somebody's data until proven otherwise.
    Unknown,
}

/// The file systems a probe tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
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

impl Kind {
    /// The name that mount(2) takes.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ext2 => "ext2",
            Kind::Ext3 => "ext3",
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
            Kind::Btrfs => "btrfs",
            Kind::Vfat => "vfat",
            Kind::Exfat => "exfat",
            Kind::Ntfs => "ntfs3",
            Kind::F2fs => "f2fs",
            Kind::Squashfs => "squashfs",
            Kind::Erofs => "erofs",
            Kind::Iso9660 => "iso9660",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Identity::Blank => f.write_str("nothing"),
            Identity::FileSystem { kind, uuid: Some(uuid) } => write!(f, "an {kind} file system ({uuid})"),
            Identity::FileSystem { kind, uuid: None } => write!(f, "an {kind} file system"),
            Identity::Member { kind } => write!(f, "{kind}"),
            Identity::PartitionTable { kind } => write!(f, "a {kind} partition table"),
            Identity::Unknown => f.write_str("data of unknown kind"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("probe {device:?}: {step}")]
    Read { device: PathBuf, step: &'static str, source: io::Error },
    /// An empty device is one that is not there yet, or not any more; it is not blank.
    #[error("probe {device:?}: it has no size")]
    Empty { device: PathBuf },
}

/// Reads what is on `device` (a block device or an image file).
pub fn probe(device: &Path) -> Result<Identity, ProbeError> {
    let error = |step| move |source| ProbeError::Read { device: device.into(), step, source };
    let mut file = File::open(device).map_err(error("open"))?;
    let size = file.seek(SeekFrom::End(0)).map_err(error("find its size"))?;
    if size == 0 {
        return Err(ProbeError::Empty { device: device.into() });
    }
    let mut head = vec![0; size.min(REGION) as usize];
    file.seek(SeekFrom::Start(0)).map_err(error("seek"))?;
    file.read_exact(&mut head).map_err(error("read its start"))?;
    let mut tail = vec![0; (size - head.len() as u64).min(REGION) as usize];
    file.seek(SeekFrom::Start(size - tail.len() as u64)).map_err(error("seek"))?;
    file.read_exact(&mut tail).map_err(error("read its end"))?;
    Ok(identify(&head, &tail))
}

fn identify(head: &[u8], tail: &[u8]) -> Identity {
    if head.iter().chain(tail).all(|b| *b == 0) {
        return Identity::Blank;
    }
    // A partition table of the newer sort comes first: the space before its first partition may hold stale marks. The older
    // sort comes last: its mark is two bytes that boot sectors of file systems carry too.
    if has(head, 512, b"EFI PART") || has(head, 4096, b"EFI PART") || ends_with_gpt(tail) {
        return Identity::PartitionTable { kind: "GPT" };
    }
    if let Some(kind) = member(head, tail) {
        return Identity::Member { kind };
    }
    if let Some((kind, uuid)) = file_system(head) {
        return Identity::FileSystem { kind, uuid };
    }
    if has(head, 510, &[0x55, 0xaa]) {
        return Identity::PartitionTable { kind: "MBR" };
    }
    Identity::Unknown
}

fn file_system(head: &[u8]) -> Option<(Kind, Option<String>)> {
    let marks: [(usize, &[u8], Kind, Option<usize>); 12] = [
        (0, b"XFSB", Kind::Xfs, Some(32)),
        (0x10040, b"_BHRfS_M", Kind::Btrfs, Some(0x10020)),
        (82, b"FAT32   ", Kind::Vfat, None),
        (54, b"FAT16   ", Kind::Vfat, None),
        (54, b"FAT12   ", Kind::Vfat, None),
        (54, b"FAT     ", Kind::Vfat, None),
        (3, b"EXFAT   ", Kind::Exfat, None),
        (3, b"NTFS    ", Kind::Ntfs, None),
        (1024, &[0x10, 0x20, 0xf5, 0xf2], Kind::F2fs, Some(1024 + 108)),
        (0, b"hsqs", Kind::Squashfs, None),
        (1024, &[0xe2, 0xe1, 0xf5, 0xe0], Kind::Erofs, Some(1024 + 48)),
        (0x8001, b"CD001", Kind::Iso9660, None),
    ];
    if has(head, 1024 + 56, &[0x53, 0xef]) {
        return Some((extended(head), uuid(head, 1024 + 104)));
    }
    marks
        .iter()
        .find(|(at, mark, _, _)| has(head, *at, mark))
        .map(|(_, _, kind, id)| (*kind, id.and_then(|at| uuid(head, at))))
}

/// Which of the ext family: by the features it uses, as the kernel's drivers tell them apart.
fn extended(head: &[u8]) -> Kind {
    const HAS_JOURNAL: u32 = 0x4;
    // Extents, 64-bit, multi-mount protection, flexible groups and what came after.
    const EXT4_INCOMPATIBLE: u32 = !0x1f;
    // Huge files, checksummed groups and what came after.
    const EXT4_READ_ONLY: u32 = !0x7;
    let word = |at: usize| head.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
    let (compatible, incompatible, read_only) = (word(1024 + 92), word(1024 + 96), word(1024 + 100));
    if incompatible & EXT4_INCOMPATIBLE != 0 || read_only & EXT4_READ_ONLY != 0 {
        Kind::Ext4
    } else if compatible & HAS_JOURNAL != 0 {
        Kind::Ext3
    } else {
        Kind::Ext2
    }
}

fn member(head: &[u8], tail: &[u8]) -> Option<&'static str> {
    const MD: &[u8] = &[0xfc, 0x4e, 0x2b, 0xa9];
    const BCACHE: &[u8] = &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca];
    if has(head, 0, b"LUKS\xba\xbe") {
        return Some("a LUKS container");
    }
    if (0..4).any(|sector| has(head, sector * 512, b"LABELONE")) {
        return Some("an LVM physical volume");
    }
    // Swap marks the end of its first page, and pages differ between machines.
    if [4096, 8192, 16384, 65536]
        .iter()
        .any(|page| has(head, page - 10, b"SWAPSPACE2") || has(head, page - 10, b"SWAP-SPACE"))
    {
        return Some("swap space");
    }
    // Formats 1.1 and 1.2 at the start; 1.0 and 0.90 near the end, aligned to 4 and 64 KiB.
    let near_end = [8192, 12288, 65536, 131072]
        .iter()
        .any(|back| tail.len().checked_sub(*back).is_some_and(|at| has(tail, at, MD)));
    if has(head, 0, MD) || has(head, 4096, MD) || near_end {
        return Some("a RAID member");
    }
    if has(head, 4096 + 24, BCACHE) {
        return Some("a bcache device");
    }
    if has(head, 0, b"bluestore block device") {
        return Some("a Ceph OSD");
    }
    None
}

fn ends_with_gpt(tail: &[u8]) -> bool {
    [512, 4096].iter().any(|sector| tail.len().checked_sub(*sector).is_some_and(|at| has(tail, at, b"EFI PART")))
}

fn has(data: &[u8], at: usize, mark: &[u8]) -> bool {
    data.get(at..at + mark.len()) == Some(mark)
}

fn uuid(head: &[u8], at: usize) -> Option<String> {
    let bytes = head.get(at..at + 16)?;
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    Some(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(marks: &[(usize, &[u8])]) -> Vec<u8> {
        let mut data = vec![0; REGION as usize];
        for (at, mark) in marks {
            data[*at..at + mark.len()].copy_from_slice(mark);
        }
        data
    }

    #[test]
    fn only_zeroes_are_blank() {
        let zero = region(&[]);
        assert_eq!(identify(&zero, &zero), Identity::Blank);
        for (case, head, tail) in [
            ("one byte in the middle of the start", region(&[(777_777, &[1])]), zero.clone()),
            ("one byte at the very start", region(&[(0, &[1])]), zero.clone()),
            ("one byte at the very end", zero.clone(), region(&[(REGION as usize - 1, &[1])])),
        ] {
            assert_eq!(identify(&head, &tail), Identity::Unknown, "{case}");
        }
    }

    #[test]
    fn marks_are_told_apart() {
        let boot: &[u8] = &[0x55, 0xaa];
        let gpt = Identity::PartitionTable { kind: "GPT" };
        for (case, head, want) in [
            ("protective MBR and GPT", region(&[(510, boot), (512, b"EFI PART")]), gpt.clone()),
            ("MBR", region(&[(510, boot)]), Identity::PartitionTable { kind: "MBR" }),
            ("LUKS", region(&[(0, b"LUKS\xba\xbe")]), Identity::Member { kind: "a LUKS container" }),
            ("LVM", region(&[(512, b"LABELONE")]), Identity::Member { kind: "an LVM physical volume" }),
            ("swap", region(&[(4086, b"SWAPSPACE2")]), Identity::Member { kind: "swap space" }),
            (
                "a FAT file system has a boot sector's mark too",
                region(&[(510, boot), (82, b"FAT32   ")]),
                Identity::FileSystem { kind: Kind::Vfat, uuid: None },
            ),
        ] {
            assert_eq!(identify(&head, &region(&[])), want, "{case}");
        }
        let backup = region(&[(REGION as usize - 512, b"EFI PART")]);
        assert_eq!(identify(&region(&[]), &backup), gpt, "only the backup table is left");
    }

    #[test]
    fn tiny_devices_do_not_confuse_the_probe() {
        assert_eq!(identify(&[0; 512], &[]), Identity::Blank);
        assert_eq!(identify(&[7; 100], &[]), Identity::Unknown);
    }
}
