//! What every request passes on its way in and out: authentication, authorization, audit and metrics.

use crate::metrics::Metrics;
use cleat_auth::audit::{AuditIdGenerator, AuditLog};
use cleat_auth::authenticate::Authenticator;
use cleat_auth::authorize::Authorizer;

pub(crate) struct Security {
    pub(crate) authenticator: Authenticator,
    pub(crate) authorizer: Authorizer,
    /// `None` if the server was configured without an audit log.
    pub(crate) audit_log: Option<AuditLog>,
    pub(crate) audit_ids: AuditIdGenerator,
    pub(crate) metrics: Metrics,
}
