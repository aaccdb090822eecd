//! What a body says twice or says to nobody: duplicate and unknown fields, in the order they stand in the text. The
//! typed decoder keeps the last of several values and drops what it does not know; this pass is what tells about it.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::schema::{At, Scalar, Schema, Type};

/// More than this is not news.
const LIMIT: usize = 100;
/// These are left out of what is stored when they are empty, whoever sent them.
const NORMALISED: [&str; 4] =
    ["metadata.annotations", "metadata.finalizers", "metadata.labels", "metadata.ownerReferences"];

/// What is to be said about a body.
#[derive(Debug, Default, PartialEq)]
pub struct Findings {
    pub complaints: Vec<String>,
    /// Something the typed decoder would let pass and must not.
    pub fault: Option<String>,
    /// Does it hold values that say nothing and are not kept?
    pub zeros: bool,
}

/// Looks through a text. One that is no JSON gives nothing: decoding it will.
pub fn of_text(schema: &Schema, body: &[u8]) -> Findings {
    let mut scan = Scan { path: String::new(), findings: Findings::default() };
    let place = Place { scan: &mut scan, at: schema.root(), omits_zero: false };
    let _ = place.deserialize(&mut serde_json::Deserializer::from_slice(body));
    scan.findings
}

struct Scan {
    path: String,
    findings: Findings,
}

impl Scan {
    fn empty_if(&mut self, is_empty: bool) {
        self.findings.zeros |= is_empty && !NORMALISED.contains(&self.path.as_str());
    }

    /// About the field the path leads to.
    fn report(&mut self, what: &str) {
        let complaint = format!("{what} field {:?}", self.path);
        let found = &mut self.findings.complaints;
        if found.len() < LIMIT && !found.contains(&complaint) {
            found.push(complaint);
        }
    }
}

struct Place<'s, 'a> {
    scan: &'s mut Scan,
    at: At<'a>,
    omits_zero: bool,
}

impl Place<'_, '_> {
    fn zero_if(self, is_zero: bool) {
        self.scan.findings.zeros |= self.omits_zero && is_zero;
    }
}

impl<'de> DeserializeSeed<'de> for Place<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// A key, borrowed from the text where it can be.
#[derive(serde::Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// The keys of one object so far. Most objects have few.
#[derive(Default)]
struct Seen<'a> {
    few: Vec<Cow<'a, str>>,
    many: HashSet<Cow<'a, str>>,
}

impl<'a> Seen<'a> {
    const FEW: usize = 32;

    fn is_new(&mut self, name: Cow<'a, str>) -> bool {
        if self.many.is_empty() && self.few.len() < Self::FEW {
            let new = !self.few.contains(&name);
            self.few.push(name);
            return new;
        }
        self.many.extend(self.few.drain(..));
        self.many.insert(name)
    }

    fn is_empty(&self) -> bool {
        self.few.is_empty() && self.many.is_empty()
    }
}

impl<'de> Visitor<'de> for Place<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { scan, at, omits_zero } = self;
        let before = scan.path.len();
        let mut seen = Seen::default();
        while let Some(Name(name)) = map.next_key::<Name<'de>>()? {
            if before > 0 {
                scan.path.push('.');
            }
            scan.path.push_str(&name);
            if !seen.is_new(name.clone()) {
                scan.report("duplicate");
            }
            match at.member(&name) {
                Some(inner) => {
                    let omits_zero = at.declared(&name).is_some_and(|f| f.omits_zero);
                    map.next_value_seed(Place { scan, at: inner, omits_zero })?
                }
                None => {
                    if at.is_object() {
                        scan.report("unknown");
                    }
                    map.next_value::<IgnoredAny>()?;
                }
            }
            scan.path.truncate(before);
        }
        scan.empty_if(omits_zero && seen.is_empty() && matches!(at.of, Type::Map { .. }));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let Self { scan, at, omits_zero } = self;
        let before = scan.path.len();
        let mut index = 0usize;
        loop {
            scan.path.push_str(&format!("[{index}]"));
            let more = list.next_element_seed(Place { scan, at: at.element(), omits_zero: false })?;
            scan.path.truncate(before);
            if more.is_none() {
                scan.empty_if(omits_zero && index == 0);
                return Ok(());
            }
            index += 1;
        }
    }

    fn visit_bool<E>(self, flag: bool) -> Result<(), E> {
        self.zero_if(!flag);
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.zero_if(number == 0);
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.zero_if(number == 0);
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.zero_if(number == 0.0);
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        if *self.at.of == Type::Scalar(Scalar::MicroTime)
            && let Err(fault) = check_micro_time(text)
        {
            self.scan.findings.fault.get_or_insert(fault);
        }
        self.zero_if(text.is_empty());
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

pub(crate) const TO_THE_SECOND: &[u8] = b"dddd-dd-ddTdd:dd:dd";

/// Does the text begin like this, with a digit for every `d`?
pub(crate) fn fits(text: &[u8], shape: &[u8]) -> bool {
    text.len() >= shape.len()
        && text.iter().zip(shape).all(|(t, s)| if *s == b'd' { t.is_ascii_digit() } else { t == s })
}

/// These times are compared as text by those who elect leaders: all six digits must be there.
pub(crate) fn check_micro_time(text: &str) -> Result<(), String> {
    let refuse = |rest: &str, part: &str| {
        Err(format!("parsing time {text:?} as \"2006-01-02T15:04:05.000000Z07:00\": cannot parse {rest:?} as {part:?}"))
    };
    let bytes = text.as_bytes();
    if !text.is_ascii() || !fits(bytes, TO_THE_SECOND) {
        return refuse(text, "2006");
    }
    if !fits(&bytes[19..], b".dddddd") {
        return refuse(&text[19..], ".000000");
    }
    match &bytes[26..] {
        b"Z" => Ok(()),
        zone if zone.len() == 6 && (fits(zone, b"+dd:dd") || fits(zone, b"-dd:dd")) => Ok(()),
        _ => refuse(&text[26..], "Z07:00"),
    }
}

#[cfg(test)]
mod tests {

    use k8s_openapi::api::coordination::v1::Lease;
    use k8s_openapi::api::core::v1::{ConfigMap, Pod};

    use super::*;

    #[test]
    fn complaints_come_in_the_order_of_the_text() {
        let body =
            br#"{"metadata":{"name":"a","bogus":1},"data":{"x":"1","x":"2"},"extra":{"y":1,"y":2},"data":{"x":"3"}}"#;
        assert_eq!(
            of_text(&Schema::of::<ConfigMap>(), body).complaints,
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
            of_text(&Schema::of::<Pod>(), body).complaints,
            ["unknown field \"spec.containers[1].imagee\"", "unknown field \"spec.containers[1].env[0].Value\""]
        );
        assert!(of_text(&Schema::of::<Pod>(), b"{nope").complaints.is_empty());
        let many: Vec<String> = (0..100).chain([7, 99]).map(|i| format!(r#""k{i}":"v""#)).collect();
        let body = format!(r#"{{"data":{{{}}}}}"#, many.join(","));
        assert_eq!(
            of_text(&Schema::of::<ConfigMap>(), body.as_bytes()).complaints,
            ["duplicate field \"data.k7\"", "duplicate field \"data.k99\""]
        );
    }

    #[test]
    fn precise_times_have_six_digits() {
        let schema = Schema::of::<Lease>();
        let fault = |time: &str| {
            let lease = serde_json::json!({ "spec": { "renewTime": time }, "metadata": { "name": time } });
            of_text(&schema, lease.to_string().as_bytes()).fault
        };
        for fine in ["2020-02-03T04:05:07.654321Z", "2020-02-03T04:05:07.654321+02:00"] {
            assert_eq!(fault(fine), None, "{fine}");
        }
        for (time, rest, part) in [
            ("2020-02-03T04:05:07Z", "Z", ".000000"),
            ("2020-02-03T06:05:07.5+02:00", ".5+02:00", ".000000"),
            ("2020-02-03T06:05:07.1234567Z", "7Z", "Z07:00"),
            ("yesterday", "yesterday", "2006"),
        ] {
            let want = format!("cannot parse {rest:?} as {part:?}");
            assert!(fault(time).is_some_and(|f| f.ends_with(&want)), "{time}: {:?}", fault(time));
        }
    }

    #[test]
    fn empty_metadata_is_dropped_without_being_looked_for() {
        let schema = Schema::of::<ConfigMap>();
        let zeros = |text: &str| of_text(&schema, text.as_bytes()).zeros;
        assert!(!zeros(r#"{"metadata":{"finalizers":[],"labels":{},"annotations":{},"ownerReferences":[]}}"#));
        assert!(zeros(r#"{"metadata":{"managedFields":[]}}"#) || zeros(r#"{"data":{}}"#));
    }
}
