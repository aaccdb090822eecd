//! Which quantities stay as they were written. Almost all are rewritten in canonical form; but one whose digits are
//! already those of the canonical form is kept, and with it a plus sign or a leading zero.

/// Whether a valid quantity is kept as it is.
pub(super) fn is_kept(text: &str) -> bool {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    let length = i32::try_from(whole.len() + fraction.len()).unwrap_or(i32::MAX);
    match binary(suffix) {
        Some(exponent) => {
            let fits = 15 - length - exponent * 3 / 10 > 0;
            let odd = whole.parse::<i64>().is_ok_and(|n| n & 7 != 0);
            fraction.is_empty() && fits && odd
        }
        None => {
            let Some(exponent) = decimal(suffix) else { return false };
            let scale = exponent - i32::try_from(fraction.len()).unwrap_or(0);
            let digits = format!("{whole}{fraction}");
            length <= 18
                && scale >= -9
                && scale % 3 == 0
                && !digits.ends_with("000")
                && digits.starts_with(|c: char| c != '0')
        }
    }
}

fn binary(suffix: &str) -> Option<i32> {
    let at = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].iter().position(|s| *s == suffix)?;
    Some(10 * (i32::try_from(at).ok()? + 1))
}

fn decimal(suffix: &str) -> Option<i32> {
    if let Some(exponent) = suffix.strip_prefix(['e', 'E']).filter(|e| !e.is_empty()) {
        return exponent.parse().ok();
    }
    let at = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"].iter().position(|s| *s == suffix)?;
    Some(3 * i32::try_from(at).ok()? - 9)
}

#[cfg(test)]
mod tests {
    use super::is_kept;

    #[test]
    fn only_what_is_canonical_but_for_its_sign_is_kept() {
        for (text, want) in [
            ("+5Gi", true),
            ("5Gi", true),
            ("1024Mi", false),
            ("8Gi", false),
            ("0.5Gi", false),
            ("1500m", true),
            ("1000M", false),
            ("+1500m", true),
            ("1e9", true),
            ("0.1", false),
        ] {
            assert_eq!(is_kept(text), want, "{text}");
        }
    }
}
