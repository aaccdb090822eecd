//! `cargo xtask tidy`: the rules of ARCHITECTURE.md and CONTRIBUTING.md that a compiler does not check.
//!
//! This file finds the files and prints the findings; each rule is a pure function over a path and its text.

mod imports;
mod leftovers;
mod purity;
mod shape;
mod source;

use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};

use source::Source;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Violation {
    path: String,
    line: usize,
    message: String,
}

impl Violation {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Violation { path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}: {}", self.path, self.line, self.message)
    }
}

pub(crate) fn run(root: &Path) -> Result<ExitCode> {
    Ok(if report(root)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints every violation; true when there is none.
pub(crate) fn report(root: &Path) -> Result<bool> {
    let files = read_tree(root)?;
    ensure!(!files.is_empty(), "no Rust files under {}", root.display());
    let violations = check(&files);
    for violation in &violations {
        println!("{violation}");
    }
    match violations.len() {
        0 => println!("tidy: {} files, nothing to complain about", files.len()),
        many => println!("tidy: {many} found in {} files", files.len()),
    }
    Ok(violations.is_empty())
}

/// All rules over all files, given as (path from the workspace root, text).
fn check(files: &[(String, String)]) -> Vec<Violation> {
    let stages = imports::stages(files.iter().map(|(path, _)| path.as_str()));
    let mut violations = Vec::new();
    for (path, text) in files {
        if path.ends_with("Cargo.toml") {
            violations.extend(imports::check_manifest(path, text));
            continue;
        }
        let source = Source::read(text);
        violations.extend(imports::check_source(path, &source));
        violations.extend(imports::check_stages(path, &source, &stages));
        violations.extend(purity::check(path, &source));
        violations.extend(shape::check(path, text, &source));
        violations.extend(leftovers::check(path, &source));
    }
    violations.sort();
    violations.dedup();
    violations
}

fn read_tree(root: &Path) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(directory) = pending.pop() {
        let entries = std::fs::read_dir(&directory).with_context(|| format!("listing {}", directory.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("listing {}", directory.display()))?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            let kind = entry.file_type().with_context(|| format!("looking at {}", path.display()))?;
            if kind.is_dir() && !name.starts_with('.') && name != "target" {
                pending.push(path);
            } else if kind.is_file() && (name.ends_with(".rs") || name == "Cargo.toml") {
                let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
                let relative = path.strip_prefix(root).unwrap_or(&path);
                files.push((relative.to_string_lossy().into_owned(), text));
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> (String, String) {
        (path.to_owned(), text.to_owned())
    }

    #[test]
    fn a_tidy_tree_has_no_violations() {
        let files = [
            file("Cargo.toml", "[workspace]\n"),
            file("crates/api/Cargo.toml", "[dependencies]\nserde.workspace = true\n"),
            file("crates/controllers/src/bind/decide.rs", "//! Pure.\npub fn decide() {}\n"),
        ];
        assert_eq!(check(&files), []);
    }

    #[test]
    fn every_rule_is_wired_and_findings_come_sorted() {
        let files = [
            file("crates/store/Cargo.toml", "[dependencies]\ncleat-api.workspace = true\n"),
            file(
                "crates/controllers/src/bind/decide.rs",
                "use crate::attach::x;\nasync fn f() { unsafe { todo!() } }\n",
            ),
            file("crates/controllers/src/attach/mod.rs", "//! Attach.\nuse cleat_csi::Client;\n"),
        ];
        let found: Vec<_> = check(&files).iter().map(|v| format!("{}:{}", v.path, v.line)).collect();
        assert_eq!(
            found,
            [
                "crates/controllers/src/attach/mod.rs:2",
                "crates/controllers/src/bind/decide.rs:1",
                "crates/controllers/src/bind/decide.rs:1",
                "crates/controllers/src/bind/decide.rs:2",
                "crates/controllers/src/bind/decide.rs:2",
                "crates/controllers/src/bind/decide.rs:2",
                "crates/store/Cargo.toml:2",
            ]
        );
    }
}
