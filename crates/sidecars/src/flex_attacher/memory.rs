//! Which attachments are due to be verified with their driver.
//!
//! Contract: filled by the periodic verification, emptied by the next reconcile of the attachment, whether its call
//! succeeds or not. If it is lost, for example in a restart, the next period fills it again; until then a volume that its
//! driver has lost stays reported as attached.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// Names of VolumeAttachments.
#[derive(Clone, Default)]
pub(super) struct PendingVerifications(Arc<Mutex<HashSet<String>>>);

impl PendingVerifications {
    pub(super) fn request(&self, attachment: &str) {
        self.0.lock().insert(attachment.to_owned());
    }

    /// Returns whether a verification is due, and removes it.
    pub(super) fn take(&self, attachment: &str) -> bool {
        self.0.lock().remove(attachment)
    }
}
