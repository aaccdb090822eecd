//! The shape of a kind: what may stand where, and how two versions of it are joined. Field ownership, server-side
//! apply, strategic merge and the published OpenAPI all read this; none of them knows a kind by name.
//!
//! Built-in kinds get theirs from their types (`builtin`) and the table in `facts`; a custom resource gets one from
//! its definition through [`Schema::from_open_api`].

pub mod build;
pub mod builtin;
mod facts;
mod zero;

/// Position of a type in its schema.
pub type TypeId = u32;

/// Types by position; the kind itself is the first. Recursive types refer back to their own position.
#[derive(Debug)]
pub struct Schema {
    types: Vec<Type>,
}

#[derive(Debug, PartialEq)]
pub enum Type {
    Scalar(Scalar),
    Struct {
        /// By name.
        fields: Vec<Field>,
        atomic: bool,
        /// Fields beside the declared ones are data, of this type.
        others: Option<TypeId>,
    },
    Map {
        element: TypeId,
        atomic: bool,
    },
    List {
        element: TypeId,
        relation: Relation,
    },
    /// Nothing is known: an object or a list is what it looks like. Objects are joined by key unless atomic.
    Untyped {
        atomic: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    Text,
    Integer,
    Number,
    Flag,
    /// A number or a string: ports, percentages, quantities.
    IntOrText,
    /// A time with exactly six digits after the second.
    MicroTime,
}

/// How the elements of a list are told apart.
#[derive(Clone, Debug, PartialEq)]
pub enum Relation {
    /// Not at all: the list is one value.
    Atomic,
    /// Each value at most once.
    Set,
    /// By the values of these fields, sorted by name; a field left out counts as its default.
    Keys(Vec<Key>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    pub name: String,
    pub default: Option<serde_json::Value>,
}

#[derive(Debug, PartialEq)]
pub struct Field {
    pub name: Box<str>,
    pub of: TypeId,
    pub patch: PatchRule,
    /// The field is there even if nothing was given: a struct held by value. What is inside can be owned, the field
    /// itself cannot.
    pub embedded: bool,
    /// Empty, zero or false is the same as left out.
    pub omits_zero: bool,
}

/// What a strategic merge does with a field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PatchRule {
    /// Objects are merged, lists are replaced.
    #[default]
    Plain,
    /// Elements of a list are merged by the value of this field.
    By(Box<str>),
    /// Elements are primitives, each at most once.
    Set,
    /// Elements are merged by this field; those the patch sends keep only the fields it lists.
    ByRetaining(Box<str>),
    /// An object that keeps only the fields the patch lists.
    Retaining,
}

/// The schema of a part of an object, or of an object of which nothing is known.
#[derive(Clone, Copy)]
pub struct At<'a> {
    schema: &'a Schema,
    pub of: &'a Type,
}

static UNKNOWN: Schema = Schema { types: Vec::new() };
static UNTYPED: Type = Type::Untyped { atomic: false };
static UNTYPED_ATOMIC: Type = Type::Untyped { atomic: true };

impl Schema {
    /// For objects whose shape nobody has described: objects are joined by key, lists are one value.
    pub fn unknown() -> &'static Schema {
        &UNKNOWN
    }

    pub fn root(&self) -> At<'_> {
        At { schema: self, of: self.types.first().unwrap_or(&UNTYPED) }
    }
}

impl<'a> At<'a> {
    pub fn id(&self, id: TypeId) -> At<'a> {
        let of = self.schema.types.get(id as usize).unwrap_or(&UNTYPED);
        At { schema: self.schema, of }
    }

    pub fn declared(&self, name: &str) -> Option<&'a Field> {
        match self.of {
            Type::Struct { fields, .. } => {
                fields.binary_search_by(|f| (*f.name).cmp(name)).ok().and_then(|at| fields.get(at))
            }
            _ => None,
        }
    }

    /// The type of a member of an object: declared, or what the object holds beside. `None` if it may not be there.
    pub fn member(&self, name: &str) -> Option<At<'a>> {
        match self.of {
            Type::Struct { others, .. } => self.declared(name).map(|f| f.of).or(*others).map(|id| self.id(id)),
            Type::Map { element, .. } => Some(self.id(*element)),
            Type::Untyped { atomic } => Some(self.untyped(*atomic)),
            Type::Scalar(_) | Type::List { .. } => None,
        }
    }

    /// The type of a list's elements.
    pub fn element(&self) -> At<'a> {
        match self.of {
            Type::List { element, .. } => self.id(*element),
            Type::Untyped { atomic } => self.untyped(*atomic),
            _ => self.untyped(false),
        }
    }

    fn untyped(&self, atomic: bool) -> At<'a> {
        At { schema: self.schema, of: if atomic { &UNTYPED_ATOMIC } else { &UNTYPED } }
    }

    /// Fields that are there even if nothing was given.
    pub fn embedded(&self) -> impl Iterator<Item = &'a Field> + use<'a> {
        let fields: &[Field] = match self.of {
            Type::Struct { fields, .. } => fields,
            _ => &[],
        };
        fields.iter().filter(|f| f.embedded)
    }

    /// Is a value of this type one thing, whatever is in it?
    pub fn is_atomic_object(&self) -> bool {
        match self.of {
            Type::Struct { atomic, .. } | Type::Map { atomic, .. } | Type::Untyped { atomic } => *atomic,
            Type::Scalar(_) | Type::List { .. } => true,
        }
    }

    /// Is this the type of objects whose fields are all declared?
    pub fn is_object(&self) -> bool {
        matches!(self.of, Type::Struct { .. } | Type::Map { .. })
    }

    pub fn relation(&self) -> &'a Relation {
        static ATOMIC: Relation = Relation::Atomic;
        match self.of {
            Type::List { relation, .. } => relation,
            _ => &ATOMIC,
        }
    }
}
