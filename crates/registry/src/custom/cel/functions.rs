//! The functions and methods that rules can call. The parser asks [`is_function`] and [`is_method`], so that evaluation meets
//! no unknown name.

use jiff::{SignedDuration, Timestamp};
use regex::Regex;

use super::arithmetic::add;
use super::budget::EvaluationBudget;
use super::value::{CelResult, CelValue};

/// The type names that are values in an expression: `type(x) == int`.
pub(super) const TYPE_NAMES: [&str; 7] = ["bool", "int", "double", "string", "list", "map", "null_type"];

/// Steps that compiling a regular expression costs, per byte of the pattern.
const REGEX_STEPS_PER_BYTE: usize = 50;

pub(super) fn is_function(name: &str, arguments: usize) -> bool {
    matches!(
        (name, arguments),
        ("size" | "int" | "uint" | "double" | "string" | "bool" | "type" | "timestamp" | "duration" | "dyn", 1)
    )
}

pub(super) fn is_method(name: &str, arguments: usize) -> bool {
    matches!(
        (name, arguments),
        ("size" | "lowerAscii" | "upperAscii" | "trim" | "isSorted" | "sum" | "min" | "max", 0)
            | ("hasValue" | "value", 0)
            | ("startsWith" | "endsWith" | "contains" | "matches" | "find" | "findAll" | "charAt" | "orValue", 1)
            | ("split" | "substring" | "indexOf" | "lastIndexOf", 1 | 2)
            | ("replace", 2 | 3)
            | ("join", 0 | 1)
    )
}

fn no_such_overload(name: &str, arguments: &[&CelValue<'_>]) -> String {
    let types: Vec<&str> = arguments.iter().map(|a| a.type_name()).collect();
    format!("no such overload: {name}({})", types.join(", "))
}

fn int_value(number: usize) -> CelValue<'static> {
    CelValue::Int(i64::try_from(number).unwrap_or(i64::MAX))
}

/// Calls a function. All functions have one argument.
pub(super) fn call_function<'a>(name: &str, argument: CelValue<'a>) -> CelResult<'a> {
    let error = |what: &str| format!("{name}: {what}");
    Ok(match (name, argument) {
        ("dyn", any) => any,
        ("type", any) => CelValue::Type(any.type_name()),
        ("size", any) => int_value(any.size().ok_or_else(|| no_such_overload(name, &[&any]))?),
        ("int" | "uint", CelValue::Int(number)) => CelValue::Int(number),
        ("int" | "uint", CelValue::Double(number)) if number.abs() < 9.2e18 => CelValue::Int(number as i64),
        ("int" | "uint", CelValue::Double(_)) => return Err(error("overflow")),
        ("int" | "uint", CelValue::String(text)) => {
            CelValue::Int(text.parse().map_err(|_| error("that is no number"))?)
        }
        ("int", CelValue::Timestamp(time)) => CelValue::Int(time.as_second()),
        ("double", CelValue::Int(number)) => CelValue::Double(number as f64),
        ("double", CelValue::Double(number)) => CelValue::Double(number),
        ("double", CelValue::String(text)) => CelValue::Double(text.parse().map_err(|_| error("that is no number"))?),
        ("bool", CelValue::Bool(flag)) => CelValue::Bool(flag),
        ("bool", CelValue::String(text)) => CelValue::Bool(text.parse().map_err(|_| error("that is no bool"))?),
        ("string", CelValue::String(text)) => CelValue::String(text),
        ("string", CelValue::Int(number)) => CelValue::string(number.to_string()),
        ("string", CelValue::Double(number)) => CelValue::string(number.to_string()),
        ("string", CelValue::Bool(flag)) => CelValue::string(flag.to_string()),
        ("string", CelValue::Timestamp(time)) => CelValue::string(time.to_string()),
        ("timestamp", CelValue::Timestamp(time)) => CelValue::Timestamp(time),
        ("timestamp", CelValue::String(text)) => {
            CelValue::Timestamp(text.parse::<Timestamp>().map_err(|_| error("that is no time"))?)
        }
        ("duration", CelValue::Duration(duration)) => CelValue::Duration(duration),
        ("duration", CelValue::String(text)) => {
            CelValue::Duration(parse_duration(&text).ok_or_else(|| error("that is no duration"))?)
        }
        (_, other) => return Err(no_such_overload(name, &[&other])),
    })
}

/// Parses a Go duration: `1h30m`, `-1.5s`, `250ms`.
fn parse_duration(text: &str) -> Option<SignedDuration> {
    let (negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut nanos = 0f64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        let end = rest[digits..].find(|c: char| c.is_ascii_digit() || c == '.').map_or(rest.len(), |n| digits + n);
        nanos += number
            * match &rest[digits..end] {
                "ns" => 1.0,
                "us" | "µs" => 1e3,
                "ms" => 1e6,
                "s" => 1e9,
                "m" => 60e9,
                "h" => 3600e9,
                _ => return None,
            };
        rest = &rest[end..];
    }
    let nanos = if negative { -nanos } else { nanos };
    (text.len() > 1 && nanos.abs() < 9.2e18).then(|| SignedDuration::from_nanos(nanos as i64))
}

pub(super) fn call_method<'a>(
    receiver: CelValue<'a>,
    name: &str,
    arguments: &[CelValue<'a>],
    budget: &mut EvaluationBudget,
) -> CelResult<'a> {
    match (&receiver, name) {
        (_, "size") => return call_function("size", receiver),
        (CelValue::Optional(inner), _) => return call_optional_method(inner.as_deref(), name, arguments, &receiver),
        (CelValue::String(text), _) => {
            budget.spend(text.len() / 16)?;
            if let Some(result) = call_string_method(text, name, arguments, budget)? {
                return Ok(result);
            }
        }
        _ => {
            if let Some(elements) = receiver.elements() {
                budget.spend(elements.len())?;
                if let Some(result) = call_list_method(&elements, name, arguments)? {
                    return Ok(result);
                }
            }
        }
    }
    let all: Vec<&CelValue<'_>> = std::iter::once(&receiver).chain(arguments).collect();
    Err(no_such_overload(name, &all))
}

fn call_optional_method<'a>(
    inner: Option<&CelValue<'a>>,
    name: &str,
    arguments: &[CelValue<'a>],
    receiver: &CelValue<'a>,
) -> CelResult<'a> {
    match (name, inner, arguments) {
        ("hasValue", inner, []) => Ok(CelValue::Bool(inner.is_some())),
        ("value", Some(inner), []) => Ok(inner.clone()),
        ("value", None, []) => Err("an optional value has no value".into()),
        ("orValue", inner, [other]) => Ok(inner.unwrap_or(other).clone()),
        _ => Err(no_such_overload(name, &[receiver])),
    }
}

fn compile_regex(text: &str, budget: &mut EvaluationBudget) -> Result<Regex, String> {
    budget.spend(text.len() * REGEX_STEPS_PER_BYTE)?;
    Regex::new(text).map_err(|_| format!("the pattern {text:?} is not valid"))
}

/// Returns `None` if strings have no such method for these arguments.
fn call_string_method<'a>(
    text: &str,
    name: &str,
    arguments: &[CelValue<'a>],
    budget: &mut EvaluationBudget,
) -> Result<Option<CelValue<'a>>, String> {
    let to_index = |number: &i64| usize::try_from(*number).map_err(|_| format!("index {number} is out of range"));
    let chars = || text.chars().collect::<Vec<_>>();
    let slice = |from: usize, to: usize| {
        let all = chars();
        let part = all.get(from..to).ok_or_else(|| format!("index {to} is out of range"))?;
        Ok::<_, String>(CelValue::string(part.iter().collect::<String>()))
    };
    Ok(Some(match (name, arguments) {
        ("startsWith", [CelValue::String(other)]) => CelValue::Bool(text.starts_with(&**other)),
        ("endsWith", [CelValue::String(other)]) => CelValue::Bool(text.ends_with(&**other)),
        ("contains", [CelValue::String(other)]) => CelValue::Bool(text.contains(&**other)),
        ("matches", [CelValue::String(other)]) => CelValue::Bool(compile_regex(other, budget)?.is_match(text)),
        ("find", [CelValue::String(other)]) => {
            CelValue::string(compile_regex(other, budget)?.find(text).map_or("", |found| found.as_str()))
        }
        ("findAll", [CelValue::String(other)]) => CelValue::List(
            compile_regex(other, budget)?.find_iter(text).map(|found| CelValue::string(found.as_str())).collect(),
        ),
        ("lowerAscii", []) => CelValue::string(text.to_ascii_lowercase()),
        ("upperAscii", []) => CelValue::string(text.to_ascii_uppercase()),
        ("trim", []) => CelValue::string(text.trim()),
        ("split", [CelValue::String(by)]) => CelValue::List(text.split(&**by).map(CelValue::string).collect()),
        ("split", [CelValue::String(by), CelValue::Int(max)]) => match usize::try_from(*max) {
            Ok(max) => CelValue::List(text.splitn(max, &**by).map(CelValue::string).collect()),
            Err(_) => CelValue::List(text.split(&**by).map(CelValue::string).collect()),
        },
        ("replace", [CelValue::String(old), CelValue::String(new)]) => {
            replace_first(text, old, new, usize::MAX, budget)?
        }
        ("replace", [CelValue::String(old), CelValue::String(new), CelValue::Int(max)]) => {
            replace_first(text, old, new, usize::try_from(*max).unwrap_or(usize::MAX), budget)?
        }
        ("charAt", [CelValue::Int(at)]) if to_index(at)? == chars().len() => CelValue::string(""),
        ("charAt", [CelValue::Int(at)]) => slice(to_index(at)?, to_index(at)? + 1)?,
        ("substring", [CelValue::Int(from)]) => slice(to_index(from)?, chars().len())?,
        ("substring", [CelValue::Int(from), CelValue::Int(to)]) => slice(to_index(from)?, to_index(to)?)?,
        ("indexOf" | "lastIndexOf", [CelValue::String(other)]) => {
            let found = if name == "indexOf" { text.find(&**other) } else { text.rfind(&**other) };
            found.map_or(CelValue::Int(-1), |at| int_value(text[..at].chars().count()))
        }
        _ => return Ok(None),
    }))
}

/// Replaces the first `max` matches.
fn replace_first(text: &str, old: &str, new: &str, max: usize, budget: &mut EvaluationBudget) -> CelResult<'static> {
    let times = text.matches(old).count().min(max);
    // The result can be much longer than the inputs.
    budget.spend(times.saturating_mul(new.len()) / 16)?;
    Ok(CelValue::string(text.replacen(old, new, times)))
}

/// Returns `None` if lists have no such method for these arguments.
fn call_list_method<'a>(
    elements: &[CelValue<'a>],
    name: &str,
    arguments: &[CelValue<'a>],
) -> Result<Option<CelValue<'a>>, String> {
    use std::cmp::Ordering;
    let compare = |a: &CelValue<'a>, b: &CelValue<'a>| {
        a.compare(b).ok_or_else(|| format!("{} and {} cannot be compared", a.type_name(), b.type_name()))
    };
    Ok(Some(match (name, arguments) {
        ("isSorted", []) => {
            let mut sorted = true;
            for pair in elements.windows(2) {
                sorted &= compare(&pair[0], &pair[1])? != Ordering::Greater;
            }
            CelValue::Bool(sorted)
        }
        ("min" | "max", []) => {
            let better = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best = elements.first().ok_or_else(|| format!("{name}: the list is empty"))?;
            for element in elements {
                if compare(element, best)? == better {
                    best = element;
                }
            }
            best.clone()
        }
        ("sum", []) => {
            let mut sum = elements.first().cloned().unwrap_or(CelValue::Int(0));
            for element in elements.iter().skip(1) {
                sum = add(&sum, element)?;
            }
            sum
        }
        ("contains", [wanted]) => CelValue::Bool(elements.iter().any(|e| e.equals(wanted))),
        ("indexOf", [wanted]) => elements.iter().position(|e| e.equals(wanted)).map_or(CelValue::Int(-1), int_value),
        ("lastIndexOf", [wanted]) => {
            elements.iter().rposition(|e| e.equals(wanted)).map_or(CelValue::Int(-1), int_value)
        }
        ("join", [] | [CelValue::String(_)]) => {
            let by = if let [CelValue::String(by)] = arguments { by.as_ref() } else { "" };
            let mut texts = Vec::with_capacity(elements.len());
            for element in elements {
                let CelValue::String(text) = element else { return Err(no_such_overload(name, &[element])) };
                texts.push(text.as_ref());
            }
            CelValue::string(texts.join(by))
        }
        _ => return Ok(None),
    }))
}
