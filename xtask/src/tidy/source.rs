//! Just enough of Rust's grammar for the rules: code apart from comments and strings, tokens, and paths.
//!
//! Not a parser: macros are read as the tokens they are written with, and nothing is resolved.

/// One file: its comments by line, and its code as tokens.
pub(super) struct Source {
    pub(super) comments: Vec<(usize, String)>,
    pub(super) tokens: Vec<Token>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Token {
    pub(super) line: usize,
    /// An identifier or number, `::`, or a single character of punctuation.
    pub(super) text: String,
}

impl Token {
    fn is_word(&self) -> bool {
        self.text.starts_with(is_word)
    }
}

/// A path as written, with use trees expanded: `use a::{b, c::d}` is `a::b` and `a::c::d`.
#[derive(Debug, PartialEq)]
pub(super) struct CodePath<'a> {
    pub(super) line: usize,
    pub(super) segments: Vec<&'a str>,
}

impl Source {
    pub(super) fn read(text: &str) -> Source {
        let mut reader = Reader { rest: text, line: 1, source: Source { comments: Vec::new(), tokens: Vec::new() } };
        while !reader.rest.is_empty() {
            reader.step();
        }
        reader.source
    }

    /// The tokens without test-only items: what `#[cfg(test)]` or a test attribute stands on.
    pub(super) fn production(&self) -> Vec<Token> {
        let tokens = &self.tokens;
        let mut kept = Vec::new();
        let mut at = 0;
        while at < tokens.len() {
            match attribute(tokens, at) {
                Some(Attribute { inner: true, for_tests: true, .. }) => return Vec::new(),
                Some(Attribute { for_tests: true, end, .. }) => at = item_end(tokens, end),
                Some(Attribute { end, .. }) => {
                    kept.extend_from_slice(&tokens[at..end]);
                    at = end;
                }
                None => {
                    kept.push(tokens[at].clone());
                    at += 1;
                }
            }
        }
        kept
    }
}

/// Every path of two or more segments, and every import whatever its length.
pub(super) fn paths(tokens: &[Token]) -> Vec<CodePath<'_>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let text = tokens[at].text.as_str();
        // `use<'a>` is a capture list in a type, not an import.
        if text == "use" && text_at(tokens, at + 1) != "<" {
            at = use_tree(tokens, at + 1, &[], &mut found);
        } else if tokens[at].is_word() && text_at(tokens, at + 1) == "::" {
            let line = tokens[at].line;
            let mut segments = vec![text];
            while text_at(tokens, at + 1) == "::" && tokens.get(at + 2).is_some_and(Token::is_word) {
                segments.push(&tokens[at + 2].text);
                at += 2;
            }
            found.push(CodePath { line, segments });
            at += 1;
        } else {
            at += 1;
        }
    }
    found
}

fn use_tree<'a>(tokens: &'a [Token], mut at: usize, prefix: &[&'a str], found: &mut Vec<CodePath<'a>>) -> usize {
    let mut segments = prefix.to_vec();
    let mut line = tokens.get(at).map_or(0, |token| token.line);
    while let Some(token) = tokens.get(at) {
        match token.text.as_str() {
            "::" => at += 1,
            "as" => at += 2,
            "{" => {
                at += 1;
                while !matches!(text_at(tokens, at), "}" | ";" | "") {
                    at = use_tree(tokens, at, &segments, found);
                    if text_at(tokens, at) == "," {
                        at += 1;
                    }
                }
                return at + 1;
            }
            text if token.is_word() || text == "*" => {
                segments.push(text);
                line = token.line;
                at += 1;
            }
            _ => break,
        }
    }
    found.push(CodePath { line, segments });
    at
}

fn text_at(tokens: &[Token], at: usize) -> &str {
    tokens.get(at).map_or("", |token| token.text.as_str())
}

struct Attribute {
    inner: bool,
    for_tests: bool,
    end: usize,
}

fn attribute(tokens: &[Token], at: usize) -> Option<Attribute> {
    if text_at(tokens, at) != "#" {
        return None;
    }
    let inner = text_at(tokens, at + 1) == "!";
    let open = if inner { at + 2 } else { at + 1 };
    if text_at(tokens, open) != "[" {
        return None;
    }
    let end = closing(tokens, open) + 1;
    let words: Vec<&str> =
        tokens[open + 1..(end - 1).min(tokens.len())].iter().map(|token| token.text.as_str()).collect();
    let for_tests = match words.first() {
        Some(&"cfg") => words.contains(&"test") && !words.contains(&"not") && !words.contains(&"any"),
        // `#[test]`, `#[tokio::test]`, `#[tokio::test(…)]`
        _ => words.split(|word| *word == "(").next().is_some_and(|path| path.last() == Some(&"test")),
    };
    Some(Attribute { inner, for_tests, end: end.min(tokens.len()) })
}

/// The index of the bracket that closes the one at `open`, or the number of tokens.
fn closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len()
}

fn item_end(tokens: &[Token], mut at: usize) -> usize {
    while at < tokens.len() {
        match text_at(tokens, at) {
            ";" => return at + 1,
            "{" => return (closing(tokens, at) + 1).min(tokens.len()),
            "}" => return at,
            "(" | "[" => at = closing(tokens, at) + 1,
            _ => at += 1,
        }
    }
    tokens.len()
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    source: Source,
}

impl Reader<'_> {
    fn step(&mut self) {
        let rest = self.rest;
        let Some(first) = rest.chars().next() else { return };
        if rest.starts_with("//") {
            self.comment(rest.find('\n').unwrap_or(rest.len()));
        } else if rest.starts_with("/*") {
            self.comment(block_comment(rest));
        } else if let Some(length) = string_literal(rest) {
            self.skip(length);
        } else if let Some(length) = character_literal(rest) {
            self.skip(length);
        } else if is_word(first) {
            let length = rest.find(|character| !is_word(character)).unwrap_or(rest.len());
            self.token(length);
        } else if rest.starts_with("::") {
            self.token(2);
        } else if first.is_whitespace() {
            self.skip(first.len_utf8());
        } else {
            self.token(first.len_utf8());
        }
    }

    fn token(&mut self, length: usize) {
        self.source.tokens.push(Token { line: self.line, text: self.rest[..length].to_owned() });
        self.skip(length);
    }

    fn comment(&mut self, length: usize) {
        for (offset, text) in self.rest[..length].lines().enumerate() {
            self.source.comments.push((self.line + offset, text.to_owned()));
        }
        self.skip(length);
    }

    fn skip(&mut self, length: usize) {
        self.line += self.rest[..length].matches('\n').count();
        self.rest = &self.rest[length..];
    }
}

fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// The length of the string literal that `text` opens with, prefix and hashes included.
fn string_literal(text: &str) -> Option<usize> {
    let body = text.strip_prefix(['b', 'c']).unwrap_or(text);
    if let Some(raw) = body.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let inside = raw[hashes..].strip_prefix('"')?;
        let end = format!("\"{}", "#".repeat(hashes));
        let length = inside.find(&end).map_or(inside.len(), |at| at + end.len());
        return Some(text.len() - inside.len() + length);
    }
    let inside = body.strip_prefix('"')?;
    Some(text.len() - inside.len() + escaped_until(inside, b'"'))
}

/// The length of the character literal that `text` opens with; a lifetime or label is none.
fn character_literal(text: &str) -> Option<usize> {
    let inside = text.strip_prefix('\'')?;
    let mut characters = inside.chars();
    let first = characters.next()?;
    if first == '\\' {
        return Some(1 + escaped_until(inside, b'\''));
    }
    (characters.next() == Some('\'')).then_some(1 + first.len_utf8() + 1)
}

fn escaped_until(text: &str, end: u8) -> usize {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == end => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests;
