//! Allowed and forbidden imports, in manifests and in code.

use super::*;
use crate::tidy::manifests::Dependency;
use crate::tidy::tests::check_sources;

fn manifest(importer: &str, package: &str, is_dev: bool) -> Vec<String> {
    let dependency = Dependency { package: package.to_owned(), is_dev, line: 7 };
    let manifest = Manifest { path: format!("crates/{importer}/Cargo.toml"), dependencies: vec![dependency] };
    check_manifest(&manifest)
        .into_iter()
        .map(|violation| format!("{}: {}", violation.line, violation.message))
        .collect()
}

fn code(path: &str, text: &str) -> Vec<String> {
    check_sources(&[(path, &format!("//! File.\n{text}\n"))])
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
        ("controllers", "registry", false),
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
        ("apimachinery", "store", true),
        ("apimachinery", "registry", false),
        ("registry", "apimachinery", true),
        ("registry", "auth", false),
        ("auth", "registry", true),
        ("auth", "apiserver", false),
        ("apiserver", "store", true),
        ("apiserver", "auth", true),
        ("apiserver", "runtime", false),
        ("cleat", "drivers", true),
        ("node", "cleat", false),
        ("cleat", "cleat", true),
        ("testing", "apiserver", true),
        ("testing", "cleat", false),
        ("cleat", "testing", false),
        ("controllers", "testing", false),
        ("testing", "testing", true),
    ] {
        assert_eq!(is_allowed(importer, imported), want, "{importer} imports {imported}");
    }
}

#[test]
fn every_crate_named_in_the_table_has_a_row() {
    for (name, allowed) in CRATES {
        let (Only(list) | AllExcept(list)) = allowed;
        for other in *list {
            assert!(row(other).is_some(), "{name} mentions {other}");
        }
    }
}

#[test]
fn manifests_are_checked_for_what_ships() {
    for (case, package, is_dev, want) in [
        ("allowed", "cleat-crash", false, vec![]),
        ("forbidden", "cleat-api", false, vec!["7: store must not depend on cleat-api"]),
        ("only in tests", "cleat-api", true, vec![]),
        ("no crate of the workspace", "serde", false, vec![]),
        ("the binary", "cleat", false, vec!["7: store must not depend on cleat"]),
        (
            "the crate for tests",
            "cleat-testing",
            false,
            vec!["7: store must not depend on cleat-testing: it may only be a dev-dependency"],
        ),
        ("the crate for tests, in tests", "cleat-testing", true, vec![]),
    ] {
        assert_eq!(manifest("store", package, is_dev), want, "{case}");
    }
}

#[test]
fn no_crate_imports_the_binary() {
    assert_eq!(
        code("crates/node/src/lib.rs", "use cleat::run;"),
        ["crates/node/src/lib.rs:2: node must not import cleat"]
    );
    assert_eq!(code("crates/cleat/src/main.rs", "fn main() { cleat::run() }"), [] as [&str; 0]);
}

#[test]
fn a_new_crate_must_enter_the_table() {
    assert_eq!(manifest("surprise", "serde", false).len(), 1);
    let dependency = Dependency { package: "cleat-api".to_owned(), is_dev: false, line: 1 };
    let xtask = Manifest { path: "xtask/Cargo.toml".to_owned(), dependencies: vec![dependency] };
    assert_eq!(check_manifest(&xtask), []);
}

#[test]
fn code_is_checked_where_it_ships() {
    let bad = "crates/drivers/src/lib.rs:2: drivers must not import cleat_api";
    for (case, path, text, want) in [
        ("allowed", "crates/drivers/src/block/node.rs", "use cleat_host::mount;", vec![]),
        ("import", "crates/drivers/src/lib.rs", "use cleat_api::names;", vec![bad]),
        ("import in a tree", "crates/drivers/src/lib.rs", "use {cleat_api::names, std::fs};", vec![bad]),
        ("inline path", "crates/drivers/src/lib.rs", "fn f() { cleat_api::f() }", vec![bad]),
        ("in a macro", "crates/drivers/src/lib.rs", "fn f() { info!(x = cleat_api::f()) }", vec![bad]),
        ("in a comment", "crates/drivers/src/lib.rs", "// cleat_api::f", vec![]),
        ("in a test module", "crates/drivers/src/lib.rs", "#[cfg(test)] mod t { use cleat_api::f; }", vec![]),
        ("in an integration test", "crates/drivers/tests/round.rs", "use cleat_api::f;", vec![]),
        ("own name", "crates/drivers/src/lib.rs", "use cleat_drivers::block;", vec![]),
        (
            "the crate for tests",
            "crates/drivers/src/lib.rs",
            "use cleat_testing::build;",
            vec!["crates/drivers/src/lib.rs:2: drivers must not import cleat_testing"],
        ),
    ] {
        assert_eq!(code(path, text), want, "{case}");
    }
    let files = [
        ("crates/drivers/src/lib.rs", "//! Drivers.\n#[cfg(test)]\nmod rig;\n"),
        ("crates/drivers/src/rig.rs", "//! For tests.\nuse cleat_api::f;\n"),
    ];
    assert_eq!(check_sources(&files), [] as [&str; 0], "a test module in a file of its own");
}
