//! The rules of ownership: an update takes what it changes, an apply owns what it lists and drops what it no longer
//! lists, and takes from others only by force.

use std::sync::LazyLock;

use jiff::Timestamp;
use serde_json::Value;

use super::compare::{Difference, difference, fields};
use super::entries::{ManagerId, Owners};
use super::merge::{all_fields, check, merged, with_structs, without};
use super::set::FieldSet;
use crate::schema::Schema;

/// Fields nobody owns: they identify the object or are the server's own.
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

#[derive(Clone, Debug, PartialEq)]
pub struct Conflict {
    pub owner: ManagerId,
    pub path: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ApplyError {
    Conflicts(Vec<Conflict>),
    /// What is applied does not fit the kind.
    InvalidConfig(String),
}

/// The outcome of an apply.
#[derive(Debug)]
pub struct ApplyOutcome {
    /// Absent if nothing but ownership changes.
    pub object: Option<Value>,
    pub owners: Owners,
}

/// An ordinary write: whoever it is takes what changes.
pub fn update(found: &Difference, mut owners: Owners, id: &ManagerId, now: Timestamp) -> Owners {
    // Whoever else had it, and the writer itself through what is gone.
    let mut taken = changed(found);
    for owner in owners.others_mut(id) {
        owner.set.subtract(&taken);
        owner.set.subtract(&found.removed);
    }
    taken.subtract(&UNOWNED_SET);
    let mut own = owners.find_mut(id).map(|o| std::mem::take(&mut o.set)).unwrap_or_default();
    own.subtract(&found.removed);
    owners.set(id, own.union(&taken));
    if !taken.is_empty()
        && let Some(owner) = owners.find_mut(id)
    {
        owner.time = Some(now);
    }
    owners.drop_empty();
    owners.merge_oldest_updates();
    owners
}

fn changed(found: &Difference) -> FieldSet {
    found.modified.clone().union(&found.added)
}

/// What an apply is asked to do.
pub struct ApplyRequest<'a> {
    pub config: &'a Value,
    pub id: &'a ManagerId,
    pub force: bool,
    pub ignored: &'a FieldSet,
}

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
    let joined = merged(ty, live, request.config);
    let new = match &last {
        Some(last) => pruned(schema, &joined, last, &owners),
        None => joined,
    };
    let found = difference(schema, live, &new).ignoring(request.ignored);
    let taken = changed(&found);
    let mut conflicts = Vec::new();
    for owner in owners.others(request.id) {
        let claimed = owner.set.intersection(&taken);
        conflicts.extend(claimed.paths().into_iter().map(|path| Conflict { owner: owner.id.clone(), path }));
    }
    if !request.force && !conflicts.is_empty() {
        return Err(ApplyError::Conflicts(conflicts));
    }
    for owner in owners.others_mut(request.id) {
        owner.set = owner.set.difference(&taken).difference(&found.removed);
    }
    let own = owners.find(request.id).map(|o| o.set.difference(&UNOWNED_SET)).unwrap_or_default();
    owners.set(request.id, own);
    owners.drop_empty();
    let object = Some(new).filter(|new| new != live);
    if let Some(owner) = owners.find_mut(request.id) {
        // Who comes to own without changing anything has no time yet.
        owner.time = if object.is_some() { Some(now) } else { before.find(request.id).and_then(|o| o.time) };
    }
    Ok(ApplyOutcome { object, owners })
}

/// Takes out what the manager applied last time and no longer lists, unless somebody else owns it.
fn pruned(schema: &Schema, joined: &Value, last: &FieldSet, owners: &Owners) -> Value {
    let ty = schema.root();
    let last = with_structs(ty, last);
    let pruned = without(ty, joined, &last);
    let all = all_fields(ty, joined);
    let owned = owners.iter().fold(FieldSet::default(), |set, owner| set.union(&owner.set));
    // Owned by anybody, the manager itself included: it comes back.
    let gone = all.difference(&all_fields(ty, &pruned)).difference(&with_structs(ty, &owned));
    let pruned = without(ty, joined, &gone);
    // What went along only because it was inside something that went comes back, too.
    let gone = all.difference(&all_fields(ty, &pruned)).intersection(&last);
    without(ty, joined, &gone)
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

    /// An object and its owners, changed step by step.
    struct Story {
        schema: Schema,
        object: Value,
        owners: Owners,
    }

    impl Story {
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
    fn an_update_takes_what_it_changes() {
        let mut story = Story::of(Schema::of::<ConfigMap>());
        story.update(
            "m1",
            json!({ "metadata": { "name": "a", "labels": { "l": "1" } }, "data": { "k": "v", "x": "1" } }),
        );
        story.update(
            "m2",
            json!({ "metadata": { "name": "a", "labels": { "l": "1" } }, "data": { "k": "v", "x": "2", "w": "1" } }),
        );
        let labels = json!({ "f:labels": { ".": {}, "f:l": {} } });
        assert_eq!(story.owned("m1"), json!({ "f:data": { ".": {}, "f:k": {} }, "f:metadata": labels }));
        assert_eq!(story.owned("m2"), json!({ "f:data": { "f:w": {}, "f:x": {} } }));
        story.update(
            "m1",
            json!({ "metadata": { "name": "a", "labels": { "l": "1" } }, "data": { "k": "v", "x": "2" } }),
        );
        assert_eq!(story.owned("m2"), json!({ "f:data": { "f:x": {} } }), "what is gone is owned by nobody");
    }

    #[test]
    fn appliers_conflict_share_and_let_go() {
        let mut story = Story::of(Schema::of::<ConfigMap>());
        story.apply("one", json!({ "data": { "a": "1", "b": "1" } }), false).unwrap();
        story.apply("two", json!({ "data": { "a": "1", "c": "1" } }), false).unwrap();
        assert_eq!(story.object["data"], json!({ "a": "1", "b": "1", "c": "1" }), "the same value is shared");
        let refused = story.apply("two", json!({ "data": { "a": "2" } }), false).unwrap_err();
        let owner = manager_id("one", Operation::Apply);
        assert_eq!(refused, ApplyError::Conflicts(vec![Conflict { owner, path: ".data.a".into() }]));
        story.apply("two", json!({ "data": { "a": "2" } }), true).unwrap();
        assert_eq!(story.object["data"], json!({ "a": "2", "b": "1" }), "c is nobody's and goes");
        assert_eq!(story.owned("one"), json!({ "f:data": { "f:b": {} } }));
        story.apply("one", json!({ "metadata": { "labels": { "x": "y" } } }), false).unwrap();
        assert_eq!(story.object["data"], json!({ "a": "2" }));
        story.apply("two", json!({}), false).unwrap();
        assert!(story.object["data"].is_null(), "{}", story.object);
        assert_eq!(story.owned("two"), Value::Null);
    }

    #[test]
    fn a_shared_field_stays_until_the_last_owner_leaves() {
        let mut story = Story::of(Schema::of::<ConfigMap>());
        story.update("poster", json!({ "data": { "k": "v" } }));
        story.apply("one", json!({ "data": { "k": "v", "x": "1" } }), false).unwrap();
        story.apply("one", json!({ "data": {} }), false).unwrap();
        assert_eq!(story.object["data"], json!({ "k": "v" }));
        assert_eq!(story.owned("poster"), json!({ "f:data": { ".": {}, "f:k": {} } }));
    }

    #[test]
    fn list_elements_are_owned_by_key() {
        let mut story = Story::of(Schema::of::<Pod>());
        let container = |name: &str, image: &str| json!({ "name": name, "image": image });
        story
            .apply("one", json!({ "spec": { "containers": [container("a", "1"), container("b", "1")] } }), false)
            .unwrap();
        story.apply("two", json!({ "spec": { "containers": [{ "name": "a", "tty": true }] } }), false).unwrap();
        story.apply("one", json!({ "spec": { "containers": [container("b", "2")] } }), false).unwrap();
        assert_eq!(
            story.object["spec"]["containers"],
            json!([{ "name": "a", "tty": true }, { "name": "b", "image": "2" }]),
            "two still owns its part of a"
        );
    }
}
