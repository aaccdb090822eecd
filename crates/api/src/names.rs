//! Names derived from other names. They are deterministic: a repeated step finds what the lost one made.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

/// The default prefix of [`provisioned_volume_name`].
pub const PROVISIONED_VOLUME_PREFIX: &str = "pvc";

/// The PersistentVolume, and the CreateVolume request, for a dynamically provisioned claim.
pub fn provisioned_volume(claim_uid: &str) -> String {
    provisioned_volume_name(PROVISIONED_VOLUME_PREFIX, None, claim_uid)
}

/// As [`provisioned_volume`], for a provisioner whose operator chose another prefix or a shorter name. `uid_length` is the
/// number of characters of the uid without its dashes; `None` takes the whole uid with its dashes.
pub fn provisioned_volume_name(prefix: &str, uid_length: Option<usize>, claim_uid: &str) -> String {
    let uid = match uid_length {
        None => claim_uid.to_owned(),
        Some(length) => claim_uid.chars().filter(|c| *c != '-').take(length).collect(),
    };
    format!("{prefix}-{uid}")
}

/// The VolumeAttachment for one volume on one node.
pub fn attachment(volume_handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", sha256_hex(&format!("{volume_handle}{driver}{node}")))
}

/// The finalizer by which the attacher of `driver` holds a VolumeAttachment or PersistentVolume.
pub fn attacher_finalizer(driver: &str) -> String {
    let mut clean: String =
        driver.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).collect();
    if clean.ends_with('-') {
        clean.push('X');
    }
    format!("external-attacher/{clean}")
}

/// The name of a CSI volume in `node.status.volumesAttached` and `volumesInUse`.
pub fn unique_volume(driver: &str, volume_handle: &str) -> String {
    format!("kubernetes.io/csi/{driver}^{volume_handle}")
}

/// Splits a unique volume name into driver and handle; `None` for anything that is not a CSI volume.
pub fn split_unique_volume(name: &str) -> Option<(&str, &str)> {
    let (driver, handle) = name.strip_prefix("kubernetes.io/csi/")?.split_once('^')?;
    (!driver.is_empty() && !handle.is_empty() && !handle.contains('^')).then_some((driver, handle))
}

/// The value of a label that tells one node's part of something from the others'. Labels are short: of a name that does not
/// fit, a digest stands for the end.
pub fn label(what: &str, node: &str) -> String {
    const LONGEST: usize = 63;
    let name = format!("{what}-{node}");
    if name.len() <= LONGEST {
        return name;
    }
    let digest = sha256_hex(&name);
    let kept: String = name.chars().take(LONGEST - 9).collect();
    format!("{}-{}", kept.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()), &digest[..8])
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
    fn a_provisioned_volume_is_named_after_the_claims_uid() {
        assert_eq!(provisioned_volume("ab-cd-ef"), "pvc-ab-cd-ef");
        assert_eq!(provisioned_volume_name("disk", Some(4), "ab-cd-ef"), "disk-abcd");
    }

    #[test]
    fn attacher_finalizer_keeps_letters_digits_and_dashes() {
        assert_eq!(attacher_finalizer("block.cleat.dev"), "external-attacher/block-cleat-dev");
        assert_eq!(attacher_finalizer("odd_"), "external-attacher/odd-X");
    }

    #[test]
    fn a_label_fits_whatever_the_node_is_called() {
        assert_eq!(label("external-provisioner", "n1"), "external-provisioner-n1");
        let (one, two) = (label("x", &"n.".repeat(60)), label("x", &"n.".repeat(61)));
        assert!(one.len() <= 63 && one != two, "{one} {two}");
    }

    #[test]
    fn unique_volume_name_splits_into_what_it_was_made_of() {
        let name = unique_volume("block.cleat.dev", "pvc-1");
        assert_eq!(split_unique_volume(&name), Some(("block.cleat.dev", "pvc-1")));
        for bad in
            ["", "kubernetes.io/nfs/x^y", "kubernetes.io/csi/d", "kubernetes.io/csi/d^a^b", "kubernetes.io/csi/^h"]
        {
            assert_eq!(split_unique_volume(bad), None, "{bad}");
        }
    }
}
