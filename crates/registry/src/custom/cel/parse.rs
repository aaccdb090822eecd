//! Parses tokens into an expression. Identifiers, functions and numbers of arguments are checked here, so that a definition
//! with an unknown one is refused before it is stored.

use super::functions;
use super::lex::Token;

/// Limits the recursion of the parser.
const MAX_NESTING: usize = 60;
/// Limits the recursion of the evaluator. `a + b + c` is as deep as it has operators, without any nesting.
const MAX_EXPRESSION_DEPTH: usize = 150;
/// Limits the number of nodes of an expression.
const MAX_NODES: usize = 2000;

#[derive(Debug)]
pub(super) enum Expression {
    Null,
    Bool(bool),
    Int(i64),
    Double(f64),
    String(String),
    Identifier(String),
    List(Vec<Expression>),
    Map(Vec<(Expression, Expression)>),
    Select {
        operand: Box<Expression>,
        field: String,
        access: MemberAccess,
    },
    Has {
        operand: Box<Expression>,
        field: String,
    },
    Index {
        operand: Box<Expression>,
        key: Box<Expression>,
        access: MemberAccess,
    },
    Call {
        name: String,
        arguments: Vec<Expression>,
    },
    Method {
        operand: Box<Expression>,
        name: String,
        arguments: Vec<Expression>,
    },
    /// A macro such as `list.all(variable, body)`. `map` may have a condition before its result.
    Macro {
        kind: MacroKind,
        range: Box<Expression>,
        variable: String,
        body: Vec<Expression>,
    },
    Not(Box<Expression>),
    Negate(Box<Expression>),
    And(Box<Expression>, Box<Expression>),
    Or(Box<Expression>, Box<Expression>),
    Binary(BinaryOperator, Box<Expression>, Box<Expression>),
    /// `condition ? then : otherwise`
    Conditional(Box<Expression>, Box<Expression>, Box<Expression>),
}

impl Expression {
    /// The length of the longest path from this node to a leaf, in nodes.
    fn depth(&self) -> usize {
        let deepest = |inner: &mut dyn Iterator<Item = &Expression>| inner.map(Self::depth).max().unwrap_or(0);
        1 + match self {
            Self::Null | Self::Bool(_) | Self::Int(_) | Self::Double(_) | Self::String(_) | Self::Identifier(_) => 0,
            Self::List(inner) | Self::Call { arguments: inner, .. } => deepest(&mut inner.iter()),
            Self::Map(entries) => deepest(&mut entries.iter().flat_map(|(key, value)| [key, value])),
            Self::Select { operand, .. } | Self::Has { operand, .. } | Self::Not(operand) | Self::Negate(operand) => {
                operand.depth()
            }
            Self::Index { operand, key, .. } => operand.depth().max(key.depth()),
            Self::Method { operand, arguments: inner, .. } | Self::Macro { range: operand, body: inner, .. } => {
                operand.depth().max(deepest(&mut inner.iter()))
            }
            Self::And(a, b) | Self::Or(a, b) | Self::Binary(_, a, b) => a.depth().max(b.depth()),
            Self::Conditional(a, b, c) => a.depth().max(b.depth()).max(c.depth()),
        }
    }
}

/// What a missing key or index gives: an error (`.`, `[]`) or an optional without a value (`.?`, `[?]`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberAccess {
    Plain,
    Optional,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MacroKind {
    All,
    Exists,
    ExistsOne,
    Map,
    Filter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BinaryOperator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
}

pub(super) struct ParsedExpression {
    pub(super) expression: Expression,
    pub(super) uses_old_self: bool,
}

pub(super) fn parse(tokens: &[Token]) -> ParseResult<ParsedExpression> {
    let mut parser = Parser { tokens, position: 0, nesting: 0, nodes: 0, variables: Vec::new(), uses_old_self: false };
    let expression = parser.parse_expression()?;
    if expression.depth() > MAX_EXPRESSION_DEPTH {
        return Err(format!("the rule joins more than {MAX_EXPRESSION_DEPTH} parts after each other"));
    }
    match parser.peek() {
        None => Ok(ParsedExpression { expression, uses_old_self: parser.uses_old_self }),
        Some(_) => Err(parser.unexpected("an operator")),
    }
}

struct Parser<'a> {
    tokens: &'a [Token],
    /// The index of the next token.
    position: usize,
    nesting: usize,
    nodes: usize,
    /// The variables of the macros around the next token, the innermost last.
    variables: Vec<String>,
    uses_old_self: bool,
}

type ParseResult<T> = std::result::Result<T, String>;

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.position)
    }

    /// Consumes the next token if it is this symbol.
    fn take_symbol(&mut self, symbol: &str) -> bool {
        let is_next = matches!(self.peek(), Some(Token::Symbol(next)) if *next == symbol);
        self.position += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, symbol: &str) -> ParseResult<()> {
        if self.take_symbol(symbol) { Ok(()) } else { Err(self.unexpected(&format!("{symbol:?}"))) }
    }

    /// The error message for the next token, where `expected` should be.
    fn unexpected(&self, expected: &str) -> String {
        match self.peek() {
            None => format!("unexpected end, {expected} is missing"),
            Some(Token::Symbol(symbol)) => format!("unexpected {symbol:?} where {expected} should be"),
            Some(Token::Identifier(name)) => format!("unexpected {name} where {expected} should be"),
            Some(_) => format!("unexpected value where {expected} should be"),
        }
    }

    /// Counts a node. Fails at more than [`MAX_NODES`].
    fn count_node(&mut self, expression: Expression) -> ParseResult<Expression> {
        self.nodes += 1;
        if self.nodes > MAX_NODES { Err(format!("the rule has more than {MAX_NODES} parts")) } else { Ok(expression) }
    }

    /// Fails at more than [`MAX_NESTING`] calls within each other.
    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> ParseResult<T>) -> ParseResult<T> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return Err(format!("the rule is nested more than {MAX_NESTING} deep"));
        }
        let result = inner(self);
        self.nesting -= 1;
        result
    }

    fn parse_expression(&mut self) -> ParseResult<Expression> {
        self.nested(|p| {
            let condition = p.parse_or()?;
            if !p.take_symbol("?") {
                return Ok(condition);
            }
            let then = p.parse_or()?;
            p.expect(":")?;
            let other = p.parse_expression()?;
            p.count_node(Expression::Conditional(condition.into(), then.into(), other.into()))
        })
    }

    fn parse_or(&mut self) -> ParseResult<Expression> {
        let mut left = self.parse_and()?;
        while self.take_symbol("||") {
            let right = self.parse_and()?;
            left = self.count_node(Expression::Or(left.into(), right.into()))?;
        }
        Ok(left)
    }

    fn parse_and(&mut self) -> ParseResult<Expression> {
        let mut left = self.parse_relation()?;
        while self.take_symbol("&&") {
            let right = self.parse_relation()?;
            left = self.count_node(Expression::And(left.into(), right.into()))?;
        }
        Ok(left)
    }

    /// Consumes the next token if it is one of these operators.
    fn take_operator(&mut self, operators: &[(&str, BinaryOperator)]) -> Option<BinaryOperator> {
        let found = match self.peek()? {
            Token::Symbol(symbol) => operators.iter().find(|(text, _)| text == symbol),
            Token::Identifier(name) => operators.iter().find(|(text, _)| text == name),
            _ => None,
        };
        self.position += usize::from(found.is_some());
        found.map(|(_, operator)| *operator)
    }

    /// Parses `next (operator next)*`, left-associative.
    fn parse_chain(
        &mut self,
        operators: &[(&str, BinaryOperator)],
        next: impl Fn(&mut Self) -> ParseResult<Expression>,
    ) -> ParseResult<Expression> {
        let mut left = next(self)?;
        while let Some(operator) = self.take_operator(operators) {
            let right = next(self)?;
            left = self.count_node(Expression::Binary(operator, left.into(), right.into()))?;
        }
        Ok(left)
    }

    fn parse_relation(&mut self) -> ParseResult<Expression> {
        use BinaryOperator::{Equal, Greater, GreaterOrEqual, In, Less, LessOrEqual, NotEqual};
        let operators = [
            ("==", Equal),
            ("!=", NotEqual),
            ("<=", LessOrEqual),
            (">=", GreaterOrEqual),
            ("<", Less),
            (">", Greater),
            ("in", In),
        ];
        self.parse_chain(&operators, Self::parse_addition)
    }

    fn parse_addition(&mut self) -> ParseResult<Expression> {
        self.parse_chain(&[("+", BinaryOperator::Add), ("-", BinaryOperator::Subtract)], Self::parse_multiplication)
    }

    fn parse_multiplication(&mut self) -> ParseResult<Expression> {
        use BinaryOperator::{Divide, Multiply, Remainder};
        self.parse_chain(&[("*", Multiply), ("/", Divide), ("%", Remainder)], Self::parse_unary)
    }

    fn parse_unary(&mut self) -> ParseResult<Expression> {
        if self.take_symbol("!") {
            let inner = self.nested(Self::parse_unary)?;
            return self.count_node(Expression::Not(inner.into()));
        }
        if self.take_symbol("-") {
            let inner = self.nested(Self::parse_unary)?;
            return self.count_node(Expression::Negate(inner.into()));
        }
        self.parse_member()
    }

    /// A value and what follows it: fields, indices and calls of methods.
    fn parse_member(&mut self) -> ParseResult<Expression> {
        let mut operand = self.parse_primary()?;
        loop {
            let node = if self.take_symbol(".") {
                let name = self.parse_identifier()?;
                if self.take_symbol("(") {
                    self.parse_method(operand, name)?
                } else {
                    Expression::Select {
                        operand: operand.into(),
                        field: unescape_field(&name),
                        access: MemberAccess::Plain,
                    }
                }
            } else if self.take_symbol(".?") {
                let field = unescape_field(&self.parse_identifier()?);
                Expression::Select { operand: operand.into(), field, access: MemberAccess::Optional }
            } else if self.take_symbol("[") {
                self.parse_index(operand, MemberAccess::Plain)?
            } else if self.take_symbol("[?") {
                self.parse_index(operand, MemberAccess::Optional)?
            } else {
                return Ok(operand);
            };
            operand = self.count_node(node)?;
        }
    }

    fn parse_identifier(&mut self) -> ParseResult<String> {
        let Some(Token::Identifier(name)) = self.peek() else { return Err(self.unexpected("a name")) };
        self.position += 1;
        Ok(name.clone())
    }

    fn parse_index(&mut self, operand: Expression, access: MemberAccess) -> ParseResult<Expression> {
        let key = self.parse_expression()?;
        self.expect("]")?;
        Ok(Expression::Index { operand: operand.into(), key: key.into(), access })
    }

    fn parse_method(&mut self, operand: Expression, name: String) -> ParseResult<Expression> {
        let macro_kind = match name.as_str() {
            "all" => Some(MacroKind::All),
            "exists" => Some(MacroKind::Exists),
            "exists_one" | "existsOne" => Some(MacroKind::ExistsOne),
            "map" => Some(MacroKind::Map),
            "filter" => Some(MacroKind::Filter),
            _ => None,
        };
        if let Some(kind) = macro_kind {
            return self.parse_macro(kind, operand, &name);
        }
        let arguments = self.parse_arguments(")")?;
        if !functions::is_method(&name, arguments.len()) {
            return Err(format!("there is no function {name} with {} arguments on a value", arguments.len()));
        }
        Ok(Expression::Method { operand: operand.into(), name, arguments })
    }

    fn parse_macro(&mut self, kind: MacroKind, range: Expression, name: &str) -> ParseResult<Expression> {
        let variable = self.parse_identifier()?;
        self.variables.push(variable.clone());
        let mut body = Vec::new();
        while self.take_symbol(",") {
            body.push(self.parse_expression()?);
        }
        self.variables.pop();
        self.expect(")")?;
        let has_valid_body = matches!((kind, body.len()), (_, 1) | (MacroKind::Map, 2));
        if !has_valid_body {
            return Err(format!("{name} takes a variable and an expression"));
        }
        Ok(Expression::Macro { kind, range: range.into(), variable, body })
    }

    /// A comma-separated list up to the symbol `end`.
    fn parse_arguments(&mut self, end: &str) -> ParseResult<Vec<Expression>> {
        let mut arguments = Vec::new();
        while !self.take_symbol(end) {
            if !arguments.is_empty() {
                self.expect(",")?;
                // A trailing comma is allowed in lists.
                if end == "]" && self.take_symbol(end) {
                    break;
                }
            }
            arguments.push(self.parse_expression()?);
        }
        Ok(arguments)
    }

    fn parse_primary(&mut self) -> ParseResult<Expression> {
        let Some(token) = self.peek() else { return Err(self.unexpected("a value")) };
        self.position += 1;
        let node = match token {
            Token::Int(number) => Expression::Int(*number),
            Token::Double(number) => Expression::Double(*number),
            Token::String(text) => Expression::String(text.clone()),
            Token::Symbol("(") => {
                let inner = self.parse_expression()?;
                self.expect(")")?;
                return Ok(inner);
            }
            Token::Symbol("[") => Expression::List(self.parse_arguments("]")?),
            Token::Symbol("{") => self.parse_map()?,
            Token::Identifier(name) => self.parse_named(name)?,
            Token::Symbol(_) => {
                self.position -= 1;
                return Err(self.unexpected("a value"));
            }
        };
        self.count_node(node)
    }

    fn parse_map(&mut self) -> ParseResult<Expression> {
        let mut entries = Vec::new();
        while !self.take_symbol("}") {
            if !entries.is_empty() {
                self.expect(",")?;
            }
            let key = self.parse_expression()?;
            self.expect(":")?;
            entries.push((key, self.parse_expression()?));
        }
        Ok(Expression::Map(entries))
    }

    /// An identifier, a literal keyword or the call of a function.
    fn parse_named(&mut self, name: &str) -> ParseResult<Expression> {
        if self.take_symbol("(") {
            let mut arguments = self.parse_arguments(")")?;
            if name == "has" {
                return match (arguments.pop(), arguments.is_empty()) {
                    (Some(Expression::Select { operand, field, access: MemberAccess::Plain }), true) => {
                        Ok(Expression::Has { operand, field })
                    }
                    _ => Err("has takes a field, as in has(self.name)".into()),
                };
            }
            if !functions::is_function(name, arguments.len()) {
                return Err(format!("there is no function {name} with {} arguments", arguments.len()));
            }
            return Ok(Expression::Call { name: name.to_owned(), arguments });
        }
        Ok(match name {
            "true" => Expression::Bool(true),
            "false" => Expression::Bool(false),
            "null" => Expression::Null,
            "oldSelf" => {
                self.uses_old_self = true;
                Expression::Identifier(name.to_owned())
            }
            "self" => Expression::Identifier(name.to_owned()),
            variable if self.variables.iter().any(|v| v == variable) => Expression::Identifier(name.to_owned()),
            type_name if functions::TYPE_NAMES.contains(&type_name) => Expression::Identifier(name.to_owned()),
            other => return Err(format!("unknown name {other}")),
        })
    }
}

/// The field name that an escaped identifier stands for: `__dot__` for `.`, `__namespace__` for the reserved `namespace`.
fn unescape_field(name: &str) -> String {
    const RESERVED_WORDS: [&str; 20] = [
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
    ];
    let inner = name.strip_prefix("__").and_then(|n| n.strip_suffix("__"));
    if let Some(word) = inner.filter(|inner| RESERVED_WORDS.contains(inner)) {
        return word.to_owned();
    }
    let mut out = String::new();
    let mut rest = name;
    while let Some(at) = rest.find("__") {
        let (before, escape) = rest.split_at(at);
        out.push_str(before);
        let escapes = [("__underscores__", "__"), ("__dot__", "."), ("__dash__", "-"), ("__slash__", "/")];
        let found = escapes.iter().find(|(text, _)| escape.starts_with(text));
        let (text, stands_for) = found.copied().unwrap_or(("__", "__"));
        out.push_str(stands_for);
        rest = &escape[text.len()..];
    }
    out + rest
}
