//! Limits the work of rule evaluation.

/// Steps that all rules of one write may take together. A step is about one access to a value.
const MAX_EVALUATION_STEPS: u64 = 5_000_000;

/// The steps that are left.
pub(in crate::custom) struct EvaluationBudget(u64);

impl Default for EvaluationBudget {
    fn default() -> Self {
        Self(MAX_EVALUATION_STEPS)
    }
}

impl EvaluationBudget {
    /// Subtracts `steps`. Fails, without changing the budget, if fewer are left.
    pub(super) fn spend(&mut self, steps: usize) -> Result<(), String> {
        self.0 = self.0.checked_sub(steps as u64).ok_or("the rule does too much: its budget is used up")?;
        Ok(())
    }
}
