//! The FlexVolume attacher on a real API server, with drivers that are scripts: the arguments of their calls, how failures are
//! handled, and that every attach is undone.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use cleat_api::flex::{ATTACHER, FlexVolume};
use cleat_flex::Drivers;
use cleat_runtime::{Backoff, SystemClock};
use cleat_sidecars::{Context, flex_attacher};
use cleat_testing::TestApiServer;
use cleat_testing::wait::wait_until;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;
use serde_json::json;

const CALL_TIMEOUT: Duration = Duration::from_secs(60);
const FINALIZER: &str = "external-attacher/flexvolume-cleat-dev";
const SUCCESS: &str = r#"echo '{"status":"Success"}'"#;
const OPTIONS: &str =
    r#"{"kubernetes.io/fsType":"","kubernetes.io/pvOrVolumeName":"data","kubernetes.io/readwrite":"rw","lun":"7"}"#;

struct FlexAttacherFixture {
    server: TestApiServer,
}

impl FlexAttacherFixture {
    async fn new() -> Self {
        Self::with(CALL_TIMEOUT, Duration::from_secs(3600)).await
    }

    async fn with(deadline: Duration, verify_interval: Duration) -> Self {
        let server = TestApiServer::start().await;
        let context = Context {
            client: server.component("system:cleat:flex-attacher").into(),
            caches: server.caches(server.stop()),
            clock: std::sync::Arc::new(SystemClock),
        };
        let directory = server.directory();
        let config = cleat_flex::Config::new(directory.join("exec"), directory.join("calls"));
        let drivers = Drivers::new(cleat_flex::Config { deadline, ..config });
        let retry = Backoff::new(Duration::from_millis(10), Duration::from_millis(100));
        let options = flex_attacher::FlexAttacherOptions { retry, verify_interval };
        tokio::spawn(drivers.clone().run(server.stop().clone()));
        tokio::spawn(flex_attacher::run(context, drivers, options, server.stop().clone()));
        Self { server }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.server.directory().join(name)
    }

    /// Installs the driver `acme/disk`: it logs its arguments and runs the shell code of the command.
    fn install(&self, cases: &[(&str, &str)]) {
        let home = self.path("exec/acme~disk");
        fs::create_dir_all(&home).unwrap();
        let (log, here) = (self.path("log").display().to_string(), self.server.directory().display());
        let cases: String = cases.iter().map(|(command, code)| format!("{command}) {code} ;;\n")).collect();
        let script = format!(
            "#!/bin/sh\ncd {here}\nprintf '%s|' \"$@\" >> {log}\necho >> {log}\ncase $1 in\ninit) {SUCCESS} ;;\n{cases}*) echo \
             '{{\"status\":\"Not supported\"}}' ;;\nesac\n"
        );
        fs::write(home.join(".new"), script).unwrap();
        fs::set_permissions(home.join(".new"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(home.join(".new"), home.join("disk")).unwrap();
    }

    fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines().filter(|line| *line != "init|").map(ToOwned::to_owned).collect()
    }

    async fn create_attachment(&self) {
        let spec = json!({ "name": "data", "flexVolume": { "driver": "acme/disk", "options": { "lun": "7" } } });
        let flex = FlexVolume::from_pod_volume(&serde_json::from_value(spec).unwrap()).unwrap();
        let spec =
            json!({ "attacher": ATTACHER, "nodeName": "n1", "source": { "inlineVolumeSpec": flex.to_inline_spec() } });
        self.server.create::<VolumeAttachment>(json!({ "metadata": { "name": "va" }, "spec": spec })).await;
    }

    async fn delete_attachment(&self) {
        self.server.delete::<VolumeAttachment>("va").await;
    }

    /// Waits until `find` returns a value for the attachment.
    async fn wait_for<T>(&self, what: &str, find: impl Fn(Option<&VolumeAttachment>) -> Option<T>) -> T {
        self.server.wait_for("va", what, find).await
    }

    async fn wait_for_device(&self) -> String {
        self.wait_for("it is attached", |va| {
            let status = va?.status.as_ref().filter(|status| status.attached)?;
            status.attachment_metadata.as_ref()?.get("devicePath").cloned()
        })
        .await
    }

    async fn wait_until_gone(&self) {
        self.server.wait_until_gone::<VolumeAttachment>("va").await;
    }

    async fn wait_for_attach_error(&self, part: &str) {
        let message = |va: &VolumeAttachment| va.status.as_ref()?.attach_error.as_ref()?.message.clone();
        self.wait_for(part, |va| message(va?).filter(|message| message.contains(part))).await;
    }

    async fn wait_for_detach_error(&self, part: &str) {
        let message = |va: &VolumeAttachment| va.status.as_ref()?.detach_error.as_ref()?.message.clone();
        self.wait_for(part, |va| message(va?).filter(|message| message.contains(part))).await;
    }
}

#[tokio::test]
async fn an_attachment_has_the_finalizer_from_before_attach_until_after_detach() {
    let fixture = FlexAttacherFixture::new().await;
    make_fifo(&fixture.path("go"));
    fixture.install(&[
        ("attach", r#"cat go > /dev/null; echo '{"status":"Success","device":"/dev/acme"}'"#),
        ("detach", SUCCESS),
    ]);
    fixture.create_attachment().await;
    wait_until("the driver is called", async || !fixture.calls().is_empty()).await;
    let attachment = fixture.server.api::<VolumeAttachment>().get("va").await.unwrap();
    assert_eq!(attachment.finalizers(), [FINALIZER]);
    assert!(!attachment.status.unwrap().attached);
    fs::write(fixture.path("go"), "").unwrap();
    assert_eq!(fixture.wait_for_device().await, "/dev/acme");
    fixture.delete_attachment().await;
    fixture.wait_until_gone().await;
    assert_eq!(fixture.calls(), [format!("attach|{OPTIONS}|n1|"), "detach|data|n1|".to_owned()]);
}

fn make_fifo(path: &std::path::Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[tokio::test]
async fn a_failure_is_reported_and_the_call_repeated() {
    let fixture = FlexAttacherFixture::new().await;
    let code = |ok: &str| {
        format!(r#"if [ -e {ok} ]; then {SUCCESS}; else echo '{{"status":"SidecarError","message":"{ok}?"}}'; fi"#)
    };
    fixture.install(&[("attach", &code("mayattach")), ("detach", &code("maydetach"))]);
    fixture.create_attachment().await;
    fixture.wait_for_attach_error("attach command failed, status: SidecarError, reason: mayattach?").await;
    fs::write(fixture.path("mayattach"), "").unwrap();
    assert_eq!(fixture.wait_for_device().await, "");
    fixture.wait_for("the error is gone", |va| va?.status.as_ref()?.attach_error.is_none().then_some(())).await;
    fixture.delete_attachment().await;
    fixture.wait_for_detach_error("detach command failed, status: SidecarError, reason: maydetach?").await;
    fs::write(fixture.path("maydetach"), "").unwrap();
    fixture.wait_until_gone().await;
}

#[tokio::test]
async fn a_failed_attach_is_undone_when_the_attachment_is_deleted() {
    let fixture = FlexAttacherFixture::new().await;
    fixture.install(&[("attach", r#"echo '{"status":"SidecarError","message":"half done"}'"#), ("detach", SUCCESS)]);
    fixture.create_attachment().await;
    fixture.wait_for_attach_error("half done").await;
    fixture.delete_attachment().await;
    fixture.wait_until_gone().await;
    assert_eq!(fixture.calls().last().unwrap(), "detach|data|n1|");
}

#[tokio::test]
async fn an_attach_that_times_out_is_undone() {
    let fixture = FlexAttacherFixture::with(Duration::from_secs(1), Duration::from_secs(3600)).await;
    fixture.install(&[("attach", "sleep 600"), ("detach", SUCCESS)]);
    fixture.create_attachment().await;
    fixture.wait_for_attach_error("attach command did not end within 1s").await;
    fixture.delete_attachment().await;
    fixture.wait_until_gone().await;
    assert_eq!(fixture.calls().last().unwrap(), "detach|data|n1|");
}

#[tokio::test]
async fn a_missing_driver_is_reported_and_waited_for() {
    let fixture = FlexAttacherFixture::new().await;
    fixture.create_attachment().await;
    fixture.wait_for_attach_error("there is no FlexVolume driver acme/disk in").await;
    // The driver was never called: there is nothing to undo.
    fixture.delete_attachment().await;
    fixture.wait_until_gone().await;

    fixture.create_attachment().await;
    fixture.wait_for_attach_error("there is no FlexVolume driver acme/disk in").await;
    fixture.install(&[("attach", SUCCESS), ("detach", SUCCESS)]);
    fixture.wait_for_device().await;
    fs::remove_file(fixture.path("exec/acme~disk/disk")).unwrap();
    fixture.delete_attachment().await;
    fixture.wait_for_detach_error("there is no FlexVolume driver acme/disk in").await;
    assert_eq!(fixture.server.api::<VolumeAttachment>().get("va").await.unwrap().finalizers(), [FINALIZER]);
    fixture.install(&[("attach", SUCCESS), ("detach", SUCCESS)]);
    fixture.wait_until_gone().await;
    assert_eq!(fixture.calls().last().unwrap(), "detach|data|n1|");
}

#[tokio::test]
async fn a_volume_that_the_driver_lost_is_attached_again() {
    let fixture = FlexAttacherFixture::with(CALL_TIMEOUT, Duration::from_millis(100)).await;
    fixture.install(&[
        ("attach", r#"echo x >> times; echo "{\"status\":\"Success\",\"device\":\"/dev/$(wc -l < times)\"}""#),
        ("isattached", r#"if [ -e lost ]; then rm lost; echo '{"status":"Success","attached":false}'; else echo '{"status":"Success","attached":true}'; fi"#),
        ("detach", SUCCESS),
    ]);
    fixture.create_attachment().await;
    assert_eq!(fixture.wait_for_device().await, "/dev/1");
    let verification = format!("isattached|{OPTIONS}|n1|");
    wait_until("isattached is called", async || fixture.calls().contains(&verification)).await;
    assert_eq!(fixture.wait_for_device().await, "/dev/1", "nothing was lost");
    fs::write(fixture.path("lost"), "").unwrap();
    fixture
        .wait_for("it is attached anew", |va| {
            let metadata = va?.status.as_ref()?.attachment_metadata.as_ref()?;
            (metadata.get("devicePath").map(String::as_str) == Some("/dev/2")).then_some(())
        })
        .await;
    fixture.delete_attachment().await;
    fixture.wait_until_gone().await;
}
