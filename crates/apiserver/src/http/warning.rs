//! `Warning` headers: told once each, and never so much that a client refuses the answer.

use http::header::HeaderValue;

/// Together they may be this long; if they are not, each is cut short, and those that still do not fit are left out.
const TOTAL: usize = 4096;
const SHORT: usize = 256;

pub(super) fn headers(warnings: &[String]) -> Vec<HeaderValue> {
    let mut texts: Vec<String> = Vec::new();
    for warning in warnings {
        let text: String = warning.chars().filter(|c| c.is_ascii() && !c.is_ascii_control()).collect();
        if !text.is_empty() && !texts.contains(&text) {
            texts.push(text);
        }
    }
    if texts.iter().map(String::len).sum::<usize>() > TOTAL {
        texts.iter_mut().for_each(|text| text.truncate(SHORT));
    }
    let mut left = TOTAL;
    let mut fits = |text: &String| {
        let fits = text.len() <= left;
        left = left.saturating_sub(text.len());
        fits
    };
    texts.iter().take_while(|text| fits(text)).filter_map(|text| quoted(text)).collect()
}

fn quoted(text: &str) -> Option<HeaderValue> {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"");
    HeaderValue::from_str(&format!("299 - \"{escaped}\"")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_quoted_told_once_and_bounded() {
        let told = headers(&["unknown field \"a\"".into(), "unknown field \"a\"".into(), "b\nc\u{e4}".into()]);
        assert_eq!(told, [r#"299 - "unknown field \"a\"""#, r#"299 - "bc""#]);
        let many: Vec<String> = (0..100).map(|i| format!("{i} {}", "x".repeat(500))).collect();
        let told = headers(&many);
        assert_eq!(told.len(), TOTAL / SHORT);
        assert!(told.iter().all(|value| value.len() <= SHORT + 10));
    }
}
