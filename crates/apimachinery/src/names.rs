//! Validation of names, label keys and label values. The errors are the messages of Kubernetes.

/// Which object names a kind allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameRule {
    Subdomain,
    Label,
    /// Any name that can be a segment of a URL path.
    PathSegment,
}

const SUBDOMAIN_MESSAGE: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
    and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL_MESSAGE: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
    and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const QUALIFIED_MESSAGE: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with \
    an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
    '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE_MESSAGE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', \
    and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for \
    validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";

pub fn validate_name(name: &str, rule: NameRule) -> Result<(), String> {
    match rule {
        NameRule::Subdomain => validate_subdomain(name),
        NameRule::Label => validate_label(name),
        NameRule::PathSegment => validate_path_segment(name),
    }
}

fn validate_path_segment(name: &str) -> Result<(), String> {
    match name {
        "." | ".." => Err(format!("may not be '{name}'")),
        _ => match name.chars().find(|c| ['/', '%'].contains(c)) {
            Some(c) => Err(format!("may not contain '{c}'")),
            None => Ok(()),
        },
    }
}

fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let inner = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    matches!((bytes.first(), bytes.last()), (Some(first), Some(last)) if inner(first) && inner(last))
        && bytes.iter().all(|b| inner(b) || *b == b'-')
}

pub fn validate_subdomain(name: &str) -> Result<(), String> {
    if name.len() > 253 {
        return Err("must be no more than 253 bytes".into());
    }
    if name.split('.').all(is_label) { Ok(()) } else { Err(SUBDOMAIN_MESSAGE.into()) }
}

pub fn validate_label(name: &str) -> Result<(), String> {
    if name.len() > 63 {
        return Err("must be no more than 63 bytes".into());
    }
    if is_label(name) { Ok(()) } else { Err(LABEL_MESSAGE.into()) }
}

const DNS_1035_MESSAGE: &str = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an \
    alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for \
    validation is '[a-z]([-a-z0-9]*[a-z0-9])?')";

/// Validates a DNS label that begins with a letter.
pub fn validate_dns_1035_label(name: &str) -> Result<(), String> {
    if name.len() > 63 {
        return Err("must be no more than 63 bytes".into());
    }
    let letter = name.as_bytes().first().is_some_and(u8::is_ascii_lowercase);
    if letter && is_label(name) { Ok(()) } else { Err(DNS_1035_MESSAGE.into()) }
}

fn is_qualified_part(text: &str) -> bool {
    let bytes = text.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(a), Some(z)) if a.is_ascii_alphanumeric() && z.is_ascii_alphanumeric())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
}

/// Validates `name` or `prefix/name`: a label key, a finalizer, or an annotation key, which the caller converts to lower
/// case.
pub fn validate_qualified_name(key: &str) -> Result<(), String> {
    let name = match key.split_once('/') {
        None => key,
        Some((_, rest)) if rest.contains('/') => {
            return Err(format!(
                "a valid label key must consist of a name with an optional DNS subdomain prefix and '/' (e.g. \
                 'example.com/MyName'): {QUALIFIED_MESSAGE}"
            ));
        }
        Some(("", _)) => return Err("prefix part must be non-empty".into()),
        Some((prefix, name)) => {
            validate_subdomain(prefix).map_err(|why| format!("prefix part {why}"))?;
            name
        }
    };
    match name {
        "" => Err("name part must be non-empty".into()),
        long if long.len() > 63 => Err("name part must be no more than 63 bytes".into()),
        fine if is_qualified_part(fine) => Ok(()),
        _ => Err(QUALIFIED_MESSAGE.into()),
    }
}

pub fn validate_label_value(value: &str) -> Result<(), String> {
    if value.len() > 63 {
        return Err("must be no more than 63 bytes".into());
    }
    if value.is_empty() || is_qualified_part(value) { Ok(()) } else { Err(LABEL_VALUE_MESSAGE.into()) }
}

/// The rank of a version; discovery lists the highest rank first. Stable versions rank above beta, beta above alpha, then
/// the higher number wins. A name that is no Kubernetes version has the lowest rank.
pub fn version_rank(version: &str) -> (u8, u64, u64) {
    let parse = || {
        let rest = version.strip_prefix('v')?;
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let major = rest[..end].parse().ok()?;
        let (stage, minor) = match &rest[end..] {
            "" => (3, 0),
            tail => match (tail.strip_prefix("beta"), tail.strip_prefix("alpha")) {
                (Some(n), _) => (2, n.parse().ok()?),
                (_, Some(n)) => (1, n.parse().ok()?),
                _ => return None,
            },
        };
        Some((stage, major, minor))
    };
    parse().unwrap_or((0, 0, 0))
}

pub const MAX_CSI_DRIVER_NAME_BYTES: usize = 63;

/// Validates the name of a CSI driver: a subdomain of at most 63 bytes, in upper or lower case.
pub fn validate_csi_driver_name(name: &str) -> Result<(), String> {
    if name.len() > MAX_CSI_DRIVER_NAME_BYTES {
        return Err("must be no more than 63 bytes".into());
    }
    validate_subdomain(&name.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_stability_then_number() {
        let mut versions = ["v1beta1", "v2", "foo", "v10", "v1alpha1", "v11beta2", "v1"];
        versions.sort_by_key(|v| std::cmp::Reverse(version_rank(v)));
        assert_eq!(versions, ["v10", "v2", "v1", "v11beta2", "v1beta1", "v1alpha1", "foo"]);
    }

    #[test]
    fn names_follow_their_grammar() {
        for (name, subdomain_ok, label_ok) in [
            ("a", true, true),
            ("pvc-1.b", true, false),
            ("Upper", false, false),
            ("-a", false, false),
            ("a..b", false, false),
            ("", false, false),
        ] {
            assert_eq!(validate_subdomain(name).is_ok(), subdomain_ok, "{name}");
            assert_eq!(validate_label(name).is_ok(), label_ok, "{name}");
        }
        for (key, ok) in [("a/B_c", true), ("a", true), ("/a", false), ("a/", false), ("a/b/c", false), ("a b", false)]
        {
            assert_eq!(validate_qualified_name(key).is_ok(), ok, "{key}");
        }
    }
}
