//! Writes stored objects into responses, without decoding them.
//!
//! An object is stored without its resourceVersion, which is the revision of the commit. All stored objects of a kind begin
//! with the same bytes up to the inside of `metadata`, so that the resourceVersion is inserted at a fixed offset.

use bytes::{Bytes, BytesMut};
use cleat_store::{Entry, Revision};

use crate::descriptor::Descriptor;
use crate::json_scanner::JsonScanner;

/// A stored object and the revision that is its resourceVersion. Revision 0 means no resourceVersion: the object of a dry
/// run.
#[derive(Clone, Debug)]
pub struct StoredObject {
    pub value: Bytes,
    pub revision: Revision,
}

impl From<&Entry> for StoredObject {
    fn from(entry: &Entry) -> Self {
        Self { value: entry.value.clone(), revision: entry.modified }
    }
}

/// Appends the object with its resourceVersion.
pub fn write_object(out: &mut BytesMut, descriptor: &Descriptor, stored: &StoredObject) {
    write_json(out, descriptor, &stored.value, stored.revision);
}

/// As `write_object`, for the JSON of a stored object in which managedFields may be missing.
pub fn write_json(out: &mut BytesMut, descriptor: &Descriptor, json: &[u8], revision: Revision) {
    let head = descriptor.head().len().min(json.len());
    out.reserve(json.len() + 48);
    out.extend_from_slice(&json[..head]);
    if revision > 0 {
        write_resource_version(out, revision);
    }
    out.extend_from_slice(&json[head..]);
}

fn write_resource_version(out: &mut BytesMut, revision: Revision) {
    out.extend_from_slice(b"\"resourceVersion\":\"");
    out.extend_from_slice(revision.to_string().as_bytes());
    out.extend_from_slice(b"\",");
}

/// Appends the object as PartialObjectMetadata.
pub fn write_partial_metadata(out: &mut BytesMut, stored: &StoredObject) {
    out.extend_from_slice(br#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"#);
    if stored.revision > 0 {
        write_resource_version(out, stored.revision);
    }
    let metadata = find_metadata(&stored.value).unwrap_or(b"{}");
    out.extend_from_slice(&metadata[1..]);
    out.extend_from_slice(b"}");
}

fn find_metadata(object: &[u8]) -> Option<&[u8]> {
    let mut scanner = JsonScanner(object);
    scanner.consume(b'{')?;
    while scanner.next_member()?? != b"metadata" {
        scanner.read_value()?;
    }
    scanner.read_value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resource_version_is_inserted_into_metadata() {
        let descriptor = Descriptor::new("storage.k8s.io", "v1", "CSINode", "csinodes");
        let value =
            br#"{"apiVersion":"storage.k8s.io/v1","kind":"CSINode","metadata":{"name":"n"},"spec":{"drivers":[]}}"#;
        let stored = StoredObject { value: Bytes::from_static(value), revision: 42 };
        let mut out = BytesMut::new();
        write_object(&mut out, &descriptor, &stored);
        let shown: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(shown["metadata"], serde_json::json!({ "name": "n", "resourceVersion": "42" }));
        let mut out = BytesMut::new();
        write_partial_metadata(&mut out, &stored);
        let shown: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(shown["kind"], "PartialObjectMetadata");
        assert_eq!(shown["metadata"], serde_json::json!({ "name": "n", "resourceVersion": "42" }));
    }
}
