//! An isolated machine for each test: a temporary directory and a mount namespace, both removed when the test ends.
//!
//! The stack runs inside the namespace, which an idle process keeps open: when the stack is killed and restarted, its mounts
//! are still there, as on a real machine. At the end of the test, also of a failed one, the namespace ends with all its mounts,
//! and the loop devices of the directory are detached.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// The directory and the mount namespace of one test.
pub struct Machine {
    directory: TempDir,
    /// `unshare`, whose child keeps the namespace open.
    namespace_process: Child,
    /// The `cleat` binary.
    binary: PathBuf,
}

impl Machine {
    /// `binary` is the path of `cleat`: `env!("CARGO_BIN_EXE_cleat")`, which only tests of its package can read.
    pub fn new(binary: impl Into<PathBuf>) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test mounts file systems: run it as root, for example with ./scripts/test"
        );
        // A short path: the path of a unix socket has at most 107 bytes.
        let directory = tempfile::Builder::new().prefix("ct-").tempdir_in("/tmp").unwrap();
        let mut namespace_process = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "--kill-child", "--fork", "sh", "-c"])
            .arg(format!("touch {}/ready && exec sleep 3600", directory.path().display()))
            .stdin(Stdio::null())
            .spawn()
            .expect("unshare is part of util-linux: apt-get install util-linux");
        let ready = directory.path().join("ready");
        while !ready.exists() {
            assert!(namespace_process.try_wait().unwrap().is_none(), "the mount namespace could not be created");
            std::thread::yield_now();
        }
        Self { directory, namespace_process, binary: binary.into() }
    }

    /// The stack's data directory.
    pub fn data(&self) -> PathBuf {
        self.directory.path().join("d")
    }

    /// A path in the temporary directory, outside the data directory.
    pub fn scratch(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A command that runs inside the namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.pid_in_namespace())).arg("--").arg(program);
        command
    }

    /// `cleat` inside the namespace.
    pub fn cleat(&self) -> Command {
        self.command(&self.binary)
    }

    /// The path by which a process outside the namespace reaches `path` inside it.
    pub fn path_in_namespace(&self, path: &Path) -> PathBuf {
        Path::new("/proc").join(self.pid_in_namespace().to_string()).join("root").join(path.strip_prefix("/").unwrap())
    }

    /// The mount points below the data directory, each with its mount id.
    pub fn mounts(&self) -> Vec<(String, PathBuf)> {
        let table = fs::read_to_string(format!("/proc/{}/mountinfo", self.pid_in_namespace())).unwrap();
        let fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let below = fields.filter(|f| Path::new(f[4]).starts_with(self.data()));
        below.map(|f| (f[0].to_owned(), PathBuf::from(f[4]))).collect()
    }

    /// The backing files of loop devices in the temporary directory.
    pub fn loop_files(&self) -> Vec<PathBuf> {
        let devices = fs::read_dir("/sys/block").unwrap().map(|e| e.unwrap().path().join("loop/backing_file"));
        let files = devices.filter_map(|file| fs::read_to_string(file).ok());
        let files = files.map(|text| PathBuf::from(text.trim_end().trim_end_matches(" (deleted)")));
        files.filter(|file| file.starts_with(self.directory.path())).collect()
    }

    /// The files of volumes in the stack's pool: images and records, not the nodes' announcements.
    pub fn pool_files(&self) -> Vec<PathBuf> {
        Self::volume_files_in(self.data().join("pool"))
    }

    /// As [`Machine::pool_files`], for another pool.
    pub fn volume_files_in(pool: PathBuf) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut directories = vec![pool];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
                match entry.file_type().unwrap().is_dir() {
                    true if entry.file_name() == "nodes" => {}
                    true => directories.push(entry.path()),
                    false if entry.metadata().unwrap().len() > 0 => files.push(entry.path()),
                    false => {}
                }
            }
        }
        files
    }

    pub fn assert_nothing_left(&self) {
        assert_eq!(self.mounts(), [], "mounts");
        assert_eq!(self.loop_files(), [] as [PathBuf; 0], "loop devices");
        assert_eq!(self.pool_files(), [] as [PathBuf; 0], "images");
    }

    /// The process id of the idle process inside the namespace: the only child of `unshare`.
    fn pid_in_namespace(&self) -> u32 {
        let id = self.namespace_process.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        children.split_whitespace().next().expect("the namespace is gone").parse().unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.namespace_process.kill();
        let _ = self.namespace_process.wait();
        // A mounted loop device cannot be detached; the mounts end with the last process of the namespace.
        for file in self.loop_files() {
            let _ = cleat_host::loopdev::detach_file(&file);
        }
    }
}
