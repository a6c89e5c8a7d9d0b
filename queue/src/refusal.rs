//! What a retry can change: errors of Postgres by their SQLSTATE, errors of Redis by the first word of their text.
//!
//! | what the call needs | what follows |
//! | --- | --- |
//! | time | it is tried again, for as long as it takes |
//! | another value | the row with the value fails, the other rows go on |
//! | an operator | a process that starts ends with the cause and the remedy; later the call fails, and workers end |
//!
//! SQLSTATEs: appendix A of Postgres' manual. Redis has no list; these are the words of Redis 7 and 8 and of Valkey.

/// What a call that a server refused needs to succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Another try later.
    Time,
    /// Another value: this one is refused each time.
    AnotherValue,
    /// An operator who does this.
    Operator(&'static str),
}

/// A server refuses this program until an operator has changed something.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{said}: {remedy}")]
pub struct Refusal {
    /// What the server said.
    pub said: String,
    /// What an operator can do.
    pub remedy: &'static str,
}

const LOGIN: &str = "check user and password in the URL, and pg_hba.conf";
const OTHER_SCHEMA: &str = "run tritmill migrate of the version that runs here";
const POOLER: &str = "is a pooler between? then add pooler=transaction to the URL";
const NO_DATABASE: &str = "create the database, or correct its name in the URL";

/// By the beginning of the SQLSTATE; the first that fits counts. Other states need time: a retry of what cannot
/// succeed costs little, a refusal of what could costs an answer.
#[rustfmt::skip]
const POSTGRES: [(&str, Needs); 35] = [
    ("25", Needs::Time),              // transaction state: a standby (25006), a timeout of the session
    ("42501", Needs::Operator("grant the user of the URL the rights on the tables of tritmill (docs/OPERATIONS.md)")),
    ("42P05", Needs::Operator(POOLER)),
    ("57P04", Needs::Operator(NO_DATABASE)),
    ("03", Needs::Time),              // statement not complete
    ("08", Needs::Time),              // connection
    ("09", Needs::AnotherValue),      // triggered action
    ("0A", Needs::Time),              // not supported: a statement from before a migration; a new connection prepares it anew
    ("0L", Needs::Operator(LOGIN)),   // grantor
    ("0P", Needs::Operator(LOGIN)),   // role
    ("0Z", Needs::AnotherValue),      // diagnostics of a trigger
    ("20", Needs::AnotherValue),      // case not found
    ("21", Needs::AnotherValue),      // cardinality
    ("22", Needs::AnotherValue),      // data
    ("23", Needs::AnotherValue),      // integrity
    ("26", Needs::Operator(POOLER)),  // statement name
    ("27", Needs::AnotherValue),      // triggered change
    ("28", Needs::Operator(LOGIN)),
    ("38", Needs::AnotherValue),      // external routine
    ("39", Needs::AnotherValue),      // call of an external routine
    ("3D", Needs::Operator(NO_DATABASE)),
    ("3F", Needs::Operator(OTHER_SCHEMA)),
    ("40", Needs::Time),              // rollback: a deadlock, a serialization failure
    ("42", Needs::Operator(OTHER_SCHEMA)),
    ("44", Needs::AnotherValue),      // check option of a view
    ("53", Needs::Time),              // resources: connections, memory, disk
    ("54", Needs::AnotherValue),      // limits of a row, an index, a statement
    ("55", Needs::Time),              // state of an object: locked, in use
    ("57", Needs::Time),              // operator's intervention: shutdown, cancelled, starting
    ("58", Needs::Time),              // the system below
    ("72", Needs::Time),              // snapshot
    ("F0", Needs::Operator("correct the configuration of the server")),
    ("HV", Needs::Time),              // foreign data
    ("P0", Needs::AnotherValue),      // raised by a trigger
    ("XX", Needs::Time),              // internal, damaged: a standby may take over
];

const KEYS_OF_ANOTHER: &str =
    "another program uses keys that begin with tm:, give one of them another database number";
const REDIS_LOGIN: &str = "check user and password in the Redis URL";
const RIGHTS: &str =
    "allow the user of the Redis URL the commands and keys of tritmill (docs/OPERATIONS.md)";
const NO_PASSWORD: &str = "the Redis URL has no password: redis://USER:PASSWORD@HOST";
const IS_CLUSTER: &str = "this server is a node of a cluster: use redis+cluster://";

/// By the first word of the error and a part of its text; the first that fits counts. Other errors need time.
#[rustfmt::skip]
const REDIS: [(&str, &str, Needs); 26] = [
    ("LOADING", "", Needs::Time),
    ("BUSY", "", Needs::Time),
    ("OOM", "", Needs::Time),
    ("MISCONF", "", Needs::Time),     // cannot write to its disk
    ("READONLY", "", Needs::Time),    // a replica, perhaps since a failover
    ("MASTERDOWN", "", Needs::Time),
    ("NOREPLICAS", "", Needs::Time),
    ("CLUSTERDOWN", "", Needs::Time),
    ("TRYAGAIN", "", Needs::Time),
    ("", "max number of clients", Needs::Time),
    ("WRONGPASS", "", Needs::Operator(REDIS_LOGIN)),
    ("NOAUTH", "", Needs::Operator(NO_PASSWORD)),
    ("", "unauthenticated", Needs::Operator(NO_PASSWORD)),
    ("NOPERM", "", Needs::Operator(RIGHTS)),
    ("", "ACL failure in script", Needs::Operator(RIGHTS)),
    ("", "executing the script can't", Needs::Operator(RIGHTS)),
    ("WRONGTYPE", "", Needs::Operator(KEYS_OF_ANOTHER)),
    ("", "WRONGTYPE", Needs::Operator(KEYS_OF_ANOTHER)),
    ("DENIED", "", Needs::Operator("Redis is in protected mode: set a password there")),
    ("ERR", "without any password configured", Needs::Operator("Redis has no password: remove the one in the Redis URL, or set one there")),
    ("ERR", "DB index", Needs::Operator("correct the database number in the Redis URL, or raise `databases` of the server")),
    ("ERR", "cluster mode", Needs::Operator(IS_CLUSTER)),
    ("ERR", "cluster support disabled", Needs::Operator("this server is no cluster: use redis://")),
    ("ERR", "unknown command", Needs::Operator("use Redis 7 or later, or Valkey, with this command allowed")),
    ("", "is a node of a cluster", Needs::Operator("use redis+cluster://")),
    ("CROSSSLOT", "", Needs::Operator(IS_CLUSTER)),
];

/// Returns what a call that Postgres refused with this SQLSTATE needs.
pub(crate) fn of_postgres(sqlstate: &str) -> Needs {
    let found = POSTGRES.iter().find(|(begin, _)| sqlstate.starts_with(begin));
    found.map_or(Needs::Time, |(_, needs)| *needs)
}

/// Returns what a call that Redis refused with an error of this code and text needs. An error that this program made
/// has an empty code.
pub(crate) fn of_redis(code: &str, text: &str) -> Needs {
    let fits = |word: &str, part: &str| (word.is_empty() || word == code) && text.contains(part);
    let found = REDIS.iter().find(|(word, part, _)| fits(word, part));
    found.map_or(Needs::Time, |(_, _, needs)| *needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how a retry is answered: `t`ime, `v`alue or `o`perator.
    fn letter(needs: Needs) -> char {
        match needs {
            Needs::Time => 't',
            Needs::AnotherValue => 'v',
            Needs::Operator(_) => 'o',
        }
    }

    #[test]
    fn sqlstates_are_sorted_by_what_a_retry_can_change() {
        for (states, expected) in [
            // Starting, shut down, too many clients, disk full, deadlock, standby, lock, cancelled, unknown to us.
            (
                "57P03 57P01 53300 53100 40P01 40001 25006 55P03 57014 08006 08P01 0A000 XX000 XX001 ZZ999",
                't',
            ),
            // Untranslatable, too long, not null, unique, check, index row too large, raised by a trigger.
            ("22P05 22021 22001 23502 23505 23514 54000 P0001 44000", 'v'),
            // Password, user, database, rights, table, column, statement of a pooler, dropped, damaged.
            ("28P01 28000 3D000 42501 42P01 42703 26000 42P05 57P04 F0000", 'o'),
        ] {
            for state in states.split(' ') {
                assert_eq!(letter(of_postgres(state)), expected, "{state}");
            }
        }
    }

    #[test]
    fn longer_states_come_before_their_classes() {
        for (i, (begin, _)) in POSTGRES.iter().enumerate() {
            let earlier = POSTGRES[..i].iter().find(|(other, _)| begin.starts_with(other));
            assert_eq!(earlier, None, "{begin} is never found");
        }
    }

    #[test]
    fn redis_errors_are_sorted_by_what_a_retry_can_change() {
        for (code, text, expected) in [
            ("LOADING", "Redis is loading the dataset in memory", 't'),
            ("OOM", "command not allowed when used memory > 'maxmemory'", 't'),
            ("READONLY", "You can't write against a read only replica.", 't'),
            ("MISCONF", "Redis is configured to save RDB snapshots", 't'),
            ("ERR", "max number of clients reached", 't'),
            ("ERR", "something that a later version says", 't'),
            ("", "Connection refused (os error 111)", 't'),
            ("WRONGPASS", "invalid username-password pair or user is disabled.", 'o'),
            ("NOAUTH", "Authentication required.", 'o'),
            ("ERR", "Protocol error: unauthenticated multibulk length", 'o'),
            ("NOPERM", "User x has no permissions to run the 'xadd' command", 'o'),
            ("ERR", "ACL failure in script: User x has no permissions to run 'xadd'", 'o'),
            ("WRONGTYPE", "Operation against a key holding the wrong kind of value", 'o'),
            ("ERR", "Error running script: WRONGTYPE Operation against a key", 'o'),
            ("ERR", "DB index is out of range", 'o'),
            ("ERR", "SELECT is not allowed in cluster mode", 'o'),
            ("ERR", "This instance has cluster support disabled", 'o'),
            ("ERR", "unknown command 'XAUTOCLAIM', with args beginning with:", 'o'),
            (
                "ERR",
                "AUTH <password> called without any password configured for the default user.",
                'o',
            ),
            ("DENIED", "Redis is running in protected mode", 'o'),
        ] {
            assert_eq!(letter(of_redis(code, text)), expected, "{code} {text}");
        }
    }
}
