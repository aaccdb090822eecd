//! Unfinished work: marker comments, macros that panic in place of code, and tests that are switched off.

use super::{SourceFile, Violation};

const MARKERS: &[&str] = &["TODO", "FIXME", "XXX"];
const MACROS: &[&str] = &["todo", "unimplemented"];

pub(super) fn check(file: &SourceFile<'_>) -> Vec<Violation> {
    let (path, source) = (&file.path, &file.source);
    let mut violations = Vec::new();
    for comment in &source.comments {
        let mut words = comment.text.split(|character: char| !character.is_alphanumeric() && character != '_');
        if let Some(marker) = words.find(|word| MARKERS.contains(word)) {
            violations.push(Violation::new(path, comment.line, format!("{marker}: finish it, or open an issue")));
        }
    }
    for window in source.tokens.windows(3) {
        let [first, second, third] = window else { continue };
        match (first.text, second.text, third.text) {
            (name, "!", "(" | "[" | "{") if MACROS.contains(&name) => {
                violations.push(Violation::new(path, first.line, format!("{name}! in place of code")));
            }
            ("#", "[", "ignore") => {
                violations.push(Violation::new(path, first.line, "an ignored test: make it run, or remove it"));
            }
            _ => {}
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::source::Source;

    fn lines_found(text: &str) -> Vec<usize> {
        let source = Source::parse(text).unwrap();
        let file = SourceFile { path: "crates/node/src/act.rs".to_owned(), text, source, location: None };
        check(&file).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn unfinished_work_is_found() {
        for (case, text, want) in [
            ("marker in a comment", "mod a;\n// TODO: more", vec![2]),
            ("marker with a name", "// FIXME(someone) later", vec![1]),
            ("marker in a block comment", "/* a\n XXX */", vec![2]),
            ("marker in a doc comment", "/// a\n/// TODO\nfn f() {}", vec![2]),
            ("marker at the end of a line", "fn f() {} // XXX", vec![1]),
            ("macro", "fn f() {\n todo!()\n}", vec![2]),
            ("macro with a reason", "fn f() { unimplemented!(\"later\") }", vec![1]),
            ("test switched off", "#[test]\n#[ignore]\nfn f() {}", vec![2]),
            ("test switched off with a reason", "#[ignore = \"slow\"]\nfn f() {}", vec![1]),
        ] {
            assert_eq!(lines_found(text), want, "{case}");
        }
    }

    #[test]
    fn finished_work_is_allowed() {
        for (case, text) in [
            ("a string", "const MARKER: &str = \"TODO\";"),
            ("part of a longer word", "// mktemp fills in XXXXXX"),
            ("lint names", "#![warn(clippy::todo)]"),
            ("a variable called ignore", "fn f() { let x = [ignore]; }"),
            ("a comparison", "fn f(todo: u8) -> bool { todo != 3 }"),
        ] {
            assert_eq!(lines_found(text), Vec::<usize>::new(), "{case}");
        }
    }
}
