//! Which of the names a definition asks for it gets: within a group a name belongs to whoever had it first. Pure.

use std::collections::BTreeSet;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionNames as Names,
};

/// What became of the names.
#[derive(Debug, PartialEq)]
pub struct Verdict {
    pub accepted: Names,
    /// The reason and the message, if some name was taken.
    pub conflict: Option<(&'static str, String)>,
}

pub fn judge(definition: &CustomResourceDefinition, all: &[CustomResourceDefinition]) -> Verdict {
    let others: Vec<&Names> = all
        .iter()
        .filter(|o| o.metadata.uid != definition.metadata.uid && o.spec.group == definition.spec.group)
        .filter_map(|o| o.status.as_ref()?.accepted_names.as_ref())
        .collect();
    let resources: BTreeSet<&str> = others
        .iter()
        .flat_map(|n| {
            let singular = n.singular.iter().map(String::as_str);
            std::iter::once(n.plural.as_str()).chain(singular).chain(n.short_names.iter().flatten().map(String::as_str))
        })
        .filter(|name| !name.is_empty())
        .collect();
    let kinds: BTreeSet<&str> = others
        .iter()
        .flat_map(|n| std::iter::once(n.kind.as_str()).chain(n.list_kind.iter().map(String::as_str)))
        .filter(|name| !name.is_empty())
        .collect();
    let asked = &definition.spec.names;
    let before = definition.status.as_ref().and_then(|s| s.accepted_names.clone()).unwrap_or_default();
    let mut verdict = Verdict { accepted: asked.clone(), conflict: None };
    let mut refuse = |reason, name: &str| {
        verdict.conflict.get_or_insert_with(|| (reason, format!("{name:?} is already in use")));
    };
    if resources.contains(asked.plural.as_str()) {
        refuse("PluralConflict", &asked.plural);
        verdict.accepted.plural = before.plural;
    }
    if let Some(singular) = asked.singular.as_deref().filter(|s| resources.contains(s)) {
        refuse("SingularConflict", singular);
        verdict.accepted.singular = before.singular;
    }
    if let Some(taken) = asked.short_names.iter().flatten().find(|n| resources.contains(n.as_str())) {
        refuse("ShortNamesConflict", taken);
        verdict.accepted.short_names = before.short_names;
    }
    if kinds.contains(asked.kind.as_str()) {
        refuse("KindConflict", &asked.kind);
        verdict.accepted.kind = before.kind;
    }
    if let Some(list) = asked.list_kind.as_deref().filter(|k| kinds.contains(k)) {
        refuse("ListKindConflict", list);
        verdict.accepted.list_kind = before.list_kind;
    }
    verdict
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn definition(uid: &str, group: &str, names: serde_json::Value, accepted: bool) -> CustomResourceDefinition {
        let status = if accepted { json!({ "acceptedNames": names }) } else { json!({}) };
        serde_json::from_value(json!({
            "metadata": { "uid": uid },
            "spec": { "group": group, "scope": "Cluster", "names": names, "versions": [] }, "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn a_name_belongs_to_whoever_had_it_first() {
        let taken = json!({ "plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList", "shortNames": ["tg"] });
        let first = definition("1", "g", taken.clone(), true);
        for (case, group, names, want) in [
            ("another group", "h", taken.clone(), None),
            ("other names", "g", json!({ "plural": "others", "kind": "Other" }), None),
            ("the plural", "g", json!({ "plural": "things", "kind": "Other" }), Some("PluralConflict")),
            (
                "a short name",
                "g",
                json!({ "plural": "others", "kind": "Other", "shortNames": ["tg"] }),
                Some("ShortNamesConflict"),
            ),
            ("the kind", "g", json!({ "plural": "others", "kind": "Thing" }), Some("KindConflict")),
        ] {
            let second = definition("2", group, names, false);
            let verdict = judge(&second, &[first.clone(), second.clone()]);
            assert_eq!(verdict.conflict.map(|(reason, _)| reason), want, "{case}");
        }
        assert_eq!(judge(&first, std::slice::from_ref(&first)).conflict, None, "nobody is in one's own way");
    }
}
