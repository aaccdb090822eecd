//! Computes the managedFields after a write. The endpoints call this; it uses the cache of results where it can.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use serde_json::{Value, json};

use super::managed_object::SplitObject;
use crate::cache::ownership::{CachedOwnership, OwnershipCacheKey};
use crate::field_ownership::RawManagedFields;
use crate::field_ownership::apply::{ApplyError, ApplyRequest, apply, update};
use crate::field_ownership::compare::{difference, difference_of_json};
use crate::field_ownership::entries::{ManagerId, Operation, Owners};
use crate::field_ownership::set::FieldSet;
use crate::kind::{Kind, Object};
use crate::meta;
use crate::part::ObjectPart;

/// The manager that owns the fields of an object whose owners were not recorded before its first apply.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";

/// Tracks the field owners for writes of one manager to one kind.
pub struct OwnershipTracker<'a> {
    kind: &'a dyn Kind,
    part: ObjectPart,
    operation: Operation,
    manager: &'a str,
}

impl<'a> OwnershipTracker<'a> {
    pub fn new(kind: &'a dyn Kind, part: ObjectPart, operation: Operation, manager: &'a str) -> Self {
        let manager = if manager.is_empty() { "unknown" } else { manager };
        Self { kind, part, operation, manager }
    }

    fn manager_id(&self) -> ManagerId {
        let api_version = self.kind.descriptor().api_version();
        let (manager, subresource) = (self.manager.into(), self.subresource().into());
        ManagerId { manager, operation: self.operation, api_version, subresource }
    }

    fn subresource(&self) -> &'static str {
        match self.part {
            ObjectPart::Status => "status",
            ObjectPart::Finalize => "finalize",
            ObjectPart::Main | ObjectPart::Whole => "",
        }
    }

    /// The fields that writes to this part of the object do not change.
    fn ignored(&self) -> FieldSet {
        let d = self.kind.descriptor();
        match self.part {
            ObjectPart::Main if d.has_status => FieldSet::from_paths(&[&["status"]]),
            ObjectPart::Status if d.plural == "volumeattachments" || d.custom => {
                FieldSet::from_paths(&[&["spec"], &["metadata"]])
            }
            ObjectPart::Status => FieldSet::from_paths(&[&["spec"]]),
            ObjectPart::Main | ObjectPart::Finalize | ObjectPart::Whole => FieldSet::default(),
        }
    }

    /// The managedFields of a new object. Sets the defaults of the object, because the creator owns them, too, and removes
    /// the managedFields that the client sent. `encoded` is the JSON of an object that has its defaults and no
    /// managedFields, if the caller has it; `object` then stays unchanged.
    pub fn owners_after_create(&self, object: &mut dyn Object, encoded: Option<&[u8]>) -> RawManagedFields {
        if let Some(encoded) = encoded {
            return self.owners_after_write(b"{}", encoded, &RawManagedFields::default(), meta::now());
        }
        meta::normalise(object.meta_mut());
        self.kind.set_defaults(object);
        let sent = object.meta_mut().managed_fields.take();
        let empty = b"{}";
        match sent.filter(|sent| !is_reset(Some(sent))) {
            Some(sent) => self.compute_encoded(empty, &object.encode(), Owners::from_client(Some(&sent)), meta::now()),
            None => self.owners_after_write(empty, &object.encode(), &RawManagedFields::default(), meta::now()),
        }
    }

    /// The managedFields of a changed object. `new` and `encoded` are as in [`Self::owners_after_create`].
    pub fn owners_after_update(
        &self,
        old: &SplitObject<'_>,
        new: &mut dyn Object,
        encoded: Option<&[u8]>,
    ) -> RawManagedFields {
        if let Some(encoded) = encoded {
            return match old.owners.as_bytes() {
                b"" => RawManagedFields::default(),
                _ => self.owners_after_write(&old.json, encoded, &old.owners, meta::now()),
            };
        }
        meta::normalise(new.meta_mut());
        self.kind.set_defaults(new);
        let mut sent = new.meta_mut().managed_fields.take();
        if !self.subresource().is_empty() {
            sent = None;
        } else if is_reset(sent.as_ref()) {
            return RawManagedFields::default();
        }
        // A client that does not send managedFields does not know of them. Only an explicitly empty list removes them.
        match Some(Owners::from_client(sent.as_ref())).filter(|o| !o.is_empty()) {
            Some(owners) => self.compute_encoded(&old.json, &new.encode(), owners, meta::now()),
            None if old.owners.as_bytes().is_empty() => RawManagedFields::default(),
            None => self.owners_after_write(&old.json, &new.encode(), &old.owners, meta::now()),
        }
    }

    /// The managedFields after a write, from the cache or computed.
    fn owners_after_write(
        &self,
        old: &[u8],
        new: &[u8],
        before: &RawManagedFields,
        now: Timestamp,
    ) -> RawManagedFields {
        let Some(key) = self.cache_key(old, new, before) else { return self.compute_uncached(old, new, before, now) };
        let cache = &self.kind.caches().ownership;
        if let Some(cached) = cache.get(&key.key) {
            return cached.at_times(&key, now);
        }
        match CachedOwnership::of(&key, |owners, now| self.compute_owners(old, new, owners, now)).map(Arc::new) {
            Some(computed) => {
                cache.insert(&key.key, computed.clone());
                computed.at_times(&key, now)
            }
            None => self.compute_uncached(old, new, before, now),
        }
    }

    fn cache_key<'b>(&self, old: &[u8], new: &[u8], before: &'b RawManagedFields) -> Option<OwnershipCacheKey<'b>> {
        OwnershipCacheKey::of((self.part, self.operation, self.manager), before, old, new)
    }

    /// As `owners_after_write`, without the cache.
    fn compute_uncached(&self, old: &[u8], new: &[u8], before: &RawManagedFields, now: Timestamp) -> RawManagedFields {
        match before.owners() {
            // The stored managedFields are invalid: they are removed, as if no owners had been recorded.
            owners if owners.is_empty() && !before.as_bytes().is_empty() => RawManagedFields::default(),
            owners => self.compute_encoded(old, new, owners, now),
        }
    }

    fn compute_encoded(&self, old: &[u8], new: &[u8], owners: Owners, now: Timestamp) -> RawManagedFields {
        RawManagedFields::new(self.compute_owners(old, new, owners, now))
    }

    fn compute_owners(&self, old: &[u8], new: &[u8], before: Owners, now: Timestamp) -> Owners {
        let found = difference_of_json(self.kind.schema(), old, new).ignoring(&self.ignored());
        update(&found, before, &self.manager_id(), now)
    }

    /// Applies a configuration. Returns the new object, or `None` if only owners change, and the new managedFields. The
    /// values do not contain managedFields.
    pub fn apply(
        &self,
        live: &Value,
        before: &RawManagedFields,
        config: &Value,
        force: bool,
    ) -> Result<(Option<Value>, RawManagedFields), ApplyError> {
        let schema = self.kind.schema();
        let now = meta::now();
        let (id, ignored) = (self.manager_id(), self.ignored());
        let mut owners = before.owners();
        if owners.is_empty() {
            let id = ManagerId { manager: BEFORE_FIRST_APPLY.into(), operation: Operation::Update, ..id.clone() };
            owners = update(&difference(schema, &json!({}), live).ignoring(&ignored), owners, &id, now);
        }
        let request = ApplyRequest { config, id: &id, force, ignored: &ignored };
        let applied = apply(schema, live, owners, &request, now)?;
        Ok((applied.object, RawManagedFields::new(applied.owners)))
    }
}

/// Returns true if the client asks to remove all owners: it sent an empty list, or a list with one empty entry.
fn is_reset(sent: Option<&Vec<ManagedFieldsEntry>>) -> bool {
    sent.is_some_and(|entries| entries.is_empty() || *entries == [ManagedFieldsEntry::default()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random_object::RandomObject;
    use crate::test_kinds;

    fn object(body: &Value) -> Vec<u8> {
        let mut body = body.as_object().cloned().unwrap_or_default();
        let metadata = body.remove("metadata").unwrap_or_else(|| json!({}));
        let mut text = format!(r#"{{"apiVersion":"v1","kind":"K","metadata":{metadata}"#);
        for (name, value) in body.iter().filter(|(name, _)| !["apiVersion", "kind"].contains(&name.as_str())) {
            text += &format!(r#","{name}":{value}"#);
        }
        (text + "}").into_bytes()
    }

    /// The same object with other values outside lists. Its owners must be the same.
    fn variant(value: &Value) -> Value {
        match value {
            Value::Object(members) => members.iter().map(|(name, value)| (name.clone(), variant(value))).collect(),
            Value::String(text) if !text.contains('"') => format!("{text} of another").into(),
            Value::Number(number) if number.is_u64() => (number.as_u64().unwrap() * 3 + 7).into(),
            other => other.clone(),
        }
    }

    fn at(second: usize) -> Timestamp {
        Timestamp::from_second(i64::try_from(second).unwrap()).unwrap()
    }

    #[test]
    fn cached_owners_equal_computed_owners() {
        let kinds = test_kinds::all();
        let mut cache_hits = 0;
        for seed in 0..600 {
            let mut random = RandomObject(seed);
            let kind = &*kinds[random.below(kinds.len())];
            let root = kind.schema().root();
            let (mut value, mut old) = (json!({}), b"{}".to_vec());
            let [mut owners, mut owners_of_variant] = [RawManagedFields::default(), RawManagedFields::default()];
            let mut old_of_variant = old.clone();
            for step in 0..random.below(8) + 1 {
                value = if step == 0 { random.value(root, 0) } else { random.changed(root, &value, 0) };
                let part = [ObjectPart::Main, ObjectPart::Main, ObjectPart::Status, ObjectPart::Whole][random.below(4)];
                let manager = ["kubectl", "a \"b\"", "controller", "x,\"time\":\"y", ""][random.below(5)];
                let tracker = OwnershipTracker::new(kind, part, Operation::Update, manager);
                let mut write = |old: &mut Vec<u8>, new: Vec<u8>, owners: &mut RawManagedFields, now| {
                    let want = tracker.compute_uncached(old, &new, owners, now);
                    assert_eq!(tracker.owners_after_write(old, &new, owners, now), want, "seed {seed}, step {step}");
                    if let Some(key) = tracker.cache_key(old, &new, owners) {
                        let is_cached = kind.caches().ownership.get(&key.key).is_some();
                        assert!(is_cached || key.key.len() > 2000, "seed {seed}, step {step}");
                        cache_hits += usize::from(is_cached);
                    }
                    (*old, *owners) = (new, want);
                };
                write(&mut old, object(&value), &mut owners, at(1_700_000_000 + random.below(4)));
                let other = object(&variant(&value));
                write(&mut old_of_variant, other, &mut owners_of_variant, at(1_700_000_000 + random.below(4)));
            }
        }
        assert!(cache_hits > 2000, "only {cache_hits} were answered from the cache");
    }

    #[test]
    fn beyond_ten_owners_the_times_decide_which_are_merged() {
        let kinds = test_kinds::all();
        let kind = kinds.iter().find(|kind| kind.descriptor().plural == "configmaps").unwrap();
        let (mut value, mut old, mut owners) = (json!({ "metadata": {} }), b"{}".to_vec(), RawManagedFields::default());
        for round in 0..14 {
            let manager = format!("m{}", round % 12);
            let tracker = OwnershipTracker::new(&**kind, ObjectPart::Main, Operation::Update, &manager);
            value["metadata"]["annotations"][format!("a{round}")] = "x".into();
            let (new, now) = (object(&value), at(1_700_000_000 - round));
            let after = tracker.owners_after_write(&old, &new, &owners, now);
            assert_eq!(after, tracker.compute_uncached(&old, &new, &owners, now), "{round}");
            (old, owners) = (new, after);
        }
        assert!(String::from_utf8_lossy(owners.as_bytes()).contains("ancient-changes"));
    }

    #[test]
    fn similar_writes_compute_owners_once() {
        let kinds = test_kinds::all();
        let kind = kinds.iter().find(|kind| kind.descriptor().plural == "persistentvolumeclaims").unwrap();
        let tracker = OwnershipTracker::new(&**kind, ObjectPart::Main, Operation::Update, "kubectl");
        let claim = |name: &str, class: &str| {
            object(
                &json!({ "metadata": { "name": name, "finalizers": ["a/b"] }, "spec": { "storageClassName": class } }),
            )
        };
        let nothing = RawManagedFields::default();
        let (one, other) = (claim("one", "fast"), claim("other", "slow"));
        let is_cached = |old: &[u8], new: &[u8], before: &RawManagedFields| {
            let key = tracker.cache_key(old, new, before).unwrap();
            kind.caches().ownership.get(&key.key).is_some()
        };
        assert!(!is_cached(b"{}", &one, &nothing));
        let first = tracker.owners_after_write(b"{}", &one, &nothing, at(100));
        assert!(is_cached(b"{}", &other, &nothing), "the name and the class do not matter");
        let second = tracker.owners_after_write(b"{}", &other, &nothing, at(200));
        let text = |raw: &RawManagedFields| String::from_utf8(raw.as_bytes().to_vec()).unwrap();
        assert_eq!(text(&first).replace("00:01:40", "00:03:20"), text(&second));
        let changed = claim("one", "faster");
        let third = tracker.owners_after_write(&one, &changed, &first, at(300));
        assert!(is_cached(&other, &claim("other", "faster"), &second), "nor do times");
        assert_eq!(third, tracker.compute_uncached(&one, &changed, &first, at(300)));
        let other_manager = OwnershipTracker::new(&**kind, ObjectPart::Main, Operation::Update, "another-manager");
        assert!(kind.caches().ownership.get(&other_manager.cache_key(b"{}", &one, &nothing).unwrap().key).is_none());
        let more = object(&json!({ "metadata": { "name": "one", "finalizers": ["c/d"] }, "spec": {} }));
        assert!(!is_cached(b"{}", &more, &nothing), "what is in a list does");
    }
}
