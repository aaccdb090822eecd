//! `Debug` output of fields that may contain credentials: the keys, never the values.
use std::{collections::HashMap, fmt};

/// The key in `volume_context` under which the kubelet passes service account tokens, unless the driver requests them in
/// the secrets.
const SERVICE_ACCOUNT_TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

pub(crate) struct RedactedSecrets<'a>(pub(crate) &'a HashMap<String, String>);

impl fmt::Debug for RedactedSecrets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.keys().map(|key| (key, "redacted"))).finish()
    }
}

pub(crate) struct RedactedContext<'a>(pub(crate) &'a HashMap<String, String>);

impl fmt::Debug for RedactedContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |(key, value)| (key, if key == SERVICE_ACCOUNT_TOKENS { "redacted" } else { value });
        f.debug_map().entries(self.0.iter().map(|(key, value)| (key.as_str(), value.as_str())).map(shown)).finish()
    }
}
