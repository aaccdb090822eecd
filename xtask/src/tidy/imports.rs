//! Who may import whom: the crate table, and the wall between sibling stages.
//!
//! Judges what ships. Dev-dependencies, `tests/` and test modules may reach further: a test may wire crates together.

use std::collections::BTreeSet;

use super::Violation;
use super::source::{Source, paths};

enum May {
    Only(&'static [&'static str]),
    NotImport(&'static [&'static str]),
}

use May::{NotImport, Only};

/// The directories under `crates/`, and what each may import of the others. Nobody imports `cleat`.
const CRATES: &[(&str, May)] = &[
    ("api", Only(&[])),
    ("apiserver", Only(&["api", "crash", "store"])),
    ("cleat", NotImport(&[])),
    ("controllers", NotImport(&["apiserver", "csi", "drivers", "host", "node", "sidecars", "store"])),
    ("crash", Only(&[])),
    ("csi", Only(&["crash"])),
    ("drivers", NotImport(&["api", "apiserver", "controllers", "node", "runtime", "sidecars", "store"])),
    ("flex", Only(&["crash"])),
    ("host", Only(&["crash"])),
    ("node", NotImport(&["apiserver", "controllers", "drivers", "sidecars", "store"])),
    ("pack", Only(&[])),
    ("runtime", Only(&["api", "crash", "pack"])),
    ("sidecars", NotImport(&["apiserver", "controllers", "drivers", "host", "node", "store"])),
    ("store", Only(&["crash", "pack"])),
];

/// The crates whose directories under `src/` are stages that meet only in API objects.
const STAGED: &[&str] = &["controllers", "sidecars"];

/// A crate and one of its stages.
pub(super) type Stage = (String, String);

pub(super) fn check_manifest(path: &str, text: &str) -> Vec<Violation> {
    let Some((importer, "Cargo.toml")) = in_crate(path) else { return Vec::new() };
    if rule(importer).is_none() {
        let message = format!("crate {importer} has no row in the import table (xtask/src/tidy/imports.rs)");
        return vec![Violation::new(path, 1, message)];
    }
    let mut violations = Vec::new();
    for (line, package) in dependencies(text) {
        let imported = if package == "cleat" { Some("cleat") } else { package.strip_prefix("cleat-") };
        let Some(imported) = imported else { continue };
        if !allowed(importer, imported) {
            violations.push(Violation::new(path, line, format!("{importer} must not depend on {package}")));
        }
    }
    violations
}

pub(super) fn check_source(path: &str, source: &Source) -> Vec<Violation> {
    let Some((importer, inside)) = in_crate(path) else { return Vec::new() };
    if !inside.starts_with("src/") {
        return Vec::new();
    }
    let tokens = source.production();
    let mut violations = Vec::new();
    for code_path in paths(&tokens) {
        let Some(&root) = code_path.segments.first() else { continue };
        let imported = if root == "cleat" { Some("cleat") } else { root.strip_prefix("cleat_") };
        let Some(imported) = imported else { continue };
        if !allowed(importer, imported) {
            violations.push(Violation::new(path, code_path.line, format!("{importer} must not import {root}")));
        }
    }
    violations
}

/// The stages of this tree: the directories directly under `src/` of the staged crates.
pub(super) fn stages<'a>(files: impl Iterator<Item = &'a str>) -> BTreeSet<Stage> {
    let mut stages = BTreeSet::new();
    for path in files {
        let Some((owner, inside)) = in_crate(path) else { continue };
        let Some((stage, _)) = inside.strip_prefix("src/").and_then(|inside| inside.split_once('/')) else { continue };
        if STAGED.contains(&owner) {
            stages.insert((owner.to_owned(), stage.to_owned()));
        }
    }
    stages
}

pub(super) fn check_stages(path: &str, source: &Source, stages: &BTreeSet<Stage>) -> Vec<Violation> {
    let Some((owner, inside)) = in_crate(path) else { return Vec::new() };
    let Some(module) = inside.strip_prefix("src/").map(module_of) else { return Vec::new() };
    let is_stage = |name: &str| stages.contains(&(owner.to_owned(), name.to_owned()));
    let Some(&stage) = module.first().filter(|name| is_stage(name)) else { return Vec::new() };
    let tokens = source.production();
    let mut violations = Vec::new();
    for code_path in paths(&tokens) {
        let Some(sibling) = from_crate_root(&code_path.segments, &module) else { continue };
        if sibling != stage && is_stage(sibling) {
            let message = format!("stage {stage} must not import its sibling {sibling}: they meet in API objects");
            violations.push(Violation::new(path, code_path.line, message));
        }
    }
    violations
}

fn rule(name: &str) -> Option<&'static May> {
    CRATES.iter().find(|(row, _)| *row == name).map(|(_, may)| may)
}

fn allowed(importer: &str, imported: &str) -> bool {
    importer == imported
        || imported != "cleat"
            && match rule(importer) {
                Some(Only(list)) => list.contains(&imported),
                Some(NotImport(list)) => !list.contains(&imported),
                // The manifest is reported instead, once.
                None => true,
            }
}

/// Splits `crates/<name>/<inside>`.
fn in_crate(path: &str) -> Option<(&str, &str)> {
    path.strip_prefix("crates/")?.split_once('/')
}

/// The module that a file under `src/` is: `bind/act.rs` is bind::act, `bind/mod.rs` and `bind.rs` are bind.
fn module_of(inside: &str) -> Vec<&str> {
    let mut module: Vec<&str> = inside.trim_end_matches(".rs").split('/').collect();
    if matches!(module.last(), Some(&("mod" | "lib" | "main"))) {
        module.pop();
    }
    module
}

/// The top-level module that a path leads to, written from the root (`crate::x`) or upwards (`super::super::x`).
fn from_crate_root<'a>(segments: &[&'a str], module: &[&str]) -> Option<&'a str> {
    let ups = segments.iter().take_while(|segment| **segment == "super").count();
    match *segments.first()? {
        "crate" => segments.get(1).copied(),
        "super" if ups == module.len() => segments.get(ups).copied(),
        _ => None,
    }
}

/// The packages under `[dependencies]` (for any target), each with its line.
fn dependencies(manifest: &str) -> Vec<(usize, &str)> {
    let mut found: Vec<(usize, &str)> = Vec::new();
    let mut section = Section::Other;
    for (index, line) in manifest.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(header) = line.strip_prefix('[') {
            section = section_of(header.trim_matches(['[', ']']));
            if let Section::OneDependency(name) = section {
                found.push((index + 1, name));
            }
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        let key = key.trim().trim_matches('"');
        match section {
            Section::Dependencies => {
                let name = key.split('.').next().unwrap_or(key);
                found.push((index + 1, renamed_from(value).unwrap_or(name)));
            }
            Section::OneDependency(_) if key == "package" => found.push((index + 1, value.trim().trim_matches('"'))),
            Section::OneDependency(_) | Section::Other => {}
        }
    }
    found
}

#[derive(Clone, Copy)]
enum Section<'a> {
    Dependencies,
    OneDependency(&'a str),
    Other,
}

fn section_of(header: &str) -> Section<'_> {
    // A target may itself contain dots: [target.'cfg(target_os = "linux")'.dependencies]
    let header = match header.find(".dependencies") {
        Some(at) if header.starts_with("target.") => &header[at + 1..],
        _ => header,
    };
    match header.strip_prefix("dependencies") {
        Some("") => Section::Dependencies,
        Some(rest) if rest.starts_with('.') => Section::OneDependency(rest[1..].trim_matches('"')),
        _ => Section::Other,
    }
}

/// The value of `package = "…"` in an inline table.
fn renamed_from(value: &str) -> Option<&str> {
    let (_, after) = value.split_once("package")?;
    after.trim_start().strip_prefix('=')?.split('"').nth(1)
}

#[cfg(test)]
mod tests;
