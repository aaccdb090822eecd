//! Finalizers on claims, on the sources of clones and on snapshots. Every function is idempotent.

use cleat_api::key::{Key, Meta as _};
use cleat_api::well_known::finalizer;
use cleat_runtime::write::{self, WriteError};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use crate::csi_provisioner::Provisioner;
use crate::csi_provisioner::decide::SourceFinalizerDecision;
use crate::csi_provisioner::snapshots::VolumeSnapshot;

impl Provisioner {
    /// The claim cannot disappear from now on. A claim that no longer exists needs no finalizer: its call is a repeated
    /// one, and the memory has it.
    pub(super) async fn add_claim_finalizer(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        let Some(current) = self.current(claim) else { return Ok(()) };
        self.add_finalizer(&current, finalizer::PROVISIONING).await
    }

    pub(super) async fn remove_claim_finalizer(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        if !claim.metadata.has_finalizer(finalizer::PROVISIONING) {
            return Ok(());
        }
        let finalizers = claim.metadata.finalizers_without(finalizer::PROVISIONING);
        match write::set_finalizers(&self.context.client, claim, &finalizers).await {
            Ok(updated) => {
                self.observer.claims.observe_write(updated);
                Ok(())
            }
            Err(error) => error.ignore_not_found(),
        }
    }

    /// Removes the finalizer from the cached version of the claim, which has the finalizer that this process added.
    pub(super) async fn remove_current_claim_finalizer(&self, claim: &PersistentVolumeClaim) -> Result<(), WriteError> {
        match self.current(claim) {
            Some(current) => self.remove_claim_finalizer(&current).await,
            None => Ok(()),
        }
    }

    /// The source cannot disappear until it is cloned.
    pub(super) async fn add_source_finalizer(&self, source: &PersistentVolumeClaim) -> Result<(), WriteError> {
        self.add_finalizer(source, finalizer::CLONING_PROTECTION).await
    }

    async fn add_finalizer(&self, claim: &PersistentVolumeClaim, name: &str) -> Result<(), WriteError> {
        if claim.metadata.has_finalizer(name) {
            return Ok(());
        }
        let finalizers = claim.metadata.finalizers_with(name);
        let updated = write::set_finalizers(&self.context.client, claim, &finalizers).await?;
        self.observer.claims.observe_write(updated);
        Ok(())
    }

    pub(in crate::csi_provisioner) async fn apply_source_finalizer(
        &self,
        source: &PersistentVolumeClaim,
        decision: SourceFinalizerDecision,
    ) -> Result<(), WriteError> {
        match decision {
            SourceFinalizerDecision::Nothing | SourceFinalizerDecision::Keep => Ok(()),
            SourceFinalizerDecision::Remove => {
                let finalizers = source.metadata.finalizers_without(finalizer::CLONING_PROTECTION);
                let updated = write::set_finalizers(&self.context.client, source, &finalizers).await;
                updated.map(drop).or_else(WriteError::ignore_not_found)
            }
        }
    }

    /// The snapshot cannot disappear until it is restored.
    pub(super) async fn add_snapshot_finalizer(&self, key: &Key) -> Result<(), WriteError> {
        let snapshot: Option<VolumeSnapshot> = write::get_live(&self.context.client, key).await?;
        match snapshot.filter(|snapshot| !snapshot.metadata.has_finalizer(finalizer::SNAPSHOT_SOURCE_PROTECTION)) {
            Some(snapshot) => {
                let finalizers = snapshot.metadata.finalizers_with(finalizer::SNAPSHOT_SOURCE_PROTECTION);
                write::set_finalizers(&self.context.client, &snapshot, &finalizers).await.map(drop)
            }
            None => Ok(()),
        }
    }

    pub(in crate::csi_provisioner) async fn remove_snapshot_finalizer(&self, key: &Key) -> Result<(), WriteError> {
        let snapshot: Option<VolumeSnapshot> = write::get_live(&self.context.client, key).await?;
        match snapshot.filter(|snapshot| snapshot.metadata.has_finalizer(finalizer::SNAPSHOT_SOURCE_PROTECTION)) {
            Some(snapshot) => {
                let finalizers = snapshot.metadata.finalizers_without(finalizer::SNAPSHOT_SOURCE_PROTECTION);
                let updated = write::set_finalizers(&self.context.client, &snapshot, &finalizers).await;
                updated.map(drop).or_else(WriteError::ignore_not_found)
            }
            None => Ok(()),
        }
    }
}
