//! Partial parsing of encoded JSON: reads members and values without building the whole value.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// The members of an object, sorted by name, each with its encoded value. `None` if the JSON is invalid or not an object.
pub fn parse_members(json: &str) -> Option<Vec<(Cow<'_, str>, &str)>> {
    if !json.starts_with('{') {
        return None;
    }
    plain_members(json).or_else(|| any_members(json))
}

fn plain_members(json: &str) -> Option<Vec<(Cow<'_, str>, &str)>> {
    let mut rest = JsonScanner(json.as_bytes());
    rest.consume(b'{')?;
    let mut found: Vec<(Cow<'_, str>, &str)> = Vec::with_capacity(16);
    while let Some(name) = rest.next_member()? {
        let value = rest.read_value()?;
        let end = json.len() - rest.0.len();
        let name = std::str::from_utf8(name).ok()?;
        found.push((Cow::Borrowed(name), json.get(end - value.len()..end)?));
    }
    let is_sorted = found.is_sorted_by(|(a, _), (b, _)| a < b);
    if !is_sorted {
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        // Duplicate names: `any_members` keeps the last of them.
        found.is_sorted_by(|(a, _), (b, _)| a < b).then_some(())?;
    }
    rest.0.is_empty().then_some(found)
}

fn any_members(json: &str) -> Option<Vec<(Cow<'_, str>, &str)>> {
    #[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
    struct Name<'a>(#[serde(borrow)] Cow<'a, str>);
    let members: BTreeMap<Name<'_>, &RawValue> = serde_json::from_str(json).ok()?;
    Some(members.into_iter().map(|(name, value)| (name.0, value.get())).collect())
}

/// The encoded value of the member with this name. `members` must be sorted by name.
pub fn find_member<'a>(members: &[(Cow<'_, str>, &'a str)], name: &str) -> Option<&'a str> {
    let at = members.binary_search_by(|(other, _)| (**other).cmp(name)).ok()?;
    Some(members[at].1)
}

/// Parses a value. Returns null if it is invalid.
pub fn parse_value(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or_default()
}

/// Applies a merge patch (RFC 7386) to encoded JSON. Members that the patch does not contain are copied without parsing.
pub fn apply_merge_patch(json: &str, patch: &Value) -> String {
    let mut out = String::with_capacity(json.len() + 64);
    merge(Some(json), patch, &mut out);
    out
}

fn merge(old: Option<&str>, patch: &Value, out: &mut String) {
    let Value::Object(wanted) = patch else {
        out.push_str(&patch.to_string());
        return;
    };
    let old = old.and_then(parse_members).unwrap_or_default();
    let mut separator = '{';
    let mut begin = |name: &str, out: &mut String| {
        out.push(separator);
        separator = ',';
        match name.bytes().all(|b| b >= b' ' && !matches!(b, b'"' | b'\\')) {
            true => out.extend(["\"", name, "\""]),
            false => out.push_str(&Value::from(name).to_string()),
        }
        out.push(':');
    };
    for (name, old) in &old {
        match wanted.get(&**name) {
            Some(Value::Null) => {}
            Some(patch) => {
                begin(name, out);
                merge(Some(old), patch, out);
            }
            None => {
                begin(name, out);
                out.push_str(old);
            }
        }
    }
    for (name, patch) in wanted {
        if !patch.is_null() && find_member(&old, name).is_none() {
            begin(name, out);
            merge(None, patch, out);
        }
    }
    if separator == '{' {
        out.push('{');
    }
    out.push('}');
}

/// Reads JSON in plain form: without white space, and without escapes in names. The server and most clients write this
/// form. All methods return `None` at anything else; the caller then uses a complete parser. The scanner does not detect
/// every error of invalid JSON. The field is the rest that was not read yet.
#[derive(Clone)]
pub struct JsonScanner<'a>(pub &'a [u8]);

impl<'a> JsonScanner<'a> {
    pub fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    /// Skips this byte.
    pub fn consume(&mut self, byte: u8) -> Option<()> {
        self.0 = self.0.strip_prefix(&[byte])?;
        Some(())
    }

    /// Reads the name of the next member. `Some(None)` at the end of the object, which is then consumed. The caller has
    /// consumed the `{` and the value of the previous member.
    pub fn next_member(&mut self) -> Option<Option<&'a [u8]>> {
        if self.peek()? == b'}' {
            return self.consume(b'}').map(|()| None);
        }
        let _separator = self.consume(b',');
        self.consume(b'"')?;
        let end = memchr::memchr2(b'"', b'\\', self.0)?;
        let (name, rest) = self.0.split_at(end);
        self.0 = rest.strip_prefix(b"\":")?;
        Some(Some(name))
    }

    /// Moves to the next element. `Some(false)` at the end of the list, which is then consumed. The caller has consumed the
    /// `[` and the previous element.
    pub fn next_element(&mut self) -> Option<bool> {
        if self.peek()? == b']' {
            return self.consume(b']').map(|()| false);
        }
        let _separator = self.consume(b',');
        Some(true)
    }

    /// Reads a value of any type and returns its bytes.
    pub fn read_value(&mut self) -> Option<&'a [u8]> {
        let json = self.0;
        let length = match self.peek()? {
            b'"' => string_length(json)?,
            b'{' | b'[' => {
                let (mut depth, mut at) = (0usize, 0);
                loop {
                    match json.get(at)? {
                        b'"' => {
                            at += string_length(&json[at..])?;
                            continue;
                        }
                        b'{' | b'[' => depth += 1,
                        b'}' | b']' => depth -= 1,
                        _ => {}
                    }
                    at += 1;
                    if depth == 0 {
                        break at;
                    }
                }
            }
            _ => {
                let is_part = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
                json.iter().position(|b| !is_part(b)).unwrap_or(json.len())
            }
        };
        let (value, rest) = json.split_at(length);
        self.0 = rest;
        Some(value).filter(|v| !v.is_empty())
    }
}

/// The length in bytes of the string at the beginning, including its quotes.
fn string_length(json: &[u8]) -> Option<usize> {
    let mut at = 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', json.get(at..)?)?;
        match json[at] {
            b'"' => return Some(at + 1),
            _ => at += 2,
        }
    }
}

/// Returns true for integers of at most 15 characters. Two of them are equal only if their bytes are equal; other numbers
/// can have several encodings.
pub fn is_plain_integer(number: &[u8]) -> bool {
    number.len() <= 15 && number.strip_prefix(b"-").unwrap_or(number).iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn encoded_json_is_patched_as_a_value_is() {
        let old = json!({ "a": { "b": 1, "c": [1, { "x": null }], "\"q\"": "\n" }, "d": "text", "e": {}, "f": null });
        for patch in [
            json!({}),
            json!({ "a": null, "d": null, "e": null, "f": null }),
            json!({ "a": { "b": null, "n": { "m": null, "k": 2 } }, "d": { "o": null } }),
            json!({ "a": { "c": [], "\"q\"": { "z": null } }, "e": { "p": true }, "new": { "only": { "null": null } } }),
            json!([1, null]),
            json!("text"),
        ] {
            let text = old.to_string();
            let got = apply_merge_patch(&text, &patch);
            let mut want = old.clone();
            json_patch::merge(&mut want, &patch);
            assert_eq!(serde_json::from_str::<Value>(&got).unwrap_or_else(|e| panic!("{got}: {e}")), want, "{patch}");
        }
    }

    #[test]
    fn members_are_found_in_any_form_of_json() {
        let want = vec![(Cow::Borrowed("a"), "1"), (Cow::Borrowed("b"), r#"{"c":[2]}"#)];
        for text in [r#"{"a":1,"b":{"c":[2]}}"#, r#"{"b":{"c":[2]},"a":1}"#, r#"{ "a" : 1, "b":{"c":[2]}}"#] {
            assert_eq!(parse_members(text).as_ref(), Some(&want), "{text}");
        }
        assert_eq!(parse_members(r#"{"\u0061":1,"b":{"c":[2]}}"#), Some(want.clone()));
        assert_eq!(parse_members(r#"{"a":0,"b":{"c":[2]},"a":1}"#), Some(want.clone()), "the last of one name counts");
        assert_eq!((find_member(&want, "a"), find_member(&want, "c")), (Some("1"), None));
        for nothing in ["[]", "1", r#"{"a":1"#, r#"{"a":1}}"#, ""] {
            assert_eq!(parse_members(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn plain_json_is_scanned() {
        let mut text = JsonScanner(br#"{"a":"x\"]}","b":[1,[{"c":"]"}],null],"d":-1.5e3}rest"#);
        text.consume(b'{').unwrap();
        let mut members = Vec::new();
        while let Some(name) = text.next_member().unwrap() {
            let both = [name, text.read_value().unwrap()].map(|t| std::str::from_utf8(t).unwrap());
            members.push(both);
        }
        assert_eq!(members, [["a", r#""x\"]}""#], ["b", r#"[1,[{"c":"]"}],null]"#], ["d", "-1.5e3"]]);
        assert_eq!(text.0, b"rest");
        for unfinished in ["", " ", "{", "[1", "\"a", "\"a\\", ",", "}"] {
            assert_eq!(JsonScanner(unfinished.as_bytes()).read_value(), None, "{unfinished:?}");
        }
    }
}
