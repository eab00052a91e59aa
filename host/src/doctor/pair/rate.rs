//! What moves between two machines in a second, by a process on each.

use super::super::Check;
use super::super::child::{ChildExit, ExitCause};
use super::super::side::{BenchRole, compared, rows, side};
use super::PairSide;
use super::dialogue::DataRoute;
use std::fs;

pub(super) const RATE: &str = "peer-rate";

/// Ranges of 1 MiB, one at a time and 32 at a time: what is moved for a prompt of some thousand
/// tokens.
const ROWS: &[&str] = &["--sizes", "1M", "--batches", "1,32", "--seconds", "0.5", "--json"];

/// Of the segments that may be sent again: between two namespaces of a busy machine it was 0.003.
const RETRANSMITTED_MAX: f64 = 0.01;

/// Of an interface's speed that is expected at least of one connection.
const SPEED_MIN: f64 = 0.5;

/// Measures with the process that waits at `address`, over an interface of `speed` Mb/s if that is
/// known.
pub(super) fn measure(
    pair: &PairSide<'_>,
    (route, speed): (DataRoute, Option<u32>),
    address: Result<String, String>,
    to: &str,
) -> Check {
    let name = name(route);
    let remedy = "see what the doctor there says";
    let address = match address {
        Ok(address) => address,
        Err(why) => return Check::fail(RATE, format!("{name}: the other side: {why}"), remedy),
    };
    let args = pair.args;
    let before = segments();
    let moving = match side(args, &pair.fabric(route), BenchRole::To(&address, ROWS)) {
        Ok(moving) => moving,
        Err(why) => return Check::fail(RATE, why, "let kvferry start processes of itself"),
    };
    let end = moving.wait(Some(args.timeout));
    if end.how != ExitCause::Exit(0) {
        let found = format!("{name}: the process that moves bytes {}", end.describe());
        return Check::fail(RATE, found, end.remedy());
    }
    let retransmitted = match (before, segments()) {
        (Some(before), Some(after)) if route == DataRoute::Tcp => share(before, after),
        _ => 0.0,
    };
    let slower = slower(&end);
    judge(
        RateFound {
            text: format!("{name}: {} between this machine and {to}", told(&end)),
            slower,
            retransmitted,
        },
        speed,
    )
}

struct RateFound {
    text: String,
    /// What was moved the way that is slower, in bytes per second.
    slower: f64,
    /// Share of the segments of TCP that this machine sent again meanwhile.
    retransmitted: f64,
}

fn judge(found: RateFound, speed: Option<u32>) -> Check {
    let RateFound { text, slower, retransmitted } = found;
    if retransmitted > RETRANSMITTED_MAX {
        return Check::warn(
            RATE,
            format!("{text}; {:.1} % of the segments were sent again", retransmitted * 1e2),
            "look for a bad cable or port (`ip -s link`, `ethtool -S`), a full link, and an MTU that \
             differs",
        );
    }
    let Some(speed) = speed.map(|speed| f64::from(speed) * 1e6 / 8.0) else {
        return Check::ok(RATE, text);
    };
    match slower < SPEED_MIN * speed {
        true => Check::warn(
            RATE,
            format!("{text}, of {:.1} GB/s that the interface has", speed / 1e9),
            "see who else uses the link, the power mode and the cores of both machines, and the MTU; \
             RDMA (--fabric mori) takes no core",
        ),
        false => Check::ok(RATE, text),
    }
}

fn name(route: DataRoute) -> &'static str {
    match route {
        DataRoute::SharedMemory => "shared memory",
        DataRoute::Tcp => "TCP",
        DataRoute::Mori => "MoRI",
    }
}

/// Rates and times by direction.
fn told(end: &ChildExit) -> String {
    let mut texts = Vec::new();
    for (direction, verb) in [("write", "written"), ("read", "read")] {
        let of = |batch: u32| {
            rows(end).find(move |row| row["direction"] == direction && row["batch"] == batch)
        };
        let rate = of(32).and_then(|row| row["inflight_gb_per_s"].as_f64());
        let time = of(1).and_then(|row| row["mean_us"].as_f64());
        if let (Some(rate), Some(us)) = (rate, time) {
            texts.push(format!("{verb} at {rate:.2} GB/s, 1 MiB in {:.2} ms", us / 1e3));
        }
    }
    format!("{}; {}", texts.join(" and "), compared(end))
}

fn slower(end: &ChildExit) -> f64 {
    let many = rows(end).filter(|row| row["batch"] == 32);
    let rates = many.filter_map(|row| row["inflight_gb_per_s"].as_f64());
    rates.fold(f64::INFINITY, f64::min) * 1e9
}

/// Segments of TCP that this network has sent, and sent again.
fn segments() -> Option<[u64; 2]> {
    let text = fs::read_to_string("/proc/net/snmp").ok()?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let value = |wanted: &str| {
        let mut both = names.split(' ').zip(values.split(' '));
        both.find(|(name, _)| *name == wanted)?.1.parse().ok()
    };
    Some([value("OutSegs")?, value("RetransSegs")?])
}

fn share(before: [u64; 2], after: [u64; 2]) -> f64 {
    let [sent, again] = [0, 1].map(|at| after[at].saturating_sub(before[at]));
    again as f64 / sent.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::super::super::CheckStatus;
    use super::*;

    #[test]
    fn a_slow_way_is_told_with_what_it_may_be() {
        let found =
            |slower, retransmitted| RateFound { text: "TCP: x".into(), slower, retransmitted };
        let status = |found, speed| judge(found, speed).status;
        assert_eq!(status(found(1e9, 0.0), None), CheckStatus::Ok);
        assert_eq!(status(found(7e9, 0.0), Some(100_000)), CheckStatus::Ok);
        let slow = judge(found(6e9, 0.0), Some(100_000));
        assert_eq!(slow.status, CheckStatus::Warn);
        assert_eq!(slow.found, "TCP: x, of 12.5 GB/s that the interface has");
        let lossy = judge(found(7e9, 0.02), None);
        assert_eq!(lossy.found, "TCP: x; 2.0 % of the segments were sent again");
        assert_eq!(share([100, 1], [300, 5]), 0.02);
        assert!(segments().is_some(), "the kernel counts them");
    }
}
