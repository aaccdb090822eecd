//! Tables of requests and how they are parsed.
use super::*;
use cleat_csi::{Code, v1::volume_capability::AccessMode};

fn mount(fs_type: &str, mode: Mode) -> VolumeCapability {
    let mount = MountVolume { fs_type: fs_type.into(), ..Default::default() };
    VolumeCapability {
        access_type: Some(AccessType::Mount(mount)),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

fn block(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Block(Default::default())),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

#[test]
fn sizes_are_rounded_up_to_what_the_file_system_needs_but_never_above_the_limit() {
    let (ext4, xfs) = (Some(Format::Ext4), Some(Format::Xfs));
    for (case, required, limit, format, want) in [
        ("nothing asked", 0, 0, ext4, Ok(DEFAULT_VOLUME_BYTES)),
        ("only a limit", 0, 100 * MIB, ext4, Ok(100 * MIB)),
        ("only an odd limit", 0, 100 * MIB + 1, ext4, Ok(100 * MIB)),
        ("odd size", MIB * 5 + 1, 0, ext4, Ok(6 * MIB)),
        ("tiny ext4", 1, 0, ext4, Ok(MIN_EXT4_BYTES)),
        ("tiny xfs", 1, 0, xfs, Ok(MIN_XFS_BYTES)),
        ("tiny block", 1, 0, None, Ok(MIB)),
        ("exact", 10 * MIB, 10 * MIB, ext4, Ok(10 * MIB)),
        ("rounding would pass the limit", 10 * MIB - 1, 10 * MIB - 1, ext4, Err(Code::OutOfRange)),
        ("xfs under a low limit", MIB, 200 * MIB, xfs, Err(Code::OutOfRange)),
        ("too large", MAX_VOLUME_BYTES + 1, 0, ext4, Err(Code::OutOfRange)),
        ("near the end of numbers", i64::MAX as u64, 0, ext4, Err(Code::OutOfRange)),
    ] {
        let range = SizeRange { required, limit };
        assert_eq!(range.choose(format, None).map_err(|status| status.code()), want, "{case}");
    }
    for (case, required, limit, source, want) in [
        ("as large as its source", 0, 0, 50 * MIB, Ok(50 * MIB)),
        ("larger than its source", 80 * MIB, 0, 50 * MIB, Ok(80 * MIB)),
        ("smaller than its source", 10 * MIB, 0, 50 * MIB, Ok(50 * MIB)),
        ("limited below its source", 10 * MIB, 20 * MIB, 50 * MIB, Err(Code::OutOfRange)),
    ] {
        let chosen = SizeRange { required, limit }.choose(ext4, Some(source));
        assert_eq!(chosen.map_err(|status| status.code()), want, "{case}");
    }
    for (case, required, limit, want) in [
        ("grows", 80 * MIB, 0, Ok(80 * MIB)),
        ("odd", 80 * MIB - 1, 0, Ok(80 * MIB)),
        ("large enough already", 10 * MIB, 0, Ok(50 * MIB)),
        ("nothing asked", 0, 0, Ok(50 * MIB)),
        ("never shrinks", 10 * MIB, 20 * MIB, Err(Code::OutOfRange)),
        ("too large", MAX_VOLUME_BYTES + 1, 0, Err(Code::OutOfRange)),
    ] {
        let expanded = SizeRange { required, limit }.choose_expanded(50 * MIB);
        assert_eq!(expanded.map_err(|status| status.code()), want, "{case}");
    }
    for (case, required_bytes, limit_bytes) in [("negative", -1, 0), ("upside down", 2, 1)] {
        let range = CapacityRange { required_bytes, limit_bytes };
        assert_eq!(SizeRange::parse(Some(&range)).unwrap_err().code(), Code::InvalidArgument, "{case}");
    }
}

#[test]
fn ids_are_safe_file_names_and_stable() {
    assert_eq!(id_for("pvc-0b3c"), "pvc-0b3c");
    for name in ["../../etc/passwd", "a/b", ".hidden", "", "with space", "ü", &"x".repeat(129), &id_for("a/b")] {
        let id = id_for(name);
        assert!(is_id(&id), "{name:?} gives {id:?}");
        assert_ne!(id, name);
        assert_eq!(id, id_for(name));
    }
    for id in ["..", ".", "", "/", "a/../b", "-x", "a\0b", "a\n"] {
        assert!(!is_id(id), "{id:?}");
    }
}

#[test]
fn capabilities_that_would_corrupt_data_are_refused() {
    use Mode::*;
    for (case, capability, want) in [
        ("one writer", mount("", SingleNodeWriter), Some((Sharing::Exclusive, false))),
        ("many readers", mount("xfs", MultiNodeReaderOnly), Some((Sharing::Readers, true))),
        ("coordinated writers", block(MultiNodeMultiWriter), Some((Sharing::Writers, false))),
        ("many writers on a file system", mount("", MultiNodeMultiWriter), None),
        ("one writer among readers", mount("", MultiNodeSingleWriter), None),
        ("unknown file system", mount("zfs", SingleNodeWriter), None),
        ("no mode", mount("", Unknown), None),
        ("nothing", VolumeCapability::default(), None),
    ] {
        let parsed = Capability::parse("volume_capability", &capability);
        assert_eq!(parsed.ok().map(|parsed| (parsed.sharing, parsed.read_only)), want, "{case}");
    }
}

#[test]
fn the_file_system_of_the_capability_takes_precedence_over_the_class() {
    let parameters = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect::<HashMap<_, _>>()
    };
    let writer = Mode::SingleNodeWriter;
    for (case, capability, class, want) in [
        ("default", mount("", writer), vec![], Some(Some(Format::Ext4))),
        ("class", mount("", writer), vec![("fsType", "xfs")], Some(Some(Format::Xfs))),
        ("capability wins", mount("ext4", writer), vec![("fsType", "xfs")], Some(Some(Format::Ext4))),
        ("raw block", block(writer), vec![], Some(None)),
        ("sidecar keys pass", mount("", writer), vec![("csi.storage.k8s.io/pvc/name", "a")], Some(Some(Format::Ext4))),
        ("typing error", mount("", writer), vec![("fstyp", "xfs")], None),
        ("unknown file system", mount("", writer), vec![("fsType", "zfs")], None),
    ] {
        let parsed = VolumeRequirements::parse(None, &[capability], &parameters(&class), &HashMap::new());
        assert_eq!(parsed.ok().map(|parsed| parsed.file_system), want, "{case}");
    }
    let both = [mount("", writer), block(writer)];
    assert!(
        VolumeRequirements::parse(None, &both, &HashMap::new(), &HashMap::new()).is_err(),
        "block and mount together"
    );
}
