//! The two ways an object comes to be stored: inserted, or modified from what is stored. Everything that must look at
//! the current state runs inside the compare-and-swap loop.

use std::sync::Arc;

use cleat_store::{Entry, WriteError};
use k8s_openapi::api::core::v1::Namespace;

use crate::admission;
use crate::api::Api;
use crate::http::query::Effect;
use cleat_apimachinery::address::ObjectAddress;
use cleat_apimachinery::descriptor::{FirstWrite, PutVersion};
use cleat_apimachinery::error::ApiError;
use cleat_apimachinery::field::FieldError;
use cleat_apimachinery::kind::{Kind, Object, typed, typed_mut};
use cleat_apimachinery::managed_fields::{Current, Document, Encoded, SplitObject, decode};
use cleat_apimachinery::meta;
use cleat_apimachinery::part::ObjectPart;
use cleat_apimachinery::render::Stored;
use cleat_auth::actor::Actor;
use cleat_auth::write_authorization;

const NAME_ATTEMPTS: usize = 8;

/// What a client that names the wrong incarnation is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Put,
    Patch,
    Server,
}

/// What a write has made, as it is stored and as it is.
pub(crate) struct Written {
    pub(crate) stored: Stored,
    /// Without managedFields.
    pub(crate) object: Arc<dyn Object>,
}

impl Written {
    /// What is not to be found by anybody.
    pub(super) fn shown(stored: Stored, mut object: Box<dyn Object>) -> Self {
        object.meta_mut().resource_version = (stored.revision > 0).then(|| stored.revision.to_string());
        Self { stored, object: object.into() }
    }

    /// What is stored now; whoever changes it next finds it.
    pub(super) fn now(api: &Api, kind: &dyn Kind, stored: Stored, object: Box<dyn Object>) -> Self {
        let written = Self::shown(stored, object);
        if kind.is_cacheable() {
            let Stored { value, revision } = &written.stored;
            api.decoded_objects.insert(*revision, value.len(), written.object.clone());
        }
        written
    }
}

pub(crate) async fn insert(
    api: &Api,
    actor: &Actor,
    kind: &dyn Kind,
    namespace: Option<&str>,
    document: Document,
    effect: Effect,
) -> Result<Written, ApiError> {
    let Document { mut object, owners } = document;
    let d = kind.descriptor();
    let now = meta::now();
    if object.meta().resource_version.as_deref().is_some_and(|v| !v.is_empty() && v != "0") {
        return Err(ApiError::Internal("resourceVersion should not be set on objects to be created".into()));
    }
    meta::wipe_for_create(object.meta_mut());
    place(d.namespaced, namespace, &mut *object)?;
    meta::normalise(object.meta_mut());
    kind.default(&mut *object);
    write_authorization::create(&api.security.authorizer, actor, kind, &*object).await?;
    admission::create(api, kind, &mut *object).await?;
    meta::stamp_created(object.meta_mut(), now);
    let base = object.meta().generate_name.clone().filter(|_| object.meta().name.is_none());
    // Where the name is made up, it may have to be made up again.
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
        errors.extend(kind.validate_new(&*object));
        if !errors.is_empty() {
            return Err(ApiError::invalid(d, &name, errors));
        }
        let value = Encoded::of(&mut *object).with(&owners);
        let key = d.key(namespace, &name);
        if effect == Effect::DryRun {
            return match api.of(kind).get(&key).await? {
                Some(entry) => Err(exists(kind, &name, &entry)),
                None => Ok(Written::shown(Stored { value, revision: 0 }, object)),
            };
        }
        match api.of(kind).create(&key, value.clone()).await {
            Ok(revision) => return Ok(Written::now(api, kind, Stored { value, revision }, object)),
            Err(WriteError::Exists { .. }) if base.is_some() && attempt < NAME_ATTEMPTS => {}
            Err(WriteError::Exists { current, .. }) => return Err(exists(kind, &name, &current)),
            Err(error) => return Err(error.into()),
        }
    }
}

fn exists(kind: &dyn Kind, name: &str, current: &Entry) -> ApiError {
    let deleting = decode(kind, current).is_ok_and(|o| o.meta().deletion_timestamp.is_some());
    ApiError::AlreadyExists { resource: kind.descriptor().resource(), name: name.into(), deleting }
}

/// Puts the object where the URL says.
fn place(namespaced: bool, namespace: Option<&str>, object: &mut dyn Object) -> Result<(), ApiError> {
    let meta = object.meta_mut();
    let sent = meta.namespace.as_deref().filter(|n| !n.is_empty());
    if namespaced && sent.is_some() && sent != namespace {
        let why = "the namespace of the provided object does not match the namespace sent on the request";
        return Err(ApiError::BadRequest(why.into()));
    }
    meta.namespace = namespace.filter(|_| namespaced).map(Into::into);
    Ok(())
}

/// Computes the new object from the current one; runs again if somebody else wrote in between.
pub(crate) type Change<'a> = dyn FnMut(&Current<'_>) -> Result<Document, ApiError> + Send + 'a;

pub(crate) async fn modify(
    api: &Api,
    actor: &Actor,
    at: ObjectAddress<'_>,
    part: ObjectPart,
    origin: Origin,
    effect: Effect,
    change: &mut Change<'_>,
) -> Result<Written, ApiError> {
    let key = at.key();
    loop {
        let entry = api.of(at.kind).get(&key).await?.ok_or_else(|| at.not_found())?;
        let stored = Stored::from(&entry);
        let current = Current::of(&api.decoded_objects, at.kind, &entry, &stored)?;
        let Document { object: mut new, owners } = change(&current)?;
        let Current { object: old, divided: SplitObject { owners: owners_before, .. }, .. } = current;
        check_identity(&at, origin, &*new, &*old, entry.modified)?;
        complete(&at, part, &mut *new, &*old);
        write_authorization::update(&api.security.authorizer, actor, &at, part, &*new, &*old).await?;
        if part == ObjectPart::Main {
            admission::update(api, at.kind, &mut *new, &*old).await?;
        }
        restore(&at, part, &mut *new, &*old);
        check_valid(&at, part, &*new, &*old)?;
        if new.meta().deletion_timestamp.is_some() && is_free(at.kind, &*new) {
            let value = Encoded::of(&mut *new).with(&owners);
            let last = Written::shown(Stored { value, ..stored }, new);
            if effect == Effect::DryRun {
                return Ok(last);
            }
            // The last thing that held a deleted object is gone, and so is the object.
            match api.of(at.kind).delete(&key, entry.modified).await {
                Ok(_) => return Ok(last),
                Err(WriteError::Conflict { .. }) => continue,
                Err(WriteError::Missing { .. }) => return Err(at.not_found()),
                Err(error) => return Err(error.into()),
            }
        }
        let encoded = Encoded::of(&mut *new);
        // A write that would change nothing but the times of owners changes nothing.
        let same = encoded.is(&owners_before, &entry.value) && owners.same_but_times(&owners_before);
        let counts = at.descriptor().first_write == FirstWrite::Counts && entry.modified == entry.created;
        if same && !counts {
            return Ok(Written::now(api, at.kind, stored, new));
        }
        let value = encoded.with(if same { &owners_before } else { &owners });
        if effect == Effect::DryRun {
            return Ok(Written::shown(Stored { value, ..stored }, new));
        }
        match api.of(at.kind).update(&key, entry.modified, value.clone()).await {
            Ok(revision) => return Ok(Written::now(api, at.kind, Stored { value, revision }, new)),
            // The change is computed again; if it insists on a resourceVersion it now fails.
            Err(WriteError::Conflict { .. }) => {}
            Err(WriteError::Missing { .. }) => return Err(at.not_found()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Does nothing hold this object once it is deleted?
pub(crate) fn is_free(kind: &dyn Kind, object: &dyn Object) -> bool {
    let meta = object.meta();
    meta.finalizers.as_ref().is_none_or(Vec::is_empty)
        && meta.deletion_grace_period_seconds.unwrap_or(0) == 0
        && !kind.is_held(object)
}

fn check_identity(
    at: &ObjectAddress<'_>,
    origin: Origin,
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
        return Err(match origin {
            Origin::Patch => {
                let error = FieldError::invalid("metadata.uid", uid, "field is immutable");
                ApiError::invalid(d, at.name, vec![error])
            }
            Origin::Put | Origin::Server => ApiError::precondition(d, at.name, "UID", uid, old_uid),
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
        None if origin == Origin::Put && d.put_version == PutVersion::Required => {
            let error = FieldError::invalid("metadata.resourceVersion", 0, "must be specified for an update");
            Err(ApiError::invalid(d, at.name, vec![error]))
        }
        None => Ok(()),
    }
}

/// Carries over the metadata that is the server's own, and fills defaults.
fn complete(at: &ObjectAddress<'_>, part: ObjectPart, new: &mut dyn Object, old: &dyn Object) {
    if part != ObjectPart::Whole {
        meta::carry_over(new.meta_mut(), old.meta());
        meta::normalise(new.meta_mut());
        at.kind.default(new);
    }
}

/// Puts back everything outside the part.
fn restore(at: &ObjectAddress<'_>, part: ObjectPart, new: &mut dyn Object, old: &dyn Object) {
    match part {
        ObjectPart::Main => at.kind.prepare_update(new, old),
        ObjectPart::Status => at.kind.prepare_status(new, old, meta::now()),
        ObjectPart::Finalize => {
            let status = typed::<Namespace>(old).status.clone();
            typed_mut::<Namespace>(new).status = status;
        }
        ObjectPart::Whole => {}
    }
    // Neither the one it was read at nor the old object's is stored.
    new.meta_mut().resource_version = None;
}

fn check_valid(at: &ObjectAddress<'_>, part: ObjectPart, new: &dyn Object, old: &dyn Object) -> Result<(), ApiError> {
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
