//! `cargo xtask tidy`: the rules of ARCHITECTURE.md and CONTRIBUTING.md that the compiler does not check.
//!
//! This file reads the workspace, runs every rule over it and prints the violations. A rule is a pure function over one
//! manifest, one file or one crate.

mod cycles;
mod imports;
mod manifests;
mod modules;
mod purity;
mod shape;
mod source;
mod stages;
mod type_names;
mod unfinished;
mod words;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};

use manifests::Manifest;
use modules::{CrateRoot, Location};
use source::{CodePath, Definition, ParseError, Source, Token};

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

/// One Rust file of the workspace.
struct SourceFile<'a> {
    /// From the workspace root.
    path: String,
    text: &'a str,
    source: Source<'a>,
    /// `None` outside `src/`: integration tests, benchmarks, examples and build scripts.
    location: Option<Location>,
}

impl<'a> SourceFile<'a> {
    fn is_test_only(&self) -> bool {
        self.location.as_ref().is_some_and(|location| location.test_only)
    }

    /// The paths that are part of what ships. Test modules and files outside `src/` have none.
    fn production_paths(&self) -> impl Iterator<Item = &CodePath> {
        let paths = if self.ships() { &self.source.paths[..] } else { &[] };
        paths.iter().filter(|path| !path.test_only)
    }

    /// The definitions that are part of what ships.
    fn production_definitions(&self) -> impl Iterator<Item = &Definition> {
        let definitions = if self.ships() { &self.source.definitions[..] } else { &[] };
        definitions.iter().filter(|definition| !definition.test_only)
    }

    /// The tokens that are part of what ships.
    fn production_tokens(&self) -> impl Iterator<Item = &Token<'a>> {
        let tokens = if self.ships() { &self.source.tokens[..] } else { &[] };
        tokens.iter().filter(|token| !token.test_only)
    }

    fn ships(&self) -> bool {
        self.location.is_some() && !self.is_test_only()
    }
}

pub(crate) fn run(root: &Path) -> Result<ExitCode> {
    Ok(if report(root)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints every violation; true when there is none.
pub(crate) fn report(root: &Path) -> Result<bool> {
    let texts = read_tree(root)?;
    ensure!(!texts.is_empty(), "no Rust files under {}", root.display());
    let manifests = manifests::read(root)?;
    let violations = check(&manifests, &texts);
    for violation in &violations {
        println!("{violation}");
    }
    match violations.len() {
        0 => println!("tidy: {} files, no violations", texts.len()),
        count => println!("tidy: {count} violations in {} files", texts.len()),
    }
    Ok(violations.is_empty())
}

/// Runs all rules over all manifests and all files, given as (path from the workspace root, text).
fn check(manifests: &[Manifest], texts: &[(String, String)]) -> Vec<Violation> {
    let (files, mut violations) = parse(texts);
    violations.extend(manifests.iter().flat_map(imports::check_manifest));
    for file in &files {
        violations.extend(imports::check_source(file));
        violations.extend(purity::check(file));
        violations.extend(shape::check(file));
        violations.extend(unfinished::check(file));
        violations.extend(words::check(file));
    }
    let mut crates: BTreeMap<&str, Vec<&SourceFile<'_>>> = BTreeMap::new();
    for file in &files {
        if let Some(location) = &file.location {
            crates.entry(&location.crate_dir).or_default().push(file);
        }
    }
    for (crate_dir, files) in &crates {
        let root = CrateRoot::of(files.iter().filter_map(|file| Some((file.location.as_ref()?, &file.source))));
        violations.extend(stages::check(crate_dir, &root, files));
        violations.extend(cycles::check(&root, files));
        violations.extend(type_names::check(files));
    }
    violations.sort();
    violations.dedup();
    violations
}

/// Parses all files. A file that is no valid Rust is a violation.
fn parse<'t>(texts: &'t [(String, String)]) -> (Vec<SourceFile<'t>>, Vec<Violation>) {
    // The parser's tables are per thread, so that threads do not wait for each other.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let chunk = texts.len().div_ceil(threads).max(1);
    let parsed: Vec<(String, Result<Source<'t>, ParseError>)> = std::thread::scope(|scope| {
        let parse = |texts: &'t [(String, String)]| -> Vec<_> {
            texts.iter().map(|(path, text)| (path.clone(), Source::parse(text))).collect()
        };
        let tasks: Vec<_> = texts.chunks(chunk).map(|texts| scope.spawn(move || parse(texts))).collect();
        tasks.into_iter().flat_map(|task| task.join().expect("the parser does not panic")).collect()
    });
    let sources = parsed.iter().filter_map(|(path, source)| Some((path.as_str(), source.as_ref().ok()?))).collect();
    let mut locations = modules::locate(&sources);
    let (mut files, mut violations) = (Vec::new(), Vec::new());
    for ((path, source), (_, text)) in parsed.into_iter().zip(texts) {
        match source {
            Ok(source) => {
                let location = locations.remove(&path);
                files.push(SourceFile { path, text, source, location });
            }
            Err(ParseError { line, message }) => {
                violations.push(Violation::new(&path, line, format!("does not parse: {message}")));
            }
        }
    }
    (files, violations)
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
            let kind = entry.file_type().with_context(|| format!("reading the type of {}", path.display()))?;
            if kind.is_dir() && !name.starts_with('.') && name != "target" {
                pending.push(path);
            } else if kind.is_file() && name.ends_with(".rs") {
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
    use super::manifests::Dependency;
    use super::*;

    /// The violations of a tree of these files, as they are printed.
    pub(super) fn check_sources(files: &[(&str, &str)]) -> Vec<String> {
        let texts: Vec<_> = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        check(&[], &texts).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_tidy_tree_has_no_violations() {
        let files = [
            ("crates/controllers/src/lib.rs", "//! Controllers.\npub mod bind;\n"),
            ("crates/controllers/src/bind/mod.rs", "//! Binds.\nmod decide;\n"),
            ("crates/controllers/src/bind/decide.rs", "//! Pure.\npub fn decide() {}\n"),
        ];
        assert_eq!(check_sources(&files), [] as [&str; 0]);
    }

    #[test]
    fn every_rule_is_wired_and_violations_are_sorted() {
        let dependency = Dependency { package: "cleat-api".to_owned(), is_dev: false, line: 2 };
        let manifest = Manifest { path: "crates/store/Cargo.toml".to_owned(), dependencies: vec![dependency] };
        let texts = [
            (
                "crates/controllers/src/attach/mod.rs",
                "//! Attach.\nuse cleat_csi::Client;\nuse crate::bind::x;\nstruct S;\n",
            ),
            (
                "crates/controllers/src/bind/decide.rs",
                "use crate::attach::x;\nasync fn f() { unsafe { todo!() } }\nstruct S;\n",
            ),
            ("crates/controllers/src/bind/shelf.rs", "//! X.\nstruct S;\n"),
            ("crates/controllers/src/bind/mod.rs", "//! Bind.\nmod shelf;\nmod decide;\n"),
            ("crates/controllers/src/broken.rs", "//! X.\nfn {\n"),
        ];
        let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned()));
        let found: Vec<_> = check(&[manifest], &texts).iter().map(|v| format!("{}:{}", v.path, v.line)).collect();
        let controllers = |rest: &str| format!("crates/controllers/src/{rest}");
        assert_eq!(
            found,
            [
                controllers("attach/mod.rs:2"),  // another crate
                controllers("attach/mod.rs:3"),  // a sibling stage
                controllers("attach/mod.rs:3"),  // an import cycle
                controllers("attach/mod.rs:4"),  // a type name in three modules
                controllers("bind/decide.rs:1"), // no opening comment
                controllers("bind/decide.rs:1"), // a sibling stage
                controllers("bind/decide.rs:2"), // async
                controllers("bind/decide.rs:2"), // unfinished
                controllers("bind/decide.rs:2"), // unsafe
                controllers("bind/decide.rs:3"), // a type name in three modules
                controllers("bind/mod.rs:2"),    // a retired word
                controllers("bind/shelf.rs:2"),  // a type name in three modules
                controllers("broken.rs:2"),      // no Rust
                "crates/store/Cargo.toml:2".to_owned(),
            ]
        );
    }
}
