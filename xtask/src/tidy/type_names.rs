//! A type's name must say what it is without its path: the same name in more than two modules of one crate is refused.
//!
//! Structs, enums, unions, traits and aliases count. Associated types, types inside functions and test code do not, nor does
//! the alias `Result` with a module's own error.

use std::collections::{BTreeMap, BTreeSet};

use super::source::DefinitionKind;
use super::{SourceFile, Violation};

const MAX_MODULES_PER_NAME: usize = 2;

/// Checks one crate, given all its files.
pub(super) fn check(files: &[&SourceFile<'_>]) -> Vec<Violation> {
    let mut modules_by_name: BTreeMap<&str, BTreeSet<Vec<String>>> = BTreeMap::new();
    let mut definitions = Vec::new();
    for file in files {
        let Some(location) = &file.location else { continue };
        for definition in file.production_definitions() {
            if definition.kind == DefinitionKind::Type && !definition.is_local && definition.name != "Result" {
                let module = [&location.module[..], &definition.inline_modules].concat();
                modules_by_name.entry(&definition.name).or_default().insert(module);
                definitions.push((&file.path, definition));
            }
        }
    }
    let mut violations = Vec::new();
    for (path, definition) in definitions {
        let modules = &modules_by_name[definition.name.as_str()];
        if modules.len() > MAX_MODULES_PER_NAME {
            let names: Vec<_> = modules.iter().map(|module| module.join("::")).collect();
            let message = format!(
                "type `{}` is defined in {} modules of this crate ({}): give each a name that stands without its path",
                definition.name,
                modules.len(),
                names.join(", ")
            );
            violations.push(Violation::new(path, definition.line, message));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use crate::tidy::tests::check_sources;

    fn found(third: &str) -> Vec<String> {
        let third = format!("//! Third.\n{third}\n");
        check_sources(&[
            ("crates/node/src/lib.rs", "//! Node.\nmod a; mod b; mod c;\n"),
            ("crates/node/src/a.rs", "//! First.\npub struct Snapshot;\n"),
            ("crates/node/src/b.rs", "//! Second.\npub enum Snapshot {}\n"),
            ("crates/node/src/c.rs", &third),
            ("crates/host/src/lib.rs", "//! Another crate.\npub struct Snapshot;\n"),
        ])
    }

    #[test]
    fn a_third_type_of_one_name_is_refused() {
        for third in ["struct Snapshot;", "trait Snapshot {}", "type Snapshot = u8;", "mod inner { struct Snapshot; }"]
        {
            let violations = found(third);
            assert_eq!(violations.len(), 3, "{third}: {violations:?}");
            assert!(
                violations[0].starts_with("crates/node/src/a.rs:2: type `Snapshot` is defined in 3 modules"),
                "{third}"
            );
        }
    }

    #[test]
    fn what_is_no_third_type_is_allowed() {
        for third in [
            "struct VolumeSnapshot;",
            "impl Iterator for S { type Snapshot = u8; }",
            "trait Observer { type Snapshot; }",
            "fn f() { struct Snapshot; }",
            "#[cfg(test)] mod tests { struct Snapshot; }",
            "enum Event { Snapshot }",
        ] {
            assert_eq!(found(third), [] as [&str; 0], "{third}");
        }
    }
}
