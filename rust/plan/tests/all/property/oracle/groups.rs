//! Groups with state and timeouts as the oracle sees them: each key with rows once with all of them, then what is over.

use std::collections::BTreeMap;

use super::super::functions::{BATCH, Group, Groups, Moment, Timeout};
use super::{Around, Bag, Row};

/// `seen` is told of the rows that the function sees, and of those that it makes of timeouts.
pub(super) fn epoch(
    call: &Groups,
    groups: &mut BTreeMap<Row, Group>,
    rows: &[Row],
    around: Around,
    seen: &mut dyn FnMut(&Row),
    out: &mut Bag,
) {
    // Spark's watermark begins at 0.
    let before = around.before.max(0);
    let moment = around.clock.map_or(BATCH, |clock| Moment { watermark: before, clock });
    let mut keys: Vec<Row> = rows.iter().map(|row| call.key(row)).collect();
    keys.sort();
    keys.dedup();
    rows.iter().for_each(&mut *seen);
    let mut give = |groups: &mut BTreeMap<Row, Group>, key: Row, rows: &[Row], moment: Moment| -> Bag {
        let (made, left) = call.call(&key, rows, groups.get(&key).and_then(|group| group.state), moment);
        groups.insert(key, left);
        groups.retain(|_, group| !group.is_nothing());
        out.extend(made.iter().cloned());
        made
    };
    for key in keys {
        let mine: Vec<Row> = rows.iter().filter(|row| call.key(row) == key).cloned().collect();
        give(groups, key, &mine, moment);
    }
    let Some(clock) = around.clock else { return };
    // At the end of input all are over.
    let ended = around.after == i64::MAX;
    let after = if ended { before } else { around.after.max(0) };
    let over = |timeout: i64| match call.timeout {
        Timeout::None => false,
        Timeout::Clock => timeout < clock,
        Timeout::EventTime => ended || timeout < after,
    };
    let moment = if call.timeout == Timeout::EventTime { Moment { watermark: after, clock } } else { moment };
    let due = groups.iter().filter(|(_, group)| group.timeout.is_some_and(over)).map(|(key, _)| key.clone());
    for key in due.collect::<Vec<_>>() {
        give(groups, key, &[], moment).iter().for_each(&mut *seen);
    }
}
