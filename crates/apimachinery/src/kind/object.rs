//! API objects without their type, and their canonical encoding.

use std::any::Any;

use k8s_openapi::Metadata;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json_scanner::JsonScanner;

/// The Rust type of a kind's objects.
pub trait ApiType:
    Metadata<Ty = ObjectMeta> + JsonSchema + Serialize + DeserializeOwned + Clone + PartialEq + Send + Sync + 'static
{
}

impl<T> ApiType for T where
    T: Metadata<Ty = ObjectMeta>
        + JsonSchema
        + Serialize
        + DeserializeOwned
        + Clone
        + PartialEq
        + Send
        + Sync
        + 'static
{
}

/// An object of some kind. The machinery reads and writes its metadata; only the kind that decoded it knows its type.
pub trait Object: Any + Send + Sync {
    fn meta(&self) -> &ObjectMeta;
    fn meta_mut(&mut self) -> &mut ObjectMeta;
    fn copy(&self) -> Box<dyn Object>;
    /// Returns the canonical JSON: `apiVersion`, `kind` and `metadata` first. It contains the resourceVersion of the
    /// metadata; the caller clears it before storing, because stored objects have none.
    fn encode(&self) -> Vec<u8>;
}

impl<T: ApiType> Object for T {
    fn meta(&self) -> &ObjectMeta {
        self.metadata()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.metadata_mut()
    }

    fn copy(&self) -> Box<dyn Object> {
        Box::new(self.clone())
    }

    fn encode(&self) -> Vec<u8> {
        // Most objects are shorter, so that the buffer is not reallocated.
        let mut out = Vec::with_capacity(2048);
        // Maps in the types are ordered and have string keys, so encoding is deterministic and cannot fail.
        self.serialize(&mut serde_json::Serializer::with_formatter(&mut out, WholeNumbers)).expect("API types encode");
        metadata_first(&mut out).expect("API types have metadata, and are encoded plainly");
        out
    }
}

/// Writes a number without a fraction as an integer: `10`, not `10.0`. Clients send such numbers as integers.
struct WholeNumbers;

impl serde_json::ser::Formatter for WholeNumbers {
    fn write_f64<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, value: f64) -> std::io::Result<()> {
        if value.fract() == 0.0 && value.abs() < 1e15 {
            return write!(writer, "{value:.0}");
        }
        serde_json::ser::CompactFormatter.write_f64(writer, value)
    }
}

/// Moves `metadata` directly behind `apiVersion` and `kind`. [`render`](crate::render) inserts the resourceVersion at this
/// fixed offset. `None` if the object is not in plain form or has no metadata.
fn metadata_first(bytes: &mut [u8]) -> Option<()> {
    let offset = |rest: &JsonScanner<'_>| bytes.len() - rest.0.len();
    let mut scanner = JsonScanner(bytes);
    scanner.consume(b'{')?;
    for _ in ["apiVersion", "kind"] {
        scanner.next_member()?;
        scanner.read_value()?;
    }
    let leading = offset(&scanner);
    let mut member = leading;
    while scanner.next_member()?? != b"metadata" {
        scanner.read_value()?;
        member = offset(&scanner);
    }
    scanner.read_value()?;
    let end = offset(&scanner);
    // Each member in this range includes the comma before it, so that a rotation leaves the commas correct.
    bytes[leading..end].rotate_right(end - member);
    Some(())
}

/// The object in its own type. Panics if `T` is not the type of the kind that decoded the object.
pub fn typed<T: 'static>(object: &dyn Object) -> &T {
    let any: &dyn Any = object;
    any.downcast_ref().expect("an object is only passed to the kind that decoded it")
}

/// As [`typed`].
pub fn typed_mut<T: 'static>(object: &mut dyn Object) -> &mut T {
    let any: &mut dyn Any = object;
    any.downcast_mut().expect("an object is only passed to the kind that decoded it")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod};
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn metadata_follows_api_version_and_kind() {
        fn encoded<T: ApiType>(value: Value) -> String {
            String::from_utf8(serde_json::from_value::<T>(value).unwrap().encode()).unwrap()
        }
        let meta = json!({ "name": "metadata", "labels": { "metadata": "\"metadata\":{" } });
        let shown = r#""metadata":{"labels":{"metadata":"\"metadata\":{"},"name":"metadata"}"#;
        let map = json!({ "metadata": meta, "data": { "metadata": "x" }, "immutable": true });
        let want =
            format!(r#"{{"apiVersion":"v1","kind":"ConfigMap",{shown},"data":{{"metadata":"x"}},"immutable":true}}"#);
        assert_eq!(encoded::<ConfigMap>(map), want);
        let event = json!({ "metadata": meta, "action": "a", "involvedObject": {}, "message": "m", "type": "Normal" });
        let want = format!(
            r#"{{"apiVersion":"v1","kind":"Event",{shown},"action":"a","involvedObject":{{}},"message":"m","type":"Normal"}}"#
        );
        assert_eq!(encoded::<Event>(event), want);
        let want = format!(r#"{{"apiVersion":"v1","kind":"Pod",{shown}}}"#);
        assert_eq!(encoded::<Pod>(json!({ "metadata": meta })), want);
    }
}
