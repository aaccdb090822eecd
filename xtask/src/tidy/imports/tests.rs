//! Allowed and forbidden imports, as manifests, as code, and between stages.

use super::*;

fn manifest(importer: &str, text: &str) -> Vec<(usize, String)> {
    strip(check_manifest(&format!("crates/{importer}/Cargo.toml"), text))
}

fn code(path: &str, text: &str) -> Vec<(usize, String)> {
    strip(check_source(path, &Source::read(text)))
}

fn strip(violations: Vec<Violation>) -> Vec<(usize, String)> {
    violations.into_iter().map(|violation| (violation.line, violation.message)).collect()
}

#[test]
fn the_table_lets_dependencies_point_one_way() {
    for (importer, imported, want) in [
        ("api", "runtime", false),
        ("api", "crash", false),
        ("crash", "api", false),
        ("store", "crash", true),
        ("store", "api", false),
        ("controllers", "runtime", true),
        ("controllers", "csi", false),
        ("controllers", "store", false),
        ("drivers", "csi", true),
        ("drivers", "host", true),
        ("drivers", "api", false),
        ("sidecars", "csi", true),
        ("sidecars", "host", false),
        ("node", "host", true),
        ("node", "drivers", false),
        ("csi", "host", false),
        ("host", "crash", true),
        ("runtime", "api", true),
        ("runtime", "store", false),
        ("apiserver", "store", true),
        ("apiserver", "runtime", false),
        ("cleat", "drivers", true),
        ("node", "cleat", false),
        ("cleat", "cleat", true),
    ] {
        assert_eq!(allowed(importer, imported), want, "{importer} imports {imported}");
    }
}

#[test]
fn every_crate_named_in_the_table_has_a_row() {
    for (name, may) in CRATES {
        let (Only(list) | NotImport(list)) = may;
        for other in *list {
            assert!(rule(other).is_some(), "{name} mentions {other}");
        }
    }
}

#[test]
fn manifests_are_judged_by_their_normal_dependencies() {
    let bad = "store must not depend on cleat-api".to_owned();
    for (case, text, want) in [
        ("allowed", "[dependencies]\ncleat-crash.workspace = true\n", vec![]),
        ("workspace key", "[dependencies]\ncleat-api.workspace = true\n", vec![(2, bad.clone())]),
        ("inline table", "[dependencies]\ncleat-api = { path = \"../api\" }\n", vec![(2, bad.clone())]),
        ("renamed", "[dependencies]\nwords = { package = \"cleat-api\" }\n", vec![(2, bad.clone())]),
        ("own table", "[dependencies.cleat-api]\nworkspace = true\n", vec![(1, bad.clone())]),
        ("own table, renamed", "[dependencies.x]\npackage = \"cleat-api\"\n", vec![(2, bad.clone())]),
        ("for one target", "[target.'cfg(unix)'.dependencies]\ncleat-api = \"1\"\n", vec![(2, bad)]),
        ("only in tests", "[dev-dependencies]\ncleat-api.workspace = true\n", vec![]),
        ("commented out", "[dependencies]\n# cleat-api.workspace = true\n", vec![]),
        ("another section", "[dependencies]\n[features]\ncleat-api = []\n", vec![]),
    ] {
        assert_eq!(manifest("store", text), want, "{case}");
    }
}

#[test]
fn the_binary_is_nobodys_library() {
    assert_eq!(
        manifest("node", "[dependencies]\ncleat = { path = \"../cleat\" }\n"),
        [(2, "node must not depend on cleat".to_owned())]
    );
    assert_eq!(code("crates/node/src/lib.rs", "use cleat::run;"), [(1, "node must not import cleat".to_owned())]);
    assert_eq!(code("crates/cleat/src/main.rs", "fn main() { cleat::run() }"), []);
}

#[test]
fn a_new_crate_must_enter_the_table() {
    assert_eq!(manifest("surprise", "[dependencies]\n").len(), 1);
    assert_eq!(check_manifest("xtask/Cargo.toml", "[dependencies]\ncleat-api = \"1\"\n"), []);
}

#[test]
fn code_is_judged_where_it_ships() {
    let bad = "drivers must not import cleat_api".to_owned();
    for (case, path, text, want) in [
        ("allowed", "crates/drivers/src/block/node.rs", "use cleat_host::mount;", vec![]),
        ("import", "crates/drivers/src/lib.rs", "\nuse cleat_api::names;", vec![(2, bad.clone())]),
        ("inline path", "crates/drivers/src/lib.rs", "fn f() { cleat_api::f() }", vec![(1, bad)]),
        ("in a comment", "crates/drivers/src/lib.rs", "// cleat_api::f", vec![]),
        ("in a test module", "crates/drivers/src/lib.rs", "#[cfg(test)] mod t { use cleat_api::f; }", vec![]),
        ("in an integration test", "crates/drivers/tests/round.rs", "use cleat_api::f;", vec![]),
        ("own name", "crates/drivers/src/lib.rs", "use cleat_drivers::block;", vec![]),
    ] {
        assert_eq!(code(path, text), want, "{case}");
    }
}

#[test]
fn sibling_stages_do_not_import_each_other() {
    let tree = stages(
        [
            "crates/controllers/src/lib.rs",
            "crates/controllers/src/context.rs",
            "crates/controllers/src/bind/mod.rs",
            "crates/controllers/src/attach/mod.rs",
            "crates/sidecars/src/provision/mod.rs",
            "crates/node/src/plugin/mod.rs",
        ]
        .into_iter(),
    );
    assert_eq!(tree.len(), 3);
    for (case, path, text, want) in [
        ("own stage", "bind/act.rs", "use crate::bind::decide;", 0),
        ("shared module", "bind/act.rs", "use crate::context::Context;", 0),
        ("sibling", "bind/act.rs", "use crate::attach::name;", 1),
        ("sibling in a tree", "bind/act.rs", "use crate::{context, attach};", 1),
        ("sibling in code", "bind/act.rs", "fn f() { crate::attach::name() }", 1),
        ("upwards from a file", "bind/act.rs", "use super::super::attach;", 1),
        ("upwards from mod.rs", "bind/mod.rs", "use super::attach;", 1),
        ("a submodule that shares the name", "bind/act.rs", "use super::attach;", 0),
        ("stage of another crate", "bind/act.rs", "use crate::provision::x;", 0),
        ("wiring", "lib.rs", "pub use crate::attach::run;", 0),
        ("in a test", "bind/act.rs", "#[cfg(test)] mod t { use crate::attach::x; }", 0),
    ] {
        let path = format!("crates/controllers/src/{path}");
        assert_eq!(check_stages(&path, &Source::read(text), &tree).len(), want, "{case}");
    }
}
