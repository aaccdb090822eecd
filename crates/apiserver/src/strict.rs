//! What a body says twice or says to nobody: duplicate and unknown fields, in the order they stand in the text. The
//! typed decoder keeps the last of several values and drops what it does not know; this pass is what tells about it.

use std::collections::HashSet;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::schema::{At, Schema};

/// More than this is not news.
const LIMIT: usize = 100;

/// The complaints about a body. A text that is no JSON gives none: decoding it will.
pub(crate) fn complaints(schema: &Schema, body: &[u8]) -> Vec<String> {
    let mut scan = Scan { path: String::new(), found: Vec::new() };
    let mut json = serde_json::Deserializer::from_slice(body);
    let _ = Place { scan: &mut scan, at: schema.root() }.deserialize(&mut json);
    scan.found
}

struct Scan {
    path: String,
    found: Vec<String>,
}

impl Scan {
    fn report(&mut self, what: &str, path: &str) {
        let complaint = format!("{what} field {path:?}");
        if self.found.len() < LIMIT && !self.found.contains(&complaint) {
            self.found.push(complaint);
        }
    }
}

struct Place<'s, 'a> {
    scan: &'s mut Scan,
    at: At<'a>,
}

impl<'de> DeserializeSeed<'de> for Place<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Place<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { scan, at } = self;
        let before = scan.path.len();
        let mut seen: HashSet<String> = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if before > 0 {
                scan.path.push('.');
            }
            scan.path.push_str(&name);
            let path = scan.path.clone();
            if seen.contains(&name) {
                scan.report("duplicate", &path);
            }
            match at.member(&name) {
                Some(inner) => map.next_value_seed(Place { scan, at: inner })?,
                None => {
                    if at.is_object() {
                        scan.report("unknown", &path);
                    }
                    map.next_value::<IgnoredAny>()?;
                }
            }
            seen.insert(name);
            scan.path.truncate(before);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let Self { scan, at } = self;
        let before = scan.path.len();
        let mut index = 0usize;
        loop {
            scan.path.push_str(&format!("[{index}]"));
            let more = list.next_element_seed(Place { scan, at: at.element() })?;
            scan.path.truncate(before);
            if more.is_none() {
                return Ok(());
            }
            index += 1;
        }
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ConfigMap, Pod};

    use super::*;

    #[test]
    fn complaints_come_in_the_order_of_the_text() {
        let body =
            br#"{"metadata":{"name":"a","bogus":1},"data":{"x":"1","x":"2"},"extra":{"y":1,"y":2},"data":{"x":"3"}}"#;
        assert_eq!(
            complaints(&Schema::of::<ConfigMap>(), body),
            [
                "unknown field \"metadata.bogus\"",
                "duplicate field \"data.x\"",
                "unknown field \"extra\"",
                "duplicate field \"data\""
            ]
        );
        let body =
            br#"{"spec":{"containers":[{"name":"a"},{"name":"b","imagee":"x","env":[{"name":"A","Value":"v"}]}]}}"#;
        assert_eq!(
            complaints(&Schema::of::<Pod>(), body),
            ["unknown field \"spec.containers[1].imagee\"", "unknown field \"spec.containers[1].env[0].Value\""]
        );
        assert!(complaints(&Schema::of::<Pod>(), b"{nope").is_empty());
    }
}
