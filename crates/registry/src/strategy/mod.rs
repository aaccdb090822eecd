//! One file per built-in kind, named after it: the kind's descriptor, defaults, what each endpoint may change, field
//! validation and table columns. `rbac.rs` holds the four RBAC kinds.
//!
//! To add a field rule, edit `validate` (every write), `validate_create` (creation only), `validate_update` or
//! `validate_status` of the kind's `Strategy`. Checks that several kinds share are in `field_checks`, cells in
//! `table_cells`, and what workload kinds share in `pod_template`.
//!
//! Strategies are pure: they see the object of the request and the stored one, never another object.

mod config_map;
mod core_event;
mod csi_driver;
mod csi_node;
mod csi_storage_capacity;
mod custom_resource_definition;
mod daemon_set;
mod deployment;
mod events_v1_event;
mod field_checks;
mod job;
mod lease;
mod namespace;
mod node;
mod persistent_volume;
mod persistent_volume_claim;
mod pod;
mod pod_template;
mod quantity;
pub mod rbac;
mod replica_set;
mod secret;
mod service_account;
mod stateful_set;
mod storage_class;
mod table_cells;
mod volume_attachment;
mod volume_attributes_class;

pub use table_cells::format_label_selector;

use std::sync::Arc;

use cleat_apimachinery::kind::{Kind, StrategyKind};

/// Every built-in kind, in the order in which discovery lists them.
pub fn builtin_kinds() -> Vec<Arc<dyn Kind>> {
    vec![
        Arc::new(StrategyKind::<config_map::ConfigMapStrategy>::new()),
        Arc::new(StrategyKind::<core_event::CoreEventStrategy>::new()),
        Arc::new(StrategyKind::<namespace::NamespaceStrategy>::new()),
        Arc::new(StrategyKind::<node::NodeStrategy>::new()),
        Arc::new(StrategyKind::<persistent_volume_claim::PersistentVolumeClaimStrategy>::new()),
        Arc::new(StrategyKind::<persistent_volume::PersistentVolumeStrategy>::new()),
        Arc::new(StrategyKind::<pod::PodStrategy>::new()),
        Arc::new(StrategyKind::<secret::SecretStrategy>::new()),
        Arc::new(StrategyKind::<service_account::ServiceAccountStrategy>::new()),
        Arc::new(StrategyKind::<lease::LeaseStrategy>::new()),
        Arc::new(StrategyKind::<daemon_set::DaemonSetStrategy>::new()),
        Arc::new(StrategyKind::<deployment::DeploymentStrategy>::new()),
        Arc::new(StrategyKind::<replica_set::ReplicaSetStrategy>::new()),
        Arc::new(StrategyKind::<stateful_set::StatefulSetStrategy>::new()),
        Arc::new(StrategyKind::<job::JobStrategy>::new()),
        Arc::new(StrategyKind::<events_v1_event::EventsV1EventStrategy>::new()),
        Arc::new(StrategyKind::<custom_resource_definition::CustomResourceDefinitionStrategy>::new()),
        Arc::new(StrategyKind::<rbac::ClusterRoleBindingStrategy>::new()),
        Arc::new(StrategyKind::<rbac::ClusterRoleStrategy>::new()),
        Arc::new(StrategyKind::<rbac::RoleBindingStrategy>::new()),
        Arc::new(StrategyKind::<rbac::RoleStrategy>::new()),
        Arc::new(StrategyKind::<csi_driver::CsiDriverStrategy>::new()),
        Arc::new(StrategyKind::<csi_node::CsiNodeStrategy>::new()),
        Arc::new(StrategyKind::<csi_storage_capacity::CsiStorageCapacityStrategy>::new()),
        Arc::new(StrategyKind::<storage_class::StorageClassStrategy>::new()),
        Arc::new(StrategyKind::<volume_attachment::VolumeAttachmentStrategy>::new()),
        Arc::new(StrategyKind::<volume_attributes_class::VolumeAttributesClassStrategy>::new()),
    ]
}
