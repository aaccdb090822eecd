//! Names that are derived from other names. They are deterministic, so that a repeated step finds the object or volume that
//! an interrupted one created.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

/// The default of the first parameter of [`provisioned_volume_name`].
pub const PROVISIONED_VOLUME_PREFIX: &str = "pvc";

/// The name of the PersistentVolume, and of the CreateVolume request, for a dynamically provisioned claim.
pub fn provisioned_volume(claim_uid: &str) -> String {
    provisioned_volume_name(PROVISIONED_VOLUME_PREFIX, None, claim_uid)
}

/// The same for a provisioner that is configured with another prefix or a shorter uid. With `uid_length`, the name
/// contains that many characters of the uid, without dashes.
pub fn provisioned_volume_name(prefix: &str, uid_length: Option<usize>, claim_uid: &str) -> String {
    match uid_length {
        None => format!("{prefix}-{claim_uid}"),
        Some(length) => {
            let uid: String = claim_uid.chars().filter(|c| *c != '-').take(length).collect();
            format!("{prefix}-{uid}")
        }
    }
}

/// Returns true if [`provisioned_volume_name`] gives this volume name to the claim, for any prefix and the whole uid. A
/// name with a shortened uid does not identify a claim: the result is false.
pub fn is_provisioned_volume(volume_name: &str, claim_uid: &str) -> bool {
    !claim_uid.is_empty() && volume_name.strip_suffix(claim_uid).is_some_and(|prefix| prefix.ends_with('-'))
}

/// The name of the VolumeAttachment for one volume on one node.
pub fn attachment(volume_handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", sha256_hex(&format!("{volume_handle}{driver}{node}")))
}

/// The finalizer that the attacher of `driver` puts on VolumeAttachments and PersistentVolumes.
pub fn attacher_finalizer(driver: &str) -> String {
    let mut clean: String =
        driver.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).collect();
    if clean.ends_with('-') {
        clean.push('X');
    }
    format!("external-attacher/{clean}")
}

/// The name of a CSI volume in `node.status.volumesAttached` and `volumesInUse`.
pub fn unique_volume_name(driver: &str, volume_handle: &str) -> String {
    format!("kubernetes.io/csi/{driver}^{volume_handle}")
}

/// Splits a unique volume name into driver and handle; `None` if it does not name a CSI volume.
pub fn split_unique_volume_name(name: &str) -> Option<(&str, &str)> {
    let (driver, handle) = name.strip_prefix("kubernetes.io/csi/")?.split_once('^')?;
    (!driver.is_empty() && !handle.is_empty() && !handle.contains('^')).then_some((driver, handle))
}

/// The label value `<component>-<node>`. A value over the limit of a label is cut, and ends with a digest of the whole.
pub fn node_label_value(component: &str, node: &str) -> String {
    const MAX_LABEL_BYTES: usize = 63;
    const DIGEST_BYTES: usize = 8;
    let name = format!("{component}-{node}");
    if name.len() <= MAX_LABEL_BYTES {
        return name;
    }
    let digest = sha256_hex(&name);
    let prefix: String = name.chars().take(MAX_LABEL_BYTES - DIGEST_BYTES - 1).collect();
    format!("{}-{}", prefix.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()), &digest[..DIGEST_BYTES])
}

pub fn sha256_hex(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attachment_name_is_the_hash_of_handle_driver_and_node() {
        let name = attachment("h", "d", "n");
        assert_eq!(name, format!("csi-{}", sha256_hex("hdn")));
        assert_eq!(name.len(), 4 + 64);
        assert_eq!(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }

    #[test]
    fn the_name_of_a_provisioned_volume_identifies_its_claim() {
        let uid = "0f8fad5b-d9cb-469f-a165-70867728950e";
        assert_eq!(provisioned_volume(uid), format!("pvc-{uid}"));
        for (case, name, uid, want) in [
            ("default name", provisioned_volume(uid), uid, true),
            ("another prefix", provisioned_volume_name("disk", None, uid), uid, true),
            ("a shortened uid", provisioned_volume_name("disk", Some(4), uid), uid, false),
            ("the volume of another claim", provisioned_volume("1"), uid, false),
            ("no uid", provisioned_volume(""), "", false),
            ("no prefix", uid.to_owned(), uid, false),
        ] {
            assert_eq!(is_provisioned_volume(&name, uid), want, "{case}");
        }
        assert_eq!(provisioned_volume_name("disk", Some(4), "ab-cd-ef"), "disk-abcd");
    }

    #[test]
    fn attacher_finalizer_keeps_letters_digits_and_dashes() {
        assert_eq!(attacher_finalizer("block.cleat.dev"), "external-attacher/block-cleat-dev");
        assert_eq!(attacher_finalizer("odd_"), "external-attacher/odd-X");
    }

    #[test]
    fn a_label_value_fits_for_every_node_name() {
        assert_eq!(node_label_value("external-provisioner", "n1"), "external-provisioner-n1");
        let (one, two) = (node_label_value("x", &"n.".repeat(60)), node_label_value("x", &"n.".repeat(61)));
        assert!(one.len() <= 63 && one != two, "{one} {two}");
    }

    #[test]
    fn a_unique_volume_name_splits_into_driver_and_handle() {
        let name = unique_volume_name("block.cleat.dev", "pvc-1");
        assert_eq!(split_unique_volume_name(&name), Some(("block.cleat.dev", "pvc-1")));
        for bad in
            ["", "kubernetes.io/nfs/x^y", "kubernetes.io/csi/d", "kubernetes.io/csi/d^a^b", "kubernetes.io/csi/^h"]
        {
            assert_eq!(split_unique_volume_name(bad), None, "{bad}");
        }
    }
}
