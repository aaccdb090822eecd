//! `metadata.managedFields` as a list of owners with their sets, and its form on the wire.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry, Time};

use super::set::FieldSet;

/// Owners by update beyond this many are joined, oldest first.
const UPDATERS: usize = 10;
const ANCIENT: &str = "ancient-changes";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operation {
    Apply,
    Update,
}

/// Who owns fields. One who applies stays the same from version to version of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) manager: String,
    pub(crate) operation: Operation,
    pub(crate) api_version: String,
    pub(crate) subresource: String,
}

impl Identity {
    fn is(&self, other: &Self) -> bool {
        self.manager == other.manager
            && self.operation == other.operation
            && self.subresource == other.subresource
            && (self.operation == Operation::Apply || self.api_version == other.api_version)
    }

    /// As conflicts name an owner.
    pub(crate) fn shown(&self) -> String {
        let mut text = format!("{:?}", self.manager);
        if !self.subresource.is_empty() {
            text += &format!(" with subresource {:?}", self.subresource);
        }
        if self.operation == Operation::Update {
            text += &format!(" using {}", self.api_version);
        }
        text
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Owner {
    pub(crate) who: Identity,
    pub(crate) set: FieldSet,
    pub(crate) time: Option<Timestamp>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Owners(Vec<Owner>);

impl Owners {
    /// From the wire. If one entry makes no sense, none is believed.
    pub(crate) fn decode(entries: Option<&Vec<ManagedFieldsEntry>>) -> Self {
        let mut made = Self::default();
        for entry in entries.into_iter().flatten() {
            let operation = match (entry.operation.as_deref(), entry.fields_type.as_deref()) {
                (Some("Apply"), Some("FieldsV1")) => Operation::Apply,
                (Some("Update"), Some("FieldsV1")) => Operation::Update,
                _ => return Self::default(),
            };
            let who = Identity {
                manager: entry.manager.clone().unwrap_or_default(),
                operation,
                api_version: entry.api_version.clone().unwrap_or_default(),
                subresource: entry.subresource.clone().unwrap_or_default(),
            };
            let set = entry.fields_v1.as_ref().map(|f| FieldSet::from_value(&f.0)).unwrap_or_default();
            let time = entry.time.as_ref().map(|t| t.0);
            match made.find_mut(&who) {
                Some(owner) => owner.set = std::mem::take(&mut owner.set).union(&set),
                None => made.0.push(Owner { who, set, time }),
            }
        }
        made
    }

    /// To the wire, in the order that makes equal owners equal bytes.
    pub(crate) fn encode(mut self) -> Option<Vec<ManagedFieldsEntry>> {
        let seconds = |owner: &Owner| owner.time.map_or(0, |t| t.as_second());
        self.0.sort_by(|a, b| {
            let key = |o: &Owner| (o.who.operation, seconds(o));
            key(a)
                .cmp(&key(b))
                .then_with(|| a.who.manager.cmp(&b.who.manager))
                .then_with(|| a.who.api_version.cmp(&b.who.api_version))
                .then_with(|| a.who.subresource.cmp(&b.who.subresource))
        });
        let entries: Vec<_> = self
            .0
            .into_iter()
            .map(|owner| ManagedFieldsEntry {
                manager: Some(owner.who.manager),
                operation: Some(format!("{:?}", owner.who.operation)),
                api_version: Some(owner.who.api_version),
                subresource: Some(owner.who.subresource).filter(|s| !s.is_empty()),
                time: owner.time.map(Time),
                fields_type: Some("FieldsV1".into()),
                fields_v1: Some(FieldsV1(owner.set.to_value())),
            })
            .collect();
        Some(entries).filter(|e| !e.is_empty())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn find(&self, who: &Identity) -> Option<&Owner> {
        self.0.iter().find(|owner| owner.who.is(who))
    }

    pub(crate) fn find_mut(&mut self, who: &Identity) -> Option<&mut Owner> {
        self.0.iter_mut().find(|owner| owner.who.is(who))
    }

    pub(crate) fn others(&self, who: &Identity) -> impl Iterator<Item = &Owner> {
        self.0.iter().filter(move |owner| !owner.who.is(who))
    }

    pub(crate) fn others_mut(&mut self, who: &Identity) -> impl Iterator<Item = &mut Owner> {
        self.0.iter_mut().filter(move |owner| !owner.who.is(who))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Owner> {
        self.0.iter()
    }

    /// Gives an owner its set; who owns nothing is no owner.
    pub(crate) fn set(&mut self, who: &Identity, set: FieldSet) {
        if set.is_empty() {
            self.0.retain(|owner| !owner.who.is(who));
            return;
        }
        match self.find_mut(who) {
            Some(owner) => {
                owner.set = set;
                owner.who = who.clone();
            }
            None => self.0.push(Owner { who: who.clone(), set, time: None }),
        }
    }

    pub(crate) fn drop_empty(&mut self) {
        self.0.retain(|owner| !owner.set.is_empty());
    }

    /// Keeps the number of updaters bounded.
    pub(crate) fn cap(&mut self) {
        let updaters = |owners: &Self| owners.0.iter().filter(|o| o.who.operation == Operation::Update).count();
        let mut left = updaters(self);
        if left <= UPDATERS {
            return;
        }
        let mut order: Vec<Owner> = self.0.extract_if(.., |o| o.who.operation == Operation::Update).collect();
        order.sort_by_key(|o| (o.time.map_or(0, |t| t.as_second()), o.who.manager.clone(), o.who.api_version.clone()));
        let mut kept: Vec<Owner> = Vec::new();
        for owner in order {
            let bucket = kept.iter_mut().find(|k| k.who.api_version == owner.who.api_version);
            match bucket {
                Some(bucket) if left > UPDATERS => {
                    bucket.who.manager = ANCIENT.into();
                    bucket.who.subresource.clear();
                    bucket.set = std::mem::take(&mut bucket.set).union(&owner.set);
                    bucket.time = owner.time;
                    left -= 1;
                }
                _ => kept.push(owner),
            }
        }
        self.0.extend(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(manager: &str, second: i64) -> Owner {
        let who = Identity {
            manager: manager.into(),
            operation: Operation::Update,
            api_version: "v1".into(),
            subresource: String::new(),
        };
        Owner { who, set: FieldSet::of(&[&["data", manager]]), time: Timestamp::from_second(second).ok() }
    }

    #[test]
    fn the_oldest_updaters_are_joined_beyond_ten() {
        let mut owners = Owners((0..13).map(|i| owner(&format!("m{i:02}"), 100 - i)).collect());
        owners.cap();
        let entries = owners.encode().unwrap();
        assert_eq!(entries.len(), 10);
        let ancient = entries.iter().find(|e| e.manager.as_deref() == Some(ANCIENT)).unwrap();
        let fields = &ancient.fields_v1.as_ref().unwrap().0["f:data"];
        assert_eq!(*fields, serde_json::json!({ "f:m09": {}, "f:m10": {}, "f:m11": {}, "f:m12": {} }));
        assert_eq!(ancient.time.as_ref().unwrap().0.as_second(), 91, "the time of the youngest among them");
    }

    #[test]
    fn entries_survive_the_wire_in_a_fixed_order() {
        let mut applier = owner("z", 5);
        applier.who.operation = Operation::Apply;
        let owners = Owners(vec![owner("b", 2), owner("a", 2), owner("c", 1), applier]);
        let entries = owners.encode();
        let names: Vec<_> = entries.iter().flatten().map(|e| e.manager.clone().unwrap()).collect();
        assert_eq!(names, ["z", "c", "a", "b"]);
        assert_eq!(Owners::decode(entries.as_ref()).encode(), entries);
    }
}
