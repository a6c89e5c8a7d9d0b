//! [`Mailer`]: sends notices as mails over SMTP.

use std::{fmt, str::FromStr, time::Duration};

use lettre::{
    Address, AsyncSmtpTransport, AsyncTransport as _, Message, Tokio1Executor,
    message::{Mailbox, header::ContentType},
    transport::smtp::{
        authentication::Credentials,
        client::{Tls, TlsParameters},
        extension::ClientId,
    },
};
use tokio::time::timeout;
use tritmill_queue::{Tenant, job::UnknownWord};

use super::payload;
use crate::{
    App,
    store::notices::{Notice, Outcome},
};

/// Replies that say that this recipient gets no mail: it does not exist, or refuses it.
const REFUSED: std::ops::RangeInclusive<u16> = 550..=553;

/// How a connection to a mail server is protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MailTls {
    /// TLS from the first byte.
    Tls,
    /// A plain connection that becomes TLS before anything is said; a server without it is refused.
    #[default]
    StartTls,
    /// A plain connection.
    Off,
}

impl MailTls {
    /// Returns the port that servers use for it.
    fn port(self) -> u16 {
        match self {
            Self::Tls => 465,
            Self::StartTls => 587,
            Self::Off => 25,
        }
    }
}

impl fmt::Display for MailTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tls => "tls",
            Self::StartTls => "starttls",
            Self::Off => "off",
        })
    }
}

impl FromStr for MailTls {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let all = [Self::Tls, Self::StartTls, Self::Off];
        let found = all.into_iter().find(|one| one.to_string() == word);
        found.ok_or_else(|| UnknownWord { what: "TLS mode", word: word.to_owned() })
    }
}

/// Who gets the notices of a tenant, or of all that have no list of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MailTo {
    /// The tenant; `None` is every one without a list of its own.
    pub tenant: Option<Tenant>,
    /// The mail address.
    pub address: String,
}

impl FromStr for MailTo {
    type Err = MailError;

    /// Parses `ADDRESS` or `TENANT=ADDRESS`.
    fn from_str(text: &str) -> Result<Self, MailError> {
        let (tenant, address) = match text.split_once('=') {
            // An address may have this sign, too, but then not before an address.
            Some((tenant, address)) if address.parse::<Address>().is_ok() => {
                (Some(tenant), address)
            }
            _ => (None, text),
        };
        if tenant == Some("") || address.parse::<Address>().is_err() {
            return Err(MailError::To(text.to_owned()));
        }
        Ok(Self { tenant: tenant.map(|name| Tenant(name.to_owned())), address: address.to_owned() })
    }
}

/// Settings of the mail server.
#[derive(Clone)]
pub struct MailSettings {
    /// Name or address of the server.
    pub host: String,
    /// Its port; `None` is the usual one.
    pub port: Option<u16>,
    /// How the connection is protected.
    pub tls: MailTls,
    /// User and password.
    pub login: Option<(String, String)>,
    /// The sender, as `ADDRESS` or `NAME <ADDRESS>`.
    pub from: String,
    /// The recipients.
    pub to: Vec<MailTo>,
}

/// Settings that cannot be used. The message begins with the name of the option.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MailError {
    /// The sender cannot be read.
    #[error("mail-from '{0}' must be ADDRESS or NAME <ADDRESS>")]
    From(String),
    /// A recipient cannot be read.
    #[error("mail-to '{0}' must be ADDRESS or TENANT=ADDRESS")]
    To(String),
    /// Nothing would be sent.
    #[error("mail-to is missing: who gets the mails?")]
    NoRecipients,
    /// The name of the server cannot be one, or TLS cannot be set up.
    #[error("mail-host '{host}' cannot be used: {problem}")]
    Host {
        /// The name of the server.
        host: String,
        /// What is wrong.
        problem: String,
    },
    /// A password would be sent in clear text.
    #[error("mail-tls is off: the password of mail-user would be readable on the way")]
    ClearPassword,
}

/// Sends mails; cheap to clone.
#[derive(Clone)]
pub struct Mailer {
    transport: AsyncSmtpTransport<Tokio1Executor>,
    from: Mailbox,
    to: Vec<MailTo>,
}

impl Mailer {
    /// A mailer with these settings. It connects when there is a mail to send.
    ///
    /// # Errors
    /// Names the setting that cannot be used.
    pub fn new(settings: MailSettings) -> Result<Self, MailError> {
        let MailSettings { host, port, tls, login, from, to } = settings;
        let bad_from = |_| MailError::From(from.clone());
        let from: Mailbox = from.parse().map_err(bad_from)?;
        if to.is_empty() {
            return Err(MailError::NoRecipients);
        }
        if tls == MailTls::Off && login.is_some() {
            return Err(MailError::ClearPassword);
        }
        let bad_host = |problem: String| MailError::Host { host: host.clone(), problem };
        if host.is_empty() || host.contains(|letter: char| letter.is_whitespace() || letter == '/')
        {
            return Err(bad_host("it is not the name of a host".to_owned()));
        }
        let parameters =
            || TlsParameters::new(host.clone()).map_err(|error| bad_host(error.to_string()));
        let protected = match tls {
            MailTls::Tls => Tls::Wrapper(parameters()?),
            MailTls::StartTls => Tls::Required(parameters()?),
            MailTls::Off => Tls::None,
        };
        let hello = ClientId::Domain(from.email.domain().to_owned());
        let mut transport = AsyncSmtpTransport::<Tokio1Executor>::builder_dangerous(host.as_str())
            .port(port.unwrap_or(tls.port()))
            .tls(protected)
            .hello_name(hello);
        if let Some((user, password)) = login {
            transport = transport.credentials(Credentials::new(user, password));
        }
        Ok(Self { transport: transport.build(), from, to })
    }

    /// Returns the addresses that get the notices of a tenant.
    pub fn receivers(&self, tenant: &Tenant) -> Vec<String> {
        let of = |wanted: Option<&Tenant>| -> Vec<String> {
            let listed = self.to.iter().filter(|to| to.tenant.as_ref() == wanted);
            listed.map(|to| to.address.clone()).collect()
        };
        let own = of(Some(tenant));
        if own.is_empty() { of(None) } else { own }
    }

    /// Sends a notice once.
    pub(super) async fn send(&self, app: &App, notice: &Notice, within: Duration) -> Outcome {
        let message = match self.message(notice, app.public_url()) {
            Ok(message) => message,
            Err(problem) => return Outcome::Refused(problem),
        };
        match timeout(within, self.transport.send(message)).await {
            Ok(Ok(_)) => Outcome::Delivered,
            Ok(Err(error)) => {
                let status = error.status().map(u16::from);
                let problem = format!("the mail server: {error}");
                match status.is_some_and(|status| REFUSED.contains(&status)) {
                    true => Outcome::Refused(problem),
                    false => Outcome::Failed(problem),
                }
            }
            Err(_) => {
                Outcome::Failed(format!("the mail server: no answer within {} s", within.as_secs()))
            }
        }
    }

    fn message(&self, notice: &Notice, site: Option<&str>) -> Result<Message, String> {
        let address = notice.to.address();
        let to: Mailbox = address.parse().map_err(|error| format!("'{address}': {error}"))?;
        let (subject, text) = payload::mail(notice, site);
        let domain = self.from.email.domain();
        Message::builder()
            .from(self.from.clone())
            .to(to)
            .subject(subject)
            // The same at every attempt, so that a mail that came twice is seen as one.
            .message_id(Some(format!("<{}@{domain}>", notice.event)))
            .header(ContentType::TEXT_PLAIN)
            .body(text)
            .map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> MailSettings {
        MailSettings {
            host: "mail.example".to_owned(),
            port: None,
            tls: MailTls::StartTls,
            login: Some(("me".to_owned(), "secret".to_owned())),
            from: "Tritmill <tritmill@a.example>".to_owned(),
            to: ["ops@a.example", "red=one@b.example", "red=two@b.example"]
                .map(|to| to.parse().expect("an address"))
                .into(),
        }
    }

    #[test]
    fn tenants_without_a_list_have_that_of_all() {
        let mailer = Mailer::new(settings()).expect("good settings");
        assert_eq!(mailer.receivers(&Tenant("blue".into())), ["ops@a.example"]);
        assert_eq!(mailer.receivers(&Tenant("red".into())), ["one@b.example", "two@b.example"]);
    }

    #[test]
    fn bad_settings_are_named() {
        let fault = |change: fn(&mut MailSettings)| {
            let mut settings = settings();
            change(&mut settings);
            Mailer::new(settings).err().expect("an error").to_string()
        };
        assert!(fault(|it| it.from = "me".into()).starts_with("mail-from 'me'"));
        assert!(fault(|it| it.to.clear()).starts_with("mail-to is missing"));
        assert!(fault(|it| it.host = "a b".into()).starts_with("mail-host 'a b'"));
        assert!(fault(|it| it.tls = MailTls::Off).starts_with("mail-tls"));
        for wrong in ["", "me", "=a@b.example", "red=", "red=me"] {
            let error = wrong.parse::<MailTo>().expect_err("no address").to_string();
            assert!(error.starts_with(&format!("mail-to '{wrong}'")), "{error}");
        }
    }
}
