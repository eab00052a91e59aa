//! Legs that no member of the fleet has made: whichever field names their peer, the instance sends
//! it nothing of the native dialect.

use crate::process::{ServeProcess, post};
use crate::program::ProgramFolder;
use crate::sidecar_process::{PATIENCE, SidecarProcess};
use crate::sidecar_rig::{self, Sidecar, SidecarFixture, next};
use kvferry::sidecar::proto::{FromHost, ToHost};
use kvferry_engine::core::dialect::moriio::handshake::{AgentMetadata, CacheLayouts, REQUEST};
use kvferry_engine::core::dialect::native;
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};
use std::fs::{Permissions, set_permissions};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::thread;

const PATH: &str = "/v1/completions";

/// A port that must not be dialled.
struct SilentPort(TcpListener);

impl SilentPort {
    fn new() -> SilentPort {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("an option of sockets");
        SilentPort(listener)
    }

    fn port(&self) -> u16 {
        self.0.local_addr().expect("an address").port()
    }

    fn assert_silent(&self, case: &str) {
        let dialled = self.0.accept().map_err(|why| why.kind());
        assert!(matches!(dialled, Err(ErrorKind::WouldBlock)), "{case}: {dialled:?}");
    }
}

/// A leg to a decode from a client that is not the router.
struct ForgedLeg {
    name: &'static str,
    request: String,
    params: Value,
    /// True if the leg is in MoRIIO's form.
    is_moriio: bool,
}

/// A peer in the form of MoRIIO's legs.
fn moriio_peer(port: u16) -> Value {
    let address = json!({"host": "127.0.0.1", "handshake": port, "notify": port});
    let shape = json!({"dp_size_local": 1, "tp_size": 1});
    json!({"address": address, "hosts": ["127.0.0.1"], "dp_size": 1, "dp_rank": 0, "shape": shape})
}

/// All forms in which a leg can name a prefill, without a seal.
fn forged_legs(port: u16) -> Vec<ForgedLeg> {
    let base = json!({
        "do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": null,
        "remote_block_ids": [[1]],
    });
    let with = |more: Value| {
        let mut params = base.clone();
        let more = more.as_object().expect("an object").clone();
        params.as_object_mut().expect("an object").extend(more);
        params
    };
    let id = |address: &str| {
        let decode = "host:127.0.0.1,handshake:1,notify:2";
        format!("___prefill_addr_{address}___decode_addr_{decode}_{:032x}", 7)
    };
    let address = format!("host:127.0.0.1,handshake:{port},notify:1");
    let ports = json!({"remote_host": "127.0.0.1", "remote_handshake_port": port,
        "remote_notify_port": 1});
    let mut hosts = ports.clone();
    hosts["remote_hosts"] = json!(["127.0.0.1"]);
    let native = json!({"key": {"id": "tx-native", "prompt": 0}, "sibling": 0, "mode": "Push",
        "prefill": format!("127.0.0.1:{port}"), "control": format!("tcp://127.0.0.1:{port}"),
        "life": 1});
    let mut both = native.clone();
    both["moriio"] = json!({"peer": moriio_peer(port), "blocks": []});
    let leg = |name, request: &str, mut params: Value, is_moriio| {
        params["transfer_id"] = format!("tx-{name}").into();
        let request = request.into();
        ForgedLeg { name, request, params, is_moriio }
    };
    vec![
        leg(
            "request id of a native prefill",
            &id(&format!("{address},kvferry:1f")),
            base.clone(),
            true,
        ),
        leg("request id", &id(&address), base.clone(), true),
        leg("remote_host", "r-1", with(ports), true),
        leg("remote_hosts", "r-2", with(hosts), true),
        leg("kvferry", "r-3", with(json!({"kvferry": native})), false),
        leg("kvferry with a MoRIIO peer", "r-4", with(json!({"kvferry": both})), false),
    ]
}

fn body(params: &Value) -> Value {
    json!({"prompt": [1, 2, 3], "max_tokens": 2, "kv_transfer_params": params})
}

/// File with the fleet's secret.
fn secret(folder: &ProgramFolder) -> String {
    let secret = folder.write("secret", "0123456789abcdef0123456789abcdef");
    set_permissions(&secret, Permissions::from_mode(0o400)).expect("its mode");
    secret
}

fn decode(secret: &str, mode: &str, more: &[&str]) -> ServeProcess {
    let args = ["--role", "decode", "--mode", mode, "--secret-file", secret];
    ServeProcess::serve(&[&args[..], more].concat())
}

#[test]
fn decode_refuses_a_leg_without_a_seal_and_does_not_dial() {
    let secret = secret(&ProgramFolder::new("hostile-legs-serve"));
    for mode in ["push", "pull"] {
        let decode = decode(&secret, mode, &["--moriio-peers=false"]);
        let port = SilentPort::new();
        for ForgedLeg { name, request, params, .. } in forged_legs(port.port()) {
            let (status, answer) = decode.post(PATH, &request, &body(&params));
            assert_eq!(status, 400, "{name}: {answer}");
            assert!(answer.contains("has no seal"), "{name}: {answer}");
            port.assert_silent(name);
        }
    }
}

/// A handshake listener that claims to speak the native dialect.
fn native_listener() -> (zmq::Socket, u16) {
    let listener = zmq::Context::new().socket(zmq::ROUTER).expect("a socket");
    listener.set_rcvtimeo(PATIENCE.as_millis() as i32).expect("an option of sockets");
    listener.bind("tcp://127.0.0.1:*").expect("a free port");
    let endpoint = listener.get_last_endpoint().expect("bound").expect("UTF-8");
    let (_, port) = endpoint.rsplit_once(':').expect("a port");
    let port = port.parse().expect("a number");
    (listener, port)
}

#[test]
fn decode_with_moriio_peers_says_no_native_hello_for_a_leg_without_a_seal() {
    let secret = secret(&ProgramFolder::new("hostile-legs-moriio"));
    let decode = decode(&secret, "push", &["--moriio-peers=true"]);
    let metadata = AgentMetadata {
        engine_id: "127.0.0.1:1".into(),
        engine: b"no engine".as_slice().into(),
        base_addrs: vec![0],
        num_blocks: 1,
        block_len: 1,
        attn_backend: "".into(),
        layouts: CacheLayouts::default(),
        native: true,
    };
    for nth in 0..forged_legs(1).len() {
        let (listener, port) = native_listener();
        let ForgedLeg { name, request, params, is_moriio } =
            forged_legs(port).into_iter().nth(nth).expect("one of them");
        let to = decode.text("http").to_owned();
        let asked = thread::spawn(move || post(&to, PATH, &request, &body(&params)));
        if is_moriio {
            let said = listener.recv_multipart(0).expect("a question");
            assert_eq!(said[1..], [REQUEST], "{name}");
            let answer = metadata.encode();
            let answer = [&said[0][..], &answer[0], &answer[1]];
            listener.send_multipart(answer, 0).expect("it is queued");
        }
        let (status, answer) = asked.join().expect("no panic");
        assert!(status >= 400, "{name}: {answer}");
        while let Ok(said) = listener.recv_multipart(zmq::DONTWAIT) {
            let is_native = said.iter().any(|part| part.starts_with(&native::MAGIC));
            assert!(is_moriio && !is_native, "{name}: {said:?}");
        }
    }
}

#[test]
fn prefill_dials_no_decode_that_a_native_leg_names() {
    let prefill = ServeProcess::serve(&["--role", "prefill", "--mode", "push"]);
    let port = SilentPort::new();
    let moriio = json!({"peer": moriio_peer(port.port()), "blocks": []});
    let leg = json!({"key": {"id": "tx-1", "prompt": 0}, "siblings": 1, "mode": "Push",
        "life": null, "moriio": moriio});
    let params = json!({"do_remote_decode": true, "kvferry": leg});
    let (status, answer) = prefill.post(PATH, "r-1", &body(&params));
    assert_eq!(status, 200, "{answer}");
    port.assert_silent("a prefill");
}

#[test]
fn sidecar_refuses_a_leg_without_a_seal_and_does_not_dial() {
    let secret = secret(&ProgramFolder::new("hostile-legs-sidecar"));
    let host = SidecarProcess::start("hostile-legs");
    let mut engine = sidecar_rig::engine(Role::Decode, Mode::Push, Sidecar);
    engine.settings.secret_file = Some(secret.into());
    engine.settings.moriio_peers = Some(false);
    let mut decode = SidecarFixture::of(&host, engine);
    let port = SilentPort::new();
    for ForgedLeg { name, request, params, .. } in forged_legs(port.port()) {
        let (request, params) = (request.into(), params.to_string().into());
        decode.tell(&ToHost::Arrived { request, params, tokens: 3, prompt_hash: None });
        let mut ended = Vec::new();
        let answer = next(&mut decode.scheduler, |news| sidecar_rig::is_stats(news, &mut ended));
        let FromHost::Unusable { why, .. } = answer else { panic!("{name}: {answer:?}") };
        assert!(why.contains("has no seal"), "{name}: {why}");
        port.assert_silent(name);
    }
}
