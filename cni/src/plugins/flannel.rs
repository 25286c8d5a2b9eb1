//! `flannel`: turns the subnet in `subnet.env` into a delegate's configuration.
//!
//! ADD reads the file the daemon wrote, builds the delegate's configuration (a bridge with host-local
//! unless told otherwise), stores it under `dataDir` and calls the delegate. DEL works from the stored
//! configuration alone, so that it needs neither the daemon nor an unchanged conflist.
//!
//! COMPAT: the stored file is `<dataDir>/<container ID>` as flannel's plugin names it, while the
//! container has one flannel interface. A second interface gets `<container ID>-<ifname>`, which
//! flannel's plugin would have overwritten (and then leaked). The file goes only after the delegate's
//! DEL succeeded, so that a retry can still release the address.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{Plugin, nothing};
use crate::delegate;
use crate::json::{Fields, Object, Value};
use crate::skel::{Call, Command};
use crate::types::error::{Context, Error, Result, go_text};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;
use subnet::SubnetEnv;

mod subnet;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "flannel",
    versions: SpecVersion::ALL,
    add,
    del,
    check: nothing,
    gc,
    status,
    may_have_no_address: false,
};

/// The plugin's own keys.
struct Conf {
    subnet_file: PathBuf,
    data_dir: PathBuf,
    delegate: Object,
    ipam: Object,
}

impl Conf {
    fn read(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("NetConf", &value)?;
        let path = |key, default: &str| -> Result<PathBuf> {
            let text = f.string(key)?.filter(|s| !s.is_empty());
            Ok(PathBuf::from(text.unwrap_or(default)))
        };
        let object = |key| -> Result<Object> {
            Ok(f.object_of(key, "map[string]interface {}")?.map(|o| o.object().clone()).unwrap_or_default())
        };
        Ok(Self {
            subnet_file: path("subnetFile", "/run/flannel/subnet.env")?,
            data_dir: path("dataDir", "/var/lib/cni/flannel")?,
            delegate: object("delegate")?,
            ipam: object("ipam")?,
        })
    }

    /// Where this attachment's delegate configuration is stored: first the name that tells interfaces
    /// apart, then flannel's own.
    fn stored(&self, call: &Call<'_>) -> [PathBuf; 2] {
        let id = &call.env.container_id;
        [self.data_dir.join(format!("{id}-{}", call.env.ifname)), self.data_dir.join(id)]
    }
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let conf = Conf::read(call)?;
    let subnet = SubnetEnv::load(&conf.subnet_file)?;
    let delegate = delegate_conf(call, &conf, &subnet)?;
    let kind = delegate.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut stored = delegate.clone();
    stored.set(IFNAME_KEY, call.env.ifname.as_str());
    let path = stored_path(call, &conf)?;
    let before = fs::read(&path).ok();
    write(call, &conf, &path, Value::Object(stored).sorted().to_compact().as_bytes())?;
    let bytes = Value::Object(delegate).sorted().to_compact();
    delegate::add(call, &kind, bytes.as_bytes()).context("failed to delegate add").inspect_err(|_| {
        match before {
            // An attachment made earlier is still there: its file must go on describing it.
            Some(before) => drop(write(call, &conf, &path, &before)),
            // felt's own delegates undo themselves. Any other may need the DEL that follows, and its file.
            None if delegate::is_own(call, &kind) => drop(fs::remove_file(&path)),
            None => {}
        }
    })
}

/// Which interface a stored file belongs to; unknown to flannel's plugin and to every delegate.
const IFNAME_KEY: &str = "felt.ifname";

fn stored_path(call: &Call<'_>, conf: &Conf) -> Result<PathBuf> {
    let [own, shared] = conf.stored(call);
    Ok(match load(&shared)? {
        Some(other) if belongs_to_another(&other, call) => own,
        _ => shared,
    })
}

/// Replaces the file: a crash leaves the old one or the new one, never half a file.
fn write(call: &Call<'_>, conf: &Conf, path: &Path, bytes: &[u8]) -> Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&conf.data_dir)?;
    let temp = conf.data_dir.join(format!(".{}-{}.new", call.env.container_id, call.env.ifname));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temp)?;
    // Not synced: a file that a power cut emptied is treated as a cut one, and DEL goes on without it.
    file.write_all(bytes).and_then(|()| fs::rename(&temp, path)).inspect_err(|_| {
        let _ = fs::remove_file(&temp);
    })?;
    Ok(())
}

fn belongs_to_another(stored: &Object, call: &Call<'_>) -> bool {
    stored.get(IFNAME_KEY).and_then(Value::as_str).is_some_and(|name| name != call.env.ifname)
}

/// The stored object; `None` when there is no file or it does not hold an object.
fn load(path: &Path) -> Result<Option<Object>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Value::parse(&bytes).ok().and_then(|v| v.as_object().cloned())),
        Err(err) if err.kind() == ErrorKind::NotFound => Ok(None),
        Err(err) => Err(Error::internal(format!("failed to read {}: {}", path.display(), go_text(&err)))),
    }
}

fn del(call: &Call<'_>) -> Result<()> {
    let conf = Conf::read(call)?;
    for path in conf.stored(call) {
        if !path.exists() {
            continue;
        }
        match load(&path)? {
            Some(stored) if belongs_to_another(&stored, call) => continue,
            Some(stored) => return del_stored(call, stored, &path),
            // Cut short or overwritten: go on with what the conflist and the daemon say.
            None => {
                let delegate = SubnetEnv::load(&conf.subnet_file)
                    .and_then(|subnet| delegate_conf(call, &conf, &subnet))
                    .or_else(|_| delegate_conf(call, &conf, &SubnetEnv::unknown()))?;
                return del_stored(call, delegate, &path);
            }
        }
    }
    Ok(())
}

fn del_stored(call: &Call<'_>, mut delegate: Object, path: &Path) -> Result<()> {
    delegate.remove(IFNAME_KEY);
    let kind = delegate.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let bytes = Value::Object(delegate).sorted().to_compact();
    delegate::call(call, Command::Del, &kind, bytes.as_bytes())?;
    match fs::remove_file(path) {
        Err(err) if err.kind() != ErrorKind::NotFound => Err(err.into()),
        _ => Ok(()),
    }
}

fn gc(call: &Call<'_>) -> Result<()> {
    let conf = Conf::read(call)?;
    let subnet = SubnetEnv::load(&conf.subnet_file).unwrap_or_else(|_| SubnetEnv::unknown());
    let mut delegate = delegate_conf(call, &conf, &subnet)?;
    for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
        if let Some(list) = call.conf.raw.get_folded(key) {
            delegate.set(key, list.clone());
        }
    }
    let valid = call.conf.valid_attachments()?;
    let kind = delegate.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let bytes = Value::Object(delegate).sorted().to_compact();
    delegate::call(call, Command::Gc, &kind, bytes.as_bytes())?;
    let Ok(entries) = fs::read_dir(&conf.data_dir) else { return Ok(()) };
    for entry in entries.flatten() {
        let Some(stored) = load(&entry.path())? else { continue };
        let ours = stored.get("name").and_then(Value::as_str) == Some(&call.conf.name);
        let file = entry.file_name().to_string_lossy().into_owned();
        let ifname = stored.get(IFNAME_KEY).and_then(Value::as_str);
        let live = valid.iter().any(|(id, name)| {
            (file == *id && ifname.is_none_or(|i| i == name)) || file == format!("{id}-{name}")
        });
        if ours && !live {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

fn status(call: &Call<'_>) -> Result<()> {
    let conf = Conf::read(call)?;
    let subnet = SubnetEnv::load(&conf.subnet_file)
        .map_err(|err| Error::new(crate::types::error::code::UNAVAILABLE, err.msg, ""))?;
    let delegate = delegate_conf(call, &conf, &subnet)?;
    let kind = delegate.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let bytes = Value::Object(delegate).sorted().to_compact();
    delegate::call(call, Command::Status, &kind, bytes.as_bytes())
}

/// The delegate's configuration: the user's keys win, except for the address ranges.
fn delegate_conf(call: &Call<'_>, conf: &Conf, subnet: &SubnetEnv) -> Result<Object> {
    let mut d = conf.delegate.clone();
    for key in ["name", "ipam"] {
        if d.get(key).is_some() {
            return Err(Error::internal(format!(
                "'delegate' dictionary must not have '{key}' field, it'll be set by flannel"
            )));
        }
    }
    match d.get("type") {
        None => d.set("type", "bridge"),
        Some(Value::String(_)) => {}
        Some(_) => {
            return Err(Error::internal(
                "'delegate' dictionary, if present, must have (string) 'type' field",
            ));
        }
    }
    let is_bridge = d.get("type").and_then(Value::as_str) == Some("bridge");
    d.set("name", call.conf.name.as_str());
    if d.get("ipMasq").is_none() {
        d.set("ipMasq", !subnet.ip_masq);
    }
    if d.get("mtu").is_none() {
        d.set("mtu", subnet.mtu);
    }
    if is_bridge && d.get("isGateway").is_none() {
        d.set("isGateway", true);
    }
    if is_bridge
        && d.get("gsoMaxSize").is_none()
        && let Some(bytes) = call.conf.raw.get_folded("gsoMaxSize")
    {
        d.set("gsoMaxSize", bytes.clone());
    }
    if let Some(Value::String(version)) = call.conf.raw.get_folded("cniVersion")
        && !version.is_empty()
    {
        d.set("cniVersion", version.as_str());
    }
    if let Some(runtime) = call.conf.raw.get_folded("runtimeConfig") {
        d.set("runtimeConfig", runtime.clone());
    }
    d.set("ipam", delegate_ipam(conf, subnet)?);
    Ok(d)
}

fn delegate_ipam(conf: &Conf, subnet: &SubnetEnv) -> Result<Object> {
    let mut ipam = conf.ipam.clone();
    if ipam.get("type").is_none() {
        ipam.set("type", "host-local");
    }
    let ranges: Vec<Value> = subnet
        .subnets
        .iter()
        .map(|net| {
            let mut range = Object::new();
            range.push("subnet", net.trunc().to_string());
            vec![range.into()].into()
        })
        .collect();
    ipam.set("ranges", ranges);
    let mut routes = match ipam.get("routes") {
        Some(Value::Array(routes)) => routes.clone(),
        None | Some(Value::Null) => Vec::new(),
        Some(other) => {
            return Err(Error::internal(format!(
                "json: cannot unmarshal {} into Go struct field IPAM.routes of type []types.Route",
                other.kind()
            )));
        }
    };
    for net in &subnet.networks {
        let mut route = Object::new();
        route.push("dst", net.trunc().to_string());
        routes.push(route.into());
    }
    ipam.set("routes", routes);
    Ok(ipam)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skel::Env;
    use crate::types::conf::NetConf;

    fn conf_of(config: &str, env: &str) -> Result<Object> {
        let Value::Object(raw) = Value::parse(config.as_bytes()).unwrap() else { panic!("not an object") };
        let vars = Env { container_id: "cid1".into(), ifname: "eth0".into(), ..Env::default() };
        let call =
            Call { env: &vars, stdin: b"", conf: NetConf::from_object(&raw, SpecVersion::V0_3_1).unwrap() };
        delegate_conf(&call, &Conf::read(&call)?, &SubnetEnv::parse(env, Path::new("subnet.env"))?)
    }

    const ENV: &str =
        "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.17.1/24\nFLANNEL_MTU=1472\nFLANNEL_IPMASQ=true\n";

    #[test]
    fn defaults_are_a_gateway_bridge_with_host_local() {
        let d = conf_of(r#"{"name":"cni-flannel","type":"flannel","cniVersion":"0.3.1"}"#, ENV).unwrap();
        assert_eq!(
            Value::Object(d).sorted().to_compact(),
            concat!(
                r#"{"cniVersion":"0.3.1","ipMasq":false,"ipam":{"ranges":[[{"subnet":"10.1.17.0/24"}]],"#,
                r#""routes":[{"dst":"10.1.0.0/16"}],"type":"host-local"},"isGateway":true,"mtu":1472,"#,
                r#""name":"cni-flannel","type":"bridge"}"#
            )
        );
    }

    #[test]
    fn the_users_keys_win_and_ipam_is_merged() {
        let d = conf_of(
            r#"{"name":"n","delegate":{"type":"bridge","mtu":9000,"isGateway":false,"ipMasq":true,"hairpinMode":true},
                "ipam":{"type":"host-local","routes":[{"dst":"1.2.3.0/24"}],"subnet":"9.9.9.0/24","dataDir":"/x","foo":1},
                "runtimeConfig":{"a":1},"dns":{"domain":"x"}}"#,
            ENV,
        )
        .unwrap();
        assert_eq!(
            Value::Object(d).sorted().to_compact(),
            concat!(
                r#"{"hairpinMode":true,"ipMasq":true,"ipam":{"dataDir":"/x","foo":1,"#,
                r#""ranges":[[{"subnet":"10.1.17.0/24"}]],"routes":[{"dst":"1.2.3.0/24"},{"dst":"10.1.0.0/16"}],"#,
                r#""subnet":"9.9.9.0/24","type":"host-local"},"isGateway":false,"mtu":9000,"name":"n","#,
                r#""runtimeConfig":{"a":1},"type":"bridge"}"#
            )
        );
    }

    #[test]
    fn bad_delegates_are_refused() {
        assert!(conf_of(r#"{"name":"n","delegate":"bridge"}"#, ENV).is_err());
        assert!(
            conf_of(r#"{"name":"n","delegate":{"type":5}}"#, ENV)
                .unwrap_err()
                .msg
                .contains("(string) 'type'")
        );
        assert!(conf_of(r#"{"name":"n","delegate":{"name":"x"}}"#, ENV).unwrap_err().msg.contains("'name'"));
        assert!(conf_of(r#"{"name":"n","delegate":{"ipam":{}}}"#, ENV).unwrap_err().msg.contains("'ipam'"));
        let d = conf_of(r#"{"name":"n","delegate":{"type":"ptp"}}"#, ENV).unwrap();
        assert!(d.get("isGateway").is_none(), "only a bridge has a gateway key");
    }
}
