//! Evaluates expressions. Every node costs at least one step of the budget.

use std::borrow::Cow;
use std::cmp::Ordering;

use super::arithmetic::{add, calculate};
use super::budget::EvaluationBudget;
use super::functions;
use super::parse::{BinaryOperator, Expression, MacroKind, MemberAccess};
use super::value::{CelResult, CelValue};

pub(super) struct Evaluator<'a, 'b> {
    /// Variables and their values, the innermost last.
    pub(super) scope: Vec<(&'a str, CelValue<'a>)>,
    pub(super) budget: &'b mut EvaluationBudget,
}

impl<'a> Evaluator<'a, '_> {
    pub(super) fn evaluate(&mut self, expression: &'a Expression) -> CelResult<'a> {
        self.budget.spend(1)?;
        Ok(match expression {
            Expression::Null => CelValue::Null,
            Expression::Bool(value) => CelValue::Bool(*value),
            Expression::Int(number) => CelValue::Int(*number),
            Expression::Double(number) => CelValue::Double(*number),
            Expression::String(text) => CelValue::String(Cow::Borrowed(text)),
            Expression::Identifier(name) => self.resolve(name)?,
            Expression::List(items) => {
                CelValue::List(items.iter().map(|item| self.evaluate(item)).collect::<Result<_, _>>()?)
            }
            Expression::Map(entries) => {
                let mut map = Vec::with_capacity(entries.len());
                for (key, value) in entries {
                    map.push((self.evaluate(key)?, self.evaluate(value)?));
                }
                CelValue::Map(map)
            }
            Expression::Select { operand, field, access } => {
                let operand = self.evaluate(operand)?;
                self.access(operand, &CelValue::String(Cow::Borrowed(field)), *access)?
            }
            Expression::Has { operand, field } => {
                let operand = self.evaluate(operand)?;
                match operand.get(&CelValue::String(Cow::Borrowed(field))) {
                    Some(found) => CelValue::Bool(found.is_some()),
                    None => return Err(format!("{} has no fields", operand.type_name())),
                }
            }
            Expression::Index { operand, key, access } => {
                let (operand, key) = (self.evaluate(operand)?, self.evaluate(key)?);
                self.access(operand, &key, *access)?
            }
            Expression::Call { name, arguments } => {
                let mut values = self.evaluate_all(arguments)?;
                functions::call_function(name, values.remove(0))?
            }
            Expression::Method { operand, name, arguments } => {
                let operand = self.evaluate(operand)?;
                let arguments = self.evaluate_all(arguments)?;
                functions::call_method(operand, name, &arguments, self.budget)?
            }
            Expression::Macro { kind, range, variable, body } => self.evaluate_macro(*kind, range, variable, body)?,
            Expression::Not(inner) => CelValue::Bool(!self.evaluate_bool(inner)?),
            Expression::Negate(inner) => match self.evaluate(inner)? {
                CelValue::Int(number) => CelValue::Int(number.checked_neg().ok_or("integer overflow")?),
                CelValue::Double(number) => CelValue::Double(-number),
                other => return Err(format!("no such overload: -{}", other.type_name())),
            },
            Expression::And(left, right) => CelValue::Bool(self.evaluate_logical(left, right, false)?),
            Expression::Or(left, right) => CelValue::Bool(self.evaluate_logical(left, right, true)?),
            Expression::Conditional(condition, then, other) => match self.evaluate_bool(condition)? {
                true => self.evaluate(then)?,
                false => self.evaluate(other)?,
            },
            Expression::Binary(operator, left, right) => {
                let (left, right) = (self.evaluate(left)?, self.evaluate(right)?);
                self.evaluate_binary(*operator, &left, &right)?
            }
        })
    }

    fn evaluate_all(&mut self, expressions: &'a [Expression]) -> Result<Vec<CelValue<'a>>, String> {
        expressions.iter().map(|e| self.evaluate(e)).collect()
    }

    /// The value of a variable or a type name.
    fn resolve(&self, name: &'a str) -> CelResult<'a> {
        if let Some((_, value)) = self.scope.iter().rev().find(|(variable, _)| *variable == name) {
            return Ok(value.clone());
        }
        match functions::TYPE_NAMES.iter().find(|type_name| **type_name == name) {
            Some(type_name) => Ok(CelValue::Type(type_name)),
            None => Err(format!("{name} has no value here")),
        }
    }

    fn evaluate_bool(&mut self, expression: &'a Expression) -> Result<bool, String> {
        match self.evaluate(expression)? {
            CelValue::Bool(value) => Ok(value),
            other => Err(format!("{} is no bool", other.type_name())),
        }
    }

    /// `&&` (decided by false) and `||` (decided by true). If one side decides, an error of the other is ignored, whichever
    /// comes first.
    fn evaluate_logical(
        &mut self,
        left: &'a Expression,
        right: &'a Expression,
        decisive: bool,
    ) -> Result<bool, String> {
        let left = self.evaluate_bool(left);
        if left == Ok(decisive) {
            return Ok(decisive);
        }
        let right = self.evaluate_bool(right);
        if right == Ok(decisive) {
            return Ok(decisive);
        }
        left.and(right)
    }

    /// The value of a key of a map or an index of a list.
    fn access(&mut self, operand: CelValue<'a>, key: &CelValue<'a>, access: MemberAccess) -> CelResult<'a> {
        let (operand, access) = match operand {
            // The members of an optional value are optional, too.
            CelValue::Optional(None) => return Ok(CelValue::Optional(None)),
            CelValue::Optional(Some(inner)) => (*inner, MemberAccess::Optional),
            other => (other, access),
        };
        let found = match (operand.get(key), key) {
            (Some(found), _) => found.ok_or_else(|| format!("no such key: {}", format_key(key))),
            (None, CelValue::Int(index)) => {
                let elements = operand.elements().ok_or_else(|| format!("{} has no elements", operand.type_name()))?;
                self.budget.spend(1)?;
                let found = usize::try_from(*index).ok().and_then(|index| elements.get(index).cloned());
                found.ok_or_else(|| format!("index {index} is out of range"))
            }
            (None, _) => {
                return Err(format!("no such key: {} in a value of type {}", format_key(key), operand.type_name()));
            }
        };
        match access {
            MemberAccess::Plain => found,
            MemberAccess::Optional => Ok(CelValue::Optional(found.ok().map(Box::new))),
        }
    }

    fn evaluate_macro(
        &mut self,
        kind: MacroKind,
        range: &'a Expression,
        variable: &'a str,
        body: &'a [Expression],
    ) -> CelResult<'a> {
        let range = self.evaluate(range)?;
        let members = range.iteration_range().ok_or_else(|| format!("{} has no elements", range.type_name()))?;
        let (mut results, mut matches, mut first_error) = (Vec::new(), 0usize, None);
        for member in members {
            self.scope.push((variable, member.clone()));
            let outcome = self.evaluate_macro_body(kind, member, body, &mut results);
            self.scope.pop();
            match (kind, outcome) {
                (MacroKind::All, Ok(false)) => return Ok(CelValue::Bool(false)),
                (MacroKind::Exists, Ok(true)) => return Ok(CelValue::Bool(true)),
                (_, Ok(holds)) => matches += usize::from(holds),
                // Another element may still decide the result.
                (MacroKind::All | MacroKind::Exists, Err(error)) => drop(first_error.get_or_insert(error)),
                (_, Err(error)) => return Err(error),
            }
        }
        match (kind, first_error) {
            (MacroKind::All | MacroKind::Exists, Some(error)) => Err(error),
            (MacroKind::All, None) => Ok(CelValue::Bool(true)),
            (MacroKind::Exists, None) => Ok(CelValue::Bool(false)),
            (MacroKind::ExistsOne, _) => Ok(CelValue::Bool(matches == 1)),
            (MacroKind::Map | MacroKind::Filter, _) => Ok(CelValue::List(results)),
        }
    }

    /// Evaluates the body for one member. Returns whether the condition holds; `map` and `filter` append to `results`.
    fn evaluate_macro_body(
        &mut self,
        kind: MacroKind,
        member: CelValue<'a>,
        body: &'a [Expression],
        results: &mut Vec<CelValue<'a>>,
    ) -> Result<bool, String> {
        match (kind, body) {
            (MacroKind::Map, [result]) => {
                results.push(self.evaluate(result)?);
                Ok(true)
            }
            (MacroKind::Map, [condition, result]) => {
                if self.evaluate_bool(condition)? {
                    results.push(self.evaluate(result)?);
                }
                Ok(true)
            }
            (_, [condition, ..]) => {
                let holds = self.evaluate_bool(condition)?;
                if holds && kind == MacroKind::Filter {
                    results.push(member);
                }
                Ok(holds)
            }
            (_, []) => Err("nothing to evaluate".into()),
        }
    }

    fn evaluate_binary(
        &mut self,
        operator: BinaryOperator,
        left: &CelValue<'a>,
        right: &CelValue<'a>,
    ) -> CelResult<'a> {
        let size = |value: &CelValue<'_>| value.size().unwrap_or(0);
        self.budget.spend(size(left).min(size(right)) / 4)?;
        let compare = || {
            let error = || format!("{} and {} cannot be compared", left.type_name(), right.type_name());
            left.compare(right).ok_or_else(error)
        };
        Ok(match operator {
            BinaryOperator::Equal => CelValue::Bool(left.equals(right)),
            BinaryOperator::NotEqual => CelValue::Bool(!left.equals(right)),
            BinaryOperator::Less => CelValue::Bool(compare()? == Ordering::Less),
            BinaryOperator::LessOrEqual => CelValue::Bool(compare()? != Ordering::Greater),
            BinaryOperator::Greater => CelValue::Bool(compare()? == Ordering::Greater),
            BinaryOperator::GreaterOrEqual => CelValue::Bool(compare()? != Ordering::Less),
            BinaryOperator::In => {
                self.budget.spend(size(right))?;
                match (right.get(left), right.elements()) {
                    (Some(found), _) => CelValue::Bool(found.is_some()),
                    (None, Some(elements)) => CelValue::Bool(elements.iter().any(|e| e.equals(left))),
                    (None, None) => return Err(format!("no such overload: in {}", right.type_name())),
                }
            }
            BinaryOperator::Add => {
                self.budget.spend((size(left) + size(right)) / 4)?;
                add(left, right)?
            }
            BinaryOperator::Subtract
            | BinaryOperator::Multiply
            | BinaryOperator::Divide
            | BinaryOperator::Remainder => calculate(operator, left, right)?,
        })
    }
}

fn format_key(key: &CelValue<'_>) -> String {
    match key {
        CelValue::String(text) => text.to_string(),
        CelValue::Int(number) => number.to_string(),
        other => other.type_name().to_owned(),
    }
}
