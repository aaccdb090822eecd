//! JSON texts taken apart only as far as needed.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// The members of an object, each as its text, sorted by name; nothing for anything but an object.
pub fn parse_members(text: &str) -> Option<Vec<(Cow<'_, str>, &str)>> {
    if !text.starts_with('{') {
        return None;
    }
    plain_members(text).or_else(|| any_members(text))
}

fn plain_members(text: &str) -> Option<Vec<(Cow<'_, str>, &str)>> {
    let mut rest = JsonScanner(text.as_bytes());
    rest.consume(b'{')?;
    let mut found: Vec<(Cow<'_, str>, &str)> = Vec::with_capacity(16);
    while let Some(name) = rest.next_member()? {
        let value = rest.read_value()?;
        let end = text.len() - rest.0.len();
        let name = std::str::from_utf8(name).ok()?;
        found.push((Cow::Borrowed(name), text.get(end - value.len()..end)?));
    }
    let is_sorted = found.is_sorted_by(|(a, _), (b, _)| a < b);
    if !is_sorted {
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        // Of members with one name the last would count.
        found.is_sorted_by(|(a, _), (b, _)| a < b).then_some(())?;
    }
    rest.0.is_empty().then_some(found)
}

fn any_members(text: &str) -> Option<Vec<(Cow<'_, str>, &str)>> {
    #[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
    struct Name<'a>(#[serde(borrow)] Cow<'a, str>);
    let members: BTreeMap<Name<'_>, &RawValue> = serde_json::from_str(text).ok()?;
    Some(members.into_iter().map(|(name, value)| (name.0, value.get())).collect())
}

/// One of the members, by its name.
pub fn find_member<'a>(members: &[(Cow<'_, str>, &'a str)], name: &str) -> Option<&'a str> {
    let at = members.binary_search_by(|(other, _)| (**other).cmp(name)).ok()?;
    Some(members[at].1)
}

pub fn parse_value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_default()
}

/// The text after a merge patch (RFC 7386). What the patch does not mention is copied as it is.
pub fn apply_merge_patch(text: &str, patch: &Value) -> String {
    let mut out = String::with_capacity(text.len() + 64);
    merge(Some(text), patch, &mut out);
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

/// Reads a text as the server and most clients write it: without white space, and without escapes in names. At anything
/// else it gives up, and `None` says no more than that. It does not see every fault of a text that is no JSON.
#[derive(Clone)]
pub struct JsonScanner<'a>(pub &'a [u8]);

impl<'a> JsonScanner<'a> {
    pub fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    pub fn consume(&mut self, byte: u8) -> Option<()> {
        self.0 = self.0.strip_prefix(&[byte])?;
        Some(())
    }

    /// Steps to the next member of an object that was entered, or out of the object if there is none.
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

    /// Steps to the next element of a list that was entered, or out of the list if there is none.
    pub fn next_element(&mut self) -> Option<bool> {
        if self.peek()? == b']' {
            return self.consume(b']').map(|()| false);
        }
        let _separator = self.consume(b',');
        Some(true)
    }

    /// Steps over a value, whatever it is.
    pub fn read_value(&mut self) -> Option<&'a [u8]> {
        let text = self.0;
        let length = match self.peek()? {
            b'"' => string_length(text)?,
            b'{' | b'[' => {
                let (mut depth, mut at) = (0usize, 0);
                loop {
                    match text.get(at)? {
                        b'"' => {
                            at += string_length(&text[at..])?;
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
                text.iter().position(|b| !is_part(b)).unwrap_or(text.len())
            }
        };
        let (value, rest) = text.split_at(length);
        self.0 = rest;
        Some(value).filter(|v| !v.is_empty())
    }
}

/// How long the string is that the text begins with, quotes included.
fn string_length(text: &[u8]) -> Option<usize> {
    let mut at = 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', text.get(at..)?)?;
        match text[at] {
            b'"' => return Some(at + 1),
            _ => at += 2,
        }
    }
}

/// Is a number of this text told from all others by its text? Long ones and those with a fraction may not be.
pub fn is_plain_integer(text: &[u8]) -> bool {
    text.len() <= 15 && text.strip_prefix(b"-").unwrap_or(text).iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_is_merged_as_a_value_is() {
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
    fn members_are_found_however_the_text_is_written() {
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
    fn a_plain_text_is_stepped_through() {
        let mut text = JsonScanner(br#"{"a":"x\"]}","b":[1,[{"c":"]"}],null],"d":-1.5e3}rest"#);
        text.consume(b'{').unwrap();
        let mut seen = Vec::new();
        while let Some(name) = text.next_member().unwrap() {
            let both = [name, text.read_value().unwrap()].map(|t| std::str::from_utf8(t).unwrap());
            seen.push(both);
        }
        assert_eq!(seen, [["a", r#""x\"]}""#], ["b", r#"[1,[{"c":"]"}],null]"#], ["d", "-1.5e3"]]);
        assert_eq!(text.0, b"rest");
        for unfinished in ["", " ", "{", "[1", "\"a", "\"a\\", ",", "}"] {
            assert_eq!(JsonScanner(unfinished.as_bytes()).read_value(), None, "{unfinished:?}");
        }
    }
}
