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
