//! `decide.rs` and everything under `decide/` is pure: a snapshot in, a decision out, and time is an input.
//!
//! Tests beside the decisions are not checked.

use super::source::CodePath;
use super::{SourceFile, Violation};

/// Keywords that no pure function uses.
const KEYWORDS: &[&str] = &["async", "await"];

/// Crates for waiting, input and output, and random numbers.
const CRATES: &[&str] = &["rand", "tokio"];

/// Neighbouring path segments, wherever in a path they stand.
const PAIRS: &[(&str, &str)] = &[
    ("Instant", "now"),
    ("SystemTime", "now"),
    ("Timestamp", "now"),
    ("Uuid", "new_v4"),
    ("Zoned", "now"),
    ("std", "env"),
    ("std", "fs"),
    ("std", "process"),
];

/// The types of kube that reach a server. Its plain types are allowed.
const KUBE_CLIENTS: &[&str] = &["Api", "Client"];

pub(super) fn check(file: &SourceFile<'_>) -> Vec<Violation> {
    if !is_decision(&file.path) {
        return Vec::new();
    }
    let mut violations = Vec::new();
    for token in file.production_tokens().filter(|token| KEYWORDS.contains(&token.text)) {
        violations.push(impure(&file.path, token.line, token.text));
    }
    for path in file.production_paths() {
        if let Some(what) = impurity(path) {
            violations.push(impure(&file.path, path.line, &what));
        }
    }
    violations
}

fn is_decision(path: &str) -> bool {
    let mut parts = path.rsplit('/');
    parts.next() == Some("decide.rs") || parts.any(|directory| directory == "decide")
}

fn impurity(path: &CodePath) -> Option<String> {
    let segments = &path.segments;
    let root = segments.first()?;
    if CRATES.contains(&root.as_str()) {
        return Some(root.clone());
    }
    if let Some(pair) = segments.windows(2).find(|pair| PAIRS.contains(&(&pair[0], &pair[1]))) {
        return Some(pair.join("::"));
    }
    let client = segments.iter().find(|segment| KUBE_CLIENTS.contains(&segment.as_str()))?;
    (root == "kube").then(|| format!("kube::{client}"))
}

fn impure(path: &str, line: usize, what: &str) -> Violation {
    Violation::new(path, line, format!("`{what}` in a decision: decide is pure, and what it needs is its input"))
}

#[cfg(test)]
mod tests {
    use crate::tidy::tests::check_sources;

    const DECIDE: &str = "crates/controllers/src/bind/decide.rs";

    fn found(path: &str, text: &str) -> usize {
        let text = format!("//! File.\n{text}\n");
        let owner = path.rsplit_once("decide/").map_or("crates/node/src/", |(dir, _)| dir);
        let parent = format!("{owner}decide/mod.rs");
        let mut files = vec![(path, text.as_str())];
        if path.ends_with("decide/tests.rs") {
            files.push(("crates/node/src/lib.rs", "//! Node.\nmod decide;\n"));
            files.push((&parent, "//! Pure.\n#[cfg(test)]\nmod tests;\n"));
        }
        check_sources(&files).len()
    }

    #[test]
    fn a_decision_has_no_effects_and_no_hidden_inputs() {
        for (case, text) in [
            ("async", "async fn decide() {}"),
            ("tokio, imported", "use tokio::time::Duration;"),
            ("tokio, in place", "fn f() { tokio::spawn(x); }"),
            ("a client", "use kube::Client;"),
            ("an api, by its long name", "use kube::api::Api;"),
            ("a client in a tree", "use kube::{Client, ResourceExt};"),
            ("system clock", "fn f() { std::time::SystemTime::now(); }"),
            ("monotonic clock", "use std::time::Instant; fn f() { Instant::now(); }"),
            ("jiff's clock", "fn f() { jiff::Timestamp::now(); }"),
            ("random numbers", "use rand::random;"),
            ("random identity", "fn f() { uuid::Uuid::new_v4(); }"),
            ("files", "use std::fs::{self};"),
            ("files in a tree", "use std::{collections::BTreeMap, fs};"),
            ("environment", "fn f() { std::env::var(\"X\"); }"),
            ("in a macro", "fn f() { assert!(std::env::var(\"X\").is_ok()) }"),
            ("processes", "use std::process::Command;"),
        ] {
            assert_eq!(found(DECIDE, text), 1, "{case}");
        }
    }

    #[test]
    fn a_decision_may_use_plain_data() {
        for (case, text) in [
            ("durations and times as data", "use std::time::Duration; use jiff::Timestamp;"),
            ("a field called now", "fn f(claim: &Claim) { claim.now; }"),
            ("plain types of kube", "use kube::ResourceExt;"),
            ("a comment", "// Instant::now() is for the caller\nfn f() {}"),
            ("a string", "const WHY: &str = \"std::fs\";"),
            ("tests", "#[cfg(test)] mod tests { use std::fs; async fn f() {} }"),
            ("a test function", "#[test] fn f() { std::env::var(\"X\"); }"),
        ] {
            assert_eq!(found(DECIDE, text), 0, "{case}");
        }
    }

    #[test]
    fn only_decisions_are_checked() {
        for (path, want) in [
            ("crates/node/src/decide/stage.rs", 1),
            ("crates/node/src/decide/mod.rs", 1),
            ("crates/node/src/decide/tests.rs", 0),
            ("crates/controllers/src/bind/act.rs", 0),
        ] {
            assert_eq!(found(path, "async fn f() {}"), want, "{path}");
        }
    }
}
