//! Caches the result of strict field checks by the shape of a body. Two bodies of one shape have the same field names and
//! value types, so that the checks give the same result for both. Only bodies without findings are cached.

use super::KindCaches;
use super::two_generation::{CacheWeight, TwoGenerationCache};
use crate::json_scanner::{JsonScanner, is_plain_integer};
use crate::strict_decoding::{DATE_TIME_PATTERN, StrictFindings, check_micro_time, matches_pattern};

/// Bodies that are nested deeper have no shape.
const MAX_DEPTH: usize = 32;

/// The value tells whether bodies of the shape hold zero values that are not stored.
pub type BodyShapeCache = TwoGenerationCache<bool>;

impl CacheWeight for bool {
    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

/// Where a body comes from. The type of a patched object is not checked, so that both have shapes of their own.
#[derive(Clone, Copy, Debug)]
pub enum BodySource {
    Request,
    Patch,
}

/// The cache key of a body. `None` inside if the body is not written in the plain form that has a shape.
pub struct BodyShape(Option<Vec<u8>>);

impl BodyShape {
    pub fn of(source: BodySource, body: &[u8]) -> Self {
        let mut shape = Vec::with_capacity(body.len());
        shape.push(source as u8);
        Self(append_shape(body, &mut shape).map(|()| shape))
    }

    /// The cached result for bodies of this shape: whether they hold zero values that are not stored.
    pub fn cached(&self, caches: &KindCaches) -> Option<bool> {
        caches.body_shapes.get(self.0.as_deref()?)
    }

    /// Caches the findings about a body of this shape, unless there are any.
    pub fn insert(&self, caches: &KindCaches, findings: &StrictFindings) {
        if let Some(shape) = &self.0
            && findings.strict_errors.is_empty()
            && findings.decode_error.is_none()
        {
            caches.body_shapes.insert(shape, findings.has_omitted_zeros);
        }
    }
}

/// Appends what the findings about a body depend on, apart from the schema: field names, value types, and whether a value is
/// empty, zero or a time with microseconds. `apiVersion` and `kind` count with their values. `None` if the body is not
/// written plainly (white space, escapes in names).
fn append_shape(text: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let mut text = JsonScanner(text);
    text.consume(b'{')?;
    while let Some(name) = text.next_member()? {
        append_name(out, name);
        match name {
            b"apiVersion" | b"kind" => out.extend_from_slice(text.read_value()?),
            _ => append_value(&mut text, 1, out)?,
        }
    }
    text.0.is_empty().then_some(())
}

fn append_name(out: &mut Vec<u8>, name: &[u8]) {
    out.push(b'"');
    out.extend_from_slice(name);
    out.push(b'"');
}

fn append_value(text: &mut JsonScanner<'_>, depth: usize, out: &mut Vec<u8>) -> Option<()> {
    if depth == MAX_DEPTH {
        return None;
    }
    match text.peek()? {
        b'{' => {
            text.consume(b'{')?;
            out.push(b'{');
            while let Some(name) = text.next_member()? {
                append_name(out, name);
                append_value(text, depth + 1, out)?;
            }
            out.push(b'}');
        }
        b'[' => {
            text.consume(b'[')?;
            out.push(b'[');
            while text.next_element()? {
                append_value(text, depth + 1, out)?;
            }
            out.push(b']');
        }
        b'"' => {
            let text = text.read_value()?;
            let text = text.get(1..text.len() - 1)?;
            out.push(match text.first() {
                None => b'e',
                // What begins otherwise is no time, whatever follows.
                Some(b'0'..=b'9' | b'\\') if is_micro_time(text)? => b'm',
                Some(_) => b's',
            });
        }
        b'n' | b't' | b'f' => match text.read_value()? {
            b"null" => out.push(b'n'),
            b"true" => out.push(b't'),
            b"false" => out.push(b'f'),
            _ => return None,
        },
        _ => match text.read_value()? {
            [b'1'..=b'9', rest @ ..] if is_plain_integer(rest) => out.push(b'0'),
            // Zero in all its forms, and whatever else there is.
            other => {
                out.push(b'#');
                out.extend_from_slice(other);
                out.push(b'#');
            }
        },
    }
    Some(())
}

/// `None` if the string has escapes, so that its characters cannot be compared.
fn is_micro_time(text: &[u8]) -> Option<bool> {
    let (head, rest) = text.split_at(DATE_TIME_PATTERN.len().min(text.len()));
    let is_hidden = |text: &[u8]| text.contains(&b'\\');
    // Most are told by their first letters.
    if text.starts_with(b"\\u") || text[0].is_ascii_digit() && is_hidden(head) {
        return None;
    }
    if !matches_pattern(head, DATE_TIME_PATTERN) {
        return Some(false);
    }
    (!is_hidden(rest)).then(|| std::str::from_utf8(text).is_ok_and(|text| check_micro_time(text).is_ok()))
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::random_object::RandomObject;
    use crate::strict_decoding::check_body;
    use crate::test_kinds;

    #[test]
    fn texts_of_one_outline_give_the_same_findings() {
        let kinds = test_kinds::all();
        let mut known: HashMap<Vec<u8>, (String, StrictFindings)> = HashMap::new();
        let mut again = 0;
        for seed in 0..4000 {
            let mut random = RandomObject(seed);
            // Few kinds, and small objects: many are alike.
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
            let mut outline = vec![u8::try_from(which).unwrap()];
            if append_shape(text.as_bytes(), &mut outline).is_none() {
                continue;
            }
            let found = check_body(schema, text.as_bytes());
            if let Some((other, findings)) = known.get(&outline) {
                again += 1;
                if findings.decode_error.is_none() {
                    assert_eq!(found, *findings, "{text}\n{other}");
                }
            }
            known.insert(outline, (text, found));
        }
        assert!(again > 500 && known.len() > 500, "{again} of {} again", known.len());
    }

    #[test]
    fn an_outline_tells_apart_what_matters() {
        let outline = |text: &str| {
            let mut out = Vec::new();
            append_shape(text.as_bytes(), &mut out).map(|()| String::from_utf8(out).unwrap())
        };
        let like = [
            (r#"{"a":"x","b":[1,{"c":true}],"d":null}"#, r#"{"a":"y \"z\"","b":[23,{"c":true}],"d":null}"#),
            (r#"{"t":"2020-02-03T04:05:07.654321Z"}"#, r#"{"t":"2021-12-03T04:05:07.000000+02:00"}"#),
        ];
        for (one, other) in like {
            assert!(outline(one).is_some_and(|o| outline(other) == Some(o)), "{one} {other}");
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
        let outlines: HashSet<_> = texts.iter().map(|text| outline(text).unwrap()).collect();
        assert_eq!(outlines.len(), texts.len());
        assert_eq!(outline(r#"{"a":"12 volumes that are \"x\""}"#), outline(r#"{"a":"x"}"#));
        for hidden in [r#"{"a":"\u0032020-02-03T04:05:07.654321Z"}"#, r#"{"a":"2020-02-03T04:05:07.65432\u0031Z"}"#] {
            assert_eq!(outline(hidden), None, "{hidden}");
        }
        for unusual in
            [r#"{"a": 1}"#, r#"{ "a":1}"#, r#"{"a":[1 ]}"#, r#"{"\u0061":1}"#, r#"{"a":1} "#, "[]", "", r#"{"a":nil}"#]
        {
            assert_eq!(outline(unusual), None, "{unusual}");
        }
    }
}
