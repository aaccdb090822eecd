//! Strict decoding: finds duplicate and unknown fields of a body, in the order of the body. The typed decoder accepts both
//! (it keeps the last of several values and drops unknown fields), so that this is a separate pass.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::schema::{Scalar, Schema, TypeDef, TypeRef};

/// Further duplicate and unknown fields are not reported.
const MAX_STRICT_ERRORS: usize = 100;
/// [`meta::normalise`](crate::meta::normalise) removes these if they are empty, so that they do not count as omitted zeros.
const DROPPED_BY_NORMALISE: [&str; 4] =
    ["metadata.annotations", "metadata.finalizers", "metadata.labels", "metadata.ownerReferences"];

/// The result of checking a body.
#[derive(Debug, Default, PartialEq)]
pub struct StrictFindings {
    /// Duplicate and unknown fields: errors or warnings, as `fieldValidation` of the request says.
    pub strict_errors: Vec<String>,
    /// An invalid value that the typed decoder accepts. The body must be refused.
    pub decode_error: Option<String>,
    /// The body contains zero values that are not stored; see [`TypeRef::remove_zero_values`].
    pub has_omitted_zeros: bool,
}

/// Checks a body. If it is not valid JSON the result is incomplete, without an error: the decoder reports it.
pub fn check_body(schema: &Schema, body: &[u8]) -> StrictFindings {
    let mut check = BodyCheck { path: String::new(), findings: StrictFindings::default() };
    let root = ValueCheck { check: &mut check, ty: schema.root(), omits_zero: false };
    let _ = root.deserialize(&mut serde_json::Deserializer::from_slice(body));
    check.findings
}

/// The state of the pass.
struct BodyCheck {
    /// The path of the current field, as error messages show it.
    path: String,
    findings: StrictFindings,
}

impl BodyCheck {
    fn note_empty(&mut self, is_empty: bool) {
        self.findings.has_omitted_zeros |= is_empty && !DROPPED_BY_NORMALISE.contains(&self.path.as_str());
    }

    /// Reports a problem of the current field.
    fn report(&mut self, problem: &str) {
        let error = format!("{problem} field {:?}", self.path);
        let errors = &mut self.findings.strict_errors;
        if errors.len() < MAX_STRICT_ERRORS && !errors.contains(&error) {
            errors.push(error);
        }
    }
}

/// Checks one value of the given type.
struct ValueCheck<'s, 'a> {
    check: &'s mut BodyCheck,
    ty: TypeRef<'a>,
    omits_zero: bool,
}

impl ValueCheck<'_, '_> {
    fn note_zero(self, is_zero: bool) {
        self.check.findings.has_omitted_zeros |= self.omits_zero && is_zero;
    }
}

impl<'de> DeserializeSeed<'de> for ValueCheck<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// The name of a member. It is borrowed from the body unless it contains escapes.
#[derive(serde::Deserialize)]
struct MemberName<'a>(#[serde(borrow)] Cow<'a, str>);

/// The names of the members of one object so far. A list up to `MAX_LINEAR_SEARCH` names, a set beyond.
#[derive(Default)]
struct ObjectKeys<'a> {
    list: Vec<Cow<'a, str>>,
    set: HashSet<Cow<'a, str>>,
}

impl<'a> ObjectKeys<'a> {
    const MAX_LINEAR_SEARCH: usize = 32;

    /// Returns false if the name is there already.
    fn insert(&mut self, name: Cow<'a, str>) -> bool {
        if self.set.is_empty() && self.list.len() < Self::MAX_LINEAR_SEARCH {
            let new = !self.list.contains(&name);
            self.list.push(name);
            return new;
        }
        self.set.extend(self.list.drain(..));
        self.set.insert(name)
    }

    fn is_empty(&self) -> bool {
        self.list.is_empty() && self.set.is_empty()
    }
}

impl<'de> Visitor<'de> for ValueCheck<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { check, ty, omits_zero } = self;
        let before = check.path.len();
        let mut keys = ObjectKeys::default();
        while let Some(MemberName(name)) = map.next_key::<MemberName<'de>>()? {
            if before > 0 {
                check.path.push('.');
            }
            check.path.push_str(&name);
            if !keys.insert(name.clone()) {
                check.report("duplicate");
            }
            match ty.member(&name) {
                Some(inner) => {
                    let omits_zero = ty.declared(&name).is_some_and(|f| f.omits_zero);
                    map.next_value_seed(ValueCheck { check, ty: inner, omits_zero })?
                }
                None => {
                    if ty.is_object() {
                        check.report("unknown");
                    }
                    map.next_value::<IgnoredAny>()?;
                }
            }
            check.path.truncate(before);
        }
        check.note_empty(omits_zero && keys.is_empty() && matches!(ty.def, TypeDef::Map { .. }));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let Self { check, ty, omits_zero } = self;
        let before = check.path.len();
        let mut index = 0usize;
        loop {
            check.path.push_str(&format!("[{index}]"));
            let more = list.next_element_seed(ValueCheck { check, ty: ty.element(), omits_zero: false })?;
            check.path.truncate(before);
            if more.is_none() {
                check.note_empty(omits_zero && index == 0);
                return Ok(());
            }
            index += 1;
        }
    }

    fn visit_bool<E>(self, flag: bool) -> Result<(), E> {
        self.note_zero(!flag);
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.note_zero(number == 0);
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.note_zero(number == 0);
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.note_zero(number == 0.0);
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        if *self.ty.def == TypeDef::Scalar(Scalar::MicroTime)
            && let Err(error) = check_micro_time(text)
        {
            self.check.findings.decode_error.get_or_insert(error);
        }
        self.note_zero(text.is_empty());
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// A time up to its seconds; `d` stands for a digit.
pub(crate) const DATE_TIME_PATTERN: &[u8] = b"dddd-dd-ddTdd:dd:dd";

/// Returns true if the text begins with the pattern. A `d` in the pattern matches any digit.
pub(crate) fn matches_pattern(text: &[u8], pattern: &[u8]) -> bool {
    text.len() >= pattern.len()
        && text.iter().zip(pattern).all(|(t, s)| if *s == b'd' { t.is_ascii_digit() } else { t == s })
}

/// Checks that a MicroTime has exactly six digits after the second. Leader election compares these times as strings.
pub(crate) fn check_micro_time(text: &str) -> Result<(), String> {
    let refuse = |rest: &str, part: &str| {
        Err(format!("parsing time {text:?} as \"2006-01-02T15:04:05.000000Z07:00\": cannot parse {rest:?} as {part:?}"))
    };
    let bytes = text.as_bytes();
    if !text.is_ascii() || !matches_pattern(bytes, DATE_TIME_PATTERN) {
        return refuse(text, "2006");
    }
    if !matches_pattern(&bytes[19..], b".dddddd") {
        return refuse(&text[19..], ".000000");
    }
    match &bytes[26..] {
        b"Z" => Ok(()),
        zone if zone.len() == 6 && (matches_pattern(zone, b"+dd:dd") || matches_pattern(zone, b"-dd:dd")) => Ok(()),
        _ => refuse(&text[26..], "Z07:00"),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::Lease;
    use k8s_openapi::api::core::v1::{ConfigMap, Pod};

    use super::*;

    #[test]
    fn errors_come_in_the_order_of_the_body() {
        let body =
            br#"{"metadata":{"name":"a","bogus":1},"data":{"x":"1","x":"2"},"extra":{"y":1,"y":2},"data":{"x":"3"}}"#;
        assert_eq!(
            check_body(&Schema::of::<ConfigMap>(), body).strict_errors,
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
            check_body(&Schema::of::<Pod>(), body).strict_errors,
            ["unknown field \"spec.containers[1].imagee\"", "unknown field \"spec.containers[1].env[0].Value\""]
        );
        assert!(check_body(&Schema::of::<Pod>(), b"{nope").strict_errors.is_empty());
        let many: Vec<String> = (0..100).chain([7, 99]).map(|i| format!(r#""k{i}":"v""#)).collect();
        let body = format!(r#"{{"data":{{{}}}}}"#, many.join(","));
        assert_eq!(
            check_body(&Schema::of::<ConfigMap>(), body.as_bytes()).strict_errors,
            ["duplicate field \"data.k7\"", "duplicate field \"data.k99\""]
        );
    }

    #[test]
    fn micro_times_have_six_digits() {
        let schema = Schema::of::<Lease>();
        let decode_error = |time: &str| {
            let lease = serde_json::json!({ "spec": { "renewTime": time }, "metadata": { "name": time } });
            check_body(&schema, lease.to_string().as_bytes()).decode_error
        };
        for fine in ["2020-02-03T04:05:07.654321Z", "2020-02-03T04:05:07.654321+02:00"] {
            assert_eq!(decode_error(fine), None, "{fine}");
        }
        for (time, rest, part) in [
            ("2020-02-03T04:05:07Z", "Z", ".000000"),
            ("2020-02-03T06:05:07.5+02:00", ".5+02:00", ".000000"),
            ("2020-02-03T06:05:07.1234567Z", "7Z", "Z07:00"),
            ("yesterday", "yesterday", "2006"),
        ] {
            let want = format!("cannot parse {rest:?} as {part:?}");
            assert!(decode_error(time).is_some_and(|e| e.ends_with(&want)), "{time}: {:?}", decode_error(time));
        }
    }

    #[test]
    fn empty_metadata_fields_do_not_count_as_omitted_zeros() {
        let schema = Schema::of::<ConfigMap>();
        let zeros = |text: &str| check_body(&schema, text.as_bytes()).has_omitted_zeros;
        assert!(!zeros(r#"{"metadata":{"finalizers":[],"labels":{},"annotations":{},"ownerReferences":[]}}"#));
        assert!(zeros(r#"{"metadata":{"managedFields":[]}}"#) || zeros(r#"{"data":{}}"#));
    }
}
