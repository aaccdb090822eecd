//! Kubernetes quantities as exact numbers: parsing, comparison and the canonical form.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

const NANOS_PER_UNIT: i128 = 1_000_000_000;
/// Suffix and power of ten.
const DECIMAL_SUFFIXES: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
/// Suffix and power of two.
const BINARY_SUFFIXES: [(&str, u32); 6] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)];

/// The kind of suffix that a quantity was written with. The canonical form keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuffixFormat {
    Binary,
    Decimal,
    Exponent,
}

/// An exact quantity. Fractions below 10⁻⁹ are rounded up, as in Kubernetes.
#[derive(Clone, Copy, Debug)]
pub struct Quantity {
    nanos: i128,
    format: SuffixFormat,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'; {0:?} does not")]
pub struct InvalidQuantity(pub String);

impl Quantity {
    pub fn from_bytes(bytes: i64) -> Self {
        Self { nanos: i128::from(bytes) * NANOS_PER_UNIT, format: SuffixFormat::Binary }
    }

    /// The value in whole units, rounded up; saturates at the limits of `i64`.
    pub fn to_bytes(self) -> i64 {
        let whole = self.nanos.div_euclid(NANOS_PER_UNIT) + i128::from(self.nanos.rem_euclid(NANOS_PER_UNIT) != 0);
        i64::try_from(whole).unwrap_or(if whole < 0 { i64::MIN } else { i64::MAX })
    }

    /// The value in thousandths, rounded up; saturates like [`Quantity::to_bytes`].
    pub fn to_millis(self) -> i64 {
        Self { nanos: self.nanos.saturating_mul(1000), ..self }.to_bytes()
    }

    pub fn is_positive(self) -> bool {
        self.nanos > 0
    }

    pub fn is_negative(self) -> bool {
        self.nanos < 0
    }
}

impl FromStr for Quantity {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidQuantity(text.to_owned());
        let (negative, unsigned) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let split = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(split);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
            return Err(invalid());
        }
        let (scale, format) = parse_suffix(suffix).ok_or_else(invalid)?;
        let nanos = to_nanos(whole, fraction, scale).ok_or_else(invalid)?;
        Ok(Self { nanos: if negative { -nanos } else { nanos }, format })
    }
}

enum Scale {
    PowerOfTen(i32),
    PowerOfTwo(u32),
}

fn parse_suffix(suffix: &str) -> Option<(Scale, SuffixFormat)> {
    if let Some((_, exponent)) = DECIMAL_SUFFIXES.iter().find(|(s, _)| *s == suffix) {
        return Some((Scale::PowerOfTen(*exponent), SuffixFormat::Decimal));
    }
    if let Some((_, exponent)) = BINARY_SUFFIXES.iter().find(|(s, _)| *s == suffix) {
        return Some((Scale::PowerOfTwo(*exponent), SuffixFormat::Binary));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?;
    (-40..=40).contains(&exponent).then_some((Scale::PowerOfTen(exponent), SuffixFormat::Exponent))
}

/// `whole.fraction × scale` in units of 10⁻⁹, rounded up; `None` if it does not fit into `i128`.
fn to_nanos(whole: &str, fraction: &str, scale: Scale) -> Option<i128> {
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    let mantissa: i128 = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    let decimals = i32::try_from(fraction.len()).ok()?;
    let (mantissa, power) = match scale {
        Scale::PowerOfTen(exponent) => (mantissa, exponent + 9 - decimals),
        Scale::PowerOfTwo(exponent) => (mantissa.checked_mul(1_i128 << exponent)?, 9 - decimals),
    };
    if mantissa == 0 {
        return Some(0);
    }
    if power >= 0 {
        return mantissa.checked_mul(10_i128.checked_pow(power.unsigned_abs())?);
    }
    match 10_i128.checked_pow(power.unsigned_abs()) {
        Some(divisor) => Some(mantissa / divisor + i128::from(mantissa % divisor != 0)),
        None => Some(1),
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let whole = (self.nanos % NANOS_PER_UNIT == 0).then_some(self.nanos / NANOS_PER_UNIT);
        // A binary suffix is used for multiples of 1024 only; values below that are written without one.
        if let (SuffixFormat::Binary, Some(value)) = (self.format, whole) {
            if value.abs() >= 1024 {
                for (suffix, shift) in BINARY_SUFFIXES.iter().rev() {
                    if value % (1_i128 << shift) == 0 {
                        return write!(f, "{}{suffix}", value >> shift);
                    }
                }
            }
            return write!(f, "{value}");
        }
        let mut value = self.nanos;
        let mut exponent = -9;
        while value % 1000 == 0 && exponent < 18 {
            value /= 1000;
            exponent += 3;
        }
        match DECIMAL_SUFFIXES.iter().find(|(_, e)| *e == exponent) {
            Some((suffix, _)) if self.format != SuffixFormat::Exponent => write!(f, "{value}{suffix}"),
            _ if exponent == 0 => write!(f, "{value}"),
            _ => write!(f, "{value}e{exponent}"),
        }
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_canonical_form_keeps_the_format_and_uses_the_largest_exact_suffix() {
        for (given, want) in [
            ("5Gi", "5Gi"),
            ("1024Mi", "1Gi"),
            ("1536Mi", "1536Mi"),
            ("0.5Gi", "512Mi"),
            ("1000Mi", "1000Mi"),
            ("1000k", "1M"),
            ("1500m", "1500m"),
            ("1.5", "1500m"),
            ("100m", "100m"),
            ("1000m", "1"),
            ("0", "0"),
            ("0Gi", "0"),
            ("1e3", "1e3"),
            ("1000000e0", "1e6"),
            ("12", "12"),
            ("-2Ki", "-2Ki"),
            ("+3k", "3k"),
            ("1.25Gi", "1280Mi"),
            ("512", "512"),
            ("0.1n", "1n"),
            ("1073741824", "1073741824"),
        ] {
            assert_eq!(given.parse::<Quantity>().unwrap().to_string(), want, "{given}");
        }
        assert_eq!(Quantity::from_bytes(1 << 30).to_string(), "1Gi");
        assert_eq!(Quantity::from_bytes(1_000_000_000).to_string(), "1000000000");
    }

    #[test]
    fn quantities_compare_by_value_and_not_by_suffix() {
        let q = |s: &str| s.parse::<Quantity>().unwrap();
        assert_eq!(q("1Gi"), q("1073741824"));
        assert!(q("1G") < q("1Gi"));
        assert_eq!(q("1500m").to_bytes(), 2);
        assert_eq!(q("1500m").to_millis(), 1500);
        assert_eq!(q("1500u").to_millis(), 2);
        assert_eq!(q("9Ei").to_bytes(), i64::MAX);
    }

    #[test]
    fn malformed_quantities_are_refused() {
        for bad in ["", "Gi", "1GiB", "1 Gi", "1.2.3", "--1", "1e", "1e99", "abc", "0x10", "."] {
            assert!(bad.parse::<Quantity>().is_err(), "{bad}");
        }
    }
}
