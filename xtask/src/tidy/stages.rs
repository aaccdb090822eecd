//! Stages of one crate meet only in API objects: the directories under `src/` of these crates do not import each other.

use std::collections::BTreeSet;

use super::modules::CrateRoot;
use super::{SourceFile, Violation};

/// The crates whose directories under `src/` are stages.
const STAGED: &[&str] = &["crates/controllers", "crates/sidecars"];

/// Checks one crate, given all its files.
pub(super) fn check(crate_dir: &str, root: &CrateRoot, files: &[&SourceFile<'_>]) -> Vec<Violation> {
    if !STAGED.contains(&crate_dir) {
        return Vec::new();
    }
    let stages: BTreeSet<&str> = files.iter().filter_map(|file| stage_of(crate_dir, &file.path)).collect();
    let mut violations = Vec::new();
    for file in files {
        let Some(location) = &file.location else { continue };
        let Some(stage) = location.module.first().filter(|name| stages.contains(name.as_str())) else { continue };
        for path in file.production_paths() {
            let Some(sibling) = root.top_level_module(&location.module, path) else { continue };
            if sibling != stage && stages.contains(sibling) {
                let message = format!("stage {stage} must not import its sibling {sibling}: they meet in API objects");
                violations.push(Violation::new(&file.path, path.line, message));
            }
        }
    }
    violations
}

/// The directory directly under `src/` that a file is in.
fn stage_of<'p>(crate_dir: &str, path: &'p str) -> Option<&'p str> {
    let inside = path.strip_prefix(crate_dir)?.strip_prefix("/src/")?;
    inside.split_once('/').map(|(stage, _)| stage)
}

#[cfg(test)]
mod tests {
    use crate::tidy::tests::check_sources;

    fn found(path: &str, text: &str) -> usize {
        let (path, text) = (format!("crates/controllers/src/{path}"), format!("//! File.\n{text}\n"));
        let mut files = vec![
            ("crates/controllers/src/lib.rs", "//! Wiring.\n"),
            ("crates/controllers/src/context.rs", "//! Shared.\n"),
            ("crates/controllers/src/bind/mod.rs", "//! Bind.\n"),
            ("crates/controllers/src/attach/mod.rs", "//! Attach.\n"),
            ("crates/sidecars/src/provision/mod.rs", "//! Provision.\n"),
        ];
        files.retain(|(other, _)| *other != path);
        files.push((&path, &text));
        check_sources(&files).len()
    }

    #[test]
    fn sibling_stages_do_not_import_each_other() {
        for (case, path, text, want) in [
            ("own stage", "bind/act.rs", "use crate::bind::decide;", 0),
            ("shared module", "bind/act.rs", "use crate::context::Context;", 0),
            ("sibling", "bind/act.rs", "use crate::attach::name;", 1),
            ("sibling in a tree", "bind/act.rs", "use crate::{context, attach};", 1),
            ("sibling in code", "bind/act.rs", "fn f() { crate::attach::name() }", 1),
            ("sibling in a macro", "bind/act.rs", "fn f() { format!(\"{}\", crate::attach::NAME) }", 1),
            ("upwards from a file", "bind/act.rs", "use super::super::attach;", 1),
            ("upwards from mod.rs", "bind/mod.rs", "use super::attach;", 1),
            ("a submodule that shares the name", "bind/act.rs", "use super::attach;", 0),
            ("stage of another crate", "bind/act.rs", "use crate::provision::x;", 0),
            ("wiring", "lib.rs", "pub use crate::attach::run;", 0),
            ("in a test", "bind/act.rs", "#[cfg(test)] mod t { use crate::attach::x; }", 0),
        ] {
            assert_eq!(found(path, text), want, "{case}");
        }
    }
}
