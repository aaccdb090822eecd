//! The rules of ownership: an update takes what it changes, an apply owns what it lists and drops what it no longer
//! lists, and takes from others only by force.

use std::sync::LazyLock;

use jiff::Timestamp;
use serde_json::Value;

use super::compare::{Difference, difference, fields};
use super::entries::{Identity, Owners};
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

static UNOWNED_SET: LazyLock<FieldSet> = LazyLock::new(|| FieldSet::of(UNOWNED));

#[derive(Clone, Debug, PartialEq)]
pub struct Conflict {
    pub with: Identity,
    pub path: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ApplyError {
    Conflicts(Vec<Conflict>),
    /// What is applied does not fit the kind.
    Shape(String),
}

/// The outcome of an apply.
#[derive(Debug)]
pub struct Applied {
    /// Absent if nothing but ownership changes.
    pub object: Option<Value>,
    pub owners: Owners,
}

/// An ordinary write: whoever it is takes what changes.
pub fn update(found: &Difference, mut owners: Owners, who: &Identity, now: Timestamp) -> Owners {
    // Whoever else had it, and the writer itself through what is gone.
    let mut taken = changed(found);
    for owner in owners.others_mut(who) {
        owner.set.subtract(&taken);
        owner.set.subtract(&found.removed);
    }
    taken.subtract(&UNOWNED_SET);
    let mut own = owners.find_mut(who).map(|o| std::mem::take(&mut o.set)).unwrap_or_default();
    own.subtract(&found.removed);
    owners.set(who, own.union(&taken));
    if !taken.is_empty()
        && let Some(owner) = owners.find_mut(who)
    {
        owner.time = Some(now);
    }
    owners.drop_empty();
    owners.cap();
    owners
}

fn changed(found: &Difference) -> FieldSet {
    found.modified.clone().union(&found.added)
}

/// What an apply is asked to do.
pub struct Wish<'a> {
    pub config: &'a Value,
    pub who: &'a Identity,
    pub force: bool,
    pub ignored: &'a FieldSet,
}

pub fn apply(
    schema: &Schema,
    live: &Value,
    mut owners: Owners,
    wish: &Wish<'_>,
    now: Timestamp,
) -> Result<Applied, ApplyError> {
    let at = schema.root();
    check(at, wish.config, "").map_err(ApplyError::Shape)?;
    let listed = fields(schema, wish.config).without_trees(wish.ignored);
    let last = owners.find(wish.who).map(|o| o.set.clone());
    let before = owners.clone();
    owners.set(wish.who, listed);
    let joined = merged(at, live, wish.config);
    let new = match &last {
        Some(last) => pruned(schema, &joined, last, &owners),
        None => joined,
    };
    let found = difference(schema, live, &new).ignoring(wish.ignored);
    let taken = changed(&found);
    let mut conflicts = Vec::new();
    for owner in owners.others(wish.who) {
        let claimed = owner.set.intersection(&taken);
        conflicts.extend(claimed.paths().into_iter().map(|path| Conflict { with: owner.who.clone(), path }));
    }
    if !wish.force && !conflicts.is_empty() {
        return Err(ApplyError::Conflicts(conflicts));
    }
    for owner in owners.others_mut(wish.who) {
        owner.set = owner.set.difference(&taken).difference(&found.removed);
    }
    let own = owners.find(wish.who).map(|o| o.set.difference(&UNOWNED_SET)).unwrap_or_default();
    owners.set(wish.who, own);
    owners.drop_empty();
    let object = Some(new).filter(|new| new != live);
    if let Some(owner) = owners.find_mut(wish.who) {
        // Who comes to own without changing anything has no time yet.
        owner.time = if object.is_some() { Some(now) } else { before.find(wish.who).and_then(|o| o.time) };
    }
    Ok(Applied { object, owners })
}

/// Takes out what the manager applied last time and no longer lists, unless somebody else owns it.
fn pruned(schema: &Schema, joined: &Value, last: &FieldSet, owners: &Owners) -> Value {
    let at = schema.root();
    let last = with_structs(at, last);
    let pruned = without(at, joined, &last);
    let all = all_fields(at, joined);
    let owned = owners.iter().fold(FieldSet::default(), |set, owner| set.union(&owner.set));
    // Owned by anybody, the manager itself included: it comes back.
    let gone = all.difference(&all_fields(at, &pruned)).difference(&with_structs(at, &owned));
    let pruned = without(at, joined, &gone);
    // What went along only because it was inside something that went comes back, too.
    let gone = all.difference(&all_fields(at, &pruned)).intersection(&last);
    without(at, joined, &gone)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ConfigMap, Pod};
    use serde_json::json;

    use super::super::entries::Operation;
    use super::*;

    fn who(manager: &str, operation: Operation) -> Identity {
        Identity { manager: manager.into(), operation, api_version: "v1".into(), subresource: String::new() }
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
            let who = who(manager, Operation::Update);
            let owners = std::mem::take(&mut self.owners);
            let now = Timestamp::UNIX_EPOCH;
            self.owners = update(&difference(&self.schema, &self.object, &new), owners, &who, now);
            self.object = new;
        }

        fn apply(&mut self, manager: &str, config: Value, force: bool) -> Result<(), ApplyError> {
            let who = who(manager, Operation::Apply);
            let ignored = FieldSet::default();
            let wish = Wish { config: &config, who: &who, force, ignored: &ignored };
            let done = apply(&self.schema, &self.object, self.owners.clone(), &wish, Timestamp::UNIX_EPOCH)?;
            self.owners = done.owners;
            if let Some(object) = done.object {
                self.object = object;
            }
            Ok(())
        }

        fn owned(&self, manager: &str) -> Value {
            let owner = self.owners.iter().find(|o| o.who.manager == manager);
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
        let with = who("one", Operation::Apply);
        assert_eq!(refused, ApplyError::Conflicts(vec![Conflict { with, path: ".data.a".into() }]));
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
