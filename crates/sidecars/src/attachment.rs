//! What everybody who serves VolumeAttachments has in common.

use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::Failure;

/// The server refuses a longer message.
const ERROR_BYTES: usize = 1024;

/// Our own note of a failure must not wake us: that would undo the backoff.
pub(crate) fn only_errors_differ(old: &VolumeAttachment, new: &VolumeAttachment) -> bool {
    let bare = |attachment: &VolumeAttachment| {
        let mut bare = attachment.clone();
        bare.metadata.resource_version = None;
        if let Some(status) = &mut bare.status {
            status.attach_error = None;
            status.detach_error = None;
        }
        bare.status.get_or_insert_default();
        bare
    };
    old.metadata.resource_version != new.metadata.resource_version && bare(old) == bare(new)
}

/// A failure as the attachment's status can hold it.
pub(crate) fn error_message(failure: &Failure) -> String {
    let mut message = failure.to_string();
    message.truncate(message.floor_char_boundary(ERROR_BYTES));
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_testing::build;
    use k8s_openapi::api::storage::v1::{VolumeAttachmentStatus, VolumeError};

    #[test]
    fn a_note_of_a_failure_wakes_nobody_and_everything_else_does() {
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
        let failure = || Some(VolumeError { message: Some("no".to_owned()), ..VolumeError::default() });
        let status = |change: &dyn Fn(&mut VolumeAttachmentStatus)| with(&|new| change(new.status.as_mut().unwrap()));
        for (case, new, quiet) in [
            ("an attach failed", status(&|s| s.attach_error = failure()), true),
            ("a detach failed", status(&|s| s.detach_error = failure()), true),
            ("it is attached", status(&|s| s.attached = true), false),
            ("it is deleted", with(&|new| new.metadata.deletion_timestamp = Some(build::time(1))), false),
            ("somebody holds it", with(&|new| new.metadata.finalizers = Some(vec!["x".to_owned()])), false),
            ("the same once more", old.clone(), false),
        ] {
            assert_eq!(only_errors_differ(&old, &new), quiet, "{case}");
        }
    }
}
