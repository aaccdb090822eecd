//! A file's size, its opening comment, and whether it may contain unsafe code.

use super::{SourceFile, Violation};

const MAX_LINES: usize = 600;
const MAX_LINES_OF_MAIN: usize = 30;
const UNSAFE_CRATE: &str = "crates/host/";

pub(super) fn check(file: &SourceFile<'_>) -> Vec<Violation> {
    let SourceFile { path, text, source, .. } = file;
    let lines = text.lines().count();
    let mut violations = Vec::new();
    if lines > MAX_LINES {
        let message = format!("{lines} lines: over {MAX_LINES} means that two things live here");
        violations.push(Violation::new(path, MAX_LINES + 1, message));
    }
    if path.ends_with("/main.rs") && lines > MAX_LINES_OF_MAIN {
        let message = format!("main.rs has {lines} lines: over {MAX_LINES_OF_MAIN} means that it does work itself");
        violations.push(Violation::new(path, MAX_LINES_OF_MAIN + 1, message));
    }
    if !text.starts_with("//!") {
        violations.push(Violation::new(path, 1, "opens without `//!`: say what this file owns"));
    }
    if !path.starts_with(UNSAFE_CRATE) {
        for token in source.tokens.iter().filter(|token| token.text == "unsafe") {
            violations.push(Violation::new(path, token.line, "unsafe code outside crates/host"));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::source::Source;

    fn lines_found(path: &str, text: &str) -> Vec<usize> {
        let source = Source::parse(text).unwrap();
        let file = SourceFile { path: path.to_owned(), text, source, location: None };
        check(&file).iter().map(|violation| violation.line).collect()
    }

    fn file_of(lines: usize) -> String {
        format!("//! A file.\n{}", "\n".repeat(lines - 1))
    }

    #[test]
    fn files_end_at_600_lines_and_main_at_30() {
        for (path, lines, want) in [
            ("crates/node/src/act.rs", 600, vec![]),
            ("crates/node/src/act.rs", 601, vec![601]),
            ("crates/cleat/src/main.rs", 30, vec![]),
            ("crates/cleat/src/main.rs", 31, vec![31]),
        ] {
            assert_eq!(lines_found(path, &file_of(lines)), want, "{path} of {lines} lines");
        }
    }

    #[test]
    fn every_file_opens_with_a_comment_on_what_it_owns() {
        for (case, text, want) in [
            ("opened", "//! Owns x.\n", vec![]),
            ("a plain comment", "// Owns x.\n", vec![1]),
            ("an attribute first", "#![allow(x)]\n//! Owns x.\n", vec![1]),
            ("empty", "", vec![1]),
        ] {
            assert_eq!(lines_found("crates/api/tests/support/mod.rs", text), want, "{case}");
        }
    }

    #[test]
    fn unsafe_code_is_in_host_only() {
        let block = "//! X.\nfn f() { unsafe { g() } }\n";
        for (case, path, text, want) in [
            ("a block elsewhere", "crates/node/src/lib.rs", block, vec![2]),
            ("a block in host", "crates/host/src/ioctl.rs", block, vec![]),
            ("a crate that only sounds like host", "crates/hosts/src/lib.rs", block, vec![2]),
            ("the lint's name", "crates/node/src/lib.rs", "//! X.\n#![forbid(unsafe_code)]\n", vec![]),
            ("a comment", "crates/node/src/lib.rs", "//! No unsafe here.\n", vec![]),
            ("a string", "crates/node/src/lib.rs", "//! X.\nconst S: &str = \"unsafe\";\n", vec![]),
        ] {
            assert_eq!(lines_found(path, text), want, "{case}");
        }
    }
}
