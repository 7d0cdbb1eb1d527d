//! A plan in words, for people.

use std::fmt::Write;

use crate::agg::{Aggregate, Function};
use crate::chain::{Bound, Stateless};
use crate::ddl::columns;
use crate::join::Join;
use crate::keyed::{KeyedKind, KeyedSpec};
use crate::plan::{Inlet, Origin, Plan, names};
use crate::running::Emit;
use crate::spec::{JoinHow, SideSpec, StepSpec};
use crate::top::Top;
use crate::window::{Cut, Windows};

pub(crate) fn time(us: i64) -> String {
    let units = [(3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s"), (1_000, "ms")];
    match units.iter().find(|(unit, _)| us % unit == 0 && us != 0) {
        Some((unit, name)) => format!("{} {name}", us / unit),
        None => format!("{us} us"),
    }
}

fn windows(windows: &Windows) -> String {
    let place = place(windows.offset_us(), windows.zone());
    match windows.size_us() == windows.every_us() {
        true => format!("tumbling {}{place}", time(windows.size_us())),
        false => format!("sliding {} every {}{place}", time(windows.size_us()), time(windows.every_us())),
    }
}

/// Where windows start.
pub(crate) fn place(offset_us: i64, zone: Option<&str>) -> String {
    let offset = if offset_us == 0 { String::new() } else { format!(" from {}", time(offset_us)) };
    zone.map_or(offset.clone(), |zone| format!("{offset} in {zone}"))
}

/// Whether the plan leaves open when this aggregate speaks.
fn is_default(plan: &Plan, keyed: &KeyedSpec) -> bool {
    let node = plan.spec().steps.get(keyed.step.index);
    matches!(node.map(|node| &node.step), Some(StepSpec::Agg { emit: None, .. }))
}

fn aggregates(keyed: &KeyedSpec, aggregates: &[Aggregate]) -> String {
    let words: Vec<String> = aggregates
        .iter()
        .map(|agg| {
            let column = agg.column.map_or("", |at| keyed.input.field(at).name());
            let more = match (&agg.by, agg.function) {
                (Some((at, _)), _) => format!(" by {}", keyed.input.field(*at).name()),
                (None, Function::ApproxQuantile { q, digits }) => {
                    format!(", {q}, error {}", crate::gather::histogram::error_of(digits))
                }
                _ => String::new(),
            };
            format!("{} = {}({column}{more})", agg.name, agg.function.name())
        })
        .collect();
    words.join(", ")
}

/// Outputs beside the main one.
fn sides(sides: &[SideSpec], margin: &str, line: &mut dyn FnMut(String)) {
    for side in sides {
        line(format!("{margin}side {}: {}", side.name, columns(&side.schema)));
    }
}

/// Steps without state; those of a body are set in.
pub(crate) fn chain(steps: &[Stateless], depth: usize, line: &mut dyn FnMut(String)) {
    let margin = "  ".repeat(depth);
    for step in steps {
        match step {
            Stateless::Map(map) => {
                line(format!("{margin}{}: call {}: {}", map.step, map.call, columns(&map.schema)));
                sides(&map.sides, &format!("{margin}  "), line);
            }
            Stateless::FlatMap(flat) => {
                let each = if flat.rows { "row" } else { "block" };
                line(format!(
                    "{margin}{}: call {} per {each}, lazily: {}",
                    flat.step,
                    flat.call,
                    columns(&flat.schema)
                ));
                sides(&flat.sides, &format!("{margin}  "), line);
            }
            Stateless::Bounded(part) => {
                line(format!("{margin}{}: {}", part.step, bound(&part.bound)));
                chain(&part.body, depth + 1, line);
            }
            Stateless::Iterate(part) => {
                line(format!("{margin}{}: until no row goes around again", part.step));
                chain(&part.body, depth + 1, line);
            }
        }
    }
}

fn bound(bound: &Bound) -> String {
    let found = || "found while running".to_owned();
    let batches = bound.batches.map_or_else(found, |batches| batches.to_string());
    let size = bound.batch_size.map_or_else(found, |size| size.to_string());
    let memory = bound.memory.map_or(String::new(), |bytes| format!(", within {bytes} bytes of memory"));
    let failure = if bound.skip { ", inputs that fail are left out" } else { "" };
    format!("unfinished batches: {batches}, rows of a batch: {size}{memory}{failure}")
}

/// Whose rows enter.
fn origins(plan: &Plan, inlet: &Inlet) -> String {
    let origins: Vec<String> = inlet
        .from
        .iter()
        .map(|origin| match origin {
            Origin::Source(number) => format!("source {}", plan.sources()[*number].name),
            Origin::Stage(number) => format!("stage {number}"),
        })
        .collect();
    origins.join(" and ")
}

/// What comes out of a join.
fn joined(join: &Join) -> String {
    let end = if join.within.is_some() { "" } else { " at the end of input" };
    match join.how {
        JoinHow::Inner => "pairs with".to_owned(),
        JoinHow::Semi => "left rows that meet any with".to_owned(),
        JoinHow::Anti => format!("left rows that meet none{end} with"),
        JoinHow::Full => format!("pairs, and rows of both sides that meet none{end}, with"),
        how => format!("pairs, and {} rows that meet none{end}, with", how.name()),
    }
}

/// What an operator with state does, and what it keeps.
pub(crate) fn operator(plan: &Plan, keyed: &KeyedSpec) -> (String, &'static str) {
    match &keyed.kind {
        KeyedKind::Window { windows: w, event_time, aggregates: aggs, .. } if aggs.is_empty() => {
            (format!("{} on {}: each once", windows(w), event_time.name), "keys per pane")
        }
        KeyedKind::Session { gap_us, event_time, aggregates: aggs } => (
            format!("sessions with gaps of {} on {}: {}", time(*gap_us), event_time.name, aggregates(keyed, aggs)),
            "accumulators per key and open session",
        ),
        KeyedKind::Running { emit: Emit::New, .. } => ("each when it first comes".into(), "keys, for ever"),
        KeyedKind::Window { windows: w, event_time, aggregates: aggs, .. } => (
            format!("{} on {}: {}", windows(w), event_time.name, aggregates(keyed, aggs)),
            "accumulators per key and pane",
        ),
        KeyedKind::Running { emit, aggregates: aggs } => (
            format!(
                "running, {}: {}",
                match emit {
                    Emit::Update => "changed keys at the end of each epoch",
                    Emit::Final if is_default(plan, keyed) =>
                        "all keys at the end, on a stream changed keys each epoch",
                    Emit::Final => "all keys at the end",
                    Emit::New => "new keys",
                },
                aggregates(keyed, aggs)
            ),
            "accumulators per key",
        ),
        KeyedKind::StatefulMap { call, ends: false, .. } => {
            (format!("call {call} ({})", keyed.name), "the function's, in input order")
        }
        KeyedKind::StatefulMap { call, ends: true, .. } => (
            format!("call {call} ({}), and at the end of each epoch", keyed.name),
            "the function's, in input order, with timers",
        ),
        KeyedKind::Aggregate { call, windows: of } => {
            let of = of.as_ref().map(|(of, column)| match of {
                Cut::Windows(of) => format!(", {} on {}", windows(of), column.name),
                Cut::Sessions(gap_us) => format!(", sessions with gaps of {} on {}", time(*gap_us), column.name),
            });
            (
                format!("call {call} ({}) per block{}", keyed.name, of.unwrap_or_default()),
                "the function's per key and window",
            )
        }
        KeyedKind::GroupState { call, late_by, .. } => {
            let late = late_by.as_ref().map_or(String::new(), |time| format!(", late by {}", time.name));
            (format!("call {call} ({}) once per key and epoch{late}", keyed.name), "the function's, with timeouts")
        }
        KeyedKind::Join(join) => {
            let [left, right] = &join.sides;
            let pairs = left.on.iter().zip(&right.on).map(|(one, other)| {
                format!("{} = {}", left.routed.field(*one).name(), right.routed.field(*other).name())
            });
            let mut words = format!("{} {}", joined(join), pairs.collect::<Vec<_>>().join(" and "));
            if join.once {
                words += ", at most one left row for a right row";
            }
            let times = [left, right].map(|side| side.time.as_ref().map_or("", |time| &time.name));
            let state = match (join.within, &join.windows) {
                (Some(_), Some(of)) => {
                    words += &format!(", {}", windows(of));
                    "the rows of both sides until their window closes"
                }
                (Some((lower, upper)), None) => match &join.until {
                    Some(until) => {
                        words += &format!(", {} from {} to before {}", times[1], times[0], until.name);
                        "left rows until then, right rows until the watermark has passed them"
                    }
                    None => {
                        words += &format!(", {} - {} from {} to {}", times[1], times[0], time(lower), time(upper));
                        "the rows of both sides until the watermark says that they meet none any more"
                    }
                },
                (None, _) if join.how.is_filter() => "left rows that have met none and one right row per key, for ever",
                (None, _) if join.once => "left rows, and right rows that have met none, for ever",
                (None, _) => "the rows of both sides, for ever",
            };
            (words, state)
        }
        KeyedKind::Top(top) => {
            let order = if top.descending { "greatest" } else { "least" };
            let by = keyed.routed.field(top.by).name();
            let per = match top.group.is_empty() {
                true => String::new(),
                false => format!(" per {}", names(&keyed.routed, &top.group)),
            };
            let assign = top.assign.as_ref().map_or(String::new(), |(w, _)| format!("{}: ", windows(w)));
            (format!("{assign}{order} {} by {by}{per}, with ties", top.n), "candidate rows per group")
        }
    }
}

/// The time between two windows, where it is any.
fn gaps(keyed: &KeyedSpec) -> Option<i64> {
    let windows = match &keyed.kind {
        KeyedKind::Window { windows, .. } | KeyedKind::Top(Top { assign: Some((windows, _)), .. }) => windows,
        KeyedKind::Aggregate { windows: Some((Cut::Windows(windows), _)), .. } => windows,
        KeyedKind::Join(join) => join.windows.as_ref()?,
        _ => return None,
    };
    Some(windows.every_us() - windows.size_us()).filter(|gap_us| *gap_us > 0)
}

/// By what rows go to the workers of an operator's inlet.
pub(crate) fn exchange(keyed: &KeyedSpec, side: usize) -> String {
    let (routed, keys) = match &keyed.kind {
        KeyedKind::Join(join) => (&join.sides[side].routed, &join.sides[side].on),
        _ => (&keyed.routed, &keyed.keys),
    };
    match keys.is_empty() {
        true => "all rows to one bin".into(),
        false => format!("by hash of {}", names(routed, keys)),
    }
}

pub(crate) fn explain(plan: &Plan) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let mut line = |words: String| writeln!(text, "{words}").unwrap_or_default();
    let several = plan.sources().len() > 1;
    let read = [false, true].map(|late| plan.reads(late));
    for (number, source) in plan.sources().iter().enumerate() {
        let name = if several { format!(" {}", source.name) } else { String::new() };
        line(format!("source{name}: {}", columns(&source.schema)));
        if let Some(event_time) = &source.event_time {
            line(format!("  event time {}, lateness {}", event_time.name, time(source.lateness_us)));
        }
        let [alone, late] = [0, 1].map(|at| &read[at][number][..]);
        if alone.len() < source.schema.fields().len() {
            let more = if late == alone {
                String::new()
            } else {
                format!("; where late rows are taken {}", names(&source.schema, late))
            };
            line(format!("  read: {}{more}", names(&source.schema, alone)));
        }
    }
    for (number, stage) in plan.stages().iter().enumerate() {
        for inlet in &stage.inlets {
            if !plan.is_line() {
                line(format!("stage {number}: rows of {}", origins(plan, inlet)));
            }
            chain(&inlet.pre, 0, &mut line);
        }
        let Some(keyed) = &stage.keyed else { continue };
        line(format!("exchange: {}", exchange(keyed, 0)));
        let (what, state) = operator(plan, keyed);
        line(format!("{}: {what}", keyed.step));
        let called = plan.spec().steps.get(keyed.step.index).and_then(|node| node.step.operator());
        let called = called.map_or(String::new(), |name| format!(" of {name}"));
        line(format!("  state{called}: {state}; in bins, movable"));
        if let Some(gap_us) = gaps(keyed) {
            line(format!("  gaps of {} between windows: rows in them are in no result, and not late", time(gap_us)));
        }
        line(format!("  output: {}", columns(&keyed.output)));
        sides(keyed.sides(), "  ", &mut line);
    }
    line(format!("output: {}", columns(plan.output_schema())));
    text
}
