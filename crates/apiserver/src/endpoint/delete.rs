//! DELETE: preconditions, grace periods, finalizers, and removal.

use std::sync::Arc;

use cleat_store::{Range, WriteError};
use http::StatusCode;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, Time};

use super::write::{Written, is_free};
use super::{list, read};
use crate::admission;
use crate::api::Api;
use crate::http::Call;
use crate::http::query::Effect;
use crate::http::reply::Reply;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::descriptor::DeleteReply;
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::{Kind, Object, Source, typed, typed_mut};
use cleat_apimachinery::managed_fields::Current;
use cleat_apimachinery::meta;
use cleat_apimachinery::render::Stored;
use cleat_auth::actor::Actor;
use cleat_auth::write_authorization;

const ORPHAN: &str = "orphan";
const FOREGROUND: &str = "foregroundDeletion";

/// What became of the object.
pub(crate) enum Outcome {
    Removed(Stored),
    /// Something still holds it.
    Waiting(Written),
}

pub(crate) async fn delete(api: &Api, call: &Call, at: ObjectAddress<'_>) -> Result<Reply, ApiError> {
    let (options, effect) = options(call)?;
    match remove(api, &call.actor, at, &options, effect).await? {
        Outcome::Removed(stored) if at.descriptor().delete_reply == DeleteReply::Status => {
            let object = at.kind.decode(Source::Bytes(&stored.value));
            let uid = object.ok().and_then(|o| o.meta().uid.clone());
            Ok(Reply::success(StatusCode::OK, at.descriptor(), at.name, uid.as_deref()))
        }
        Outcome::Removed(stored) => read::one(call, at.kind, StatusCode::OK, &stored),
        Outcome::Waiting(written) => read::written(call, at.kind, StatusCode::OK, written),
    }
}

pub(crate) async fn delete_collection(
    api: &Api,
    call: &Call,
    kind: &Arc<dyn Kind>,
    namespace: Option<&str>,
) -> Result<Reply, ApiError> {
    let (options, effect) = options(call)?;
    let wanted = call.query.list_options()?;
    let selector =
        cleat_apimachinery::selector::Selector::parse(&**kind, &wanted.label_selector, &wanted.field_selector)?;
    let prefix = kind.descriptor().prefix(namespace);
    let snapshot = api.of(&**kind).list(Range { prefix: &prefix, ..Range::default() }).await?;
    let mut listed = Vec::new();
    for kept in snapshot.stored.iter().filter(|kept| selector.matches(&**kind, &kept.entry())) {
        let mut path = kept.key.rsplit('/');
        let name = path.next().unwrap_or_default();
        let namespace = path.next().filter(|_| kind.descriptor().namespaced);
        match remove(api, &call.actor, ObjectAddress { kind: &**kind, namespace, name }, &options, effect).await {
            Ok(_) | Err(ApiError::NotFound { .. }) => listed.push(kept.clone()),
            Err(error) => return Err(error),
        }
    }
    // The answer shows the objects as they were found.
    list::collected(call, kind, listed, snapshot.revision)
}

fn options(call: &Call) -> Result<(DeleteOptions, Effect), ApiError> {
    let bad = |e: serde_json::Error| ApiError::BadRequest(format!("the delete options cannot be read: {e}"));
    let mut options: DeleteOptions = if call.text().is_empty() {
        DeleteOptions::default()
    } else {
        serde_json::from_slice(call.text()).map_err(bad)?
    };
    if call.text().is_empty() {
        options.grace_period_seconds = call.query.grace_period()?;
        options.propagation_policy = call.query.get("propagationPolicy").filter(|v| !v.is_empty()).map(Into::into);
    }
    if let Some(policy) = options.propagation_policy.as_deref()
        && !["Orphan", "Background", "Foreground"].contains(&policy)
    {
        let error =
            FieldError::not_supported("propagationPolicy", policy, &["Foreground", "Background", "Orphan", "nil"]);
        return Err(ApiError::invalid_option("DeleteOptions", error));
    }
    let mut effect = call.query.effect("DeleteOptions")?;
    if options.dry_run.as_ref().is_some_and(|d| d.iter().any(|v| v == "All")) {
        effect = Effect::DryRun;
    }
    Ok((options, effect))
}

pub(crate) async fn remove(
    api: &Api,
    actor: &Actor,
    at: ObjectAddress<'_>,
    options: &DeleteOptions,
    effect: Effect,
) -> Result<Outcome, ApiError> {
    write_authorization::delete(&*api.store, actor, at).await?;
    admission::delete(at)?;
    let key = at.key();
    loop {
        let entry = api.of(at.kind).get(&key).await?.ok_or_else(|| at.not_found())?;
        let stored = Stored::from(&entry);
        let current = Current::of(&api.decoded_objects, at.kind, &entry, &stored)?;
        check_preconditions(&at, options, &*current.object, entry.modified)?;
        let mut step = Step::Keep;
        let mut document = current.edited(|object| {
            object.meta_mut().resource_version = None;
            step = mark(at.kind, options, object);
        });
        let value = document.encode();
        if step == Step::Keep && value == entry.value {
            return Ok(Outcome::Waiting(Written::now(api, at.kind, stored.clone(), document.object)));
        }
        // Only a kind with grace periods shows the mark on an object that is gone.
        let last = if has_grace(at.kind) { value.clone() } else { entry.value.clone() };
        if effect == Effect::DryRun {
            return Ok(match step {
                Step::Keep => Outcome::Waiting(Written::shown(Stored { value, ..stored.clone() }, document.object)),
                Step::Remove => Outcome::Removed(Stored { value: last, revision: entry.modified }),
            });
        }
        let written = match step {
            Step::Keep => api.of(at.kind).update(&key, entry.modified, value.clone()).await,
            Step::Remove => api.of(at.kind).delete(&key, entry.modified).await,
        };
        match (written, step) {
            (Ok(revision), Step::Keep) => {
                let written = Written::now(api, at.kind, Stored { value, revision }, document.object);
                return Ok(Outcome::Waiting(written));
            }
            (Ok(revision), Step::Remove) => return Ok(Outcome::Removed(Stored { value: last, revision })),
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
enum Step {
    Keep,
    Remove,
}

/// Writes the deletion into the object and says whether it can go at once.
fn mark(kind: &dyn Kind, options: &DeleteOptions, object: &mut dyn Object) -> Step {
    let grace = grace(kind, options, object);
    set_policy(options.propagation_policy.as_deref(), object);
    let now = meta::now();
    let meta = object.meta_mut();
    let first = meta.deletion_timestamp.is_none();
    match (grace, meta.deletion_grace_period_seconds.filter(|_| !first)) {
        // A deletion under way can be shortened, never prolonged.
        (grace, Some(running)) if grace >= running => {}
        (grace, running) => {
            let begun = match (&meta.deletion_timestamp, running) {
                (Some(end), Some(running)) => end.0.as_second() - running,
                _ => now.as_second(),
            };
            let end = (begun + grace).max(now.as_second());
            meta.deletion_timestamp = jiff::Timestamp::from_second(end).ok().map(Time);
            meta.deletion_grace_period_seconds = Some(grace);
        }
    }
    if first && meta.generation.is_some_and(|g| g > 0) {
        meta.generation = meta.generation.map(|g| g + 1);
    }
    if is_namespace(kind) {
        let namespace: &mut Namespace = typed_mut(object);
        namespace.status.get_or_insert_default().phase = Some("Terminating".into());
    }
    if is_free(kind, object) { Step::Remove } else { Step::Keep }
}

fn is_namespace(kind: &dyn Kind) -> bool {
    kind.descriptor().plural == "namespaces" && kind.descriptor().group.is_empty()
}

fn has_grace(kind: &dyn Kind) -> bool {
    kind.descriptor().plural == "pods" && kind.descriptor().group.is_empty()
}

/// How long a deleted object may stay; only pods get any time.
fn grace(kind: &dyn Kind, options: &DeleteOptions, object: &dyn Object) -> i64 {
    if !has_grace(kind) {
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

fn set_policy(policy: Option<&str>, object: &mut dyn Object) {
    let wanted = match policy {
        Some("Orphan") => Some(ORPHAN),
        Some("Foreground") => Some(FOREGROUND),
        Some(_) => None,
        None => return,
    };
    let finalizers = object.meta_mut().finalizers.get_or_insert_default();
    finalizers.retain(|f| (f != ORPHAN && f != FOREGROUND) || Some(f.as_str()) == wanted);
    if let Some(wanted) = wanted
        && !finalizers.iter().any(|f| f == wanted)
    {
        finalizers.push(wanted.into());
    }
    object.meta_mut().finalizers.take_if(|f| f.is_empty());
}
