//! Label and field selectors: parses them, and checks whether a stored object matches.

use std::collections::BTreeMap;

use cleat_api::selector::ValueRequirement;
use cleat_store::Entry;
use serde::Deserialize;

use crate::error::ApiError;
use crate::kind::{DecodeSource, Kind};
use crate::names;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selector {
    labels: Vec<(String, Requirement)>,
    fields: Vec<(String, Requirement)>,
}

/// What a parsed selector demands of one value.
type Requirement = ValueRequirement<'static>;

impl Selector {
    pub fn parse(kind: &dyn Kind, labels: &str, fields: &str) -> Result<Self, ApiError> {
        Ok(Self { labels: parse_labels(labels)?, fields: parse_fields(kind, fields)? })
    }

    /// Returns true if the selector matches every object.
    pub fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// The name that an object must have to match, if the selector contains one.
    pub fn name(&self) -> Option<&str> {
        self.fields.iter().find_map(|(field, requirement)| match requirement {
            Requirement::In(values) if field == "metadata.name" && values.len() == 1 => {
                values.first().map(String::as_str)
            }
            _ => None,
        })
    }

    pub fn matches(&self, kind: &dyn Kind, entry: &Entry) -> bool {
        self.matches_labels(entry) && self.matches_fields(kind, entry)
    }

    fn matches_labels(&self, entry: &Entry) -> bool {
        #[derive(Deserialize)]
        struct Outer {
            metadata: Inner,
        }
        #[derive(Deserialize)]
        struct Inner {
            #[serde(default)]
            labels: BTreeMap<String, String>,
        }
        if self.labels.is_empty() {
            return true;
        }
        let Ok(Outer { metadata: Inner { labels } }) = serde_json::from_slice(&entry.value) else { return false };
        self.labels.iter().all(|(key, requirement)| requirement.matches(labels.get(key).map(String::as_str)))
    }

    fn matches_fields(&self, kind: &dyn Kind, entry: &Entry) -> bool {
        let mut path = entry.key.rsplit('/');
        let name = path.next().unwrap_or_default();
        let namespace = path.next().filter(|_| kind.descriptor().namespaced).unwrap_or_default();
        let mut decoded = None;
        self.fields.iter().all(|(field, requirement)| match field.as_str() {
            "metadata.name" => requirement.matches(Some(name)),
            "metadata.namespace" => requirement.matches(Some(namespace)),
            other => {
                let object = decoded.get_or_insert_with(|| kind.decode(DecodeSource::Bytes(&entry.value)));
                object.as_ref().is_ok_and(|o| requirement.matches(Some(&kind.selectable_value(&**o, other))))
            }
        })
    }
}

fn parse_fields(kind: &dyn Kind, text: &str) -> Result<Vec<(String, Requirement)>, ApiError> {
    let mut requirements = Vec::new();
    for term in split_unescaped(text) {
        let (at, operator) = find_operator(&term)
            .ok_or_else(|| ApiError::BadRequest(format!("invalid selector: '{term}'; can't understand it")))?;
        let name = &term[..at];
        let value = vec![unescape(&term[at + operator.len()..])];
        let requirement =
            if operator == "!=" { Requirement::NotIn(value.into()) } else { Requirement::In(value.into()) };
        let known = name == "metadata.name"
            || (name == "metadata.namespace" && kind.descriptor().plural != "nodes")
            || kind.selectable_fields().contains(&name);
        if !known {
            return Err(ApiError::BadRequest(format!("field label not supported: {name}")));
        }
        requirements.push((name.to_owned(), requirement));
    }
    Ok(requirements)
}

/// The value that a field selector requires of a field, if any. Authorization depends on it, so that it must parse exactly
/// as `parse_fields` does.
pub fn required_value(fields: &str, field: &str) -> Option<String> {
    split_unescaped(fields).iter().find_map(|term| {
        let (at, operator) = find_operator(term)?;
        (&term[..at] == field && operator != "!=").then(|| unescape(&term[at + operator.len()..]))
    })
}

/// The position of the first operator, and the operator.
fn find_operator(term: &str) -> Option<(usize, &'static str)> {
    let at = term.find(['=', '!'])?;
    let rest = &term[at..];
    ["!=", "==", "="].into_iter().find(|o| rest.starts_with(o)).map(|o| (at, o))
}

fn split_unescaped(text: &str) -> Vec<String> {
    let mut terms = vec![String::new()];
    let mut escaped = false;
    for c in text.chars() {
        if c == ',' && !escaped {
            terms.push(String::new());
            continue;
        }
        escaped = c == '\\' && !escaped;
        if let Some(last) = terms.last_mut() {
            last.push(c);
        }
    }
    terms.retain(|t| !t.is_empty());
    terms
}

fn unescape(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        out.push(if c == '\\' { chars.next().unwrap_or(c) } else { c });
    }
    out
}

fn parse_labels(text: &str) -> Result<Vec<(String, Requirement)>, ApiError> {
    let bad = |why: String| ApiError::BadRequest(format!("unable to parse requirement: {why}"));
    let mut requirements = Vec::new();
    for term in split_outside_parentheses(text) {
        let (key, requirement) = parse_requirement(term.trim()).map_err(bad)?;
        names::validate_qualified_name(&key).map_err(|why| bad(format!("{key:?}: {why}")))?;
        if let Requirement::In(values) | Requirement::NotIn(values) = &requirement {
            for value in values.iter() {
                names::validate_label_value(value).map_err(|why| bad(format!("{value:?}: {why}")))?;
            }
        }
        requirements.push((key, requirement));
    }
    Ok(requirements)
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let mut terms = Vec::new();
    let (mut start, mut depth) = (0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                terms.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    terms.push(&text[start..]);
    if terms.len() == 1 && terms[0].trim().is_empty() {
        terms.clear();
    }
    terms
}

fn parse_requirement(term: &str) -> Result<(String, Requirement), String> {
    if let Some(key) = term.strip_prefix('!') {
        return Ok((key.trim().into(), Requirement::DoesNotExist));
    }
    if let Some(open) = term.find('(') {
        let inside = term[open + 1..].strip_suffix(')').ok_or_else(|| format!("found '{term}', expected: ')'"))?;
        let values: Vec<String> = inside.split(',').map(|v| v.trim().to_owned()).collect();
        let mut words = term[..open].split_whitespace();
        return match (words.next(), words.next(), words.next()) {
            (Some(key), Some("in"), None) => Ok((key.into(), Requirement::In(values.into()))),
            (Some(key), Some("notin"), None) => Ok((key.into(), Requirement::NotIn(values.into()))),
            _ => Err(format!("found '{term}', expected: in, notin")),
        };
    }
    for (operator, make) in [
        ("!=", (|v| Ok(Requirement::NotIn(vec![v].into()))) as fn(String) -> Result<Requirement, String>),
        ("==", |v| Ok(Requirement::In(vec![v].into()))),
        ("=", |v| Ok(Requirement::In(vec![v].into()))),
        (">", |v| v.parse().map(Requirement::GreaterThan).map_err(|_| format!("{v:?} is not an integer"))),
        ("<", |v| v.parse().map(Requirement::LessThan).map_err(|_| format!("{v:?} is not an integer"))),
    ] {
        if let Some((key, value)) = term.split_once(operator) {
            return Ok((key.trim().into(), make(value.trim().into())?));
        }
    }
    if term.is_empty() || term.contains(char::is_whitespace) {
        return Err(format!("found '{term}', expected: identifier"));
    }
    Ok((term.into(), Requirement::Exists))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_selectors_select() {
        let labels = BTreeMap::from([("app", "web"), ("tier", "3")]);
        for (text, want) in [
            ("", true),
            ("app=web", true),
            ("app==web,tier", true),
            ("app!=web", false),
            ("gone!=x", true),
            ("app in (db, web)", true),
            ("app notin (db,web)", false),
            ("gone notin (a)", true),
            ("!gone", true),
            ("!app", false),
            ("tier>2", true),
            ("tier<3", false),
        ] {
            let requirements = parse_labels(text).unwrap();
            assert_eq!(requirements.iter().all(|(k, t)| t.matches(labels.get(k.as_str()).copied())), want, "{text}");
        }
        for text in ["a b", "app in (a", "app near (a)", "=x", ",a"] {
            assert!(parse_labels(text).is_err(), "{text}");
        }
    }

    #[test]
    fn field_terms_split_on_unescaped_commas() {
        assert_eq!(split_unescaped(r"a=b\,c,d!=e"), [r"a=b\,c", "d!=e"]);
        assert_eq!(unescape(r"b\,c"), "b,c");
    }
}
