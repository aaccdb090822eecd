//! A server, and kubectl as its user, in a directory of their own.

use std::process::Stdio;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

pub(crate) const WAIT: Duration = Duration::from_secs(60);
pub(crate) const MISSING: &str = "kubectl is needed for this test: install it \
    (https://kubernetes.io/docs/tasks/tools/ or your distribution's kubernetes-client package) and put it on the PATH";

pub(crate) struct Session {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) server: ApiServer,
}

/// How a command ended, and what it printed.
pub(crate) struct Said {
    pub(crate) code: i32,
    out: String,
    err: String,
}

impl Said {
    /// Everything, complaints last.
    pub(crate) fn text(&self) -> String {
        format!("{}{}", self.out, self.err)
    }
}

impl Session {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let server = ApiServer::open(Config::new(data, "127.0.0.1:0".parse().unwrap())).await.unwrap();
        tokio::spawn(server.serve(CancellationToken::new()));
        Self { dir, server }
    }

    /// Words are separated by spaces; none of them can hold one.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new("kubectl");
        command
            .args(line.split_whitespace())
            .current_dir(self.dir.path())
            .env("KUBECONFIG", self.server.kubeconfig())
            // The discovery cache lives under HOME.
            .env("HOME", self.dir.path())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    pub(crate) async fn end(&self, mut command: Command, line: &str) -> Said {
        let output = tokio::time::timeout(WAIT, command.output()).await.expect(line).expect(MISSING);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said { code: output.status.code().unwrap_or(-1), out: text(&output.stdout), err: text(&output.stderr) }
    }

    pub(crate) async fn run(&self, line: &str) -> Said {
        self.end(self.command(line), line).await
    }

    /// What a command that must succeed prints.
    pub(crate) async fn ok(&self, line: &str) -> String {
        let said = self.run(line).await;
        assert_eq!(said.code, 0, "kubectl {line}: {}", said.text());
        said.out
    }

    /// Everything that a command that must fail prints.
    pub(crate) async fn refused(&self, line: &str) -> String {
        let said = self.run(line).await;
        assert_ne!(said.code, 0, "kubectl {line}: {}", said.text());
        said.text()
    }

    /// Puts a file where commands find it by its name.
    pub(crate) fn file(&self, name: &str, content: &str) {
        std::fs::write(self.dir.path().join(name), content).unwrap();
    }

    /// Does the help for a command say this? Older versions lack some commands and flags.
    pub(crate) async fn knows(&self, command: &str, words: &str) -> bool {
        self.run(&format!("{command} --help")).await.text().contains(words)
    }

    /// Writes a status, which older versions of kubectl cannot.
    pub(crate) async fn set_status(&self, path: &str, status: serde_json::Value) {
        let body = serde_json::json!({ "status": status }).to_string().into_bytes();
        let request = http::Request::patch(format!("{path}/status"));
        let request = request.header("content-type", "application/merge-patch+json").body(body).unwrap();
        self.server.client("test").request::<serde_json::Value>(request).await.unwrap();
    }
}

/// Columns of a table, line by line.
pub(crate) fn words(table: &str) -> Vec<Vec<&str>> {
    table.lines().map(|line| line.split_whitespace().collect()).collect()
}
