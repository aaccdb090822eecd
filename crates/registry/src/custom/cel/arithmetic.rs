//! The operators `+`, `-`, `*`, `/` and `%`. Integer, time and duration overflow is an error, as the language demands.

use super::parse::BinaryOperator;
use super::value::{CelResult, CelValue};

/// Numbers, strings, lists, timestamps and durations.
pub(super) fn add<'a>(left: &CelValue<'a>, right: &CelValue<'a>) -> CelResult<'a> {
    Ok(match (left, right) {
        (CelValue::Int(a), CelValue::Int(b)) => CelValue::Int(a.checked_add(*b).ok_or("integer overflow")?),
        (CelValue::Double(a), CelValue::Double(b)) => CelValue::Double(a + b),
        (CelValue::String(a), CelValue::String(b)) => CelValue::string(format!("{a}{b}")),
        (CelValue::Timestamp(time), CelValue::Duration(duration))
        | (CelValue::Duration(duration), CelValue::Timestamp(time)) => {
            CelValue::Timestamp(time.checked_add(*duration).map_err(|_| "time overflow")?)
        }
        (CelValue::Duration(a), CelValue::Duration(b)) => {
            CelValue::Duration(a.checked_add(*b).ok_or("duration overflow")?)
        }
        _ => match (left.elements(), right.elements()) {
            (Some(mut elements), Some(more)) => {
                elements.extend(more);
                CelValue::List(elements)
            }
            _ => return Err(format!("no such overload: {} + {}", left.type_name(), right.type_name())),
        },
    })
}

/// Every operator of this file except `+`, see [`add`].
pub(super) fn calculate(operator: BinaryOperator, left: &CelValue<'_>, right: &CelValue<'_>) -> CelResult<'static> {
    let overflow = "integer overflow";
    Ok(match (operator, left, right) {
        (BinaryOperator::Divide | BinaryOperator::Remainder, CelValue::Int(_), CelValue::Int(0)) => {
            return Err("divide by zero".into());
        }
        (BinaryOperator::Subtract, CelValue::Int(a), CelValue::Int(b)) => {
            CelValue::Int(a.checked_sub(*b).ok_or(overflow)?)
        }
        (BinaryOperator::Multiply, CelValue::Int(a), CelValue::Int(b)) => {
            CelValue::Int(a.checked_mul(*b).ok_or(overflow)?)
        }
        (BinaryOperator::Divide, CelValue::Int(a), CelValue::Int(b)) => {
            CelValue::Int(a.checked_div(*b).ok_or(overflow)?)
        }
        (BinaryOperator::Remainder, CelValue::Int(a), CelValue::Int(b)) => {
            CelValue::Int(a.checked_rem(*b).ok_or(overflow)?)
        }
        (BinaryOperator::Subtract, CelValue::Double(a), CelValue::Double(b)) => CelValue::Double(a - b),
        (BinaryOperator::Multiply, CelValue::Double(a), CelValue::Double(b)) => CelValue::Double(a * b),
        (BinaryOperator::Divide, CelValue::Double(a), CelValue::Double(b)) => CelValue::Double(a / b),
        (BinaryOperator::Subtract, CelValue::Timestamp(a), CelValue::Timestamp(b)) => {
            CelValue::Duration(a.duration_since(*b))
        }
        (BinaryOperator::Subtract, CelValue::Duration(a), CelValue::Duration(b)) => {
            CelValue::Duration(a.checked_sub(*b).ok_or("duration overflow")?)
        }
        _ => return Err(format!("no such overload: {} and {}", left.type_name(), right.type_name())),
    })
}
