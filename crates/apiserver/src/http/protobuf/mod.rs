//! Protobuf request bodies, for the kinds that clients send as protobuf: `kubectl create` (namespace, configmap,
//! secret, serviceaccount; roles and tokens in `security`) and the CSI sidecars (`sidecars`). A body is converted to
//! JSON and then handled like any other. Other kinds are refused as an unsupported media type.

mod security;
mod sidecars;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use serde_json::{Map, Value};

pub(crate) const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";
const MAGIC: &[u8] = b"k8s\0";

/// A field of a message: its number, its JSON name and its type.
pub(super) type Field = (u64, &'static str, FieldType);

#[derive(Clone, Copy)]
pub(super) enum FieldType {
    Text,
    /// A string that may be absent: an empty one is kept.
    OptionalText,
    TextList,
    Bool,
    Int,
    Message(&'static [Field]),
    MessageList(&'static [Field]),
    /// A message whose fields belong to the surrounding JSON object. Fields that are not listed are refused.
    InlinedMessage(&'static [Field]),
    TextMap,
    /// Binary values, base64 in JSON.
    BinaryMap,
    Quantity,
    QuantityMap,
    /// Formatted without fractions of a second.
    Time,
    /// Formatted with six digits after the second.
    MicroTime,
}

use FieldType::{
    BinaryMap, Bool, InlinedMessage, Int, Message, MessageList, MicroTime, OptionalText, Quantity, QuantityMap, Text,
    TextList, TextMap, Time,
};

const OWNER_REFERENCE: &[Field] = &[
    (1, "kind", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "controller", Bool),
    (7, "blockOwnerDeletion", Bool),
];
/// Timestamps and managed fields of a body are skipped: the server sets them.
pub(super) const METADATA: &[Field] = &[
    (1, "name", Text),
    (2, "generateName", Text),
    (3, "namespace", Text),
    (5, "uid", Text),
    (6, "resourceVersion", Text),
    (11, "labels", TextMap),
    (12, "annotations", TextMap),
    (13, "ownerReferences", MessageList(OWNER_REFERENCE)),
    (14, "finalizers", TextList),
];
const LOCAL_OBJECT_REFERENCE: &[Field] = &[(1, "name", Text)];
pub(super) const OBJECT_REFERENCE: &[Field] = &[
    (1, "kind", Text),
    (2, "namespace", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "resourceVersion", Text),
    (7, "fieldPath", Text),
];
const PRECONDITIONS: &[Field] = &[(1, "uid", Text), (2, "resourceVersion", Text)];

/// The messages by kind. Kinds that exist in several groups or versions are written `APIVERSION.KIND`.
const KINDS: &[(&str, &[Field])] = &[
    (
        "Namespace",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "spec", Message(&[(1, "finalizers", TextList)])),
            (3, "status", Message(&[(1, "phase", Text)])),
        ],
    ),
    (
        "ConfigMap",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "data", TextMap),
            (3, "binaryData", BinaryMap),
            (4, "immutable", Bool),
        ],
    ),
    (
        "Secret",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "data", BinaryMap),
            (3, "type", Text),
            (4, "stringData", TextMap),
            (5, "immutable", Bool),
        ],
    ),
    (
        "ServiceAccount",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "secrets", MessageList(OBJECT_REFERENCE)),
            (3, "imagePullSecrets", MessageList(LOCAL_OBJECT_REFERENCE)),
            (4, "automountServiceAccountToken", Bool),
        ],
    ),
    ("Binding", &[(1, "metadata", Message(METADATA)), (2, "target", Message(OBJECT_REFERENCE))]),
    (
        "DeleteOptions",
        &[
            (1, "gracePeriodSeconds", Int),
            (2, "preconditions", Message(PRECONDITIONS)),
            (3, "orphanDependents", Bool),
            (4, "propagationPolicy", Text),
            (5, "dryRun", TextList),
        ],
    ),
];

#[derive(Debug, thiserror::Error)]
pub(crate) enum ProtobufError {
    #[error("objects of kind {0:?} are not accepted as protobuf")]
    UnknownKind(String),
    #[error("the body is not well-formed protobuf")]
    Malformed,
}

/// Converts an object in the Kubernetes envelope to JSON.
pub(crate) fn decode(body: &[u8]) -> Result<Value, ProtobufError> {
    const TYPE_META: &[Field] = &[(1, "apiVersion", Text), (2, "kind", Text)];
    let envelope = body.strip_prefix(MAGIC).ok_or(ProtobufError::Malformed)?;
    let (mut object, mut raw) = (Map::new(), &[][..]);
    for field in WireFields(envelope) {
        match field? {
            (1, WireValue::Bytes(bytes)) => object = message(bytes, TYPE_META)?,
            (2, WireValue::Bytes(bytes)) => raw = bytes,
            _ => {}
        }
    }
    let string = |field: &str| object.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let kind = string("kind");
    let qualified = format!("{}.{kind}", string("apiVersion"));
    let (_, fields) = KINDS
        .iter()
        .chain(security::KINDS)
        .chain(sidecars::KINDS)
        .find(|(name, _)| *name == kind || *name == qualified)
        .ok_or(ProtobufError::UnknownKind(kind))?;
    object.append(&mut message(raw, fields)?);
    Ok(object.into())
}

fn message(bytes: &[u8], fields: &[Field]) -> Result<Map<String, Value>, ProtobufError> {
    let mut out = Map::new();
    for field in WireFields(bytes) {
        let (number, value) = field?;
        let Some((_, name, field_type)) = fields.iter().find(|(n, _, _)| *n == number) else { continue };
        match (field_type, value) {
            // Go encodes empty strings that JSON omits.
            (Text, WireValue::Bytes(b"")) => {}
            (Text | OptionalText, WireValue::Bytes(bytes)) => drop(out.insert((*name).into(), text(bytes)?.into())),
            (Bool, WireValue::Number(n)) => drop(out.insert((*name).into(), (n != 0).into())),
            (Int, WireValue::Number(n)) => drop(out.insert((*name).into(), n.cast_signed().into())),
            (Message(inner), WireValue::Bytes(bytes)) => {
                drop(out.insert((*name).into(), message(bytes, inner)?.into()));
            }
            (InlinedMessage(inner), WireValue::Bytes(bytes)) => {
                for field in WireFields(bytes) {
                    let (number, _) = field?;
                    if !inner.iter().any(|(n, _, _)| *n == number) {
                        return Err(ProtobufError::UnknownKind(format!("{name} {number}")));
                    }
                }
                out.append(&mut message(bytes, inner)?);
            }
            (Quantity, WireValue::Bytes(bytes)) => drop(out.insert((*name).into(), quantity(bytes)?)),
            (Time | MicroTime, WireValue::Bytes(bytes)) => {
                out.extend(time(bytes, field_type)?.map(|time| ((*name).into(), time)));
            }
            (TextList, WireValue::Bytes(bytes)) => push(&mut out, name, text(bytes)?.into()),
            (MessageList(inner), WireValue::Bytes(bytes)) => push(&mut out, name, message(bytes, inner)?.into()),
            (TextMap | BinaryMap | QuantityMap, WireValue::Bytes(bytes)) => {
                let (key, value) = map_entry(bytes)?;
                let value: Value = match field_type {
                    BinaryMap => BASE64_STANDARD.encode(value).into(),
                    QuantityMap => quantity(value)?,
                    _ => text(value)?.into(),
                };
                let map = out.entry(*name).or_insert_with(|| Map::new().into());
                map[key] = value;
            }
            _ => return Err(ProtobufError::Malformed),
        }
    }
    Ok(out)
}

fn quantity(bytes: &[u8]) -> Result<Value, ProtobufError> {
    let mut inner = message(bytes, &[(1, "string", OptionalText)])?;
    Ok(inner.remove("string").unwrap_or_else(|| "0".into()))
}

/// Formats a time; none for the zero time.
fn time(bytes: &[u8], field_type: &FieldType) -> Result<Option<Value>, ProtobufError> {
    let inner = message(bytes, &[(1, "seconds", Int), (2, "nanos", Int)])?;
    if inner.is_empty() {
        return Ok(None);
    }
    let number = |name: &str| inner.get(name).and_then(Value::as_i64).unwrap_or(0);
    let nanos = i32::try_from(number("nanos")).map_err(|_| ProtobufError::Malformed)?;
    let time = Timestamp::new(number("seconds"), nanos).map_err(|_| ProtobufError::Malformed)?;
    Ok(Some(match field_type {
        MicroTime => format!("{time:.6}").into(),
        _ => format!("{time:.0}").into(),
    }))
}

fn push(out: &mut Map<String, Value>, name: &str, value: Value) {
    if let Value::Array(list) = out.entry(name).or_insert_with(|| Value::Array(Vec::new())) {
        list.push(value);
    }
}

fn text(bytes: &[u8]) -> Result<String, ProtobufError> {
    String::from_utf8(bytes.to_vec()).map_err(|_| ProtobufError::Malformed)
}

fn map_entry(entry: &[u8]) -> Result<(String, &[u8]), ProtobufError> {
    let (mut key, mut value) = (String::new(), &[][..]);
    for field in WireFields(entry) {
        match field? {
            (1, WireValue::Bytes(bytes)) => key = text(bytes)?,
            (2, WireValue::Bytes(bytes)) => value = bytes,
            _ => {}
        }
    }
    Ok((key, value))
}

enum WireValue<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// A fixed-width number; no field in the tables has one.
    Fixed,
}

/// Iterates over the fields of an encoded message.
struct WireFields<'a>(&'a [u8]);

impl<'a> WireFields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, count: u64) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(bytes)
    }

    fn read(&mut self) -> Option<(u64, WireValue<'a>)> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => WireValue::Number(self.varint()?),
            1 => self.take(8).map(|_| WireValue::Fixed)?,
            2 => {
                let length = self.varint()?;
                WireValue::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| WireValue::Fixed)?,
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

impl<'a> Iterator for WireFields<'a> {
    type Item = Result<(u64, WireValue<'a>), ProtobufError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.read().ok_or(ProtobufError::Malformed);
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![number << 3 | 2, bytes.len() as u8];
        out.extend_from_slice(bytes);
        out
    }

    fn enveloped(kind: &str, raw: &[u8]) -> Vec<u8> {
        let head = [field(1, b"v1"), field(2, kind.as_bytes())].concat();
        [MAGIC.to_vec(), field(1, &head), field(2, raw), field(3, b""), field(4, b"")].concat()
    }

    #[test]
    fn bodies_are_converted_to_json() {
        let label = [field(1, b"a"), field(2, b"b")].concat();
        let meta = [field(1, b"m"), field(2, b""), field(11, &label), field(8, &[0]), vec![56, 0]].concat();
        let data = [field(1, b"k"), field(2, b"v")].concat();
        let map = enveloped("ConfigMap", &[field(1, &meta), field(2, &data), field(3, &data), vec![32, 1]].concat());
        assert_eq!(
            decode(&map).unwrap(),
            json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "m", "labels": { "a": "b" } },
                "data": { "k": "v" }, "binaryData": { "k": "dg==" }, "immutable": true,
            })
        );
        let options = enveloped("DeleteOptions", &[vec![8, 0], field(4, b"Background")].concat());
        assert_eq!(decode(&options).unwrap()["propagationPolicy"], "Background");
        assert_eq!(decode(&options).unwrap()["gracePeriodSeconds"], 0);
    }

    #[test]
    fn sidecar_objects_are_converted() {
        let body = |version: &str, kind: &str, raw: &[u8]| {
            let head = [field(1, version.as_bytes()), field(2, kind.as_bytes())].concat();
            [MAGIC.to_vec(), field(1, &head), field(2, raw)].concat()
        };
        let meta = field(1, &field(1, b"m"));
        let renewed = [vec![8, 0xa5, 0xeb, 0xdc, 0xca, 0x06], vec![16, 0xa0, 0xf7, 0x36]].concat();
        let spec = [field(1, b""), vec![16, 15], field(4, &renewed)].concat();
        let lease =
            decode(&body("coordination.k8s.io/v1", "Lease", &[meta.clone(), field(2, &spec)].concat())).unwrap();
        let want =
            json!({ "holderIdentity": "", "leaseDurationSeconds": 15, "renewTime": "2026-01-02T03:04:05.000900Z" });
        assert_eq!(lease["spec"], want);
        let event = [meta.clone(), field(6, &renewed), field(7, b""), vec![64, 2]].concat();
        let event = decode(&body("v1", "Event", &event)).unwrap();
        assert_eq!((&event["firstTimestamp"], &event["count"]), (&json!("2026-01-02T03:04:05Z"), &json!(2)));
        assert_eq!(event.get("lastTimestamp"), None);
        let size = [field(1, b"storage"), field(2, &field(1, b"1Gi"))].concat();
        let source = |number: u8| {
            let csi = field(1, b"block.cleat.dev");
            // The number 22 needs a second byte.
            let tag = if number == 22 { vec![0xb2, 1] } else { vec![number << 3 | 2] };
            field(2, &[tag, vec![csi.len() as u8], csi].concat())
        };
        let volume = |number| [meta.clone(), field(2, &[field(1, &size), source(number)].concat())].concat();
        let volume_json = decode(&body("v1", "PersistentVolume", &volume(22))).unwrap();
        assert_eq!(
            volume_json["spec"],
            json!({ "capacity": { "storage": "1Gi" }, "csi": { "driver": "block.cleat.dev" } })
        );
        let other = decode(&body("v1", "PersistentVolume", &volume(5)));
        assert!(matches!(other, Err(ProtobufError::UnknownKind(_))), "other volume sources are refused, not dropped");
        assert!(matches!(decode(&body("v2", "Event", &meta)), Err(ProtobufError::UnknownKind(_))));
    }

    #[test]
    fn malformed_bodies_are_refused() {
        assert!(matches!(decode(&enveloped("Gizmo", b"")), Err(ProtobufError::UnknownKind(_))));
        let valid = enveloped("ConfigMap", &field(1, &field(1, b"m")));
        for cut in 4..valid.len() {
            let _ = decode(&valid[..cut]);
        }
        for body in [&b"hello"[..], b"k8s\0\xff\xff\xff", b"k8s\0\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"] {
            assert!(decode(body).is_err());
        }
    }
}
