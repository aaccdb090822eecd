//! DELETE: preconditions, grace periods, finalizers, and removal.

use std::sync::Arc;

use cleat_store::{Range, WriteError};
use http::StatusCode;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, Time};

use super::write::{WrittenObject, is_removable};
use super::{list, read};
use crate::admission;
use crate::http::ResourceRequest;
use crate::http::query::WriteMode;
use crate::http::reply::Reply;
use crate::state::ServerState;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::descriptor::DeleteReply;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::{DecodeSource, Kind, Object, typed, typed_mut};
use cleat_apimachinery::managed_fields::CurrentObject;
use cleat_apimachinery::meta;
use cleat_apimachinery::render::StoredObject;
use cleat_auth::actor::Actor;
use cleat_auth::write_authorization;

const ORPHAN_FINALIZER: &str = "orphan";
const FOREGROUND_FINALIZER: &str = "foregroundDeletion";

/// The result of a delete request.
pub(crate) enum DeleteOutcome {
    /// The object is gone; this was its last state.
    Removed(StoredObject),
    /// The object is marked for deletion and waits for its finalizers or its grace period.
    Pending(WrittenObject),
}

pub(crate) async fn delete(
    state: &ServerState,
    request: &ResourceRequest,
    at: ObjectAddress<'_>,
) -> Result<Reply, ApiError> {
    let (options, mode) = delete_options(request)?;
    match remove(state, &request.actor, at, &options, mode).await? {
        DeleteOutcome::Removed(stored) if at.descriptor().delete_reply == DeleteReply::Status => {
            let object = at.kind.decode(DecodeSource::Bytes(&stored.value));
            let uid = object.ok().and_then(|o| o.meta().uid.clone());
            Ok(Reply::success(StatusCode::OK, at.descriptor(), at.name, uid.as_deref()))
        }
        DeleteOutcome::Removed(stored) => read::render_object(request, at.kind, StatusCode::OK, &stored),
        DeleteOutcome::Pending(written) => read::render_written(request, at.kind, StatusCode::OK, written),
    }
}

pub(crate) async fn delete_collection(
    state: &ServerState,
    request: &ResourceRequest,
    kind: &Arc<dyn Kind>,
    namespace: Option<&str>,
) -> Result<Reply, ApiError> {
    let (options, mode) = delete_options(request)?;
    let list_options = request.query.list_options()?;
    let selector = cleat_apimachinery::selector::Selector::parse(
        &**kind,
        &list_options.label_selector,
        &list_options.field_selector,
    )?;
    let prefix = kind.descriptor().prefix(namespace);
    let snapshot = state.store_of(&**kind).list(Range { prefix: &prefix, ..Range::default() }).await?;
    let mut deleted = Vec::new();
    for entry in snapshot.stored.iter().filter(|entry| selector.matches(&**kind, &entry.entry())) {
        let mut path = entry.key.rsplit('/');
        let name = path.next().unwrap_or_default();
        let namespace = path.next().filter(|_| kind.descriptor().namespaced);
        match remove(state, &request.actor, ObjectAddress { kind: &**kind, namespace, name }, &options, mode).await {
            Ok(_) | Err(ApiError::NotFound { .. }) => deleted.push(entry.clone()),
            Err(error) => return Err(error),
        }
    }
    // The reply shows the objects as they were before the deletion.
    list::render_list(request, kind, deleted, snapshot.revision)
}

fn delete_options(request: &ResourceRequest) -> Result<(DeleteOptions, WriteMode), ApiError> {
    let unreadable = |e: serde_json::Error| ApiError::BadRequest(format!("the delete options cannot be read: {e}"));
    let mut options: DeleteOptions = if request.encoded_body().is_empty() {
        DeleteOptions::default()
    } else {
        serde_json::from_slice(request.encoded_body()).map_err(unreadable)?
    };
    if request.encoded_body().is_empty() {
        options.grace_period_seconds = request.query.grace_period()?;
        options.propagation_policy = request.query.get("propagationPolicy").filter(|v| !v.is_empty()).map(Into::into);
    }
    if let Some(policy) = options.propagation_policy.as_deref()
        && !["Orphan", "Background", "Foreground"].contains(&policy)
    {
        let error =
            FieldError::not_supported("propagationPolicy", policy, &["Foreground", "Background", "Orphan", "nil"]);
        return Err(ApiError::invalid_option("DeleteOptions", error));
    }
    let mut mode = request.query.write_mode("DeleteOptions")?;
    if options.dry_run.as_ref().is_some_and(|d| d.iter().any(|v| v == "All")) {
        mode = WriteMode::DryRun;
    }
    Ok((options, mode))
}

/// Deletes one object: marks it, and removes it if neither finalizers nor a grace period delay the removal.
pub(crate) async fn remove(
    state: &ServerState,
    actor: &Actor,
    at: ObjectAddress<'_>,
    options: &DeleteOptions,
    mode: WriteMode,
) -> Result<DeleteOutcome, ApiError> {
    write_authorization::check_delete(&*state.store, actor, at).await?;
    admission::admit_delete(at)?;
    let key = at.key();
    loop {
        let entry = state.store_of(at.kind).get(&key).await?.ok_or_else(|| at.not_found())?;
        let stored = StoredObject::from(&entry);
        let current = CurrentObject::of(at.kind, &entry, &stored)?;
        check_preconditions(&at, options, &*current.object, entry.modified)?;
        let mut removal = Removal::Pending;
        let mut document = current.edited(|object| {
            object.meta_mut().resource_version = None;
            removal = mark_deleted(at.kind, options, object);
        });
        let value = document.encode();
        if removal == Removal::Pending && value == entry.value {
            return Ok(DeleteOutcome::Pending(WrittenObject::new(stored.clone(), document.object)));
        }
        // The reply for a removed object shows the deletionTimestamp only for kinds with grace periods.
        let last = if has_grace_period(at.kind) { value.clone() } else { entry.value.clone() };
        if mode == WriteMode::DryRun {
            return Ok(match removal {
                Removal::Pending => DeleteOutcome::Pending(WrittenObject::new(
                    StoredObject { value, ..stored.clone() },
                    document.object,
                )),
                Removal::Immediate => DeleteOutcome::Removed(StoredObject { value: last, revision: entry.modified }),
            });
        }
        let written = match removal {
            Removal::Pending => state.store_of(at.kind).update(&key, entry.modified, value.clone()).await,
            Removal::Immediate => state.store_of(at.kind).delete(&key, entry.modified).await,
        };
        match (written, removal) {
            (Ok(revision), Removal::Pending) => {
                let written = WrittenObject::new(StoredObject { value, revision }, document.object);
                return Ok(DeleteOutcome::Pending(written));
            }
            (Ok(revision), Removal::Immediate) => {
                return Ok(DeleteOutcome::Removed(StoredObject { value: last, revision }));
            }
            (Err(WriteError::Conflict { .. }), _) => {}
            (Err(WriteError::Missing { .. }), _) => return Err(at.not_found()),
            (Err(error), _) => return Err(error.into()),
        }
    }
}

fn check_preconditions(
    at: &ObjectAddress<'_>,
    options: &DeleteOptions,
    object: &dyn Object,
    current: u64,
) -> Result<(), ApiError> {
    let Some(wanted) = &options.preconditions else { return Ok(()) };
    let found = object.meta().uid.as_deref().unwrap_or_default();
    if let Some(uid) = wanted.uid.as_deref().filter(|u| *u != found) {
        return Err(ApiError::precondition(at.descriptor(), at.name, "UID", uid, found));
    }
    if let Some(version) = wanted.resource_version.as_deref().filter(|v| *v != current.to_string()) {
        let found = current.to_string();
        return Err(ApiError::precondition(at.descriptor(), at.name, "ResourceVersion", version, &found));
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    Pending,
    Immediate,
}

/// Sets the deletion fields of the object. Returns whether it can be removed at once.
fn mark_deleted(kind: &dyn Kind, options: &DeleteOptions, object: &mut dyn Object) -> Removal {
    let grace = grace_period_seconds(kind, options, object);
    set_propagation_finalizer(options.propagation_policy.as_deref(), object);
    let now = meta::now();
    let meta = object.meta_mut();
    let is_first = meta.deletion_timestamp.is_none();
    match (grace, meta.deletion_grace_period_seconds.filter(|_| !is_first)) {
        // The grace period of a deletion in progress can become shorter, never longer.
        (grace, Some(running)) if grace >= running => {}
        (grace, running) => {
            let started = match (&meta.deletion_timestamp, running) {
                (Some(end), Some(running)) => end.0.as_second() - running,
                _ => now.as_second(),
            };
            let end = (started + grace).max(now.as_second());
            meta.deletion_timestamp = jiff::Timestamp::from_second(end).ok().map(Time);
            meta.deletion_grace_period_seconds = Some(grace);
        }
    }
    if is_first && meta.generation.is_some_and(|g| g > 0) {
        meta.generation = meta.generation.map(|g| g + 1);
    }
    if is_namespace(kind) {
        let namespace: &mut Namespace = typed_mut(object);
        namespace.status.get_or_insert_default().phase = Some("Terminating".into());
    }
    if is_removable(kind, object) { Removal::Immediate } else { Removal::Pending }
}

fn is_namespace(kind: &dyn Kind) -> bool {
    kind.descriptor().plural == "namespaces" && kind.descriptor().group.is_empty()
}

fn has_grace_period(kind: &dyn Kind) -> bool {
    kind.descriptor().plural == "pods" && kind.descriptor().group.is_empty()
}

/// The grace period in seconds: 0 except for pods that are assigned to a node and have not finished.
fn grace_period_seconds(kind: &dyn Kind, options: &DeleteOptions, object: &dyn Object) -> i64 {
    if !has_grace_period(kind) {
        return 0;
    }
    let pod: &Pod = typed(object);
    let spec = pod.spec.as_ref();
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    let unassigned = spec.and_then(|s| s.node_name.as_deref()).is_none_or(str::is_empty);
    if unassigned || matches!(phase, Some("Succeeded" | "Failed")) {
        return 0;
    }
    let wanted = options.grace_period_seconds.or_else(|| spec.and_then(|s| s.termination_grace_period_seconds));
    match wanted.unwrap_or(30) {
        negative if negative < 0 => 1,
        seconds => seconds,
    }
}

/// Adds the finalizer that the propagation policy stands for and removes the other one. Without a policy nothing
/// changes.
fn set_propagation_finalizer(policy: Option<&str>, object: &mut dyn Object) {
    let wanted = match policy {
        Some("Orphan") => Some(ORPHAN_FINALIZER),
        Some("Foreground") => Some(FOREGROUND_FINALIZER),
        Some(_) => None,
        None => return,
    };
    let finalizers = object.meta_mut().finalizers.get_or_insert_default();
    finalizers.retain(|f| (f != ORPHAN_FINALIZER && f != FOREGROUND_FINALIZER) || Some(f.as_str()) == wanted);
    if let Some(wanted) = wanted
        && !finalizers.iter().any(|f| f == wanted)
    {
        finalizers.push(wanted.into());
    }
    object.meta_mut().finalizers.take_if(|f| f.is_empty());
}
