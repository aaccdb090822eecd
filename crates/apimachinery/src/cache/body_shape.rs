//! Caches the result of strict field checks by the shape of a body. Two bodies of one shape have the same field names and
//! value types, so that the checks give the same result for both. Only bodies without findings are cached.

use super::KindCaches;
use super::two_generation::{CacheWeight, TwoGenerationCache};
use crate::json_scanner::{JsonScanner, is_plain_integer};
use crate::strict_decoding::{DATE_TIME_PATTERN, StrictFindings, check_micro_time, matches_pattern};

/// Bodies that are nested deeper have no shape.
const MAX_DEPTH: usize = 32;

/// The value is true if bodies of the shape contain zero values that are not stored.
pub type BodyShapeCache = TwoGenerationCache<bool>;

impl CacheWeight for bool {
    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

/// Where a body comes from. It is part of the shape, because `apiVersion` and `kind` of a patched object are not checked.
#[derive(Clone, Copy, Debug)]
pub enum BodySource {
    Request,
    Patch,
}

/// The cache key of a body. `None` inside if the body is not in the plain form of [`JsonScanner`].
pub struct BodyShape(Option<Vec<u8>>);

impl BodyShape {
    pub fn of(source: BodySource, body: &[u8]) -> Self {
        let mut shape = Vec::with_capacity(body.len());
        shape.push(source as u8);
        Self(append_shape(body, &mut shape).map(|()| shape))
    }

    /// The cached result for bodies of this shape: whether they contain zero values that are not stored.
    pub fn cached(&self, caches: &KindCaches) -> Option<bool> {
        caches.body_shapes.get(self.0.as_deref()?)
    }

    /// Caches the findings for bodies of this shape, unless they contain errors.
    pub fn insert(&self, caches: &KindCaches, findings: &StrictFindings) {
        if let Some(shape) = &self.0
            && findings.strict_errors.is_empty()
            && findings.decode_error.is_none()
        {
            caches.body_shapes.insert(shape, findings.has_omitted_zeros);
        }
    }
}

/// Appends the shape of a body: everything that the findings depend on, apart from the schema. These are field names, value
/// types, whether a value is empty, zero or a time with microseconds, and the values of `apiVersion` and `kind`. `None` if
/// the body is not in plain form.
fn append_shape(body: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let mut scanner = JsonScanner(body);
    scanner.consume(b'{')?;
    while let Some(name) = scanner.next_member()? {
        append_name(out, name);
        match name {
            b"apiVersion" | b"kind" => out.extend_from_slice(scanner.read_value()?),
            _ => append_value(&mut scanner, 1, out)?,
        }
    }
    scanner.0.is_empty().then_some(())
}

fn append_name(out: &mut Vec<u8>, name: &[u8]) {
    out.push(b'"');
    out.extend_from_slice(name);
    out.push(b'"');
}

fn append_value(scanner: &mut JsonScanner<'_>, depth: usize, out: &mut Vec<u8>) -> Option<()> {
    if depth == MAX_DEPTH {
        return None;
    }
    match scanner.peek()? {
        b'{' => {
            scanner.consume(b'{')?;
            out.push(b'{');
            while let Some(name) = scanner.next_member()? {
                append_name(out, name);
                append_value(scanner, depth + 1, out)?;
            }
            out.push(b'}');
        }
        b'[' => {
            scanner.consume(b'[')?;
            out.push(b'[');
            while scanner.next_element()? {
                append_value(scanner, depth + 1, out)?;
            }
            out.push(b']');
        }
        b'"' => {
            let quoted = scanner.read_value()?;
            let text = quoted.get(1..quoted.len() - 1)?;
            out.push(match text.first() {
                None => b'e',
                // A time begins with a digit, which can be escaped.
                Some(b'0'..=b'9' | b'\\') if is_micro_time(text)? => b'm',
                Some(_) => b's',
            });
        }
        b'n' | b't' | b'f' => match scanner.read_value()? {
            b"null" => out.push(b'n'),
            b"true" => out.push(b't'),
            b"false" => out.push(b'f'),
            _ => return None,
        },
        _ => match scanner.read_value()? {
            [b'1'..=b'9', rest @ ..] if is_plain_integer(rest) => out.push(b'0'),
            // Zeros in all forms and other numbers: the shape contains the number itself.
            other => {
                out.push(b'#');
                out.extend_from_slice(other);
                out.push(b'#');
            }
        },
    }
    Some(())
}

/// Whether a string is a valid MicroTime. `None` if escapes prevent the comparison.
fn is_micro_time(text: &[u8]) -> Option<bool> {
    let (head, rest) = text.split_at(DATE_TIME_PATTERN.len().min(text.len()));
    let has_escapes = |text: &[u8]| text.contains(&b'\\');
    // Most strings are decided by their first bytes.
    if text.starts_with(b"\\u") || text[0].is_ascii_digit() && has_escapes(head) {
        return None;
    }
    if !matches_pattern(head, DATE_TIME_PATTERN) {
        return Some(false);
    }
    (!has_escapes(rest)).then(|| std::str::from_utf8(text).is_ok_and(|text| check_micro_time(text).is_ok()))
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::random_object::RandomObject;
    use crate::strict_decoding::check_body;
    use crate::test_kinds;

    #[test]
    fn bodies_of_one_shape_have_the_same_findings() {
        let kinds = test_kinds::all();
        let mut findings_by_shape: HashMap<Vec<u8>, (String, StrictFindings)> = HashMap::new();
        let mut repeated = 0;
        for seed in 0..4000 {
            let mut random = RandomObject(seed);
            // Few kinds and small objects, so that many bodies have the same shape.
            let which = random.below(5);
            let schema = kinds[which].schema();
            let mut value = random.value(schema.root(), 3);
            if let Some(members) = value.as_object_mut() {
                match random.below(12) {
                    0 => drop(members.insert("unknown".into(), 1.into())),
                    1 => drop(members.insert("kind".into(), ["A", "B"][random.below(2)].into())),
                    _ => {}
                }
            }
            let text = value.to_string();
            let mut shape = vec![u8::try_from(which).unwrap()];
            if append_shape(text.as_bytes(), &mut shape).is_none() {
                continue;
            }
            let found = check_body(schema, text.as_bytes());
            if let Some((other, findings)) = findings_by_shape.get(&shape) {
                repeated += 1;
                if findings.decode_error.is_none() {
                    assert_eq!(found, *findings, "{text}\n{other}");
                }
            }
            findings_by_shape.insert(shape, (text, found));
        }
        assert!(repeated > 500 && findings_by_shape.len() > 500, "{repeated} of {} again", findings_by_shape.len());
    }

    #[test]
    fn bodies_with_different_findings_have_different_shapes() {
        let shape = |text: &str| {
            let mut out = Vec::new();
            append_shape(text.as_bytes(), &mut out).map(|()| String::from_utf8(out).unwrap())
        };
        let like = [
            (r#"{"a":"x","b":[1,{"c":true}],"d":null}"#, r#"{"a":"y \"z\"","b":[23,{"c":true}],"d":null}"#),
            (r#"{"t":"2020-02-03T04:05:07.654321Z"}"#, r#"{"t":"2021-12-03T04:05:07.000000+02:00"}"#),
        ];
        for (one, other) in like {
            assert!(shape(one).is_some_and(|o| shape(other) == Some(o)), "{one} {other}");
        }
        let texts = [
            r#"{"a":"x"}"#,
            r#"{"a":""}"#,
            r#"{"a":"2020-02-03T04:05:07.654321Z"}"#,
            r#"{"a":1}"#,
            r#"{"a":0}"#,
            r#"{"a":0.0}"#,
            r#"{"a":true}"#,
            r#"{"a":false}"#,
            r#"{"a":null}"#,
            r#"{"a":{}}"#,
            r#"{"a":[]}"#,
            r#"{"a":["x"]}"#,
            r#"{"a":["x","x"]}"#,
            r#"{"a":"x","a":"x"}"#,
            r#"{"b":"x"}"#,
            r#"{"kind":"x"}"#,
            r#"{"kind":"y"}"#,
        ];
        let shapes: HashSet<_> = texts.iter().map(|text| shape(text).unwrap()).collect();
        assert_eq!(shapes.len(), texts.len());
        assert_eq!(shape(r#"{"a":"12 volumes that are \"x\""}"#), shape(r#"{"a":"x"}"#));
        for escaped in [r#"{"a":"\u0032020-02-03T04:05:07.654321Z"}"#, r#"{"a":"2020-02-03T04:05:07.65432\u0031Z"}"#] {
            assert_eq!(shape(escaped), None, "{escaped}");
        }
        for not_plain in
            [r#"{"a": 1}"#, r#"{ "a":1}"#, r#"{"a":[1 ]}"#, r#"{"\u0061":1}"#, r#"{"a":1} "#, "[]", "", r#"{"a":nil}"#]
        {
            assert_eq!(shape(not_plain), None, "{not_plain}");
        }
    }
}
