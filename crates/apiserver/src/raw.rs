//! JSON texts taken apart only as far as needed.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// The name of a member, borrowed from the text where it can be.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// The members of an object, each as its text; nothing for anything but an object.
pub(crate) fn members(raw: &RawValue) -> Option<BTreeMap<Name<'_>, &RawValue>> {
    if raw.get().starts_with('{') { serde_json::from_str(raw.get()).ok() } else { None }
}

pub(crate) fn value(raw: &RawValue) -> Value {
    serde_json::from_str(raw.get()).unwrap_or_default()
}

/// The text after a merge patch (RFC 7386). What the patch does not mention is copied as it is.
pub(crate) fn merged(text: &RawValue, patch: &Value) -> String {
    let mut out = String::with_capacity(text.get().len() + 64);
    merge(Some(text), patch, &mut out);
    out
}

fn merge(old: Option<&RawValue>, patch: &Value, out: &mut String) {
    let Value::Object(wanted) = patch else {
        out.push_str(&patch.to_string());
        return;
    };
    let old = old.and_then(members).unwrap_or_default();
    let mut separator = '{';
    let mut begin = |name: &str, out: &mut String| {
        out.push(separator);
        separator = ',';
        out.push_str(&Value::from(name).to_string());
        out.push(':');
    };
    for (name, old) in &old {
        match wanted.get(&*name.0) {
            Some(Value::Null) => {}
            Some(patch) => {
                begin(&name.0, out);
                merge(Some(old), patch, out);
            }
            None => {
                begin(&name.0, out);
                out.push_str(old.get());
            }
        }
    }
    for (name, patch) in wanted {
        if !patch.is_null() && !old.contains_key(&Name(Cow::Borrowed(name))) {
            begin(name, out);
            merge(None, patch, out);
        }
    }
    if separator == '{' {
        out.push('{');
    }
    out.push('}');
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
            let got = merged(serde_json::from_str(&text).unwrap(), &patch);
            let mut want = old.clone();
            json_patch::merge(&mut want, &patch);
            assert_eq!(serde_json::from_str::<Value>(&got).unwrap_or_else(|e| panic!("{got}: {e}")), want, "{patch}");
        }
    }
}
