//! What counts as code, as a comment, as test code, as a path and as a definition.

use super::*;

fn tokens(text: &str, keep: impl Fn(&Token<'_>) -> bool) -> String {
    let source = Source::parse(text).unwrap();
    source.tokens.iter().filter(|token| keep(token)).map(|token| token.text).collect::<Vec<_>>().join(" ")
}

fn paths(text: &str) -> Vec<String> {
    Source::parse(text).unwrap().paths.iter().map(|path| path.segments.join("::")).collect()
}

#[test]
fn comments_are_apart_from_code() {
    for (case, text, want) in [
        ("line comment", "mod a; // unsafe\nmod b;", vec![(1, "// unsafe")]),
        ("block comment of two lines", "/* 1\n2 */ mod a;", vec![(1, "/* 1"), (2, "2 */")]),
        ("doc comment", "mod a;\n/// x\nmod b;", vec![(2, "/// x")]),
        ("comment at the end", "mod a;\n\n// x", vec![(3, "// x")]),
        ("comment in a group", "fn f() {\n    // x\n}", vec![(2, "// x")]),
        ("beyond ASCII", "// größe\nmod a; // ü", vec![(1, "// größe"), (2, "// ü")]),
        ("a string is none", "const S: &str = \"// x\";", vec![]),
    ] {
        let source = Source::parse(text).unwrap();
        let found: Vec<_> = source.comments.iter().map(|comment| (comment.line, comment.text)).collect();
        assert_eq!(found, want, "{case}");
        assert!(source.tokens.iter().all(|token| token.text != "unsafe"), "{case}");
    }
}

#[test]
fn tokens_have_their_lines() {
    let source = Source::parse("/* 1\n2 */ mod a;\n\nconst B: &str = \"4\n5\"; mod c;").unwrap();
    let line_of = |text: &str| source.tokens.iter().find(|token| token.text == text).unwrap().line;
    assert_eq!((line_of("a"), line_of("B"), line_of("c")), (2, 4, 5));
}

#[test]
fn test_items_are_not_production() {
    for (case, text, want) in [
        ("test module", "mod a; #[cfg(test)] mod tests { fn f() { x } } mod b;", "mod a ; mod b ;"),
        ("declared test module", "#[cfg(test)] mod tests; mod b;", "mod b ;"),
        ("a bare test function", "#[test] fn f() -> [u8; 2] { x } mod b;", "mod b ;"),
        ("tokio test", "#[tokio::test(start_paused = true)] async fn f() { x } mod b;", "mod b ;"),
        ("further attributes", "#[cfg(test)] #[derive(Debug)] struct S { x: u8 } mod b;", "mod b ;"),
        ("whole file", "#![cfg(test)] mod a;", ""),
        ("only for tests on linux", "#[cfg(all(test, unix))] fn f() {} mod b;", "mod b ;"),
        ("a method", "impl S { #[cfg(test)] fn f() {} }", "impl S { }"),
        ("a field", "struct S { #[cfg(test)] x: u8 }", "struct S { }"),
        ("a statement", "fn f() { #[cfg(test)] let x = 1; }", "fn f ( ) { }"),
        ("the opposite of a test", "#[cfg(not(test))] mod a;", "# [ cfg ( not ( test ) ) ] mod a ;"),
        ("also outside tests", "#[cfg(any(test, unix))] mod a;", "# [ cfg ( any ( test , unix ) ) ] mod a ;"),
    ] {
        assert_eq!(tokens(text, |token| !token.test_only), want, "{case}");
    }
}

#[test]
fn paths_are_found_in_imports_and_in_code() {
    for (case, text, want) in [
        ("plain import", "use a::b;", vec!["a::b"]),
        ("whole crate", "use a;", vec!["a"]),
        ("tree", "use a::{self, b::{c, d as e}, *};", vec!["a::self", "a::b::c", "a::b::d", "a::*"]),
        ("tree at the root", "use {a::b, c};", vec!["a::b", "c"]),
        ("leading colons", "use ::a::b; fn f() { ::c::d(); }", vec!["a::b", "c::d"]),
        ("call", "fn f() { let x = a::b::c(d::e); }", vec!["a::b::c", "d::e"]),
        ("turbofish", "fn f() { a::b::<c::d>() }", vec!["a::b", "c::d"]),
        ("macro", "fn f() { a::b!(c, d::e) }", vec!["a::b", "d::e"]),
        ("type", "struct S { x: Vec<a::B> }", vec!["a::B"]),
        ("attribute", "#[serde(with = \"crate::time\")] struct S;", vec!["crate::time"]),
        ("string that is no attribute", "const S: &str = \"crate::time\";", vec![]),
        ("capture list", "fn f<'a>() -> impl X + use<'a> {}", vec![]),
    ] {
        assert_eq!(paths(text), want, "{case}");
    }
}

#[test]
fn imports_say_which_name_they_bind() {
    let source = Source::parse("use a::{self, b, c as d, *}; fn f() { e::f() }").unwrap();
    let bound: Vec<_> = source.paths.iter().map(|path| path.imports_as.as_deref()).collect();
    assert_eq!(bound, [Some("a"), Some("b"), Some("d"), Some("*"), None]);
}

#[test]
fn definitions_have_their_kind() {
    use DefinitionKind::*;
    for (text, want) in [
        ("struct A { b: u8 }", vec![("A", Type), ("b", Field)]),
        ("enum A { B { c: u8 } }", vec![("A", Type), ("B", Variant), ("c", Field)]),
        (
            "trait A { type B; const C: u8; fn d(e: u8); }",
            vec![("A", Type), ("B", AssociatedType), ("C", Constant), ("d", Function), ("e", Parameter)],
        ),
        ("type A = u8; static B: u8 = 1;", vec![("A", Type), ("B", Constant)]),
        ("impl I for S { type A = u8; fn b(&self) {} }", vec![("b", Function)]),
        ("mod a { fn b() {} }", vec![("a", Module), ("b", Function)]),
        (
            "fn a() { let (b, C) = x; match y { Some(d) => {} E => {} } }",
            vec![("a", Function), ("b", Variable), ("d", Variable)],
        ),
        ("fn a() { b(|c| d) }", vec![("a", Function), ("c", Variable)]),
        ("use a::b as c;", vec![("c", Variable)]),
        ("fn a() { b!(c = d) }", vec![("a", Function), ("c", InMacro), ("d", InMacro)]),
        ("fn r#match() {}", vec![("match", Function)]),
    ] {
        let source = Source::parse(text).unwrap();
        let found: Vec<_> = source.definitions.iter().map(|d| (d.name.as_str(), d.kind)).collect();
        assert_eq!(found, want, "{text}");
    }
}
