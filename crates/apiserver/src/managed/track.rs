//! The door between typed objects and ownership: what the endpoints call.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use serde_json::{Value, json};

use super::apply::{ApplyError, Wish, apply, update};
use super::compare::{difference, difference_of_texts};
use super::document::{Divided, Recorded};
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
    pub(crate) fn created(&self, object: &mut dyn Object) -> Recorded {
        meta::normalise(object.meta_mut());
        self.kind.default(object);
        let sent = object.meta_mut().managed_fields.take();
        let owners = if is_reset(sent.as_ref()) { Owners::default() } else { Owners::sent(sent.as_ref()) };
        self.taken(b"{}", object, owners)
    }

    /// Records who changes an object.
    pub(crate) fn updated(&self, old: &Divided<'_>, new: &mut dyn Object) -> Recorded {
        meta::normalise(new.meta_mut());
        self.kind.default(new);
        let sent = new.meta_mut().managed_fields.take();
        match self.known(&old.owners, sent) {
            Some(owners) => self.taken(&old.text, new, owners),
            None => Recorded::default(),
        }
    }

    fn taken(&self, old: &[u8], new: &dyn Object, owners: Owners) -> Recorded {
        let found = difference_of_texts(self.kind.schema(), old, &new.encode()).ignoring(&self.ignored);
        Recorded::new(update(&found, owners, &self.who, meta::now()))
    }

    /// The owners to start from; none if ownership of this object is not recorded.
    fn known(&self, old: &Recorded, sent: Option<Vec<ManagedFieldsEntry>>) -> Option<Owners> {
        let owners = if !self.who.subresource.is_empty() {
            old.owners()
        } else if is_reset(sent.as_ref()) {
            return None;
        } else {
            // A client that does not know of managedFields leaves them out; it does not mean to remove them.
            Some(Owners::sent(sent.as_ref())).filter(|o| !o.is_empty()).unwrap_or_else(|| old.owners())
        };
        Some(owners).filter(|o| !o.is_empty())
    }

    /// What applying a configuration makes of an object. The values are without managedFields.
    pub(crate) fn apply(
        &self,
        live: &Value,
        recorded: &Recorded,
        config: &Value,
        force: bool,
    ) -> Result<(Option<Value>, Recorded), ApplyError> {
        let schema = self.kind.schema();
        let now = meta::now();
        let mut owners = recorded.owners();
        if owners.is_empty() {
            let who = Identity { manager: BEFORE_FIRST_APPLY.into(), operation: Operation::Update, ..self.who.clone() };
            owners = update(&difference(schema, &json!({}), live).ignoring(&self.ignored), owners, &who, now);
        }
        let wish = Wish { config, who: &self.who, force, ignored: &self.ignored };
        let applied = apply(schema, live, owners, &wish, now)?;
        Ok((applied.object, Recorded::new(applied.owners)))
    }
}

/// Has the client asked to forget all owners?
fn is_reset(sent: Option<&Vec<ManagedFieldsEntry>>) -> bool {
    sent.is_some_and(|entries| entries.is_empty() || *entries == [ManagedFieldsEntry::default()])
}
