//! csi-sanity, the conformance suite of the CSI community, against the driver: every spec for every capability that the
//! driver advertises. `docs/driver.md` says which are left out and why.
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use cleat_csi::Endpoint;
use cleat_drivers::block::Config;

use crate::fixture::BlockFixture;

const MODULE: &str = "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@latest";

/// Disabled in csi-sanity itself.
const DISABLED: &str = "pagination should detect volumes added between pages and accept tokens when the last volume from a page is deleted";

/// Finds csi-sanity on PATH or where `go install` puts it; otherwise installs it in a directory of this test.
fn csi_sanity() -> PathBuf {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-bin");
    let mut directories: Vec<PathBuf> = std::env::var_os("PATH").iter().flat_map(std::env::split_paths).collect();
    let go = |arguments: &[&str]| {
        let path = std::env::var("PATH").unwrap_or_default();
        Command::new("go")
            .args(arguments)
            .env("PATH", format!("{path}:/usr/local/go/bin"))
            .env("GOBIN", &cache)
            .output()
    };
    if let Ok(output) = go(&["env", "GOPATH"]) {
        directories.push(Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("bin"));
    }
    directories.push(cache.clone());
    let found = || directories.iter().map(|directory| directory.join("csi-sanity")).find(|program| program.is_file());
    if let Some(program) = found() {
        return program;
    }
    let output = match go(&["install", MODULE]) {
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    found().unwrap_or_else(|| panic!("csi-sanity is missing: install Go and run `go install {MODULE}` ({output})"))
}

/// The number of specs that passed, and the state and the name of each other spec.
async fn run(fixture: &BlockFixture, config: Config, extra: &[&str]) -> (usize, Vec<(String, String)>) {
    let Endpoint::Unix(socket) = config.endpoint.clone() else { panic!("a unix socket") };
    let _driver = fixture.driver_with(config).await;
    let (parameters, mutable, report) =
        (fixture.path("class.yaml"), fixture.path("mutable.yaml"), fixture.path("report.json"));
    std::fs::write(&parameters, "fsType: xfs\n").unwrap();
    std::fs::write(&mutable, "bandwidth: low\n").unwrap();
    let mut command = tokio::process::Command::from(Command::new(csi_sanity()));
    let flag = |name: &str, path: &Path| format!("--csi.{name}={}", path.display());
    command
        .args([
            flag("endpoint", &socket),
            flag("mountdir", &fixture.path("mount")),
            flag("stagingdir", &fixture.path("stage")),
        ])
        .args([flag("testvolumeparameters", &parameters), flag("testvolumemutableparameters", &mutable)])
        .args(["--csi.testvolumesize=536870912", "--csi.testvolumeexpandsize=1073741824"])
        .args(["--csi.testnodevolumeattachlimit", "--ginkgo.no-color"])
        .arg(format!("--ginkgo.json-report={}", report.display()))
        .args(extra)
        .current_dir(fixture.directory.path())
        .stdin(Stdio::null());
    let output = command.output().await.unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let report = std::fs::read(&report).unwrap_or_else(|error| panic!("no report: {error}\n{stdout}"));
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let to_string = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let specs: Vec<(String, String)> = report[0]["SpecReports"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|spec| to_string(&spec["LeafNodeType"]) == "It")
        .map(|spec| (to_string(&spec["State"]), to_string(&spec["LeafNodeText"])))
        .collect();
    let failed = specs.iter().any(|(state, _)| !matches!(state.as_str(), "passed" | "skipped" | "pending"));
    assert!(!failed && output.status.success(), "{stdout}");
    let passed = specs.iter().filter(|(state, _)| state == "passed").count();
    (passed, specs.into_iter().filter(|(state, _)| state != "passed").collect())
}

#[tokio::test]
async fn every_spec_passes_for_mounted_volumes_of_a_node_local_pool() {
    let fixture = BlockFixture::new();
    let config = Config { node_local: true, max_volumes: 4, ..fixture.config("a") };
    let (passed, others) = run(&fixture, config, &[]).await;
    assert_eq!(others, [("pending".to_owned(), DISABLED.to_owned())]);
    assert!(passed >= 102, "{passed}");
    fixture.assert_nothing_left("none");
}

#[tokio::test]
async fn every_spec_passes_for_raw_volumes_of_a_shared_pool_that_shares_blocks() {
    let fixture = BlockFixture::on_xfs(4 << 30);
    let config = Config { max_volumes: 4, ..fixture.config("a") };
    let (passed, others) = run(&fixture, config, &["--csi.testvolumeaccesstype=block"]).await;
    let topology = "should succeed when creating a snapshot with accessibility requirements";
    let want = [("pending".to_owned(), DISABLED.to_owned()), ("skipped".to_owned(), topology.to_owned())];
    let mut others = others;
    others.sort();
    assert_eq!(others, want);
    assert!(passed >= 101, "{passed}");
    fixture.assert_nothing_left("none");
}
