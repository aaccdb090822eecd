//! What counts as code, as a comment, as a test, and as a path.

use super::*;

fn words(text: &str) -> String {
    join(&Source::read(text).tokens)
}

fn production(text: &str) -> String {
    join(&Source::read(text).production())
}

fn join(tokens: &[Token]) -> String {
    tokens.iter().map(|token| token.text.as_str()).collect::<Vec<_>>().join(" ")
}

fn paths_of(text: &str) -> Vec<String> {
    paths(&Source::read(text).tokens).iter().map(|path| path.segments.join("::")).collect()
}

#[test]
fn strings_and_comments_are_not_code() {
    for (case, text, want) in [
        ("line comment", "a // unsafe\nb", "a b"),
        ("nested block comment", "a /* x /* y */ unsafe */ b", "a b"),
        ("string with an escaped quote", r#"a("\" unsafe") b"#, "a ( ) b"),
        ("raw string with quotes", r###"a(r#"" unsafe "# ) b"###, "a ( ) b"),
        ("byte string", r#"a(b"unsafe") b"#, "a ( ) b"),
        ("byte character", r"a(b'\'') b", "a ( b ) b"),
        ("a quote as a character", "a('\"') unsafe", "a ( ) unsafe"),
        ("a lifetime is no literal", "fn f<'a>(x: &'a str)", "fn f < ' a > ( x : & ' a str )"),
        ("raw identifier", "r#type b", "r # type b"),
        ("a word that ends in r", "for \"x\" b", "for b"),
        ("words beyond ASCII", "größe 'ü' b", "größe b"),
    ] {
        assert_eq!(words(text), want, "{case}");
    }
}

#[test]
fn lines_are_counted_through_strings_and_comments() {
    let source = Source::read("/* 1\n2 */ a\n\"3\n4\" b // c");
    assert_eq!(source.tokens.iter().map(|token| token.line).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(source.comments.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 2, 4]);
}

#[test]
fn test_items_are_not_production() {
    for (case, text, want) in [
        ("test module", "a; #[cfg(test)] mod tests { fn f() { x } } b;", "a ; b ;"),
        ("declared test module", "#[cfg(test)] mod tests; b;", "b ;"),
        ("a bare test function", "#[test] fn f() -> [u8; 2] { x } b;", "b ;"),
        ("tokio test", "#[tokio::test(start_paused = true)] async fn f() { x } b;", "b ;"),
        ("further attributes", "#[cfg(test)] #[derive(Debug)] struct S { x: u8 } b;", "b ;"),
        ("whole file", "#![cfg(test)] a;", ""),
        ("only for tests on linux", "#[cfg(all(test, unix))] fn f() {} b;", "b ;"),
        ("the opposite of a test", "#[cfg(not(test))] a;", "# [ cfg ( not ( test ) ) ] a ;"),
        ("also outside tests", "#[cfg(any(test, unix))] a;", "# [ cfg ( any ( test , unix ) ) ] a ;"),
    ] {
        assert_eq!(production(text), want, "{case}");
    }
}

#[test]
fn paths_are_found_in_imports_and_in_code() {
    for (case, text, want) in [
        ("plain import", "use a::b;", vec!["a::b"]),
        ("whole crate", "use a;", vec!["a"]),
        ("tree", "use a::{self, b::{c, d as e}, *};", vec!["a::self", "a::b::c", "a::b::d", "a::*"]),
        ("tree at the root", "use {a::b, c};", vec!["a::b", "c"]),
        ("leading colons", "use ::a::b; ::c::d();", vec!["a::b", "c::d"]),
        ("call", "let x = a::b::c(d::e);", vec!["a::b::c", "d::e"]),
        ("turbofish", "a::b::<c::d>()", vec!["a::b", "c::d"]),
        ("macro", "a::b!(c)", vec!["a::b"]),
        ("capture list", "fn f() -> impl X + use<'a> {}", vec![]),
    ] {
        assert_eq!(paths_of(text), want, "{case}");
    }
}
