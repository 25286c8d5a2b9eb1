//! `dhcp`: addresses from a DHCP server in the container's own network.
//!
//! A lease outlives the call that took it, so that the plugin only speaks to `dhcp daemon`, which
//! holds and renews leases. Socket path and flags are the reference's; the words spoken over the
//! socket are felt's own (one line of JSON each way), because daemon and plugin come in one file.
//!
//! ```text
//! ADD, DEL, CHECK --(socket)--> daemon -- one thread per lease: T1 renew, T2 rebind, expiry
//!                                  |
//!                                  +- /var/lib/cni/dhcp/<hash>.json: survives a restart
//! ```

mod client;
mod daemon;
mod lease;
mod packet;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::{Plugin, nothing};
use crate::json::{Fields, Object, Value};
use crate::skel::Call;
use crate::types::error::{Error, Result, go_text};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;
use client::Request;
use packet::{Options, option};

pub(super) use daemon::main as daemon_main;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "dhcp",
    versions: SpecVersion::ALL,
    add,
    del,
    check: |call| ask(call, "Check").map(drop),
    gc: nothing,
    status,
    may_have_no_address: false,
};

const SOCKET: &str = "/run/cni/dhcp.sock";
/// Longest client identifier: a length byte counts it.
const CLIENT_ID_MAX: usize = 254;

fn add(call: &Call<'_>) -> Result<CniResult> {
    let answer = ask(call, "Allocate")?;
    CniResult::from_json(&answer, SpecVersion::NEWEST)
}

fn del(call: &Call<'_>) -> Result<()> {
    ask(call, "Release").map(drop)
}

fn socket_path(call: &Call<'_>) -> Result<String> {
    let value = call.value();
    let f = Fields::of("NetConf", &value)?;
    let ipam = f.object_of("ipam", "IPAMConfig")?;
    let path = ipam.map(|i| i.string("daemonSocketPath")).transpose()?.flatten();
    Ok(path.filter(|s| !s.is_empty()).unwrap_or(SOCKET).to_owned())
}

/// Whether a daemon answers.
fn status(call: &Call<'_>) -> Result<()> {
    let path = socket_path(call)?;
    match UnixStream::connect(&path) {
        Ok(_) => Ok(()),
        Err(err) => Err(Error::new(
            crate::types::error::code::UNAVAILABLE,
            format!("error dialing DHCP daemon: dial unix {path}: connect: {}", go_text(&err)),
            "",
        )),
    }
}

/// One call of the daemon.
fn ask(call: &Call<'_>, method: &str) -> Result<Value> {
    // Mistakes in the configuration are told by the plugin, whether or not a daemon runs.
    request_of(call)?;
    let path = socket_path(call)?;
    let mut stream = UnixStream::connect(&path).map_err(|err| {
        Error::internal(format!("error dialing DHCP daemon: dial unix {path}: connect: {}", go_text(&err)))
    })?;
    let netns = std::path::absolute(&call.env.netns).map(|p| p.to_string_lossy().into_owned());
    let mut o = Object::new();
    o.push("method", method);
    o.push("containerID", call.env.container_id.as_str());
    o.push("netns", if call.env.netns.is_empty() { String::new() } else { netns? });
    o.push("ifName", call.env.ifname.as_str());
    o.push("args", call.env.args.as_str());
    o.push("config", call.value());
    stream.write_all(format!("{}\n", Value::Object(o).to_compact()).as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let answer = Value::parse(line.as_bytes())
        .map_err(|err| Error::internal(format!("error calling DHCP.{method}: {err}")))?;
    let f = Fields::of("Answer", &answer)?;
    match f.string("error")? {
        Some(text) => Err(Error::internal(format!("error calling DHCP.{method}: {text}"))),
        None => Ok(f.raw("result").cloned().unwrap_or(Value::Null)),
    }
}

/// What the configuration asks the server for.
fn request_of(call: &Call<'_>) -> Result<(Request, u64)> {
    let value = call.value();
    let f = Fields::of("NetConf", &value)?;
    let empty = Value::Null;
    let ipam = match f.object_of("ipam", "IPAMConfig")? {
        Some(ipam) => ipam,
        None => Fields::of("IPAMConfig", &empty)?,
    };
    let mut provide = Options::new();
    for item in ipam.array("provide")? {
        let p = Fields::of("ProvideOption", item)?;
        let code = option_code(&p)?;
        let mut text = p.string_or_empty("value")?;
        if let Some(key) = p.string("fromArg")?.filter(|s| !s.is_empty()) {
            // Pairs that are none are passed over, as in the reference.
            let mut pairs = call.env.args.split(';').filter_map(|pair| pair.split_once('='));
            match pairs.rfind(|(k, _)| *k == key) {
                Some((_, value)) => text = value.to_owned(),
                None if text.is_empty() => continue,
                None => {}
            }
        }
        if text.len() > 255 {
            return Err(Error::internal(format!("value too long for option {code}: {text:?}")));
        }
        provide.insert(code, text.into_bytes());
    }
    let mut parameters = Vec::new();
    let mut skip_default = false;
    for item in ipam.array("request")? {
        let r = Fields::of("RequestOption", item)?;
        skip_default |= r.flag("skipDefault")?;
        if r.string("option")?.is_some_and(|s| !s.is_empty()) {
            parameters.push(option_code(&r)?);
        }
    }
    if !skip_default {
        parameters.extend([option::ROUTERS, option::SUBNET_MASK]);
    }
    if parameters.is_empty() {
        parameters.extend([option::SUBNET_MASK, option::ROUTERS, option::DOMAIN_NAME, option::DNS_SERVERS]);
    }
    let request = Request {
        client_id: client_id(&call.env.container_id, &call.conf.name, &call.env.ifname),
        provide,
        parameters,
        broadcast: false,
        timeout: Duration::from_secs(10),
    };
    Ok((request, ipam.uint("priority")?.unwrap_or(0)))
}

fn option_code(f: &Fields<'_>) -> Result<u8> {
    let name = f.string_or_empty("option")?;
    Ok(match name.as_str() {
        "dhcp-client-identifier" => option::CLIENT_ID,
        "subnet-mask" => option::SUBNET_MASK,
        "routers" => option::ROUTERS,
        "host-name" => option::HOST_NAME,
        "user-class" => option::USER_CLASS,
        "vendor-class-identifier" => option::VENDOR_CLASS,
        other => other
            .parse()
            .map_err(|_| Error::internal(format!("Can not parse option {other:?}: invalid syntax")))?,
    })
}

/// The client identifier: a zero byte and container, network, interface. One that is too long is cut
/// and ends in a hash of the whole, so that two interfaces of a container differ all the same.
fn client_id(id: &str, network: &str, ifname: &str) -> Vec<u8> {
    let text = format!("{id}/{network}/{ifname}");
    let mut bytes = vec![0];
    if text.len() < CLIENT_ID_MAX {
        bytes.extend_from_slice(text.as_bytes());
    } else {
        let hash = crate::names::hash(&text, 32);
        bytes.extend_from_slice(&text.as_bytes()[..CLIENT_ID_MAX - 1 - hash.len()]);
        bytes.extend_from_slice(hash.as_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skel::Env;
    use crate::types::conf::NetConf;

    fn request(ipam: &str, args: &str) -> std::result::Result<(Request, u64), String> {
        let raw =
            Value::parse(format!(r#"{{"name":"n","ipam":{{"type":"dhcp"{ipam}}}}}"#).as_bytes()).unwrap();
        let env =
            Env { args: args.into(), container_id: "c".into(), ifname: "eth0".into(), ..Env::default() };
        let conf = NetConf::from_object(raw.as_object().unwrap(), SpecVersion::V1_0_0).unwrap();
        request_of(&Call { env: &env, stdin: b"", conf }).map_err(|err| err.msg)
    }

    #[test]
    fn client_identifiers_are_short_distinct_and_stable() {
        assert_eq!(client_id("c", "n", "eth0"), b"\0c/n/eth0");
        let (id, network) = ("a".repeat(64), "n".repeat(200));
        let one = client_id(&id, &network, "eth0");
        assert!(one.len() < 255);
        assert_ne!(one, client_id(&id, &network, "net1"));
        assert_eq!(one, client_id(&id, &network, "eth0"));
    }

    #[test]
    fn options_are_read_by_name_and_number() {
        let (r, priority) = request(
            r#","priority":7,"provide":[{"option":"host-name","fromArg":"K8S_POD_NAME"},{"option":"77","value":"x"},
                {"option":"host-name","value":"y","fromArg":"NONE"}],"request":[{"option":"42"}]"#,
            "junk;K8S_POD_NAME=web",
        )
        .unwrap();
        assert_eq!(priority, 7);
        assert_eq!(r.provide.get(&12), Some(&b"y".to_vec()), "later entries replace earlier ones");
        assert_eq!(r.provide.get(&77), Some(&b"x".to_vec()));
        assert_eq!(r.parameters, [42, 3, 1]);
        assert_eq!(request(r#","request":[{"skipDefault":true}]"#, "").unwrap().0.parameters, [1, 3, 15, 6]);
        assert!(
            request(r#","request":[{"option":"x"}]"#, "")
                .unwrap_err()
                .starts_with("Can not parse option \"x\"")
        );
        let long = format!(r#","provide":[{{"option":"12","value":"{}"}}]"#, "v".repeat(256));
        assert!(request(&long, "").unwrap_err().starts_with("value too long for option"));
    }
}
