//! Enums with a name for each value: on the command line, in files and in log lines.

/// A name that is not one of the known values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind} '{name}' (expected {expected})")]
pub struct UnknownName {
    kind: &'static str,
    name: String,
    expected: String,
}

impl UnknownName {
    pub(crate) fn new(kind: &'static str, name: &str, known: &[&str]) -> Self {
        let expected = match known {
            [others @ .., last] => format!("{} or {last}", others.join(", ")),
            [] => String::new(),
        };
        Self { kind, name: name.to_owned(), expected }
    }
}

/// Implements `ALL`, `name`, `Display` and `FromStr` for an enum without fields; `$kind` names it in
/// errors.
macro_rules! names {
    ($type:ident, $kind:literal, $($value:ident = $name:literal),+) => {
        impl $type {
            /// Every value, in the order of declaration.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$value),+];

            /// Returns the name that `FromStr` reads.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name),+
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::UnknownName;

            fn from_str(name: &str) -> Result<Self, $crate::UnknownName> {
                let found = Self::ALL.into_iter().find(|value| value.name() == name);
                found.ok_or_else(|| $crate::UnknownName::new($kind, name, &[$($name),+]))
            }
        }
    };
}
pub(crate) use names;
