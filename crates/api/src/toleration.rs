//! Whether tolerations cover a taint.

use k8s_openapi::api::core::v1::{Taint, Toleration};

/// Returns true if any of the tolerations covers the taint. An empty effect or key covers every effect or key. An unknown
/// operator covers nothing.
pub fn tolerates(tolerations: &[Toleration], taint: &Taint) -> bool {
    tolerations.iter().any(|t| {
        let effect = t.effect.as_deref().unwrap_or_default();
        let key = t.key.as_deref().unwrap_or_default();
        (effect.is_empty() || effect == taint.effect)
            && (key.is_empty() || key == taint.key)
            && match t.operator.as_deref().unwrap_or_default() {
                "Exists" => true,
                "" | "Equal" => t.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default(),
                _ => false,
            }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_toleration_covers_what_it_names() {
        let taint: Taint = serde_json::from_value(json!({"key": "k", "value": "v", "effect": "NoSchedule"})).unwrap();
        for (case, toleration, want) in [
            ("everything", json!({"operator": "Exists"}), true),
            ("the key", json!({"key": "k", "operator": "Exists"}), true),
            ("the value", json!({"key": "k", "value": "v"}), true),
            ("another value", json!({"key": "k", "value": "w"}), false),
            ("another key", json!({"key": "l", "operator": "Exists"}), false),
            ("the effect", json!({"key": "k", "operator": "Exists", "effect": "NoSchedule"}), true),
            ("another effect", json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}), false),
        ] {
            let toleration: Toleration = serde_json::from_value(toleration).unwrap();
            assert_eq!(tolerates(&[toleration], &taint), want, "{case}");
        }
    }
}
