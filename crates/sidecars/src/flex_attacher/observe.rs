//! From the attachment cache and the driver registry to the snapshot of one attachment.

use std::sync::Arc;

use cleat_api::flex::{self, FlexVolume};
use cleat_api::key::Meta as _;
use cleat_flex::{DriverState, Drivers};
use cleat_runtime::Cache;
use k8s_openapi::api::storage::v1::VolumeAttachment;

use super::decide::{FlexSnapshot, finalizer};

#[derive(Clone)]
pub(super) struct FlexAttachmentObserver {
    pub(super) attachments: Cache<VolumeAttachment>,
    pub(super) drivers: Drivers,
}

pub(super) fn is_ours(attachment: &VolumeAttachment) -> bool {
    attachment.spec.attacher == flex::ATTACHER
}

impl FlexAttachmentObserver {
    /// Returns `None` if the attachment does not exist or belongs to another attacher.
    pub(super) fn attachment(
        &self,
        name: &str,
        needs_verification: bool,
    ) -> Option<(Arc<VolumeAttachment>, FlexSnapshot)> {
        let attachment = self.attachments.named(name).filter(|attachment| is_ours(attachment))?;
        let volume = FlexVolume::from_attachment(&attachment);
        let snapshot = FlexSnapshot {
            driver: volume.as_ref().map_or(DriverState::Absent, |volume| self.drivers.state(&volume.driver)),
            deleting: attachment.metadata.is_deleting(),
            has_finalizer: attachment.metadata.has_finalizer(&finalizer()),
            attached: attachment.status.as_ref().is_some_and(|status| status.attached),
            needs_verification,
            volume,
        };
        Some((attachment, snapshot))
    }

    /// The names of all attachments of this attacher.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        let ours = self.attachments.each().filter(|attachment| is_ours(attachment));
        ours.filter_map(|attachment| attachment.metadata.name.clone())
    }
}
