//! On whose behalf an object is written.

use std::sync::Arc;

use crate::authenticate::Caller;

/// Every function that stores or deletes an object takes an actor. There is no default: code that writes must say for
/// whom it writes.
#[derive(Clone, Debug)]
pub enum Actor {
    /// The client whose request is being carried out, with the verb the request was authorized for.
    Client { caller: Arc<Caller>, verb: &'static str },
    /// The server itself. Write authorization does not check its writes.
    Server,
}

impl Actor {
    /// The client's identity. `None` for the server itself.
    pub fn caller(&self) -> Option<&Caller> {
        match self {
            Self::Client { caller, .. } => Some(caller),
            Self::Server => None,
        }
    }
}
