//! Canonical form of quantities. Kubernetes stores a quantity in canonical form (`1024Mi` becomes `1Gi`), except where
//! its decoder takes a shortcut: digits that are already canonical are stored as the client wrote them, including a plus
//! sign or leading zeros.

use std::collections::BTreeMap;

use cleat_api::Quantity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;

/// Quantities by resource name: requests, limits, capacity.
pub(super) type ResourceList = BTreeMap<String, RawQuantity>;

/// Rewrites the quantities in canonical form. An invalid quantity is left unchanged; validation reports it.
pub(super) fn canonicalize_quantities(resources: &mut Option<ResourceList>) {
    for raw in resources.iter_mut().flat_map(|r| r.values_mut()) {
        if let Ok(quantity) = raw.0.parse::<Quantity>()
            && !is_stored_verbatim(&raw.0)
        {
            raw.0 = quantity.to_string();
        }
    }
}

/// Does Kubernetes store this valid quantity exactly as written? See the module's comment.
fn is_stored_verbatim(text: &str) -> bool {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    let length = i32::try_from(whole.len() + fraction.len()).unwrap_or(i32::MAX);
    match binary_exponent(suffix) {
        Some(exponent) => {
            let fits = 15 - length - exponent * 3 / 10 > 0;
            let is_not_multiple_of_8 = whole.parse::<i64>().is_ok_and(|n| n & 7 != 0);
            fraction.is_empty() && fits && is_not_multiple_of_8
        }
        None => {
            let Some(exponent) = decimal_exponent(suffix) else { return false };
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

/// The power of two that the suffix stands for: 10 for `Ki`.
fn binary_exponent(suffix: &str) -> Option<i32> {
    let index = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].iter().position(|s| *s == suffix)?;
    Some(10 * (i32::try_from(index).ok()? + 1))
}

/// The power of ten that the suffix stands for: 3 for `k` or `e3`.
fn decimal_exponent(suffix: &str) -> Option<i32> {
    if let Some(exponent) = suffix.strip_prefix(['e', 'E']).filter(|e| !e.is_empty()) {
        return exponent.parse().ok();
    }
    let index = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"].iter().position(|s| *s == suffix)?;
    Some(3 * i32::try_from(index).ok()? - 9)
}

#[cfg(test)]
mod tests {
    use super::is_stored_verbatim;

    #[test]
    fn quantities_with_canonical_digits_are_stored_verbatim() {
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
            assert_eq!(is_stored_verbatim(text), want, "{text}");
        }
    }
}
