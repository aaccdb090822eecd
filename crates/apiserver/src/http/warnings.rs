//! `Warning` headers: each text once, and limited in size so that clients do not refuse the response.

use http::header::HeaderValue;

/// The limit of all texts together. If they are longer, each is cut to `MAX_SHORTENED_BYTES`, and those beyond the
/// limit are left out.
const MAX_TOTAL_BYTES: usize = 4096;
const MAX_SHORTENED_BYTES: usize = 256;

pub(super) fn headers(warnings: &[String]) -> Vec<HeaderValue> {
    let mut texts: Vec<String> = Vec::new();
    for warning in warnings {
        let text: String = warning.chars().filter(|c| c.is_ascii() && !c.is_ascii_control()).collect();
        if !text.is_empty() && !texts.contains(&text) {
            texts.push(text);
        }
    }
    if texts.iter().map(String::len).sum::<usize>() > MAX_TOTAL_BYTES {
        texts.iter_mut().for_each(|text| text.truncate(MAX_SHORTENED_BYTES));
    }
    let mut left = MAX_TOTAL_BYTES;
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
    fn warnings_are_quoted_deduplicated_and_limited() {
        let values = headers(&["unknown field \"a\"".into(), "unknown field \"a\"".into(), "b\nc\u{e4}".into()]);
        assert_eq!(values, [r#"299 - "unknown field \"a\"""#, r#"299 - "bc""#]);
        let many: Vec<String> = (0..100).map(|i| format!("{i} {}", "x".repeat(500))).collect();
        let values = headers(&many);
        assert_eq!(values.len(), MAX_TOTAL_BYTES / MAX_SHORTENED_BYTES);
        assert!(values.iter().all(|value| value.len() <= MAX_SHORTENED_BYTES + 10));
    }
}
