//! The multi-call binary: the name it is called by picks the plugin, `felt-cni NAME` works too.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use felt_cni::{gc, install, kubenet, plugins, skel};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let called = args.first().map(|arg0| base_name(arg0)).unwrap_or_default();
    match plugins::find(&called) {
        Some(plugin) => plugin_main(plugin, &args[1..]),
        None => command(args.get(1..).unwrap_or_default()),
    }
}

fn base_name(path: &str) -> String {
    Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn plugin_main(plugin: &'static plugins::Plugin, args: &[String]) -> ExitCode {
    match args.first() {
        Some(word) if plugin.name == "dhcp" && word == "daemon" => plugins::dhcp_daemon(&args[1..]),
        _ => skel::main(plugin),
    }
}

/// `felt-cni` called by its own name.
fn command(args: &[String]) -> ExitCode {
    let rest = args.get(1..).unwrap_or_default();
    let done = match args.first().map(String::as_str) {
        Some("install") => install::run(rest),
        Some("gc") => gc::run(rest),
        Some("kubenet") => kubenet::run(rest),
        Some("--version" | "-V" | "version") => {
            say(&format!("felt-cni {}\n", env!("CARGO_PKG_VERSION")));
            return ExitCode::SUCCESS;
        }
        Some("--help" | "-h" | "help") => {
            say(&usage());
            return ExitCode::SUCCESS;
        }
        Some(name) => match plugins::find(name) {
            Some(plugin) => return plugin_main(plugin, rest),
            None => Err(format!("unknown plugin or command {name:?}\n{}", usage())),
        },
        None => Err(usage()),
    };
    match done {
        Ok(text) => {
            say(&text);
            ExitCode::SUCCESS
        }
        Err(text) => {
            let _ = writeln!(std::io::stderr(), "felt-cni: {}", text.trim_end());
            ExitCode::FAILURE
        }
    }
}

fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn usage() -> String {
    let names: Vec<&str> = plugins::ALL.iter().map(|p| p.name).collect();
    format!(
        "usage: felt-cni install --dir DIR [--force]   hard-link every plugin name into DIR\n       \
         felt-cni gc [--dry-run]                 clear what dead pods left\n       \
         felt-cni kubenet --pod-cidr CIDR        write kubenet's conflist and keep its rule\n       \
         felt-cni PLUGIN                         run PLUGIN as if called by that name\n\
         plugins: {}\n",
        names.join(" ")
    )
}
