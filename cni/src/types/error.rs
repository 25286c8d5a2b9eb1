//! The error object of the protocol: a code of the specification, a message, optional details.

use std::fmt;
use std::io;

use crate::json::{Object, Value};

/// Codes of the CNI specification; 999 is what the reference uses for any plain error.
pub mod code {
    /// The config's version is not among the plugin's, or too old for the command.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// A variable is missing or holds something it must not.
    pub const ENVIRONMENT: u32 = 4;
    /// Reading standard input or writing the answer failed.
    pub const IO: u32 = 5;
    /// The config is not JSON, or not of the expected shape.
    pub const DECODING: u32 = 6;
    /// The config is readable but wrong.
    pub const INVALID_CONFIG: u32 = 7;
    /// CNI_NETNS must not be used.
    pub const INVALID_NETNS: u32 = 8;
    /// STATUS: the plugin cannot serve an ADD now.
    pub const UNAVAILABLE: u32 = 50;
    /// Everything else.
    pub const INTERNAL: u32 = 999;
}

/// What a failed call prints on standard output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// See [`code`].
    pub code: u32,
    /// Short text; runtimes match parts of it, so the reference's words are kept.
    pub msg: String,
    /// More text, left out of the output when empty.
    pub details: String,
}

/// Shorthand used throughout the crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with a code of the specification.
    pub fn new(code: u32, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: details.into() }
    }

    /// A plain error, code 999.
    pub fn internal(msg: impl Into<String>) -> Self {
        Self::new(code::INTERNAL, msg, "")
    }

    /// Puts `prefix` and a colon before the message of a plain error; one that carries a code of the
    /// specification keeps its own words, as in the reference.
    #[must_use]
    pub fn context(self, prefix: impl fmt::Display) -> Self {
        if self.code == code::INTERNAL {
            Self { msg: format!("{prefix}: {}", self.msg), ..self }
        } else {
            self
        }
    }

    /// Puts `prefix` and a colon before the message and makes the code 999.
    #[must_use]
    pub fn recoded(self, prefix: impl fmt::Display) -> Self {
        Self::internal(format!("{prefix}: {self}"))
    }

    /// The object printed for a failed call.
    pub fn to_json(&self) -> Value {
        let mut o = Object::new();
        o.push("code", self.code);
        o.push("msg", self.msg.as_str());
        if !self.details.is_empty() {
            o.push("details", self.details.as_str());
        }
        o.into()
    }

    /// Reads an error object printed by another plugin.
    pub fn from_json(value: &Value) -> Option<Self> {
        let o = value.as_object()?;
        let code = match o.get_folded("code") {
            Some(Value::Number(n)) => u32::try_from(n.as_u64()?).ok()?,
            None => 0,
            Some(_) => return None,
        };
        let text = |key| match o.get_folded(key) {
            Some(Value::String(s)) => Some(s.clone()),
            None => Some(String::new()),
            Some(_) => None,
        };
        Some(Self { code, msg: text("msg")?, details: text("details")? })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)?;
        if !self.details.is_empty() {
            write!(f, "; {}", self.details)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(err: io::Error) -> Self {
        Self::internal(go_text(&err))
    }
}

impl From<felt_hostnet::Error> for Error {
    fn from(err: felt_hostnet::Error) -> Self {
        Self::internal(go_words(&err.to_string()))
    }
}

impl From<felt_hostnet::netns::OpenError> for Error {
    fn from(err: felt_hostnet::netns::OpenError) -> Self {
        Self::internal(go_words(&err.to_string()))
    }
}

/// An operating system error in Go's words: `no such file or directory`, without the number.
/// Runtimes look for these words in the error of a DEL.
pub fn go_text(err: &io::Error) -> String {
    let text = err.to_string();
    if err.raw_os_error().is_none() {
        return text;
    }
    go_words(&text)
}

/// Turns every `No such file or directory (os error 2)` inside a text into Go's form.
pub fn go_words(text: &str) -> String {
    let mut text = text.to_owned();
    while let Some(start) = text.find(" (os error ") {
        let Some(len) = text[start..].find(')') else { break };
        text.replace_range(start..=start + len, "");
        let word = text[..start].rfind(": ").map_or(0, |i| i + 2);
        if let Some(first) = text[word..].chars().next().filter(char::is_ascii_uppercase) {
            text.replace_range(word..=word, &first.to_ascii_lowercase().to_string());
        }
    }
    text
}

/// Adds context to anything that becomes an [`Error`].
pub trait Context<T> {
    /// As [`Error::context`].
    fn context(self, prefix: impl fmt::Display) -> Result<T>;
    /// As [`Error::context`], with the text made only on failure.
    fn with_context<D: fmt::Display>(self, prefix: impl FnOnce() -> D) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, prefix: impl fmt::Display) -> Result<T> {
        self.map_err(|err| err.into().context(prefix))
    }
    fn with_context<D: fmt::Display>(self, prefix: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|err| err.into().context(prefix()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_keys_in_order_and_leaves_out_empty_details() {
        let err = Error::new(code::INVALID_CONFIG, "missing network name", "");
        assert_eq!(
            err.to_json().to_indented(),
            "{\n    \"code\": 7,\n    \"msg\": \"missing network name\"\n}"
        );
        let err = Error::new(1, "a", "b");
        assert_eq!(err.to_json().to_compact(), r#"{"code":1,"msg":"a","details":"b"}"#);
        assert_eq!(Error::from_json(&err.to_json()), Some(err));
    }

    #[test]
    fn context_keeps_the_words_of_typed_errors() {
        assert_eq!(Error::internal("x").context("a").msg, "a: x");
        assert_eq!(Error::new(7, "x", "").context("a").msg, "x");
        assert_eq!(Error::new(7, "x", "y").recoded("a"), Error::internal("a: x; y"));
    }

    #[test]
    fn speaks_of_errno_as_go_does() {
        assert_eq!(go_text(&io::Error::from_raw_os_error(2)), "no such file or directory");
        assert_eq!(
            go_words("add route 10.0.0.0/8: File exists (os error 17)"),
            "add route 10.0.0.0/8: file exists"
        );
        assert_eq!(go_words("Link not found"), "Link not found");
    }
}
