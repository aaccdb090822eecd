//! The shape of a change: the part of two encoded versions of an object that field ownership depends on.
//!
//! Members that are equal in both versions are not part of the shape. Of the others the shape contains names and types;
//! it contains values only inside lists, where they can be part of a path. Two changes of one shape have the same effect on
//! every owner.

use std::cmp::Ordering;

use crate::json_scanner::{JsonScanner, is_plain_integer};

/// Changes of objects that are nested deeper have no shape.
const MAX_DEPTH: usize = 32;

/// Appends the shape of the change to `out`. `None` if an object is not in the canonical form, with sorted members; `out`
/// may then contain a part of the shape.
pub(super) fn append_change_shape(old: &[u8], new: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let (mut old, mut new) = (JsonScanner(old), JsonScanner(new));
    append_object_change(&mut old, &mut new, MemberOrder::Root, 0, out)?;
    (old.0.is_empty() && new.0.is_empty()).then_some(())
}

/// The order of members: by name, but `apiVersion`, `kind` and `metadata` come first in the root object.
#[derive(Clone, Copy)]
enum MemberOrder {
    Root,
    Names,
}

impl MemberOrder {
    fn compare(self, a: &[u8], b: &[u8]) -> Ordering {
        let rank = |name: &[u8]| match (self, name) {
            (Self::Names, _) => 0,
            (Self::Root, b"apiVersion") => 0,
            (Self::Root, b"kind") => 1,
            (Self::Root, b"metadata") => 2,
            (Self::Root, _) => 3,
        };
        rank(a).cmp(&rank(b)).then_with(|| a.cmp(b))
    }
}

/// Reads an object member by member.
struct MemberReader<'t, 'a> {
    scanner: &'t mut JsonScanner<'a>,
    order: MemberOrder,
    /// The name of the current member. `None` at the end of the object.
    next: Option<&'a [u8]>,
}

impl<'t, 'a> MemberReader<'t, 'a> {
    fn of(scanner: &'t mut JsonScanner<'a>, order: MemberOrder) -> Option<Self> {
        scanner.consume(b'{')?;
        let next = scanner.next_member()?;
        Some(Self { scanner, order, next })
    }

    /// Moves to the next member. The caller has read the value of the current one. `None` if members are not sorted.
    fn advance(&mut self) -> Option<()> {
        let last = self.next;
        self.next = self.scanner.next_member()?;
        match (last, self.next) {
            (Some(last), Some(next)) if self.order.compare(last, next) != Ordering::Less => None,
            _ => Some(()),
        }
    }
}

// The markers before names: `O` for a member of the old object only, `N` of the new object only, `B` of both with different
// values, `D` for an object in both that differs inside. They make the encoding unambiguous.

/// Appends the shape of the difference of two objects. Returns false if they are equal.
fn append_object_change(
    old: &mut JsonScanner<'_>,
    new: &mut JsonScanner<'_>,
    order: MemberOrder,
    depth: usize,
    out: &mut Vec<u8>,
) -> Option<bool> {
    let before = out.len();
    if depth == MAX_DEPTH {
        return None;
    }
    let (mut old, mut new) = (MemberReader::of(old, order)?, MemberReader::of(new, order)?);
    loop {
        let first = match (old.next, new.next) {
            (None, None) => return Some(out.len() > before),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(a), Some(b)) => order.compare(a, b),
        };
        match first {
            Ordering::Less => {
                append_name(b'O', old.next, out);
                append_value(old.scanner, Comparison::Alone, depth + 1, out)?;
                old.advance()?;
            }
            Ordering::Greater => {
                append_name(b'N', new.next, out);
                append_value(new.scanner, Comparison::Alone, depth + 1, out)?;
                new.advance()?;
            }
            Ordering::Equal => {
                let length = out.len();
                if (old.scanner.peek(), new.scanner.peek()) == (Some(b'{'), Some(b'{')) {
                    append_name(b'D', old.next, out);
                    match append_object_change(old.scanner, new.scanner, MemberOrder::Names, depth + 1, out)? {
                        true => out.push(b'}'),
                        false => out.truncate(length),
                    }
                } else {
                    let (old_value, new_value) = (old.scanner.read_value()?, new.scanner.read_value()?);
                    if old_value != new_value {
                        append_name(b'B', old.next, out);
                        append_value(&mut JsonScanner(old_value), Comparison::Compared, depth + 1, out)?;
                        append_value(&mut JsonScanner(new_value), Comparison::Compared, depth + 1, out)?;
                    }
                }
                old.advance()?;
                new.advance()?;
            }
        }
    }
}

fn append_name(marker: u8, name: Option<&[u8]>, out: &mut Vec<u8>) {
    out.extend_from_slice(&[marker, b'"']);
    out.extend_from_slice(name.unwrap_or_default());
    out.push(b'"');
}

/// Whether a value is compared with a value of the other version. Two different encodings can mean the same value if they
/// are strings with escapes or numbers other than plain integers; the shape then contains the encoding itself.
#[derive(Clone, Copy, PartialEq)]
enum Comparison {
    Alone,
    Compared,
}

/// Appends the shape of a value.
fn append_value(scanner: &mut JsonScanner<'_>, comparison: Comparison, depth: usize, out: &mut Vec<u8>) -> Option<()> {
    if depth == MAX_DEPTH {
        return None;
    }
    match scanner.peek()? {
        b'{' => {
            let mut members = MemberReader::of(scanner, MemberOrder::Names)?;
            out.push(b'{');
            while members.next.is_some() {
                append_name(b'N', members.next, out);
                append_value(members.scanner, comparison, depth + 1, out)?;
                members.advance()?;
            }
            out.push(b'}');
        }
        b'[' => out.extend_from_slice(scanner.read_value()?),
        b'"' => match scanner.read_value()? {
            escaped if comparison == Comparison::Compared && escaped.contains(&b'\\') => out.extend_from_slice(escaped),
            _ => out.push(b's'),
        },
        b'n' | b't' | b'f' => match scanner.read_value()? {
            b"null" => out.push(b'n'),
            b"true" | b"false" => out.push(b'b'),
            _ => return None,
        },
        _ => match scanner.read_value()? {
            number if comparison == Comparison::Alone || is_plain_integer(number) => out.push(b'0'),
            other => out.extend_from_slice(other),
        },
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn shape(old: &Value, new: &Value) -> Option<String> {
        let mut out = Vec::new();
        append_change_shape(old.to_string().as_bytes(), new.to_string().as_bytes(), &mut out)?;
        Some(String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_shape_has_names_and_types_and_values_in_lists_only() {
        let old = json!({ "metadata": { "name": "a", "labels": { "x": "1" } }, "spec": { "n": 1, "gone": true } });
        let new = json!({ "metadata": { "name": "b", "labels": { "x": "1", "y": "2" } }, "spec": { "n": null },
            "status": { "list": [{ "k": "v" }], "empty": {} } });
        let want = concat!(
            r#"D"metadata"D"labels"N"y"s}B"name"ss}"#,
            r#"D"spec"O"gone"bB"n"0n}"#,
            r#"N"status"{N"empty"{}N"list"[{"k":"v"}]}"#
        );
        assert_eq!(shape(&old, &new).as_deref(), Some(want));
        assert_eq!(shape(&new, &new).as_deref(), Some(""));
        let empty = json!({});
        let object = |name: &str, number: i64| json!({ "metadata": { "name": name, "generation": number } });
        assert_eq!(shape(&empty, &object("a", 1)), shape(&empty, &object("bcd", -23)));
        assert_eq!(shape(&empty, &object("a", 1)), shape(&empty, &object("\"b\"", 1)));
        assert_ne!(
            shape(&object("x", 1), &object("a", 1)),
            shape(&object("x", 1), &object("\"b\"", 1)),
            "may be the same"
        );
        for (case, other) in [
            ("a name", json!({ "metadata": { "nane": "a", "generation": 1 } })),
            ("a type", json!({ "metadata": { "name": 1, "generation": 1 } })),
            ("null", json!({ "metadata": { "name": null, "generation": 1 } })),
            ("one more", json!({ "metadata": { "name": "a", "generation": 1, "z": {} } })),
            ("one less", json!({ "metadata": { "name": "a" } })),
        ] {
            assert_ne!(shape(&empty, &object("a", 1)), shape(&empty, &other), "{case}");
        }
    }

    #[test]
    fn json_in_another_form_has_no_shape() {
        for text in [
            r#"{"b":1,"a":1}"#,
            r#"{"a":1,"a":1}"#,
            r#"{"metadata":{},"kind":"x"}"#,
            r#"{ "a":1}"#,
            r#"{"a": 1}"#,
            r#"{"a":1 }"#,
            r#"{"\u0061":1}"#,
            r#"{"a":nothing}"#,
            r#"{"a":1}x"#,
            r#"{"a":1"#,
            "[]",
            "",
        ] {
            assert_eq!(append_change_shape(b"{}", text.as_bytes(), &mut Vec::new()), None, "{text}");
            assert_eq!(append_change_shape(text.as_bytes(), b"{}", &mut Vec::new()), None, "{text}");
        }
        let deep = format!("{}{}", r#"{"a":"#.repeat(100), "}".repeat(100));
        assert_eq!(append_change_shape(b"{}", deep.as_bytes(), &mut Vec::new()), None);
        assert_eq!(append_change_shape(deep.as_bytes(), deep.as_bytes(), &mut Vec::new()), None);
        let ordered = br#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{},"data":{}}"#;
        assert_eq!(append_change_shape(ordered, ordered, &mut Vec::new()), Some(()));
    }
}
