//! Strategy of ServiceAccount (v1).

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ServiceAccount;
use serde_json::Value;

use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::kind::Strategy;

pub(super) struct ServiceAccountStrategy;

impl Strategy for ServiceAccountStrategy {
    type Object = ServiceAccount;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "ServiceAccount", "serviceaccounts").short_names(&["sa"])
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[NAME, AGE];
        COLUMNS
    }

    fn cells(account: &ServiceAccount, now: Timestamp) -> Vec<Value> {
        vec![column::name(&account.metadata), column::age(&account.metadata, now)]
    }
}
