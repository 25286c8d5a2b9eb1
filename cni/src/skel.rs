//! The protocol: environment and standard input to a [`Call`], dispatch, one JSON document back.
//!
//! The order of checks decides which error a caller sees, so it is the reference's: variables, about
//! text, standard input, network name, version gates, exact version, then (before the handler, where
//! the reference does it after) the check that CNI_NETNS is not the caller's own namespace.
//!
//! Nothing else in the crate writes to standard output. A panic becomes an error object, code 999.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use crate::json::{Fields, Object, Value};
use crate::plugins::Plugin;
use crate::trace;
use crate::types::conf::NetConf;
use crate::types::error::{Error, Result, code};
use crate::types::version::{self, SpecVersion};

/// The six commands of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Attach a container.
    Add,
    /// Detach a container.
    Del,
    /// Compare an attachment with its result.
    Check,
    /// Remove what belongs to no valid attachment.
    Gc,
    /// Say whether an ADD could be served.
    Status,
}

impl Command {
    /// The word in CNI_COMMAND.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
        }
    }
}

/// The variables of one call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Env {
    /// CNI_COMMAND
    pub command: String,
    /// CNI_CONTAINERID
    pub container_id: String,
    /// CNI_NETNS; empty on DEL when the namespace is gone.
    pub netns: String,
    /// CNI_IFNAME
    pub ifname: String,
    /// CNI_ARGS
    pub args: String,
    /// CNI_PATH
    pub path: String,
    /// CNI_NETNS_OVERRIDE
    pub netns_override: bool,
}

/// What a handler works with.
pub struct Call<'a> {
    /// The variables.
    pub env: &'a Env,
    /// The bytes of standard input, for delegates.
    pub stdin: &'a [u8],
    /// The decoded common part of the configuration.
    pub conf: NetConf,
}

impl Call<'_> {
    /// The configuration as struct `of`.
    pub fn fields<'b>(&'b self, value: &'b Value, of: &'b str) -> Result<Fields<'b>> {
        Fields::of(of, value)
    }

    /// The configuration as a value.
    pub fn value(&self) -> Value {
        Value::Object(self.conf.raw.clone())
    }
}

/// What goes to standard output, or in one case to standard error.
#[derive(Debug, PartialEq)]
pub enum Reply {
    /// CNI_COMMAND was not set: a human is looking.
    About(String),
    /// The one-line answer to VERSION.
    Version(String),
    /// A result, or nothing.
    Done(Option<Value>),
}

impl Env {
    /// Reads the process environment.
    pub fn from_process() -> Self {
        let var = |name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()).unwrap_or_default();
        let netns_override = var("CNI_NETNS_OVERRIDE");
        Self {
            command: var("CNI_COMMAND"),
            container_id: var("CNI_CONTAINERID"),
            netns: var("CNI_NETNS"),
            ifname: var("CNI_IFNAME"),
            args: var("CNI_ARGS"),
            path: var("CNI_PATH"),
            netns_override: netns_override == "1" || netns_override.eq_ignore_ascii_case("true"),
        }
    }

    /// The same variables for another command, as a delegate gets them.
    #[must_use]
    pub fn for_command(&self, command: Command) -> Self {
        Self { command: command.as_str().to_owned(), ..self.clone() }
    }

    fn validate(&self) -> Result<()> {
        let attachment = matches!(self.command.as_str(), "ADD" | "CHECK" | "DEL");
        let netns = matches!(self.command.as_str(), "ADD" | "CHECK");
        let path = attachment || matches!(self.command.as_str(), "GC" | "STATUS");
        let mut missing = Vec::new();
        if attachment && self.container_id.is_empty() {
            missing.push("CNI_CONTAINERID");
        } else if attachment {
            validate_container_id(&self.container_id)?;
        }
        if netns && self.netns.is_empty() {
            missing.push("CNI_NETNS");
        }
        if attachment && self.ifname.is_empty() {
            missing.push("CNI_IFNAME");
        } else if attachment {
            validate_ifname(&self.ifname)?;
        }
        if path && self.path.is_empty() {
            missing.push("CNI_PATH");
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::new(
            code::ENVIRONMENT,
            format!("required env variables [{}] missing", missing.join(",")),
            "",
        ))
    }
}

/// The alphabet of container IDs and network names: a letter or digit, then also `_`, `.` and `-`.
/// Such a text can be a file name and never leaves its directory.
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn validate_container_id(id: &str) -> Result<()> {
    if is_identifier(id) {
        return Ok(());
    }
    Err(Error::new(code::ENVIRONMENT, "invalid characters in containerID", id))
}

fn validate_ifname(name: &str) -> Result<()> {
    let bad = |msg: &str, details: &str| Err(Error::new(code::ENVIRONMENT, msg, details));
    if name.len() > 15 {
        return bad("interface name is too long", "interface name should be less than 16 characters");
    }
    if name == "." || name == ".." {
        return bad("interface name is . or ..", "");
    }
    if name.chars().any(|c| c == '/' || c == ':' || c.is_whitespace()) {
        return bad("interface name contains / or : or whitespace characters", "");
    }
    Ok(())
}

/// Serves the call described by this process's environment and standard input.
pub fn main(plugin: &'static Plugin) -> ExitCode {
    trace::start(plugin.name);
    let env = Env::from_process();
    let outcome = guarded(|| serve(plugin, &env, &mut std::io::stdin().lock()));
    trace::step(|| match &outcome {
        Ok(_) => "done".to_owned(),
        Err(err) => format!("failed, code {}: {err}", err.code),
    });
    let (text, status) = match &outcome {
        Ok(Reply::About(text)) => {
            let _ = std::io::stderr().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Ok(Reply::Version(line)) => (line.clone(), ExitCode::SUCCESS),
        Ok(Reply::Done(None)) => return ExitCode::SUCCESS,
        Ok(Reply::Done(Some(value))) => (value.to_indented(), ExitCode::SUCCESS),
        Err(err) => (err.to_json().to_indented(), ExitCode::FAILURE),
    };
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => status,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Runs `work`, turning a panic into an error so that the caller always gets a JSON document.
pub fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::set_hook(Box::new(|info| {
        let _ = writeln!(std::io::stderr(), "felt-cni: {info}");
    }));
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|s| (*s).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "unknown".to_owned());
        Err(Error::internal(format!("internal error in felt-cni (panic): {text}")))
    })
}

/// One call from variables and input to the reply.
///
/// # Errors
/// What the caller prints as the error object.
pub fn serve(plugin: &Plugin, env: &Env, stdin: &mut dyn Read) -> Result<Reply> {
    if env.command.is_empty() {
        return Ok(Reply::About(about(plugin)));
    }
    env.validate()?;
    if env.command == "VERSION" {
        return Ok(Reply::Version(version_line(plugin)));
    }
    let mut bytes = Vec::new();
    stdin
        .read_to_end(&mut bytes)
        .map_err(|err| Error::new(code::IO, format!("error reading from stdin: {err}"), ""))?;
    trace::step(|| format!("{} {} {}", env.command, env.container_id, env.ifname));
    dispatch(plugin, env, &bytes).map(Reply::Done)
}

/// The struct without a name that the reference reads the network's name into.
const NAME_STRUCT: &str = "struct { Name string \"json:\\\"name\\\"\" }";

/// One call whose input was read: the path of in-process delegates.
///
/// # Errors
/// What the caller prints as the error object.
pub fn dispatch(plugin: &Plugin, env: &Env, stdin: &[u8]) -> Result<Option<Value>> {
    let decoding =
        |err: String| Error::new(code::DECODING, format!("error unmarshall network config: {err}"), "");
    let value = Value::parse(stdin).map_err(decoding)?;
    let name = Fields::of(NAME_STRUCT, &value).and_then(|f| f.string_or_empty("name")).map_err(|err| {
        decoding(err.msg.replace("field struct { Name string \"json:\\\"name\\\"\" }", "field "))
    })?;
    if name.is_empty() {
        return Err(Error::new(code::INVALID_CONFIG, "missing network name", ""));
    }
    if !is_identifier(&name) {
        return Err(Error::new(code::INVALID_CONFIG, "invalid characters found in network name", name));
    }
    let command = match env.command.as_str() {
        "ADD" => Command::Add,
        "DEL" => Command::Del,
        "CHECK" => Command::Check,
        "GC" => Command::Gc,
        "STATUS" => Command::Status,
        other => return Err(Error::new(code::ENVIRONMENT, format!("unknown CNI_COMMAND: {other}"), "")),
    };
    let raw = match value {
        Value::Object(o) => o,
        _ => Object::new(),
    };
    let version = gate(plugin, command, &raw)?;
    if matches!(command, Command::Add | Command::Del) {
        refuse_own_netns(env)?;
    }
    let call = Call { env, stdin, conf: NetConf::from_object(&raw, version).map_err(load_error)? };
    match command {
        Command::Add => {
            let result = (plugin.add)(&call)?;
            match result.to_json(version) {
                Ok(value) => Ok(Some(value)),
                Err(_) if plugin.may_have_no_address => {
                    let mut o = Object::new();
                    o.push("cniVersion", version.as_str());
                    o.push("dns", Object::new());
                    Ok(Some(o.into()))
                }
                Err(err) => {
                    // The result cannot be said in this version: nobody will know what was made.
                    let _ = (plugin.del)(&call);
                    Err(err)
                }
            }
        }
        Command::Del => (plugin.del)(&call).map(|()| None),
        Command::Check => (plugin.check)(&call).map(|()| None),
        Command::Gc => (plugin.gc)(&call).map(|()| None),
        Command::Status => (plugin.status)(&call).map(|()| None),
    }
}

fn load_error(err: Error) -> Error {
    if err.msg.starts_with("failed to load netconf") { err } else { err.context("failed to load netconf") }
}

/// Version gates of CHECK, GC and STATUS, then the exact match.
fn gate(plugin: &Plugin, command: Command, raw: &Object) -> Result<SpecVersion> {
    let bad = |text: String| Error::new(code::DECODING, text, "");
    let text = match raw.get_folded("cniVersion") {
        None => "",
        Some(Value::String(s)) => s,
        Some(other) => {
            return Err(bad(format!(
                "decoding version from network config: json: cannot unmarshal {} into Go struct field .cniVersion of type string",
                other.kind()
            )));
        }
    };
    let text = if text.is_empty() { "0.1.0" } else { text };
    let needs = match command {
        Command::Add | Command::Del => None,
        Command::Check => Some([0, 4, 0]),
        Command::Gc | Command::Status => Some([1, 1, 0]),
    };
    if let Some(needs) = needs {
        let has = version::numbers(text).map_err(bad)?;
        let refuse = |who: &str| {
            Err(Error::new(
                code::INCOMPATIBLE_VERSION,
                format!("{who} version does not allow {}", command.as_str()),
                "",
            ))
        };
        if has < needs {
            return refuse("config");
        }
        let newest = plugin.versions.iter().max().map(|v| version::numbers(v.as_str()));
        if newest.and_then(std::result::Result::ok).is_none_or(|newest| newest < has) {
            return refuse("plugin");
        }
    }
    SpecVersion::parse(text).filter(|v| plugin.versions.contains(v)).ok_or_else(|| {
        let list: Vec<String> = plugin.versions.iter().map(|v| format!("\"{v}\"")).collect();
        Error::new(
            code::INCOMPATIBLE_VERSION,
            "incompatible CNI versions",
            format!("config is \"{text}\", plugin supports [{}]", list.join(" ")),
        )
    })
}

/// The namespace of the call must not be the caller's own: deleting "its" interface or setting lo
/// down would hit the host. A path that cannot be opened passes, the handler will say why.
fn refuse_own_netns(env: &Env) -> Result<()> {
    if env.netns.is_empty() || env.netns_override {
        return Ok(());
    }
    let own = std::fs::metadata("/proc/self/ns/net")
        .map_err(|err| Error::new(code::INVALID_NETNS, "get plugin's netns failed", err.to_string()))?;
    match std::fs::metadata(&env.netns) {
        Ok(theirs) if (own.dev(), own.ino()) == (theirs.dev(), theirs.ino()) => Err(Error::new(
            code::INVALID_NETNS,
            "plugin's netns and netns from CNI_NETNS should not be the same",
            "",
        )),
        _ => Ok(()),
    }
}

fn version_line(plugin: &Plugin) -> String {
    let mut o = Object::new();
    o.push("cniVersion", SpecVersion::NEWEST.as_str());
    o.push("supportedVersions", plugin.versions.iter().map(|v| v.as_str().into()).collect::<Vec<Value>>());
    format!("{}\n", Value::Object(o).to_compact())
}

fn about(plugin: &Plugin) -> String {
    let list: Vec<&str> = plugin.versions.iter().map(|v| v.as_str()).collect();
    format!(
        "CNI {} plugin felt v{}\nCNI protocol versions supported: {}\n",
        plugin.name,
        env!("CARGO_PKG_VERSION"),
        list.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::result::CniResult;

    fn nothing(_: &Call<'_>) -> Result<()> {
        Ok(())
    }
    fn empty(_: &Call<'_>) -> Result<CniResult> {
        Ok(CniResult::default())
    }
    static PLUGIN: Plugin = Plugin {
        name: "probe",
        versions: SpecVersion::ALL,
        add: empty,
        del: nothing,
        check: nothing,
        gc: nothing,
        status: nothing,
        may_have_no_address: false,
    };
    static OLD: Plugin = Plugin { versions: &[SpecVersion::V0_4_0], ..PLUGIN };

    fn env(command: &str) -> Env {
        Env {
            command: command.into(),
            container_id: "cid1".into(),
            netns: "/nonexistent/ns".into(),
            ifname: "eth0".into(),
            path: "/bin".into(),
            ..Env::default()
        }
    }
    fn run(env: &Env, stdin: &str) -> Result<Reply> {
        serve(&PLUGIN, env, &mut stdin.as_bytes())
    }
    fn failure(env: &Env, stdin: &str) -> (u32, String, String) {
        let err = run(env, stdin).unwrap_err();
        (err.code, err.msg, err.details)
    }

    #[test]
    fn collects_missing_variables_in_order() {
        let (code, msg, _) = failure(&Env { command: "ADD".into(), ..Env::default() }, "");
        assert_eq!(code, 4);
        assert_eq!(msg, "required env variables [CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH] missing");
        let (_, msg, _) = failure(&Env { command: "DEL".into(), ..Env::default() }, "");
        assert_eq!(msg, "required env variables [CNI_CONTAINERID,CNI_IFNAME,CNI_PATH] missing");
        let (_, msg, _) = failure(&Env { command: "GC".into(), ..Env::default() }, "");
        assert_eq!(msg, "required env variables [CNI_PATH] missing");
    }

    #[test]
    fn a_bad_value_wins_over_a_missing_one() {
        for id in ["a/b", "../x", ".x", "-x", "a b", "ä"] {
            let (code, msg, details) =
                failure(&Env { container_id: id.into(), path: String::new(), ..env("ADD") }, "{}");
            assert_eq!((code, msg.as_str(), details.as_str()), (4, "invalid characters in containerID", id));
        }
        for (name, msg) in [
            ("abcdefghijklmnop", "interface name is too long"),
            ("..", "interface name is . or .."),
            ("a:b", "interface name contains / or : or whitespace characters"),
            ("a\u{2003}b", "interface name contains / or : or whitespace characters"),
        ] {
            assert_eq!(failure(&Env { ifname: name.into(), ..env("ADD") }, "{}").1, msg);
        }
    }

    #[test]
    fn version_reads_no_input_and_needs_no_other_variable() {
        struct Unreadable;
        impl Read for Unreadable {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                panic!("standard input was read");
            }
        }
        let reply =
            serve(&PLUGIN, &Env { command: "VERSION".into(), ..Env::default() }, &mut Unreadable).unwrap();
        assert_eq!(
            reply,
            Reply::Version(
                "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.1.0\",\"0.2.0\",\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n"
                    .into()
            )
        );
    }

    #[test]
    fn without_a_command_it_introduces_itself() {
        let Reply::About(text) = run(&Env::default(), "").unwrap() else { panic!("not the about text") };
        assert!(text.starts_with("CNI probe plugin "));
        assert!(text.ends_with(
            "\nCNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n"
        ));
    }

    #[test]
    fn the_config_is_checked_before_the_command() {
        assert_eq!(
            failure(&env("FOO"), "").1,
            "error unmarshall network config: unexpected end of JSON input"
        );
        assert_eq!(failure(&env("FOO"), "{\"name\":\"n\"}").1, "unknown CNI_COMMAND: FOO");
        assert_eq!(failure(&env("ADD"), "{}"), (7, "missing network name".into(), String::new()));
        assert_eq!(failure(&env("ADD"), "null").0, 7);
        for text in ["[]", "\"x\"", "\u{feff}{}", "{}\0", "{\"name\":5}"] {
            assert_eq!(failure(&env("ADD"), text).0, 6, "{text}");
        }
        for name in ["a:b", "-x", "a/b"] {
            let (code, msg, details) = failure(&env("ADD"), &format!("{{\"name\":\"{name}\"}}"));
            assert_eq!(
                (code, msg.as_str(), details.as_str()),
                (7, "invalid characters found in network name", name)
            );
        }
    }

    #[test]
    fn versions_are_gated_per_command() {
        let conf = |v: &str| format!("{{\"name\":\"n\",\"cniVersion\":\"{v}\"}}");
        assert_eq!(failure(&env("CHECK"), &conf("0.3.1")).1, "config version does not allow CHECK");
        assert_eq!(failure(&env("GC"), &conf("1.0.0")).1, "config version does not allow GC");
        assert_eq!(failure(&env("STATUS"), &conf("")).1, "config version does not allow STATUS");
        assert_eq!(failure(&env("CHECK"), &conf("1.2.0")).1, "plugin version does not allow CHECK");
        assert_eq!(failure(&env("CHECK"), &conf("x")).0, 6);
        let err = serve(&OLD, &env("GC"), &mut conf("1.1.0").as_bytes()).unwrap_err();
        assert_eq!(err.msg, "plugin version does not allow GC");
        let (code, msg, details) = failure(&env("DEL"), &conf("1.0"));
        assert_eq!((code, msg.as_str()), (1, "incompatible CNI versions"));
        assert!(details.starts_with("config is \"1.0\", plugin supports [\"0.1.0\" \"0.2.0\""));
        assert_eq!(run(&env("CHECK"), &conf("1.1.0")).unwrap(), Reply::Done(None));
    }

    #[test]
    fn the_callers_own_namespace_is_refused_before_the_handler() {
        let own = Env { netns: "/proc/self/ns/net".into(), ..env("DEL") };
        assert_eq!(failure(&own, "{\"name\":\"n\"}").0, 8);
        let forced = Env { netns_override: true, ..own };
        assert_eq!(run(&forced, "{\"name\":\"n\"}").unwrap(), Reply::Done(None));
    }

    #[test]
    fn a_panic_becomes_an_error_object() {
        let err = guarded::<()>(|| panic!("boom {}", 1)).unwrap_err();
        assert_eq!(err.code, 999);
        assert!(err.msg.contains("boom 1"));
    }

    #[test]
    fn a_result_that_cannot_be_said_is_an_error() {
        assert_eq!(failure(&env("ADD"), "{\"name\":\"n\"}").1, "cannot convert: no valid IP addresses");
        let Reply::Done(Some(v)) = run(&env("ADD"), "{\"name\":\"n\",\"cniVersion\":\"1.0.0\"}").unwrap()
        else {
            panic!("no result")
        };
        assert_eq!(v.to_compact(), "{\"cniVersion\":\"1.0.0\"}");
    }
}
