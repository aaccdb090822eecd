//! What an expression comes to.

use std::borrow::Cow;
use std::cmp::Ordering;

use super::Budget;
use super::functions;
use super::parse::{Access, Each, Expression, Operator};
use super::value::Datum;

type Result<'a> = std::result::Result<Datum<'a>, String>;

pub(super) struct Evaluation<'a, 'b> {
    /// What names stand for, the innermost last.
    pub(super) scope: Vec<(&'a str, Datum<'a>)>,
    pub(super) budget: &'b mut Budget,
}

impl<'a> Evaluation<'a, '_> {
    pub(super) fn of(&mut self, expression: &'a Expression) -> Result<'a> {
        self.budget.spend(1)?;
        Ok(match expression {
            Expression::Null => Datum::Null,
            Expression::Flag(flag) => Datum::Flag(*flag),
            Expression::Int(number) => Datum::Int(*number),
            Expression::Double(number) => Datum::Double(*number),
            Expression::Text(text) => Datum::Text(Cow::Borrowed(text)),
            Expression::Name(name) => self.named(name)?,
            Expression::List(items) => {
                Datum::List(items.iter().map(|item| self.of(item)).collect::<std::result::Result<_, _>>()?)
            }
            Expression::Map(entries) => {
                let mut map = Vec::with_capacity(entries.len());
                for (key, value) in entries {
                    map.push((self.of(key)?, self.of(value)?));
                }
                Datum::Map(map)
            }
            Expression::Select { of, field, access } => {
                let of = self.of(of)?;
                self.member(of, &Datum::Text(Cow::Borrowed(field)), *access)?
            }
            Expression::Has { of, field } => {
                let of = self.of(of)?;
                match of.get(&Datum::Text(Cow::Borrowed(field))) {
                    Some(found) => Datum::Flag(found.is_some()),
                    None => return Err(format!("{} has no fields", of.type_name())),
                }
            }
            Expression::Index { of, key, access } => {
                let (of, key) = (self.of(of)?, self.of(key)?);
                self.member(of, &key, *access)?
            }
            Expression::Call { name, arguments } => {
                let mut values = self.all(arguments)?;
                functions::call(name, values.remove(0))?
            }
            Expression::Method { of, name, arguments } => {
                let of = self.of(of)?;
                let arguments = self.all(arguments)?;
                functions::method(of, name, &arguments, self.budget)?
            }
            Expression::Each { what, over, variable, body } => self.each(*what, over, variable, body)?,
            Expression::Not(inner) => Datum::Flag(!self.flag(inner)?),
            Expression::Negative(inner) => match self.of(inner)? {
                Datum::Int(number) => Datum::Int(number.checked_neg().ok_or("integer overflow")?),
                Datum::Double(number) => Datum::Double(-number),
                other => return Err(format!("no such overload: -{}", other.type_name())),
            },
            Expression::And(left, right) => Datum::Flag(self.decided(left, right, false)?),
            Expression::Or(left, right) => Datum::Flag(self.decided(left, right, true)?),
            Expression::Choice(condition, then, other) => match self.flag(condition)? {
                true => self.of(then)?,
                false => self.of(other)?,
            },
            Expression::Binary(operator, left, right) => {
                let (left, right) = (self.of(left)?, self.of(right)?);
                self.binary(*operator, &left, &right)?
            }
        })
    }

    fn all(&mut self, expressions: &'a [Expression]) -> std::result::Result<Vec<Datum<'a>>, String> {
        expressions.iter().map(|e| self.of(e)).collect()
    }

    fn named(&self, name: &'a str) -> Result<'a> {
        if let Some((_, value)) = self.scope.iter().rev().find(|(bound, _)| *bound == name) {
            return Ok(value.clone());
        }
        match functions::TYPES.iter().find(|kind| **kind == name) {
            Some(kind) => Ok(Datum::Type(kind)),
            None => Err(format!("{name} has no value here")),
        }
    }

    fn flag(&mut self, expression: &'a Expression) -> std::result::Result<bool, String> {
        match self.of(expression)? {
            Datum::Flag(flag) => Ok(flag),
            other => Err(format!("{} is no bool", other.type_name())),
        }
    }

    /// `&&` and `||`: a side that decides does so whatever becomes of the other.
    fn decided(
        &mut self,
        left: &'a Expression,
        right: &'a Expression,
        decisive: bool,
    ) -> std::result::Result<bool, String> {
        let left = self.flag(left);
        if left == Ok(decisive) {
            return Ok(decisive);
        }
        let right = self.flag(right);
        if right == Ok(decisive) {
            return Ok(decisive);
        }
        left.and(right)
    }

    fn member(&mut self, of: Datum<'a>, key: &Datum<'a>, access: Access) -> Result<'a> {
        let (of, access) = match of {
            // Through an optional value everything is optional.
            Datum::Optional(None) => return Ok(Datum::Optional(None)),
            Datum::Optional(Some(inner)) => (*inner, Access::Optional),
            other => (other, access),
        };
        let found = match (of.get(key), key) {
            (Some(found), _) => found.ok_or_else(|| format!("no such key: {}", shown(key))),
            (None, Datum::Int(at)) => {
                let elements = of.elements().ok_or_else(|| format!("{} has no elements", of.type_name()))?;
                self.budget.spend(1)?;
                let found = usize::try_from(*at).ok().and_then(|at| elements.get(at).cloned());
                found.ok_or_else(|| format!("index {at} is out of range"))
            }
            (None, _) => return Err(format!("no such key: {} in a value of type {}", shown(key), of.type_name())),
        };
        match access {
            Access::Plain => found,
            Access::Optional => Ok(Datum::Optional(found.ok().map(Box::new))),
        }
    }

    fn each(&mut self, what: Each, over: &'a Expression, variable: &'a str, body: &'a [Expression]) -> Result<'a> {
        let over = self.of(over)?;
        let members = over.members().ok_or_else(|| format!("{} has no elements", over.type_name()))?;
        let (mut kept, mut met, mut failed) = (Vec::new(), 0usize, None);
        for member in members {
            self.scope.push((variable, member.clone()));
            let outcome = self.one(what, member, body, &mut kept);
            self.scope.pop();
            match (what, outcome) {
                (Each::All, Ok(false)) => return Ok(Datum::Flag(false)),
                (Each::Exists, Ok(true)) => return Ok(Datum::Flag(true)),
                (_, Ok(held)) => met += usize::from(held),
                // Another element may still decide.
                (Each::All | Each::Exists, Err(error)) => drop(failed.get_or_insert(error)),
                (_, Err(error)) => return Err(error),
            }
        }
        match (what, failed) {
            (Each::All | Each::Exists, Some(error)) => Err(error),
            (Each::All, None) => Ok(Datum::Flag(true)),
            (Each::Exists, None) => Ok(Datum::Flag(false)),
            (Each::ExistsOne, _) => Ok(Datum::Flag(met == 1)),
            (Each::Map | Each::Filter, _) => Ok(Datum::List(kept)),
        }
    }

    fn one(
        &mut self,
        what: Each,
        member: Datum<'a>,
        body: &'a [Expression],
        kept: &mut Vec<Datum<'a>>,
    ) -> std::result::Result<bool, String> {
        match (what, body) {
            (Each::Map, [make]) => {
                kept.push(self.of(make)?);
                Ok(true)
            }
            (Each::Map, [condition, make]) => {
                if self.flag(condition)? {
                    kept.push(self.of(make)?);
                }
                Ok(true)
            }
            (_, [condition, ..]) => {
                let held = self.flag(condition)?;
                if held && what == Each::Filter {
                    kept.push(member);
                }
                Ok(held)
            }
            (_, []) => Err("nothing to evaluate".into()),
        }
    }

    fn binary(&mut self, operator: Operator, left: &Datum<'a>, right: &Datum<'a>) -> Result<'a> {
        let size = |datum: &Datum<'_>| datum.size().unwrap_or(0);
        self.budget.spend(size(left).min(size(right)) / 4)?;
        let ordered = || {
            let unfit = || format!("{} and {} cannot be compared", left.type_name(), right.type_name());
            left.order(right).ok_or_else(unfit)
        };
        Ok(match operator {
            Operator::Equal => Datum::Flag(left.equals(right)),
            Operator::Unequal => Datum::Flag(!left.equals(right)),
            Operator::Less => Datum::Flag(ordered()? == Ordering::Less),
            Operator::AtMost => Datum::Flag(ordered()? != Ordering::Greater),
            Operator::Greater => Datum::Flag(ordered()? == Ordering::Greater),
            Operator::AtLeast => Datum::Flag(ordered()? != Ordering::Less),
            Operator::In => {
                self.budget.spend(size(right))?;
                match (right.get(left), right.elements()) {
                    (Some(found), _) => Datum::Flag(found.is_some()),
                    (None, Some(elements)) => Datum::Flag(elements.iter().any(|e| e.equals(left))),
                    (None, None) => return Err(format!("no such overload: in {}", right.type_name())),
                }
            }
            Operator::Add => {
                self.budget.spend((size(left) + size(right)) / 4)?;
                add(left, right)?
            }
            Operator::Subtract | Operator::Multiply | Operator::Divide | Operator::Remainder => {
                calculate(operator, left, right)?
            }
        })
    }
}

fn shown(key: &Datum<'_>) -> String {
    match key {
        Datum::Text(text) => text.to_string(),
        Datum::Int(number) => number.to_string(),
        other => other.type_name().to_owned(),
    }
}

pub(super) fn add<'a>(left: &Datum<'a>, right: &Datum<'a>) -> Result<'a> {
    Ok(match (left, right) {
        (Datum::Int(a), Datum::Int(b)) => Datum::Int(a.checked_add(*b).ok_or("integer overflow")?),
        (Datum::Double(a), Datum::Double(b)) => Datum::Double(a + b),
        (Datum::Text(a), Datum::Text(b)) => Datum::text(format!("{a}{b}")),
        (Datum::Time(time), Datum::Duration(duration)) | (Datum::Duration(duration), Datum::Time(time)) => {
            Datum::Time(time.checked_add(*duration).map_err(|_| "time overflow")?)
        }
        (Datum::Duration(a), Datum::Duration(b)) => Datum::Duration(a.checked_add(*b).ok_or("duration overflow")?),
        _ => match (left.elements(), right.elements()) {
            (Some(mut elements), Some(more)) => {
                elements.extend(more);
                Datum::List(elements)
            }
            _ => return Err(format!("no such overload: {} + {}", left.type_name(), right.type_name())),
        },
    })
}

fn calculate(operator: Operator, left: &Datum<'_>, right: &Datum<'_>) -> Result<'static> {
    let overflow = "integer overflow";
    Ok(match (operator, left, right) {
        (Operator::Divide | Operator::Remainder, Datum::Int(_), Datum::Int(0)) => return Err("divide by zero".into()),
        (Operator::Subtract, Datum::Int(a), Datum::Int(b)) => Datum::Int(a.checked_sub(*b).ok_or(overflow)?),
        (Operator::Multiply, Datum::Int(a), Datum::Int(b)) => Datum::Int(a.checked_mul(*b).ok_or(overflow)?),
        (Operator::Divide, Datum::Int(a), Datum::Int(b)) => Datum::Int(a.checked_div(*b).ok_or(overflow)?),
        (Operator::Remainder, Datum::Int(a), Datum::Int(b)) => Datum::Int(a.checked_rem(*b).ok_or(overflow)?),
        (Operator::Subtract, Datum::Double(a), Datum::Double(b)) => Datum::Double(a - b),
        (Operator::Multiply, Datum::Double(a), Datum::Double(b)) => Datum::Double(a * b),
        (Operator::Divide, Datum::Double(a), Datum::Double(b)) => Datum::Double(a / b),
        (Operator::Subtract, Datum::Time(a), Datum::Time(b)) => Datum::Duration(a.duration_since(*b)),
        (Operator::Subtract, Datum::Duration(a), Datum::Duration(b)) => {
            Datum::Duration(a.checked_sub(*b).ok_or("duration overflow")?)
        }
        _ => return Err(format!("no such overload: {} and {}", left.type_name(), right.type_name())),
    })
}
