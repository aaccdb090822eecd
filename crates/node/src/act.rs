//! One function per step: stage, publish, unpublish, unstage. They access the disk and the driver, are idempotent, and
//! make no decisions.
//!
//! The record is written before the call, and removed only after the inverse call has succeeded and nothing is mounted any
//! more. So every volume that may be mounted has a record.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_csi::{CallError, ErrorClass};
use cleat_host::{OffloadError, mount, offload};
use cleat_runtime::write::{WriteError, get_live};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::actual::{MountState, Provenance};
use crate::context::AgentContext;
use crate::desired::VolumeSpec;
use crate::layout::{FILE_TIMEOUT, Layout, PublishedRecord, VolumeDir, VolumeId, VolumeRecord, make_dir};
use crate::plugin::csi::{CallParameters, CsiDriver, PodInfo};

/// Staging or publishing failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("volume {handle} is not attached for volume attachment {attachment}: {why}")]
    NotAttached { handle: String, attachment: String, why: &'static str },
    #[error("volume attachment: {0}")]
    ReadAttachment(#[source] WriteError),
    #[error("secret {0} does not exist")]
    NoSecret(Key),
    #[error("secret: {0}")]
    ReadSecret(#[source] WriteError),
    #[error("record in {dir:?}: {source}")]
    Record { dir: PathBuf, source: OffloadError<io::Error>, leftovers: Leftovers },
    #[error(transparent)]
    Call(#[from] CallError),
    /// The driver returned a final error, but the clean-up found that the volume may be mounted.
    #[error("{call} ({left})")]
    Refused { call: CallError, left: UnmountError },
}

/// Whether a failed step may have left a directory or a record that did not exist before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leftovers {
    None,
    Possible,
}

impl MountError {
    pub fn class(&self) -> ErrorClass {
        match self {
            MountError::Call(call) => call.class(),
            MountError::Refused { .. } | MountError::Record { leftovers: Leftovers::Possible, .. } => {
                ErrorClass::Uncertain
            }
            // The driver was not called yet.
            MountError::NotAttached { .. }
            | MountError::ReadAttachment(_)
            | MountError::NoSecret(_)
            | MountError::ReadSecret(_)
            | MountError::Record { leftovers: Leftovers::None, .. } => ErrorClass::Transient,
        }
    }
}

/// Unpublishing or unstaging failed; the volume may still be mounted.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    #[error("the device mount path {path:?} is still mounted by other references {others:?}")]
    Referenced { path: PathBuf, others: Vec<PathBuf> },
    #[error("read the mount table: {0}")]
    Mounts(#[source] OffloadError<mount::MountTableError>),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("{target:?} is still mounted though its driver said it is not")]
    StillMounted { target: PathBuf },
    #[error("clean up {dir:?}: {why}")]
    CleanUp { dir: PathBuf, why: String },
}

pub(crate) async fn stage(
    agent: &AgentContext,
    driver: &CsiDriver,
    volume: &VolumeSpec,
    before: MountState,
) -> Result<(), MountError> {
    let parameters = CallParameters {
        publish_context: publish_context(agent, &volume.id).await?,
        secrets: read_secret(agent, volume.stage_secret.as_ref()).await?,
    };
    let volume_dir = agent.layout.staging_dir(&volume.id);
    let record = VolumeRecord { volume: volume.id.clone(), published: None };
    write_record(&volume_dir, before, record, Some(volume_dir.target.clone())).await?;
    cleat_crash::point("node:stage-recorded");
    let result = driver.stage(volume, &volume_dir.target, parameters).await;
    clean_up_after_refusal(&volume_dir, before, result).await?;
    cleat_crash::point("node:staged");
    Ok(())
}

pub(crate) async fn publish(
    agent: &AgentContext,
    driver: &CsiDriver,
    volume: &VolumeSpec,
    before: MountState,
    pod: &PodInfo,
) -> Result<(), MountError> {
    let parameters = CallParameters {
        publish_context: publish_context(agent, &volume.id).await?,
        secrets: read_secret(agent, volume.publish_secret.as_ref()).await?,
    };
    let volume_dir = agent.layout.publish_dir(&pod.uid, &volume.spec_name);
    let record = VolumeRecord {
        volume: volume.id.clone(),
        published: Some(PublishedRecord {
            spec_name: volume.spec_name.clone(),
            node: agent.name.clone(),
            attachment: volume.id.attachment_name(&agent.name),
        }),
    };
    // The driver creates the target path itself.
    write_record(&volume_dir, before, record, None).await?;
    let staging = agent.layout.staging_dir(&volume.id).target;
    let result = driver.publish(volume, &staging, &volume_dir.target, pod, parameters).await;
    clean_up_after_refusal(&volume_dir, before, result).await?;
    cleat_crash::point("node:published");
    Ok(())
}

pub(crate) async fn unpublish(
    layout: &Layout,
    driver: &CsiDriver,
    id: &VolumeId,
    uid: &str,
    spec_name: &str,
) -> Result<(), UnmountError> {
    let volume_dir = layout.publish_dir(uid, spec_name);
    driver.unpublish(&id.handle, &volume_dir.target).await?;
    cleat_crash::point("node:unpublished");
    clean_up(volume_dir).await
}

pub(crate) async fn unstage(layout: &Layout, driver: &CsiDriver, id: &VolumeId) -> Result<(), UnmountError> {
    let volume_dir = layout.staging_dir(id);
    let target = volume_dir.target.clone();
    let other_mounts = offload(FILE_TIMEOUT, "read the mount table", move || mount::references(&target)).await;
    // Several agents on one machine may stage a shared volume, each at the same path below its own root.
    let relative = volume_dir.target.strip_prefix(layout.root()).unwrap_or(&volume_dir.target).to_owned();
    let plugins_dir = layout.plugins_dir();
    let is_staging_mount = |o: &PathBuf| o.starts_with(&plugins_dir) || o.ends_with(&relative);
    let other_mounts: Vec<PathBuf> =
        other_mounts.map_err(UnmountError::Mounts)?.into_iter().filter(|o| !is_staging_mount(o)).collect();
    if !other_mounts.is_empty() {
        return Err(UnmountError::Referenced { path: volume_dir.target, others: other_mounts });
    }
    // A driver without the capability STAGE_UNSTAGE_VOLUME has no such call; only the directories are removed.
    if driver.stages() {
        driver.unstage(&id.handle, &volume_dir.target).await?;
        cleat_crash::point("node:unstaged");
    }
    clean_up(volume_dir).await
}

/// Removes directory and record after a final error, if this run created them. After any other error they stay, because the
/// volume may be mounted.
async fn clean_up_after_refusal(
    volume_dir: &VolumeDir,
    before: MountState,
    result: Result<(), CallError>,
) -> Result<(), MountError> {
    let Err(call) = result else { return Ok(()) };
    if call.class() != ErrorClass::Final || before.provenance != Provenance::ThisRun {
        return Err(call.into());
    }
    match clean_up(volume_dir.clone()).await {
        Ok(()) => Err(call.into()),
        Err(left) => Err(MountError::Refused { call, left }),
    }
}

/// Writes the record and, for a stage, creates the staging path. If that fails and nothing existed before, it removes
/// what it created: a directory without a record would keep the pod's directory for ever.
async fn write_record(
    volume_dir: &VolumeDir,
    before: MountState,
    record: VolumeRecord,
    target: Option<PathBuf>,
) -> Result<(), MountError> {
    let writing = volume_dir.clone();
    let write = move || {
        writing.write_record(&record)?;
        target.map_or(Ok(()), |target: PathBuf| make_target(&target))
    };
    let Err(source) = offload(FILE_TIMEOUT, "write the record of a volume", write).await else { return Ok(()) };
    let nothing_before = !before.presence.may_be_present();
    let left = source.is_uncertain() || (nothing_before && clean_up(volume_dir.clone()).await.is_err());
    let leftovers = if left { Leftovers::Possible } else { Leftovers::None };
    Err(MountError::Record { dir: volume_dir.dir.clone(), source, leftovers })
}

fn make_target(target: &Path) -> io::Result<()> {
    match make_dir(target) {
        // A mount at this path does not respond. The driver handles it in NodeStageVolume.
        Err(e) if mount::is_mount_point(target).unwrap_or(false) => {
            tracing::warn!(error = %e, ?target, "the mount at the staging path does not respond");
            Ok(())
        }
        result => result,
    }
}

async fn clean_up(volume_dir: VolumeDir) -> Result<(), UnmountError> {
    enum CleanUpFailure {
        Mounted,
        Other(String),
    }
    let dir = volume_dir.dir.clone();
    let target = volume_dir.target.clone();
    let remove = move || match mount::is_mount_point(&volume_dir.target) {
        Ok(true) => Err(CleanUpFailure::Mounted),
        Ok(false) => volume_dir.remove().map_err(|e| CleanUpFailure::Other(e.to_string())),
        Err(e) => Err(CleanUpFailure::Other(e.to_string())),
    };
    offload(FILE_TIMEOUT, "remove the directory of a volume", remove).await.map_err(|e| match e {
        OffloadError::Failed(CleanUpFailure::Mounted) => UnmountError::StillMounted { target },
        OffloadError::Failed(CleanUpFailure::Other(why)) => UnmountError::CleanUp { dir, why },
        OffloadError::Deadline { .. } => UnmountError::CleanUp { dir, why: "the file system hangs".into() },
        OffloadError::Spawn { source, .. } => UnmountError::CleanUp { dir, why: source.to_string() },
        OffloadError::Panicked { .. } => UnmountError::CleanUp { dir, why: "internal error".into() },
    })
}

/// Returns the attachment metadata that the attacher stored. It is read from the server, because the cache may not show a
/// detach yet.
async fn publish_context(agent: &AgentContext, id: &VolumeId) -> Result<BTreeMap<String, String>, MountError> {
    if !agent.attach_required(&id.driver) {
        return Ok(BTreeMap::new());
    }
    let name = id.attachment_name(&agent.name);
    let found: Option<VolumeAttachment> =
        get_live(&agent.client, &Key::cluster(&name)).await.map_err(MountError::ReadAttachment)?;
    let not_attached = |why| MountError::NotAttached { handle: id.handle.clone(), attachment: name.clone(), why };
    let found = found.ok_or_else(|| not_attached("it does not exist"))?;
    if found.metadata.is_deleting() {
        return Err(not_attached("volume attachment is being deleted"));
    }
    match found.status {
        Some(status) if status.attached => Ok(status.attachment_metadata.unwrap_or_default()),
        _ => Err(not_attached("not attached yet")),
    }
}

async fn read_secret(agent: &AgentContext, key: Option<&Key>) -> Result<BTreeMap<String, String>, MountError> {
    let Some(key) = key else { return Ok(BTreeMap::new()) };
    let found: Option<Secret> = get_live(&agent.client, key).await.map_err(MountError::ReadSecret)?;
    let data = found.ok_or_else(|| MountError::NoSecret(key.clone()))?.data.unwrap_or_default();
    Ok(data.into_iter().map(|(k, v)| (k, String::from_utf8_lossy(&v.0).into_owned())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_csi::Code;

    fn refused() -> CallError {
        CallError { method: "NodeStageVolume", code: Code::Internal, message: String::new() }
    }

    fn full() -> OffloadError<io::Error> {
        OffloadError::Failed(io::ErrorKind::StorageFull.into())
    }

    /// A volume that counts as absent is not unmounted, so an error may be final only if nothing can be mounted.
    #[test]
    fn an_error_is_final_only_if_nothing_is_left() {
        let dir = PathBuf::new;
        for (case, error, want) in [
            ("refused, nothing left", MountError::Call(refused()), ErrorClass::Final),
            (
                "refused, and mounted all the same",
                MountError::Refused { call: refused(), left: UnmountError::StillMounted { target: dir() } },
                ErrorClass::Uncertain,
            ),
            (
                "the record could not be written, nothing left",
                MountError::Record { dir: dir(), source: full(), leftovers: Leftovers::None },
                ErrorClass::Transient,
            ),
            (
                "the record could not be written, its directory stays",
                MountError::Record { dir: dir(), source: full(), leftovers: Leftovers::Possible },
                ErrorClass::Uncertain,
            ),
        ] {
            assert_eq!(error.class(), want, "{case}");
        }
    }
}
