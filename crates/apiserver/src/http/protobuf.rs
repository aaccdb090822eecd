//! Protobuf request bodies, for the kinds that kubectl's own subcommands send that way (`kubectl create namespace`,
//! `configmap`, `secret`, `serviceaccount`). A body becomes the JSON it stands for and then goes the way of any other.
//! Other kinds are answered as an unsupported media type.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value};

use super::protobuf_security;

pub(crate) const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";
const MAGIC: &[u8] = b"k8s\0";

/// A field of a message: its number, its JSON name and what it holds.
pub(super) type Field = (u64, &'static str, Holds);

#[derive(Clone, Copy)]
pub(super) enum Holds {
    Text,
    Texts,
    Flag,
    Number,
    Message(&'static [Field]),
    Messages(&'static [Field]),
    TextMap,
    /// Values are binary, shown in base64.
    BinaryMap,
}

use Holds::{BinaryMap, Flag, Message, Messages, Number, Text, TextMap, Texts};

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
const REFERENCE: &[Field] = &[
    (1, "kind", Text),
    (2, "namespace", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "resourceVersion", Text),
    (7, "fieldPath", Text),
];
const PRECONDITIONS: &[Field] = &[(1, "uid", Text), (2, "resourceVersion", Text)];

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
    let kind = head.get("kind").and_then(Value::as_str).unwrap_or_default();
    let (_, fields) = KINDS
        .iter()
        .chain(protobuf_security::KINDS)
        .find(|(name, _)| *name == kind)
        .ok_or_else(|| ProtobufError::UnknownKind(kind.into()))?;
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
            (Text, Piece::Bytes(bytes)) => drop(out.insert((*name).into(), text(bytes)?.into())),
            (Flag, Piece::Number(n)) => drop(out.insert((*name).into(), (n != 0).into())),
            (Number, Piece::Number(n)) => drop(out.insert((*name).into(), n.cast_signed().into())),
            (Message(inner), Piece::Bytes(bytes)) => {
                drop(out.insert((*name).into(), message(bytes, inner)?.into()));
            }
            (Texts, Piece::Bytes(bytes)) => push(&mut out, name, text(bytes)?.into()),
            (Messages(inner), Piece::Bytes(bytes)) => push(&mut out, name, message(bytes, inner)?.into()),
            (TextMap | BinaryMap, Piece::Bytes(bytes)) => {
                let (key, value) = pair(bytes)?;
                let value = match holds {
                    BinaryMap => BASE64_STANDARD.encode(value),
                    _ => text(value)?,
                };
                let map = out.entry(*name).or_insert_with(|| Map::new().into());
                map[key] = value.into();
            }
            _ => return Err(ProtobufError::Malformed),
        }
    }
    Ok(out)
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
