//! Acceptors with a secret tell regions to whom they can prove to know it, and to nobody else.

mod common;

use common::config;
use common::world::MoriTestWorld;
use kvferry_engine::fabric::{Completion, FabricError};
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

const OURS: &str = "0123456789abcdef0123456789abcdef";
const THEIRS: &str = "fedcba9876543210fedcba9876543210";

fn file(secret: &str) -> PathBuf {
    let name = format!("kvferry-{}-{}", std::process::id(), &secret[..8]);
    let path = std::env::temp_dir().join(name);
    if !path.exists() {
        fs::write(&path, secret).expect("a file");
        fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("its mode");
    }
    path
}

fn world(backend: MoriBackend, secrets: [Option<&str>; 2]) -> MoriTestWorld {
    MoriTestWorld::new(2, |plane| MoriConfig {
        secret_file: secrets[plane].map(file),
        ..config(backend)
    })
}

#[test]
fn who_knows_the_secret_gets_regions_and_nobody_else() {
    for backend in [MoriBackend::Rdma, MoriBackend::Xgmi] {
        let mut world = world(backend, [Some(OURS), Some(OURS)]).joined();
        let op = world.write(1, 64);
        assert_eq!(world.finish(op), Completion::Done);
        assert!(world.has_landed(1, 64));
    }
    for (dialler, acceptor, said) in [
        (Some(THEIRS), Some(OURS), "the two sides have different secrets"),
        (None, Some(OURS), "a proof of the fleet's secret is demanded here"),
        (Some(OURS), None, "there is no secret_file where it has to come from"),
    ] {
        let mut world = world(MoriBackend::Rdma, [dialler, acceptor]);
        let [_, desc] = [0, 1].map(|at| world.register(at));
        world.connect(0, 1);
        let cause = world.open(1, 0, 1, &desc).expect_err("they do not know each other");
        assert!(matches!(&cause, FabricError::Backend(why) if why.contains(said)), "{cause:?}");
        world.assert_untouched(1, 1);
    }
    for secret in [OURS, THEIRS] {
        let _gone = fs::remove_file(file(secret));
    }
}
