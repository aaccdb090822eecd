//! Deliberate death at a named point, so that tests can show what a crash there leaves behind.
//!
//! Debug builds only: a release build compiles [`point`] to nothing. Code calls `point` directly after an effect
//! that another process or a restart can see, and before the record of it is written.

/// The environment variable that names the point at which this process kills itself.
pub const VARIABLE: &str = "CLEAT_CRASH_AT";

/// Dies by SIGKILL if `CLEAT_CRASH_AT` names this point. A point fires the first time it is reached.
#[inline]
pub fn point(name: &str) {
    #[cfg(debug_assertions)]
    armed::die_at(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;

    use rustix::process::{Signal, getpid, kill_process};

    static AT: OnceLock<Option<String>> = OnceLock::new();

    pub(super) fn die_at(name: &str) {
        let at = AT.get_or_init(|| std::env::var(super::VARIABLE).ok().filter(|v| !v.is_empty()));
        if at.as_deref() == Some(name) {
            eprintln!("crash point {name}");
            // Nothing after this line may run: the kernel ends the process before kill returns to user space.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }
}
