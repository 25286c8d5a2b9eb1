//! The operator's command.

use std::process::ExitCode;

fn main() -> ExitCode {
    felt_control::command::main()
}
