//! What Debug shows of fields that may hold credentials: the keys, never a value.
use std::{collections::HashMap, fmt};

/// Where the kubelet puts service account tokens unless the driver asks for them among the secrets.
pub(crate) const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

pub(crate) struct Secrets<'a>(pub(crate) &'a HashMap<String, String>);

impl fmt::Debug for Secrets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.keys().map(|key| (key, "redacted"))).finish()
    }
}

pub(crate) struct Context<'a>(pub(crate) &'a HashMap<String, String>);

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |(key, value)| (key, if key == TOKENS { "redacted" } else { value });
        f.debug_map().entries(self.0.iter().map(|(key, value)| (key.as_str(), value.as_str())).map(shown)).finish()
    }
}
