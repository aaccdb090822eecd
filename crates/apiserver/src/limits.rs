//! How much of the server one client may take.

use std::time::Duration;

/// Bounds that keep a slow or greedy client from holding others up.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For the TLS handshake.
    pub handshake: Duration,
    /// For a connection's first request, and for the head of each later one.
    pub headers: Duration,
    /// For a request's body.
    pub body: Duration,
    /// Connections at a time; later ones wait to be accepted.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            headers: Duration::from_secs(30),
            body: Duration::from_secs(60),
            connections: 4096,
        }
    }
}
