//! Output for the user on stdout. Logs go to stderr, see `logging`.

use std::io::Write as _;

/// Writes `text` to stdout and flushes it. Ignores errors: a closed stdout must not stop the process.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
