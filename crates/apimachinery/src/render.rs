//! From stored bytes to wire bytes.
//!
//! An object is stored without its resourceVersion, which only the commit decides. Every object of a kind starts with
//! the same bytes up to the inside of `metadata`, so the version is inserted at an offset that the kind alone fixes.

use bytes::{Bytes, BytesMut};
use cleat_store::{Entry, Revision};

use crate::descriptor::Descriptor;
use crate::json_scanner::JsonScanner;

/// An object and the revision to show it at.
#[derive(Clone, Debug)]
pub struct Stored {
    pub value: Bytes,
    pub revision: Revision,
}

impl From<&Entry> for Stored {
    fn from(entry: &Entry) -> Self {
        Self { value: entry.value.clone(), revision: entry.modified }
    }
}

/// Appends the object with its resourceVersion.
pub fn object(out: &mut BytesMut, descriptor: &Descriptor, stored: &Stored) {
    text(out, descriptor, &stored.value, stored.revision);
}

pub fn text(out: &mut BytesMut, descriptor: &Descriptor, text: &[u8], revision: Revision) {
    let head = descriptor.head().len().min(text.len());
    out.reserve(text.len() + 48);
    out.extend_from_slice(&text[..head]);
    if revision > 0 {
        version(out, revision);
    }
    out.extend_from_slice(&text[head..]);
}

fn version(out: &mut BytesMut, revision: Revision) {
    out.extend_from_slice(b"\"resourceVersion\":\"");
    out.extend_from_slice(revision.to_string().as_bytes());
    out.extend_from_slice(b"\",");
}

/// Appends the object as PartialObjectMetadata.
pub fn partial(out: &mut BytesMut, stored: &Stored) {
    out.extend_from_slice(br#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"#);
    if stored.revision > 0 {
        version(out, stored.revision);
    }
    let metadata = metadata(&stored.value).unwrap_or(b"{}");
    out.extend_from_slice(&metadata[1..]);
    out.extend_from_slice(b"}");
}

fn metadata(object: &[u8]) -> Option<&[u8]> {
    let mut text = JsonScanner(object);
    text.take(b'{')?;
    while text.member()?? != b"metadata" {
        text.value()?;
    }
    text.value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_goes_into_metadata() {
        let descriptor = Descriptor::new("storage.k8s.io", "v1", "CSINode", "csinodes");
        let value =
            br#"{"apiVersion":"storage.k8s.io/v1","kind":"CSINode","metadata":{"name":"n"},"spec":{"drivers":[]}}"#;
        let stored = Stored { value: Bytes::from_static(value), revision: 42 };
        let mut out = BytesMut::new();
        object(&mut out, &descriptor, &stored);
        let shown: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(shown["metadata"], serde_json::json!({ "name": "n", "resourceVersion": "42" }));
        let mut out = BytesMut::new();
        partial(&mut out, &stored);
        let shown: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(shown["kind"], "PartialObjectMetadata");
        assert_eq!(shown["metadata"], serde_json::json!({ "name": "n", "resourceVersion": "42" }));
    }
}
