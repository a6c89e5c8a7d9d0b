//! Settings from the environment and from `tritmill.toml`.
//!
//! ```toml
//! redis = "redis://queue.internal"          # for every command with this option
//! database = "postgres://tritmill@db.internal/tritmill"
//!
//! [worker]                                  # for one command
//! model = "/models/bitnet-2b"
//! slots = 32
//!
//! [bench.engine]                            # for a subcommand
//! batch = [1, 16]
//! ```
//!
//! A key is an option's long name. Flags come first, then the environment (an option's own variable
//! or `TRITMILL_` and its name in capitals), then the file, then defaults. The file is
//! `TRITMILL_CONFIG`, or `tritmill.toml` in the current folder if there is one.
//!
//! Commands that act on what a service keeps ([`OPERATING`]) name on the command line what they act on: a worker's
//! `TRITMILL_MODEL` does not select batches, nor a caller's `TRITMILL_KEY` a budget.

use std::{
    fs::File,
    io::{self, ErrorKind, Read as _},
    path::Path,
};

use anyhow::{Context as _, bail, ensure};
use clap::{
    Arg, ArgAction, Command,
    error::{ContextKind, ContextValue},
};
use toml::{Table, Value};

const FILE: &str = "tritmill.toml";
const FILE_VARIABLE: &str = "TRITMILL_CONFIG";
/// Most bytes of the file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Commands that take only the options of [`SERVICE`] from the environment and from the file's top level.
const OPERATING: [&str; 9] =
    ["batches", "cancel", "costs", "dlq", "keys", "queue", "results", "tenants", "watch"];
/// Options that say where the service is.
const SERVICE: [&str; 3] = ["database", "redis", "store"];

/// Returns the command with the settings of the environment and the file as defaults.
pub fn apply(command: Command) -> anyhow::Result<Command> {
    let command = with_all_variables(command);
    let named = std::env::var_os(FILE_VARIABLE).filter(|name| !name.is_empty());
    let path = Path::new(named.as_deref().unwrap_or(FILE.as_ref()));
    let text = match read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound && named.is_none() => return Ok(command),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    with_file(command, &text).with_context(|| path.display().to_string())
}

/// Gives their environment variables to all commands.
fn with_all_variables(command: Command) -> Command {
    command.mut_subcommands(|sub| {
        let is_operating = OPERATING.contains(&sub.get_name());
        with_variables(sub, is_operating)
    })
}

/// Reads the file, of at most [`FILE_BYTES_MAX`].
fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        let message = format!("more than {FILE_BYTES_MAX} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, message));
    }
    Ok(text)
}

/// Returns where the value that a command line was refused for comes from, if from elsewhere. `command` has the settings,
/// `plain` has not.
pub fn origin(plain: &Command, command: &Command, error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    // Such as `--slots <NUMBER>`.
    let long = option.split_whitespace().next()?.strip_prefix("--")?;
    let words: Vec<String> =
        std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let (mut plain, mut command) = (plain, command);
    for word in &words {
        if let (Some(of_plain), Some(sub)) =
            (plain.find_subcommand(word), command.find_subcommand(word))
        {
            (plain, command) = (of_plain, sub);
        }
    }
    let find = |command: &Command| {
        command.get_arguments().find(|arg| arg.get_long() == Some(long)).cloned()
    };
    let (plain, arg) = (find(plain)?, find(command)?);
    if words.iter().any(|word| names(&arg, word)) {
        return None;
    }
    let is_set = |name: &&std::ffi::OsStr| std::env::var_os(name).is_some_and(|v| !v.is_empty());
    if let Some(variable) = arg.get_env().filter(is_set) {
        return Some(format!("the variable {}", variable.to_string_lossy()));
    }
    let is_of_file = arg.get_default_values() != plain.get_default_values();
    is_of_file.then(|| std::env::var(FILE_VARIABLE).unwrap_or_else(|_| FILE.to_owned()))
}

/// Returns whether the command line has an option with this long name, rather than the environment or the file.
pub fn is_typed(long: &str) -> bool {
    let arg = Arg::new("option").long(long.to_owned());
    std::env::args_os().any(|word| names(&arg, &word.to_string_lossy()))
}

/// Returns whether a word of a command line names an option.
fn names(arg: &Arg, word: &str) -> bool {
    if let Some(name) = word.strip_prefix("--") {
        let name = name.split('=').next().unwrap_or(name);
        let is_alias = || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name));
        return arg.get_long() == Some(name) || is_alias();
    }
    let letter = word.strip_prefix('-').and_then(|letters| letters.chars().next());
    letter.is_some_and(|letter| {
        let is_alias = || arg.get_all_short_aliases().is_some_and(|all| all.contains(&letter));
        arg.get_short() == Some(letter) || is_alias()
    })
}

/// Returns the variable of an option without one of its own.
fn variable_of(long: &str) -> String {
    format!("TRITMILL_{}", long.to_uppercase().replace('-', "_"))
}

/// Gives an environment variable to every option without one, and of a command that is or is below one of [`OPERATING`] to
/// those of [`SERVICE`].
fn with_variables(command: Command, is_operating: bool) -> Command {
    let command = command.mut_args(|arg| match arg.get_long() {
        // An empty variable is one that is not set.
        _ if arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty()) => {
            arg.env(None::<&str>)
        }
        Some(long) if is_operating && !SERVICE.contains(&long) => arg,
        Some(long) if arg.get_env().is_none() && !matches!(long, "help" | "version") => {
            let name = variable_of(long);
            match std::env::var_os(&name).is_some_and(|value| value.is_empty()) {
                true => arg,
                false => arg.env(name).hide_env(true),
            }
        }
        _ => arg,
    });
    command.mut_subcommands(|sub| with_variables(sub, is_operating))
}

/// Makes the settings of the file defaults of their options.
fn with_file(command: Command, text: &str) -> anyhow::Result<Command> {
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        anyhow::anyhow!("line {line}: {}", error.message())
    })?;
    section(command, table, "")
}

/// Applies a section: its own keys first, so that the section of a subcommand overrides them.
fn section(mut command: Command, table: Table, name: &str) -> anyhow::Result<Command> {
    let place = if name.is_empty() { "at top level".to_owned() } else { format!("in [{name}]") };
    let (sections, keys): (Vec<_>, Vec<_>) = table.into_iter().partition(|(_, v)| v.is_table());
    for (key, value) in keys {
        let values = texts(&value).with_context(|| format!("option `{key}` {place}"))?;
        let found;
        if values.is_empty() {
            bail!("option `{key}` {place}: a list without values");
        }
        let spares_operating = name.is_empty() && !SERVICE.contains(&key.as_str());
        (command, found) = with_default(command, &key, &values, spares_operating)
            .with_context(|| format!("option `{key}` {place}"))?;
        if !found {
            match owner(&command, &key) {
                Some(owner) => bail!("option `{key}` {place}: it is taken from [{owner}] alone"),
                None => bail!("unknown option `{key}` {place}"),
            }
        }
    }
    for (key, value) in sections {
        let Value::Table(table) = value else { continue };
        let inner = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
        let Some(sub) = command.find_subcommand(&key).cloned() else {
            bail!("unknown command [{inner}]");
        };
        let sub = section(sub, table, &inner)?;
        command = command.mut_subcommand(&key, |_| sub);
    }
    Ok(command)
}

/// Returns the section of a command with this option.
fn owner(command: &Command, long: &str) -> Option<String> {
    command.get_subcommands().find_map(|sub| {
        let name = sub.get_name();
        match sub.get_arguments().any(|arg| arg.get_long() == Some(long)) {
            true => Some(name.to_owned()),
            false => owner(sub, long).map(|below| format!("{name}.{below}")),
        }
    })
}

/// Sets an option's default in the command and its subcommands, of these without [`OPERATING`] if `spares_operating`. Returns
/// false if none has the option.
fn with_default(
    mut command: Command,
    long: &str,
    values: &[String],
    spares_operating: bool,
) -> anyhow::Result<(Command, bool)> {
    let arg = command.get_arguments().find(|arg| arg.get_long() == Some(long));
    let mut found = false;
    if let Some(arg) = arg {
        let takes_several =
            matches!(arg.get_action(), ArgAction::Append) || arg.get_value_delimiter().is_some();
        ensure!(values.len() == 1 || takes_several, "a list, where one value is expected");
        found = true;
        let id = arg.get_id().clone();
        command = command.mut_arg(id.as_str(), |arg| {
            let arg = arg.default_values(values.to_vec()).required(false);
            // Not shown in help: URLs contain passwords.
            let is_flag = !arg.get_action().takes_values();
            if is_flag { arg } else { arg.hide_default_value(true) }
        });
    }
    let names: Vec<String> =
        command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    for name in names {
        if spares_operating && OPERATING.contains(&name.as_str()) {
            continue;
        }
        let Some(sub) = command.find_subcommand(&name).cloned() else { continue };
        let (sub, below) = with_default(sub, long, values, false)?;
        found |= below;
        command = command.mut_subcommand(name, |_| sub);
    }
    Ok((command, found))
}

/// Returns a value as on the command line; a list as several values.
fn texts(value: &Value) -> anyhow::Result<Vec<String>> {
    Ok(match value {
        Value::String(text) => vec![text.clone()],
        Value::Integer(number) => vec![number.to_string()],
        Value::Float(number) => vec![number.to_string()],
        Value::Boolean(flag) => vec![flag.to_string()],
        Value::Array(values) => values.iter().map(texts).collect::<Result<Vec<_>, _>>()?.concat(),
        Value::Datetime(_) | Value::Table(_) => bail!("expected a string, number, boolean or list"),
    })
}

#[cfg(test)]
mod tests {
    use clap::{Arg, value_parser};

    use super::*;

    fn command() -> Command {
        let number = |name| Arg::new(name).long(name).value_parser(value_parser!(u32));
        let run = Command::new("run")
            .arg(number("slots").default_value("4").env("SETTINGS_TEST_SLOTS"))
            .arg(number("batch").value_delimiter(',').action(ArgAction::Append))
            .arg(Arg::new("stream").long("stream").action(ArgAction::SetTrue))
            .arg(Arg::new("redis").long("redis").required(true));
        let other = Command::new("other").arg(Arg::new("redis").long("redis"));
        let group = Command::new("group").subcommand(Command::new("deep").arg(number("depth")));
        Command::new("test").subcommands([run, other, group])
    }

    fn slots(text: &str, arguments: &[&str]) -> u32 {
        let command = with_file(with_all_variables(command()), text).expect("a good file");
        let all = ["test", "run", "--redis", "r"].iter().chain(arguments);
        let matches = command.try_get_matches_from(all).expect("good arguments");
        let (_, run) = matches.subcommand().expect("there is one");
        *run.get_one("slots").expect("it has a default")
    }

    #[test]
    fn flags_override_the_file_and_the_file_overrides_defaults() {
        assert_eq!(slots("", &[]), 4);
        assert_eq!(slots("slots = 5", &[]), 5);
        assert_eq!(slots("slots = 5\n[run]\nslots = 6", &[]), 6);
        assert_eq!(slots("[run]\nslots = 6", &["--slots", "7"]), 7);
    }

    #[test]
    fn every_kind_of_value_sets_its_option() {
        let text = "redis = 'redis://:secret@r'\n[run]\nbatch = [1, 16]\nstream = true\n[group.deep]\ndepth = 3";
        let mut command = with_file(command(), text).expect("a good file");
        let run = command.clone().get_matches_from(["test", "run"]);
        let (_, run) = run.subcommand().expect("there is one");
        let batch: Vec<u32> = run.get_many("batch").expect("it is set").copied().collect();
        assert_eq!((batch, run.get_flag("stream")), (vec![1, 16], true));
        let other = command.clone().get_matches_from(["test", "other"]);
        let redis = other.subcommand().expect("there is one").1.get_one::<String>("redis");
        assert_eq!(redis.map(String::as_str), Some("redis://:secret@r"));
        let deep = command.clone().get_matches_from(["test", "group", "deep"]);
        let deep =
            deep.subcommand().and_then(|(_, group)| group.subcommand()).expect("there is one");
        assert_eq!(deep.1.get_one("depth"), Some(&3u32));
        let help = command.find_subcommand_mut("run").expect("it is there").render_long_help();
        assert!(!help.to_string().contains("secret"));
    }

    #[test]
    fn commands_that_act_on_a_service_take_only_its_address_from_elsewhere() {
        let option = |name| Arg::new(name).long(name);
        let costs = Command::new("costs")
            .subcommand(Command::new("budget").arg(option("key")).arg(option("database")));
        let run = Command::new("run").arg(option("key"));
        let bench = Command::new("bench").subcommand(Command::new("queue").arg(option("key")));
        let all = Command::new("test").subcommands([costs, run, bench]);
        let variables = with_all_variables(all.clone());
        let variable = |path: &[&str], name: &str| {
            let command =
                path.iter().fold(&variables, |c, sub| c.find_subcommand(sub).expect("it is there"));
            let mut arguments = command.get_arguments();
            let option = arguments.find(|arg| arg.get_long() == Some(name)).expect("it is there");
            option.get_env().map(|name| name.to_str().expect("UTF-8").to_owned())
        };
        assert_eq!(variable(&["run"], "key").as_deref(), Some("TRITMILL_KEY"));
        let of_bench = variable(&["bench", "queue"], "key");
        assert_eq!(of_bench.as_deref(), Some("TRITMILL_KEY"), "it has the name of another command");
        assert_eq!(variable(&["costs", "budget"], "key"), None);
        let database = variable(&["costs", "budget"], "database");
        assert_eq!(database.as_deref(), Some("TRITMILL_DATABASE"));
        let budget = |text: &str| {
            let command = with_file(all.clone(), text).expect("a good file");
            let matches = command.get_matches_from(["test", "costs", "budget"]);
            let costs = matches.subcommand().expect("there is one").1;
            let budget = costs.subcommand().expect("there is one").1;
            ["key", "database"].map(|name| budget.get_one::<String>(name).cloned())
        };
        assert_eq!(budget("key = 'k'\ndatabase = 'd'"), [None, Some("d".to_owned())]);
        let own = budget("[costs.budget]\nkey = 'k'");
        assert_eq!(own, [Some("k".to_owned()), None], "its own section names it");
        let currency = Command::new("costs")
            .subcommand(Command::new("price").arg(option("currency")))
            .subcommand(Command::new("budget"));
        let error = with_file(Command::new("test").subcommand(currency), "currency = 'EUR'");
        let error = format!("{:#}", error.expect_err("no other command has it"));
        let problem = "option `currency` at top level: it is taken from [costs.price] alone";
        assert_eq!(error, problem);
    }

    #[test]
    fn unknown_options_and_commands_are_named() {
        let fault = |text| format!("{:#}", with_file(command(), text).expect_err("a bad file"));
        assert_eq!(fault("slotz = 3"), "unknown option `slotz` at top level");
        assert_eq!(fault("[run]\ndepth = 3"), "unknown option `depth` in [run]");
        assert_eq!(fault("[runn]\nslots = 3"), "unknown command [runn]");
        let several = "option `slots` in [run]: a list, where one value is expected";
        assert_eq!(fault("[run]\nslots = [3, 4]"), several);
        assert_eq!(fault("slots = []"), "option `slots` at top level: a list without values");
        assert!(fault("redis = 2020-01-01").starts_with("option `redis` at top level: expected"));
        assert!(
            fault("[run]\nslots = = 3").starts_with("line 2: "),
            "{}",
            fault("[run]\nslots = = 3")
        );
    }
}
