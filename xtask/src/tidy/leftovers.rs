//! Unfinished work: marker comments, macros that panic in place of code, and tests that are switched off.

use super::Violation;
use super::source::{Source, Token};

const MARKERS: &[&str] = &["TODO", "FIXME", "XXX"];
const MACROS: &[&str] = &["todo", "unimplemented"];

pub(super) fn check(path: &str, source: &Source) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (line, comment) in &source.comments {
        let mut words = comment.split(|character: char| !character.is_alphanumeric() && character != '_');
        if let Some(marker) = words.find(|word| MARKERS.contains(word)) {
            violations.push(Violation::new(path, *line, format!("{marker}: finish it, or open an issue")));
        }
    }
    for window in source.tokens.windows(3) {
        let [first, second, third] = window else { continue };
        if MACROS.contains(&first.text.as_str()) && second.text == "!" && is_open(third) {
            violations.push(Violation::new(path, first.line, format!("{}! in place of code", first.text)));
        }
        if first.text == "#" && second.text == "[" && third.text == "ignore" {
            violations.push(Violation::new(path, first.line, "an ignored test: make it run, or remove it"));
        }
    }
    violations
}

fn is_open(token: &Token) -> bool {
    matches!(token.text.as_str(), "(" | "[" | "{")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_found(text: &str) -> Vec<usize> {
        check("crates/node/src/act.rs", &Source::read(text)).iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn unfinished_work_is_found() {
        for (case, text, want) in [
            ("marker in a comment", "a;\n// TODO: more", vec![2]),
            ("marker with a name", "// FIXME(someone) later", vec![1]),
            ("marker in a block comment", "/* a\n XXX */", vec![2]),
            ("macro", "fn f() {\n todo!()\n}", vec![2]),
            ("macro with a reason", "fn f() { unimplemented!(\"later\") }", vec![1]),
            ("test switched off", "#[test]\n#[ignore]\nfn f() {}", vec![2]),
            ("test switched off with a reason", "#[ignore = \"slow\"]\nfn f() {}", vec![1]),
        ] {
            assert_eq!(lines_found(text), want, "{case}");
        }
    }

    #[test]
    fn finished_work_is_left_alone() {
        for (case, text) in [
            ("a string", "const MARKER: &str = \"TODO\";"),
            ("part of a longer word", "// mktemp fills in XXXXXX"),
            ("lint names", "#![warn(clippy::todo)]"),
            ("a variable called ignore", "let x = [ignore];"),
            ("a comparison", "fn f(todo: u8) -> bool { todo != 3 }"),
        ] {
            assert_eq!(lines_found(text), Vec::<usize>::new(), "{case}");
        }
    }
}
