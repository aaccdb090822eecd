//! `cleat driver block --audit`: its output and its exit status.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn cleat(arguments: &[&str], pool: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
    command.args(["driver", "block", "--pool"]).arg(pool).args(arguments).output().unwrap()
}

fn output_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn the_audit_prints_its_findings_and_fails_if_one_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let pool = directory.path().join("pool");
    let missing = cleat(&["--audit"], &pool);
    assert!(!missing.status.success() && !pool.exists(), "{}", output_of(&missing));

    fs::create_dir_all(pool.join("volumes")).unwrap();
    let clean = cleat(&["--audit"], &pool);
    assert!(clean.status.success() && output_of(&clean).contains("everything matches"), "{}", output_of(&clean));

    fs::write(pool.join("volumes/half.gone"), "{}").unwrap();
    fs::write(pool.join("volumes/half.img"), "rubbish").unwrap();
    let found = cleat(&["--audit"], &pool);
    assert!(!found.status.success(), "{}", output_of(&found));
    assert!(
        output_of(&found).contains("volume half: its deletion was cut short: --repair would finish it"),
        "{}",
        output_of(&found)
    );
    assert!(pool.join("volumes/half.img").exists());
    let repaired = cleat(&["--audit", "--repair"], &pool);
    assert!(repaired.status.success() && output_of(&repaired).contains("repaired"), "{}", output_of(&repaired));
    assert!(!pool.join("volumes/half.img").exists());

    let neither = cleat(&[], &pool);
    assert!(!neither.status.success() && output_of(&neither).contains("--endpoint"), "{}", output_of(&neither));
    assert!(!cleat(&["--repair"], &pool).status.success());
}
