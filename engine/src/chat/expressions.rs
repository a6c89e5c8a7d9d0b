//! Translates expressions of Jinja 3.1 to minijinja.
//!
//! The grammar is that of `jinja2/parser.py`. Operators become calls of the functions of
//! [`operators`](super::operators), which compute as Python does.

use super::{tokens::Token, translate::SyntaxError};

/// Deepest nesting of an expression.
const DEPTH: usize = 60;
/// Most links of the chains in one tag: attributes, items, calls, filters, tests and conditions. Each nests the translation.
const LINKS_MAX: usize = 500;
/// Methods of loops that minijinja would run without bounds.
const LOOP_METHODS: [&str; 2] = ["changed", "cycle"];

/// A reader of the tokens of one tag.
pub(super) struct Expressions {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token>>,
    depth: usize,
    links: usize,
    /// Whether `varargs` or `kwargs` was read: a macro takes any arguments.
    pub has_any_arguments: bool,
    /// Values of which `type` or `text` was read.
    pub parts: Vec<String>,
    /// Whether a content was tested to be a string.
    pub asks_for_strings: bool,
}

/// A translated expression.
type Translated = Result<String, SyntaxError>;

impl Expressions {
    pub fn new(tokens: Vec<Token>) -> Self {
        Self {
            tokens: tokens.into_iter().peekable(),
            depth: 0,
            links: 0,
            has_any_arguments: false,
            parts: Vec::new(),
            asks_for_strings: false,
        }
    }

    /// Takes the next token if it is this operator.
    pub fn takes(&mut self, sign: &str) -> bool {
        self.tokens.next_if(|token| matches!(token, Token::Sign(s) if *s == sign)).is_some()
    }

    /// Takes the next token if it is this word.
    pub fn takes_word(&mut self, word: &str) -> bool {
        self.tokens.next_if(|token| matches!(token, Token::Name(name) if name == word)).is_some()
    }

    /// Takes the next token, which is a name.
    pub fn name(&mut self) -> Translated {
        match self.tokens.next() {
            Some(Token::Name(name)) => Ok(name),
            other => Err(unexpected(other.as_ref(), "a name")),
        }
    }

    /// Takes the next token, which is a name to assign to.
    pub fn assigned_name(&mut self) -> Translated {
        let name = self.name()?;
        let is_constant =
            ["true", "false", "none", "True", "False", "None"].contains(&name.as_str());
        // The functions that translations call have such names.
        if is_constant || name.starts_with("__") {
            return Err(SyntaxError::new(format!("can't assign to '{name}'")));
        }
        Ok(name)
    }

    /// Takes this operator.
    pub fn expect(&mut self, sign: &'static str) -> Result<(), SyntaxError> {
        if self.takes(sign) { Ok(()) } else { Err(unexpected(self.tokens.peek(), sign)) }
    }

    /// Returns whether there are no more tokens.
    pub fn is_at_end(&mut self) -> bool {
        self.tokens.peek().is_none()
    }

    /// Leaves out a token.
    pub fn skip(&mut self) {
        self.tokens.next();
    }

    /// Checks that there are no more tokens.
    pub fn end(&mut self) -> Result<(), SyntaxError> {
        if self.is_at_end() {
            Ok(())
        } else {
            Err(unexpected(self.tokens.peek(), "the end of the tag"))
        }
    }

    /// Begins a part that is nested, up to where the depth is counted down.
    fn nest(&mut self) -> Result<(), SyntaxError> {
        self.depth += 1;
        if self.depth <= DEPTH {
            Ok(())
        } else {
            Err(SyntaxError::new("an expression is nested too deeply"))
        }
    }

    /// Counts a link of a chain.
    fn link(&mut self) -> Result<(), SyntaxError> {
        self.links += 1;
        if self.links <= LINKS_MAX {
            Ok(())
        } else {
            Err(SyntaxError::new(format!("more than {LINKS_MAX} links in the chains of a tag")))
        }
    }

    fn is_word(&mut self, words: &[&str]) -> bool {
        matches!(self.tokens.peek(), Some(Token::Name(name)) if words.contains(&name.as_str()))
    }

    fn is_sign(&mut self, signs: &[&str]) -> bool {
        matches!(self.tokens.peek(), Some(Token::Sign(sign)) if signs.contains(sign))
    }

    /// An expression, or several with commas between, which are a tuple.
    pub fn tuple(&mut self) -> Translated {
        let first = self.expression()?;
        if !self.is_sign(&[","]) {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.takes(",") {
            if self.is_at_end() || self.is_sign(&["=", ")"]) || self.is_word(&["recursive", "if"]) {
                break;
            }
            parts.push(self.expression()?);
        }
        Ok(tuple(&parts))
    }

    /// A tuple without `if`: what a loop is over.
    pub fn iterated(&mut self) -> Translated {
        let mut parts = vec![self.or()?];
        let mut is_tuple = false;
        while self.takes(",") {
            is_tuple = true;
            if self.is_at_end() || self.is_word(&["recursive", "if"]) {
                break;
            }
            parts.push(self.or()?);
        }
        Ok(if is_tuple { tuple(&parts) } else { parts.remove(0) })
    }

    /// Names to assign to: one, or a tuple of them.
    pub fn target(&mut self) -> Translated {
        let mut parts = vec![self.one_target()?];
        let mut is_tuple = false;
        while self.takes(",") {
            is_tuple = true;
            if self.is_sign(&["=", ")"]) || self.is_word(&["in"]) {
                break;
            }
            parts.push(self.one_target()?);
        }
        Ok(if is_tuple { format!("({},)", parts.join(", ")) } else { parts.remove(0) })
    }

    /// One name to assign to, or a tuple in parentheses.
    pub fn one_target(&mut self) -> Translated {
        if self.takes("(") {
            self.nest()?;
            let inner = self.target()?;
            self.expect(")")?;
            self.depth -= 1;
            return Ok(inner);
        }
        let name = self.assigned_name()?;
        if self.takes(".") {
            return Ok(format!("{name}.{}", self.name()?));
        }
        Ok(name)
    }

    /// One expression.
    pub fn expression(&mut self) -> Translated {
        self.nest()?;
        let mut value = self.or()?;
        while self.takes_word("if") {
            self.link()?;
            let condition = self.or()?;
            let other = if self.takes_word("else") {
                format!(" else {}", self.expression()?)
            } else {
                String::new()
            };
            value = format!("({value} if {condition}{other})");
        }
        self.depth -= 1;
        Ok(value)
    }

    fn or(&mut self) -> Translated {
        let mut value = self.and()?;
        while self.takes_word("or") {
            self.link()?;
            value = format!("({value} or {})", self.and()?);
        }
        Ok(value)
    }

    fn and(&mut self) -> Translated {
        let mut value = self.not()?;
        while self.takes_word("and") {
            self.link()?;
            value = format!("({value} and {})", self.not()?);
        }
        Ok(value)
    }

    fn not(&mut self) -> Translated {
        let mut count = 0;
        while self.takes_word("not") {
            count += 1;
        }
        let value = self.comparison()?;
        Ok(match count {
            0 => value,
            count if count % 2 == 1 => format!("(not {value})"),
            _ => format!("(not (not {value}))"),
        })
    }

    fn comparison(&mut self) -> Translated {
        let mut parts = vec![self.sum()?];
        loop {
            let operator = match self.tokens.peek() {
                Some(Token::Sign(sign @ ("==" | "!=" | "<" | "<=" | ">" | ">="))) => *sign,
                Some(Token::Name(name)) if name == "in" => "in",
                Some(Token::Name(name)) if name == "not" => "not in",
                _ => break,
            };
            self.tokens.next();
            if operator == "not in" && !self.takes_word("in") {
                return Err(SyntaxError::new("'in' is missing after 'not'"));
            }
            parts.push(format!("'{operator}'"));
            parts.push(self.sum()?);
        }
        Ok(call("__compare", parts))
    }

    /// Parts with operators between them.
    fn operations(&mut self, signs: &[&str], part: fn(&mut Self) -> Translated) -> Translated {
        let mut parts = vec![part(self)?];
        while self.is_sign(signs) {
            if let Some(Token::Sign(sign)) = self.tokens.next() {
                parts.push(format!("'{sign}'"));
            }
            parts.push(part(self)?);
        }
        Ok(call("__compute", parts))
    }

    fn sum(&mut self) -> Translated {
        self.operations(&["+", "-"], Self::concatenation)
    }

    fn concatenation(&mut self) -> Translated {
        let mut parts = vec![self.product()?];
        while self.takes("~") {
            parts.push(self.product()?);
        }
        Ok(call("__concat", parts))
    }

    fn product(&mut self) -> Translated {
        self.operations(&["*", "/", "//", "%"], Self::power)
    }

    fn power(&mut self) -> Translated {
        self.operations(&["**"], |it| it.unary(true))
    }

    fn unary(&mut self, with_filters: bool) -> Translated {
        self.nest()?;
        let mut value = if self.takes("-") {
            format!("__negative({})", self.unary(false)?)
        } else if self.takes("+") {
            format!("__positive({})", self.unary(false)?)
        } else {
            let primary = self.primary()?;
            self.postfix(primary)?
        };
        if with_filters {
            value = self.filters(value)?;
        }
        self.depth -= 1;
        Ok(value)
    }

    fn primary(&mut self) -> Translated {
        match self.tokens.next() {
            Some(Token::Name(name)) => {
                self.has_any_arguments |= name == "varargs" || name == "kwargs";
                Ok(name)
            }
            Some(Token::Text(mut text)) => {
                while let Some(Token::Text(more)) =
                    self.tokens.next_if(|token| matches!(token, Token::Text(_)))
                {
                    text += &more;
                }
                Ok(quote(&text))
            }
            Some(Token::Number(number)) => Ok(number),
            Some(Token::Sign("(")) => {
                if self.takes(")") {
                    return Ok("()".to_owned());
                }
                let inner = self.tuple()?;
                self.expect(")")?;
                Ok(inner)
            }
            Some(Token::Sign("[")) => {
                let mut parts = Vec::new();
                while !self.takes("]") {
                    parts.push(self.expression()?);
                    if !self.takes(",") && !self.is_sign(&["]"]) {
                        return Err(unexpected(self.tokens.peek(), "',' or ']'"));
                    }
                }
                Ok(format!("[{}]", parts.join(", ")))
            }
            Some(Token::Sign("{")) => {
                let mut parts = Vec::new();
                while !self.takes("}") {
                    let key = key(self.expression()?);
                    self.expect(":")?;
                    parts.push(format!("{key}: {}", self.expression()?));
                    if !self.takes(",") && !self.is_sign(&["}"]) {
                        return Err(unexpected(self.tokens.peek(), "',' or '}'"));
                    }
                }
                Ok(format!("{{{}}}", parts.join(", ")))
            }
            other => Err(unexpected(other.as_ref(), "an expression")),
        }
    }

    fn postfix(&mut self, mut value: String) -> Translated {
        while self.is_sign(&[".", "[", "("]) {
            self.link()?;
            if self.takes(".") {
                value = match self.tokens.next() {
                    Some(Token::Name(name))
                        if self.is_sign(&["("]) && LOOP_METHODS.contains(&name.as_str()) =>
                    {
                        loop_method(&value, &name, &self.arguments()?)
                    }
                    // A method is minijinja's to call.
                    Some(Token::Name(name)) if self.is_sign(&["("]) => format!("{value}.{name}"),
                    Some(Token::Name(name)) => {
                        self.note_part(&value, &name);
                        attribute(&value, &name)
                    }
                    Some(Token::Number(number)) => format!("__item({value}, {number})"),
                    other => return Err(unexpected(other.as_ref(), "a name")),
                };
            } else if self.takes("[") {
                value = self.subscript(&value)?;
            } else {
                value = format!("{value}{}", self.arguments()?);
            }
        }
        Ok(value)
    }

    fn subscript(&mut self, value: &str) -> Translated {
        let mut parts: Vec<Option<String>> = vec![None];
        let mut is_tuple = false;
        while !self.takes("]") {
            if self.takes(":") {
                parts.push(None);
            } else if self.takes(",") {
                is_tuple = true;
            } else {
                let part = self.expression()?;
                match parts.last_mut() {
                    Some(last @ None) => *last = Some(part),
                    _ => return Err(unexpected(self.tokens.peek(), "']'")),
                }
            }
        }
        match parts.as_slice() {
            _ if is_tuple => Err(SyntaxError::new("a subscript with ','")),
            [None] => Err(SyntaxError::new("a subscript is empty")),
            [Some(index)] => {
                self.note_part(value, index.trim_matches('\''));
                Ok(format!("__item({value}, {index})"))
            }
            [_, _] | [_, _, _] => {
                parts.resize(3, None);
                let part = |part: Option<String>| part.unwrap_or_else(|| "none".to_owned());
                let parts: Vec<String> = parts.into_iter().map(part).collect();
                Ok(format!("__slice({value}, {})", parts.join(", ")))
            }
            _ => Err(SyntaxError::new("a slice has at most three parts")),
        }
    }

    fn note_part(&mut self, value: &str, key: &str) {
        if matches!(key, "type" | "text") {
            self.parts.push(value.to_owned());
        }
    }

    /// Arguments of a call, with their parentheses.
    pub fn arguments(&mut self) -> Translated {
        self.expect("(")?;
        let mut parts = Vec::new();
        while !self.takes(")") {
            if self.takes("**") {
                parts.push(format!("**__spread({})", self.expression()?));
            } else if self.takes("*") {
                parts.push(format!("*__spread({})", self.expression()?));
            } else {
                let value = self.expression()?;
                let is_name = !value.is_empty()
                    && value.chars().all(|letter| letter == '_' || letter.is_alphanumeric());
                parts.push(if is_name && self.takes("=") {
                    format!("{value}={}", self.expression()?)
                } else {
                    value
                });
            }
            if !self.takes(",") && !self.is_sign(&[")"]) {
                return Err(unexpected(self.tokens.peek(), "',' or ')'"));
            }
        }
        Ok(format!("({})", parts.join(", ")))
    }

    fn filters(&mut self, mut value: String) -> Translated {
        while self.is_sign(&["|", "("]) || self.is_word(&["is"]) {
            self.link()?;
            if self.takes("|") {
                value = format!("({value}|{})", self.filter()?);
            } else if self.takes_word("is") {
                value = self.test(&value)?;
            } else {
                value = format!("{value}{}", self.arguments()?);
            }
        }
        Ok(value)
    }

    /// Filters without the value that they are applied to, with `|` between.
    pub fn filter_chain(&mut self) -> Translated {
        let mut chain = self.filter()?;
        while self.takes("|") {
            self.link()?;
            chain = format!("{chain}|{}", self.filter()?);
        }
        Ok(chain)
    }

    fn filter(&mut self) -> Translated {
        let mut name = self.name()?;
        while self.takes(".") {
            self.link()?;
            name = format!("{name}.{}", self.name()?);
        }
        if self.is_sign(&["("]) { Ok(format!("{name}{}", self.arguments()?)) } else { Ok(name) }
    }

    fn test(&mut self, value: &str) -> Translated {
        let not = if self.takes_word("not") { "not " } else { "" };
        let name = match self.tokens.next() {
            Some(Token::Name(name)) => name,
            other => return Err(unexpected(other.as_ref(), "the name of a test")),
        };
        let arguments = if self.is_sign(&["("]) {
            self.arguments()?
        } else {
            let has_argument = match self.tokens.peek() {
                Some(Token::Name(_)) => {
                    !self.is_word(&["else", "or", "and", "is", "if", "in", "not"])
                }
                Some(Token::Text(_) | Token::Number(_) | Token::Sign("[" | "{")) => true,
                _ => false,
            };
            if has_argument {
                let primary = self.primary()?;
                format!("({})", self.postfix(primary)?)
            } else {
                String::new()
            }
        };
        self.asks_for_strings |= name == "string" && is_content(value);
        Ok(format!("({value} is {not}{name}{arguments})"))
    }
}

/// Returns whether an expression is the content of a message.
pub(super) fn is_content(value: &str) -> bool {
    value.ends_with("content") || value.ends_with("'content')")
}

/// Returns a key of a mapping. What is no literal is checked when it is known.
fn key(value: String) -> String {
    let text = value.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
    let is_literal = text.is_some_and(|text| !text.contains('\''));
    if is_literal { value } else { format!("__key({value})") }
}

/// Returns the call of a method of a loop, by way of a function.
fn loop_method(value: &str, name: &str, arguments: &str) -> String {
    match arguments.strip_prefix('(') {
        None | Some(")") => format!("__loop({value}, '{name}')"),
        Some(given) => format!("__loop({value}, '{name}', {given}"),
    }
}

/// Returns an attribute: of an object, or of a number.
fn attribute(value: &str, name: &str) -> String {
    match name {
        "real" | "imag" | "numerator" | "denominator" => format!("__attribute({value}, '{name}')"),
        _ if value.ends_with(|letter: char| letter.is_ascii_digit()) => format!("({value}).{name}"),
        _ => format!("{value}.{name}"),
    }
}

/// Returns a call, or the only part.
fn call(function: &str, mut parts: Vec<String>) -> String {
    match parts.len() {
        1 => parts.remove(0),
        _ => format!("{function}({})", parts.join(", ")),
    }
}

fn tuple(parts: &[String]) -> String {
    format!("({},)", parts.join(", "))
}

/// Returns a string of minijinja.
pub(super) fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('\'');
    for letter in text.chars() {
        match letter {
            '\\' => quoted.push_str("\\\\"),
            '\'' => quoted.push_str("\\'"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            // No delimiter of a tag may be in a string.
            '{' | '}' | '%' | '#' => quoted += &format!("\\u{:04x}", u32::from(letter)),
            letter => quoted.push(letter),
        }
    }
    quoted.push('\'');
    quoted
}

fn unexpected(token: Option<&Token>, expected: &str) -> SyntaxError {
    let found = match token {
        None => "the end of the tag".to_owned(),
        Some(Token::Name(name)) => format!("'{name}'"),
        Some(Token::Text(_)) => "a string".to_owned(),
        Some(Token::Number(number)) => number.clone(),
        Some(Token::Sign(sign)) => format!("'{sign}'"),
    };
    SyntaxError::new(format!("unexpected {found}, expected {expected}"))
}
