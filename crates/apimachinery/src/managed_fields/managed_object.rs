//! Objects and their managedFields, separately: decoding the managedFields takes much longer than decoding the rest of the
//! object, and few requests need it.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;

use crate::descriptor::Descriptor;
use crate::field_ownership::RawManagedFields;
use crate::json_scanner::JsonScanner;
use crate::kind::{DecodeSource, Kind, Object};

/// The name of the member as it is encoded.
const MEMBER_NAME: &str = "\"managedFields\":";
/// The encoded member while its list is empty.
const EMPTY_MEMBER: &str = "\"managedFields\":[]";

/// An object and the owners of its fields.
pub struct ManagedObject {
    /// Without managedFields.
    pub object: Box<dyn Object>,
    pub owners: RawManagedFields,
}

impl ManagedObject {
    /// An object whose owners are not recorded.
    pub fn without_owners(object: Box<dyn Object>) -> Self {
        Self { object, owners: RawManagedFields::default() }
    }

    /// Returns the canonical JSON with managedFields. The resourceVersion of the object must be empty.
    pub fn encode(&mut self) -> Bytes {
        EncodedObject::of(&mut *self.object).with_owners(&self.owners)
    }
}

/// A stored object, split into the object and its managedFields.
pub struct SplitObject<'a> {
    /// The encoded object without managedFields.
    pub json: Cow<'a, [u8]>,
    pub owners: RawManagedFields,
}

impl<'a> SplitObject<'a> {
    pub fn of(descriptor: &Descriptor, stored: &'a Bytes) -> Self {
        let Some(list) = managed_fields_range(descriptor, stored) else {
            return Self { json: Cow::Borrowed(stored), owners: RawManagedFields::default() };
        };
        Self {
            json: Cow::Owned(without_member(stored, &list).concat()),
            owners: RawManagedFields::from_bytes(stored.slice(list)),
        }
    }

    pub fn decode(&self, kind: &dyn Kind) -> Result<Box<dyn Object>, serde_json::Error> {
        kind.decode(DecodeSource::Bytes(&self.json))
    }
}

/// An object in its canonical JSON, with an empty list of managedFields.
pub struct EncodedObject {
    bytes: Vec<u8>,
    /// The position of the list.
    list: Option<Range<usize>>,
}

impl EncodedObject {
    pub fn of(object: &mut dyn Object) -> Self {
        object.meta_mut().managed_fields = Some(Vec::new());
        let bytes = object.encode();
        object.meta_mut().managed_fields = None;
        // Inside strings quotes are escaped, so that this finds members only. The first is that of the object's metadata,
        // because `metadata` precedes all other objects.
        let member = memchr::memmem::find(&bytes, EMPTY_MEMBER.as_bytes());
        Self { bytes, list: member.map(|start| start + MEMBER_NAME.len()..start + EMPTY_MEMBER.len()) }
    }

    /// Returns the JSON with these managedFields.
    pub fn with_owners(&self, owners: &RawManagedFields) -> Bytes {
        self.pieces(owners).concat().into()
    }

    /// Returns true if the JSON with these managedFields equals the stored bytes.
    pub fn equals_stored(&self, owners: &RawManagedFields, stored: &[u8]) -> bool {
        let rest = self.pieces(owners).into_iter().try_fold(stored, |rest, piece| rest.strip_prefix(piece));
        rest.is_some_and(<[u8]>::is_empty)
    }

    fn pieces<'a>(&'a self, owners: &'a RawManagedFields) -> [&'a [u8]; 3] {
        let bytes = self.bytes.as_slice();
        match (&self.list, owners.bytes()) {
            (None, _) => [bytes, b"", b""],
            (Some(list), None) => {
                let [before, after] = without_member(bytes, list);
                [before, after, b""]
            }
            (Some(list), Some(owners)) => [&bytes[..list.start], owners, &bytes[list.end..]],
        }
    }
}

/// The position of the list of managedFields in a stored object. `None` if it has none.
fn managed_fields_range(descriptor: &Descriptor, stored: &[u8]) -> Option<Range<usize>> {
    // The members of `metadata` begin directly after the head.
    let mut metadata = JsonScanner(stored.get(descriptor.head().len()..)?);
    while let Some(name) = metadata.next_member()? {
        let value = metadata.read_value()?;
        if name == b"managedFields" {
            let end = stored.len() - metadata.0.len();
            return Some(end - value.len()..end).filter(|_| value.starts_with(b"["));
        }
    }
    None
}

/// The two parts of the JSON around the member managedFields, without one of its commas.
fn without_member<'a>(json: &'a [u8], list: &Range<usize>) -> [&'a [u8]; 2] {
    let (mut begin, mut end) = (list.start - MEMBER_NAME.len(), list.end);
    if json.get(end) == Some(&b',') {
        end += 1;
    } else if json[..begin].last() == Some(&b',') {
        begin -= 1;
    }
    [&json[..begin], &json[end..]]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::{ConfigMap, Pod};
    use serde_json::json;

    use super::*;
    use crate::test_kinds;

    fn kind(plural: &str) -> Arc<dyn Kind> {
        test_kinds::all().into_iter().find(|kind| kind.descriptor().plural == plural).unwrap()
    }

    fn split(plural: &str, value: serde_json::Value) -> (String, Option<String>) {
        let kind = kind(plural);
        let stored = Bytes::from(value.to_string());
        let split = SplitObject::of(kind.descriptor(), &stored);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (text(&split.json), split.owners.bytes().map(|bytes| text(bytes)))
    }

    #[test]
    fn only_managed_fields_of_the_metadata_are_split_off() {
        let entry = json!([{ "manager": "a],\"" }]);
        for (case, metadata, owners) in [
            ("none", json!({ "name": "n" }), None),
            ("last", json!({ "annotations": { "managedFields": "[]" }, "managedFields": entry }), Some(&entry)),
            ("between", json!({ "labels": {}, "managedFields": entry, "name": "n" }), Some(&entry)),
            ("alone", json!({ "managedFields": entry }), Some(&entry)),
        ] {
            let object = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata,
                "spec": { "managedFields": [1] } });
            let (json, found) = split("pods", object.clone());
            assert_eq!(found, owners.map(ToString::to_string), "{case}");
            let mut want = object;
            want["metadata"].as_object_mut().unwrap().remove("managedFields");
            assert_eq!(json, want.to_string(), "{case}");
        }
    }

    #[test]
    fn a_split_object_is_encoded_to_the_same_bytes() {
        let kind = kind("configmaps");
        for owners in [None, Some(r#"[{"apiVersion":"v1","manager":"m"}]"#)] {
            let mut map = ConfigMap::default();
            map.metadata.name = Some("n".into());
            map.metadata.labels = Some([("managedFields".into(), "\"managedFields\":[]".into())].into());
            let owners = owners.map_or_else(RawManagedFields::default, RawManagedFields::from_bytes);
            let stored = ManagedObject { object: Box::new(map), owners: owners.clone() }.encode();
            let split = SplitObject::of(kind.descriptor(), &stored);
            assert_eq!(split.owners, owners);
            let mut document = ManagedObject { object: split.decode(&*kind).unwrap(), owners: split.owners.clone() };
            assert_eq!(document.encode(), stored);
            let encoded = EncodedObject::of(&mut *document.object);
            assert!(encoded.equals_stored(&owners, &stored));
            for other in [&stored[..stored.len() - 1], &[&stored[..], b"}"].concat()] {
                assert!(!encoded.equals_stored(&owners, other));
            }
            assert!(!encoded.equals_stored(&RawManagedFields::from_bytes(Bytes::from_static(b"[1]")), &stored));
        }
        let nameless = EncodedObject::of(&mut Pod::default()).with_owners(&RawManagedFields::default());
        assert_eq!(nameless, r#"{"apiVersion":"v1","kind":"Pod","metadata":{}}"#);
    }
}
