//! The shape of a kind: what may stand where, and how two versions of it are joined. FieldDef ownership, server-side
//! apply, strategic merge and the published OpenAPI all read this; none of them knows a kind by name.
//!
//! Built-in kinds get theirs from their types (`builtin`) and the table in `merge_rules`; a custom resource gets one from
//! its definition through [`Schema::from_open_api`].

pub mod build;
pub mod builtin;
mod merge_rules;
mod zero_values;

/// Position of a type in its schema.
pub type TypeId = u32;

/// Types by position; the kind itself is the first. Recursive types refer back to their own position.
#[derive(Debug)]
pub struct Schema {
    types: Vec<TypeDef>,
}

#[derive(Debug, PartialEq)]
pub enum TypeDef {
    Scalar(Scalar),
    Struct {
        /// By name.
        fields: Vec<FieldDef>,
        atomic: bool,
        /// Fields beside the declared ones are data, of this type.
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
    /// Nothing is known: an object or a list is what it looks like. Objects are joined by key unless atomic.
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

/// How the elements of a list are told apart.
#[derive(Clone, Debug, PartialEq)]
pub enum ListType {
    /// Not at all: the list is one value.
    Atomic,
    /// Each value at most once.
    Set,
    /// By the values of these fields, sorted by name; a field left out counts as its default.
    Map(Vec<ListMapKey>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct ListMapKey {
    pub name: String,
    pub default: Option<serde_json::Value>,
}

#[derive(Debug, PartialEq)]
pub struct FieldDef {
    pub name: Box<str>,
    pub type_id: TypeId,
    pub patch_strategy: PatchStrategy,
    /// The field is there even if nothing was given: a struct held by value. What is inside can be owned, the field
    /// itself cannot.
    pub embedded: bool,
    /// Empty, zero or false is the same as left out.
    pub omits_zero: bool,
}

/// What a strategic merge does with a field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PatchStrategy {
    /// Objects are merged, lists are replaced.
    #[default]
    Plain,
    /// Elements of a list are merged by the value of this field.
    MergeByKey(Box<str>),
    /// Elements are primitives, each at most once.
    MergeSet,
    /// Elements are merged by this field; those the patch sends keep only the fields it lists.
    MergeByKeyRetainKeys(Box<str>),
    /// An object that keeps only the fields the patch lists.
    RetainKeys,
}

/// The schema of a part of an object, or of an object of which nothing is known.
#[derive(Clone, Copy)]
pub struct TypeRef<'a> {
    schema: &'a Schema,
    pub def: &'a TypeDef,
}

static UNKNOWN: Schema = Schema { types: Vec::new() };
static UNTYPED: TypeDef = TypeDef::Untyped { atomic: false };
static UNTYPED_ATOMIC: TypeDef = TypeDef::Untyped { atomic: true };

impl Schema {
    /// For objects whose shape nobody has described: objects are joined by key, lists are one value.
    pub fn unknown() -> &'static Schema {
        &UNKNOWN
    }

    pub fn root(&self) -> TypeRef<'_> {
        TypeRef { schema: self, def: self.types.first().unwrap_or(&UNTYPED) }
    }
}

impl<'a> TypeRef<'a> {
    pub fn resolve(&self, id: TypeId) -> TypeRef<'a> {
        let def = self.schema.types.get(id as usize).unwrap_or(&UNTYPED);
        TypeRef { schema: self.schema, def }
    }

    pub fn declared(&self, name: &str) -> Option<&'a FieldDef> {
        match self.def {
            TypeDef::Struct { fields, .. } => {
                fields.binary_search_by(|f| (*f.name).cmp(name)).ok().and_then(|at| fields.get(at))
            }
            _ => None,
        }
    }

    /// The type of a member of an object: declared, or what the object holds beside. `None` if it may not be there.
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

    /// Fields that are there even if nothing was given.
    pub fn embedded(&self) -> impl Iterator<Item = &'a FieldDef> + use<'a> {
        let fields: &[FieldDef] = match self.def {
            TypeDef::Struct { fields, .. } => fields,
            _ => &[],
        };
        fields.iter().filter(|f| f.embedded)
    }

    /// Is a value of this type one thing, whatever is in it?
    pub fn is_atomic_object(&self) -> bool {
        match self.def {
            TypeDef::Struct { atomic, .. } | TypeDef::Map { atomic, .. } | TypeDef::Untyped { atomic } => *atomic,
            TypeDef::Scalar(_) | TypeDef::List { .. } => true,
        }
    }

    /// Is this the type of objects whose fields are all declared?
    pub fn is_object(&self) -> bool {
        matches!(self.def, TypeDef::Struct { .. } | TypeDef::Map { .. })
    }

    pub fn list_type(&self) -> &'a ListType {
        static ATOMIC: ListType = ListType::Atomic;
        match self.def {
            TypeDef::List { list_type, .. } => list_type,
            _ => &ATOMIC,
        }
    }
}
