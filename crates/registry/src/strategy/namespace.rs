//! Strategy of Namespace (v1). After creation, `spec.finalizers` changes only through the `finalize` subresource.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, NamespaceStatus};
use serde_json::Value;

use cleat_apimachinery::column::{self, AGE, Column, NAME};
use cleat_apimachinery::descriptor::Descriptor;
use cleat_apimachinery::kind::Strategy;
use cleat_apimachinery::names::NameRule;

pub(super) struct NamespaceStrategy;

const KUBERNETES_FINALIZER: &str = "kubernetes";
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

impl Strategy for NamespaceStrategy {
    type Object = Namespace;

    fn descriptor() -> Descriptor {
        Descriptor::new("", "v1", "Namespace", "namespaces").short_names(&["ns"]).cluster_scoped().with_status()
    }

    fn name_rule() -> NameRule {
        NameRule::Label
    }

    fn set_defaults(namespace: &mut Namespace) {
        if let Some(name) = namespace.metadata.name.clone() {
            namespace.metadata.labels.get_or_insert_default().insert(NAME_LABEL.into(), name);
        }
        namespace.status.get_or_insert_default().phase.get_or_insert_with(|| "Active".into());
    }

    fn prepare_create(namespace: &mut Namespace, _now: Timestamp) {
        namespace.status = Some(NamespaceStatus { phase: Some("Active".into()), ..Default::default() });
        let finalizers = namespace.spec.get_or_insert_default().finalizers.get_or_insert_default();
        if !finalizers.iter().any(|f| f == KUBERNETES_FINALIZER) {
            finalizers.push(KUBERNETES_FINALIZER.into());
        }
    }

    fn prepare_update(new: &mut Namespace, old: &Namespace) {
        new.spec = old.spec.clone();
        new.status = old.status.clone();
    }

    fn prepare_status(new: &mut Namespace, old: &Namespace, _now: Timestamp) {
        new.spec = old.spec.clone();
    }

    fn is_deletion_blocked(namespace: &Namespace) -> bool {
        namespace.spec.as_ref().and_then(|s| s.finalizers.as_ref()).is_some_and(|f| !f.is_empty())
    }

    fn selectable_fields() -> &'static [&'static str] {
        &["status.phase"]
    }

    fn selectable_value(namespace: &Namespace, _name: &str) -> String {
        namespace.status.as_ref().and_then(|s| s.phase.clone()).unwrap_or_default()
    }

    fn columns() -> &'static [Column] {
        const COLUMNS: &[Column] = &[NAME, Column::text("Status", "Phase of the namespace."), AGE];
        COLUMNS
    }

    fn cells(namespace: &Namespace, now: Timestamp) -> Vec<Value> {
        let phase = namespace.status.as_ref().and_then(|s| s.phase.clone()).unwrap_or_default();
        vec![column::name(&namespace.metadata), phase.into(), column::age(&namespace.metadata, now)]
    }
}
