//! Kinds for the tests of this crate: the built-in types with the common rules only. Strategies are in another crate.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    ConfigMap, Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret, ServiceAccount,
};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

use crate::column::{self, Column, NAME};
use crate::descriptor::Descriptor;
use crate::kind::{ApiType, Kind, Strategy, StrategyKind};

macro_rules! kinds {
    ($($strategy:ident: $object:ident, $group:literal, $plural:literal $(, $with:ident)*;)*) => {
        $(
            struct $strategy;

            impl Strategy for $strategy {
                type Object = $object;

                fn descriptor() -> Descriptor {
                    Descriptor::new($group, "v1", stringify!($object), $plural)$(.$with())*
                }

                fn columns() -> &'static [Column] {
                    &[NAME]
                }

                fn cells(object: &$object, _now: Timestamp) -> Vec<Value> {
                    cells(object)
                }
            }
        )*

        pub(crate) fn all() -> Vec<Arc<dyn Kind>> {
            vec![$(Arc::new(StrategyKind::<$strategy>::new())),*]
        }
    };
}

fn cells<T: ApiType>(object: &T) -> Vec<Value> {
    vec![column::name(object.metadata())]
}

kinds! {
    ConfigMaps: ConfigMap, "", "configmaps";
    Events: Event, "", "events";
    Namespaces: Namespace, "", "namespaces", cluster_scoped, with_status;
    Nodes: Node, "", "nodes", cluster_scoped, with_status;
    Claims: PersistentVolumeClaim, "", "persistentvolumeclaims", with_status;
    Volumes: PersistentVolume, "", "persistentvolumes", cluster_scoped, with_status;
    Pods: Pod, "", "pods", with_status;
    Secrets: Secret, "", "secrets";
    ServiceAccounts: ServiceAccount, "", "serviceaccounts";
    Leases: Lease, "coordination.k8s.io", "leases";
    DaemonSets: DaemonSet, "apps", "daemonsets", with_status;
    Deployments: Deployment, "apps", "deployments", with_status;
    ReplicaSets: ReplicaSet, "apps", "replicasets", with_status;
    StatefulSets: StatefulSet, "apps", "statefulsets", with_status;
    Jobs: Job, "batch", "jobs", with_status;
    Definitions: CustomResourceDefinition, "apiextensions.k8s.io", "customresourcedefinitions", cluster_scoped, with_status;
    ClusterRoleBindings: ClusterRoleBinding, "rbac.authorization.k8s.io", "clusterrolebindings", cluster_scoped;
    ClusterRoles: ClusterRole, "rbac.authorization.k8s.io", "clusterroles", cluster_scoped;
    RoleBindings: RoleBinding, "rbac.authorization.k8s.io", "rolebindings";
    Roles: Role, "rbac.authorization.k8s.io", "roles";
    CsiDrivers: CSIDriver, "storage.k8s.io", "csidrivers", cluster_scoped;
    CsiNodes: CSINode, "storage.k8s.io", "csinodes", cluster_scoped;
    Capacities: CSIStorageCapacity, "storage.k8s.io", "csistoragecapacities";
    Classes: StorageClass, "storage.k8s.io", "storageclasses", cluster_scoped;
    Attachments: VolumeAttachment, "storage.k8s.io", "volumeattachments", cluster_scoped, with_status;
    AttributesClasses: VolumeAttributesClass, "storage.k8s.io", "volumeattributesclasses", cluster_scoped;
}
