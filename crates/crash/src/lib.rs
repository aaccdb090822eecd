//! Deliberate death at a named point, so that tests can show what a crash there leaves behind.
//!
//! Debug builds only: a release build compiles [`point`] to nothing. Code calls `point` directly after an effect
//! that another process or a restart can see, and before the record of it is written.
//!
//! `CLEAT_CRASH_AT=<point>` kills the process whenever it reaches the point; `CLEAT_CRASH_AT=<point>@<file>` only while
//! the file does not exist, and makes it first: restarted processes that inherit the variable live, and the test sees
//! that the point was reached.

/// The environment variable that names the point at which this process kills itself.
pub const VARIABLE: &str = "CLEAT_CRASH_AT";

/// Dies by SIGKILL if `CLEAT_CRASH_AT` names this point.
#[inline]
pub fn point(name: &str) {
    #[cfg(debug_assertions)]
    armed::die_at(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}

#[cfg(debug_assertions)]
mod armed {
    use std::fs::OpenOptions;
    use std::sync::OnceLock;

    use rustix::process::{Signal, getpid, kill_process};

    struct Armed {
        point: String,
        once: Option<String>,
    }

    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

    pub(super) fn die_at(name: &str) {
        let armed = ARMED.get_or_init(|| std::env::var(super::VARIABLE).ok().and_then(|value| parse(&value)));
        if armed.as_ref().is_some_and(|a| a.point == name && first_time(a)) {
            eprintln!("crash point {name}");
            // Nothing after this line may run: the kernel ends the process before kill returns to user space.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }

    fn parse(value: &str) -> Option<Armed> {
        let (point, once) = match value.split_once('@') {
            Some((point, file)) => (point, Some(file.to_owned())),
            None => (value, None),
        };
        (!point.is_empty()).then(|| Armed { point: point.to_owned(), once })
    }

    fn first_time(armed: &Armed) -> bool {
        match &armed.once {
            Some(file) => OpenOptions::new().write(true).create_new(true).open(file).is_ok(),
            None => true,
        }
    }
}
