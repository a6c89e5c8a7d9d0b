//! Translates a chat template from Jinja 3.1 to what minijinja computes in the same way.
//!
//! Text, comments and white space stay as they are; line ends become `\n`, as in Jinja. Expressions are
//! translated by [`expressions`](super::expressions). Of the statements,
//! - `generation`, of transformers, becomes a scope of its own,
//! - a macro that uses `varargs` or `kwargs` takes them as parameters, and is called by way of
//!   [`operators::any_arguments`](super::operators::any_arguments),
//! - what would read other templates stays, and fails when it runs: there are none.

use super::{
    expressions::{Expressions, is_content, quote},
    tokens::{self, Tag},
};

/// Longest template, in bytes; real ones have some ten thousand.
const SOURCE_MAX: usize = 256 << 10;
/// Most statements that are open at a time.
const OPEN_MAX: usize = 100;
/// Most `elif` of the statements that are open: minijinja nests them.
const BRANCHES_MAX: usize = 200;
/// Most parameters of a macro.
const PARAMETERS_MAX: usize = 255;
/// Longest text of a loop or a macro that is not counted, in bytes: the number of instructions bounds it.
const FREE_TEXT_MAX: usize = 64;

/// A template is not Jinja.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct SyntaxError {
    line: usize,
    problem: String,
}

impl SyntaxError {
    pub(super) fn new(problem: impl Into<String>) -> Self {
        Self { line: 0, problem: problem.into() }
    }
}

/// What a template reads of the content of a message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Reads {
    /// Whether it reads the parts of a content: it loops over it, and asks for the type or text of a part.
    pub parts: bool,
    /// Whether it asks if a content is a string.
    pub texts: bool,
}

/// A statement that is not closed yet.
struct Open {
    /// The name of the statement that ends it.
    end: &'static str,
    /// Name, parameters and place of a macro.
    definition: Option<Macro>,
    /// Whether `else` may follow.
    may_have_else: bool,
    is_loop: bool,
    /// The `elif` that it has.
    branches: usize,
    /// Bytes of text in it, outside of other statements that may run many times.
    texts: usize,
    /// Where its tag ends in the translation, once it is written: before the mark.
    tag_end: Option<usize>,
}

impl Open {
    /// Returns whether its body may run many times.
    fn may_repeat(&self) -> bool {
        matches!(self.end, "endfor" | "endmacro" | "endcall" | "endblock")
    }

    /// Returns the statement that counts the texts of the body, which begins it; nothing if they are short.
    fn count(&self) -> String {
        match self.texts {
            0..=FREE_TEXT_MAX => String::new(),
            length => format!("{{% set __ignored = __texts({length}) %}}"),
        }
    }
}

struct Macro {
    name: String,
    parameters: Vec<(String, Option<String>)>,
    /// Where the statement begins and ends in the translation.
    header: std::ops::Range<usize>,
    /// The marks of the statement.
    marks: (&'static str, &'static str),
    has_any_arguments: bool,
}

/// Returns the template for minijinja.
///
/// # Errors
/// With the line, if the template is not Jinja.
pub(super) fn translate(source: &str) -> Result<(String, Reads), SyntaxError> {
    if source.len() > SOURCE_MAX {
        let problem = format!("the template is longer than {SOURCE_MAX} bytes");
        return Err(SyntaxError { line: 1, problem });
    }
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut translation = Translation {
        out: String::with_capacity(source.len()),
        open: Vec::new(),
        contents: Contents::default(),
    };
    let mut rest = source.as_str();
    let at = |rest: &str, problem: SyntaxError| SyntaxError {
        line: source[..source.len() - rest.len()].matches('\n').count() + 1,
        ..problem
    };
    while let Some(start) = next_tag(rest) {
        translation.text(&rest[..start]);
        rest = translation.tag(&rest[start..]).map_err(|problem| at(&rest[start..], problem))?;
    }
    translation.text(rest);
    match translation.open.last() {
        Some(open) => Err(at("", SyntaxError::new(format!("'{}' is missing", open.end)))),
        None => Ok((translation.out, translation.contents.reads())),
    }
}

fn next_tag(rest: &str) -> Option<usize> {
    let mut from = 0;
    loop {
        let start = from + rest[from..].find('{')?;
        if rest[start + 1..].starts_with(['{', '%', '#']) {
            return Some(start);
        }
        from = start + 1;
    }
}

struct Translation {
    out: String,
    open: Vec<Open>,
    contents: Contents,
}

/// How a template handles the contents of messages.
#[derive(Default)]
struct Contents {
    /// Names that loop over a content.
    loops: Vec<String>,
    /// Of what the type or the text was read.
    parts: Vec<String>,
    asks_for_strings: bool,
}

impl Contents {
    fn reads(&self) -> Reads {
        // The first part by its number counts, too.
        let is_numbered = |part: &String| part.starts_with("__item(") && part.contains("content");
        let is_part = |part: &String| self.loops.contains(part) || is_numbered(part);
        Reads { parts: self.parts.iter().any(is_part), texts: self.asks_for_strings }
    }
}

impl Translation {
    /// Writes a text that stands between tags.
    fn text(&mut self, text: &str) {
        self.out += text;
        if let Some(open) = self.open.iter_mut().rev().find(|open| open.may_repeat()) {
            open.texts += text.len();
        }
    }

    /// Translates the tag that `rest` begins with; returns what follows it.
    fn tag<'a>(&mut self, rest: &'a str) -> Result<&'a str, SyntaxError> {
        if rest.starts_with("{#") {
            let Some(end) = rest.find("#}") else {
                return Err(SyntaxError::new("a comment has no end"));
            };
            self.out += &rest[..end + 2];
            return Ok(&rest[end + 2..]);
        }
        let is_statement = rest.starts_with("{%");
        let mark = match rest.as_bytes().get(2) {
            Some(b'-') => "-",
            Some(b'+') => "+",
            _ => "",
        };
        let inner = &rest[2 + mark.len()..];
        if is_statement && let Some(after) = raw(inner) {
            let Some(end) = raw_end(after) else {
                return Err(SyntaxError::new("'endraw' is missing"));
            };
            let (text, tail) = raw_text(inner, &after[..end]);
            // Jinja keeps a line end behind this tag, and removes one behind its end.
            self.out +=
                &format!("{{%{mark} if true %}}{{{{ {} }}}}{{% endif {tail}%}}", quote(text));
            return Ok(&after[end..]);
        }
        let tag = tokens::read(inner, if is_statement { "%}" } else { "}}" })?;
        let Tag { tokens, lines, mark: end_mark, rest: after } = tag;
        let mut tokens = Expressions::new(tokens);
        // Line ends stay, so that errors name the right line.
        let lines = "\n".repeat(lines);
        if is_statement {
            self.statement(&mut tokens, (mark, end_mark), &lines)?;
        } else {
            let value = tokens.tuple()?;
            self.out += &format!("{{{{{mark} {value}{lines} {end_mark}}}}}");
        }
        tokens.end()?;
        self.contents.parts.append(&mut tokens.parts);
        self.contents.asks_for_strings |= tokens.asks_for_strings;
        if tokens.has_any_arguments {
            for open in
                self.open.iter_mut().rev().filter_map(|open| open.definition.as_mut()).take(1)
            {
                open.has_any_arguments = true;
            }
        }
        Ok(after)
    }

    fn statement(
        &mut self,
        tokens: &mut Expressions,
        marks: (&'static str, &'static str),
        lines: &str,
    ) -> Result<(), SyntaxError> {
        let name = tokens.name()?;
        let inner = match name.as_str() {
            "if" => {
                self.open("endif", true)?;
                format!("if {}", tokens.tuple()?)
            }
            "elif" => {
                self.branch()?;
                format!("elif {}", tokens.tuple()?)
            }
            "else" => match self.open.last() {
                Some(open) if open.may_have_else => name,
                _ => return Err(SyntaxError::new("unexpected 'else'")),
            },
            "for" => self.for_loop(tokens)?,
            "break" | "continue" => {
                let in_body = self.open.iter().rev().take_while(|open| open.end != "endmacro");
                if !in_body.into_iter().any(|open| open.is_loop) {
                    return Err(SyntaxError::new(format!("'{name}' outside of a loop")));
                }
                name
            }
            "set" => self.set(tokens)?,
            "print" => {
                let value = tokens.tuple()?;
                let (begin, end) = marks;
                self.out +=
                    &format!("{{%{begin} if true %}}{{{{ {value} }}}}{{% endif{lines} {end}%}}");
                return Ok(());
            }
            "macro" => return self.begin_macro(tokens, marks, lines),
            "call" => {
                self.open("endcall", false)?;
                let parameters = if tokens.takes("(") { parameters(tokens)? } else { Vec::new() };
                format!("call{} {}", signature(&parameters), tokens.expression()?)
            }
            "filter" => {
                self.open("endfilter", false)?;
                format!("filter {}", tokens.filter_chain()?)
            }
            "with" => self.with(tokens)?,
            "generation" => {
                self.open("endgeneration", false)?;
                "with".to_owned()
            }
            "autoescape" => {
                self.open("endautoescape", false)?;
                format!("autoescape {}", tokens.expression()?)
            }
            "block" => {
                self.open("endblock", false)?;
                let name = tokens.name()?;
                let _ = tokens.takes_word("scoped") || tokens.takes_word("required");
                format!("block {name}")
            }
            "include" | "extends" | "import" | "from" => {
                while !tokens.is_at_end() {
                    tokens.skip();
                }
                "include 'another template'".to_owned()
            }
            end if end.starts_with("end") => return self.end(end, tokens, marks, lines),
            unknown => return Err(SyntaxError::new(format!("unknown tag '{unknown}'"))),
        };
        let (begin, close) = marks;
        self.out += &format!("{{%{begin} {inner}{lines}");
        if let Some(open) = self.open.last_mut() {
            open.tag_end.get_or_insert(self.out.len());
        }
        self.out += &format!(" {close}%}}");
        Ok(())
    }

    fn open(&mut self, end: &'static str, may_have_else: bool) -> Result<(), SyntaxError> {
        if self.open.len() == OPEN_MAX {
            return Err(SyntaxError::new("statements are nested too deeply"));
        }
        self.open.push(Open {
            end,
            definition: None,
            may_have_else,
            is_loop: end == "endfor",
            branches: 0,
            texts: 0,
            tag_end: None,
        });
        Ok(())
    }

    /// Counts an `elif`.
    fn branch(&mut self) -> Result<(), SyntaxError> {
        if let Some(open) = self.open.last_mut() {
            open.branches += 1;
        }
        let branches: usize = self.open.iter().map(|open| open.branches).sum();
        if branches > BRANCHES_MAX {
            return Err(SyntaxError::new(format!("more than {BRANCHES_MAX} times 'elif'")));
        }
        Ok(())
    }

    fn with(&mut self, tokens: &mut Expressions) -> Result<String, SyntaxError> {
        self.open("endwith", false)?;
        let (mut targets, mut values) = (Vec::new(), Vec::new());
        while !tokens.is_at_end() {
            targets.push(tokens.one_target()?);
            tokens.expect("=")?;
            values.push(kept(&tokens.expression()?, false));
            if !tokens.takes(",") {
                break;
            }
        }
        // All values are computed before any name is set.
        Ok(match targets.len() {
            0 => "with".to_owned(),
            1 => format!("with {} = {}", targets[0], values[0]),
            _ => format!("with ({}) = ({})", targets.join(", "), values.join(", ")),
        })
    }

    fn for_loop(&mut self, tokens: &mut Expressions) -> Result<String, SyntaxError> {
        self.open("endfor", true)?;
        let target = tokens.target()?;
        if !tokens.takes_word("in") {
            return Err(SyntaxError::new("'in' is missing after 'for'"));
        }
        let values = tokens.iterated()?;
        if is_content(&values) {
            self.contents.loops.push(target.clone());
        }
        let mut inner = format!("for {target} in __iterate({values})");
        if tokens.takes_word("if") {
            inner += &format!(" if {}", tokens.expression()?);
        }
        if tokens.takes_word("recursive") {
            inner += " recursive";
        }
        Ok(inner)
    }

    fn set(&mut self, tokens: &mut Expressions) -> Result<String, SyntaxError> {
        let target = tokens.target()?;
        let is_of_namespace = target.contains('.');
        if tokens.takes("=") {
            // transformers keeps these names out of namespaces.
            if target.contains("._") {
                return Ok("set _ = raise_exception('a namespace has no names with _')".to_owned());
            }
            let value = kept(&tokens.tuple()?, is_of_namespace);
            return Ok(match target.starts_with('(') {
                true => format!("set {target} = __iterate({value})"),
                false => format!("set {target} = {value}"),
            });
        }
        self.open("endset", false)?;
        let filters = match tokens.takes("|") {
            true => format!(" | {}|{}", tokens.filter_chain()?, keeper(is_of_namespace)),
            false => String::new(),
        };
        Ok(format!("set {target}{filters}"))
    }

    fn begin_macro(
        &mut self,
        tokens: &mut Expressions,
        marks: (&'static str, &'static str),
        lines: &str,
    ) -> Result<(), SyntaxError> {
        let name = tokens.assigned_name()?;
        tokens.expect("(")?;
        let parameters = parameters(tokens)?;
        let start = self.out.len();
        self.out += lines;
        let definition = Macro {
            name,
            parameters,
            header: start..self.out.len(),
            marks,
            has_any_arguments: false,
        };
        self.open("endmacro", false)?;
        if let Some(open) = self.open.last_mut() {
            open.definition = Some(definition);
            open.tag_end = Some(start);
        }
        Ok(())
    }

    /// Ends a statement.
    fn end(
        &mut self,
        end: &str,
        tokens: &mut Expressions,
        marks: (&'static str, &'static str),
        lines: &str,
    ) -> Result<(), SyntaxError> {
        let Some(open) = self.open.pop_if(|open| open.end == end) else {
            return Err(SyntaxError::new(format!("unexpected '{end}'")));
        };
        let mut inner = if end == "endgeneration" { "endwith" } else { end }.to_owned();
        if end == "endblock" && !tokens.is_at_end() {
            inner = format!("{inner} {}", tokens.name()?);
        }
        let (begin, close) = marks;
        let count = open.count();
        let Some(definition) = open.definition else {
            if let (Some(statement), Some(end)) = (count.strip_suffix(" %}"), open.tag_end) {
                self.out.insert_str(end, &format!(" %}}{statement}"));
            }
            self.out += &format!("{{%{begin} {inner}{lines} {close}%}}");
            return Ok(());
        };
        // Now it is known whether the macro takes any arguments, and its begin can be written.
        let (name, any) = (&definition.name, definition.has_any_arguments);
        let lines_of_header = self.out[definition.header.clone()].to_owned();
        let header = definition.header(&lines_of_header, count);
        self.out.replace_range(definition.header.clone(), &header);
        self.out += &match any {
            false => format!("{{%{begin} endmacro{lines} {close}%}}"),
            true => format!(
                "{{%{begin} endmacro{lines} %}}{{% set {name} = __any_arguments(__macro_{name}, {}) {close}%}}",
                definition.parameters.len()
            ),
        };
        Ok(())
    }
}

impl Macro {
    /// Returns the statements that begin the macro, `first` among them.
    fn header(&self, lines: &str, first: String) -> String {
        let (begin, close) = self.marks;
        let mut parameters = self.parameters.clone();
        let mut defaults = first;
        for index in 0..parameters.len() {
            let (before, rest) = parameters.split_at_mut(index);
            let (name, default) = &mut rest[0];
            // A default that uses another parameter is computed in the body.
            let is_used =
                |default: &String| before.iter().any(|(name, _)| default.contains(&**name));
            if default.as_ref().is_some_and(is_used)
                && let Some(value) = default.take()
            {
                defaults += &format!(
                    "{{% if {name} is undefined %}}{{% set {name} = {value} %}}{{% endif %}}"
                );
            }
        }
        let mut name = self.name.clone();
        if self.has_any_arguments {
            name = format!("__macro_{name}");
            parameters.push(("varargs".to_owned(), Some("()".to_owned())));
            parameters.push(("kwargs".to_owned(), Some("{}".to_owned())));
        }
        // The mark stands at the end of the last tag.
        let signature = match signature(&parameters) {
            empty if empty.is_empty() => "()".to_owned(),
            signature => signature,
        };
        match defaults.strip_suffix(" %}") {
            None => format!("{{%{begin} macro {name}{signature}{lines} {close}%}}"),
            Some(defaults) => {
                format!("{{%{begin} macro {name}{signature}{lines} %}}{defaults} {close}%}}")
            }
        }
    }
}

/// Returns the filter that a value passes before it is kept: see [`limits`](super::limits).
fn keeper(is_of_namespace: bool) -> &'static str {
    if is_of_namespace { "__keep_data" } else { "__keep" }
}

/// Returns a value to be kept.
fn kept(value: &str, is_of_namespace: bool) -> String {
    format!("({value})|{}", keeper(is_of_namespace))
}

/// Reads parameters up to the closing parenthesis.
fn parameters(tokens: &mut Expressions) -> Result<Vec<(String, Option<String>)>, SyntaxError> {
    let mut parameters: Vec<(String, Option<String>)> = Vec::new();
    while !tokens.takes(")") {
        if parameters.len() == PARAMETERS_MAX {
            return Err(SyntaxError::new(format!("more than {PARAMETERS_MAX} parameters")));
        }
        let name = tokens.assigned_name()?;
        let default = if tokens.takes("=") { Some(tokens.expression()?) } else { None };
        if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
            return Err(SyntaxError::new("a parameter without default follows one with default"));
        }
        parameters.push((name, default));
        if !tokens.takes(",") {
            tokens.expect(")")?;
            break;
        }
    }
    Ok(parameters)
}

/// Returns parameters with their parentheses; nothing if there are none.
fn signature(parameters: &[(String, Option<String>)]) -> String {
    let parameter = |(name, default): &(String, Option<String>)| match default {
        Some(default) => format!("{name}={default}"),
        None => name.clone(),
    };
    match parameters {
        [] => String::new(),
        parameters => {
            format!("({})", parameters.iter().map(parameter).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Returns what follows the tag `raw`, if `inner` begins with it.
fn raw(inner: &str) -> Option<&str> {
    let after = inner.trim_start().strip_prefix("raw")?.trim_start();
    after.strip_prefix(['-', '+']).unwrap_or(after).strip_prefix("%}")
}

/// Returns the text between the tags `raw`, which begins `inner`, and `endraw`, which ends `text`, and the mark at the
/// end of the second.
fn raw_text<'a>(inner: &str, text: &'a str) -> (&'a str, &'static str) {
    let begin = inner.find("%}").map_or("", |end| &inner[..end]);
    let (text, end) = text.rsplit_once("{%").unwrap_or((text, ""));
    let text = if begin.ends_with('-') { text.trim_start() } else { text };
    let text = if end.starts_with('-') { text.trim_end() } else { text };
    let tail = match end.strip_suffix("%}").map(|end| end.chars().last()) {
        Some(Some('-')) => "-",
        Some(Some('+')) => "+",
        _ => "",
    };
    (text, tail)
}

/// Returns where a raw text ends, behind its tag `endraw`.
fn raw_end(text: &str) -> Option<usize> {
    let mut from = 0;
    loop {
        let start = from + text[from..].find("{%")?;
        let inner = &text[start + 2..];
        let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start();
        if let Some(after) = inner.strip_prefix("endraw") {
            let after = after.trim_start();
            let after = after.strip_prefix(['-', '+']).unwrap_or(after);
            if let Some(after) = after.strip_prefix("%}") {
                return Some(text.len() - after.len());
            }
        }
        from = start + 2;
    }
}
