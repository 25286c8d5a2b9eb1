//! The daemon's command line: flannel's flags, environment and exit behaviour, and felt's own flags.
//!
//! [`parse`] reads words as Go's `flag` package does and then fills in `FLANNELD_*` variables for every flag the command
//! line left alone. It touches neither the process environment nor the terminal, so tests pass in both as values.

mod flags;
mod goflag;
mod options;

pub use goflag::parse_go_duration;
pub use options::{EtcdOptions, Handover, KubeOptions, LogFormat, Options, Secret};

/// Where values of variables come from: the process environment, or a map in tests.
pub trait Strings {
    /// The value of the variable `name`, if it is set.
    fn get(&self, name: &str) -> Option<String>;
}

/// The environment of this process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessEnv;

impl Strings for ProcessEnv {
    fn get(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
}

impl<S: std::hash::BuildHasher> Strings for std::collections::HashMap<&str, &str, S> {
    fn get(&self, name: &str) -> Option<String> {
        Self::get(self, name).map(|value| (*value).to_owned())
    }
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Command {
    /// Run the daemon.
    Run {
        /// All settings.
        options: Box<Options>,
        /// Variables whose values were refused; to be logged, then ignored.
        env_errors: Vec<String>,
    },
    /// Print the version on standard error, exit 0.
    Version,
    /// Print the error, if any, and the usage text on standard error, exit 0 as flanneld does.
    Usage {
        /// The line in front of the usage text.
        error: Option<String>,
    },
}

/// Reads the words after the program's name.
pub fn parse<I>(words: I, env: &dyn Strings) -> Command
where
    I: IntoIterator<Item = String>,
{
    let mut options = Options::default();
    let set = match goflag::scan(words, flags::FLAGS, &mut |name, value| options.set(name, value)) {
        Ok(goflag::Scan::Done(set)) => set,
        Ok(goflag::Scan::Help) => return Command::Usage { error: None },
        Err(error) => return Command::Usage { error: Some(error) },
    };
    if options.version {
        return Command::Version;
    }
    let mut env_errors = Vec::new();
    for flag in flags::FLAGS.iter().filter(|flag| !set.contains(flag.name) && flag.name != "version") {
        let variable = env_name(flag.name);
        let Some(value) = env.get(&variable).filter(|value| !value.is_empty()) else { continue };
        if let Err(reason) = options.set(flag.name, &value) {
            let shown = if flag.secret { "***" } else { value.as_str() };
            env_errors.push(format!("ignoring {variable}={shown:?}: {reason}"));
        }
    }
    Command::Run { options: Box::new(options), env_errors }
}

/// The text behind `-help` and behind every error of the command line.
pub fn usage(program: &str) -> String {
    goflag::usage(program, flags::FLAGS)
}

/// `FLANNELD_ETCD_PREFIX` for `etcd-prefix`.
fn env_name(flag: &str) -> String {
    format!("FLANNELD_{}", flag.to_ascii_uppercase().replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use super::*;

    fn run(words: &[&str], env: &[(&'static str, &'static str)]) -> (Options, Vec<String>) {
        let env: HashMap<&str, &str> = env.iter().copied().collect();
        match parse(words.iter().map(ToString::to_string), &env) {
            Command::Run { options, env_errors } => (*options, env_errors),
            other => panic!("{words:?} gave {other:?}"),
        }
    }

    fn usage_error(words: &[&str]) -> String {
        match parse(words.iter().map(ToString::to_string), &HashMap::new()) {
            Command::Usage { error } => error.unwrap_or_default(),
            other => panic!("{words:?} gave {other:?}"),
        }
    }

    #[test]
    fn defaults_are_flannels() {
        let (options, errors) = run(&[], &[]);
        assert!(errors.is_empty());
        assert_eq!(options.etcd.endpoints, ["http://127.0.0.1:4001", "http://127.0.0.1:2379"]);
        assert_eq!(options.etcd.prefix, "/coreos.com/network");
        assert_eq!(options.subnet_file.to_str(), Some("/run/flannel/subnet.env"));
        assert_eq!(options.renew_margin(), Duration::from_secs(3600));
        assert_eq!(options.subnet_lease_ttl, Duration::from_secs(86_400));
        assert_eq!((options.healthz_ip.as_str(), options.healthz_port), ("0.0.0.0", 0));
        assert!(
            !options.ip_masq && options.iptables_forward_rules && options.kube.set_node_network_unavailable
        );
    }

    #[test]
    fn go_forms_are_equal() {
        for words in [
            &["-public-ip", "1.2.3.4", "-ip-masq", "-v=4"][..],
            &["--public-ip=1.2.3.4", "--ip-masq=T", "-v", "4"],
            &["-public-ip=9.9.9.9", "--public-ip", "1.2.3.4", "-ip-masq=1", "--v=4"],
        ] {
            let (options, _) = run(words, &[]);
            assert_eq!(options.public_ip, "1.2.3.4");
            assert!(options.ip_masq);
            assert_eq!(options.verbosity, 4);
        }
    }

    #[test]
    fn parsing_stops_at_the_first_other_word() {
        let (options, _) = run(&["-iface", "eth0", "stray", "-iface=eth1"], &[]);
        assert_eq!(options.iface, ["eth0"]);
        let (options, _) = run(&["--iface=a", "--iface=b", "--", "--iface=c"], &[]);
        assert_eq!(options.iface, ["a", "b"]);
        // A boolean takes a value only with "=": "false" is a stray word here.
        let (options, _) = run(&["-ip-masq", "false", "-v=2"], &[]);
        assert!(options.ip_masq);
        assert_eq!(options.verbosity, 0);
    }

    #[test]
    fn command_line_wins_over_environment() {
        let env = [("FLANNELD_PUBLIC_IP", "5.6.7.8"), ("FLANNELD_IFACE", "a,b"), ("FLANNELD_IP_MASQ", "")];
        let (options, errors) = run(&["-public-ip=1.2.3.4"], &env);
        assert!(errors.is_empty());
        assert_eq!(options.public_ip, "1.2.3.4");
        assert_eq!(options.iface, ["a,b"]);
        assert!(!options.ip_masq);
    }

    #[test]
    fn bad_environment_is_reported_and_ignored() {
        let env = [("FLANNELD_HEALTHZ_PORT", "x"), ("FLANNELD_V", "2"), ("FLANNELD_VERSION", "true")];
        let (options, errors) = run(&[], &env);
        assert_eq!(errors.len(), 1);
        assert!(errors[0].contains("FLANNELD_HEALTHZ_PORT"), "{}", errors[0]);
        assert_eq!((options.healthz_port, options.verbosity), (0, 2));
    }

    #[test]
    fn errors_read_as_gos() {
        assert_eq!(usage_error(&["-nonsense"]), "flag provided but not defined: -nonsense");
        assert_eq!(usage_error(&["-logtostderr"]), "flag provided but not defined: -logtostderr");
        assert_eq!(usage_error(&["-public-ip"]), "flag needs an argument: -public-ip");
        assert_eq!(usage_error(&["---x"]), "bad flag syntax: ---x");
        assert_eq!(usage_error(&["-=x"]), "bad flag syntax: -=x");
        assert_eq!(
            usage_error(&["-healthz-port=x"]),
            "invalid value \"x\" for flag -healthz-port: parse error"
        );
        assert_eq!(usage_error(&["-ip-masq=yes"]), "invalid boolean value \"yes\" for -ip-masq: parse error");
        assert_eq!(usage_error(&["-h"]), "");
        assert!(usage_error(&["-offload=maybe"]).contains("possible are auto, off"));
    }

    #[test]
    fn version_needs_the_command_line() {
        assert!(matches!(parse(["-version".to_owned()], &HashMap::new()), Command::Version));
        assert!(usage_error(&["-version", "-nonsense"]).contains("not defined"));
    }

    #[test]
    fn endpoints_are_trimmed_and_empty_ones_left_out() {
        let (options, _) = run(&["-etcd-endpoints= http://a:1 ,http://b:2,, "], &[]);
        assert_eq!(options.etcd.endpoints, ["http://a:1", "http://b:2"]);
    }

    #[test]
    fn margins_are_minutes_or_durations() {
        for (text, seconds) in [("20", 1200), ("90s", 90), ("1h30m", 5400), ("1.5m", 90)] {
            let (options, _) = run(&["-subnet-lease-renew-margin", text], &[]);
            assert_eq!(options.renew_margin(), Duration::from_secs(seconds), "{text}");
        }
        assert!(usage_error(&["-subnet-lease-ttl=-3s"]).contains("subnet-lease-ttl"));
    }

    #[test]
    fn margin_must_lie_inside_the_lease() {
        for (words, good) in [
            (&["-subnet-lease-renew-margin=1439"][..], true),
            (&["-subnet-lease-renew-margin=1440"], false),
            (&["-subnet-lease-renew-margin=0"], false),
            (&["-subnet-lease-ttl=60s", "-subnet-lease-renew-margin=20s"], true),
            (&["-subnet-lease-ttl=60s", "-subnet-lease-renew-margin=60s"], false),
            (&["-subnet-lease-ttl=60s"], true),
        ] {
            assert_eq!(run(words, &[]).0.check().is_ok(), good, "{words:?}");
        }
    }

    #[test]
    fn secrets_never_show() {
        let words = ["-etcd-password=hunter2", "-etcd-endpoints=http://root:hunter2@h:1"];
        let (options, _) = run(&words, &[]);
        assert_eq!(options.etcd.password.reveal(), "hunter2");
        let shown = format!("{options:?} {}", options.redacted());
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("root:***@h:1"), "{shown}");
    }

    #[test]
    fn every_flag_can_be_set_and_is_shown_in_the_usage_text() {
        let text = usage("flanneld");
        assert!(text.starts_with("Usage: flanneld [OPTION]...\n"));
        for flag in flags::FLAGS {
            assert!(text.contains(&format!("  -{}", flag.name)), "{} is missing", flag.name);
            let error = Options::default().set(flag.name, "\u{0}").err();
            assert!(error.is_none_or(|text| !text.contains("no such flag")), "{} cannot be set", flag.name);
        }
        let mut sorted: Vec<_> = flags::FLAGS.iter().map(|flag| flag.name).collect();
        sorted.sort_unstable();
        assert!(flags::FLAGS.iter().map(|flag| flag.name).eq(sorted), "flags are not in order");
    }
}
