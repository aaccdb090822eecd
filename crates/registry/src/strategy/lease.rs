//! Strategy of Lease (coordination.k8s.io/v1).

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use serde_json::Value;

use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::field_error::FieldError;
use cleat_apimachinery::kind::Strategy;

pub(super) struct LeaseStrategy;

impl Strategy for LeaseStrategy {
    type Object = Lease;

    fn descriptor() -> Descriptor {
        Descriptor::new("coordination.k8s.io", "v1", "Lease", "leases")
            .deletes_with_status()
            .put_needs_version()
            .put_creates()
    }

    fn validate(lease: &Lease) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let spec = lease.spec.clone().unwrap_or_default();
        if let Some(seconds) = spec.lease_duration_seconds.filter(|s| *s <= 0) {
            errors.push(FieldError::invalid("spec.leaseDurationSeconds", seconds, "must be greater than 0"));
        }
        if let Some(count) = spec.lease_transitions.filter(|t| *t < 0) {
            let why = "must be greater than or equal to 0";
            errors.push(FieldError::invalid("spec.leaseTransitions", count, why));
        }
        errors
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[NAME, Column::text("Holder", "Identity of the holder of the lease."), AGE];
        COLUMNS
    }

    fn cells(lease: &Lease, now: Timestamp) -> Vec<Value> {
        let holder = lease.spec.as_ref().and_then(|s| s.holder_identity.clone()).unwrap_or_default();
        vec![column::name(&lease.metadata), holder.into(), column::age(&lease.metadata, now)]
    }
}
