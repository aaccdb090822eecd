//! Splits the text of a rule into tokens.

use std::iter::Peekable;
use std::str::Chars;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Identifier(String),
    Int(i64),
    Double(f64),
    String(String),
    /// An operator, a bracket or other punctuation.
    Symbol(&'static str),
}

/// A symbol must come before every symbol that is a prefix of it.
const SYMBOLS: [&str; 27] = [
    "&&", "||", "==", "!=", "<=", ">=", ".?", "[?", "<", ">", "!", "+", "-", "*", "/", "%", "(", ")", "[", "]", "{",
    "}", ",", ".", "?", ":", "=",
];

pub(super) fn tokenize(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        if let Some(comment) = rest.strip_prefix("//") {
            rest = comment.split_once('\n').map_or("", |(_, after)| after);
            continue;
        }
        let Some(first) = rest.chars().next() else { return Ok(tokens) };
        if let Some((token, after)) = string_literal(rest)? {
            tokens.push(token);
            rest = after;
        } else if first.is_ascii_digit() {
            let (token, after) = number_literal(rest)?;
            tokens.push(token);
            rest = after;
        } else if first.is_ascii_alphabetic() || first == '_' {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            tokens.push(Token::Identifier(rest[..end].to_owned()));
            rest = &rest[end..];
        } else if let Some(symbol) = SYMBOLS.iter().find(|symbol| rest.starts_with(**symbol)) {
            tokens.push(Token::Symbol(symbol));
            rest = &rest[symbol.len()..];
        } else {
            return Err(format!("unexpected character {first:?}"));
        }
    }
}

fn number_literal(text: &str) -> Result<(Token, &str), String> {
    if let Some(hex) = text.strip_prefix("0x") {
        let end = hex.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(hex.len());
        let value =
            i64::from_str_radix(&hex[..end], 16).map_err(|_| format!("the number 0x{} is no int", &hex[..end]))?;
        return Ok((Token::Int(value), hex[end..].trim_start_matches(['u', 'U'])));
    }
    let digits = |from: usize| text[from..].find(|c: char| !c.is_ascii_digit()).map_or(text.len(), |n| from + n);
    let mut end = digits(0);
    let mut is_integer = true;
    // A dot without a digit after it is not part of the number: `1.size()`.
    if text[end..].starts_with('.') && text[end + 1..].starts_with(|c: char| c.is_ascii_digit()) {
        end = digits(end + 1);
        is_integer = false;
    }
    if text[end..].starts_with(['e', 'E']) {
        let signed = end + 1 + usize::from(text[end + 1..].starts_with(['+', '-']));
        if digits(signed) > signed {
            end = digits(signed);
            is_integer = false;
        }
    }
    let literal = &text[..end];
    let error = || format!("the number {literal} cannot be represented");
    match is_integer {
        true => Ok((Token::Int(literal.parse().map_err(|_| error())?), text[end..].trim_start_matches(['u', 'U']))),
        false => Ok((Token::Double(literal.parse().map_err(|_| error())?), &text[end..])),
    }
}

/// Returns `None` if the text does not begin with a string literal.
fn string_literal(text: &str) -> Result<Option<(Token, &str)>, String> {
    let (raw, body) = match text.as_bytes() {
        [b'r' | b'R', b'"' | b'\'', ..] => (true, &text[1..]),
        [b'b' | b'B', b'"' | b'\'', ..] => return Err("byte strings are not supported".into()),
        _ => (false, text),
    };
    let Some(quote) = ["\"\"\"", "'''", "\"", "'"].into_iter().find(|q| body.starts_with(q)) else { return Ok(None) };
    let body = &body[quote.len()..];
    let mut at = 0;
    while let Some(c) = body[at..].chars().next() {
        if body[at..].starts_with(quote) {
            let inner = &body[..at];
            let value = if raw { inner.to_owned() } else { unescape(inner)? };
            return Ok(Some((Token::String(value), &body[at + quote.len()..])));
        }
        if c == '\n' && quote.len() == 1 {
            break;
        }
        at += c.len_utf8();
        if c == '\\' && !raw {
            at += body[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    Err("a string does not end".into())
}

/// Replaces the escape sequences of a string literal.
fn unescape(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        out.push(match chars.next() {
            Some('n') => '\n',
            Some('t') => '\t',
            Some('r') => '\r',
            Some('a') => '\u{7}',
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('v') => '\u{b}',
            Some(same @ ('\\' | '\'' | '"' | '`' | '?')) => same,
            Some('x' | 'X') => char_code(&mut chars, 2, 16)?,
            Some('u') => char_code(&mut chars, 4, 16)?,
            Some('U') => char_code(&mut chars, 8, 16)?,
            Some(digit @ '0'..='3') => {
                let high = digit.to_digit(8).unwrap_or(0) * 64;
                char::from_u32(high + u32::from(char_code(&mut chars, 2, 8)?)).ok_or("an escape is no character")?
            }
            other => return Err(format!("unknown escape {other:?} in a string")),
        });
    }
    Ok(out)
}

/// Reads the character code of an escape sequence: exactly `digits` digits.
fn char_code(chars: &mut Peekable<Chars<'_>>, digits: usize, radix: u32) -> Result<char, String> {
    let mut value = 0;
    for _ in 0..digits {
        let digit = chars.next().and_then(|c| c.to_digit(radix)).ok_or("an escape lacks digits")?;
        value = value * radix + digit;
    }
    char::from_u32(value).ok_or_else(|| "an escape is no character".into())
}
