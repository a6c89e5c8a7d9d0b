//! Thinking before an answer that a grammar describes. Where the prompt does not begin it, as with Qwen 3, the model decides:
//! the answer begins with `<think>`, or with what the grammar describes.

use serde_json::Value;
use tritmill_grammar::{Grammar, with_bounded_white_space};

/// Rules of what the model thinks, and of the white space behind it.
const RULES: &str = r#"
thinking: "<think>" thought SPACE?
thought[lazy]: /(.|\n)*<\/think>/
SPACE: /[ \n]{1,4}/
"#;

/// Returns the grammar of a text that may come after what the model thinks. Expressions and grammars with rules of their own remain
/// as they are.
pub fn text_after_thinking(text: &Grammar) -> Grammar {
    let json = |schema: Value| Some(format!("%json {}", with_bounded_white_space(schema)));
    let answer = match text {
        Grammar::JsonObject => json(Value::from_iter([("type", "object")])),
        Grammar::JsonSchema(schema) => serde_json::from_str(schema).ok().and_then(json),
        Grammar::Choice(texts) => {
            // Lark's strings have the escapes of JSON.
            let quoted = |text: &String| Value::from(text.as_str()).to_string();
            Some(texts.iter().map(quoted).collect::<Vec<_>>().join(" | "))
        }
        Grammar::Regex(_) | Grammar::Lark(_) => None,
    };
    let with_rules =
        |answer| Grammar::Lark(format!("start: thinking? answer\nanswer: {answer}{RULES}"));
    answer.map_or_else(|| text.clone(), with_rules)
}

/// Returns the grammar of calls, as [`Calls`](super::Calls) writes it, that may come after what the model thinks.
pub fn calls_after_thinking(calls: Grammar) -> Grammar {
    match calls {
        Grammar::Lark(lark) => {
            let answer = lark.replacen("start: ", "answer: ", 1);
            Grammar::Lark(format!("start: thinking? answer\n{answer}{RULES}"))
        }
        other => other,
    }
}
