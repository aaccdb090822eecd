//! The rules of ownership. An update owns the fields that it changes. An apply owns the fields of its configuration, and
//! removes fields that its last configuration had and this one has not. It changes fields of other owners only with force.

use std::sync::LazyLock;

use jiff::Timestamp;
use serde_json::Value;

use super::compare::{Difference, difference, fields};
use super::entries::{ManagerId, Owners};
use super::merge::{all_fields, check, merge_values, with_structs, without};
use super::set::FieldSet;
use crate::schema::Schema;

/// Fields that have no owner: they identify the object, or only the server sets them.
const UNOWNED: &[&[&str]] = &[
    &["apiVersion"],
    &["kind"],
    &["metadata"],
    &["metadata", "name"],
    &["metadata", "namespace"],
    &["metadata", "creationTimestamp"],
    &["metadata", "selfLink"],
    &["metadata", "uid"],
    &["metadata", "generation"],
    &["metadata", "managedFields"],
    &["metadata", "resourceVersion"],
];

static UNOWNED_SET: LazyLock<FieldSet> = LazyLock::new(|| FieldSet::from_paths(UNOWNED));

/// A field of the configuration that another manager owns with another value.
#[derive(Clone, Debug, PartialEq)]
pub struct Conflict {
    pub owner: ManagerId,
    pub path: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ApplyError {
    Conflicts(Vec<Conflict>),
    /// The configuration does not match the schema of the kind.
    InvalidConfig(String),
}

/// The outcome of an apply.
#[derive(Debug)]
pub struct ApplyOutcome {
    /// The object after the apply. `None` if only owners change.
    pub object: Option<Value>,
    pub owners: Owners,
}

/// The owners after an update: the writer owns what it changed.
pub fn update(found: &Difference, mut owners: Owners, id: &ManagerId, now: Timestamp) -> Owners {
    // Changed fields lose their other owners, removed fields lose all owners.
    let mut changed = changed_fields(found);
    for owner in owners.others_mut(id) {
        owner.set.subtract(&changed);
        owner.set.subtract(&found.removed);
    }
    changed.subtract(&UNOWNED_SET);
    let mut own = owners.find_mut(id).map(|o| std::mem::take(&mut o.set)).unwrap_or_default();
    own.subtract(&found.removed);
    owners.set(id, own.union(&changed));
    if !changed.is_empty()
        && let Some(owner) = owners.find_mut(id)
    {
        owner.time = Some(now);
    }
    owners.drop_empty();
    owners.merge_oldest_updates();
    owners
}

fn changed_fields(found: &Difference) -> FieldSet {
    found.modified.clone().union(&found.added)
}

/// The parameters of an apply.
pub struct ApplyRequest<'a> {
    /// The applied configuration.
    pub config: &'a Value,
    pub id: &'a ManagerId,
    pub force: bool,
    /// Fields that this endpoint does not change.
    pub ignored: &'a FieldSet,
}

/// Applies a configuration to the live object.
pub fn apply(
    schema: &Schema,
    live: &Value,
    mut owners: Owners,
    request: &ApplyRequest<'_>,
    now: Timestamp,
) -> Result<ApplyOutcome, ApplyError> {
    let ty = schema.root();
    check(ty, request.config, "").map_err(ApplyError::InvalidConfig)?;
    let listed = fields(schema, request.config).without_subtrees(request.ignored);
    let last = owners.find(request.id).map(|o| o.set.clone());
    let before = owners.clone();
    owners.set(request.id, listed);
    let merged = merge_values(ty, live, request.config);
    let new = match &last {
        Some(last) => prune(schema, &merged, last, &owners),
        None => merged,
    };
    let found = difference(schema, live, &new).ignoring(request.ignored);
    let changed = changed_fields(&found);
    let mut conflicts = Vec::new();
    for owner in owners.others(request.id) {
        let conflicting = owner.set.intersection(&changed);
        conflicts.extend(conflicting.paths().into_iter().map(|path| Conflict { owner: owner.id.clone(), path }));
    }
    if !request.force && !conflicts.is_empty() {
        return Err(ApplyError::Conflicts(conflicts));
    }
    for owner in owners.others_mut(request.id) {
        owner.set = owner.set.difference(&changed).difference(&found.removed);
    }
    let own = owners.find(request.id).map(|o| o.set.difference(&UNOWNED_SET)).unwrap_or_default();
    owners.set(request.id, own);
    owners.drop_empty();
    let object = Some(new).filter(|new| new != live);
    if let Some(owner) = owners.find_mut(request.id) {
        // An apply that changes nothing keeps its time; a new owner then has none.
        owner.time = if object.is_some() { Some(now) } else { before.find(request.id).and_then(|o| o.time) };
    }
    Ok(ApplyOutcome { object, owners })
}

/// Removes the fields that the manager applied last time and no longer lists, unless they still have an owner.
fn prune(schema: &Schema, merged: &Value, last: &FieldSet, owners: &Owners) -> Value {
    let ty = schema.root();
    let last = with_structs(ty, last);
    let pruned = without(ty, merged, &last);
    let all = all_fields(ty, merged);
    let owned = owners.iter().fold(FieldSet::default(), |set, owner| set.union(&owner.set));
    // Fields with an owner stay, also those that the manager itself still lists.
    let removed = all.difference(&all_fields(ty, &pruned)).difference(&with_structs(ty, &owned));
    let pruned = without(ty, merged, &removed);
    // Removing a field removes everything inside it. What the manager did not apply last time must stay.
    let removed = all.difference(&all_fields(ty, &pruned)).intersection(&last);
    without(ty, merged, &removed)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ConfigMap, Pod};
    use serde_json::json;

    use super::super::entries::Operation;
    use super::*;

    fn manager_id(manager: &str, operation: Operation) -> ManagerId {
        ManagerId { manager: manager.into(), operation, api_version: "v1".into(), subresource: String::new() }
    }

    /// An object and its owners, which a test changes in several writes.
    struct TrackedObject {
        schema: Schema,
        object: Value,
        owners: Owners,
    }

    impl TrackedObject {
        fn of(schema: Schema) -> Self {
            Self { schema, object: json!({}), owners: Owners::default() }
        }

        fn update(&mut self, manager: &str, new: Value) {
            let id = manager_id(manager, Operation::Update);
            let owners = std::mem::take(&mut self.owners);
            let now = Timestamp::UNIX_EPOCH;
            self.owners = update(&difference(&self.schema, &self.object, &new), owners, &id, now);
            self.object = new;
        }

        fn apply(&mut self, manager: &str, config: Value, force: bool) -> Result<(), ApplyError> {
            let id = manager_id(manager, Operation::Apply);
            let ignored = FieldSet::default();
            let request = ApplyRequest { config: &config, id: &id, force, ignored: &ignored };
            let done = apply(&self.schema, &self.object, self.owners.clone(), &request, Timestamp::UNIX_EPOCH)?;
            self.owners = done.owners;
            if let Some(object) = done.object {
                self.object = object;
            }
            Ok(())
        }

        fn owned(&self, manager: &str) -> Value {
            let owner = self.owners.iter().find(|o| o.id.manager == manager);
            owner.map_or(Value::Null, |o| o.set.to_value())
        }
    }

    #[test]
    fn an_update_owns_what_it_changes() {
        let mut tracked = TrackedObject::of(Schema::of::<ConfigMap>());
        tracked.update(
            "m1",
            json!({ "metadata": { "name": "a", "labels": { "l": "1" } }, "data": { "k": "v", "x": "1" } }),
        );
        tracked.update(
            "m2",
            json!({ "metadata": { "name": "a", "labels": { "l": "1" } }, "data": { "k": "v", "x": "2", "w": "1" } }),
        );
        let labels = json!({ "f:labels": { ".": {}, "f:l": {} } });
        assert_eq!(tracked.owned("m1"), json!({ "f:data": { ".": {}, "f:k": {} }, "f:metadata": labels }));
        assert_eq!(tracked.owned("m2"), json!({ "f:data": { "f:w": {}, "f:x": {} } }));
        tracked.update(
            "m1",
            json!({ "metadata": { "name": "a", "labels": { "l": "1" } }, "data": { "k": "v", "x": "2" } }),
        );
        assert_eq!(tracked.owned("m2"), json!({ "f:data": { "f:x": {} } }), "a removed field has no owner");
    }

    #[test]
    fn applies_conflict_share_and_release_fields() {
        let mut tracked = TrackedObject::of(Schema::of::<ConfigMap>());
        tracked.apply("one", json!({ "data": { "a": "1", "b": "1" } }), false).unwrap();
        tracked.apply("two", json!({ "data": { "a": "1", "c": "1" } }), false).unwrap();
        assert_eq!(tracked.object["data"], json!({ "a": "1", "b": "1", "c": "1" }), "the same value is shared");
        let refused = tracked.apply("two", json!({ "data": { "a": "2" } }), false).unwrap_err();
        let owner = manager_id("one", Operation::Apply);
        assert_eq!(refused, ApplyError::Conflicts(vec![Conflict { owner, path: ".data.a".into() }]));
        tracked.apply("two", json!({ "data": { "a": "2" } }), true).unwrap();
        assert_eq!(tracked.object["data"], json!({ "a": "2", "b": "1" }), "c has no owner left and is removed");
        assert_eq!(tracked.owned("one"), json!({ "f:data": { "f:b": {} } }));
        tracked.apply("one", json!({ "metadata": { "labels": { "x": "y" } } }), false).unwrap();
        assert_eq!(tracked.object["data"], json!({ "a": "2" }));
        tracked.apply("two", json!({}), false).unwrap();
        assert!(tracked.object["data"].is_null(), "{}", tracked.object);
        assert_eq!(tracked.owned("two"), Value::Null);
    }

    #[test]
    fn a_shared_field_stays_until_the_last_owner_leaves() {
        let mut tracked = TrackedObject::of(Schema::of::<ConfigMap>());
        tracked.update("poster", json!({ "data": { "k": "v" } }));
        tracked.apply("one", json!({ "data": { "k": "v", "x": "1" } }), false).unwrap();
        tracked.apply("one", json!({ "data": {} }), false).unwrap();
        assert_eq!(tracked.object["data"], json!({ "k": "v" }));
        assert_eq!(tracked.owned("poster"), json!({ "f:data": { ".": {}, "f:k": {} } }));
    }

    #[test]
    fn list_elements_are_owned_by_key() {
        let mut tracked = TrackedObject::of(Schema::of::<Pod>());
        let container = |name: &str, image: &str| json!({ "name": name, "image": image });
        tracked
            .apply("one", json!({ "spec": { "containers": [container("a", "1"), container("b", "1")] } }), false)
            .unwrap();
        tracked.apply("two", json!({ "spec": { "containers": [{ "name": "a", "tty": true }] } }), false).unwrap();
        tracked.apply("one", json!({ "spec": { "containers": [container("b", "2")] } }), false).unwrap();
        assert_eq!(
            tracked.object["spec"]["containers"],
            json!([{ "name": "a", "tty": true }, { "name": "b", "image": "2" }]),
            "two still owns its part of a"
        );
    }
}
