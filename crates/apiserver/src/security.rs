//! What the server needs to know and to tell about its callers, in one place.

use crate::metrics::Metrics;
use cleat_auth::audit::{Audit, Ids};
use cleat_auth::authenticate::Authenticator;
use cleat_auth::authorize::Authorizer;

pub(crate) struct Security {
    pub(crate) authenticator: Authenticator,
    pub(crate) authorizer: Authorizer,
    pub(crate) audit: Option<Audit>,
    pub(crate) ids: Ids,
    pub(crate) metrics: Metrics,
}
