//! Pages of a listing. A token contains the last id of the previous page, so objects that are created or deleted
//! between two pages do not disturb the listing. Pure.
use cleat_csi::Status;

/// The size of a page if the caller sets no limit.
const DEFAULT_PAGE_ENTRIES: usize = 1000;

const TOKEN_PREFIX: &str = "after:";

/// The maximum number of entries, and the id after which the page starts.
pub(crate) fn parse_page(max_entries: i32, token: &str) -> Result<(usize, String), Status> {
    let limit = match usize::try_from(max_entries) {
        Ok(0) => DEFAULT_PAGE_ENTRIES,
        Ok(limit) => limit,
        Err(_) => return Err(Status::invalid_argument("max_entries is negative")),
    };
    match token.strip_prefix(TOKEN_PREFIX) {
        Some(id) => Ok((limit, id.to_owned())),
        None if token.is_empty() => Ok((limit, String::new())),
        None => Err(Status::aborted("starting_token is not one of ours")),
    }
}

/// Truncates `entries` to `limit`, and returns the token of the next page. The token is empty if there is no next page.
pub(crate) fn truncate_page<T>(entries: &mut Vec<T>, limit: usize, id: impl Fn(&T) -> &String) -> String {
    if entries.len() <= limit {
        return String::new();
    }
    entries.truncate(limit);
    entries.last().map(|last| format!("{TOKEN_PREFIX}{}", id(last))).unwrap_or_default()
}
