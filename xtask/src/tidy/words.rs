//! Retired words: names that meant something only inside this project, each with what to write instead.
//!
//! A word is refused where its scope says, as one of the parts of a `snake_case` or `CamelCase` name. Only names that the
//! code defines are checked, and all identifiers in macros; comments and strings are not.

use super::source::DefinitionKind;
use super::{SourceFile, Violation};

/// The names in which a word is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// Any name that has the word as one of its parts.
    AnyName,
    /// A type of exactly this name.
    Type,
    /// A type whose name ends with the word.
    TypeSuffix,
    /// A constant of exactly this name.
    Constant,
    /// A constant that has the word as one of its parts.
    ConstantPart,
    /// A constant whose name begins with the word.
    ConstantPrefix,
    /// A field or a function's parameter of exactly this name. Variables may have it.
    FieldOrParameter,
}

use Scope::{AnyName, Constant, ConstantPart, ConstantPrefix, FieldOrParameter, Type, TypeSuffix};

/// The word, in lower case with underscores; where it is refused; what to write instead.
const RETIRED: &[(&str, Scope, &str)] = &[
    ("aftermath", AnyName, "what it is: `failure_outcome`"),
    ("desk", AnyName, "the component: `scheduler`"),
    ("dice", AnyName, "`random_object`, `random_source`"),
    ("doubtful", AnyName, "`uncertain`, `unconfirmed`"),
    ("fate", AnyName, "`outcome`, `result`"),
    ("handed", AnyName, "`typed_body`, `in_process`"),
    ("heard", AnyName, "`received`, `observed`"),
    ("ledger", AnyName, "`call_state`, `records`, `log`"),
    ("lent", AnyName, "`reserved`, `borrowed`"),
    ("memo", AnyName, "`cache`"),
    ("parcel", AnyName, "`packed`, `compressed`"),
    ("picture", AnyName, "`snapshot`, `state`"),
    ("precedent", AnyName, "`ownership_cache`, `cached_result`"),
    ("rests", AnyName, "`is_noop`, `is_idle`"),
    ("scene", AnyName, "`fixture`, `test_cluster`"),
    ("shelf", AnyName, "`available_volumes`, `free_list`, `record_dir`"),
    ("tale", AnyName, "`scenario`, `round_trip`"),
    ("told", AnyName, "`reported`, `notified`, `is_already_reported`"),
    ("unheard", AnyName, "`unreceived`, `not_observed`"),
    ("wish", AnyName, "`desired`, `request`"),
    ("answer", Type, "`TypedReply`, `Response`"),
    ("asked", Type, "`RequestInfo`"),
    ("carrier", Type, "`Transport`"),
    ("choices", Type, "`ProvisionPolicy`"),
    ("compact", Type, "`JsonScanner`"),
    ("divided", Type, "`SplitObject`"),
    ("kept", Type, "`StoredEntry`"),
    ("learned", Type, "`KindCaches`"),
    ("lines", Type, "`WatchFrameCache`"),
    ("origin", Type, "what it is the source of: `VolumeSource`, `RequestSource`"),
    ("outlines", Type, "`BodyShapeCache`"),
    ("past", Type, "`HistoryEntry`"),
    ("place", Type, "what it locates: `NodeSlot`, `MountPath`, `FieldPath`"),
    ("places", Type, "what they locate: `NodeSlots`, `MountPaths`"),
    ("recent", Type, "`DecodedObjectCache`"),
    ("recorded", Type, "`RawManagedFields`, `Record`"),
    ("sample", Type, "`Dictionary`"),
    ("seen", TypeSuffix, "the snapshot's own name: `ClaimSnapshot`"),
    ("sort", Type, "`Compressor`, `Kind`"),
    ("stock", Type, "`CacheLookup`"),
    ("subject", Type, "what it is: `ReconcileKey`, `EventTarget`, `RbacSubject`"),
    ("taken", Type, "`VolumeReservation`"),
    ("world", Type, "`SchedulerState`, `ClusterSnapshot`"),
    ("at_once", ConstantPart, "`MAX_CONCURRENT_…`"),
    ("few", ConstantPart, "`MIN_…` or `MAX_…`, with what it counts"),
    ("good", ConstantPart, "the threshold: `MIN_COMPRESSION_RATIO`"),
    ("largest", ConstantPart, "`MAX_…`, with its unit"),
    ("longest", ConstantPart, "`MAX_…`, with its unit"),
    ("most", ConstantPrefix, "`MAX_…`, with its unit"),
    ("once", Constant, "what happens once, or how many: `MAX_…`"),
    ("places", ConstantPart, "`CACHE_SLOTS`"),
    ("room", ConstantPart, "`CAPACITY_BYTES`, `BUFFER_BYTES`"),
    ("shortest", ConstantPart, "`MIN_…`, with its unit"),
    ("usual", ConstantPrefix, "`DEFAULT_…`"),
    ("seen", FieldOrParameter, "what it is: `claim`, `snapshot`, `observed`; for a set of visited keys, `visited`"),
];

pub(super) fn check(file: &SourceFile<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut refuse = |line: usize, name: &str, kind: DefinitionKind| {
        for (word, instead) in retired_in(name, kind) {
            let message = format!("`{name}` uses the retired word `{word}`: write {instead}");
            violations.push(Violation::new(&file.path, line, message));
        }
    };
    // The name of a module under `src/` is refused where it is declared.
    if file.location.is_none() {
        let stem = file.path.rsplit('/').next().unwrap_or_default().trim_end_matches(".rs");
        refuse(1, stem, DefinitionKind::Module);
    }
    for definition in &file.source.definitions {
        refuse(definition.line, &definition.name, definition.kind);
    }
    violations
}

/// The retired words in a name of this kind, each with what to write instead.
fn retired_in(name: &str, kind: DefinitionKind) -> impl Iterator<Item = (&'static str, &'static str)> {
    let parts = parts_of(name);
    RETIRED.iter().filter(move |(word, scope, _)| is_refused(&parts, kind, word, *scope)).map(|row| (row.0, row.2))
}

fn is_refused(parts: &[String], kind: DefinitionKind, word: &str, scope: Scope) -> bool {
    if !parts.iter().any(|part| word.starts_with(part.as_str())) {
        return false;
    }
    let words: Vec<&str> = word.split('_').collect();
    let is_type = matches!(kind, DefinitionKind::Type | DefinitionKind::AssociatedType);
    let is_constant = kind == DefinitionKind::Constant;
    let contains = || parts.windows(words.len()).any(|window| window == words);
    match scope {
        AnyName => contains(),
        Type => is_type && parts == words,
        TypeSuffix => is_type && parts.rchunks(words.len()).next().is_some_and(|end| end == words),
        Constant => is_constant && parts == words,
        ConstantPart => is_constant && contains(),
        FieldOrParameter => matches!(kind, DefinitionKind::Field | DefinitionKind::Parameter) && parts == words,
        ConstantPrefix => is_constant && parts.chunks(words.len()).next().is_some_and(|start| start == words),
    }
}

/// The parts of a name in lower case: `ClaimSeen`, `claim_seen` and `CLAIM_SEEN` are all `claim`, `seen`.
fn parts_of(name: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let characters: Vec<char> = name.chars().collect();
    for (at, &character) in characters.iter().enumerate() {
        let previous = at.checked_sub(1).map(|at| characters[at]);
        let next_is_lower = characters.get(at + 1).is_some_and(|next| next.is_lowercase());
        // A capital begins a part after a small letter or digit, and as the last capital of several: `CSINode`.
        let begins = match previous {
            None | Some('_') => true,
            Some(previous) => character.is_uppercase() && (!previous.is_uppercase() || next_is_lower),
        };
        if character == '_' {
            continue;
        }
        match parts.last_mut().filter(|_| !begins) {
            Some(part) => part.extend(character.to_lowercase()),
            None => parts.push(character.to_lowercase().collect()),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::check_sources;

    fn found(text: &str) -> Vec<String> {
        check_sources(&[("crates/node/src/lib.rs", &format!("//! Node.\n{text}\n"))])
    }

    #[test]
    fn names_are_split_into_their_parts() {
        for (name, want) in [
            ("claim_seen", "claim seen"),
            ("ClaimSeen", "claim seen"),
            ("CLAIM_SEEN", "claim seen"),
            ("CSINode", "csi node"),
            ("PodV2Status", "pod v2 status"),
            ("_unused", "unused"),
            ("x", "x"),
        ] {
            assert_eq!(parts_of(name).join(" "), want, "{name}");
        }
    }

    #[test]
    fn a_retired_word_is_refused_with_what_to_write_instead() {
        assert_eq!(
            found("struct S;\nfn put_on_shelf() {}"),
            ["crates/node/src/lib.rs:3: `put_on_shelf` uses the retired word `shelf`: write `available_volumes`, \
              `free_list`, `record_dir`"]
        );
    }

    #[test]
    fn retired_words_are_found_in_every_kind_of_name() {
        for (case, text) in [
            ("type", "struct ShelfEntry;"),
            ("function", "fn is_told() {}"),
            ("method", "struct S; impl S { fn lent(&self) {} }"),
            ("field", "struct S { wish: u8 }"),
            ("variant", "enum E { Handed }"),
            ("constant", "const MEMO_SLOTS: u8 = 1;"),
            ("module", "mod dice {}"),
            ("parameter", "fn f(picture: u8) {}"),
            ("variable", "fn f() { let (ledger, x) = g(); }"),
            ("closure", "fn f() { g(|parcel| 1) }"),
            ("import", "use a::b as tale;"),
            ("macro", "fn f() { info!(fate = 1) }"),
            ("test", "#[cfg(test)] mod tests { fn scene() {} }"),
            ("exact type", "struct Recent;"),
            ("exact type, local", "fn f() { enum Sort {} }"),
            ("suffix of a type", "struct ClaimSeen;"),
            ("the suffix alone", "struct Seen;"),
            ("constant with a part", "const WRITES_AT_ONCE: u8 = 1;"),
            ("constant with a prefix", "const MOST_LINES: u8 = 1;"),
            ("exact constant", "const ONCE: u8 = 1;"),
            ("exact field", "struct S { seen: u8 }"),
            ("exact parameter", "fn f(seen: &u8) {}"),
            ("associated constant", "struct S; impl S { const LONGEST: u8 = 1; }"),
        ] {
            assert_eq!(found(text).len(), 1, "{case}: {:?}", found(text));
        }
        let file = [("crates/node/tests/parcel.rs", "//! A test.\n")];
        assert_eq!(check_sources(&file).len(), 1, "the name of a test file");
    }

    #[test]
    fn ordinary_rust_stays_legal() {
        for (case, text) in [
            ("a variable that is no type", "fn f(recent: u8) { let place = recent; }"),
            ("a longer type", "struct RecentWrites; struct SortKey;"),
            ("a longer word", "fn memory() {} fn interests() {} fn talent() {}"),
            ("a variable for a set of visited keys", "fn f() { let mut seen = HashSet::new(); g(|seen| 1); }"),
            ("a longer field", "struct S { last_seen: u8 }"),
            ("a use, not a definition", "fn f() { x.sort(); std::sync::Once::new(); }"),
            ("a comment", "// shelf\nfn f() {}"),
            ("a string", "const NAME: &str = \"shelf\";"),
            ("a variant named as a retired type", "enum E { Seen, Kept }"),
            ("a constant compared with", "fn f(x: u8) { match x { LIMIT => {} _ => {} } }"),
            ("a function named as a retired constant", "fn at_once() {}"),
        ] {
            assert_eq!(found(text), [] as [&str; 0], "{case}");
        }
    }

    #[test]
    fn no_word_is_in_the_table_twice_with_one_scope() {
        let mut words: Vec<_> = RETIRED.iter().map(|(word, scope, _)| (*word, format!("{scope:?}"))).collect();
        let count = words.len();
        words.sort();
        words.dedup();
        assert_eq!(words.len(), count);
    }
}
