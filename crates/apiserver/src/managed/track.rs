//! The door between typed objects and ownership: what the endpoints call.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use serde_json::{Value, json};

use super::apply::{Applied, ApplyError, Wish, apply, update};
use super::entries::{Identity, Operation, Owners};
use super::set::FieldSet;
use crate::endpoint::write::Part;
use crate::kind::{Kind, Object};
use crate::meta;

/// Owner of what was there before ownership was recorded.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";

/// One writer of one kind.
pub(crate) struct Tracker<'a> {
    kind: &'a dyn Kind,
    who: Identity,
    /// What this endpoint cannot change anyway.
    ignored: FieldSet,
}

impl<'a> Tracker<'a> {
    pub(crate) fn new(kind: &'a dyn Kind, part: Part, operation: Operation, manager: &str) -> Self {
        let d = kind.descriptor();
        let subresource = match part {
            Part::Status => "status",
            Part::Finalize => "finalize",
            Part::Main | Part::Whole => "",
        };
        let ignored = match part {
            Part::Main if d.has_status => FieldSet::of(&[&["status"]]),
            Part::Status if d.plural == "volumeattachments" || d.custom => FieldSet::of(&[&["spec"], &["metadata"]]),
            Part::Status => FieldSet::of(&[&["spec"]]),
            Part::Main | Part::Finalize | Part::Whole => FieldSet::default(),
        };
        let manager = if manager.is_empty() { "unknown" } else { manager };
        let who = Identity {
            manager: manager.into(),
            operation,
            api_version: d.api_version(),
            subresource: subresource.into(),
        };
        Self { kind, who, ignored }
    }

    /// Records who makes a new object. The object gets its defaults first: they are the maker's, too.
    pub(crate) fn created(&self, object: &mut dyn Object) {
        meta::normalise(object.meta_mut());
        self.kind.default(object);
        let sent = object.meta_mut().managed_fields.take();
        let owners = if is_reset(sent.as_ref()) { Owners::default() } else { Owners::decode(sent.as_ref()) };
        let new = object.to_value();
        let owners = update(self.kind.schema(), &json!({}), &new, owners, &self.who, &self.ignored, meta::now());
        object.meta_mut().managed_fields = owners.encode();
    }

    /// Records who changes an object.
    pub(crate) fn updated(&self, old: &dyn Object, new: &mut dyn Object) {
        meta::normalise(new.meta_mut());
        self.kind.default(new);
        let sent = new.meta_mut().managed_fields.take();
        let Some(owners) = self.known(old.meta(), sent) else { return };
        let old = plain(old);
        let owners = update(self.kind.schema(), &old, &new.to_value(), owners, &self.who, &self.ignored, meta::now());
        new.meta_mut().managed_fields = owners.encode();
    }

    /// The owners to start from; none if ownership of this object is not recorded.
    fn known(&self, old: &ObjectMeta, sent: Option<Vec<ManagedFieldsEntry>>) -> Option<Owners> {
        let live = || Owners::decode(old.managed_fields.as_ref());
        let owners = if !self.who.subresource.is_empty() {
            live()
        } else if is_reset(sent.as_ref()) {
            return None;
        } else {
            // A client that does not know of managedFields leaves them out; it does not mean to remove them.
            Some(Owners::decode(sent.as_ref())).filter(|o| !o.is_empty()).unwrap_or_else(live)
        };
        Some(owners).filter(|o| !o.is_empty())
    }

    /// What applying a configuration makes of an object. The values are without managedFields.
    pub(crate) fn apply(
        &self,
        live: &Value,
        recorded: Option<&Vec<ManagedFieldsEntry>>,
        config: &Value,
        force: bool,
    ) -> Result<Applied, ApplyError> {
        let schema = self.kind.schema();
        let now = meta::now();
        let mut owners = Owners::decode(recorded);
        if owners.is_empty() {
            let who = Identity { manager: BEFORE_FIRST_APPLY.into(), operation: Operation::Update, ..self.who.clone() };
            owners = update(schema, &json!({}), live, owners, &who, &self.ignored, now);
        }
        let wish = Wish { config, who: &self.who, force, ignored: &self.ignored };
        apply(schema, live, owners, &wish, now)
    }
}

/// Has the client asked to forget all owners?
fn is_reset(sent: Option<&Vec<ManagedFieldsEntry>>) -> bool {
    sent.is_some_and(|entries| entries.is_empty() || *entries == [ManagedFieldsEntry::default()])
}

fn plain(object: &dyn Object) -> Value {
    let mut value = object.to_value();
    if let Some(Value::Object(metadata)) = value.get_mut("metadata") {
        metadata.remove("managedFields");
    }
    value
}

/// A write that would change nothing but the times of owners changes nothing.
pub(crate) fn keep_times(new: &mut dyn Object, old: &dyn Object, stored: &[u8]) {
    let (ours, theirs) = (&new.meta().managed_fields, &old.meta().managed_fields);
    if ours == theirs || !same_but_times(ours.as_deref(), theirs.as_deref()) {
        return;
    }
    let kept = std::mem::replace(&mut new.meta_mut().managed_fields, theirs.clone());
    if new.encode() != stored {
        new.meta_mut().managed_fields = kept;
    }
}

fn same_but_times(ours: Option<&[ManagedFieldsEntry]>, theirs: Option<&[ManagedFieldsEntry]>) -> bool {
    let (ours, theirs) = (ours.unwrap_or_default(), theirs.unwrap_or_default());
    let same = |a: &ManagedFieldsEntry, b: &ManagedFieldsEntry| {
        a.manager == b.manager
            && a.operation == b.operation
            && a.api_version == b.api_version
            && a.subresource == b.subresource
            && a.fields_v1 == b.fields_v1
    };
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| same(a, b))
}
