//! One compiled rule of `x-kubernetes-validations`, applied to one value. `rule_validation` applies rules to objects.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::ValidationRule;
use serde_json::Value;

use super::cel::{CelProgram, EvaluationBudget, OldSelf};

#[derive(Debug)]
pub(super) struct CompiledRule {
    program: CelProgram,
    message: String,
    message_expression: Option<CelProgram>,
    pub(super) reason: String,
    /// `fieldPath`: the path below the value at which the error is reported. It begins with a dot or is empty.
    pub(super) field_path: String,
    optional_old_self: bool,
}

impl CompiledRule {
    /// Returns `None` for a rule that does not compile. Validation refuses definitions with such a rule.
    pub(super) fn compile(rule: &ValidationRule) -> Option<Self> {
        let message = rule.message.clone().filter(|m| !m.is_empty());
        Some(Self {
            program: CelProgram::compile(&rule.rule).ok()?,
            message: message.unwrap_or_else(|| format!("failed rule: {}", rule.rule)),
            message_expression: rule.message_expression.as_deref().and_then(|e| CelProgram::compile(e).ok()),
            reason: rule.reason.clone().unwrap_or_default(),
            field_path: rule.field_path.clone().unwrap_or_default(),
            optional_old_self: rule.optional_old_self == Some(true),
        })
    }

    /// Returns the error message if the value violates the rule, or if evaluation fails.
    pub(super) fn violation(
        &self,
        value: &Value,
        old: Option<&Value>,
        budget: &mut EvaluationBudget,
    ) -> Option<String> {
        let old_self = if self.optional_old_self { OldSelf::Optional(old) } else { OldSelf::Plain(old) };
        // A transition rule (one that uses oldSelf) applies only to updates of an existing value.
        if self.program.uses_old_self && !self.optional_old_self && old.is_none() {
            return None;
        }
        match self.program.holds(old_self, value, budget) {
            Ok(true) => None,
            Ok(false) => {
                let expression = self.message_expression.as_ref();
                let message = expression.and_then(|expression| expression.message(old_self, value, budget));
                Some(message.unwrap_or_else(|| self.message.clone()))
            }
            Err(why) => Some(format!("rule evaluation error: {why}")),
        }
    }
}
