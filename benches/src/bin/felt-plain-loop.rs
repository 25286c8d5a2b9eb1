//! The plain loop of [`felt_benches::plain`] as a daemon, for end-to-end comparison.
//!
//! ```text
//! felt-plain-loop --device NAME --bind ADDRESS:PORT --route SUBNET/LENGTH=ADDRESS:PORT ...
//! ```
//!
//! Makes the TUN device (left down and without addresses: those are the caller's), prints `ready`, and runs until it is
//! killed.

use std::io::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::process::ExitCode;
use std::thread;

use felt_benches::plain::{LinearTable, inbound, outbound};
use tun_rs::DeviceBuilder;

type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "felt-plain-loop: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let (mut device, mut bind, mut routes) = (None, None, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--device" => device = Some(value),
            "--bind" => bind = Some(value.parse::<SocketAddr>()?),
            "--route" => routes.push(value.parse()?),
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    let device = DeviceBuilder::new()
        .name(device.ok_or("--device is missing")?)
        .packet_information(false)
        .offload(false)
        .enable(false)
        .build_sync()?;
    let socket = UdpSocket::bind(bind.ok_or("--bind is missing")?)?;
    let table = LinearTable::new(routes);
    writeln!(std::io::stdout(), "ready")?;
    thread::scope(|scope| {
        let out = scope.spawn(|| outbound(|b| device.recv(b), &table, |p, to| socket.send_to(p, to)));
        let inn = scope.spawn(|| inbound(|b| socket.recv(b), |p| device.send(p)));
        out.join().map_err(|_| "the outbound thread panicked")??;
        inn.join().map_err(|_| "the inbound thread panicked")??;
        Ok(())
    })
}
