//! What the server needs to know and to tell about its callers, in one place.

use crate::audit::{Audit, Ids};
use crate::authenticate::token::Signer;
use crate::authorize::Authorizer;
use crate::metrics::Metrics;

pub(crate) struct Security {
    pub(crate) signer: Signer,
    pub(crate) authorizer: Authorizer,
    pub(crate) audit: Option<Audit>,
    pub(crate) ids: Ids,
    pub(crate) metrics: Metrics,
}
