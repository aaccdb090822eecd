//! Whether a mount or a device accepts writes.

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

impl Access {
    pub fn is_read_only(self) -> bool {
        self == Access::ReadOnly
    }
}
