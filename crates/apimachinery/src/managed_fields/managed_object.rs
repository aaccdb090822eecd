//! An object and who owns its fields, side by side: owners are many times as costly to take apart as the object, and
//! only few look at them.

use std::borrow::Cow;
use std::ops::Range;

use bytes::Bytes;

use crate::descriptor::Descriptor;
use crate::field_ownership::RawManagedFields;
use crate::json_scanner::JsonScanner;
use crate::kind::{DecodeSource, Kind, Object};

const MEMBER_NAME: &str = "\"managedFields\":";
/// What an encoded object holds where its owners belong.
const EMPTY_MEMBER: &str = "\"managedFields\":[]";

pub struct ManagedObject {
    /// Without managedFields.
    pub object: Box<dyn Object>,
    pub owners: RawManagedFields,
}

impl ManagedObject {
    /// An object whose owners nobody records.
    pub fn without_owners(object: Box<dyn Object>) -> Self {
        Self { object, owners: RawManagedFields::default() }
    }

    /// The canonical bytes.
    pub fn encode(&mut self) -> Bytes {
        EncodedObject::of(&mut *self.object).with_owners(&self.owners)
    }
}

/// What is stored, taken apart.
pub struct SplitObject<'a> {
    /// The object without its owners.
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

    /// Is this the object, but for its version?
    pub fn is_encoding_of(&self, object: &dyn Object) -> bool {
        let mut object = object.copy();
        object.meta_mut().resource_version = None;
        object.encode() == *self.json
    }
}

/// An object in its canonical bytes, with room for its owners.
pub struct EncodedObject {
    bytes: Vec<u8>,
    /// Where they belong.
    list: Option<Range<usize>>,
}

impl EncodedObject {
    pub fn of(object: &mut dyn Object) -> Self {
        object.meta_mut().managed_fields = Some(Vec::new());
        let bytes = object.encode();
        object.meta_mut().managed_fields = None;
        // A quote inside a string is escaped: this is the key, and the first of its name is that of the metadata.
        let at = memchr::memmem::find(&bytes, EMPTY_MEMBER.as_bytes());
        Self { bytes, list: at.map(|at| at + MEMBER_NAME.len()..at + EMPTY_MEMBER.len()) }
    }

    pub fn with_owners(&self, owners: &RawManagedFields) -> Bytes {
        self.pieces(owners).concat().into()
    }

    /// Is this what is stored?
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

/// Where the list of owners stands in a stored object.
fn managed_fields_range(descriptor: &Descriptor, stored: &[u8]) -> Option<Range<usize>> {
    // The inside of the metadata begins at a fixed place.
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

/// The text without the list, its key and the comma that goes with them.
fn without_member<'a>(text: &'a [u8], list: &Range<usize>) -> [&'a [u8]; 2] {
    let (mut begin, mut end) = (list.start - MEMBER_NAME.len(), list.end);
    if text.get(end) == Some(&b',') {
        end += 1;
    } else if text[..begin].last() == Some(&b',') {
        begin -= 1;
    }
    [&text[..begin], &text[end..]]
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

    fn taken_apart(plural: &str, value: serde_json::Value) -> (String, Option<String>) {
        let kind = kind(plural);
        let stored = Bytes::from(value.to_string());
        let split = SplitObject::of(kind.descriptor(), &stored);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (text(&split.json), split.owners.bytes().map(|bytes| text(bytes)))
    }

    #[test]
    fn owners_are_told_from_fields_of_their_name() {
        let entry = json!([{ "manager": "a],\"" }]);
        for (case, metadata, owners) in [
            ("none", json!({ "name": "n" }), None),
            ("last", json!({ "annotations": { "managedFields": "[]" }, "managedFields": entry }), Some(&entry)),
            ("between", json!({ "labels": {}, "managedFields": entry, "name": "n" }), Some(&entry)),
            ("alone", json!({ "managedFields": entry }), Some(&entry)),
        ] {
            let object = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata,
                "spec": { "managedFields": [1] } });
            let (text, found) = taken_apart("pods", object.clone());
            assert_eq!(found, owners.map(ToString::to_string), "{case}");
            let mut want = object;
            want["metadata"].as_object_mut().unwrap().remove("managedFields");
            assert_eq!(text, want.to_string(), "{case}");
        }
    }

    #[test]
    fn what_was_taken_apart_is_joined_to_the_same_bytes() {
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
