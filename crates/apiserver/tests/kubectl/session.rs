//! A server on a socket, and kubectl commands against it, in a temporary directory.

use std::process::Stdio;
use std::time::Duration;

use cleat_apiserver::{ApiServer, Config};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const KUBECTL_MISSING: &str = "kubectl is needed for this test: install it \
    (https://kubernetes.io/docs/tasks/tools/ or your distribution's kubernetes-client package) and put it on the PATH";

pub(crate) struct Session {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) server: ApiServer,
}

/// The exit code and the output of a command.
pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    out: String,
    err: String,
}

impl CommandOutput {
    /// The standard output followed by the standard error.
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

    /// A kubectl command. Arguments are separated by spaces; an argument cannot contain a space.
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

    pub(crate) async fn run_command(&self, mut command: Command, line: &str) -> CommandOutput {
        let output = tokio::time::timeout(TIMEOUT, command.output()).await.expect(line).expect(KUBECTL_MISSING);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        CommandOutput { code: output.status.code().unwrap_or(-1), out: text(&output.stdout), err: text(&output.stderr) }
    }

    pub(crate) async fn run(&self, line: &str) -> CommandOutput {
        self.run_command(self.command(line), line).await
    }

    /// Runs a command that must succeed and returns its standard output.
    pub(crate) async fn ok(&self, line: &str) -> String {
        let output = self.run(line).await;
        assert_eq!(output.code, 0, "kubectl {line}: {}", output.text());
        output.out
    }

    /// Runs a command that must fail and returns all its output.
    pub(crate) async fn refused(&self, line: &str) -> String {
        let output = self.run(line).await;
        assert_ne!(output.code, 0, "kubectl {line}: {}", output.text());
        output.text()
    }

    /// Writes a file into the directory of the commands.
    pub(crate) fn file(&self, name: &str, content: &str) {
        std::fs::write(self.dir.path().join(name), content).unwrap();
    }

    /// Returns true if the help of a command contains the words. Older versions lack some commands and flags.
    pub(crate) async fn supports(&self, command: &str, words: &str) -> bool {
        self.run(&format!("{command} --help")).await.text().contains(words)
    }

    /// Writes a status through the API; older versions of kubectl cannot.
    pub(crate) async fn set_status(&self, path: &str, status: serde_json::Value) {
        let body = serde_json::json!({ "status": status }).to_string().into_bytes();
        let request = http::Request::patch(format!("{path}/status"));
        let request = request.header("content-type", "application/merge-patch+json").body(body).unwrap();
        self.server.client("test").request::<serde_json::Value>(request).await.unwrap();
    }
}

/// The cells of each line of a table.
pub(crate) fn words(table: &str) -> Vec<Vec<&str>> {
    table.lines().map(|line| line.split_whitespace().collect()).collect()
}
