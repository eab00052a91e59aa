//! Who may be reached by strangers without having asked for it.

use crate::common::patient;
use kvferry_fabric_host::{HostConfig, HostPlane, PeerTrust};

/// Of a plane that all of the network reaches.
fn everywhere() -> HostConfig {
    HostConfig { host: "0.0.0.0".into(), advertised: Some("192.0.2.1".into()), ..patient() }
}

#[test]
fn a_plane_without_a_secret_listens_where_others_reach_it_only_if_it_is_told_to() {
    let why = HostPlane::new(everywhere()).expect_err("nothing is between").to_string();
    assert!(why.contains("host = 0.0.0.0: others reach this address"), "{why}");
    assert!(why.contains("secret_file") && why.contains("insecure_network"), "{why}");
    let trust = PeerTrust { insecure_network: true, ..PeerTrust::default() };
    HostPlane::new(HostConfig { trust, ..everywhere() }).expect("it was told to");
    for loopback in ["localhost", "127.1.2.3", "::ffff:127.0.0.1"] {
        let config = HostConfig { host: loopback.into(), ..patient() };
        if let Err(why) = HostPlane::new(config) {
            assert!(why.to_string().contains("cannot listen"), "{loopback}: {why}");
        }
    }
}
