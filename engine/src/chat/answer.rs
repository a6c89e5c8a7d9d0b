//! The parts of an answer's text: what the model thinks, what it says, and the calls that it makes.
//!
//! The parser takes the text as it grows and returns what is certain. Of a complete answer the pieces are the same, however
//! the text was cut. What is not as the syntax says stays text: nothing is lost.

use std::sync::Arc;

use serde_json::Value;

use super::calls::{BEGIN, CallSyntax, Calls, END, Holds};

/// The text that thinking begins with.
const THINK: &str = "<think>";
/// The text that thinking ends with.
const THINK_END: &str = "</think>";

/// How the text of an answer is divided.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AnswerLayout {
    /// Whether an answer may begin with what the model thinks, between `<think>` tags.
    pub may_think: bool,
    /// Whether the prompt ends with the tag that thinking begins with.
    pub is_thinking: bool,
    /// Whether an answer that a grammar describes may begin with thinking, too: the request asks for it, and the prompt does not begin it.
    pub decides_to_think: bool,
    /// The calls that it may make.
    pub calls: Option<Arc<Calls>>,
}

impl AnswerLayout {
    /// Returns the texts after which an answer must be calls alone; empty if it must from its start.
    pub fn before_calls(&self, is_required: bool) -> Vec<&'static str> {
        let thinking = self.is_thinking.then_some(THINK_END);
        thinking.into_iter().chain((!is_required).then_some(BEGIN)).collect()
    }

    /// Returns the texts after which an answer must match a grammar.
    pub fn before_text(&self) -> Vec<&'static str> {
        self.is_thinking.then_some(THINK_END).into_iter().collect()
    }

    /// Returns where in a complete text what the model thinks ends; 0 if it does not think.
    pub fn reasoning_end(&self, text: &str) -> usize {
        let thinks = self.is_thinking || self.may_think && text.trim_start().starts_with(THINK);
        let end = text.find(THINK_END).map_or(text.len(), |at| at + THINK_END.len());
        if thinks { end } else { 0 }
    }

    /// Divides a complete text.
    pub fn divide(&self, text: &str) -> Vec<Piece> {
        let mut parser = AnswerParser::new(self.clone());
        let mut pieces = parser.push(text);
        pieces.extend(parser.finish());
        pieces
    }
}

/// A piece of an answer. Texts continue the part that they belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Of what the model thinks.
    Reasoning(String),
    /// Of the text.
    Content(String),
    /// A call begins, of the function with this name.
    Call(String),
    /// Of the JSON object with the arguments of the last call.
    Arguments(String),
}

/// Where the text ends that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At the start, where the tag of thinking may come.
    Start,
    /// Behind the tag that thinking begins with, and white space.
    BehindThink,
    Reasoning,
    /// Behind the tag that ends thinking, and white space.
    BehindReasoning,
    Content,
    /// Behind the text that begins a call.
    Call,
    /// In the arguments of a call that is a JSON object.
    Json,
    /// Between the parameters of a call, after this many.
    Tags(usize),
    /// Behind a call.
    BehindCall,
}

/// Divides the text of an answer while it grows.
#[derive(Debug, Clone)]
pub struct AnswerParser {
    layout: AnswerLayout,
    place: Place,
    /// Text that is not decided yet.
    rest: String,
    /// Name of the function that is called.
    function: String,
}

impl AnswerParser {
    /// Begins an answer.
    pub fn new(layout: AnswerLayout) -> Self {
        let place = match (layout.is_thinking, layout.may_think) {
            (true, _) => Place::BehindThink,
            (false, true) => Place::Start,
            (false, false) => Place::Content,
        };
        Self { layout, place, rest: String::new(), function: String::new() }
    }

    /// Takes the next text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.rest.push_str(text);
        let mut pieces = Vec::new();
        while self.step(&mut pieces) {}
        pieces
    }

    /// Takes the end of the answer.
    pub fn finish(mut self) -> Vec<Piece> {
        let rest = std::mem::take(&mut self.rest);
        let mut pieces = Vec::new();
        match self.place {
            Place::BehindThink | Place::Reasoning => {
                add(&mut pieces, Piece::Reasoning, rest.trim_end_matches('\n'))
            }
            Place::Start | Place::Content => add(&mut pieces, Piece::Content, &rest),
            Place::BehindReasoning | Place::BehindCall => {
                add(&mut pieces, Piece::Content, rest.trim_start());
            }
            Place::Call => add(&mut pieces, Piece::Content, &format!("{BEGIN}{rest}")),
            Place::Json => add(&mut pieces, Piece::Arguments, &rest),
            // A parameter without its end is dropped.
            Place::Tags(_) => {}
        }
        pieces
    }

    /// Takes what is certain of the rest; returns whether more may be.
    fn step(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match self.place {
            Place::Start => self.start(),
            Place::BehindThink => self.skip_white_space(Place::Reasoning),
            Place::Reasoning => self.reasoning(pieces),
            Place::BehindReasoning => self.skip_white_space(Place::Content),
            Place::Content => self.content(pieces),
            Place::Call => self.call(pieces),
            Place::Json => self.json(pieces),
            Place::Tags(count) => self.parameter(count, pieces),
            Place::BehindCall => self.behind_call(),
        }
    }

    fn start(&mut self) -> bool {
        let trimmed = self.rest.trim_start();
        if let Some(rest) = trimmed.strip_prefix(THINK) {
            self.rest = rest.to_owned();
            self.place = Place::BehindThink;
        } else if THINK.starts_with(trimmed) {
            return false;
        } else {
            self.place = Place::Content;
        }
        true
    }

    fn reasoning(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let end = self.rest.find(THINK_END);
        let certain = end.unwrap_or_else(|| undecided(&self.rest, THINK_END));
        add(pieces, Piece::Reasoning, self.rest[..certain].trim_end_matches('\n'));
        let kept = self.rest[..certain].trim_end_matches('\n').len();
        match end {
            Some(end) => {
                self.rest.drain(..end + THINK_END.len());
                self.place = Place::BehindReasoning;
                true
            }
            None => {
                self.rest.drain(..kept);
                false
            }
        }
    }

    fn skip_white_space(&mut self, next: Place) -> bool {
        let white = self.rest.len() - self.rest.trim_start().len();
        self.rest.drain(..white);
        if self.rest.is_empty() {
            return false;
        }
        self.place = next;
        true
    }

    fn content(&mut self, pieces: &mut Vec<Piece>) -> bool {
        if self.layout.calls.is_none() {
            add(pieces, Piece::Content, &std::mem::take(&mut self.rest));
            return false;
        }
        let begin = self.rest.find(BEGIN);
        let certain = begin.unwrap_or_else(|| undecided(&self.rest, BEGIN));
        let kept = self.rest[..certain].trim_end().len();
        add(pieces, Piece::Content, &self.rest[..kept]);
        match begin {
            Some(begin) => {
                self.rest.drain(..begin + BEGIN.len());
                self.place = Place::Call;
                true
            }
            None => {
                self.rest.drain(..kept);
                false
            }
        }
    }

    /// Takes the head of a call, up to its arguments.
    fn call(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let syntax = self.layout.calls.as_ref().map_or(CallSyntax::Json, |calls| calls.syntax);
        let [open, close] = match syntax {
            CallSyntax::Json => ["\n{\"name\": ", ", \"arguments\": "],
            CallSyntax::Tags => ["\n<function=", ">\n"],
        };
        let Some(head) = self.rest.strip_prefix(open) else {
            return self.undo_call(open.starts_with(&self.rest), pieces);
        };
        let Some((name, rest)) = head.split_once(close) else { return false };
        let name = match syntax {
            CallSyntax::Json => serde_json::from_str(name).ok(),
            CallSyntax::Tags => Some(name.to_owned()),
        };
        let Some(name) = name else { return self.undo_call(false, pieces) };
        self.function.clone_from(&name);
        self.rest = rest.to_owned();
        pieces.push(Piece::Call(name));
        self.place = match syntax {
            CallSyntax::Json => Place::Json,
            CallSyntax::Tags => {
                pieces.push(Piece::Arguments("{".to_owned()));
                Place::Tags(0)
            }
        };
        true
    }

    /// Makes text of what cannot be a call, unless it may still become one.
    fn undo_call(&mut self, may_be: bool, pieces: &mut Vec<Piece>) -> bool {
        if may_be {
            return false;
        }
        add(pieces, Piece::Content, BEGIN);
        self.place = Place::Content;
        true
    }

    fn json(&mut self, pieces: &mut Vec<Piece>) -> bool {
        // Strings of JSON have no line breaks, so that the arguments end here.
        let close = format!("}}\n{END}");
        let end = self.rest.find(&close);
        let certain = end.unwrap_or_else(|| undecided(&self.rest, &close));
        add(pieces, Piece::Arguments, &self.rest[..certain]);
        self.rest.drain(..end.map_or(certain, |end| end + close.len()));
        if end.is_some() {
            self.place = Place::BehindCall;
        }
        end.is_some()
    }

    fn parameter(&mut self, count: usize, pieces: &mut Vec<Piece>) -> bool {
        let close = format!("</function>\n{END}");
        if let Some(rest) = self.rest.strip_prefix(&close) {
            self.rest = rest.to_owned();
            pieces.push(Piece::Arguments("}".to_owned()));
            self.place = Place::BehindCall;
            return true;
        }
        let parts = self.rest.strip_prefix("<parameter=").and_then(|rest| {
            let (name, rest) = rest.split_once(">\n")?;
            let (value, rest) = rest.split_once("\n</parameter>\n")?;
            Some((name, value, rest.to_owned()))
        });
        let Some((name, value, rest)) = parts else { return false };
        let holds =
            self.layout.calls.as_ref().map_or(Holds::Either, |c| c.holds(&self.function, name));
        let value = match (holds, serde_json::from_str::<Value>(value)) {
            (Holds::Json, Ok(value)) => value,
            (Holds::Either, Ok(value)) if !value.is_string() => value,
            _ => Value::from(value),
        };
        let comma = if count > 0 { ", " } else { "" };
        pieces.push(Piece::Arguments(format!("{comma}{}: {value}", Value::from(name))));
        self.rest = rest;
        self.place = Place::Tags(count + 1);
        true
    }

    fn behind_call(&mut self) -> bool {
        let trimmed = self.rest.trim_start();
        if let Some(rest) = trimmed.strip_prefix(BEGIN) {
            self.rest = rest.to_owned();
            self.place = Place::Call;
            return true;
        }
        if BEGIN.starts_with(trimmed) {
            return false;
        }
        self.place = Place::Content;
        true
    }
}

/// Adds a piece, unless its text is empty.
fn add(pieces: &mut Vec<Piece>, of: fn(String) -> Piece, text: &str) {
    if !text.is_empty() {
        pieces.push(of(text.to_owned()));
    }
}

/// Returns the length of a text without the begin of `mark` that it may end with.
fn undecided(text: &str, mark: &str) -> usize {
    let starts = text.char_indices().map(|(at, _)| at).rev().take(mark.len());
    starts.filter(|&at| mark.starts_with(&text[at..])).min().unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::Function, *};

    fn calls(syntax: CallSyntax) -> AnswerLayout {
        let parameters = json!({ "type": "object", "properties": {
            "city": { "type": "string" }, "days": { "type": "integer" }, "unit": { "type": ["string", "null"] },
        }, "required": ["city"] });
        let functions = vec![Function { name: "weather".to_owned(), parameters }];
        let calls = Some(Arc::new(Calls { syntax, functions, one_call: false }));
        AnswerLayout { may_think: true, calls, ..AnswerLayout::default() }
    }

    /// The pieces with those of the same part joined.
    fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
        let mut joined: Vec<Piece> = Vec::new();
        for piece in pieces {
            match (joined.last_mut(), piece) {
                (Some(Piece::Reasoning(text)), Piece::Reasoning(more))
                | (Some(Piece::Content(text)), Piece::Content(more))
                | (Some(Piece::Arguments(text)), Piece::Arguments(more)) => text.push_str(&more),
                (_, piece) => joined.push(piece),
            }
        }
        joined
    }

    /// Checks a text that comes whole, and one that comes in pieces of each length.
    fn check(layout: &AnswerLayout, text: &str, expected: &[Piece]) {
        assert_eq!(joined(layout.divide(text)), expected, "{text:?}");
        let letters: Vec<char> = text.chars().collect();
        for length in 1..8 {
            let mut parser = AnswerParser::new(layout.clone());
            let parts = letters.chunks(length).map(String::from_iter);
            let mut pieces: Vec<Piece> = parts.flat_map(|part| parser.push(&part)).collect();
            pieces.extend(parser.finish());
            assert_eq!(joined(pieces), expected, "{text:?} by {length}");
        }
    }

    fn reasoning(text: &str) -> Piece {
        Piece::Reasoning(text.to_owned())
    }
    fn content(text: &str) -> Piece {
        Piece::Content(text.to_owned())
    }
    fn call(name: &str) -> Piece {
        Piece::Call(name.to_owned())
    }
    fn arguments(text: &str) -> Piece {
        Piece::Arguments(text.to_owned())
    }

    #[test]
    fn text_without_marks_stays_as_it_is() {
        let texts =
            [" a <b> \n", "\n", "<think", "x <think> y </think>", "a <tool_ca", "<tool_call>{}"];
        for text in texts {
            check(&AnswerLayout::default(), text, &[content(text)]);
            check(&calls(CallSyntax::Json), text, &[content(text)]);
        }
    }

    #[test]
    fn thinking_is_a_part_of_its_own() {
        let layout = AnswerLayout { may_think: true, ..AnswerLayout::default() };
        let text = "\n<think>\nso </thin\n\n</think>\n\n ok\n";
        check(&layout, text, &[reasoning("so </thin"), content("ok\n")]);
        assert_eq!(layout.reasoning_end(text), text.find("\n\n ok").expect("its end"));
        assert_eq!(layout.reasoning_end("ok </think>"), 0);
        check(&layout, "<think>\n\n</think>\n\nok", &[content("ok")]);
        check(&layout, "<think>cut", &[reasoning("cut")]);
        let layout = AnswerLayout { is_thinking: true, ..AnswerLayout::default() };
        check(&layout, "so\n</think>\n\nok", &[reasoning("so"), content("ok")]);
    }

    #[test]
    fn calls_as_json_have_names_and_arguments() {
        let text = "<think>a</think>I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"}<\"}}\n\
                    </tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>";
        let expected = [
            reasoning("a"),
            content("I look."),
            call("weather"),
            arguments("{\"city\": \"}<\"}"),
            call("weather"),
            arguments("{}"),
        ];
        check(&calls(CallSyntax::Json), text, &expected);
        let cut = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"ci";
        check(&calls(CallSyntax::Json), cut, &[call("weather"), arguments("{\"ci")]);
    }

    #[test]
    fn parameters_between_tags_become_json() {
        let text = "<tool_call>\n<function=weather>\n<parameter=city>\n3\n</parameter>\n<parameter=days>\n4\n</parameter>\n\
                    <parameter=unit>\nnull\n</parameter>\n</function>\n</tool_call>";
        let json = "{\"city\": \"3\", \"days\": 4, \"unit\": null}";
        check(&calls(CallSyntax::Tags), text, &[call("weather"), arguments(json)]);
    }
}
