//! What a rendering may cost.
//!
//! A template is not trusted, and the number of its instructions does not bound their cost: one makes a text of megabytes, or
//! compares lists that hold one value a million times. So a rendering has an amount of work. Making a text or a list takes of
//! it, and so does looking at a value. What is left is kept for the thread, on which a rendering runs from its begin to its
//! end: minijinja gives its state to functions, and not to what writes and compares values.
//!
//! A refusal stands until the next rendering begins. What writes a value cannot fail, and writes no more; the rendering fails
//! at its next step that can, at the latest at its end.

use std::{cell::Cell, slice, sync::LazyLock};

use minijinja::{
    Error, Value, context,
    value::{DynObject, ValueKind},
};

use super::{
    globals::{Cycler, Joiner},
    operators::AnyArguments,
    text::error,
};

/// Work of a rendering. A byte of a text takes 1.
const WORK_MAX: usize = 256 << 20;
/// Work to look at a value.
const VISIT: usize = 16;
/// Work to put a value into a list.
const ITEM: usize = 64;
/// Longest text that a template makes, in bytes.
const LENGTH_MAX: usize = 64 << 20;
/// Longest list that a template makes.
pub(super) const ITEMS_MAX: usize = LENGTH_MAX / ITEM;
/// Longest name of an attribute or a test, in bytes: it is looked up for each item of a list.
const NAME_MAX: usize = 256;
/// Deepest nesting of a value that is kept, compared or written.
const DEPTH_MAX: usize = 64;

const _: () = assert!(LENGTH_MAX <= WORK_MAX, "a rendering may make the longest text");

thread_local! {
    /// The work that is left to the rendering, or why it was refused.
    static LEFT: Cell<Result<usize, &'static str>> = const { Cell::new(Ok(WORK_MAX)) };
}

/// Begins a rendering on this thread.
pub(super) fn begin() {
    LEFT.set(Ok(WORK_MAX));
}

/// Fails if the rendering was refused.
pub(super) fn check() -> Result<(), Error> {
    LEFT.get().map(|_| ()).map_err(error)
}

/// Refuses the rendering.
fn refuse(problem: &'static str) -> Error {
    LEFT.set(Err(problem));
    error(problem)
}

/// Takes work.
pub(super) fn take(work: usize) -> Result<(), Error> {
    let left = LEFT.get().map_err(error)?;
    let left =
        left.checked_sub(work).ok_or_else(|| refuse("more work than a template may ask for"))?;
    LEFT.set(Ok(left));
    Ok(())
}

/// Refuses a text that would be too long, before it is made.
pub(super) fn check_length(length: usize) -> Result<(), Error> {
    check()?;
    if length <= LENGTH_MAX { Ok(()) } else { Err(refuse("a value that is too long")) }
}

/// Takes the work to make a text of this length.
pub(super) fn take_text(length: usize) -> Result<(), Error> {
    check_length(length)?;
    take(length)
}

/// Takes the work to make a list of this many items.
pub(super) fn take_items(count: usize) -> Result<(), Error> {
    take_text(count.saturating_mul(ITEM))
}

/// Adds a part to a text.
pub(super) fn grow(text: &mut String, part: &str) -> Result<(), Error> {
    check_length(text.len() + part.len())?;
    take(part.len())?;
    text.push_str(part);
    Ok(())
}

/// Refuses a name of an attribute or a test that is too long.
pub(super) fn check_name(name: &Value) -> Result<(), Error> {
    match name.as_str() {
        Some(name) if name.len() > NAME_MAX => Err(error("a name that is too long")),
        _ => Ok(()),
    }
}

/// Takes the work to look at a value that is nested this deeply.
pub(super) fn visit(depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(refuse("a value that is nested too deeply"));
    }
    take(VISIT)
}

/// Returns a value that a name may keep: one that is nested deeper would overflow the stack when it is dropped.
pub(super) fn keep(value: Value) -> Result<Value, Error> {
    look_through(&value, 0, false)?;
    Ok(value)
}

/// Returns a value that a namespace may keep: data alone, so that no namespace holds itself.
pub(super) fn keep_data(value: Value) -> Result<Value, Error> {
    look_through(&value, 0, true)?;
    Ok(value)
}

/// Looks at a value and all that it holds.
fn look_through(value: &Value, depth: usize, is_data: bool) -> Result<(), Error> {
    visit(depth)?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                look_through(&item, depth + 1, is_data)?;
            }
        }
        ValueKind::Map if is_data && !is_mapping(value) => {
            return Err(error("a namespace keeps no namespaces, loops and macros"));
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                look_through(&value.get_item(&key)?, depth + 1, is_data)?;
            }
        }
        ValueKind::Plain => {
            for item in held(value) {
                look_through(item, depth + 1, is_data)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Returns whether a value with keys is a mapping, and not a namespace, a loop or a macro. minijinja does not export their types.
fn is_mapping(value: &Value) -> bool {
    static NAMES: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
        let mappings = [Value::from_pairs([("key", 0)]), context! { key => 0 }];
        mappings.iter().filter_map(Value::as_object).map(DynObject::type_name).collect()
    });
    value.as_object().is_some_and(|object| NAMES.contains(&object.type_name()))
}

/// Returns the values that an object holds and does not list.
fn held(value: &Value) -> &[Value] {
    if let Some(cycler) = value.downcast_object_ref::<Cycler>() {
        &cycler.items
    } else if let Some(joiner) = value.downcast_object_ref::<Joiner>() {
        slice::from_ref(&joiner.separator)
    } else if let Some(function) = value.downcast_object_ref::<AnyArguments>() {
        slice::from_ref(&function.inner)
    } else {
        &[]
    }
}
