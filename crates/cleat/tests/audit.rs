//! `cleat driver block --audit` as an administrator meets it: what it says, and how it exits.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn cleat(arguments: &[&str], pool: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
    command.args(["driver", "block", "--pool"]).arg(pool).args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn the_audit_says_what_it_finds_and_exits_accordingly() {
    let directory = tempfile::tempdir().unwrap();
    let pool = directory.path().join("pool");
    let missing = cleat(&["--audit"], &pool);
    assert!(!missing.status.success() && !pool.exists(), "{}", said(&missing));

    fs::create_dir_all(pool.join("volumes")).unwrap();
    let clean = cleat(&["--audit"], &pool);
    assert!(clean.status.success() && said(&clean).contains("everything matches"), "{}", said(&clean));

    fs::write(pool.join("volumes/half.gone"), "{}").unwrap();
    fs::write(pool.join("volumes/half.img"), "rubbish").unwrap();
    let found = cleat(&["--audit"], &pool);
    assert!(!found.status.success(), "{}", said(&found));
    assert!(
        said(&found).contains("volume half: its deletion was cut short: --repair would finish it"),
        "{}",
        said(&found)
    );
    assert!(pool.join("volumes/half.img").exists());
    let repaired = cleat(&["--audit", "--repair"], &pool);
    assert!(repaired.status.success() && said(&repaired).contains("repaired"), "{}", said(&repaired));
    assert!(!pool.join("volumes/half.img").exists());

    let neither = cleat(&[], &pool);
    assert!(!neither.status.success() && said(&neither).contains("--endpoint"), "{}", said(&neither));
    assert!(!cleat(&["--repair"], &pool).status.success());
}
