//! Which of its requested names a definition may have. Within an API group, a name belongs to the definition that got it
//! first. Pure.

use std::collections::BTreeSet;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionNames,
};

/// The result of [`accept_names`].
#[derive(Debug, PartialEq)]
pub struct NameAcceptance {
    pub accepted: CustomResourceDefinitionNames,
    /// The reason and the message of the condition `NamesAccepted=False`, if a name belongs to another definition.
    pub conflict: Option<(&'static str, String)>,
}

/// A requested name that belongs to another definition of the group is refused; the definition then keeps the name it had
/// before, if any. `all` may contain the definition itself.
pub fn accept_names(definition: &CustomResourceDefinition, all: &[CustomResourceDefinition]) -> NameAcceptance {
    let others: Vec<&CustomResourceDefinitionNames> = all
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
    let requested = &definition.spec.names;
    let current = definition.status.as_ref().and_then(|s| s.accepted_names.clone()).unwrap_or_default();
    let mut result = NameAcceptance { accepted: requested.clone(), conflict: None };
    let mut report = |reason, name: &str| {
        result.conflict.get_or_insert_with(|| (reason, format!("{name:?} is already in use")));
    };
    if resources.contains(requested.plural.as_str()) {
        report("PluralConflict", &requested.plural);
        result.accepted.plural = current.plural;
    }
    if let Some(singular) = requested.singular.as_deref().filter(|s| resources.contains(s)) {
        report("SingularConflict", singular);
        result.accepted.singular = current.singular;
    }
    if let Some(short_name) = requested.short_names.iter().flatten().find(|n| resources.contains(n.as_str())) {
        report("ShortNamesConflict", short_name);
        result.accepted.short_names = current.short_names;
    }
    if kinds.contains(requested.kind.as_str()) {
        report("KindConflict", &requested.kind);
        result.accepted.kind = current.kind;
    }
    if let Some(list) = requested.list_kind.as_deref().filter(|k| kinds.contains(k)) {
        report("ListKindConflict", list);
        result.accepted.list_kind = current.list_kind;
    }
    result
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
    fn a_name_belongs_to_the_definition_that_got_it_first() {
        let names_of_first = json!({ "plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList", "shortNames": ["tg"] });
        let first = definition("1", "g", names_of_first.clone(), true);
        for (case, group, names, want) in [
            ("another group", "h", names_of_first.clone(), None),
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
            let result = accept_names(&second, &[first.clone(), second.clone()]);
            assert_eq!(result.conflict.map(|(reason, _)| reason), want, "{case}");
        }
        assert_eq!(
            accept_names(&first, std::slice::from_ref(&first)).conflict,
            None,
            "a definition does not conflict with itself"
        );
    }
}
