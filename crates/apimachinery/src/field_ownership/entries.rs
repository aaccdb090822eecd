//! The owners of an object's fields, and their encoding in `metadata.managedFields`.

use std::borrow::Cow;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, Time};
use serde::{Deserialize, Serialize};

use super::set::FieldSet;

/// The largest number of owners with the operation Update. Beyond it the oldest are merged into one.
pub const MAX_UPDATE_OWNERS: usize = 10;
const ANCIENT_CHANGES_MANAGER: &str = "ancient-changes";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    Apply,
    Update,
}

impl Operation {
    fn as_str(self) -> &'static str {
        match self {
            Self::Apply => "Apply",
            Self::Update => "Update",
        }
    }
}

/// What identifies an owner. For the operation Apply the API version does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagerId {
    pub manager: String,
    pub operation: Operation,
    pub api_version: String,
    pub subresource: String,
}

impl ManagerId {
    fn is_same_manager(&self, other: &Self) -> bool {
        self.manager == other.manager
            && self.operation == other.operation
            && self.subresource == other.subresource
            && (self.operation == Operation::Apply || self.api_version == other.api_version)
    }

    /// The owner in the form of conflict messages.
    pub fn describe(&self) -> String {
        let mut description = format!("{:?}", self.manager);
        if !self.subresource.is_empty() {
            description += &format!(" with subresource {:?}", self.subresource);
        }
        if self.operation == Operation::Update {
            description += &format!(" using {}", self.api_version);
        }
        description
    }
}

/// A manager and the fields that it owns.
#[derive(Clone, Debug, PartialEq)]
pub struct Owner {
    pub id: ManagerId,
    pub set: FieldSet,
    pub time: Option<Timestamp>,
}

impl Owner {
    fn entry(&self) -> Entry<'_> {
        Entry {
            api_version: Some(Cow::Borrowed(&self.id.api_version)),
            fields_type: Some(Cow::Borrowed(FIELDS_TYPE)),
            fields_v1: Some(Cow::Borrowed(&self.set)),
            manager: Some(Cow::Borrowed(&self.id.manager)),
            operation: Some(Cow::Borrowed(self.id.operation.as_str())),
            subresource: Some(Cow::Borrowed(&*self.id.subresource)).filter(|s| !s.is_empty()),
            time: self.time.map(Time),
        }
    }

    /// The encoded entry without its time.
    pub fn encode_without_time(&self) -> Option<String> {
        serde_json::to_string(&Entry { time: None, ..self.entry() }).ok()
    }
}

/// All owners of an object's fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Owners(Vec<Owner>);

/// An entry of `metadata.managedFields`.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry<'a> {
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    api_version: Option<Cow<'a, str>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    fields_type: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fields_v1: Option<Cow<'a, FieldSet>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    manager: Option<Cow<'a, str>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    operation: Option<Cow<'a, str>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    subresource: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<Time>,
}

const FIELDS_TYPE: &str = "FieldsV1";

impl Owners {
    /// Decodes a stored list. Returns no owners if it is invalid.
    pub fn decode(json: &[u8]) -> Self {
        Self::from_entries(serde_json::from_slice::<Vec<Entry<'_>>>(json).unwrap_or_default())
    }

    /// Converts the list that a client sent. Returns no owners if it is invalid.
    pub fn from_client(entries: Option<&Vec<ManagedFieldsEntry>>) -> Self {
        fn borrowed(text: Option<&String>) -> Option<Cow<'_, str>> {
            text.map(|text| Cow::Borrowed(&**text))
        }
        fn entry(sent: &ManagedFieldsEntry) -> Entry<'_> {
            let ManagedFieldsEntry { api_version, fields_type, fields_v1, manager, operation, subresource, time } =
                sent;
            Entry {
                api_version: borrowed(api_version.as_ref()),
                fields_type: borrowed(fields_type.as_ref()),
                fields_v1: fields_v1.as_ref().map(|fields| Cow::Owned(FieldSet::from_value(&fields.0))),
                manager: borrowed(manager.as_ref()),
                operation: borrowed(operation.as_ref()),
                subresource: borrowed(subresource.as_ref()),
                time: time.clone(),
            }
        }
        Self::from_entries(entries.into_iter().flatten().map(entry))
    }

    /// If one entry has an unknown operation or fields type, all are ignored. Entries of one manager are merged.
    fn from_entries<'a>(entries: impl IntoIterator<Item = Entry<'a>>) -> Self {
        let mut owners = Self::default();
        for entry in entries {
            let operation = match (entry.operation.as_deref(), entry.fields_type.as_deref()) {
                (Some("Apply"), Some(FIELDS_TYPE)) => Operation::Apply,
                (Some("Update"), Some(FIELDS_TYPE)) => Operation::Update,
                _ => return Self::default(),
            };
            let id = ManagerId {
                manager: entry.manager.unwrap_or_default().into_owned(),
                operation,
                api_version: entry.api_version.unwrap_or_default().into_owned(),
                subresource: entry.subresource.unwrap_or_default().into_owned(),
            };
            let set = entry.fields_v1.unwrap_or_default().into_owned();
            let time = entry.time.map(|t| t.0);
            match owners.find_mut(&id) {
                Some(owner) => owner.set = std::mem::take(&mut owner.set).union(&set),
                None => owners.0.push(Owner { id, set, time }),
            }
        }
        owners
    }

    pub fn equals_ignoring_times(&self, other: &Self) -> bool {
        let same = |a: &Owner, b: &Owner| a.id == b.id && a.set == b.set;
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(a, b)| same(a, b))
    }

    /// Encodes the list, sorted by operation, time and manager, so that equal owners have equal bytes. `None` without
    /// owners.
    pub fn encode(mut self) -> Option<Vec<u8>> {
        if self.is_empty() {
            return None;
        }
        self.sort_by_identity();
        self.0.sort_by_key(|owner| (owner.id.operation, owner.time.map_or(0, |t| t.as_second())));
        let entries: Vec<Entry<'_>> = self.0.iter().map(Owner::entry).collect();
        // Encoding cannot fail: all keys of maps are strings.
        serde_json::to_vec(&entries).ok()
    }

    /// Sorts by manager, API version and subresource: the order of owners with the same operation and time.
    pub fn sort_by_identity(&mut self) {
        self.0.sort_by(|Owner { id: a, .. }, Owner { id: b, .. }| {
            let [a, b] = [a, b].map(|id| (&id.manager, &id.api_version, &id.subresource));
            a.cmp(&b)
        });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn find(&self, id: &ManagerId) -> Option<&Owner> {
        self.0.iter().find(|owner| owner.id.is_same_manager(id))
    }

    pub fn find_mut(&mut self, id: &ManagerId) -> Option<&mut Owner> {
        self.0.iter_mut().find(|owner| owner.id.is_same_manager(id))
    }

    pub fn others(&self, id: &ManagerId) -> impl Iterator<Item = &Owner> {
        self.0.iter().filter(move |owner| !owner.id.is_same_manager(id))
    }

    pub fn others_mut(&mut self, id: &ManagerId) -> impl Iterator<Item = &mut Owner> {
        self.0.iter_mut().filter(move |owner| !owner.id.is_same_manager(id))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Owner> {
        self.0.iter()
    }

    /// Sets the fields of an owner, and adds the owner if necessary. An owner of no fields is removed.
    pub fn set(&mut self, id: &ManagerId, set: FieldSet) {
        if set.is_empty() {
            self.0.retain(|owner| !owner.id.is_same_manager(id));
            return;
        }
        match self.find_mut(id) {
            Some(owner) => {
                owner.set = set;
                owner.id = id.clone();
            }
            None => self.0.push(Owner { id: id.clone(), set, time: None }),
        }
    }

    /// Removes owners of no fields.
    pub fn drop_empty(&mut self) {
        self.0.retain(|owner| !owner.set.is_empty());
    }

    /// Merges the oldest owners with the operation Update until at most [`MAX_UPDATE_OWNERS`] are left. Only owners of one
    /// API version are merged. The result has the time of the youngest.
    pub fn merge_oldest_updates(&mut self) {
        let updaters = |owners: &Self| owners.0.iter().filter(|o| o.id.operation == Operation::Update).count();
        let mut left = updaters(self);
        if left <= MAX_UPDATE_OWNERS {
            return;
        }
        let mut order: Vec<Owner> = self.0.extract_if(.., |o| o.id.operation == Operation::Update).collect();
        order.sort_by_key(|o| (o.time.map_or(0, |t| t.as_second()), o.id.manager.clone(), o.id.api_version.clone()));
        let mut merged: Vec<Owner> = Vec::new();
        for owner in order {
            let bucket = merged.iter_mut().find(|k| k.id.api_version == owner.id.api_version);
            match bucket {
                Some(bucket) if left > MAX_UPDATE_OWNERS => {
                    bucket.id.manager = ANCIENT_CHANGES_MANAGER.into();
                    bucket.id.subresource.clear();
                    bucket.set = std::mem::take(&mut bucket.set).union(&owner.set);
                    bucket.time = owner.time;
                    left -= 1;
                }
                _ => merged.push(owner),
            }
        }
        self.0.extend(merged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(manager: &str, second: i64) -> Owner {
        let id = ManagerId {
            manager: manager.into(),
            operation: Operation::Update,
            api_version: "v1".into(),
            subresource: String::new(),
        };
        Owner { id, set: FieldSet::from_paths(&[&["data", manager]]), time: Timestamp::from_second(second).ok() }
    }

    #[test]
    fn beyond_ten_the_oldest_update_owners_are_merged() {
        let mut owners = Owners((0..13).map(|i| owner(&format!("m{i:02}"), 100 - i)).collect());
        owners.merge_oldest_updates();
        assert_eq!(owners.0.len(), 10);
        let ancient = owners.iter().find(|o| o.id.manager == ANCIENT_CHANGES_MANAGER).unwrap();
        let fields = serde_json::json!({ "f:m09": {}, "f:m10": {}, "f:m11": {}, "f:m12": {} });
        assert_eq!(ancient.set.to_value()["f:data"], fields);
        assert_eq!(ancient.time.unwrap().as_second(), 91, "the time of the youngest among them");
    }

    #[test]
    fn entries_are_encoded_in_a_fixed_order() {
        let mut applier = owner("z", 5);
        applier.id.operation = Operation::Apply;
        let owners = Owners(vec![owner("b", 2), owner("a", 2), owner("c", 1), applier]);
        let text = owners.encode().unwrap();
        let typed: Vec<ManagedFieldsEntry> = serde_json::from_slice(&text).unwrap();
        let names: Vec<_> = typed.iter().map(|e| e.manager.clone().unwrap()).collect();
        assert_eq!(names, ["z", "c", "a", "b"]);
        assert_eq!(serde_json::to_vec(&typed).unwrap(), text, "as the generated type encodes it");
        assert_eq!(Owners::decode(&text).encode().unwrap(), text);
        assert_eq!(Owners::from_client(Some(&typed)).encode().unwrap(), text);
    }
}
