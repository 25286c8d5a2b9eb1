//! `static`: addresses written in the configuration or handed over by the caller; nothing is kept.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{Plugin, nothing, required_result};
use crate::json::Fields;
use crate::skel::Call;
use crate::types::args;
use crate::types::error::{Error, Result};
use crate::types::result::{CniResult, Dns, IpConfig, Route, parse_cidr, parse_ip};
use crate::types::version::{Shape, SpecVersion};

pub(super) static PLUGIN: Plugin = Plugin {
    name: "static",
    versions: SpecVersion::ALL,
    add: load,
    del: nothing,
    check,
    gc: nothing,
    status: nothing,
    may_have_no_address: false,
};

fn load(call: &Call<'_>) -> Result<CniResult> {
    let value = call.value();
    let f = Fields::of("Net", &value)?;
    let ipam = f.object_of("ipam", "IPAMConfig.ipam")?;
    let mut result = CniResult::default();
    if let Some(ipam) = &ipam {
        for item in ipam.array_of("addresses", "main.Address")? {
            let a = Fields::of("Address", item)?;
            let text = a.string_or_empty("address")?;
            let address = cidr(&text, |text| {
                format!("the 'address' field is expected to be in CIDR notation, got: '{text}'")
            })?;
            let gateway = a.string("gateway")?.filter(|s| !s.is_empty()).map(parse_ip).transpose()?;
            result.ips.push(IpConfig { interface: None, address, gateway });
        }
        result.routes = ipam.array("routes")?.iter().map(Route::read).collect::<Result<_>>()?;
        result.dns = ipam.object_of("dns", "DNS")?.map(|d| Dns::read(&d)).transpose()?.unwrap_or_default();
    }
    append_from_args(call, &mut result)?;
    let by_args = match f.object_of("args", "struct")? {
        Some(args) => args.object_of("cni", "IPAMArgs")?.map(|cni| cni.strings("ips")).transpose()?.flatten(),
        None => None,
    };
    if let Some(texts) = by_args.filter(|t| !t.is_empty()) {
        result.ips = plain(&texts, |text| {
            format!("an entry in the 'ips' field is NOT in CIDR notation, got: '{text}'")
        })?;
    }
    let by_runtime = match f.object_of("runtimeConfig", "RuntimeConfig")? {
        Some(runtime) => runtime.strings("ips")?,
        None => None,
    };
    if let Some(texts) = by_runtime.filter(|t| !t.is_empty()) {
        result.ips = plain(&texts, |text| {
            format!("an entry in the 'ips' field is NOT in CIDR notation, got: '{text}'")
        })?;
    }
    if ipam.is_none() && result.ips.is_empty() {
        return Err(Error::internal("IPAM config missing 'ipam' key"));
    }
    let v4 = result.ips.iter().filter(|ip| ip.address.addr().is_ipv4()).count();
    if call.conf.version.shape() == Shape::Legacy && (v4 > 1 || result.ips.len() - v4 > 1) {
        return Err(Error::internal(format!(
            "CNI version {} does not support more than 1 address per family",
            call.conf.version
        )));
    }
    Ok(result)
}

/// `IP=` appends addresses; `GATEWAY=` is given to each of those whose subnet holds it.
fn append_from_args(call: &Call<'_>, result: &mut CniResult) -> Result<()> {
    let pairs = args::parse(&call.env.args, &["IP", "GATEWAY"])?;
    let first = result.ips.len();
    for text in list(args::last(&pairs, "IP")) {
        let address =
            cidr(text, |text| format!("the 'ip' field is expected to be in CIDR notation, got: '{text}'"))?;
        result.ips.push(IpConfig { interface: None, address, gateway: None });
    }
    for text in list(args::last(&pairs, "GATEWAY")) {
        let gateway: IpAddr =
            parse_ip(text).map_err(|_| Error::internal(format!("invalid gateway address: {text}")))?;
        for ip in &mut result.ips[first..] {
            if ip.address.contains(&gateway) {
                ip.gateway = Some(gateway);
            }
        }
    }
    Ok(())
}

fn list(text: Option<&str>) -> impl Iterator<Item = &str> {
    text.unwrap_or_default().split(',').map(str::trim).filter(|s| !s.is_empty())
}

fn cidr(text: &str, refusal: impl Fn(&str) -> String) -> Result<IpNet> {
    if text.contains('/') {
        parse_cidr(text).map_err(|_| Error::internal(refusal(text)))
    } else {
        Err(Error::internal(refusal(text)))
    }
}

fn plain(texts: &[String], refusal: impl Fn(&str) -> String) -> Result<Vec<IpConfig>> {
    texts
        .iter()
        .map(|text| Ok(IpConfig { interface: None, address: cidr(text, &refusal)?, gateway: None }))
        .collect()
}

fn check(call: &Call<'_>) -> Result<()> {
    let wanted = load(call)?;
    let result = required_result(call, "Required prevResult missing")?;
    for ip in &wanted.ips {
        let differs = result
            .ips
            .iter()
            .any(|there| there.address == ip.address && ip.gateway.is_some() && there.gateway != ip.gateway);
        if differs {
            return Err(Error::internal(format!(
                "static: Failed to match addr {} on interface {}",
                ip.address, call.env.ifname
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Value;
    use crate::skel::Env;
    use crate::types::conf::NetConf;

    fn run(config: &str, cni_args: &str) -> std::result::Result<Vec<String>, String> {
        let raw = Value::parse(config.as_bytes()).unwrap();
        let env = Env { args: cni_args.into(), ifname: "eth0".into(), ..Env::default() };
        let conf = NetConf::from_object(raw.as_object().unwrap(), SpecVersion::V1_0_0).unwrap();
        let result = load(&Call { env: &env, stdin: b"", conf }).map_err(|err| err.msg)?;
        Ok(result
            .ips
            .iter()
            .map(|ip| format!("{} {}", ip.address, ip.gateway.map_or_else(String::new, |gw| gw.to_string())))
            .collect())
    }

    const TWO: &str =
        r#""ipam":{"addresses":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"fd00::5/64"}]}"#;

    #[test]
    fn takes_the_config_and_appends_from_args() {
        assert_eq!(run(&format!("{{{TWO}}}"), "").unwrap(), ["10.1.0.5/24 10.1.0.1", "fd00::5/64 "]);
        let got = run(&format!("{{{TWO}}}"), "IP=10.2.0.5/24, 10.3.0.5/24;GATEWAY=10.3.0.9").unwrap();
        assert_eq!(got[2..], ["10.2.0.5/24 ", "10.3.0.5/24 10.3.0.9"]);
    }

    #[test]
    fn the_runtime_replaces_args_which_replace_the_config() {
        let args = r#""args":{"cni":{"ips":["10.8.0.1/24"]}}"#;
        assert_eq!(run(&format!("{{{TWO},{args}}}"), "").unwrap(), ["10.8.0.1/24 "]);
        let runtime = r#""runtimeConfig":{"ips":["10.9.0.1/24"]}"#;
        assert_eq!(run(&format!("{{{TWO},{args},{runtime}}}"), "").unwrap(), ["10.9.0.1/24 "]);
        assert_eq!(run(&format!("{{{runtime}}}"), "").unwrap(), ["10.9.0.1/24 "], "without any ipam key");
    }

    #[test]
    fn names_what_is_no_cidr() {
        let bad = r#"{"ipam":{"addresses":[{"address":"10.1.0.5"}]}}"#;
        assert_eq!(
            run(bad, "").unwrap_err(),
            "the 'address' field is expected to be in CIDR notation, got: '10.1.0.5'"
        );
        let empty = r#"{"ipam":{}}"#;
        assert!(run(empty, "IP=x").unwrap_err().starts_with("the 'ip' field is expected"));
        assert_eq!(run(empty, "GATEWAY=x").unwrap_err(), "invalid gateway address: x");
        let runtime = r#"{"ipam":{},"runtimeConfig":{"ips":["1.2.3.4"]}}"#;
        assert!(run(runtime, "").unwrap_err().contains("NOT in CIDR notation, got: '1.2.3.4'"));
    }
}
