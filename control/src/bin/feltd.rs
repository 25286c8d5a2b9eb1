//! The node daemon. Called as `flanneld` it behaves the same.

use std::process::ExitCode;

fn main() -> ExitCode {
    felt_control::app::main(std::env::args())
}
