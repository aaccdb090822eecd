//! The two writes of objects: `insert` creates an object, `modify` changes a stored one. Every check that depends on
//! the stored object runs again when a compare-and-swap fails.

use std::sync::Arc;

use cleat_store::{Entry, WriteError};
use k8s_openapi::api::core::v1::Namespace;

use crate::admission;
use crate::http::query::WriteMode;
use crate::state::ServerState;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::descriptor::{FirstUpdate, PutVersion};
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::{Kind, Object, typed, typed_mut};
use cleat_apimachinery::managed_fields::{CurrentObject, EncodedObject, ManagedObject, SplitObject, decode};
use cleat_apimachinery::meta;
use cleat_apimachinery::part::ObjectPart;
use cleat_apimachinery::render::StoredObject;
use cleat_auth::actor::Actor;
use cleat_auth::write_authorization;

const MAX_NAME_ATTEMPTS: usize = 8;

/// The request that an update comes from. It decides the error for a wrong uid, and whether a resourceVersion is
/// required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateSource {
    Put,
    Patch,
    /// The server's own change: a subresource or a background task.
    Server,
}

/// The object after a write, encoded and decoded.
pub(crate) struct WrittenObject {
    pub(crate) stored: StoredObject,
    /// The object without managedFields; they are only in `stored`.
    pub(crate) object: Arc<dyn Object>,
}

impl WrittenObject {
    pub(super) fn new(stored: StoredObject, mut object: Box<dyn Object>) -> Self {
        object.meta_mut().resource_version = (stored.revision > 0).then(|| stored.revision.to_string());
        Self { stored, object: object.into() }
    }
}

/// Creates an object. With `generateName` another name is tried if the generated one exists.
pub(crate) async fn insert(
    state: &ServerState,
    actor: &Actor,
    kind: &dyn Kind,
    namespace: Option<&str>,
    document: ManagedObject,
    mode: WriteMode,
) -> Result<WrittenObject, ApiError> {
    let ManagedObject { mut object, owners } = document;
    let d = kind.descriptor();
    let now = meta::now();
    if object.meta().resource_version.as_deref().is_some_and(|v| !v.is_empty() && v != "0") {
        return Err(ApiError::Internal("resourceVersion should not be set on objects to be created".into()));
    }
    meta::wipe_for_create(object.meta_mut());
    set_namespace(d.namespaced, namespace, &mut *object)?;
    meta::normalise(object.meta_mut());
    kind.set_defaults(&mut *object);
    write_authorization::check_create(&state.security.authorizer, actor, kind, &*object).await?;
    admission::admit_create(state, kind, &mut *object).await?;
    meta::stamp_created(object.meta_mut(), now);
    let base = object.meta().generate_name.clone().filter(|_| object.meta().name.is_none());
    // A copy without a name, for further attempts with another generated name.
    let unnamed = base.is_some().then(|| object.copy());
    let mut attempt = 0;
    loop {
        attempt += 1;
        if let (Some(base), Some(unnamed)) = (&base, &unnamed) {
            object = unnamed.copy();
            object.meta_mut().name = Some(meta::generated_name(base));
        }
        kind.prepare_create(&mut *object, now);
        meta::normalise(object.meta_mut());
        let name = object.meta().name.clone().unwrap_or_default();
        let mut errors = meta::validate(object.meta(), kind.name_rule(), d.finalizers());
        errors.extend(kind.validate(&*object));
        errors.extend(kind.validate_create(&*object));
        if !errors.is_empty() {
            return Err(ApiError::invalid(d, &name, errors));
        }
        let value = EncodedObject::of(&mut *object).with_owners(&owners);
        let key = d.key(namespace, &name);
        if mode == WriteMode::DryRun {
            return match state.store_of(kind).get(&key).await? {
                Some(entry) => Err(already_exists(kind, &name, &entry)),
                None => Ok(WrittenObject::new(StoredObject { value, revision: 0 }, object)),
            };
        }
        match state.store_of(kind).create(&key, value.clone()).await {
            Ok(revision) => return Ok(WrittenObject::new(StoredObject { value, revision }, object)),
            Err(WriteError::Exists { .. }) if base.is_some() && attempt < MAX_NAME_ATTEMPTS => {}
            Err(WriteError::Exists { current, .. }) => return Err(already_exists(kind, &name, &current)),
            Err(error) => return Err(error.into()),
        }
    }
}

fn already_exists(kind: &dyn Kind, name: &str, current: &Entry) -> ApiError {
    let deleting = decode(kind, current).is_ok_and(|o| o.meta().deletion_timestamp.is_some());
    ApiError::AlreadyExists { resource: kind.descriptor().resource(), name: name.into(), deleting }
}

/// Sets the namespace of the URL. An object that names another one is refused.
fn set_namespace(namespaced: bool, namespace: Option<&str>, object: &mut dyn Object) -> Result<(), ApiError> {
    let meta = object.meta_mut();
    let sent = meta.namespace.as_deref().filter(|n| !n.is_empty());
    if namespaced && sent.is_some() && sent != namespace {
        let why = "the namespace of the provided object does not match the namespace sent on the request";
        return Err(ApiError::BadRequest(why.into()));
    }
    meta.namespace = namespace.filter(|_| namespaced).map(Into::into);
    Ok(())
}

/// Computes the new object from the stored one. Called again after each conflict with another write.
pub(crate) type Change<'a> = dyn FnMut(&CurrentObject<'_>) -> Result<ManagedObject, ApiError> + Send + 'a;

/// Changes a stored object. Removes it instead if the change takes away the last finalizer of an object marked for
/// deletion. Writes nothing if the result equals the stored object apart from the times of field owners.
pub(crate) async fn modify(
    state: &ServerState,
    actor: &Actor,
    at: ObjectAddress<'_>,
    part: ObjectPart,
    source: UpdateSource,
    mode: WriteMode,
    change: &mut Change<'_>,
) -> Result<WrittenObject, ApiError> {
    let key = at.key();
    loop {
        let entry = state.store_of(at.kind).get(&key).await?.ok_or_else(|| at.not_found())?;
        let stored = StoredObject::from(&entry);
        let current = CurrentObject::of(at.kind, &entry, &stored)?;
        let ManagedObject { object: mut new, owners } = change(&current)?;
        let CurrentObject { object: old, split: SplitObject { owners: owners_before, .. }, .. } = current;
        check_identity(&at, source, &*new, &*old, entry.modified)?;
        carry_over(&at, part, &mut *new, &*old);
        write_authorization::check_update(&state.security.authorizer, actor, &at, part, &*new, &*old).await?;
        if part == ObjectPart::Main {
            admission::admit_update(state, at.kind, &mut *new, &*old).await?;
        }
        restore_other_parts(&at, part, &mut *new, &*old);
        validate(&at, part, &*new, &*old)?;
        if new.meta().deletion_timestamp.is_some() && is_removable(at.kind, &*new) {
            let value = EncodedObject::of(&mut *new).with_owners(&owners);
            let last = WrittenObject::new(StoredObject { value, ..stored }, new);
            if mode == WriteMode::DryRun {
                return Ok(last);
            }
            // The last finalizer is gone: remove the object.
            match state.store_of(at.kind).delete(&key, entry.modified).await {
                Ok(_) => return Ok(last),
                Err(WriteError::Conflict { .. }) => continue,
                Err(WriteError::Missing { .. }) => return Err(at.not_found()),
                Err(error) => return Err(error.into()),
            }
        }
        let encoded = EncodedObject::of(&mut *new);
        // A write that would change only the times of field owners is not stored.
        let is_unchanged =
            encoded.equals_stored(&owners_before, &entry.value) && owners.equals_ignoring_times(&owners_before);
        let is_always_stored =
            at.descriptor().first_update == FirstUpdate::AlwaysStored && entry.modified == entry.created;
        if is_unchanged && !is_always_stored {
            return Ok(WrittenObject::new(stored, new));
        }
        let value = encoded.with_owners(if is_unchanged { &owners_before } else { &owners });
        if mode == WriteMode::DryRun {
            return Ok(WrittenObject::new(StoredObject { value, ..stored }, new));
        }
        match state.store_of(at.kind).update(&key, entry.modified, value.clone()).await {
            Ok(revision) => return Ok(WrittenObject::new(StoredObject { value, revision }, new)),
            // Computed again from the new state. A change that names a resourceVersion fails there.
            Err(WriteError::Conflict { .. }) => {}
            Err(WriteError::Missing { .. }) => return Err(at.not_found()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns true if neither finalizers, nor a grace period, nor the kind's own rule delays the removal of a deleted
/// object.
pub(crate) fn is_removable(kind: &dyn Kind, object: &dyn Object) -> bool {
    let meta = object.meta();
    meta.finalizers.as_ref().is_none_or(Vec::is_empty)
        && meta.deletion_grace_period_seconds.unwrap_or(0) == 0
        && !kind.is_deletion_blocked(object)
}

fn check_identity(
    at: &ObjectAddress<'_>,
    source: UpdateSource,
    new: &dyn Object,
    old: &dyn Object,
    current: u64,
) -> Result<(), ApiError> {
    let d = at.descriptor();
    let sent = new.meta();
    if let Some(name) = sent.name.as_deref().filter(|n| !n.is_empty() && *n != at.name) {
        return Err(ApiError::BadRequest(format!(
            "the name of the object ({name}) does not match the name on the URL ({})",
            at.name
        )));
    }
    if d.namespaced && sent.namespace.as_deref().is_some_and(|n| !n.is_empty() && Some(n) != at.namespace) {
        let why = "the namespace of the provided object does not match the namespace sent on the request";
        return Err(ApiError::BadRequest(why.into()));
    }
    let old_uid = old.meta().uid.as_deref().unwrap_or_default();
    if let Some(uid) = sent.uid.as_deref().filter(|u| !u.is_empty() && *u != old_uid) {
        return Err(match source {
            UpdateSource::Patch => {
                let error = FieldError::invalid("metadata.uid", uid, "field is immutable");
                ApiError::invalid(d, at.name, vec![error])
            }
            UpdateSource::Put | UpdateSource::Server => ApiError::precondition(d, at.name, "UID", uid, old_uid),
        });
    }
    match sent.resource_version.as_deref().filter(|v| !v.is_empty() && *v != "0") {
        Some(version) => match version.parse::<u64>() {
            Ok(version) if version == current => Ok(()),
            Ok(_) => Err(ApiError::modified(d, at.name)),
            Err(_) => {
                let error = FieldError::invalid("metadata.resourceVersion", version, "must be a number");
                Err(ApiError::invalid(d, at.name, vec![error]))
            }
        },
        None if source == UpdateSource::Put && d.put_version == PutVersion::Required => {
            let error = FieldError::invalid("metadata.resourceVersion", 0, "must be specified for an update");
            Err(ApiError::invalid(d, at.name, vec![error]))
        }
        None => Ok(()),
    }
}

/// Copies the metadata that clients cannot change from the old object, and sets defaults.
fn carry_over(at: &ObjectAddress<'_>, part: ObjectPart, new: &mut dyn Object, old: &dyn Object) {
    if part != ObjectPart::Whole {
        meta::carry_over(new.meta_mut(), old.meta());
        meta::normalise(new.meta_mut());
        at.kind.set_defaults(new);
    }
}

/// Copies everything outside the part that the request may write from the old object.
fn restore_other_parts(at: &ObjectAddress<'_>, part: ObjectPart, new: &mut dyn Object, old: &dyn Object) {
    match part {
        ObjectPart::Main => at.kind.prepare_update(new, old),
        ObjectPart::Status => at.kind.prepare_status(new, old, meta::now()),
        ObjectPart::Finalize => {
            let status = typed::<Namespace>(old).status.clone();
            typed_mut::<Namespace>(new).status = status;
        }
        ObjectPart::Whole => {}
    }
    // The resourceVersion is not stored with the object; the store's revision is added when the object is read.
    new.meta_mut().resource_version = None;
}

fn validate(at: &ObjectAddress<'_>, part: ObjectPart, new: &dyn Object, old: &dyn Object) -> Result<(), ApiError> {
    let mut errors = meta::validate_update(new.meta(), old.meta());
    match part {
        ObjectPart::Main => {
            errors.extend(meta::validate(new.meta(), at.kind.name_rule(), at.descriptor().finalizers()));
            errors.extend(at.kind.validate(new));
            errors.extend(at.kind.validate_update(new, old));
        }
        ObjectPart::Status => errors.extend(at.kind.validate_status(new, old)),
        ObjectPart::Finalize | ObjectPart::Whole => {}
    }
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(at.descriptor(), at.name, errors)) }
}
