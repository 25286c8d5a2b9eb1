//! felt on another kernel: Debian's 6.1 in emulation. It has no segmentation offload for UDP on TUN devices (6.2), and
//! link types that the machine's own kernel may lack.

#[path = "vm/cni.rs"]
mod cni;

use felt_netns_tests::check::ok;
use felt_netns_tests::vm::Vm;

#[test]
fn guest_runs_commands_of_this_machine_under_its_own_kernel() {
    let mut vm = ok(Vm::boot());
    let release = vm.release.clone();
    assert_eq!(ok(vm.run("uname -r")).trim(), release);
    let (code, text) = ok(vm.output("echo a; echo b >&2; exit 7", std::time::Duration::from_secs(20)));
    assert_eq!((code, text.as_str()), (7, "a\nb\n"));
    ok(vm.run("for t in dummy bridge 'ipip local 198.18.0.1'; do ip link add t0 type $t && ip link del t0 || exit 1; done; touch /etc/x"));
    assert!(!std::path::Path::new("/etc/x").exists(), "what the guest writes stays in the guest");
}
