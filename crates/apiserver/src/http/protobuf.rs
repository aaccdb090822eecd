//! Protobuf request bodies, for the kinds that clients really send that way: kubectl's own subcommands (`kubectl create
//! namespace`, `configmap`, `secret`, `serviceaccount`) and the CSI sidecars (`protobuf_sidecars`). A body becomes the JSON
//! it stands for and then goes the way of any other. Other kinds are answered as an unsupported media type.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use serde_json::{Map, Value};

use super::{protobuf_security, protobuf_sidecars};

pub(crate) const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";
const MAGIC: &[u8] = b"k8s\0";

/// A field of a message: its number, its JSON name and what it holds.
pub(super) type Field = (u64, &'static str, Holds);

#[derive(Clone, Copy)]
pub(super) enum Holds {
    Text,
    /// An empty one differs from none.
    TextMeant,
    Texts,
    Flag,
    Number,
    Message(&'static [Field]),
    Messages(&'static [Field]),
    /// A message whose fields stand directly in the message around it, and which may hold no others.
    Inlined(&'static [Field]),
    TextMap,
    /// Values are binary, shown in base64.
    BinaryMap,
    Quantity,
    Quantities,
    /// Shown to the second.
    Time,
    /// Shown with six digits after the second.
    MicroTime,
}

use Holds::{
    BinaryMap, Flag, Inlined, Message, Messages, MicroTime, Number, Quantities, Quantity, Text, TextMap, TextMeant,
    Texts, Time,
};

const OWNER: &[Field] = &[
    (1, "kind", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "controller", Flag),
    (7, "blockOwnerDeletion", Flag),
];
/// Timestamps and managed fields are the server's own business; a body's are skipped.
pub(super) const METADATA: &[Field] = &[
    (1, "name", Text),
    (2, "generateName", Text),
    (3, "namespace", Text),
    (5, "uid", Text),
    (6, "resourceVersion", Text),
    (11, "labels", TextMap),
    (12, "annotations", TextMap),
    (13, "ownerReferences", Messages(OWNER)),
    (14, "finalizers", Texts),
];
const NAMED: &[Field] = &[(1, "name", Text)];
pub(super) const REFERENCE: &[Field] = &[
    (1, "kind", Text),
    (2, "namespace", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "resourceVersion", Text),
    (7, "fieldPath", Text),
];
const PRECONDITIONS: &[Field] = &[(1, "uid", Text), (2, "resourceVersion", Text)];

/// By kind, with its version where the kind alone is not enough.
const KINDS: &[(&str, &[Field])] = &[
    (
        "Namespace",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "spec", Message(&[(1, "finalizers", Texts)])),
            (3, "status", Message(&[(1, "phase", Text)])),
        ],
    ),
    (
        "ConfigMap",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "data", TextMap),
            (3, "binaryData", BinaryMap),
            (4, "immutable", Flag),
        ],
    ),
    (
        "Secret",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "data", BinaryMap),
            (3, "type", Text),
            (4, "stringData", TextMap),
            (5, "immutable", Flag),
        ],
    ),
    (
        "ServiceAccount",
        &[
            (1, "metadata", Message(METADATA)),
            (2, "secrets", Messages(REFERENCE)),
            (3, "imagePullSecrets", Messages(NAMED)),
            (4, "automountServiceAccountToken", Flag),
        ],
    ),
    ("Binding", &[(1, "metadata", Message(METADATA)), (2, "target", Message(REFERENCE))]),
    (
        "DeleteOptions",
        &[
            (1, "gracePeriodSeconds", Number),
            (2, "preconditions", Message(PRECONDITIONS)),
            (3, "orphanDependents", Flag),
            (4, "propagationPolicy", Text),
            (5, "dryRun", Texts),
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

/// The JSON form of an enveloped object.
pub(crate) fn decode(body: &[u8]) -> Result<Value, ProtobufError> {
    const TYPE: &[Field] = &[(1, "apiVersion", Text), (2, "kind", Text)];
    let envelope = body.strip_prefix(MAGIC).ok_or(ProtobufError::Malformed)?;
    let (mut head, mut raw) = (Map::new(), &[][..]);
    for part in Parts(envelope) {
        match part? {
            (1, Piece::Bytes(bytes)) => head = message(bytes, TYPE)?,
            (2, Piece::Bytes(bytes)) => raw = bytes,
            _ => {}
        }
    }
    let said = |field: &str| head.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let kind = said("kind");
    let full = format!("{}.{kind}", said("apiVersion"));
    let (_, fields) = KINDS
        .iter()
        .chain(protobuf_security::KINDS)
        .chain(protobuf_sidecars::KINDS)
        .find(|(name, _)| *name == kind || *name == full)
        .ok_or(ProtobufError::UnknownKind(kind))?;
    head.append(&mut message(raw, fields)?);
    Ok(head.into())
}

fn message(bytes: &[u8], fields: &[Field]) -> Result<Map<String, Value>, ProtobufError> {
    let mut out = Map::new();
    for part in Parts(bytes) {
        let (number, piece) = part?;
        let Some((_, name, holds)) = fields.iter().find(|(n, _, _)| *n == number) else { continue };
        match (holds, piece) {
            // Go writes empty strings where JSON leaves the field out.
            (Text, Piece::Bytes(b"")) => {}
            (Text | TextMeant, Piece::Bytes(bytes)) => drop(out.insert((*name).into(), text(bytes)?.into())),
            (Flag, Piece::Number(n)) => drop(out.insert((*name).into(), (n != 0).into())),
            (Number, Piece::Number(n)) => drop(out.insert((*name).into(), n.cast_signed().into())),
            (Message(inner), Piece::Bytes(bytes)) => {
                drop(out.insert((*name).into(), message(bytes, inner)?.into()));
            }
            (Inlined(inner), Piece::Bytes(bytes)) => {
                for part in Parts(bytes) {
                    let (number, _) = part?;
                    if !inner.iter().any(|(n, _, _)| *n == number) {
                        return Err(ProtobufError::UnknownKind(format!("{name} {number}")));
                    }
                }
                out.append(&mut message(bytes, inner)?);
            }
            (Quantity, Piece::Bytes(bytes)) => drop(out.insert((*name).into(), quantity(bytes)?)),
            (Time | MicroTime, Piece::Bytes(bytes)) => {
                out.extend(time(bytes, holds)?.map(|time| ((*name).into(), time)));
            }
            (Texts, Piece::Bytes(bytes)) => push(&mut out, name, text(bytes)?.into()),
            (Messages(inner), Piece::Bytes(bytes)) => push(&mut out, name, message(bytes, inner)?.into()),
            (TextMap | BinaryMap | Quantities, Piece::Bytes(bytes)) => {
                let (key, value) = pair(bytes)?;
                let value: Value = match holds {
                    BinaryMap => BASE64_STANDARD.encode(value).into(),
                    Quantities => quantity(value)?,
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
    let mut inner = message(bytes, &[(1, "string", TextMeant)])?;
    Ok(inner.remove("string").unwrap_or_else(|| "0".into()))
}

/// Nothing for a time that was never set.
fn time(bytes: &[u8], shown: &Holds) -> Result<Option<Value>, ProtobufError> {
    let inner = message(bytes, &[(1, "seconds", Number), (2, "nanos", Number)])?;
    if inner.is_empty() {
        return Ok(None);
    }
    let number = |name: &str| inner.get(name).and_then(Value::as_i64).unwrap_or(0);
    let nanos = i32::try_from(number("nanos")).map_err(|_| ProtobufError::Malformed)?;
    let time = Timestamp::new(number("seconds"), nanos).map_err(|_| ProtobufError::Malformed)?;
    Ok(Some(match shown {
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

fn pair(entry: &[u8]) -> Result<(String, &[u8]), ProtobufError> {
    let (mut key, mut value) = (String::new(), &[][..]);
    for part in Parts(entry) {
        match part? {
            (1, Piece::Bytes(bytes)) => key = text(bytes)?,
            (2, Piece::Bytes(bytes)) => value = bytes,
            _ => {}
        }
    }
    Ok((key, value))
}

enum Piece<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// A fixed-width number: no field known here has one.
    Fixed,
}

/// The fields of a message as they come.
struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
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
        let (taken, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    fn read(&mut self) -> Option<(u64, Piece<'a>)> {
        let tag = self.varint()?;
        let piece = match tag & 7 {
            0 => Piece::Number(self.varint()?),
            1 => self.take(8).map(|_| Piece::Fixed)?,
            2 => {
                let length = self.varint()?;
                Piece::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Piece::Fixed)?,
            _ => return None,
        };
        Some((tag >> 3, piece))
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = Result<(u64, Piece<'a>), ProtobufError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let part = self.read().ok_or(ProtobufError::Malformed);
        if part.is_err() {
            self.0 = &[];
        }
        Some(part)
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
    fn bodies_become_the_json_they_stand_for() {
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
    fn sidecars_are_understood() {
        let whole = |version: &str, kind: &str, raw: &[u8]| {
            let head = [field(1, version.as_bytes()), field(2, kind.as_bytes())].concat();
            [MAGIC.to_vec(), field(1, &head), field(2, raw)].concat()
        };
        let meta = field(1, &field(1, b"m"));
        let renewed = [vec![8, 0xa5, 0xeb, 0xdc, 0xca, 0x06], vec![16, 0xa0, 0xf7, 0x36]].concat();
        let spec = [field(1, b""), vec![16, 15], field(4, &renewed)].concat();
        let lease =
            decode(&whole("coordination.k8s.io/v1", "Lease", &[meta.clone(), field(2, &spec)].concat())).unwrap();
        let want =
            json!({ "holderIdentity": "", "leaseDurationSeconds": 15, "renewTime": "2026-01-02T03:04:05.000900Z" });
        assert_eq!(lease["spec"], want);
        let event = [meta.clone(), field(6, &renewed), field(7, b""), vec![64, 2]].concat();
        let event = decode(&whole("v1", "Event", &event)).unwrap();
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
        let made = decode(&whole("v1", "PersistentVolume", &volume(22))).unwrap();
        assert_eq!(made["spec"], json!({ "capacity": { "storage": "1Gi" }, "csi": { "driver": "block.cleat.dev" } }));
        let other = decode(&whole("v1", "PersistentVolume", &volume(5)));
        assert!(matches!(other, Err(ProtobufError::UnknownKind(_))), "no source is dropped in silence");
        assert!(matches!(decode(&whole("v2", "Event", &meta)), Err(ProtobufError::UnknownKind(_))));
    }

    #[test]
    fn nonsense_is_refused_without_harm() {
        assert!(matches!(decode(&enveloped("Gizmo", b"")), Err(ProtobufError::UnknownKind(_))));
        let fine = enveloped("ConfigMap", &field(1, &field(1, b"m")));
        for cut in 4..fine.len() {
            let _ = decode(&fine[..cut]);
        }
        for body in [&b"hello"[..], b"k8s\0\xff\xff\xff", b"k8s\0\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"] {
            assert!(decode(body).is_err());
        }
    }
}
