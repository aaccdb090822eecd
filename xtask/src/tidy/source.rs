//! What the rules need to know about one Rust file: its comments, tokens, paths and the names it defines.
//!
//! `proc-macro2` splits the text into tokens and `syn` parses them. A macro's body has no syntax of its own: its paths and
//! names are read from its tokens. Nothing is resolved here; `modules` does that.

mod collect;

use std::ops::Range;

use proc_macro2::{LineColumn, Span, TokenStream, TokenTree};

/// The facts about one file.
pub(super) struct Source<'a> {
    /// Each line of a comment, doc comments included.
    pub(super) comments: Vec<Comment<'a>>,
    /// The tokens in the order of the text. A group is its opening delimiter, its content and its closing delimiter.
    pub(super) tokens: Vec<Token<'a>>,
    /// Every path of two or more segments, and every import.
    pub(super) paths: Vec<CodePath>,
    /// Every name that the file defines, and every identifier in a macro's body.
    pub(super) definitions: Vec<Definition>,
    /// The modules that are declared here and live in files of their own: `mod name;`.
    pub(super) declarations: Vec<ModuleDeclaration>,
}

#[derive(Debug, PartialEq)]
pub(super) struct Comment<'a> {
    pub(super) line: usize,
    pub(super) text: &'a str,
}

#[derive(Debug, PartialEq)]
pub(super) struct Token<'a> {
    pub(super) line: usize,
    /// An identifier, a literal, or one character of punctuation.
    pub(super) text: &'a str,
    pub(super) test_only: bool,
}

/// A path as it is written. Use trees are expanded: `use a::{b, c::d}` is `a::b` and `a::c::d`.
#[derive(Debug, PartialEq)]
pub(super) struct CodePath {
    pub(super) line: usize,
    /// The inline modules of this file that the path stands in, from the outside in.
    pub(super) inline_modules: Vec<String>,
    pub(super) segments: Vec<String>,
    /// The name that an import brings into scope, `*` for all; `None` for a path that is no import.
    pub(super) imports_as: Option<String>,
    pub(super) test_only: bool,
}

#[derive(Debug, PartialEq)]
pub(super) struct Definition {
    pub(super) line: usize,
    pub(super) inline_modules: Vec<String>,
    pub(super) name: String,
    pub(super) kind: DefinitionKind,
    pub(super) test_only: bool,
    /// Whether it is defined inside a function's body.
    pub(super) is_local: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DefinitionKind {
    /// A struct, enum, union, trait or type alias.
    Type,
    AssociatedType,
    Function,
    Field,
    Variant,
    /// A const or static.
    Constant,
    Module,
    Parameter,
    /// A name that a pattern binds, or the new name of an import.
    Variable,
    /// An identifier in a macro's body: a definition or a use.
    InMacro,
}

#[derive(Debug, PartialEq)]
pub(super) struct ModuleDeclaration {
    pub(super) inline_modules: Vec<String>,
    pub(super) name: String,
    /// The value of `#[path = "…"]`.
    pub(super) path: Option<String>,
    pub(super) test_only: bool,
}

/// Why a file cannot be read as Rust, and where.
#[derive(Debug)]
pub(super) struct ParseError {
    pub(super) line: usize,
    pub(super) message: String,
}

impl<'a> Source<'a> {
    pub(super) fn parse(text: &'a str) -> Result<Self, ParseError> {
        let fail = |span: Span, message: String| ParseError { line: span.start().line, message };
        let stream: TokenStream = text.parse().map_err(|e: proc_macro2::LexError| fail(e.span(), e.to_string()))?;
        let file = syn::parse2(stream.clone()).map_err(|e: syn::Error| fail(e.span(), e.to_string()))?;
        let collected = collect::collect(&file);
        let mut test_ranges = collected.test_ranges;
        if collected.is_test_file {
            test_ranges.push(0..text.len());
        }
        let mut lexed = Lexed::new(text, test_ranges);
        lexed.add_stream(stream);
        lexed.add_gap(text.len());
        Ok(Self {
            comments: lexed.comments,
            tokens: lexed.tokens,
            paths: collected.paths,
            definitions: collected.definitions,
            declarations: collected.declarations,
        })
    }
}

/// Tokens and comments while they are collected.
struct Lexed<'a> {
    text: &'a str,
    /// Where each line begins, in bytes.
    line_starts: Vec<usize>,
    is_ascii: bool,
    /// Where the last token or comment ended, in bytes.
    end: usize,
    end_line: usize,
    test_ranges: Vec<Range<usize>>,
    comments: Vec<Comment<'a>>,
    tokens: Vec<Token<'a>>,
}

impl<'a> Lexed<'a> {
    fn new(text: &'a str, test_ranges: Vec<Range<usize>>) -> Self {
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        let is_ascii = text.is_ascii();
        Self { text, line_starts, is_ascii, end: 0, end_line: 1, test_ranges, comments: Vec::new(), tokens: Vec::new() }
    }

    /// The byte offset of a position. `Span::byte_range` returns the same, but is slow when it is called for every token.
    fn offset(&self, position: LineColumn) -> usize {
        let start = self.line_starts.get(position.line - 1).copied().unwrap_or(self.text.len());
        if self.is_ascii {
            return start + position.column;
        }
        let line = &self.text[start..];
        start + line.char_indices().nth(position.column).map_or(line.len(), |(at, _)| at)
    }

    fn add_stream(&mut self, stream: TokenStream) {
        for tree in stream {
            match tree {
                TokenTree::Group(group) => {
                    self.add(group.span_open());
                    self.add_stream(group.stream());
                    self.add(group.span_close());
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) | TokenTree::Literal(_) => self.add(tree.span()),
            }
        }
    }

    fn add(&mut self, span: Span) {
        let (start, end) = (span.start(), span.end());
        let range = self.offset(start)..self.offset(end);
        // A doc comment is several tokens (`#[doc = "…"]`), all with the span of the comment.
        if range.start < self.end {
            return;
        }
        self.add_gap(range.start);
        (self.end, self.end_line) = (range.end, end.line);
        let (line, text) = (start.line, &self.text[range.clone()]);
        if text.starts_with("//") || text.starts_with("/*") {
            self.add_comment(line, text);
        } else {
            let test_only = self.test_ranges.iter().any(|test| test.contains(&range.start));
            self.tokens.push(Token { line, text, test_only });
        }
    }

    /// Between two tokens there is white space and comments, and nothing else.
    fn add_gap(&mut self, until: usize) {
        let gap = &self.text[self.end..until];
        if gap.contains('/') {
            self.add_comment(self.end_line, gap);
        }
    }

    fn add_comment(&mut self, line: usize, text: &'a str) {
        let lines = text.lines().enumerate().map(|(offset, text)| Comment { line: line + offset, text: text.trim() });
        self.comments.extend(lines.filter(|comment| !comment.text.is_empty()));
    }
}

#[cfg(test)]
mod tests;
