//! The functions that rules can call.

use jiff::{SignedDuration, Timestamp};
use regex::Regex;

use super::Budget;
use super::value::Datum;

/// Names of types, as `type(x) == int` uses them.
pub(super) const TYPES: [&str; 7] = ["bool", "int", "double", "string", "list", "map", "null_type"];

/// What compiling a pattern costs, for each of its characters.
const PATTERN: usize = 50;

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

type Result<'a> = std::result::Result<Datum<'a>, String>;

fn unfit(name: &str, arguments: &[&Datum<'_>]) -> String {
    let types: Vec<&str> = arguments.iter().map(|a| a.type_name()).collect();
    format!("no such overload: {name}({})", types.join(", "))
}

fn int(number: usize) -> Datum<'static> {
    Datum::Int(i64::try_from(number).unwrap_or(i64::MAX))
}

pub(super) fn call<'a>(name: &str, argument: Datum<'a>) -> Result<'a> {
    let bad = |what: &str| format!("{name}: {what}");
    Ok(match (name, argument) {
        ("dyn", any) => any,
        ("type", any) => Datum::Type(any.type_name()),
        ("size", any) => int(any.size().ok_or_else(|| unfit(name, &[&any]))?),
        ("int" | "uint", Datum::Int(number)) => Datum::Int(number),
        ("int" | "uint", Datum::Double(number)) if number.abs() < 9.2e18 => Datum::Int(number as i64),
        ("int" | "uint", Datum::Double(_)) => return Err(bad("overflow")),
        ("int" | "uint", Datum::Text(text)) => Datum::Int(text.parse().map_err(|_| bad("that is no number"))?),
        ("int", Datum::Time(time)) => Datum::Int(time.as_second()),
        ("double", Datum::Int(number)) => Datum::Double(number as f64),
        ("double", Datum::Double(number)) => Datum::Double(number),
        ("double", Datum::Text(text)) => Datum::Double(text.parse().map_err(|_| bad("that is no number"))?),
        ("bool", Datum::Flag(flag)) => Datum::Flag(flag),
        ("bool", Datum::Text(text)) => Datum::Flag(text.parse().map_err(|_| bad("that is no bool"))?),
        ("string", Datum::Text(text)) => Datum::Text(text),
        ("string", Datum::Int(number)) => Datum::text(number.to_string()),
        ("string", Datum::Double(number)) => Datum::text(number.to_string()),
        ("string", Datum::Flag(flag)) => Datum::text(flag.to_string()),
        ("string", Datum::Time(time)) => Datum::text(time.to_string()),
        ("timestamp", Datum::Time(time)) => Datum::Time(time),
        ("timestamp", Datum::Text(text)) => Datum::Time(text.parse::<Timestamp>().map_err(|_| bad("that is no time"))?),
        ("duration", Datum::Duration(duration)) => Datum::Duration(duration),
        ("duration", Datum::Text(text)) => Datum::Duration(duration(&text).ok_or_else(|| bad("that is no duration"))?),
        (_, other) => return Err(unfit(name, &[&other])),
    })
}

/// Numbers with units after each other: `1h30m`, `-1.5s`, `250ms`.
fn duration(text: &str) -> Option<SignedDuration> {
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

pub(super) fn method<'a>(of: Datum<'a>, name: &str, arguments: &[Datum<'a>], budget: &mut Budget) -> Result<'a> {
    match (&of, name) {
        (_, "size") => return call("size", of),
        (Datum::Optional(inner), _) => return optional(inner.as_deref(), name, arguments, &of),
        (Datum::Text(text), _) => {
            budget.spend(text.len() / 16)?;
            if let Some(result) = of_text(text, name, arguments, budget)? {
                return Ok(result);
            }
        }
        _ => {
            if let Some(elements) = of.elements() {
                budget.spend(elements.len())?;
                if let Some(result) = of_list(&elements, name, arguments)? {
                    return Ok(result);
                }
            }
        }
    }
    let all: Vec<&Datum<'_>> = std::iter::once(&of).chain(arguments).collect();
    Err(unfit(name, &all))
}

fn optional<'a>(inner: Option<&Datum<'a>>, name: &str, arguments: &[Datum<'a>], of: &Datum<'a>) -> Result<'a> {
    match (name, inner, arguments) {
        ("hasValue", inner, []) => Ok(Datum::Flag(inner.is_some())),
        ("value", Some(inner), []) => Ok(inner.clone()),
        ("value", None, []) => Err("an optional value has no value".into()),
        ("orValue", inner, [other]) => Ok(inner.unwrap_or(other).clone()),
        _ => Err(unfit(name, &[of])),
    }
}

fn pattern(text: &str, budget: &mut Budget) -> std::result::Result<Regex, String> {
    budget.spend(text.len() * PATTERN)?;
    Regex::new(text).map_err(|_| format!("the pattern {text:?} is not valid"))
}

fn of_text<'a>(
    text: &str,
    name: &str,
    arguments: &[Datum<'a>],
    budget: &mut Budget,
) -> std::result::Result<Option<Datum<'a>>, String> {
    let place = |number: &i64| usize::try_from(*number).map_err(|_| format!("index {number} is out of range"));
    let chars = || text.chars().collect::<Vec<_>>();
    let cut = |from: usize, to: usize| {
        let all = chars();
        let part = all.get(from..to).ok_or_else(|| format!("index {to} is out of range"))?;
        Ok::<_, String>(Datum::text(part.iter().collect::<String>()))
    };
    Ok(Some(match (name, arguments) {
        ("startsWith", [Datum::Text(other)]) => Datum::Flag(text.starts_with(&**other)),
        ("endsWith", [Datum::Text(other)]) => Datum::Flag(text.ends_with(&**other)),
        ("contains", [Datum::Text(other)]) => Datum::Flag(text.contains(&**other)),
        ("matches", [Datum::Text(other)]) => Datum::Flag(pattern(other, budget)?.is_match(text)),
        ("find", [Datum::Text(other)]) => {
            Datum::text(pattern(other, budget)?.find(text).map_or("", |found| found.as_str()))
        }
        ("findAll", [Datum::Text(other)]) => {
            Datum::List(pattern(other, budget)?.find_iter(text).map(|found| Datum::text(found.as_str())).collect())
        }
        ("lowerAscii", []) => Datum::text(text.to_ascii_lowercase()),
        ("upperAscii", []) => Datum::text(text.to_ascii_uppercase()),
        ("trim", []) => Datum::text(text.trim()),
        ("split", [Datum::Text(by)]) => Datum::List(text.split(&**by).map(Datum::text).collect()),
        ("split", [Datum::Text(by), Datum::Int(most)]) => match usize::try_from(*most) {
            Ok(most) => Datum::List(text.splitn(most, &**by).map(Datum::text).collect()),
            Err(_) => Datum::List(text.split(&**by).map(Datum::text).collect()),
        },
        ("replace", [Datum::Text(old), Datum::Text(new)]) => replaced(text, old, new, usize::MAX, budget)?,
        ("replace", [Datum::Text(old), Datum::Text(new), Datum::Int(most)]) => {
            replaced(text, old, new, usize::try_from(*most).unwrap_or(usize::MAX), budget)?
        }
        ("charAt", [Datum::Int(at)]) if place(at)? == chars().len() => Datum::text(""),
        ("charAt", [Datum::Int(at)]) => cut(place(at)?, place(at)? + 1)?,
        ("substring", [Datum::Int(from)]) => cut(place(from)?, chars().len())?,
        ("substring", [Datum::Int(from), Datum::Int(to)]) => cut(place(from)?, place(to)?)?,
        ("indexOf" | "lastIndexOf", [Datum::Text(other)]) => {
            let found = if name == "indexOf" { text.find(&**other) } else { text.rfind(&**other) };
            found.map_or(Datum::Int(-1), |at| int(text[..at].chars().count()))
        }
        _ => return Ok(None),
    }))
}

fn replaced(text: &str, old: &str, new: &str, most: usize, budget: &mut Budget) -> Result<'static> {
    let times = text.matches(old).count().min(most);
    // What is made can be much larger than what it is made from.
    budget.spend(times.saturating_mul(new.len()) / 16)?;
    Ok(Datum::text(text.replacen(old, new, times)))
}

fn of_list<'a>(
    elements: &[Datum<'a>],
    name: &str,
    arguments: &[Datum<'a>],
) -> std::result::Result<Option<Datum<'a>>, String> {
    use std::cmp::Ordering;
    let ordered = |a: &Datum<'a>, b: &Datum<'a>| {
        a.order(b).ok_or_else(|| format!("{} and {} cannot be compared", a.type_name(), b.type_name()))
    };
    Ok(Some(match (name, arguments) {
        ("isSorted", []) => {
            let mut sorted = true;
            for pair in elements.windows(2) {
                sorted &= ordered(&pair[0], &pair[1])? != Ordering::Greater;
            }
            Datum::Flag(sorted)
        }
        ("min" | "max", []) => {
            let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best = elements.first().ok_or_else(|| format!("{name}: the list is empty"))?;
            for element in elements {
                if ordered(element, best)? == wanted {
                    best = element;
                }
            }
            best.clone()
        }
        ("sum", []) => {
            let mut sum = elements.first().cloned().unwrap_or(Datum::Int(0));
            for element in elements.iter().skip(1) {
                sum = super::evaluate::add(&sum, element)?;
            }
            sum
        }
        ("contains", [wanted]) => Datum::Flag(elements.iter().any(|e| e.equals(wanted))),
        ("indexOf", [wanted]) => elements.iter().position(|e| e.equals(wanted)).map_or(Datum::Int(-1), int),
        ("lastIndexOf", [wanted]) => elements.iter().rposition(|e| e.equals(wanted)).map_or(Datum::Int(-1), int),
        ("join", [] | [Datum::Text(_)]) => {
            let by = if let [Datum::Text(by)] = arguments { by.as_ref() } else { "" };
            let mut texts = Vec::with_capacity(elements.len());
            for element in elements {
                let Datum::Text(text) = element else { return Err(unfit(name, &[element])) };
                texts.push(text.as_ref());
            }
            Datum::text(texts.join(by))
        }
        _ => return Ok(None),
    }))
}
