//! ServiceAccount.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ServiceAccount;
use serde_json::Value;

use crate::descriptor::Descriptor;
use crate::kind::Strategy;
use crate::table::{self, AGE, Column, NAME};

pub(crate) struct ServiceAccounts;

impl Strategy for ServiceAccounts {
    type Object = ServiceAccount;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "ServiceAccount", "serviceaccounts").short(&["sa"])
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[NAME, AGE];
        COLUMNS
    }

    fn cells(account: &ServiceAccount, now: Timestamp) -> Vec<Value> {
        vec![table::name(&account.metadata), table::age(&account.metadata, now)]
    }
}
