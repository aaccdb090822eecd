//! Kills the process at a named crash point, so that a test can start it again and check that it recovers.
//!
//! Debug builds only: release builds compile [`point`] to nothing. Code calls `point` directly after an effect that
//! another process or a restart can observe, and before it records the effect.
//!
//! - `CLEAT_CRASH_AT=<point>` kills the process whenever it reaches the point.
//! - `CLEAT_CRASH_AT=<point>@<file>` kills it only while the file does not exist, and creates the file first. A
//!   restarted process that inherits the variable then survives, and the file shows the test that the point was
//!   reached.

/// The environment variable that names the crash point.
pub const VARIABLE: &str = "CLEAT_CRASH_AT";

/// Kills the process with SIGKILL if `CLEAT_CRASH_AT` names this point.
#[inline]
pub fn point(name: &str) {
    #[cfg(debug_assertions)]
    armed::crash_if_armed(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}

#[cfg(debug_assertions)]
mod armed {
    use std::fs::OpenOptions;
    use std::sync::OnceLock;

    use rustix::process::{Signal, getpid, kill_process};

    struct ArmedPoint {
        name: String,
        /// The point is disarmed while this file exists.
        marker_file: Option<String>,
    }

    static ARMED_POINT: OnceLock<Option<ArmedPoint>> = OnceLock::new();

    pub(super) fn crash_if_armed(name: &str) {
        let armed = ARMED_POINT.get_or_init(|| std::env::var(super::VARIABLE).ok().and_then(|value| parse(&value)));
        if armed.as_ref().is_some_and(|armed| armed.name == name && create_marker(armed)) {
            eprintln!("crash point {name}");
            // Nothing after this line may run: the kernel ends the process before kill returns to user space.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }

    fn parse(value: &str) -> Option<ArmedPoint> {
        let (name, marker_file) = match value.split_once('@') {
            Some((name, file)) => (name, Some(file.to_owned())),
            None => (value, None),
        };
        (!name.is_empty()).then(|| ArmedPoint { name: name.to_owned(), marker_file })
    }

    /// Returns false if the marker file exists already.
    fn create_marker(armed: &ArmedPoint) -> bool {
        match &armed.marker_file {
            Some(file) => OpenOptions::new().write(true).create_new(true).open(file).is_ok(),
            None => true,
        }
    }
}
