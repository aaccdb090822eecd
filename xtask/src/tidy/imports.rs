//! Which crate may import which.
//!
//! Checks what ships. Dev-dependencies, `tests/` and test modules may import any crate: a test may wire crates together.

use super::manifests::Manifest;
use super::{SourceFile, Violation};

/// The crates that a crate may import.
enum Allowed {
    Only(&'static [&'static str]),
    AllExcept(&'static [&'static str]),
}

use Allowed::{AllExcept, Only};

/// The directories under `crates/`, and which of the others each may import. A row without a crate is allowed: it is for
/// one that is about to come.
const CRATES: &[(&str, Allowed)] = &[
    ("api", Only(&[])),
    ("apimachinery", Only(&["api", "crash", "store"])),
    ("apiserver", Only(&["api", "apimachinery", "auth", "crash", "registry", "store"])),
    ("auth", Only(&["api", "apimachinery", "crash", "registry", "store"])),
    ("cleat", AllExcept(&[])),
    (
        "controllers",
        AllExcept(&[
            "apimachinery",
            "apiserver",
            "auth",
            "csi",
            "drivers",
            "host",
            "node",
            "registry",
            "sidecars",
            "store",
        ]),
    ),
    ("crash", Only(&[])),
    ("csi", Only(&["crash"])),
    (
        "drivers",
        AllExcept(&[
            "api",
            "apimachinery",
            "apiserver",
            "auth",
            "controllers",
            "node",
            "registry",
            "runtime",
            "sidecars",
            "store",
        ]),
    ),
    ("flex", Only(&["crash"])),
    ("host", Only(&["crash"])),
    (
        "node",
        AllExcept(&["apimachinery", "apiserver", "auth", "controllers", "drivers", "registry", "sidecars", "store"]),
    ),
    ("pack", Only(&[])),
    ("registry", Only(&["api", "apimachinery", "crash", "store"])),
    ("runtime", Only(&["api", "crash", "pack"])),
    (
        "sidecars",
        AllExcept(&[
            "apimachinery",
            "apiserver",
            "auth",
            "controllers",
            "drivers",
            "host",
            "node",
            "registry",
            "store",
        ]),
    ),
    ("store", Only(&["crash", "pack"])),
    ("testing", AllExcept(&[])),
];

/// Crates that no other crate imports in what ships: the binary, and the one for tests, which is a dev-dependency.
const NEVER_IMPORTED: &[&str] = &["cleat", "testing"];

pub(super) fn check_manifest(manifest: &Manifest) -> Vec<Violation> {
    let Some((importer, "Cargo.toml")) = in_crate(&manifest.path) else { return Vec::new() };
    if row(importer).is_none() {
        let message = format!("crate {importer} has no row in the import table (xtask/src/tidy/imports.rs)");
        return vec![Violation::new(&manifest.path, 1, message)];
    }
    let mut violations = Vec::new();
    for dependency in manifest.dependencies.iter().filter(|dependency| !dependency.is_dev) {
        let package = dependency.package.as_str();
        let Some(imported) = crate_of_package(package) else { continue };
        if !is_allowed(importer, imported) {
            let message = match imported {
                "testing" => format!("{importer} must not depend on {package}: it may only be a dev-dependency"),
                _ => format!("{importer} must not depend on {package}"),
            };
            violations.push(Violation::new(&manifest.path, dependency.line, message));
        }
    }
    violations
}

pub(super) fn check_source(file: &SourceFile<'_>) -> Vec<Violation> {
    let Some((importer, _)) = in_crate(&file.path) else { return Vec::new() };
    let mut violations = Vec::new();
    for path in file.production_paths() {
        let Some(root) = path.segments.first() else { continue };
        let imported = if root == "cleat" { Some("cleat") } else { root.strip_prefix("cleat_") };
        let Some(imported) = imported else { continue };
        if !is_allowed(importer, imported) {
            violations.push(Violation::new(&file.path, path.line, format!("{importer} must not import {root}")));
        }
    }
    violations
}

fn row(name: &str) -> Option<&'static Allowed> {
    CRATES.iter().find(|(row, _)| *row == name).map(|(_, allowed)| allowed)
}

fn is_allowed(importer: &str, imported: &str) -> bool {
    if importer == imported {
        return true;
    }
    if NEVER_IMPORTED.contains(&imported) {
        return false;
    }
    match row(importer) {
        Some(Only(list)) => list.contains(&imported),
        Some(AllExcept(list)) => !list.contains(&imported),
        // The manifest is reported instead, once.
        None => true,
    }
}

/// Splits `crates/<name>/<inside>`.
fn in_crate(path: &str) -> Option<(&str, &str)> {
    path.strip_prefix("crates/")?.split_once('/')
}

fn crate_of_package(package: &str) -> Option<&str> {
    if package == "cleat" { Some("cleat") } else { package.strip_prefix("cleat-") }
}

#[cfg(test)]
mod tests;
