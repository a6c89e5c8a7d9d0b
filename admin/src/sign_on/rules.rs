//! [`Rule`]: who may log in at the provider, and with which role.

use std::{fmt, str::FromStr};

use super::Identity;
use crate::store::KeyRole;

/// Whom a rule is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Who {
    /// The visitor with this address, which the provider has verified.
    Email(String),
    /// Visitors with an address of this domain.
    Domain(String),
    /// Members of this group.
    Group(String),
}

/// A rule: `ann@example.com=operate`, `@example.com=read` or `group:admins=operate`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    who: Who,
    role: KeyRole,
}

/// A text that cannot be read as a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct InvalidRule(String);

impl fmt::Display for InvalidRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.0;
        write!(
            f,
            "'{text}' is not WHO=ROLE, with an email address, @DOMAIN or group:NAME, and the role read, submit, manage or operate"
        )
    }
}

impl FromStr for Rule {
    type Err = InvalidRule;

    fn from_str(text: &str) -> Result<Self, InvalidRule> {
        let invalid = || InvalidRule(text.to_owned());
        let (who, role) = text.rsplit_once('=').ok_or_else(invalid)?;
        let role = role.trim().parse().map_err(|_| invalid())?;
        let who = who.trim();
        let who = match (who.strip_prefix("group:"), who.strip_prefix('@')) {
            (Some(name), _) if !name.is_empty() => Who::Group(name.to_owned()),
            (None, Some(domain)) if !domain.is_empty() => Who::Domain(domain.to_lowercase()),
            (None, None) if who.split_once('@').is_some_and(|(name, _)| !name.is_empty()) => {
                Who::Email(who.to_lowercase())
            }
            _ => return Err(invalid()),
        };
        Ok(Self { who, role })
    }
}

impl Rule {
    /// Whether the rule is about a visitor.
    fn applies_to(&self, identity: &Identity) -> bool {
        let email = identity.email.as_ref().map(|email| email.to_lowercase());
        match (&self.who, email) {
            (Who::Group(name), _) => identity.groups.contains(name),
            (Who::Email(wanted), Some(email)) => email == *wanted,
            (Who::Domain(wanted), Some(email)) => {
                email.rsplit_once('@').is_some_and(|(_, domain)| domain == wanted)
            }
            (_, None) => false,
        }
    }
}

/// Returns the highest role that the rules give.
pub(super) fn role(rules: &[Rule], identity: &Identity) -> Option<KeyRole> {
    rules.iter().filter(|rule| rule.applies_to(identity)).map(|rule| rule.role).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_role_of_the_rules_that_apply_counts() {
        let rules = ["@example.com=read", "Ann@Example.com=submit", "group:ops=operate"];
        let rules = rules.map(|rule| rule.parse::<Rule>().expect("a rule"));
        let check = |email: Option<&str>, groups: &[&str], expect: Option<KeyRole>| {
            let identity = Identity {
                subject: "7".to_owned(),
                email: email.map(str::to_owned),
                groups: groups.iter().map(|group| (*group).to_owned()).collect(),
            };
            assert_eq!(role(&rules, &identity), expect, "{identity:?}");
        };
        check(None, &[], None);
        check(Some("bob@example.com"), &[], Some(KeyRole::Read));
        check(Some("ann@example.com"), &["users"], Some(KeyRole::Submit));
        check(Some("ann@example.com"), &["ops"], Some(KeyRole::Operate));
        check(None, &["ops"], Some(KeyRole::Operate));
        check(Some("eve@example.com.evil.org"), &["opsx"], None);
        check(Some("eve@evil.org@example.org"), &[], None);
    }

    #[test]
    fn wrong_rules_are_refused() {
        for wrong in ["", "ann@example.com", "ann=read", "@=read", "group:=read", "@a.b=root"] {
            let error = wrong.parse::<Rule>().expect_err(wrong);
            assert!(error.to_string().contains("is not WHO=ROLE"), "{error}");
        }
    }
}
