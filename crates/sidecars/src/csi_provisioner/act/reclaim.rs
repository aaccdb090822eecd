//! Deletes released volumes, and writes the provisioner's finalizer on PersistentVolumes.

use std::collections::HashMap;

use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::finalizer;
use cleat_csi::CallError;
use cleat_csi::v1::DeleteVolumeRequest;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, WriteError};
use k8s_openapi::api::core::v1::PersistentVolume;
use tracing::{debug, info};

use crate::SidecarError;
use crate::csi_provisioner::Provisioner;
use crate::csi_provisioner::decide::reclaim::{DeletionSecret, ReclaimDecision, deletion_secrets};

/// How often the removal of a finalizer is tried when other clients write the volume at the same time.
const MAX_FINALIZER_WRITES: usize = 8;

impl Provisioner {
    pub(in crate::csi_provisioner) async fn apply_reclaim(
        &self,
        volume: &PersistentVolume,
        decision: ReclaimDecision,
    ) -> Result<Outcome, SidecarError> {
        match decision {
            ReclaimDecision::Nothing => {}
            ReclaimDecision::AddFinalizer => {
                let finalizers = volume.metadata.finalizers_with(finalizer::PROVISIONER);
                write::set_finalizers(&self.context.client, volume, &finalizers).await?;
            }
            ReclaimDecision::RemoveFinalizer => self.remove_volume_finalizer(volume.clone()).await?,
            ReclaimDecision::WaitForDetach(node) => {
                debug!(node, "released volume is still attached");
                let name = volume.metadata.name.as_deref().unwrap_or_default();
                let why = format!("persistentvolume {name} is still attached to node {node}");
                self.report_failed_delete(volume, why);
            }
            ReclaimDecision::Refuse(why) => self.report_failed_delete(volume, why),
            ReclaimDecision::Delete { handle, secret } => self.delete(volume, &handle, &secret).await?,
        }
        Ok(Outcome::Done)
    }

    async fn delete(
        &self,
        volume: &PersistentVolume,
        handle: &str,
        secret: &DeletionSecret,
    ) -> Result<(), SidecarError> {
        let deleted = async {
            let found = self.deletion_secret(secret).await?;
            let secrets = deletion_secrets(secret, found).map_err(SidecarError::Refused)?;
            self.call_delete(handle, secrets).await.map_err(SidecarError::from)
        };
        if let Err(error) = deleted.await {
            self.report_failed_delete(volume, error.to_string());
            return Err(error);
        }
        cleat_crash::point("provision:volume-deleted");
        // Before the PersistentVolume is deleted: after that, other controllers remove their finalizers, and the writes
        // would conflict.
        self.remove_volume_finalizer(volume.clone()).await?;
        cleat_crash::point("provision:record-released");
        if let Some(deleting) = write::delete(&self.context.client, volume).await? {
            // A reconcile before the watch shows the deletion must not call DeleteVolume again.
            self.observer.volumes.observe_write(deleting);
        }
        info!(volume = volume.metadata.name, "volume deleted");
        Ok(())
    }

    fn report_failed_delete(&self, volume: &PersistentVolume, why: String) {
        self.recorder.warning(volume, "VolumeFailedDelete", why);
    }

    pub(super) async fn call_delete(&self, handle: &str, secrets: HashMap<String, String>) -> Result<(), CallError> {
        let request = DeleteVolumeRequest { volume_id: handle.to_owned(), secrets };
        self.driver.client.delete_volume(request).await.map(drop)
    }

    /// Removes the provisioner's finalizer. If the volume is being deleted, other controllers remove theirs at the same
    /// time: after a conflict the volume is read again.
    async fn remove_volume_finalizer(&self, volume: PersistentVolume) -> Result<(), WriteError> {
        let (key, uid) = (Key::of(&volume.metadata), volume.metadata.uid().to_owned());
        let has_finalizer =
            |v: &PersistentVolume| v.metadata.uid() == uid && v.metadata.has_finalizer(finalizer::PROVISIONER);
        let mut current = Some(volume);
        for _ in 0..MAX_FINALIZER_WRITES {
            let Some(volume) = current.filter(has_finalizer) else { return Ok(()) };
            let finalizers = volume.metadata.finalizers_without(finalizer::PROVISIONER);
            match write::set_finalizers(&self.context.client, &volume, &finalizers).await {
                Err(error) if error.is_conflict() => current = write::get_live(&self.context.client, &key).await?,
                Ok(updated) => {
                    self.observer.volumes.observe_write(updated);
                    return Ok(());
                }
                Err(error) => return error.ignore_not_found(),
            }
        }
        Ok(())
    }
}
