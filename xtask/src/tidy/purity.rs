//! `decide.rs` and everything under `decide/` is pure: a snapshot in, a decision out, and time is data.
//!
//! Tests beside the decisions may do as they like.

use super::Violation;
use super::source::{CodePath, Source, paths};

/// Words that have no place in a pure function at all.
const WORDS: &[&str] = &["async", "await"];

/// Crates that wait, talk or roll dice.
const ROOTS: &[&str] = &["rand", "tokio"];

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

/// What of kube reaches a server; its plain types are welcome.
const KUBE: &[&str] = &["Api", "Client"];

pub(super) fn check(path: &str, source: &Source) -> Vec<Violation> {
    if !is_decision(path) {
        return Vec::new();
    }
    let tokens = source.production();
    let mut violations = Vec::new();
    for token in tokens.iter().filter(|token| WORDS.contains(&token.text.as_str())) {
        violations.push(impure(path, token.line, &token.text));
    }
    for code_path in paths(&tokens) {
        if let Some(what) = impurity(&code_path) {
            violations.push(impure(path, code_path.line, &what));
        }
    }
    violations
}

fn is_decision(path: &str) -> bool {
    let mut parts = path.rsplit('/');
    let file = parts.next().unwrap_or_default();
    // By convention `tests.rs` is the body of a `#[cfg(test)] mod tests;`.
    file == "decide.rs" || file != "tests.rs" && parts.any(|directory| directory == "decide")
}

fn impurity(path: &CodePath<'_>) -> Option<String> {
    let segments = &path.segments;
    let root = segments.first()?;
    if ROOTS.contains(root) {
        return Some((*root).to_owned());
    }
    if let Some(pair) = segments.windows(2).find(|pair| PAIRS.contains(&(pair[0], pair[1]))) {
        return Some(pair.join("::"));
    }
    let reached = segments.iter().find(|segment| KUBE.contains(segment))?;
    (*root == "kube").then(|| format!("kube::{reached}"))
}

fn impure(path: &str, line: usize, what: &str) -> Violation {
    Violation::new(path, line, format!("`{what}` in a decision: decide is pure, and what it needs is its input"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECIDE: &str = "crates/controllers/src/bind/decide.rs";

    fn found(path: &str, text: &str) -> usize {
        check(path, &Source::read(text)).len()
    }

    #[test]
    fn a_decision_reaches_for_nothing() {
        for (case, text) in [
            ("async", "async fn decide() {}"),
            ("tokio, imported", "use tokio::time::Duration;"),
            ("tokio, in place", "fn f() { tokio::spawn(x) }"),
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
            ("processes", "use std::process::Command;"),
        ] {
            assert_eq!(found(DECIDE, text), 1, "{case}");
        }
    }

    #[test]
    fn a_decision_may_use_data_and_words() {
        for (case, text) in [
            ("durations and times as data", "use std::time::Duration; use jiff::Timestamp;"),
            ("a field called now", "fn f(seen: &Seen) { seen.now }"),
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
    fn only_decisions_are_judged() {
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
