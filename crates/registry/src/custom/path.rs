//! JSONPath, as much of it as definitions use: fields, indices, wildcards and filters by equality.

use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(String),
    Index(i64),
    All,
    /// Elements whose field, at this path, equals this value.
    Where(Path, Value),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Path(Vec<Step>);

impl Path {
    /// A path such as `.spec.list[0]` or `.status.conditions[?(@.type=="Ready")].status`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut steps = Vec::new();
        let mut rest = text.trim().trim_start_matches('{').trim_end_matches('}').trim_start_matches('$');
        while !rest.is_empty() {
            let (step, after) = match rest.strip_prefix('[') {
                Some(inside) => {
                    let end = closing(inside).ok_or_else(|| format!("unterminated array in {text:?}"))?;
                    (bracket(&inside[..end], text)?, &inside[end + 1..])
                }
                None => {
                    let name = rest.strip_prefix('.').ok_or_else(|| format!("{text:?} does not begin with a dot"))?;
                    let (name, after) = field(name);
                    if name.is_empty() {
                        return Err(format!("{text:?} has an empty field name"));
                    }
                    (if name == "*" { Step::All } else { Step::Field(name) }, after)
                }
            };
            steps.push(step);
            rest = after;
        }
        Ok(Self(steps))
    }

    /// Everything the path leads to.
    pub fn find<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        let mut found = vec![value];
        for step in &self.0 {
            found = found.into_iter().flat_map(|value| take(step, value)).collect();
        }
        found
    }

    /// The names of the fields, if the path is nothing else.
    pub fn fields(&self) -> Option<Vec<String>> {
        self.0.iter().map(|step| if let Step::Field(name) = step { Some(name.clone()) } else { None }).collect()
    }
}

fn take<'a>(step: &Step, value: &'a Value) -> Vec<&'a Value> {
    match (step, value) {
        (Step::Field(name), Value::Object(fields)) => fields.get(name).into_iter().collect(),
        (Step::Index(at), Value::Array(items)) => {
            let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
            let at = if *at < 0 { at + length } else { *at };
            usize::try_from(at).ok().and_then(|at| items.get(at)).into_iter().collect()
        }
        (Step::All, Value::Array(items)) => items.iter().collect(),
        (Step::All, Value::Object(fields)) => fields.values().collect(),
        (Step::Where(path, wanted), Value::Array(items)) => {
            items.iter().filter(|item| path.find(item).contains(&wanted)).collect()
        }
        _ => Vec::new(),
    }
}

/// Where the bracket that was opened closes.
fn closing(inside: &str) -> Option<usize> {
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

fn bracket(inside: &str, text: &str) -> Result<Step, String> {
    let inside = inside.trim();
    let unquoted = |quote: char| inside.strip_prefix(quote).and_then(|s| s.strip_suffix(quote));
    if inside == "*" {
        return Ok(Step::All);
    }
    if let Some(name) = unquoted('\'').or_else(|| unquoted('"')) {
        return Ok(Step::Field(name.into()));
    }
    if let Some(filter) = inside.strip_prefix("?(").and_then(|s| s.strip_suffix(')')) {
        let (path, value) = filter.split_once("==").ok_or_else(|| format!("{text:?} has a filter without =="))?;
        let path = path.trim().strip_prefix('@').ok_or_else(|| format!("{text:?} has a filter without @"))?;
        let value = value.trim();
        let value = match value.strip_prefix('\'').and_then(|v| v.strip_suffix('\'')) {
            Some(plain) => plain.into(),
            None => serde_json::from_str(value).map_err(|_| format!("{text:?} compares with {value}"))?,
        };
        return Ok(Step::Where(Path::parse(path)?, value));
    }
    inside.parse().map(Step::Index).map_err(|_| format!("invalid array index {inside} in {text:?}"))
}

/// A field's name, in which `\.` is a dot, and what follows it.
fn field(text: &str) -> (String, &str) {
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
    fn paths_find_what_they_name() {
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
            let found = Path::parse(path).unwrap();
            assert_eq!(json!(found.find(&object)), want, "{path}");
        }
        for path in ["spec", ".a..b", ".a[", ".a[x]"] {
            assert!(Path::parse(path).is_err(), "{path}");
        }
    }
}
