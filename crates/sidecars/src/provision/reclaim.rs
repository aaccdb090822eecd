//! Deletes released volumes, and holds the records of those that are to be deleted one day.

use std::collections::HashMap;

use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::finalizer;
use cleat_csi::CallError;
use cleat_csi::v1::DeleteVolumeRequest;
use cleat_runtime::Outcome;
use cleat_runtime::write::{self, WriteError};
use k8s_openapi::api::core::v1::PersistentVolume;
use tracing::{debug, info};

use super::Provisioner;
use super::decide::volume::{Credentials, VolumeDecision};
use crate::Failure;

/// How often a finalizer is taken off again after somebody else wrote the record in between.
const FINALIZER_TRIES: usize = 8;

impl Provisioner {
    pub(super) async fn settle_volume(
        &self,
        volume: &PersistentVolume,
        decision: VolumeDecision,
    ) -> Result<Outcome, Failure> {
        match decision {
            VolumeDecision::Nothing => {}
            VolumeDecision::Hold => {
                let finalizers = volume.metadata.finalizers_with(finalizer::PROVISIONER);
                write::set_finalizers(&self.context.client, volume, &finalizers).await?;
            }
            VolumeDecision::Release => self.release(volume.clone()).await?,
            VolumeDecision::WaitForDetach(node) => {
                debug!(node, "released volume is still attached");
                let name = volume.metadata.name.as_deref().unwrap_or_default();
                let why = format!("persistentvolume {name} is still attached to node {node}");
                self.recorder.warning(volume, "VolumeFailedDelete", why);
            }
            VolumeDecision::Refuse(why) => self.recorder.warning(volume, "VolumeFailedDelete", why),
            VolumeDecision::Delete { handle, secret } => {
                let secrets = self.deletion_secrets(volume, secret).await?;
                if let Err(error) = self.delete(&handle, secrets).await {
                    self.recorder.warning(volume, "VolumeFailedDelete", error.to_string());
                    return Err(error.into());
                }
                cleat_crash::point("provision:volume-deleted");
                // Before the record is deleted: from then on others take their finalizers off, and would be in the way.
                self.release(volume.clone()).await?;
                cleat_crash::point("provision:record-released");
                if let Some(going) = write::delete(&self.context.client, volume).await? {
                    // Seen at once: what is deleted is not deleted again because the watch is behind.
                    self.observed.volumes.observe_write(going);
                }
                info!(volume = volume.metadata.name, "volume deleted");
            }
        }
        Ok(Outcome::Done)
    }

    async fn deletion_secrets(
        &self,
        volume: &PersistentVolume,
        secret: Credentials,
    ) -> Result<HashMap<String, String>, Failure> {
        let (key, found) = match secret {
            Credentials::None => return Ok(HashMap::new()),
            Credentials::Recorded(key) => {
                let found = self.secret(&key).await;
                (
                    key,
                    found
                        .or_else(|error| error.ignore_not_found().map(|()| None))
                        .map(Option::unwrap_or_default)
                        .map(Some),
                )
            }
            Credentials::OfClass(key) => {
                let found = self.secret(&key).await;
                (key, found)
            }
        };
        match found {
            Ok(Some(secrets)) => Ok(secrets),
            Ok(None) => {
                let why = format!("error getting secret {key}: not found");
                self.recorder.warning(volume, "VolumeFailedDelete", why.clone());
                Err(Failure::Refused(why))
            }
            Err(error) => {
                self.recorder.warning(volume, "VolumeFailedDelete", error.to_string());
                Err(error.into())
            }
        }
    }

    pub(super) async fn delete(&self, handle: &str, secrets: HashMap<String, String>) -> Result<(), CallError> {
        let request = DeleteVolumeRequest { volume_id: handle.to_owned(), secrets };
        self.driver.client.delete_volume(request).await.map(drop)
    }

    /// Takes the provisioner's finalizer off the record. Where somebody has asked to delete it, others take theirs off at
    /// the same time: it is read again after a conflict.
    async fn release(&self, volume: PersistentVolume) -> Result<(), WriteError> {
        let (key, uid) = (Key::of(&volume.metadata), volume.metadata.uid().to_owned());
        let mut now = Some(volume);
        for _ in 0..FINALIZER_TRIES {
            let ours =
                |v: &PersistentVolume| v.metadata.uid() == uid && v.metadata.has_finalizer(finalizer::PROVISIONER);
            let Some(held) = now.filter(ours) else { return Ok(()) };
            let finalizers = held.metadata.finalizers_without(finalizer::PROVISIONER);
            match write::set_finalizers(&self.context.client, &held, &finalizers).await {
                Err(error) if error.is_conflict() => now = write::get_live(&self.context.client, &key).await?,
                Ok(released) => {
                    self.observed.volumes.observe_write(released);
                    return Ok(());
                }
                Err(error) => return error.ignore_not_found(),
            }
        }
        Ok(())
    }
}
