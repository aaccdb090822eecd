//! The schema of a kind: the type of each field, and how lists and maps are merged. Field ownership, server-side apply,
//! strategic merge patches and strict decoding use it, so that none of them contains rules of single kinds.
//!
//! The schema of a built-in kind is derived from its Rust type ([`builtin`]) and the tables in `merge_rules` and
//! `zero_values`. The schema of a custom resource comes from its definition ([`Schema::from_open_api`]).

pub mod build;
pub mod builtin;
mod merge_rules;
mod zero_values;

/// The index of a type in its schema.
pub type TypeId = u32;

/// All types of a kind. The first is the type of the object itself. A recursive type contains its own index.
#[derive(Debug)]
pub struct Schema {
    types: Vec<TypeDef>,
}

/// A type. An `atomic` value is merged and owned as a whole.
#[derive(Debug, PartialEq)]
pub enum TypeDef {
    Scalar(Scalar),
    Struct {
        /// Sorted by name.
        fields: Vec<FieldDef>,
        atomic: bool,
        /// The type of members that are not declared in `fields`. `None` if such members are not allowed.
        additional: Option<TypeId>,
    },
    Map {
        element: TypeId,
        atomic: bool,
    },
    List {
        element: TypeId,
        list_type: ListType,
    },
    /// Any value. Objects are merged by key unless atomic; lists are atomic.
    Untyped {
        atomic: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    String,
    Integer,
    Number,
    Boolean,
    /// A number or a string: ports, percentages, quantities.
    IntOrString,
    /// A time with exactly six digits after the second.
    MicroTime,
}

/// What identifies an element of a list (`x-kubernetes-list-type`).
#[derive(Clone, Debug, PartialEq)]
pub enum ListType {
    /// Nothing: the list is merged and owned as a whole.
    Atomic,
    /// Its value. Each value occurs at most once.
    Set,
    /// The values of these fields, which are sorted by name. A missing field has the default of its key.
    Map(Vec<ListMapKey>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct ListMapKey {
    pub name: String,
    pub default: Option<serde_json::Value>,
}

/// A declared field of a struct.
#[derive(Debug, PartialEq)]
pub struct FieldDef {
    pub name: Box<str>,
    pub type_id: TypeId,
    pub patch_strategy: PatchStrategy,
    /// The Go type holds this struct by value, so that it always exists. Its inner fields can be owned, the field itself
    /// cannot.
    pub embedded: bool,
    /// An empty, zero or false value is the same as a missing field, and is not stored.
    pub omits_zero: bool,
}

/// How a strategic merge patch changes a field (`x-kubernetes-patch-strategy`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PatchStrategy {
    /// Objects are merged, lists are replaced.
    #[default]
    Plain,
    /// Elements of a list are merged by the value of this field.
    MergeByKey(Box<str>),
    /// The elements of a list are scalars. Those of the patch are added unless the list contains them.
    MergeSet,
    /// As `MergeByKey`. An element keeps only the fields that the patch lists in `$retainKeys`.
    MergeByKeyRetainKeys(Box<str>),
    /// An object that keeps only the fields that the patch lists in `$retainKeys`.
    RetainKeys,
}

/// A type together with its schema, which contains the types of its fields and elements.
#[derive(Clone, Copy)]
pub struct TypeRef<'a> {
    schema: &'a Schema,
    pub def: &'a TypeDef,
}

static UNKNOWN: Schema = Schema { types: Vec::new() };
static UNTYPED: TypeDef = TypeDef::Untyped { atomic: false };
static UNTYPED_ATOMIC: TypeDef = TypeDef::Untyped { atomic: true };

impl Schema {
    /// The schema that allows everything. Objects are merged by key, lists are atomic.
    pub fn unknown() -> &'static Schema {
        &UNKNOWN
    }

    /// The type of the object itself.
    pub fn root(&self) -> TypeRef<'_> {
        TypeRef { schema: self, def: self.types.first().unwrap_or(&UNTYPED) }
    }
}

impl<'a> TypeRef<'a> {
    pub fn resolve(&self, id: TypeId) -> TypeRef<'a> {
        let def = self.schema.types.get(id as usize).unwrap_or(&UNTYPED);
        TypeRef { schema: self.schema, def }
    }

    /// The declared field of this name. `None` for undeclared names and for types without declared fields.
    pub fn declared(&self, name: &str) -> Option<&'a FieldDef> {
        match self.def {
            TypeDef::Struct { fields, .. } => {
                fields.binary_search_by(|f| (*f.name).cmp(name)).ok().and_then(|index| fields.get(index))
            }
            _ => None,
        }
    }

    /// The type of a member of an object, declared or additional. `None` if the type does not allow this member.
    pub fn member(&self, name: &str) -> Option<TypeRef<'a>> {
        match self.def {
            TypeDef::Struct { additional, .. } => {
                self.declared(name).map(|f| f.type_id).or(*additional).map(|id| self.resolve(id))
            }
            TypeDef::Map { element, .. } => Some(self.resolve(*element)),
            TypeDef::Untyped { atomic } => Some(self.untyped(*atomic)),
            TypeDef::Scalar(_) | TypeDef::List { .. } => None,
        }
    }

    /// The type of a list's elements.
    pub fn element(&self) -> TypeRef<'a> {
        match self.def {
            TypeDef::List { element, .. } => self.resolve(*element),
            TypeDef::Untyped { atomic } => self.untyped(*atomic),
            _ => self.untyped(false),
        }
    }

    fn untyped(&self, atomic: bool) -> TypeRef<'a> {
        TypeRef { schema: self.schema, def: if atomic { &UNTYPED_ATOMIC } else { &UNTYPED } }
    }

    /// The fields that always exist; see [`FieldDef::embedded`].
    pub fn embedded(&self) -> impl Iterator<Item = &'a FieldDef> + use<'a> {
        let fields: &[FieldDef] = match self.def {
            TypeDef::Struct { fields, .. } => fields,
            _ => &[],
        };
        fields.iter().filter(|f| f.embedded)
    }

    /// Returns true if a value of this type is merged and owned as a whole. Scalars and lists are no objects: true.
    pub fn is_atomic_object(&self) -> bool {
        match self.def {
            TypeDef::Struct { atomic, .. } | TypeDef::Map { atomic, .. } | TypeDef::Untyped { atomic } => *atomic,
            TypeDef::Scalar(_) | TypeDef::List { .. } => true,
        }
    }

    /// Returns true for objects with a known type. In these a member without a type is an unknown field.
    pub fn is_object(&self) -> bool {
        matches!(self.def, TypeDef::Struct { .. } | TypeDef::Map { .. })
    }

    /// What identifies the elements of a list; `Atomic` for types other than lists.
    pub fn list_type(&self) -> &'a ListType {
        static ATOMIC: ListType = ListType::Atomic;
        match self.def {
            TypeDef::List { list_type, .. } => list_type,
            _ => &ATOMIC,
        }
    }
}
