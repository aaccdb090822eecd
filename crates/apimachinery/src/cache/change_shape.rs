//! The shape of a change: everything about two texts of an object that ownership can depend on, without what it cannot.
//!
//! What is the same in both does not count. Where they differ, names count and types; values count only inside lists,
//! where they may be part of a path. Two changes of one shape give everybody the same fields.

use std::cmp::Ordering;

use crate::json_scanner::{JsonScanner, is_plain_integer};

/// Deeper objects have no shape.
const MAX_DEPTH: usize = 32;

/// Appends the shape of the change. Nothing where a text is not as the server writes it, with members in order.
pub(super) fn of_change(old: &[u8], new: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let (mut old, mut new) = (JsonScanner(old), JsonScanner(new));
    objects(&mut old, &mut new, Order::Root, 0, out)?;
    (old.0.is_empty() && new.0.is_empty()).then_some(())
}

/// The order of members: a whole object begins with what it is.
#[derive(Clone, Copy)]
enum Order {
    Root,
    Names,
}

impl Order {
    fn of(self, a: &[u8], b: &[u8]) -> Ordering {
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

/// One object, member by member.
struct Members<'t, 'a> {
    text: &'t mut JsonScanner<'a>,
    order: Order,
    next: Option<&'a [u8]>,
}

impl<'t, 'a> Members<'t, 'a> {
    fn of(text: &'t mut JsonScanner<'a>, order: Order) -> Option<Self> {
        text.consume(b'{')?;
        let next = text.next_member()?;
        Some(Self { text, order, next })
    }

    /// Once the value of the member was read.
    fn step(&mut self) -> Option<()> {
        let last = self.next;
        self.next = self.text.next_member()?;
        match (last, self.next) {
            (Some(last), Some(next)) if self.order.of(last, next) != Ordering::Less => None,
            _ => Some(()),
        }
    }
}

// The letters before names: of the old object only, of the new one only, of both, an object in both. Written this
// way, one shape can be read in one way only.

/// Appends how two objects differ and says whether they do.
fn objects(
    old: &mut JsonScanner<'_>,
    new: &mut JsonScanner<'_>,
    order: Order,
    depth: usize,
    out: &mut Vec<u8>,
) -> Option<bool> {
    let before = out.len();
    if depth == MAX_DEPTH {
        return None;
    }
    let (mut old, mut new) = (Members::of(old, order)?, Members::of(new, order)?);
    loop {
        let first = match (old.next, new.next) {
            (None, None) => return Some(out.len() > before),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(a), Some(b)) => order.of(a, b),
        };
        match first {
            Ordering::Less => {
                put(b'O', old.next, out);
                value(old.text, Seen::Alone, depth + 1, out)?;
                old.step()?;
            }
            Ordering::Greater => {
                put(b'N', new.next, out);
                value(new.text, Seen::Alone, depth + 1, out)?;
                new.step()?;
            }
            Ordering::Equal => {
                let mark = out.len();
                if (old.text.peek(), new.text.peek()) == (Some(b'{'), Some(b'{')) {
                    put(b'D', old.next, out);
                    match objects(old.text, new.text, Order::Names, depth + 1, out)? {
                        true => out.push(b'}'),
                        false => out.truncate(mark),
                    }
                } else {
                    let (was, is) = (old.text.read_value()?, new.text.read_value()?);
                    if was != is {
                        put(b'B', old.next, out);
                        value(&mut JsonScanner(was), Seen::Compared, depth + 1, out)?;
                        value(&mut JsonScanner(is), Seen::Compared, depth + 1, out)?;
                    }
                }
                old.step()?;
                new.step()?;
            }
        }
    }
}

fn put(letter: u8, name: Option<&[u8]>, out: &mut Vec<u8>) {
    out.extend_from_slice(&[letter, b'"']);
    out.extend_from_slice(name.unwrap_or_default());
    out.push(b'"');
}

/// Is there another value at the same place, with another text? That of strings with escapes and of unusual numbers may
/// still say the same.
#[derive(Clone, Copy, PartialEq)]
enum Seen {
    Alone,
    Compared,
}

/// Appends the shape of a value.
fn value(text: &mut JsonScanner<'_>, seen: Seen, depth: usize, out: &mut Vec<u8>) -> Option<()> {
    if depth == MAX_DEPTH {
        return None;
    }
    match text.peek()? {
        b'{' => {
            let mut members = Members::of(text, Order::Names)?;
            out.push(b'{');
            while members.next.is_some() {
                put(b'N', members.next, out);
                value(members.text, seen, depth + 1, out)?;
                members.step()?;
            }
            out.push(b'}');
        }
        b'[' => out.extend_from_slice(text.read_value()?),
        b'"' => match text.read_value()? {
            escaped if seen == Seen::Compared && escaped.contains(&b'\\') => out.extend_from_slice(escaped),
            _ => out.push(b's'),
        },
        b'n' | b't' | b'f' => match text.read_value()? {
            b"null" => out.push(b'n'),
            b"true" | b"false" => out.push(b'b'),
            _ => return None,
        },
        _ => match text.read_value()? {
            number if seen == Seen::Alone || is_plain_integer(number) => out.push(b'0'),
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
        of_change(old.to_string().as_bytes(), new.to_string().as_bytes(), &mut out)?;
        Some(String::from_utf8(out).unwrap())
    }

    #[test]
    fn names_and_types_count_and_values_only_in_lists() {
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
        let nothing = json!({});
        let made = |name: &str, number: i64| json!({ "metadata": { "name": name, "generation": number } });
        assert_eq!(shape(&nothing, &made("a", 1)), shape(&nothing, &made("bcd", -23)));
        assert_eq!(shape(&nothing, &made("a", 1)), shape(&nothing, &made("\"b\"", 1)));
        assert_ne!(shape(&made("x", 1), &made("a", 1)), shape(&made("x", 1), &made("\"b\"", 1)), "may be the same");
        for (case, other) in [
            ("a name", json!({ "metadata": { "nane": "a", "generation": 1 } })),
            ("a type", json!({ "metadata": { "name": 1, "generation": 1 } })),
            ("null", json!({ "metadata": { "name": null, "generation": 1 } })),
            ("one more", json!({ "metadata": { "name": "a", "generation": 1, "z": {} } })),
            ("one less", json!({ "metadata": { "name": "a" } })),
        ] {
            assert_ne!(shape(&nothing, &made("a", 1)), shape(&nothing, &other), "{case}");
        }
    }

    #[test]
    fn a_text_the_server_would_not_write_has_no_shape() {
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
            assert_eq!(of_change(b"{}", text.as_bytes(), &mut Vec::new()), None, "{text}");
            assert_eq!(of_change(text.as_bytes(), b"{}", &mut Vec::new()), None, "{text}");
        }
        let deep = format!("{}{}", r#"{"a":"#.repeat(100), "}".repeat(100));
        assert_eq!(of_change(b"{}", deep.as_bytes(), &mut Vec::new()), None);
        assert_eq!(of_change(deep.as_bytes(), deep.as_bytes(), &mut Vec::new()), None);
        let ordered = br#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{},"data":{}}"#;
        assert_eq!(of_change(ordered, ordered, &mut Vec::new()), Some(()));
    }
}
