//! Limits on what one client may use of the server.

use std::time::Duration;

/// Bounds that keep a slow or greedy client from blocking others.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For the TLS handshake.
    pub handshake_timeout: Duration,
    /// From the handshake to the end of the first request's headers; for the headers of each later request, too.
    pub header_timeout: Duration,
    /// For the body of a request.
    pub body_timeout: Duration,
    /// Open connections. Further ones wait to be accepted.
    pub max_connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake_timeout: Duration::from_secs(10),
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            max_connections: 4096,
        }
    }
}
