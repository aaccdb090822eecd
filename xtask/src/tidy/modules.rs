//! Which module each file is, which modules exist only in test builds, and to which top-level module a path leads.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{CodePath, Source};

/// Where a file under `src/` stands.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Location {
    /// The crate's directory: `crates/api`, `xtask`.
    pub(super) crate_dir: String,
    /// The path of the module from the crate's root, which itself is the empty path.
    pub(super) module: Vec<String>,
    /// Whether the file is compiled in test builds only.
    pub(super) test_only: bool,
}

/// Splits `crates/<name>/<rest>` and `xtask/<rest>` into the crate's directory and the rest.
pub(super) fn split_crate_dir(path: &str) -> Option<(&str, &str)> {
    let end = match path.strip_prefix("crates/") {
        Some(inside) => "crates/".len() + inside.find('/')?,
        None => path.find('/').filter(|_| path.starts_with("xtask/"))?,
    };
    Some((&path[..end], &path[end + 1..]))
}

/// The location of every file under a crate's `src/`, by path.
///
/// Follows `mod name;` from `lib.rs` and `main.rs`. A file that no declaration leads to gets the module that its path
/// suggests.
pub(super) fn locate(sources: &BTreeMap<&str, &Source<'_>>) -> BTreeMap<String, Location> {
    let mut located = BTreeMap::new();
    for (&path, source) in sources {
        let Some((crate_dir, "src/lib.rs" | "src/main.rs")) = split_crate_dir(path) else { continue };
        let root = Location { crate_dir: crate_dir.to_owned(), module: Vec::new(), test_only: false };
        let mut pending = vec![(path.to_owned(), *source, root)];
        while let Some((path, source, location)) = pending.pop() {
            for declaration in &source.declarations {
                let name = std::slice::from_ref(&declaration.name);
                let module = [&location.module[..], &declaration.inline_modules, name].concat();
                let declared = Location {
                    crate_dir: location.crate_dir.clone(),
                    module,
                    test_only: location.test_only || declaration.test_only,
                };
                let candidates = files_of(&path, &declaration.inline_modules, &declaration.name, &declaration.path);
                let found = candidates.iter().find_map(|candidate| sources.get_key_value(candidate.as_str()));
                if let Some((found, source)) = found.filter(|(found, _)| !located.contains_key(**found)) {
                    pending.push(((*found).to_owned(), *source, declared));
                }
            }
            located.insert(path, location);
        }
    }
    for path in sources.keys() {
        let Some((crate_dir, inside)) = split_crate_dir(path) else { continue };
        let Some(inside) = inside.strip_prefix("src/").filter(|_| !located.contains_key(*path)) else { continue };
        let module = module_by_path(inside);
        located.insert((*path).to_owned(), Location { crate_dir: crate_dir.to_owned(), module, test_only: false });
    }
    located
}

/// The paths at which the compiler looks for a module that `path` declares.
fn files_of(path: &str, inline_modules: &[String], name: &str, attribute: &Option<String>) -> Vec<String> {
    let (dir, file) = path.rsplit_once('/').unwrap_or(("", path));
    let own_dir = match file {
        "lib.rs" | "main.rs" | "mod.rs" => dir.to_owned(),
        _ => format!("{dir}/{}", file.trim_end_matches(".rs")),
    };
    let children = [&[own_dir][..], inline_modules].concat().join("/");
    match attribute {
        Some(relative) if inline_modules.is_empty() => vec![format!("{dir}/{relative}")],
        Some(relative) => vec![format!("{children}/{relative}")],
        None => vec![format!("{children}/{name}.rs"), format!("{children}/{name}/mod.rs")],
    }
}

/// `bind/act.rs` is bind::act, `bind/mod.rs` and `bind.rs` are bind.
fn module_by_path(inside: &str) -> Vec<String> {
    let mut module: Vec<String> = inside.trim_end_matches(".rs").split('/').map(ToOwned::to_owned).collect();
    if module.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
        module.pop();
    }
    module
}

/// The names at the root of one crate.
#[derive(Debug, Default)]
pub(super) struct CrateRoot {
    modules: BTreeSet<String>,
    /// Names that the root imports, each with the top-level module that they come from.
    imported: BTreeMap<String, String>,
    /// Top-level modules of which the root imports everything.
    globs: BTreeSet<String>,
    /// What each top-level module defines itself.
    defined: BTreeMap<String, BTreeSet<String>>,
}

impl CrateRoot {
    /// From all files of a crate, each with its location.
    pub(super) fn of<'a>(files: impl Iterator<Item = (&'a Location, &'a Source<'a>)> + Clone) -> Self {
        let mut root = Self::default();
        for (location, source) in files.clone() {
            for definition in &source.definitions {
                match &[&location.module[..], &definition.inline_modules].concat()[..] {
                    [module] if !definition.is_local => {
                        root.defined.entry(module.clone()).or_default().insert(definition.name.clone());
                    }
                    _ => {}
                }
            }
            root.modules.extend(location.module.first().cloned());
        }
        for (_, source) in files.filter(|(location, _)| location.module.is_empty()) {
            // Inline modules of the root are top-level modules too.
            root.modules.extend(source.paths.iter().filter_map(|path| path.inline_modules.first().cloned()));
            for path in source.paths.iter().filter(|path| path.inline_modules.is_empty()) {
                let (Some(name), Some(first)) = (&path.imports_as, first_at_root(&path.segments)) else { continue };
                if root.modules.contains(first) {
                    match name.as_str() {
                        "*" => root.globs.insert(first.to_owned()),
                        name => root.imported.insert(name.to_owned(), first.to_owned()).is_none(),
                    };
                }
            }
        }
        root
    }

    /// The top-level module that a path in `module` leads to, if it starts with `crate`, `self` or `super`. A name that the
    /// root imports counts as the module it comes from.
    pub(super) fn top_level_module<'s>(&'s self, module: &'s [String], path: &'s CodePath) -> Option<&'s str> {
        let from: Vec<&str> = module.iter().chain(&path.inline_modules).map(String::as_str).collect();
        let ups = path.segments.iter().take_while(|segment| *segment == "super").count();
        let (base, rest) = match path.segments.first()?.as_str() {
            "crate" => (0, 1),
            "self" => (from.len(), 1),
            "super" => (from.len().checked_sub(ups)?, ups),
            _ => return None,
        };
        if base > 0 {
            return module.first().map(String::as_str);
        }
        let name = path.segments.get(rest)?.as_str();
        if let Some(module) = self.modules.get(name) {
            return Some(module);
        }
        let glob = || self.globs.iter().find(|module| self.defined.get(*module).is_some_and(|all| all.contains(name)));
        self.imported.get(name).or_else(glob).map(String::as_str)
    }
}

/// The first name of a path in the root file, without `crate::` and `self::`.
fn first_at_root(segments: &[String]) -> Option<&str> {
    segments.iter().map(String::as_str).find(|segment| !matches!(*segment, "crate" | "self"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(files: &[(&'static str, &'static str)]) -> BTreeMap<String, Location> {
        let sources: Vec<_> = files.iter().map(|(path, text)| (*path, Source::parse(text).unwrap())).collect();
        locate(&sources.iter().map(|(path, source)| (*path, source)).collect())
    }

    #[test]
    fn modules_follow_their_declarations() {
        let files = located(&[
            ("crates/node/src/lib.rs", "mod plain; mod folder; #[cfg(test)] mod rig; mod inline { mod inner; }"),
            ("crates/node/src/plain.rs", "#[cfg(test)] #[path = \"plain_table.rs\"] mod table; mod below;"),
            ("crates/node/src/plain_table.rs", ""),
            ("crates/node/src/plain/below.rs", ""),
            ("crates/node/src/folder/mod.rs", "#[cfg(test)] mod tests;"),
            ("crates/node/src/folder/tests.rs", "mod deeper;"),
            ("crates/node/src/folder/tests/deeper.rs", ""),
            ("crates/node/src/rig.rs", ""),
            ("crates/node/src/inline/inner.rs", ""),
            ("crates/node/src/orphan/act.rs", ""),
            ("crates/node/tests/round_trip.rs", ""),
        ]);
        for (path, module, test_only) in [
            ("lib.rs", "", false),
            ("plain.rs", "plain", false),
            ("plain_table.rs", "plain::table", true),
            ("plain/below.rs", "plain::below", false),
            ("folder/mod.rs", "folder", false),
            ("folder/tests.rs", "folder::tests", true),
            ("folder/tests/deeper.rs", "folder::tests::deeper", true),
            ("rig.rs", "rig", true),
            ("inline/inner.rs", "inline::inner", false),
            ("orphan/act.rs", "orphan::act", false),
        ] {
            let location = &files[&format!("crates/node/src/{path}")];
            assert_eq!((location.module.join("::").as_str(), location.test_only), (module, test_only), "{path}");
            assert_eq!(location.crate_dir, "crates/node");
        }
        assert!(!files.contains_key("crates/node/tests/round_trip.rs"));
    }

    #[test]
    fn paths_lead_to_top_level_modules() {
        let files = [
            (
                "crates/node/src/lib.rs",
                "pub mod a; mod b; mod c; pub use a::Thing; pub use crate::b::*; use c::x as y;",
            ),
            ("crates/node/src/a.rs", "pub struct Thing;"),
            ("crates/node/src/b.rs", "pub fn made_in_b() {}"),
            ("crates/node/src/c.rs", "pub fn x() {}"),
        ];
        let sources: Vec<_> = files.iter().map(|(path, text)| (*path, Source::parse(text).unwrap())).collect();
        let located = locate(&sources.iter().map(|(path, source)| (*path, source)).collect());
        let root = CrateRoot::of(sources.iter().map(|(path, source)| (&located[*path], source)));
        for (case, module, text, want) in [
            ("from the root", "a::d", "use crate::b::x;", Some("b")),
            ("upwards", "a::d", "use super::super::b::x;", Some("b")),
            ("upwards from an inline module", "a", "mod t { use super::super::b::x; }", Some("b")),
            ("within the same module", "a::d", "use super::x;", Some("a")),
            ("self", "a::d", "use self::x::y;", Some("a")),
            ("imported by the root", "b", "use crate::Thing;", Some("a")),
            ("imported by the root as a glob", "a", "fn f() { crate::made_in_b() }", Some("b")),
            ("imported by the root under another name", "a", "fn f() { crate::y() }", Some("c")),
            ("an item of the root", "a", "use crate::Unknown;", None),
            ("another crate", "a", "use b::x;", None),
            ("in a macro", "a", "fn f() { assert!(crate::b::x()) }", Some("b")),
            ("in an attribute", "a", "#[serde(with = \"crate::b\")] struct S;", Some("b")),
        ] {
            let source = Source::parse(text).unwrap();
            let module: Vec<String> = module.split("::").map(ToOwned::to_owned).collect();
            let found: Vec<_> = source.paths.iter().filter_map(|path| root.top_level_module(&module, path)).collect();
            assert_eq!(found, want.into_iter().collect::<Vec<_>>(), "{case}");
        }
    }
}
