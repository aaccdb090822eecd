//! The Common Expression Language, as the rules of `x-kubernetes-validations` use it: boolean expressions about an object
//! (`self`) and its previous state (`oldSelf`). A rule is compiled with its definition and evaluated at each write.
//!
//! Not supported: protobuf messages, byte strings, addresses, quantities and formats. A rule that uses them does not compile,
//! so that its definition is refused; no rule is skipped at evaluation. A [`EvaluationBudget`] limits evaluation for any rule and object.

mod arithmetic;
mod budget;
mod evaluate;
mod functions;
mod lex;
mod parse;
mod value;

use serde_json::Value;

pub(super) use budget::EvaluationBudget;
use evaluate::Evaluator;
use parse::Expression;
use value::{CelResult, CelValue};

/// A compiled expression.
#[derive(Debug)]
pub(crate) struct CelProgram {
    expression: Expression,
    /// The expression uses `oldSelf`: it is a transition rule, which applies only to updates of an existing value.
    pub(super) uses_old_self: bool,
}

impl CelProgram {
    /// Compiles an expression about `self` and `oldSelf`. The error is a message for the client.
    pub(crate) fn compile(rule: &str) -> Result<Self, String> {
        let tokens = lex::tokenize(rule)?;
        let parsed = parse::parse(&tokens)?;
        Ok(Self { expression: parsed.expression, uses_old_self: parsed.uses_old_self })
    }

    /// Evaluates a rule. Fails if the result is not a bool.
    pub(super) fn holds(
        &self,
        old_self: OldSelf<'_>,
        value: &Value,
        budget: &mut EvaluationBudget,
    ) -> Result<bool, String> {
        match self.evaluate(old_self, value, budget)? {
            CelValue::Bool(holds) => Ok(holds),
            other => Err(format!("the rule gives a value of type {}, not a bool", other.type_name())),
        }
    }

    /// Evaluates a `messageExpression`. Returns `None` if that fails or does not give one non-empty line.
    pub(super) fn message(
        &self,
        old_self: OldSelf<'_>,
        value: &Value,
        budget: &mut EvaluationBudget,
    ) -> Option<String> {
        match self.evaluate(old_self, value, budget) {
            Ok(CelValue::String(text)) => Some(text.trim().to_owned()).filter(|t| !t.is_empty() && !t.contains('\n')),
            _ => None,
        }
    }

    fn evaluate<'a>(&'a self, old_self: OldSelf<'a>, value: &'a Value, budget: &mut EvaluationBudget) -> CelResult<'a> {
        let old_self = match old_self {
            OldSelf::Plain(old) => old.map(CelValue::from_json),
            OldSelf::Optional(old) => Some(CelValue::Optional(old.map(|old| Box::new(CelValue::from_json(old))))),
        };
        let mut scope = vec![("self", CelValue::from_json(value))];
        scope.extend(old_self.map(|old_self| ("oldSelf", old_self)));
        Evaluator { scope, budget }.evaluate(&self.expression)
    }
}

/// The value before the update, and how `oldSelf` presents it to the rule.
#[derive(Clone, Copy)]
pub(super) enum OldSelf<'a> {
    /// The old value itself; `oldSelf` is undefined if there was none.
    Plain(Option<&'a Value>),
    /// With `optionalOldSelf`: an optional, which has no value if there was none.
    Optional(Option<&'a Value>),
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn result(rule: &str, value: Value, old: Option<Value>) -> Result<bool, String> {
        CelProgram::compile(rule)?.holds(OldSelf::Plain(old.as_ref()), &value, &mut EvaluationBudget::default())
    }

    #[test]
    fn rules_evaluate_to_a_bool() {
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
            // An error on one side is ignored if the other side decides.
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
    fn rules_can_use_the_old_value() {
        let rule = "!has(oldSelf.uid) || (has(self.uid) && self.uid == oldSelf.uid)";
        assert!(CelProgram::compile(rule).unwrap().uses_old_self);
        assert!(!CelProgram::compile("self.oldSelf == 'x'").unwrap().uses_old_self);
        for (old, new, want) in [
            (json!({}), json!({ "uid": "1" }), true),
            (json!({ "uid": "1" }), json!({ "uid": "1" }), true),
            (json!({ "uid": "1" }), json!({ "uid": "2" }), false),
            (json!({ "uid": "1" }), json!({}), false),
        ] {
            assert_eq!(result(rule, new.clone(), Some(old.clone())), Ok(want), "{old} {new}");
        }
        let optional = CelProgram::compile("!oldSelf.hasValue() || oldSelf.value() <= self").unwrap();
        for (old, want) in [(None, true), (Some(json!(2)), true), (Some(json!(4)), false)] {
            let holds = optional.holds(OldSelf::Optional(old.as_ref()), &json!(3), &mut EvaluationBudget::default());
            assert_eq!(holds, Ok(want), "{old:?}");
        }
    }

    #[test]
    fn invalid_rules_do_not_compile() {
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
            let error = CelProgram::compile(rule).err().unwrap_or_else(|| panic!("{rule} was compiled"));
            assert!(error.contains(why), "{rule}: {error}");
        }
        for deep in
            ["(".repeat(100_000), "!".repeat(100_000), "[".repeat(100_000), format!("1{}", "+1".repeat(100_000))]
        {
            assert!(CelProgram::compile(&deep).is_err(), "deep nesting is an error, not a stack overflow");
        }
    }

    #[test]
    fn evaluation_errors_are_reported() {
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
        let large = json!({ "list": vec![1; 3000] });
        let endless = "self.list.all(a, self.list.all(b, self.list.all(c, a == b && b == c)))";
        assert!(result(endless, large, None).expect_err(endless).contains("budget"));
    }
}
