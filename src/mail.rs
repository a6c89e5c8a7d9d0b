//! Options of the mails that tell of batches and budgets.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use tritmill_admin::{MailSettings, MailTls, MailTo, Mailer};

/// Mails about batches that ended or were paused, and about budgets. Off without --mail-host.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Mail")]
pub struct MailOptions {
    /// SMTP server, which sends mails about batches that ended or were paused and about budgets [default: no mails]
    #[arg(long, value_name = "HOST")]
    mail_host: Option<String>,
    /// Its port [default: 587, with TLS from the first byte 465, without TLS 25]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    mail_port: Option<u16>,
    /// TLS: starttls (a server without it is refused), tls (from the first byte) or off
    #[arg(long, value_name = "MODE", default_value = "starttls")]
    mail_tls: MailTls,
    /// User to log in as; the password is in --mail-password-file or the variable TRITMILL_MAIL_PASSWORD
    #[arg(long, value_name = "USER")]
    mail_user: Option<String>,
    /// File with the password of --mail-user
    #[arg(long, value_name = "FILE")]
    mail_password_file: Option<PathBuf>,
    /// The password of --mail-user; other users of this machine see arguments, so use the file or the variable
    #[arg(long, value_name = "PASSWORD", hide = true)]
    mail_password: Option<String>,
    /// Sender, as ADDRESS or NAME <ADDRESS>
    #[arg(long, value_name = "ADDRESS")]
    mail_from: Option<String>,
    /// Recipient of the notices of every tenant, as ADDRESS; or of one tenant, as TENANT=ADDRESS, in place of those of every
    /// tenant. May be given several times
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    mail_to: Vec<MailTo>,
}

impl MailOptions {
    /// Returns the mailer, if mails are switched on.
    pub fn mailer(&self) -> anyhow::Result<Option<Mailer>> {
        // Not by clap: for it, what the settings file says is not given.
        let Some(host) = &self.mail_host else {
            let is_set = self.mail_user.is_some() || self.mail_from.is_some();
            if is_set || !self.mail_to.is_empty() {
                bail!(
                    "mail-host is missing: the other settings of mails have no effect without it"
                );
            }
            return Ok(None);
        };
        let Some(from) = self.mail_from.clone() else {
            bail!("mail-from is missing: whom do the mails come from?");
        };
        let settings = MailSettings {
            host: host.clone(),
            port: self.mail_port,
            tls: self.mail_tls,
            login: self.login()?,
            from,
            to: self.mail_to.clone(),
        };
        Ok(Some(Mailer::new(settings)?))
    }

    /// Returns user and password, if the server wants them.
    fn login(&self) -> anyhow::Result<Option<(String, String)>> {
        let password = match (&self.mail_password_file, &self.mail_password) {
            (Some(_), Some(_)) => bail!("mail-password-file: there is another password, too"),
            (Some(file), None) => {
                let text = fs::read_to_string(file);
                let text =
                    text.with_context(|| format!("mail-password-file {}", file.display()))?;
                Some(text.trim_end_matches(['\r', '\n']).to_owned())
            }
            (None, password) => password.clone(),
        };
        match (self.mail_user.clone(), password) {
            (None, None) => Ok(None),
            (Some(user), Some(password)) => Ok(Some((user, password))),
            (Some(_), None) => {
                bail!("mail-user needs mail-password-file or the variable TRITMILL_MAIL_PASSWORD")
            }
            (None, Some(_)) => bail!("mail-user is missing: there is a password"),
        }
    }
}
