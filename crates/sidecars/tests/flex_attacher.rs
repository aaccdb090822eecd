//! The FlexVolume attacher on a real API server, with drivers that are scripts: the arguments of their calls, how failures are
//! handled, and that every attach is undone.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use cleat_api::flex::{ATTACHER, FlexVolume};
use cleat_apiserver::{ApiServer, Config};
use cleat_flex::Drivers;
use cleat_runtime::{Backoff, Caches, SystemClock};
use cleat_sidecars::{Context, flex_attacher};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tokio_util::sync::CancellationToken;

const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
const FINALIZER: &str = "external-attacher/flexvolume-cleat-dev";
const SUCCESS: &str = r#"echo '{"status":"Success"}'"#;
const OPTIONS: &str =
    r#"{"kubernetes.io/fsType":"","kubernetes.io/pvOrVolumeName":"data","kubernetes.io/readwrite":"rw","lun":"7"}"#;

struct Rig {
    attachments: Api<VolumeAttachment>,
    stop: CancellationToken,
    _server: ApiServer,
    dir: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Rig {
    async fn new() -> Self {
        Self::with(WAIT_TIMEOUT, Duration::from_secs(3600)).await
    }

    async fn with(deadline: Duration, verify_interval: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::open(Config::new(dir.path().join("api"), ([127, 0, 0, 1], 0).into())).await.unwrap();
        let stop = CancellationToken::new();
        let context = Context {
            client: server.component("system:cleat:flex-attacher").into(),
            caches: Caches::new(server.component("system:cleat:caches"), stop.clone()),
            clock: std::sync::Arc::new(SystemClock),
        };
        let found = cleat_flex::Config::new(dir.path().join("exec"), dir.path().join("calls"));
        let drivers = Drivers::new(cleat_flex::Config { deadline, ..found });
        let retry = Backoff::new(Duration::from_millis(10), Duration::from_millis(100));
        let options = flex_attacher::FlexAttacherOptions { retry, verify_interval };
        tokio::spawn(drivers.clone().run(stop.clone()));
        tokio::spawn(flex_attacher::run(context, drivers, options, stop.clone()));
        let attachments = Api::all(server.client("system:admin"));
        Self { attachments, stop, _server: server, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Installs the driver `acme/disk`: it logs its arguments and runs the shell code of the command.
    fn install(&self, cases: &[(&str, &str)]) {
        let home = self.path("exec/acme~disk");
        fs::create_dir_all(&home).unwrap();
        let (log, here) = (self.path("log").display().to_string(), self.dir.path().display());
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
        let attachment = serde_json::from_value(json!({ "metadata": { "name": "va" }, "spec": spec })).unwrap();
        self.attachments.create(&PostParams::default(), &attachment).await.unwrap();
    }

    async fn delete_attachment(&self) {
        self.attachments.delete("va", &DeleteParams::default()).await.unwrap();
    }

    /// Waits until `find` returns something from the attachment.
    async fn until<T>(&self, what: &str, find: impl Fn(Option<&VolumeAttachment>) -> Option<T>) -> T {
        let wait = async {
            loop {
                if let Some(found) = find(self.attachments.get_opt("va").await.unwrap().as_ref()) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(WAIT_TIMEOUT, wait).await.unwrap_or_else(|_| panic!("{what}: not within {WAIT_TIMEOUT:?}"))
    }

    async fn wait_for_device(&self) -> String {
        self.until("it is attached", |va| {
            let status = va?.status.as_ref().filter(|status| status.attached)?;
            status.attachment_metadata.as_ref()?.get("devicePath").cloned()
        })
        .await
    }

    async fn wait_until_gone(&self) {
        self.until("it goes", |va| va.is_none().then_some(())).await;
    }

    async fn wait_for_attach_error(&self, part: &str) {
        let message = |va: &VolumeAttachment| va.status.as_ref()?.attach_error.as_ref()?.message.clone();
        self.until(part, |va| message(va?).filter(|message| message.contains(part))).await;
    }

    async fn wait_for_detach_error(&self, part: &str) {
        let message = |va: &VolumeAttachment| va.status.as_ref()?.detach_error.as_ref()?.message.clone();
        self.until(part, |va| message(va?).filter(|message| message.contains(part))).await;
    }
}

#[tokio::test]
async fn an_attachment_has_the_finalizer_from_before_attach_until_after_detach() {
    let rig = Rig::new().await;
    make_fifo(&rig.path("go"));
    rig.install(&[
        ("attach", r#"cat go > /dev/null; echo '{"status":"Success","device":"/dev/acme"}'"#),
        ("detach", SUCCESS),
    ]);
    rig.create_attachment().await;
    rig.until("the driver is called", |_| (!rig.calls().is_empty()).then_some(())).await;
    let attachment = rig.attachments.get("va").await.unwrap();
    assert_eq!(attachment.finalizers(), [FINALIZER]);
    assert!(!attachment.status.unwrap().attached);
    fs::write(rig.path("go"), "").unwrap();
    assert_eq!(rig.wait_for_device().await, "/dev/acme");
    rig.delete_attachment().await;
    rig.wait_until_gone().await;
    assert_eq!(rig.calls(), [format!("attach|{OPTIONS}|n1|"), "detach|data|n1|".to_owned()]);
}

fn make_fifo(path: &std::path::Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[tokio::test]
async fn a_failure_is_reported_and_the_call_repeated() {
    let rig = Rig::new().await;
    let code = |ok: &str| {
        format!(r#"if [ -e {ok} ]; then {SUCCESS}; else echo '{{"status":"SidecarError","message":"{ok}?"}}'; fi"#)
    };
    rig.install(&[("attach", &code("mayattach")), ("detach", &code("maydetach"))]);
    rig.create_attachment().await;
    rig.wait_for_attach_error("attach command failed, status: SidecarError, reason: mayattach?").await;
    fs::write(rig.path("mayattach"), "").unwrap();
    assert_eq!(rig.wait_for_device().await, "");
    rig.until("the error is gone", |va| va?.status.as_ref()?.attach_error.is_none().then_some(())).await;
    rig.delete_attachment().await;
    rig.wait_for_detach_error("detach command failed, status: SidecarError, reason: maydetach?").await;
    fs::write(rig.path("maydetach"), "").unwrap();
    rig.wait_until_gone().await;
}

#[tokio::test]
async fn a_failed_attach_is_undone_when_the_attachment_is_deleted() {
    let rig = Rig::new().await;
    rig.install(&[("attach", r#"echo '{"status":"SidecarError","message":"half done"}'"#), ("detach", SUCCESS)]);
    rig.create_attachment().await;
    rig.wait_for_attach_error("half done").await;
    rig.delete_attachment().await;
    rig.wait_until_gone().await;
    assert_eq!(rig.calls().last().unwrap(), "detach|data|n1|");
}

#[tokio::test]
async fn an_attach_that_times_out_is_undone() {
    let rig = Rig::with(Duration::from_secs(1), Duration::from_secs(3600)).await;
    rig.install(&[("attach", "sleep 600"), ("detach", SUCCESS)]);
    rig.create_attachment().await;
    rig.wait_for_attach_error("attach command did not end within 1s").await;
    rig.delete_attachment().await;
    rig.wait_until_gone().await;
    assert_eq!(rig.calls().last().unwrap(), "detach|data|n1|");
}

#[tokio::test]
async fn a_missing_driver_is_reported_and_waited_for() {
    let rig = Rig::new().await;
    rig.create_attachment().await;
    rig.wait_for_attach_error("there is no FlexVolume driver acme/disk in").await;
    // The driver was never called: there is nothing to undo.
    rig.delete_attachment().await;
    rig.wait_until_gone().await;

    rig.create_attachment().await;
    rig.wait_for_attach_error("there is no FlexVolume driver acme/disk in").await;
    rig.install(&[("attach", SUCCESS), ("detach", SUCCESS)]);
    rig.wait_for_device().await;
    fs::remove_file(rig.path("exec/acme~disk/disk")).unwrap();
    rig.delete_attachment().await;
    rig.wait_for_detach_error("there is no FlexVolume driver acme/disk in").await;
    assert_eq!(rig.attachments.get("va").await.unwrap().finalizers(), [FINALIZER]);
    rig.install(&[("attach", SUCCESS), ("detach", SUCCESS)]);
    rig.wait_until_gone().await;
    assert_eq!(rig.calls().last().unwrap(), "detach|data|n1|");
}

#[tokio::test]
async fn a_volume_that_the_driver_lost_is_attached_again() {
    let rig = Rig::with(WAIT_TIMEOUT, Duration::from_millis(100)).await;
    rig.install(&[
        ("attach", r#"echo x >> times; echo "{\"status\":\"Success\",\"device\":\"/dev/$(wc -l < times)\"}""#),
        ("isattached", r#"if [ -e lost ]; then rm lost; echo '{"status":"Success","attached":false}'; else echo '{"status":"Success","attached":true}'; fi"#),
        ("detach", SUCCESS),
    ]);
    rig.create_attachment().await;
    assert_eq!(rig.wait_for_device().await, "/dev/1");
    let verification = format!("isattached|{OPTIONS}|n1|");
    rig.until("isattached is called", |_| rig.calls().contains(&verification).then_some(())).await;
    assert_eq!(rig.wait_for_device().await, "/dev/1", "nothing was lost");
    fs::write(rig.path("lost"), "").unwrap();
    rig.until("it is attached anew", |va| {
        let metadata = va?.status.as_ref()?.attachment_metadata.as_ref()?;
        (metadata.get("devicePath").map(String::as_str) == Some("/dev/2")).then_some(())
    })
    .await;
    rig.delete_attachment().await;
    rig.wait_until_gone().await;
}
