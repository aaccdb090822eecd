//! The rules of `x-kubernetes-validations`: expressions of the Common Expression Language about an object and what it was
//! before. A rule is compiled with its definition and evaluated with each write.
//!
//! What the language has and is not here (protobuf messages, byte strings, addresses, quantities, formats) is refused when
//! a rule is compiled, never skipped when it is evaluated. Evaluation is bounded by a [`Budget`], whatever the rule and the object.

mod evaluate;
mod functions;
mod lex;
mod parse;
mod value;

use serde_json::Value;

use evaluate::Evaluation;
use parse::Expression;
use value::Datum;

/// How much all the rules of one write may do together: roughly, looks at values.
pub(super) struct Budget(u64);

impl Default for Budget {
    fn default() -> Self {
        Self(5_000_000)
    }
}

impl Budget {
    /// Takes from the budget; says so when it is used up.
    fn spend(&mut self, steps: usize) -> Result<(), String> {
        self.0 = self.0.checked_sub(steps as u64).ok_or("the rule does too much: its budget is used up")?;
        Ok(())
    }
}

#[derive(Debug)]
pub struct Program {
    expression: Expression,
    /// Does it ask what was before? Then it holds wherever nothing was.
    pub(super) compares: bool,
}

impl Program {
    /// Compiles a rule about `self` and `oldSelf`.
    pub fn compile(rule: &str) -> Result<Self, String> {
        let tokens = lex::tokens(rule)?;
        let parsed = parse::parse(&tokens)?;
        Ok(Self { expression: parsed.expression, compares: parsed.mentions_old })
    }

    /// Does the value meet the rule?
    pub(super) fn holds(&self, old: Old<'_>, value: &Value, budget: &mut Budget) -> Result<bool, String> {
        match self.evaluate(old, value, budget)? {
            Datum::Flag(flag) => Ok(flag),
            other => Err(format!("the rule gives a value of type {}, not a bool", other.type_name())),
        }
    }

    /// The text an expression for messages gives, if it gives one.
    pub(super) fn text(&self, old: Old<'_>, value: &Value, budget: &mut Budget) -> Option<String> {
        match self.evaluate(old, value, budget) {
            Ok(Datum::Text(text)) => Some(text.trim().to_owned()).filter(|t| !t.is_empty() && !t.contains('\n')),
            _ => None,
        }
    }

    fn evaluate<'a>(&'a self, old: Old<'a>, value: &'a Value, budget: &mut Budget) -> Result<Datum<'a>, String> {
        let old = match old {
            Old::Plain(old) => old.map(Datum::of),
            Old::Optional(old) => Some(Datum::Optional(old.map(|old| Box::new(Datum::of(old))))),
        };
        let mut scope = vec![("self", Datum::of(value))];
        scope.extend(old.map(|old| ("oldSelf", old)));
        Evaluation { scope, budget }.of(&self.expression)
    }
}

/// What was before, and how a rule sees it.
#[derive(Clone, Copy)]
pub(super) enum Old<'a> {
    Plain(Option<&'a Value>),
    /// As an optional value: there even if nothing was.
    Optional(Option<&'a Value>),
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn result(rule: &str, value: Value, old: Option<Value>) -> Result<bool, String> {
        Program::compile(rule)?.holds(Old::Plain(old.as_ref()), &value, &mut Budget::default())
    }

    #[test]
    fn rules_hold_or_do_not() {
        let value = json!({
            "n": 3, "half": 0.5, "name": "web-1", "namespace": "team", "on": true, "nothing": null, "list": [1, 2, 3],
            "parts": [{ "key": "a", "n": 1 }, { "key": "b", "n": 2 }], "labels": { "app.kubernetes.io/x": "y", "my-key": 1 },
            "when": "2026-01-02T03:04:05Z", "time": "90m",
        });
        for (rule, want) in [
            ("self.n == 3 && self.n != 4 && self.n >= 3 && self.n < 4", true),
            ("self.n > 3 || self.half <= 0.5", true),
            ("self.half < self.n", true),
            ("!(self.on) ? false : self.name.startsWith('web-')", true),
            ("self.name.endsWith('-2')", false),
            ("self.name.matches('^web-[0-9]+$') && !self.name.matches(\"^x\")", true),
            ("self.name.contains('b-') && size(self.name) == 5 && self.name.size() == 5", true),
            ("self.name.split('-')[0] == 'web' && self.name.substring(4) == '1'", true),
            ("self.name.replace('web', 'db').upperAscii() == 'DB-1'", true),
            ("has(self.name) && !has(self.other)", true),
            ("has(self.__namespace__) && self.__namespace__ == 'team'", true),
            ("self.labels.app__dot__kubernetes__dot__io__slash__x == 'y' && self.labels['my-key'] == 1", true),
            ("'my-key' in self.labels && !('other' in self.labels) && 2 in self.list", true),
            ("self.list.all(x, x > 0) && self.list.exists(x, x == 2) && self.list.exists_one(x, x > 2)", true),
            ("self.list.map(x, x * 2) == [2, 4, 6] && self.list.filter(x, x % 2 == 1) == [1, 3]", true),
            ("self.list.map(x, x > 1, x + 1) == [3, 4]", true),
            ("self.parts.all(p, self.parts.exists_one(q, q.key == p.key))", true),
            ("self.labels.all(k, k.contains('k'))", true),
            ("self.parts.map(p, p.n).sum() == 3 && self.list.max() == 3 && self.list.min() == 1", true),
            ("self.list.isSorted() && [3, 1].isSorted() == false", true),
            ("self.list + [4] == [1, 2, 3, 4] && 'a' + 'b' == 'ab' && size(self.list) == 3", true),
            ("{'a': 1}.a == 1 && {'a': 1} == {'a': 1}", true),
            ("7 / 2 == 3 && -7 % 3 == -1 && 0x10 == 16 && 1.5e1 == 15.0 && 2 - -1 == 3", true),
            ("int('7') == 7 && string(7) == '7' && double(1) == 1.0 && type(1) == int", true),
            ("self.nothing == null && self.name != null", true),
            (
                "timestamp(self.when) < timestamp('2027-01-01T00:00:00Z') && duration(self.time) > duration('1h29m')",
                true,
            ),
            ("self.?other.orValue('d') == 'd' && self.?name.orValue('d') == 'web-1'", true),
            ("self.?other.hasValue() || self.?name.hasValue()", true),
            // What goes wrong on one side does not matter if the other decides.
            ("self.other == 1 || true", true),
            ("self.other == 1 && false", false),
            (r#""tab\t\"quoted\" \u00e4" == 'tab	"quoted" ä' && r'\d' == '\\d'"#, true),
            ("'''a\nb'''.size() == 3 // and a comment", true),
            ("self.n in [1, 2, 3] ? self.on : false", true),
        ] {
            assert_eq!(result(rule, value.clone(), None), Ok(want), "{rule}");
        }
    }

    #[test]
    fn what_was_before_can_be_asked() {
        let rule = "!has(oldSelf.uid) || (has(self.uid) && self.uid == oldSelf.uid)";
        assert!(Program::compile(rule).unwrap().compares);
        assert!(!Program::compile("self.oldSelf == 'x'").unwrap().compares);
        for (old, new, want) in [
            (json!({}), json!({ "uid": "1" }), true),
            (json!({ "uid": "1" }), json!({ "uid": "1" }), true),
            (json!({ "uid": "1" }), json!({ "uid": "2" }), false),
            (json!({ "uid": "1" }), json!({}), false),
        ] {
            assert_eq!(result(rule, new.clone(), Some(old.clone())), Ok(want), "{old} {new}");
        }
        let optional = Program::compile("!oldSelf.hasValue() || oldSelf.value() <= self").unwrap();
        for (old, want) in [(None, true), (Some(json!(2)), true), (Some(json!(4)), false)] {
            let held = optional.holds(Old::Optional(old.as_ref()), &json!(3), &mut Budget::default());
            assert_eq!(held, Ok(want), "{old:?}");
        }
    }

    #[test]
    fn what_cannot_be_compiled_is_told_at_once() {
        for (rule, why) in [
            ("self.", "a name"),
            ("self.n ==", "unexpected end"),
            ("(self.n", "\")\""),
            ("self.n == 'x", "string does not end"),
            ("self.n = 3", "\"=\""),
            ("other.n == 3", "unknown name other"),
            ("isURL(self.n)", "no function isURL"),
            ("self.name.isWeird()", "no function isWeird"),
            ("self.list.all(x)", "all"),
            ("has(self)", "has"),
            ("99999999999999999999 == 1", "number"),
            ("b'bytes' == self", "byte strings"),
            ("", "unexpected end"),
        ] {
            let error = Program::compile(rule).err().unwrap_or_else(|| panic!("{rule} was compiled"));
            assert!(error.contains(why), "{rule}: {error}");
        }
        for deep in
            ["(".repeat(100_000), "!".repeat(100_000), "[".repeat(100_000), format!("1{}", "+1".repeat(100_000))]
        {
            assert!(Program::compile(&deep).is_err(), "depth is refused, not fatal");
        }
    }

    #[test]
    fn what_cannot_be_evaluated_is_told() {
        for (rule, why) in [
            ("self.none == 1", "no such key: none"),
            ("self.n < 'x'", "cannot be compared"),
            ("self.n + 'x' == 1", "no such overload"),
            ("9223372036854775807 + self.n == 1", "overflow"),
            ("self.n / 0 == 1", "divide by zero"),
            ("self.list[7] == 1", "out of range"),
            ("self.n", "not a bool"),
            ("self.name.matches('(')", "pattern"),
            ("self.n.startsWith('x')", "no such overload"),
            ("self.list.all(x, x)", "no bool"),
        ] {
            let error = result(rule, json!({ "n": 3, "list": [1], "name": "a" }), None).expect_err(rule);
            assert!(error.contains(why), "{rule}: {error}");
        }
        let many = json!({ "list": vec![1; 3000] });
        let endless = "self.list.all(a, self.list.all(b, self.list.all(c, a == b && b == c)))";
        assert!(result(endless, many, None).expect_err(endless).contains("budget"));
    }
}
