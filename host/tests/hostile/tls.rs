//! Who connects to a listener with TLS and does not get to the end of the handshake.

use crate::certificates::{PemFolder, TestAuthority};
use crate::flood::{connect_as_stranger, flood};
use crate::limit_files;
use crate::rig::{PATIENCE, TestRouter};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// The beginning of a greeting of TLS 1.3, whose rest does not come.
const BEGUN: &[u8] = &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];

#[tokio::test]
async fn handshakes_that_do_not_end_hide_neither_clients_nor_admin() {
    let (folder, authority) = (PemFolder::new("silent"), TestAuthority::OURS);
    let flags = folder.show(&authority.local);
    let options: Vec<_> = flags.iter().map(String::as_str).collect();
    for said in [&[], &BEGUN[..1], BEGUN] {
        let router = TestRouter::start_with(&options, |command| limit_files(command, 256, true));
        let _idle = flood(&router, said).await;
        let mut client = authority.client(&router).await;
        assert_eq!(client.get("/health").await.status, 200, "{said:?}");
        assert_eq!(router.get("/workers").await.status, 200, "{said:?}");
    }
}

#[tokio::test]
async fn a_handshake_delays_nobody_and_gives_way_as_an_idle_connection_does() {
    let (folder, authority) = (PemFolder::new("places"), TestAuthority::OURS);
    let flags = folder.show(&authority.local);
    let mut options: Vec<_> = flags.iter().map(String::as_str).collect();
    options.extend(["--connections-max", "3"]);
    let router = TestRouter::start(&options);
    // They were accepted first, and say half of a greeting.
    let mut slow = Vec::new();
    for _ in 0..2 {
        let mut stream = connect_as_stranger(&router).await;
        stream.write_all(BEGUN).await.unwrap();
        slow.push(stream);
    }
    let mut client = authority.client(&router).await;
    assert_eq!(client.get("/health").await.status, 200);
    // Another one of their address takes the place of the first.
    let mut late = connect_as_stranger(&router).await;
    late.write_all(BEGUN).await.unwrap();
    // The end may come as a reset.
    assert_eq!(timeout(PATIENCE, slow[0].read(&mut [0; 8])).await.unwrap().unwrap_or(0), 0);
    assert_eq!(client.get("/health").await.status, 200);
}
