//! No import cycle between the top-level modules of one crate. The root file itself may import every module.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::modules::CrateRoot;
use super::{SourceFile, Violation};

/// For each module the modules that it imports, each with the place of the first import.
type Graph<'a> = BTreeMap<&'a str, BTreeMap<&'a str, (&'a str, usize)>>;

/// Checks one crate, given all its files.
pub(super) fn check(root: &CrateRoot, files: &[&SourceFile<'_>]) -> Vec<Violation> {
    let mut graph = Graph::new();
    for file in files {
        let Some(location) = &file.location else { continue };
        let Some(importer) = location.module.first() else { continue };
        for path in file.production_paths() {
            let Some(imported) = root.top_level_module(&location.module, path) else { continue };
            if imported != importer {
                let imports = graph.entry(importer).or_default();
                imports.entry(imported).or_insert((&file.path, path.line));
            }
        }
    }
    cycles(&graph).iter().map(|cycle| violation(&graph, cycle)).collect()
}

/// The shortest cycle of each group of modules that import each other, as the modules in order.
fn cycles<'a>(graph: &Graph<'a>) -> Vec<Vec<&'a str>> {
    let mut found = Vec::new();
    let mut pending: BTreeSet<&str> = graph.keys().copied().collect();
    while let Some(module) = pending.pop_first() {
        let Some(mut shortest) = cycle_through(graph, module) else { continue };
        let reached = reachable(graph, module);
        let group: Vec<&str> =
            reached.iter().copied().filter(|other| reachable(graph, other).contains(module)).collect();
        for other in group {
            pending.remove(other);
            shortest = cycle_through(graph, other).filter(|cycle| cycle.len() < shortest.len()).unwrap_or(shortest);
        }
        found.push(shortest);
    }
    found
}

/// The modules that `from` imports directly or indirectly.
fn reachable<'a>(graph: &Graph<'a>, from: &str) -> BTreeSet<&'a str> {
    let imports = |module: &str| graph.get(module).into_iter().flat_map(|imports| imports.keys().copied());
    let mut found = BTreeSet::new();
    let mut pending: Vec<&'a str> = imports(from).collect();
    while let Some(module) = pending.pop() {
        if found.insert(module) {
            pending.extend(imports(module));
        }
    }
    found
}

/// The shortest cycle that begins and ends at `start`, found breadth first.
fn cycle_through<'a>(graph: &Graph<'a>, start: &'a str) -> Option<Vec<&'a str>> {
    let mut pending = VecDeque::from([vec![start]]);
    let mut visited = BTreeSet::new();
    while let Some(path) = pending.pop_front() {
        for &next in graph.get(path.last()?).into_iter().flat_map(BTreeMap::keys) {
            if next == start {
                return Some(path);
            }
            if visited.insert(next) {
                pending.push_back([&path[..], &[next]].concat());
            }
        }
    }
    None
}

fn violation(graph: &Graph<'_>, cycle: &[&str]) -> Violation {
    let closed: Vec<&str> = cycle.iter().chain(cycle.first()).copied().collect();
    let edges: Vec<(&str, &str, &str, usize)> = closed
        .windows(2)
        .filter_map(|pair| graph.get(pair[0])?.get(pair[1]).map(|(path, line)| (pair[0], pair[1], *path, *line)))
        .collect();
    let (path, line) = edges.first().map_or(("", 1), |(_, _, path, line)| (path, *line));
    let imports: Vec<_> =
        edges.iter().map(|(from, to, path, line)| format!("{from} imports {to} ({path}:{line})")).collect();
    Violation::new(path, line, format!("import cycle between modules of one crate: {}", imports.join(", ")))
}

#[cfg(test)]
mod tests {
    use crate::tidy::tests::check_sources;

    const LIB: (&str, &str) = ("crates/host/src/lib.rs", "//! Host.\nmod a; mod b; mod c; pub use c::C;\n");

    fn found(a: &str, b: &str, c: &str) -> Vec<String> {
        let texts = [a, b, c].map(|text| format!("//! Module.\n{text}\n"));
        check_sources(&[
            LIB,
            ("crates/host/src/a.rs", &texts[0]),
            ("crates/host/src/b/mod.rs", &texts[1]),
            ("crates/host/src/c.rs", &texts[2]),
        ])
    }

    #[test]
    fn an_import_cycle_is_refused_with_its_imports() {
        let two = "crates/host/src/a.rs:2: import cycle between modules of one crate: a imports b (crates/host/src/a.rs:2), b \
                   imports a (crates/host/src/b/mod.rs:2)";
        for (case, a, b, c, want) in [
            ("two modules", "use crate::b::x;", "use super::a::y;", "", two),
            ("in code", "fn f() { crate::b::x() }", "fn g() { crate::a::f() }", "", two),
            ("the shorter of two cycles", "use crate::b::x;", "use crate::{a, c};", "use crate::a::y;", two),
        ] {
            assert_eq!(found(a, b, c), [want], "{case}");
        }
        let three = found("use crate::b::x;", "use crate::C;", "use crate::a::y;");
        assert_eq!(three.len(), 1, "{three:?}");
        assert!(three[0].contains("b imports c (crates/host/src/b/mod.rs:2)"), "through a name of the root: {three:?}");
    }

    #[test]
    fn imports_in_one_direction_are_allowed() {
        for (case, a, b, c) in [
            ("a line", "use crate::b::x;", "use crate::c::y;", ""),
            ("both to one", "use crate::c::x;", "use crate::c::y;", ""),
            ("within a module", "use crate::a::x;", "mod inner { use super::x; }", ""),
            ("back in tests only", "use crate::b::x;", "#[cfg(test)] mod tests { use crate::a::y; }", ""),
            ("a visibility", "use crate::b::x;", "pub(in crate::a) fn f() {}", ""),
        ] {
            assert_eq!(found(a, b, c), [] as [&str; 0], "{case}");
        }
    }
}
