//! The packages of the workspace and what they depend on, as `cargo metadata` reports them.

use std::path::Path;

use anyhow::{Context as _, Result};
use cargo_metadata::{DependencyKind, MetadataCommand};

/// One package's `Cargo.toml`.
#[derive(Debug, PartialEq)]
pub(super) struct Manifest {
    /// From the workspace root.
    pub(super) path: String,
    pub(super) dependencies: Vec<Dependency>,
}

#[derive(Debug, PartialEq)]
pub(super) struct Dependency {
    /// The package's own name, also where the manifest renames it.
    pub(super) package: String,
    pub(super) is_dev: bool,
    /// The line of the manifest that names it.
    pub(super) line: usize,
}

/// Reads the manifests of all workspace members. Resolves no dependencies and needs no network.
pub(super) fn read(root: &Path) -> Result<Vec<Manifest>> {
    let mut command = MetadataCommand::new();
    command.manifest_path(root.join("Cargo.toml")).no_deps().other_options(["--offline".to_owned()]);
    let metadata = command.exec().context("running cargo metadata")?;
    let mut manifests = Vec::new();
    for package in metadata.packages {
        let file = package.manifest_path.as_std_path();
        let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let relative = file.strip_prefix(root.canonicalize().as_deref().unwrap_or(root)).unwrap_or(file);
        let dependencies = package.dependencies.into_iter().map(|dependency| Dependency {
            is_dev: dependency.kind == DependencyKind::Development,
            line: line_of(&text, dependency.rename.as_deref().unwrap_or(&dependency.name)),
            package: dependency.name,
        });
        manifests
            .push(Manifest { path: relative.to_string_lossy().into_owned(), dependencies: dependencies.collect() });
    }
    Ok(manifests)
}

/// The first line that names the dependency, as a key or as a table of its own; 1 if there is none.
fn line_of(manifest: &str, name: &str) -> usize {
    let names_it = |line: &str| {
        let key = line.trim_start_matches('[').trim_end_matches(']');
        let key = key.rsplit_once("dependencies.").map_or(key, |(_, name)| name);
        key.split(['.', '=', ' ', '"']).find(|word| !word.is_empty()) == Some(name)
    };
    manifest.lines().position(names_it).map_or(1, |index| index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_in_every_form() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let package =
            |name: &str| format!("[package]\nname = \"{name}\"\nedition = \"2024\"\n[lib]\npath = \"lib.rs\"\n");
        write(
            "Cargo.toml",
            "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*\"]\n[workspace.dependencies]\ncleat-a = { path = \"crates/a\" \
             }\n",
        );
        for name in ["a", "b", "c", "d", "e", "f"] {
            write(&format!("crates/{name}/lib.rs"), "");
        }
        for name in ["a", "b", "c", "d", "e"] {
            write(&format!("crates/{name}/Cargo.toml"), &package(&format!("cleat-{name}")));
        }
        write(
            "crates/f/Cargo.toml",
            &(package("cleat-f")
                + "[dependencies]\ncleat-a.workspace = true\nrenamed = { package = \"cleat-b\", path = \"../b\" }\n\
                   # cleat-e = \"1\"\n[dependencies.cleat-c]\npath = \"../c\"\n\
                   [target.'cfg(unix)'.dependencies]\ncleat-d = { path = \"../d\" }\n\
                   [dev-dependencies]\ncleat-e = { path = \"../e\" }\n"),
        );
        let manifests = read(&root).unwrap();
        let found = manifests.iter().find(|manifest| manifest.path == "crates/f/Cargo.toml").unwrap();
        let mut found: Vec<_> = found.dependencies.iter().map(|d| (d.package.as_str(), d.is_dev, d.line)).collect();
        found.sort();
        assert_eq!(
            found,
            [
                ("cleat-a", false, 7),
                ("cleat-b", false, 8),
                ("cleat-c", false, 10),
                ("cleat-d", false, 13),
                ("cleat-e", true, 15)
            ]
        );
    }
}
