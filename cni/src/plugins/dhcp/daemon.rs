//! `dhcp daemon`: takes leases, renews them, gives them back.
//!
//! One thread listens, one thread serves each call, one thread keeps each lease. A lease is in the
//! table under its client identifier; whoever removes it from there owns its end. Files under the
//! state directory let a restarted daemon go on where the old one stopped.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use felt_hostnet::netlink::Handle;
use felt_hostnet::netns::NetNs;
use felt_hostnet::signals;

use super::client::{Client, Failure, Request};
use super::lease::Grant;
use super::request_of;
use crate::json::{Fields, Object, Value};
use crate::names;
use crate::plugins::veth::random;
use crate::skel::{Call, Env};
use crate::types::conf::NetConf;
use crate::types::error::{Error, Result};
use crate::types::version::SpecVersion;

/// The flags.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Options {
    pidfile: Option<PathBuf>,
    host_prefix: String,
    socket: String,
    broadcast: bool,
    timeout: Duration,
    resend_max: Duration,
    resend_timeout: Duration,
    state_dir: PathBuf,
}

impl Options {
    fn parse(args: &[String]) -> std::result::Result<Self, String> {
        let mut out = Self {
            pidfile: None,
            host_prefix: String::new(),
            socket: super::SOCKET.into(),
            broadcast: false,
            timeout: Duration::from_secs(10),
            resend_max: Duration::from_secs(62),
            resend_timeout: Duration::from_secs(208),
            state_dir: "/var/lib/cni/dhcp".into(),
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            // Go's flags: one dash or two, the value behind "=" or in the next word.
            let name = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')).unwrap_or(arg);
            let (name, inline) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (name, None),
            };
            if name == "broadcast" {
                out.broadcast = inline.as_deref() != Some("false");
                continue;
            }
            let value = inline.or_else(|| args.next().cloned());
            let value = value.ok_or_else(|| format!("flag needs an argument: -{name}"))?;
            let time =
                || parse_time(&value).ok_or_else(|| format!("invalid value {value:?} for flag -{name}"));
            match name {
                "pidfile" => {
                    let path = PathBuf::from(&value);
                    if !path.is_absolute() {
                        return Err(format!("Error writing pidfile {value:?}: path not absolute"));
                    }
                    out.pidfile = Some(path);
                }
                "hostprefix" => out.host_prefix = value,
                "socketpath" => out.socket = value,
                "statedir" => out.state_dir = value.into(),
                "timeout" => out.timeout = time()?,
                "resendmax" => out.resend_max = time()?,
                "resendtimeout" => out.resend_timeout = time()?,
                other => return Err(format!("flag provided but not defined: -{other}")),
            }
        }
        Ok(out)
    }
}

fn parse_time(text: &str) -> Option<Duration> {
    crate::plugins::host_local::parse_duration(text).filter(|d| !d.is_zero())
}

/// A lease that is being kept.
struct Kept {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    grant: Grant,
    /// When the grant was given.
    since: SystemTime,
    stop: bool,
}

/// What is needed to keep a lease, also after a restart.
#[derive(Clone)]
struct Holder {
    request: Request,
    priority: u64,
    netns: String,
    ifname: String,
}

/// A lease in the table.
type Entry = (Arc<Kept>, Holder);

struct Daemon {
    options: Options,
    /// By client identifier.
    leases: Mutex<HashMap<Vec<u8>, Entry>>,
}

/// A panic in one call must not make the table unusable for the others.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "dhcp: {text}");
}

/// Runs the daemon until SIGINT or SIGTERM.
pub(in crate::plugins) fn main(args: &[String]) -> ExitCode {
    match Options::parse(args).and_then(|options| run(options).map_err(|err| err.to_string())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            complain(&text);
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<()> {
    signals::hold_termination()?;
    let socket = PathBuf::from(format!("{}{}", options.host_prefix, options.socket));
    let listener = listen(&socket)?;
    if let Some(path) = &options.pidfile {
        fs::write(path, format!("{}\n", std::process::id()))
            .map_err(|err| Error::internal(format!("Error writing pidfile {path:?}: {err}")))?;
    }
    let pidfile = options.pidfile.clone();
    let daemon = Arc::new(Daemon { options, leases: Mutex::new(HashMap::new()) });
    daemon.resume();
    let server = Arc::clone(&daemon);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let daemon = Arc::clone(&server);
            std::thread::spawn(move || daemon.serve(stream));
        }
    });
    signals::wait_for_termination()?;
    // Leases are not given back: the containers go on using them, and a new daemon renews them.
    let _ = fs::remove_file(&socket);
    if let Some(path) = pidfile {
        let _ = fs::remove_file(path);
    }
    Ok(())
}

/// Binds the socket. A file that nobody listens on is left over; a daemon that answers is another one.
fn listen(path: &Path) -> Result<UnixListener> {
    if let Some(dir) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    if UnixStream::connect(path).is_ok() {
        return Err(Error::internal(format!("another daemon listens on {}", path.display())));
    }
    match fs::remove_file(path) {
        Err(err) if err.kind() != std::io::ErrorKind::NotFound => return Err(err.into()),
        _ => {}
    }
    UnixListener::bind(path).map_err(|err| Error::from(err).context(format!("listen on {}", path.display())))
}

impl Daemon {
    fn serve(self: &Arc<Self>, stream: UnixStream) {
        let mut line = String::new();
        let mut reader = BufReader::new(&stream);
        // A connection without a question asks whether we live.
        if reader.read_line(&mut line).is_err() || line.is_empty() {
            return;
        }
        let mut answer = Object::new();
        match self.answer(&line) {
            Ok(Some(result)) => answer.push("result", result),
            Ok(None) => {}
            Err(err) => answer.push("error", err.to_string()),
        }
        let _ = (&stream).write_all(format!("{}\n", Value::Object(answer).to_compact()).as_bytes());
    }

    fn answer(self: &Arc<Self>, line: &str) -> Result<Option<Value>> {
        let value = Value::parse(line.as_bytes()).map_err(Error::internal)?;
        let f = Fields::of("Call", &value)?;
        let env = Env {
            container_id: f.string_or_empty("containerID")?,
            netns: f.string_or_empty("netns")?,
            ifname: f.string_or_empty("ifName")?,
            args: f.string_or_empty("args")?,
            ..Env::default()
        };
        let config = f.raw("config").and_then(Value::as_object).cloned().unwrap_or_default();
        let call = Call { env: &env, stdin: b"", conf: NetConf::from_object(&config, SpecVersion::NEWEST)? };
        let (request, priority) = request_of(&call)?;
        let request = Request { broadcast: self.options.broadcast, timeout: self.options.timeout, ..request };
        match f.string("method")? {
            Some("Allocate" | "Check") => {
                let netns = if env.netns.is_empty() {
                    String::new()
                } else {
                    format!("{}{}", self.options.host_prefix, env.netns)
                };
                let holder = Holder { request, priority, netns, ifname: env.ifname.clone() };
                self.allocate(&holder).map(Some)
            }
            Some("Release") => {
                self.release(&request);
                Ok(None)
            }
            other => Err(Error::internal(format!("unknown method {other:?}"))),
        }
    }

    fn allocate(self: &Arc<Self>, holder: &Holder) -> Result<Value> {
        let id = &holder.request.client_id;
        let present = locked(&self.leases).get(id).map(|(kept, old)| (Arc::clone(kept), old.netns.clone()));
        if let Some((kept, netns)) = present {
            // The same container in the same place: its lease.
            if netns == holder.netns {
                let grant = locked(&kept.state).grant.clone();
                return grant.to_result(holder.priority).to_json(SpecVersion::NEWEST);
            }
            self.release(&holder.request);
        }
        let ns = NetNs::open(&holder.netns)
            .map_err(|err| Error::from(err).context(format!("error opening netns {}", holder.netns)))?;
        let grant = self.acquire(&ns, holder)?;
        let result = grant.to_result(holder.priority).to_json(SpecVersion::NEWEST)?;
        self.keep(holder, grant, SystemTime::now());
        Ok(result)
    }

    /// Tries until the patience is used up, with growing pauses.
    fn acquire(&self, ns: &NetNs, holder: &Holder) -> Result<Grant> {
        let deadline = SystemTime::now() + self.options.resend_timeout;
        let mut pauses = [2, 2, 2, 2, 8, 16, 32, 64].map(Duration::from_secs).into_iter();
        let mut client = Client::open(ns, &holder.ifname, &holder.request)?;
        loop {
            match client.acquire() {
                Ok(grant) => return Ok(grant),
                Err(Failure::Other(err)) => return Err(err),
                Err(Failure::Refused | Failure::Silence) => {}
            }
            let pause = pauses.next().unwrap_or(Duration::from_secs(64)).min(self.options.resend_max);
            // A second more or less, so that a rack of nodes does not ask in step.
            let jitter = Duration::from_millis(random() % 2000);
            let pause = (pause + jitter).saturating_sub(Duration::from_secs(1));
            if SystemTime::now() + pause >= deadline {
                return Err(Error::internal("no more tries"));
            }
            std::thread::sleep(pause);
        }
    }

    /// Puts a lease into the table and starts its keeper.
    fn keep(self: &Arc<Self>, holder: &Holder, grant: Grant, since: SystemTime) {
        let kept = Arc::new(Kept {
            state: Mutex::new(State { grant: grant.clone(), since, stop: false }),
            changed: Condvar::new(),
        });
        if let Err(err) = self.save(holder, &grant, since) {
            complain(&format!("lease {} is not kept on disk: {err}", grant.address));
        }
        locked(&self.leases).insert(holder.request.client_id.clone(), (Arc::clone(&kept), holder.clone()));
        let daemon = Arc::clone(self);
        let holder = holder.clone();
        std::thread::spawn(move || daemon.maintain(&kept, &holder));
    }

    /// Keeps one lease until it is released, expires, or its link is gone.
    fn maintain(&self, kept: &Arc<Kept>, holder: &Holder) {
        /// Pause between tries while the server is silent.
        const AGAIN: Duration = Duration::from_secs(10);
        let mut again = None;
        loop {
            let state = locked(&kept.state);
            if state.stop {
                return;
            }
            let age = SystemTime::now().duration_since(state.since).unwrap_or_default();
            let due = again.unwrap_or_else(|| state.grant.renew_after.saturating_sub(age));
            let (state, _) = kept
                .changed
                .wait_timeout_while(state, due, |state| !state.stop)
                .unwrap_or_else(PoisonError::into_inner);
            if state.stop {
                return;
            }
            let (grant, since) = (state.grant.clone(), state.since);
            drop(state);
            let age = SystemTime::now().duration_since(since).unwrap_or_default();
            if age >= grant.duration {
                self.expire(kept, holder, &grant);
                return;
            }
            match self.extend(holder, &grant, age >= grant.rebind_after) {
                Ok(new) => {
                    let now = SystemTime::now();
                    if new.address != grant.address {
                        complain(&format!("the server moved {} to {}", grant.address, new.address));
                    }
                    let _ = self.save(holder, &new, now);
                    let mut state = locked(&kept.state);
                    state.grant = new;
                    state.since = now;
                    again = None;
                }
                // Without the link there is nothing to keep.
                Err(Failure::Other(_)) if NetNs::open(&holder.netns).is_err() || !self.has_link(holder) => {
                    self.forget(kept, holder);
                    return;
                }
                Err(Failure::Refused) => {
                    self.expire(kept, holder, &grant);
                    return;
                }
                Err(_) => again = Some(AGAIN.min(grant.duration.saturating_sub(age))),
            }
        }
    }

    fn has_link(&self, holder: &Holder) -> bool {
        let look = || -> Result<()> {
            let ns = NetNs::open(&holder.netns)?;
            Handle::new_in(&ns)?.link_by_name(&holder.ifname)?;
            Ok(())
        };
        look().is_ok()
    }

    fn extend(&self, holder: &Holder, grant: &Grant, rebind: bool) -> std::result::Result<Grant, Failure> {
        let ns = NetNs::open(&holder.netns).map_err(Error::from)?;
        let mut client = Client::open(&ns, &holder.ifname, &holder.request)?;
        match client.renew(grant.address.addr()) {
            // Another server may know us, or the old one may have lost its memory.
            Err(Failure::Refused | Failure::Silence) if rebind => client.acquire(),
            other => other,
        }
    }

    /// The address may be somebody else's by now: the link goes down, as in the reference.
    fn expire(&self, kept: &Arc<Kept>, holder: &Holder, grant: &Grant) {
        complain(&format!("lease {} of {} has ended", grant.address, holder.ifname));
        let down = || -> Result<()> {
            let ns = NetNs::open(&holder.netns)?;
            let mut inside = Handle::new_in(&ns)?;
            let link = inside.link_by_name(&holder.ifname)?;
            Ok(inside.link_down(link.index)?)
        };
        let _ = down();
        self.forget(kept, holder);
    }

    /// Takes a lease out of the table, unless a newer one has its place.
    fn forget(&self, kept: &Arc<Kept>, holder: &Holder) {
        let mut leases = locked(&self.leases);
        let id = &holder.request.client_id;
        if leases.get(id).is_some_and(|(present, _)| Arc::ptr_eq(present, kept)) {
            leases.remove(id);
            let _ = fs::remove_file(self.file(id));
        }
    }

    /// Gives a lease back; one that is unknown is gone already.
    fn release(&self, request: &Request) {
        let id = &request.client_id;
        let Some((kept, holder)) = locked(&self.leases).remove(id) else { return };
        let _ = fs::remove_file(self.file(id));
        let grant = {
            let mut state = locked(&kept.state);
            state.stop = true;
            state.grant.clone()
        };
        kept.changed.notify_all();
        let give_back = || -> Result<()> {
            let ns = NetNs::open(&holder.netns)?;
            Client::open(&ns, &holder.ifname, &holder.request)?.release(&grant)
        };
        if let Err(err) = give_back() {
            complain(&format!("lease {} was not given back to its server: {err}", grant.address));
        }
    }

    fn file(&self, client_id: &[u8]) -> PathBuf {
        let text = String::from_utf8_lossy(client_id);
        self.options.state_dir.join(format!("{}.json", names::hash(&text, 32)))
    }

    fn save(&self, holder: &Holder, grant: &Grant, since: SystemTime) -> Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.options.state_dir)?;
        let bytes = |b: &[u8]| Value::Array(b.iter().map(|b| Value::from(u64::from(*b))).collect());
        let mut provide = Object::new();
        for (code, value) in &holder.request.provide {
            provide.push(&code.to_string(), bytes(value));
        }
        let mut o = Object::new();
        o.push("clientID", bytes(&holder.request.client_id));
        o.push("netns", holder.netns.as_str());
        o.push("ifName", holder.ifname.as_str());
        o.push("priority", holder.priority);
        o.push("parameters", bytes(&holder.request.parameters));
        o.push("provide", provide);
        o.push("since", since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
        o.push("grant", grant.to_json());
        let path = self.file(&holder.request.client_id);
        let temp = path.with_extension("new");
        fs::write(&temp, Value::Object(o).to_indented())?;
        fs::rename(&temp, &path)?;
        Ok(())
    }

    /// Takes up the leases of an earlier daemon.
    fn resume(self: &Arc<Self>) {
        for entry in fs::read_dir(&self.options.state_dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|ext| ext != "json") {
                continue;
            }
            match self.load(&path) {
                Some((holder, grant, since)) if self.has_link(&holder) => self.keep(&holder, grant, since),
                _ => drop(fs::remove_file(&path)),
            }
        }
    }

    fn load(&self, path: &Path) -> Option<(Holder, Grant, SystemTime)> {
        let value = Value::parse(&fs::read(path).ok()?).ok()?;
        let f = Fields::of("Lease", &value).ok()?;
        let bytes = |value: Option<&Value>| -> Option<Vec<u8>> {
            let Value::Array(items) = value? else { return None };
            items
                .iter()
                .map(|item| match item {
                    Value::Number(n) => u8::try_from(n.as_u64()?).ok(),
                    _ => None,
                })
                .collect()
        };
        let provide = f.raw("provide")?.as_object()?.iter();
        let request = Request {
            client_id: bytes(f.raw("clientID"))?,
            provide: provide
                .map(|(code, value)| Some((code.parse().ok()?, bytes(Some(value))?)))
                .collect::<Option<_>>()?,
            parameters: bytes(f.raw("parameters"))?,
            broadcast: self.options.broadcast,
            timeout: self.options.timeout,
        };
        let holder = Holder {
            request,
            priority: f.uint("priority").ok()??,
            netns: f.string("netns").ok()??.to_owned(),
            ifname: f.string("ifName").ok()??.to_owned(),
        };
        let grant = Grant::from_json(&f.object_of("grant", "Grant").ok()??)?;
        Some((holder, grant, UNIX_EPOCH + Duration::from_secs(f.uint("since").ok()??)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_gos() {
        let parse = |text: &str| Options::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let o = parse(
            "-pidfile /run/x.pid --socketpath=/tmp/s -broadcast -timeout 5s -resendmax=1m -resendtimeout 2m",
        )
        .unwrap();
        assert_eq!(o.pidfile, Some("/run/x.pid".into()));
        assert_eq!(o.socket, "/tmp/s");
        assert!(o.broadcast);
        assert_eq!((o.timeout, o.resend_max), (Duration::from_secs(5), Duration::from_secs(60)));
        assert!(parse("-pidfile x").unwrap_err().contains("not absolute"));
        assert!(parse("-nope 1").unwrap_err().contains("flag provided but not defined"));
        assert!(parse("-timeout x").is_err());
    }
}
