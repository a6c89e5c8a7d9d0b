//! Chat templates render as with transformers' `apply_chat_template`, and always terminate.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::json;
use support::{Folder, messages};
use tritmill_engine::{
    chat::{ChatTemplate, TemplateError},
    files::Model,
    tokenizer::TokenizerConfig,
};

fn render(template: &str, content: &str) -> Result<String, TemplateError> {
    ChatTemplate::parse(template.to_owned(), Some("<s>".to_owned()), None)?
        .render(&messages(content), true)
}

fn check(template: &str, content: &str, expected: &str) {
    assert_eq!(render(template, content).unwrap(), expected, "{template}");
}

#[test]
fn blocks_are_trimmed_as_in_transformers() {
    let template = "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\nend";
    check(template, "hi", "user\nend");
}

#[test]
fn python_methods_and_filters_work() {
    check("{{ messages[0].content.strip().upper() }}", "  hi ", "HI");
    check("{{ messages[0]['content'].split(' ')[-1] }}", "a b c", "c");
    check("{{ messages[0]['content'] | trim | capitalize }}", " hELLO ", "Hello");
    check("{{ messages[0].content.startswith('a') }}", "abc", "True");
    check(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "x",
        "1",
    );
}

#[test]
fn tojson_formats_like_python() {
    let text = "<a> & 'é'\n";
    check("{{ messages | tojson }}", text, "[{\"role\": \"user\", \"content\": \"<a> & 'é'\\n\"}]");
    check("{{ messages[0].content | tojson(indent=2) }}", "x", "\"x\"");
}

#[test]
fn special_tokens_are_defined_and_tools_is_none() {
    check(
        "{{ bos_token }}{% if tools is none %}-{% endif %}{% if eos_token %}x{% endif %}",
        "",
        "<s>-",
    );
}

#[test]
fn strftime_now_is_undefined() {
    let template = "{% if strftime_now is defined %}now{% else %}26 Jul 2024{% endif %}";
    check(template, "", "26 Jul 2024");
    assert!(render("{{ strftime_now('%Y') }}", "").is_err());
}

#[test]
fn exception_of_a_template_is_in_the_error_message() {
    let error = render("{{ raise_exception('roles must alternate') }}", "").unwrap_err();
    assert!(matches!(error, TemplateError::Render(_)));
    assert!(error.to_string().contains("roles must alternate"), "{error}");
}

#[test]
fn endless_template_is_stopped() {
    let nested = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
    assert!(matches!(render(nested, ""), Err(TemplateError::Render(_))));
    let recursive = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
    assert!(matches!(render(recursive, ""), Err(TemplateError::Render(_))));
}

#[test]
fn invalid_syntax_is_refused_when_the_model_is_opened() {
    let folder = Folder::copy("bitnet-tiny");
    folder.edit_json("tokenizer_config.json", |json| json["chat_template"] = json!("{% for %}"));
    assert!(Model::open(folder.path()).unwrap_err().to_string().contains("chat template"));
}

#[test]
fn default_of_several_templates_is_used() {
    let parse =
        |json: serde_json::Value| TokenizerConfig::parse(json.to_string().as_bytes()).unwrap();
    let named = parse(json!({
        "bos_token": { "content": "<s>", "lstrip": false },
        "chat_template": [{ "name": "tool_use", "template": "a" }, { "name": "default", "template": "b" }],
    }));
    assert_eq!(named.bos_token.as_deref(), Some("<s>"));
    assert_eq!(named.chat_template.as_deref(), Some("b"));
}

#[test]
fn template_file_overrides_the_configuration() {
    let folder = Folder::copy("bitnet-tiny");
    std::fs::write(folder.path().join("chat_template.jinja"), "from the file").unwrap();
    let model = Model::open(folder.path()).unwrap();
    assert_eq!(
        model.chat_template().unwrap().render(&messages("x"), true).unwrap(),
        "from the file"
    );
}
