//! JSONPath, the subset that definitions use: fields, indices, wildcards and filters by equality.

use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
enum JsonPathStep {
    Field(String),
    Index(i64),
    Wildcard,
    /// The elements for which this path selects this value.
    Filter(JsonPath, Value),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct JsonPath(Vec<JsonPathStep>);

impl JsonPath {
    /// Parses a path such as `.spec.list[0]` or `.status.conditions[?(@.type=="Ready")].status`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut steps = Vec::new();
        let mut rest = text.trim().trim_start_matches('{').trim_end_matches('}').trim_start_matches('$');
        while !rest.is_empty() {
            let (step, after) = match rest.strip_prefix('[') {
                Some(inside) => {
                    let end = closing_bracket(inside).ok_or_else(|| format!("unterminated array in {text:?}"))?;
                    (parse_bracket(&inside[..end], text)?, &inside[end + 1..])
                }
                None => {
                    let name = rest.strip_prefix('.').ok_or_else(|| format!("{text:?} does not begin with a dot"))?;
                    let (name, after) = split_field(name);
                    if name.is_empty() {
                        return Err(format!("{text:?} has an empty field name"));
                    }
                    (if name == "*" { JsonPathStep::Wildcard } else { JsonPathStep::Field(name) }, after)
                }
            };
            steps.push(step);
            rest = after;
        }
        Ok(Self(steps))
    }

    /// The values that the path selects; empty if there are none.
    pub(crate) fn select<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        let mut selected = vec![value];
        for step in &self.0 {
            selected = selected.into_iter().flat_map(|value| apply_step(step, value)).collect();
        }
        selected
    }

    /// The field names, if the path has no other steps.
    pub(crate) fn fields(&self) -> Option<Vec<String>> {
        self.0.iter().map(|step| if let JsonPathStep::Field(name) = step { Some(name.clone()) } else { None }).collect()
    }
}

fn apply_step<'a>(step: &JsonPathStep, value: &'a Value) -> Vec<&'a Value> {
    match (step, value) {
        (JsonPathStep::Field(name), Value::Object(fields)) => fields.get(name).into_iter().collect(),
        (JsonPathStep::Index(at), Value::Array(items)) => {
            let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
            let at = if *at < 0 { at + length } else { *at };
            usize::try_from(at).ok().and_then(|at| items.get(at)).into_iter().collect()
        }
        (JsonPathStep::Wildcard, Value::Array(items)) => items.iter().collect(),
        (JsonPathStep::Wildcard, Value::Object(fields)) => fields.values().collect(),
        (JsonPathStep::Filter(path, expected), Value::Array(items)) => {
            items.iter().filter(|item| path.select(item).contains(&expected)).collect()
        }
        _ => Vec::new(),
    }
}

/// The offset of the `]` that closes the bracket before `inside`.
fn closing_bracket(inside: &str) -> Option<usize> {
    let (mut depth, mut quote) = (0, None);
    for (at, c) in inside.char_indices() {
        match (quote, c) {
            (Some(open), c) if open == c => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '[' | '(') => depth += 1,
            (None, ']') if depth == 0 => return Some(at),
            (None, ']' | ')') => depth -= 1,
            _ => {}
        }
    }
    None
}

fn parse_bracket(inside: &str, text: &str) -> Result<JsonPathStep, String> {
    let inside = inside.trim();
    let unquoted = |quote: char| inside.strip_prefix(quote).and_then(|s| s.strip_suffix(quote));
    if inside == "*" {
        return Ok(JsonPathStep::Wildcard);
    }
    if let Some(name) = unquoted('\'').or_else(|| unquoted('"')) {
        return Ok(JsonPathStep::Field(name.into()));
    }
    if let Some(filter) = inside.strip_prefix("?(").and_then(|s| s.strip_suffix(')')) {
        let (path, value) = filter.split_once("==").ok_or_else(|| format!("{text:?} has a filter without =="))?;
        let path = path.trim().strip_prefix('@').ok_or_else(|| format!("{text:?} has a filter without @"))?;
        let value = value.trim();
        let value = match value.strip_prefix('\'').and_then(|v| v.strip_suffix('\'')) {
            Some(plain) => plain.into(),
            None => serde_json::from_str(value).map_err(|_| format!("{text:?} compares with {value}"))?,
        };
        return Ok(JsonPathStep::Filter(JsonPath::parse(path)?, value));
    }
    inside.parse().map(JsonPathStep::Index).map_err(|_| format!("invalid array index {inside} in {text:?}"))
}

/// Splits a field name from the rest of the path. In the name, `\.` stands for a dot.
fn split_field(text: &str) -> (String, &str) {
    let mut name = String::new();
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            '\\' if !escaped => escaped = true,
            '.' | '[' if !escaped => return (name, &text[at..]),
            _ => {
                name.push(c);
                escaped = false;
            }
        }
    }
    (name, "")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn paths_select_values() {
        let object = json!({
            "metadata": { "annotations": { "a.b/c": "x" } }, "spec": { "list": ["p", "q"], "n": 3 },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }, { "type": "Odd", "status": "False" }] },
        });
        for (path, want) in [
            (".spec.n", json!([3])),
            (".spec.list[0]", json!(["p"])),
            (".spec.list[-1]", json!(["q"])),
            (".spec.list[*]", json!(["p", "q"])),
            (r".metadata.annotations.a\.b/c", json!(["x"])),
            (".metadata.annotations['a.b/c']", json!(["x"])),
            (r#".status.conditions[?(@.type=="Ready")].status"#, json!(["True"])),
            (".status.conditions[?(@.type=='Odd')].status", json!(["False"])),
            (".spec.nothing.here", json!([])),
        ] {
            let parsed = JsonPath::parse(path).unwrap();
            assert_eq!(json!(parsed.select(&object)), want, "{path}");
        }
        for path in ["spec", ".a..b", ".a[", ".a[x]"] {
            assert!(JsonPath::parse(path).is_err(), "{path}");
        }
    }
}
