//! From tokens to an expression. Names and functions are checked here, so that evaluating finds only what is known.

use super::functions;
use super::lex::Token;

/// Bounds the recursion of the parser.
const DEPTH: usize = 60;
/// Bounds the recursion of whoever evaluates the expression: a chain of operators is as deep as it is long.
const CHAINED: usize = 150;
const SIZE: usize = 2000;

#[derive(Debug)]
pub(super) enum Expression {
    Null,
    Flag(bool),
    Int(i64),
    Double(f64),
    Text(String),
    Name(String),
    List(Vec<Expression>),
    Map(Vec<(Expression, Expression)>),
    Select { of: Box<Expression>, field: String, access: Access },
    Has { of: Box<Expression>, field: String },
    Index { of: Box<Expression>, key: Box<Expression>, access: Access },
    Call { name: String, arguments: Vec<Expression> },
    Method { of: Box<Expression>, name: String, arguments: Vec<Expression> },
    Each { what: Each, over: Box<Expression>, variable: String, body: Vec<Expression> },
    Not(Box<Expression>),
    Negative(Box<Expression>),
    And(Box<Expression>, Box<Expression>),
    Or(Box<Expression>, Box<Expression>),
    Binary(Operator, Box<Expression>, Box<Expression>),
    Choice(Box<Expression>, Box<Expression>, Box<Expression>),
}

impl Expression {
    fn depth(&self) -> usize {
        let deepest = |of: &mut dyn Iterator<Item = &Expression>| of.map(Self::depth).max().unwrap_or(0);
        1 + match self {
            Self::Null | Self::Flag(_) | Self::Int(_) | Self::Double(_) | Self::Text(_) | Self::Name(_) => 0,
            Self::List(inner) | Self::Call { arguments: inner, .. } => deepest(&mut inner.iter()),
            Self::Map(entries) => deepest(&mut entries.iter().flat_map(|(key, value)| [key, value])),
            Self::Select { of, .. } | Self::Has { of, .. } | Self::Not(of) | Self::Negative(of) => of.depth(),
            Self::Index { of, key, .. } => of.depth().max(key.depth()),
            Self::Method { of, arguments: inner, .. } | Self::Each { over: of, body: inner, .. } => {
                of.depth().max(deepest(&mut inner.iter()))
            }
            Self::And(a, b) | Self::Or(a, b) | Self::Binary(_, a, b) => a.depth().max(b.depth()),
            Self::Choice(a, b, c) => a.depth().max(b.depth()).max(c.depth()),
        }
    }
}

/// What is not there: an error, or an optional value without a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Plain,
    Optional,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Each {
    All,
    Exists,
    ExistsOne,
    Map,
    Filter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Equal,
    Unequal,
    Less,
    AtMost,
    Greater,
    AtLeast,
    In,
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
}

pub(super) struct Parsed {
    pub(super) expression: Expression,
    pub(super) mentions_old: bool,
}

pub(super) fn parse(tokens: &[Token]) -> Result<Parsed> {
    let mut parser = Parser { tokens, at: 0, depth: 0, size: 0, bound: Vec::new(), mentions_old: false };
    let expression = parser.expression()?;
    if expression.depth() > CHAINED {
        return Err(format!("the rule joins more than {CHAINED} parts after each other"));
    }
    match parser.peek() {
        None => Ok(Parsed { expression, mentions_old: parser.mentions_old }),
        Some(_) => Err(parser.unexpected("an operator")),
    }
}

struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    depth: usize,
    size: usize,
    bound: Vec<String>,
    mentions_old: bool,
}

type Result<T> = std::result::Result<T, String>;

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.at)
    }

    fn take_sign(&mut self, sign: &str) -> bool {
        let found = matches!(self.peek(), Some(Token::Sign(found)) if *found == sign);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, sign: &str) -> Result<()> {
        if self.take_sign(sign) { Ok(()) } else { Err(self.unexpected(&format!("{sign:?}"))) }
    }

    fn unexpected(&self, wanted: &str) -> String {
        match self.peek() {
            None => format!("unexpected end, {wanted} is missing"),
            Some(Token::Sign(sign)) => format!("unexpected {sign:?} where {wanted} should be"),
            Some(Token::Name(name)) => format!("unexpected {name} where {wanted} should be"),
            Some(_) => format!("unexpected value where {wanted} should be"),
        }
    }

    /// Counts a node; whoever nests or repeats without end is stopped here.
    fn made(&mut self, expression: Expression) -> Result<Expression> {
        self.size += 1;
        if self.size > SIZE { Err(format!("the rule has more than {SIZE} parts")) } else { Ok(expression) }
    }

    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(format!("the rule is nested more than {DEPTH} deep"));
        }
        let result = inner(self);
        self.depth -= 1;
        result
    }

    fn expression(&mut self) -> Result<Expression> {
        self.nested(|p| {
            let condition = p.either()?;
            if !p.take_sign("?") {
                return Ok(condition);
            }
            let then = p.either()?;
            p.expect(":")?;
            let other = p.expression()?;
            p.made(Expression::Choice(condition.into(), then.into(), other.into()))
        })
    }

    fn either(&mut self) -> Result<Expression> {
        let mut left = self.both()?;
        while self.take_sign("||") {
            let right = self.both()?;
            left = self.made(Expression::Or(left.into(), right.into()))?;
        }
        Ok(left)
    }

    fn both(&mut self) -> Result<Expression> {
        let mut left = self.relation()?;
        while self.take_sign("&&") {
            let right = self.relation()?;
            left = self.made(Expression::And(left.into(), right.into()))?;
        }
        Ok(left)
    }

    fn operator(&mut self, among: &[(&str, Operator)]) -> Option<Operator> {
        let found = match self.peek()? {
            Token::Sign(sign) => among.iter().find(|(text, _)| text == sign),
            Token::Name(name) => among.iter().find(|(text, _)| text == name),
            _ => None,
        };
        self.at += usize::from(found.is_some());
        found.map(|(_, operator)| *operator)
    }

    fn chain(
        &mut self,
        among: &[(&str, Operator)],
        next: impl Fn(&mut Self) -> Result<Expression>,
    ) -> Result<Expression> {
        let mut left = next(self)?;
        while let Some(operator) = self.operator(among) {
            let right = next(self)?;
            left = self.made(Expression::Binary(operator, left.into(), right.into()))?;
        }
        Ok(left)
    }

    fn relation(&mut self) -> Result<Expression> {
        use Operator::{AtLeast, AtMost, Equal, Greater, In, Less, Unequal};
        let among =
            [("==", Equal), ("!=", Unequal), ("<=", AtMost), (">=", AtLeast), ("<", Less), (">", Greater), ("in", In)];
        self.chain(&among, Self::addition)
    }

    fn addition(&mut self) -> Result<Expression> {
        self.chain(&[("+", Operator::Add), ("-", Operator::Subtract)], Self::multiplication)
    }

    fn multiplication(&mut self) -> Result<Expression> {
        use Operator::{Divide, Multiply, Remainder};
        self.chain(&[("*", Multiply), ("/", Divide), ("%", Remainder)], Self::unary)
    }

    fn unary(&mut self) -> Result<Expression> {
        if self.take_sign("!") {
            let inner = self.nested(Self::unary)?;
            return self.made(Expression::Not(inner.into()));
        }
        if self.take_sign("-") {
            let inner = self.nested(Self::unary)?;
            return self.made(Expression::Negative(inner.into()));
        }
        self.member()
    }

    fn member(&mut self) -> Result<Expression> {
        let mut of = self.primary()?;
        loop {
            let made = if self.take_sign(".") {
                let name = self.name()?;
                if self.take_sign("(") {
                    self.method(of, name)?
                } else {
                    Expression::Select { of: of.into(), field: unescaped(&name), access: Access::Plain }
                }
            } else if self.take_sign(".?") {
                let field = unescaped(&self.name()?);
                Expression::Select { of: of.into(), field, access: Access::Optional }
            } else if self.take_sign("[") {
                self.index(of, Access::Plain)?
            } else if self.take_sign("[?") {
                self.index(of, Access::Optional)?
            } else {
                return Ok(of);
            };
            of = self.made(made)?;
        }
    }

    fn name(&mut self) -> Result<String> {
        let Some(Token::Name(name)) = self.peek() else { return Err(self.unexpected("a name")) };
        self.at += 1;
        Ok(name.clone())
    }

    fn index(&mut self, of: Expression, access: Access) -> Result<Expression> {
        let key = self.expression()?;
        self.expect("]")?;
        Ok(Expression::Index { of: of.into(), key: key.into(), access })
    }

    fn method(&mut self, of: Expression, name: String) -> Result<Expression> {
        let each = match name.as_str() {
            "all" => Some(Each::All),
            "exists" => Some(Each::Exists),
            "exists_one" | "existsOne" => Some(Each::ExistsOne),
            "map" => Some(Each::Map),
            "filter" => Some(Each::Filter),
            _ => None,
        };
        if let Some(what) = each {
            return self.each(what, of, &name);
        }
        let arguments = self.arguments(")")?;
        if !functions::is_method(&name, arguments.len()) {
            return Err(format!("there is no function {name} with {} arguments on a value", arguments.len()));
        }
        Ok(Expression::Method { of: of.into(), name, arguments })
    }

    fn each(&mut self, what: Each, over: Expression, name: &str) -> Result<Expression> {
        let variable = self.name()?;
        self.bound.push(variable.clone());
        let mut body = Vec::new();
        while self.take_sign(",") {
            body.push(self.expression()?);
        }
        self.bound.pop();
        self.expect(")")?;
        let fits = matches!((what, body.len()), (_, 1) | (Each::Map, 2));
        if !fits {
            return Err(format!("{name} takes a variable and an expression"));
        }
        Ok(Expression::Each { what, over: over.into(), variable, body })
    }

    fn arguments(&mut self, end: &str) -> Result<Vec<Expression>> {
        let mut arguments = Vec::new();
        while !self.take_sign(end) {
            if !arguments.is_empty() {
                self.expect(",")?;
                // A comma may come after the last element of a list.
                if end == "]" && self.take_sign(end) {
                    break;
                }
            }
            arguments.push(self.expression()?);
        }
        Ok(arguments)
    }

    fn primary(&mut self) -> Result<Expression> {
        let Some(token) = self.peek() else { return Err(self.unexpected("a value")) };
        self.at += 1;
        let made = match token {
            Token::Int(number) => Expression::Int(*number),
            Token::Double(number) => Expression::Double(*number),
            Token::Text(text) => Expression::Text(text.clone()),
            Token::Sign("(") => {
                let inner = self.expression()?;
                self.expect(")")?;
                return Ok(inner);
            }
            Token::Sign("[") => Expression::List(self.arguments("]")?),
            Token::Sign("{") => self.map()?,
            Token::Name(name) => self.named(name)?,
            Token::Sign(_) => {
                self.at -= 1;
                return Err(self.unexpected("a value"));
            }
        };
        self.made(made)
    }

    fn map(&mut self) -> Result<Expression> {
        let mut entries = Vec::new();
        while !self.take_sign("}") {
            if !entries.is_empty() {
                self.expect(",")?;
            }
            let key = self.expression()?;
            self.expect(":")?;
            entries.push((key, self.expression()?));
        }
        Ok(Expression::Map(entries))
    }

    fn named(&mut self, name: &str) -> Result<Expression> {
        if self.take_sign("(") {
            let mut arguments = self.arguments(")")?;
            if name == "has" {
                return match (arguments.pop(), arguments.is_empty()) {
                    (Some(Expression::Select { of, field, access: Access::Plain }), true) => {
                        Ok(Expression::Has { of, field })
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
            "true" => Expression::Flag(true),
            "false" => Expression::Flag(false),
            "null" => Expression::Null,
            "oldSelf" => {
                self.mentions_old = true;
                Expression::Name(name.to_owned())
            }
            "self" => Expression::Name(name.to_owned()),
            bound if self.bound.iter().any(|b| b == bound) => Expression::Name(name.to_owned()),
            kind if functions::TYPES.contains(&kind) => Expression::Name(name.to_owned()),
            other => return Err(format!("unknown name {other}")),
        })
    }
}

/// Field names that would not be names in an expression are written with these in place of what does not fit.
fn unescaped(name: &str) -> String {
    const RESERVED: [&str; 20] = [
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
    if let Some(word) = inner.filter(|inner| RESERVED.contains(inner)) {
        return word.to_owned();
    }
    let mut out = String::new();
    let mut rest = name;
    while let Some(at) = rest.find("__") {
        let (before, escape) = rest.split_at(at);
        out.push_str(before);
        let known = [("__underscores__", "__"), ("__dot__", "."), ("__dash__", "-"), ("__slash__", "/")];
        let found = known.iter().find(|(text, _)| escape.starts_with(text));
        let (text, stands_for) = found.copied().unwrap_or(("__", "__"));
        out.push_str(stands_for);
        rest = &escape[text.len()..];
    }
    out + rest
}
