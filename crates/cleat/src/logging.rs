//! Logs on stderr.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// The environment variable with the log filter, in the syntax of `tracing_subscriber::EnvFilter`.
pub const LOG_ENV: &str = "CLEAT_LOG";

/// Starts logging with the filter of [`LOG_ENV`], or with `default` if that is unset or invalid. Must be called once.
pub fn init(default: &str) {
    let filter = EnvFilter::try_from_env(LOG_ENV).unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}
