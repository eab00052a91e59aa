//! Only instances that fit are paired, and it is said why others are not.

use crate::fleet::TestCluster;

#[test]
fn instances_of_two_models_are_not_paired_and_all_are_told_why() {
    let fleet = TestCluster::new(&["--queue-timeout", "0.001"]);
    let _p = fleet.serve("prefill", "push", &["--model", "a"]);
    let d = fleet.serve("decode", "push", &["--model", "b"]);
    fleet.ready(2);
    let (status, body) = fleet.ask(1, &[]);
    assert_eq!(status, 503, "{body}");
    let says = "model: source has \\\"a\\\", receiver has \\\"b\\\"";
    assert!(body.contains(says), "{body}");
    for path in ["/readiness", "/registrations/rejected"] {
        let page = fleet.page(path);
        assert_ne!(page["ready"], true);
        let [misfit] = &page["misfits"].as_array().expect("a list")[..] else { panic!("{page}") };
        let why = misfit["why"].as_str().expect("a text");
        assert!(why.contains("receiver has \"b\""), "{misfit}");
        assert!(d.text("handshake").ends_with(misfit["decode"].as_str().expect("a name")));
    }
    // One that fits is enough.
    let _d = fleet.serve("decode", "push", &["--model", "a"]);
    fleet.ready(3);
    assert_eq!(fleet.page("/readiness")["ready"], true);
    assert_eq!(fleet.ask(2, &[]).0, 200);
}

#[test]
fn other_elements_do_not_fit() {
    let fleet = TestCluster::new(&["--queue-timeout", "0.001"]);
    let _p = fleet.serve("prefill", "pull", &["--element", "4"]);
    let _d = fleet.serve("decode", "pull", &["--element", "2"]);
    fleet.ready(2);
    let (status, body) = fleet.ask(1, &[]);
    assert!(status == 503 && body.contains("element size of layer 0"), "{status} {body}");
}
