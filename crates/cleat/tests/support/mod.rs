//! A machine of its own for each test: a temporary directory and a mount namespace that dies with the test.
//!
//! The stack runs inside the namespace, kept open by a process that does nothing: the stack can be killed and started
//! again, and what it mounted is still there in between, as on a real machine. Whatever the test does, at its end the
//! namespace goes with all its mounts, and the loop devices of the directory are detached.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test ends where its support fails")]

pub(crate) mod stack;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

pub(crate) struct Machine {
    directory: TempDir,
    holder: Child,
}

impl Machine {
    pub(crate) fn new() -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test mounts file systems: run it as root, for example with ./scripts/test"
        );
        // Short: sockets below it have room for about 100 bytes.
        let directory = tempfile::Builder::new().prefix("ct-").tempdir_in("/tmp").unwrap();
        let mut holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "--kill-child", "--fork", "sh", "-c"])
            .arg(format!("touch {}/ready && exec sleep 3600", directory.path().display()))
            .stdin(Stdio::null())
            .spawn()
            .expect("unshare is part of util-linux: apt-get install util-linux");
        let ready = directory.path().join("ready");
        while !ready.exists() {
            assert!(holder.try_wait().unwrap().is_none(), "the mount namespace could not be made");
            std::thread::yield_now();
        }
        Self { directory, holder }
    }

    /// The stack's data directory.
    pub(crate) fn data(&self) -> PathBuf {
        self.directory.path().join("d")
    }

    pub(crate) fn scratch(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A command that runs inside the namespace.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.inside())).arg("--").arg(program);
        command
    }

    /// A path as the namespace sees it.
    pub(crate) fn see(&self, path: &Path) -> PathBuf {
        Path::new("/proc").join(self.inside().to_string()).join("root").join(path.strip_prefix("/").unwrap())
    }

    /// The mount points below the data directory, each with the id the kernel gave it.
    pub(crate) fn mounts(&self) -> Vec<(String, PathBuf)> {
        let table = fs::read_to_string(format!("/proc/{}/mountinfo", self.inside())).unwrap();
        let fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let below = fields.filter(|f| Path::new(f[4]).starts_with(self.data()));
        below.map(|f| (f[0].to_owned(), PathBuf::from(f[4]))).collect()
    }

    /// The files in the data directory that loop devices stand on.
    pub(crate) fn loop_files(&self) -> Vec<PathBuf> {
        let devices = fs::read_dir("/sys/block").unwrap().map(|e| e.unwrap().path().join("loop/backing_file"));
        let files = devices.filter_map(|file| fs::read_to_string(file).ok());
        let files = files.map(|text| PathBuf::from(text.trim_end().trim_end_matches(" (deleted)")));
        files.filter(|file| file.starts_with(self.directory.path())).collect()
    }

    /// The images and records of volumes in the pool; the nodes' announcements are neither.
    pub(crate) fn pool_files(&self) -> Vec<PathBuf> {
        Self::files_of(self.data().join("pool"))
    }

    /// The same of another pool.
    pub(crate) fn files_of(pool: PathBuf) -> Vec<PathBuf> {
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

    pub(crate) fn assert_nothing_left(&self) {
        assert_eq!(self.mounts(), [], "mounts");
        assert_eq!(self.loop_files(), [] as [PathBuf; 0], "loop devices");
        assert_eq!(self.pool_files(), [] as [PathBuf; 0], "images");
    }

    /// The process inside the namespace: the only child of `unshare`.
    fn inside(&self) -> u32 {
        let id = self.holder.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        children.split_whitespace().next().expect("the namespace is gone").parse().unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
        // The mounts go with the last process of the namespace; only then can the devices be detached.
        for file in self.loop_files() {
            let _ = cleat_host::loopdev::detach_file(&file);
        }
    }
}
