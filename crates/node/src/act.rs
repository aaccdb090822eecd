//! One function per step: what is done to disk and driver, in which order. Idempotent; makes no choices.
//!
//! The record is written before the call that it is about, and removed only after the inverse call succeeded and nothing is
//! mounted any more: whatever may be mounted has a record.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use cleat_api::Key;
use cleat_api::key::Meta as _;
use cleat_csi::{CallError, Class};
use cleat_host::{OffloadError, mount, offload};
use cleat_runtime::write::{WriteError, live};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::actual::{Effect, Origin};
use crate::agent::{FILES, Shared};
use crate::desired::Wanted;
use crate::layout::{Layout, Place, PublishedData, VolumeData, VolumeId, make_dir};
use crate::plugin::csi::{Context, Driver, PodInfo};

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
    Record { dir: PathBuf, source: OffloadError<io::Error>, cleared: Cleared },
    #[error(transparent)]
    Call(#[from] CallError),
    /// The driver refused, but what it refused may be there all the same.
    #[error("{call} ({left})")]
    Refused { call: CallError, left: UnmountError },
}

/// Whether anything of a step that failed is left on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cleared {
    Yes,
    No,
}

impl MountError {
    pub fn class(&self) -> Class {
        match self {
            MountError::Call(call) => call.class(),
            MountError::Refused { .. } | MountError::Record { cleared: Cleared::No, .. } => Class::Uncertain,
            // Nothing was asked of the driver yet.
            MountError::NotAttached { .. }
            | MountError::ReadAttachment(_)
            | MountError::NoSecret(_)
            | MountError::ReadSecret(_)
            | MountError::Record { cleared: Cleared::Yes, .. } => Class::Transient,
        }
    }
}

/// Unpublishing or unstaging failed; the volume may or may not be mounted still.
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

pub(crate) async fn stage(agent: &Shared, driver: &Driver, volume: &Wanted, before: Effect) -> Result<(), MountError> {
    let context = Context {
        publish: publish_context(agent, &volume.id).await?,
        secrets: secrets(agent, volume.stage_secret.as_ref()).await?,
    };
    let place = agent.layout.staged(&volume.id);
    let data = VolumeData { volume: volume.id.clone(), published: None };
    record(&place, before, data, Some(place.target.clone())).await?;
    cleat_crash::point("node:stage-recorded");
    let result = driver.stage(volume, &place.target, context).await;
    settle(&place, before, result).await?;
    cleat_crash::point("node:staged");
    Ok(())
}

pub(crate) async fn publish(
    agent: &Shared,
    driver: &Driver,
    volume: &Wanted,
    before: Effect,
    pod: &PodInfo,
) -> Result<(), MountError> {
    let context = Context {
        publish: publish_context(agent, &volume.id).await?,
        secrets: secrets(agent, volume.publish_secret.as_ref()).await?,
    };
    let place = agent.layout.published(&pod.uid, &volume.spec_name);
    let data = VolumeData {
        volume: volume.id.clone(),
        published: Some(PublishedData {
            spec_name: volume.spec_name.clone(),
            node: agent.name.clone(),
            attachment: volume.id.attachment_name(&agent.name),
        }),
    };
    // The target itself is the driver's to make.
    record(&place, before, data, None).await?;
    let staging = agent.layout.staged(&volume.id).target;
    let result = driver.publish(volume, &staging, &place.target, pod, context).await;
    settle(&place, before, result).await?;
    cleat_crash::point("node:published");
    Ok(())
}

pub(crate) async fn unpublish(
    layout: &Layout,
    driver: &Driver,
    id: &VolumeId,
    uid: &str,
    spec_name: &str,
) -> Result<(), UnmountError> {
    let place = layout.published(uid, spec_name);
    driver.unpublish(&id.handle, &place.target).await?;
    cleat_crash::point("node:unpublished");
    clean_up(place).await
}

pub(crate) async fn unstage(layout: &Layout, driver: &Driver, id: &VolumeId) -> Result<(), UnmountError> {
    let place = layout.staged(id);
    let target = place.target.clone();
    let others = offload(FILES, "read the mount table", move || mount::references(&target)).await;
    // Several nodes of one machine stage a shared volume each for itself, at the same place below their own root.
    let below = place.target.strip_prefix(layout.root()).unwrap_or(&place.target).to_owned();
    let ours = layout.plugins();
    let is_stage = |o: &PathBuf| o.starts_with(&ours) || o.ends_with(&below);
    let others: Vec<PathBuf> = others.map_err(UnmountError::Mounts)?.into_iter().filter(|o| !is_stage(o)).collect();
    if !others.is_empty() {
        return Err(UnmountError::Referenced { path: place.target, others });
    }
    // A driver without the capability has no such call; then the directories go, if nothing is mounted there.
    if driver.stages() {
        driver.unstage(&id.handle, &place.target).await?;
        cleat_crash::point("node:unstaged");
    }
    clean_up(place).await
}

/// After an answer that settles the matter, nothing of a refused call stays on disk; of a call in doubt everything does.
async fn settle(place: &Place, before: Effect, result: Result<(), CallError>) -> Result<(), MountError> {
    let Err(call) = result else { return Ok(()) };
    if call.class() != Class::Final || before.origin != Origin::Own {
        return Err(call.into());
    }
    match clean_up(place.clone()).await {
        Ok(()) => Err(call.into()),
        Err(left) => Err(MountError::Refused { call, left }),
    }
}

/// A record that could not be written leaves nothing behind where nothing was before: a directory without a record would
/// keep its pod for ever.
async fn record(place: &Place, before: Effect, data: VolumeData, target: Option<PathBuf>) -> Result<(), MountError> {
    let writing = place.clone();
    let write = move || {
        writing.write(&data)?;
        target.map_or(Ok(()), |target: PathBuf| make_target(&target))
    };
    let Err(source) = offload(FILES, "write the record of a volume", write).await else { return Ok(()) };
    let nothing_before = !before.presence.possible();
    let left = source.is_uncertain() || (nothing_before && clean_up(place.clone()).await.is_err());
    let cleared = if left { Cleared::No } else { Cleared::Yes };
    Err(MountError::Record { dir: place.dir.clone(), source, cleared })
}

fn make_target(target: &Path) -> io::Result<()> {
    match make_dir(target) {
        // Something is mounted there that does not answer; the driver will say what to do about it.
        Err(e) if mount::is_mount_point(target).unwrap_or(false) => {
            tracing::warn!(error = %e, ?target, "staging directory is mounted and does not answer");
            Ok(())
        }
        result => result,
    }
}

async fn clean_up(place: Place) -> Result<(), UnmountError> {
    enum Trouble {
        Mounted,
        Other(String),
    }
    let dir = place.dir.clone();
    let target = place.target.clone();
    let remove = move || match mount::is_mount_point(&place.target) {
        Ok(true) => Err(Trouble::Mounted),
        Ok(false) => place.remove().map_err(|e| Trouble::Other(e.to_string())),
        Err(e) => Err(Trouble::Other(e.to_string())),
    };
    offload(FILES, "remove the directory of a volume", remove).await.map_err(|e| match e {
        OffloadError::Failed(Trouble::Mounted) => UnmountError::StillMounted { target },
        OffloadError::Failed(Trouble::Other(why)) => UnmountError::CleanUp { dir, why },
        OffloadError::Deadline { .. } => UnmountError::CleanUp { dir, why: "the file system hangs".into() },
        OffloadError::Spawn { source, .. } => UnmountError::CleanUp { dir, why: source.to_string() },
        OffloadError::Panicked { .. } => UnmountError::CleanUp { dir, why: "internal error".into() },
    })
}

/// What the attacher learned when it attached the volume. Read from the server: the cache may lag behind a detach.
async fn publish_context(agent: &Shared, id: &VolumeId) -> Result<BTreeMap<String, String>, MountError> {
    if !agent.attach_required(&id.driver) {
        return Ok(BTreeMap::new());
    }
    let name = id.attachment_name(&agent.name);
    let found: Option<VolumeAttachment> =
        live(&agent.client, &Key::cluster(&name)).await.map_err(MountError::ReadAttachment)?;
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

async fn secrets(agent: &Shared, key: Option<&Key>) -> Result<BTreeMap<String, String>, MountError> {
    let Some(key) = key else { return Ok(BTreeMap::new()) };
    let found: Option<Secret> = live(&agent.client, key).await.map_err(MountError::ReadSecret)?;
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

    /// What is taken for absent is never unmounted again: only what is known to be gone may be.
    #[test]
    fn a_refusal_counts_only_if_nothing_is_left() {
        let dir = PathBuf::new;
        for (case, error, want) in [
            ("refused, nothing left", MountError::Call(refused()), Class::Final),
            (
                "refused, and mounted all the same",
                MountError::Refused { call: refused(), left: UnmountError::StillMounted { target: dir() } },
                Class::Uncertain,
            ),
            (
                "the record could not be written, nothing left",
                MountError::Record { dir: dir(), source: full(), cleared: Cleared::Yes },
                Class::Transient,
            ),
            (
                "the record could not be written, its directory stays",
                MountError::Record { dir: dir(), source: full(), cleared: Cleared::No },
                Class::Uncertain,
            ),
        ] {
            assert_eq!(error.class(), want, "{case}");
        }
    }
}
