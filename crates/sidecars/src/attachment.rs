//! VolumeAttachment rules shared by the CSI attacher and the FlexVolume attacher.

use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::SidecarError;

/// The API server refuses a longer message.
const MAX_ERROR_MESSAGE_BYTES: usize = 1024;

/// Returns true if the change touched only `attachError` and `detachError`.
///
/// An attacher must not reconcile again because of the error it wrote itself: that would bypass the backoff. A repeated
/// notification of the same resource version is not such a change.
pub(crate) fn only_errors_differ(old: &VolumeAttachment, new: &VolumeAttachment) -> bool {
    let without_errors = |attachment: &VolumeAttachment| {
        let mut copy = attachment.clone();
        copy.metadata.resource_version = None;
        if let Some(status) = &mut copy.status {
            status.attach_error = None;
            status.detach_error = None;
        }
        copy.status.get_or_insert_default();
        copy
    };
    old.metadata.resource_version != new.metadata.resource_version && without_errors(old) == without_errors(new)
}

/// The error text, cut at a character boundary to what `status` accepts.
pub(crate) fn error_message(error: &SidecarError) -> String {
    let mut message = error.to_string();
    message.truncate(message.floor_char_boundary(MAX_ERROR_MESSAGE_BYTES));
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;
    use k8s_openapi::api::storage::v1::{VolumeAttachmentStatus, VolumeError};

    #[test]
    fn only_a_change_of_nothing_but_errors_is_ignored() {
        let volume = build::volume("v", "", "1Gi");
        let mut old = build::attachment(&volume, "n1");
        old.metadata.resource_version = Some("1".to_owned());
        let with = |change: &dyn Fn(&mut VolumeAttachment)| {
            let mut new = old.clone();
            new.metadata.resource_version = Some("2".to_owned());
            new.status.get_or_insert_default();
            change(&mut new);
            new
        };
        let error = || Some(VolumeError { message: Some("no".to_owned()), ..VolumeError::default() });
        let status = |change: &dyn Fn(&mut VolumeAttachmentStatus)| with(&|new| change(new.status.as_mut().unwrap()));
        for (case, new, ignored) in [
            ("an attach failed", status(&|s| s.attach_error = error()), true),
            ("a detach failed", status(&|s| s.detach_error = error()), true),
            ("the volume was attached", status(&|s| s.attached = true), false),
            (
                "the attachment is being deleted",
                with(&|new| new.metadata.deletion_timestamp = Some(build::time(1))),
                false,
            ),
            ("a finalizer was added", with(&|new| new.metadata.finalizers = Some(vec!["x".to_owned()])), false),
            ("the same version again", old.clone(), false),
        ] {
            assert_eq!(only_errors_differ(&old, &new), ignored, "{case}");
        }
    }
}
