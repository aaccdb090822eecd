//! Kinds that CustomResourceDefinitions add. [`build_kinds`] turns a definition into one `CustomKind` per served version;
//! these go through the same request handling as the built-in kinds. The API server's definitions controller keeps the
//! served kinds in step with the stored definitions; nothing here reads or writes the store.
//!
//! | file | content |
//! |---|---|
//! | `definition_kinds` | from a definition to its kinds |
//! | `custom_kind` | the behaviour of one served version |
//! | `custom_object` | a decoded object |
//! | `structural_schema` | the compiled schema: pruning and defaulting |
//! | `schema_validation` | values against the schema |
//! | `rule`, `rule_validation` | `x-kubernetes-validations` |
//! | `cel` | the expression language of these rules |
//! | `json_path` | paths of printer columns, selectable fields and scale |
//! | `name_conflicts` | which names a definition may have |

mod cel;
mod custom_kind;
mod custom_object;
mod definition_kinds;
mod json_path;
pub mod name_conflicts;
mod rule;
mod rule_validation;
mod schema_validation;
mod structural_schema;

pub(crate) use cel::CelProgram;
pub use definition_kinds::build_kinds;
pub(crate) use json_path::JsonPath;
pub(crate) use structural_schema::StructuralSchema;

/// The finalizer of a definition: removed after its custom resources are deleted.
pub const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";
