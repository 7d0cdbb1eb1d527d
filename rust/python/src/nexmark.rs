//! NEXMark events as Arrow batches, deterministic for every event number.
//!
//! The events are those of the crate `nexmark` 0.2 (a port of Apache Beam's generator), with two corrections:
//!
//! * states are upper case, cities and names capitalized, as Beam writes them (the crate's lower case makes the usual
//!   Q3 filter find nothing);
//! * the crate computes timestamps through `f32`, which is wrong beyond about 2^24 events or milliseconds. Here event
//!   `n` is at exactly `base + round(1000 n / rate)` ms. The stream is cut into *spans* that start at a whole second
//!   and a multiple of 50 events; inside a span the crate counts from zero (identity comes from `first_event_id`), so
//!   its arithmetic stays far from the limit, and what it still rounds wrongly is replaced. Where the crate is
//!   exact, the events are the crate's, byte for byte.
//!
//! Event numbers run 0, 1, 2, ...; of each 50, the first is a person, three are auctions and 46 are bids. `seq` is the
//! position in arrival order; with `out_of_order = g > 1` each group of g events arrives in a fixed scrambled order (of the last group those before `stop`).
//!
//! It is in the extension because `penstock demo`, which has to run from an installed wheel, feeds NEXMark's bids (a million and a half a
//! second and thread), and a second generator in Python would be a second definition of them. It and `tokenize` take 0.65 % of the
//! extension (153 of 23,764 kB as `make setup` builds it) and seven small crates of 144 (`nexmark`, `lazy_static`, `getrandom` 0.2 and those of `rand`).

use std::sync::{Arc, Mutex};

use arrow_array::builder::{Int64Builder, StringBuilder};
use arrow_array::{ArrayRef, RecordBatch as Batch};
use arrow_schema::{DataType, Field, Schema};
use nexmark::EventGenerator;
use nexmark::config::NexmarkConfig;
use nexmark::event::{Event, EventType};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrow::RecordBatch;
use crate::errors::{self, Kind};
use crate::fork::Owner;

/// Persons, auctions and bids in every so many events.
const PATTERN: u64 = 50;
const MAX_RATE: u64 = 10_000_000;
/// Largest event number: ids, in units of a third of it, and times stay far inside 63 bits.
const MAX_EVENT: u64 = 1 << 53;

/// Where and how fast the events of one stream lie.
#[derive(Clone, Copy, Debug)]
struct Clock {
    rate: u64,
    base_ms: i64,
    span: u64,
}

impl Clock {
    fn new(rate: u64, base_ms: i64) -> Self {
        // The shortest run of events that is a multiple of the pattern and lasts whole seconds: at most 50 s.
        let unit = PATTERN / gcd(PATTERN, rate) * rate;
        let unit_ms = unit / rate * 1000;
        let repeat = (65_536 / unit).min(4_000_000 / unit_ms).max(1);
        let span = unit * repeat;
        let whole = span.is_multiple_of(PATTERN) && span.is_multiple_of(rate);
        assert!(whole, "a span of {span} events at {rate} per second starts odd");
        assert!(span / rate <= 4_100, "{span} events at {rate} per second: milliseconds in f32 lose a fraction");
        Self { rate, base_ms, span }
    }

    /// Exact time of event `number`, ms since 1970; halves round up, as the crate rounds.
    fn time_ms(&self, number: u64) -> i64 {
        let exact = (u128::from(number) * 2000 + u128::from(self.rate)) / (2 * u128::from(self.rate));
        self.base_ms + exact as i64 // < 2^53 * 1000 by the limits checked at construction
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The crate's generator, placed in the span of the last event asked for.
struct Source {
    clock: Clock,
    template: NexmarkConfig,
    span: Option<(u64, EventGenerator)>,
}

impl Source {
    fn new(clock: Clock) -> Self {
        let title = |names: Vec<String>| names.iter().map(|name| title_case(name)).collect();
        let default = NexmarkConfig::default();
        let template = NexmarkConfig {
            first_rate: clock.rate as usize,
            next_rate: clock.rate as usize,
            us_states: default.us_states.iter().map(|state| state.to_uppercase()).collect(),
            us_cities: title(default.us_cities.clone()),
            first_names: title(default.first_names.clone()),
            last_names: title(default.last_names.clone()),
            ..default
        };
        Self { clock, template, span: None }
    }

    /// Event `number`; the same whatever was asked before.
    fn event(&mut self, number: u64) -> Event {
        let start = number - number % self.clock.span;
        let generator = match self.span.take() {
            Some((at, generator)) if at == start => generator,
            _ => EventGenerator::new(NexmarkConfig {
                first_event_id: start as usize,
                base_time: 0,
                ..self.template.clone()
            }),
        };
        let offset = number - start;
        let mut generator = if generator.offset() == offset { generator } else { generator.with_offset(offset) };
        let event = generator.next().expect("the generator never ends");
        self.span = Some((start, generator));
        event
    }
}

fn title_case(text: &str) -> String {
    let mut start = true;
    text.chars()
        .map(|letter| {
            let shown = if start { letter.to_ascii_uppercase() } else { letter };
            start = letter == ' ';
            shown
        })
        .collect()
}

fn kind_of(number: u64) -> EventType {
    match number % PATTERN {
        0 => EventType::Person,
        1..=3 => EventType::Auction,
        _ => EventType::Bid,
    }
}

/// Columns of one table while they are filled: integers and strings in declared order.
struct Table {
    columns: Vec<(&'static str, Column)>,
    next: usize,
}

enum Column {
    Int(Int64Builder),
    Text(StringBuilder),
}

impl Table {
    fn new(rows: usize, columns: &[(&'static str, usize)]) -> Self {
        let columns = columns
            .iter()
            .map(|&(name, width)| match width {
                0 => (name, Column::Int(Int64Builder::with_capacity(rows))),
                width => (name, Column::Text(StringBuilder::with_capacity(rows, rows * width))),
            })
            .collect();
        Self { columns, next: 0 }
    }

    fn int(&mut self, value: i64) -> &mut Self {
        let at = self.advance();
        match &mut self.columns[at].1 {
            Column::Int(builder) => builder.append_value(value),
            Column::Text(_) => unreachable!("column {at} holds text"),
        }
        self
    }

    fn text(&mut self, value: &str) -> &mut Self {
        let at = self.advance();
        match &mut self.columns[at].1 {
            Column::Text(builder) => builder.append_value(value),
            Column::Int(_) => unreachable!("column {at} holds integers"),
        }
        self
    }

    fn advance(&mut self) -> usize {
        let at = self.next;
        self.next = (at + 1) % self.columns.len();
        at
    }

    fn finish(self) -> Batch {
        let mut fields = Vec::new();
        let mut arrays: Vec<ArrayRef> = Vec::new();
        for (name, column) in self.columns {
            let (kind, array): (_, ArrayRef) = match column {
                Column::Int(mut builder) => (DataType::Int64, Arc::new(builder.finish())),
                Column::Text(mut builder) => (DataType::Utf8, Arc::new(builder.finish())),
            };
            fields.push(Field::new(name, kind, true));
            arrays.push(array);
        }
        Batch::try_new(Arc::new(Schema::new(fields)), arrays).expect("every row filled every column")
    }
}

// Width 0: int64; otherwise a string of about that many bytes.
const PERSON: &[(&str, usize)] = &[
    ("seq", 0),
    ("id", 0),
    ("name", 12),
    ("email_address", 17),
    ("credit_card", 19),
    ("city", 9),
    ("state", 2),
    ("date_time", 0),
    ("extra", 130),
];
const AUCTION: &[(&str, usize)] = &[
    ("seq", 0),
    ("id", 0),
    ("item_name", 20),
    ("description", 100),
    ("initial_bid", 0),
    ("reserve", 0),
    ("date_time", 0),
    ("expires", 0),
    ("seller", 0),
    ("category", 0),
    ("extra", 340),
];
const BID: &[(&str, usize)] = &[
    ("seq", 0),
    ("auction", 0),
    ("bidder", 0),
    ("price", 0),
    ("channel", 10),
    ("url", 64),
    ("date_time", 0),
    ("extra", 70),
];

/// Which tables a call builds.
#[derive(Clone, Copy)]
struct Wanted {
    person: bool,
    auction: bool,
    bid: bool,
}

/// A position in the stream of arrivals.
struct Cursor {
    source: Source,
    next: u64,
    stop: u64,
    step: u64,
    out_of_order: u64,
}

impl Cursor {
    /// Which event arrives at a position. Each group has its own events, also the last one, which the end may cut short.
    fn number(&self, seq: u64) -> u64 {
        let begin = seq / self.out_of_order * self.out_of_order;
        let group = self.out_of_order.min(self.stop.saturating_sub(begin)).max(1);
        // With a factor of the group's size events would come again in place of others.
        let factor = [953, 947].into_iter().find(|factor| !group.is_multiple_of(*factor)).unwrap_or(941_u64);
        begin + ((u128::from(seq) * u128::from(factor)) % u128::from(group)) as u64
    }

    /// The next `count` arrivals of this cursor, split by table.
    fn take(&mut self, count: u64, wanted: Wanted) -> [Option<Batch>; 3] {
        let left = self.stop.saturating_sub(self.next).div_ceil(self.step);
        let count = count.min(left);
        let rows = |share: u64| (count * share / PATTERN + share) as usize;
        let mut person = wanted.person.then(|| Table::new(rows(1), PERSON));
        let mut auction = wanted.auction.then(|| Table::new(rows(3), AUCTION));
        let mut bid = wanted.bid.then(|| Table::new(rows(46), BID));
        for _ in 0..count {
            let seq = self.next;
            self.next += self.step;
            let number = self.number(seq);
            let skip = match kind_of(number) {
                EventType::Person => person.is_none(),
                EventType::Auction => auction.is_none(),
                EventType::Bid => bid.is_none(),
            };
            if skip {
                continue;
            }
            let (seq, at) = (seq as i64, self.source.clock.time_ms(number));
            match self.source.event(number) {
                Event::Person(event) => {
                    let table = person.as_mut().expect("skipped otherwise");
                    table.int(seq).int(event.id as i64).text(&event.name).text(&event.email_address);
                    table.text(&event.credit_card).text(&event.city).text(&event.state).int(at).text(&event.extra);
                }
                Event::Auction(event) => {
                    let table = auction.as_mut().expect("skipped otherwise");
                    let open_ms = (event.expires - event.date_time) as i64;
                    table.int(seq).int(event.id as i64).text(&event.item_name).text(&event.description);
                    table.int(event.initial_bid as i64).int(event.reserve as i64).int(at).int(at + open_ms);
                    table.int(event.seller as i64).int(event.category as i64).text(&event.extra);
                }
                Event::Bid(event) => {
                    let table = bid.as_mut().expect("skipped otherwise");
                    table.int(seq).int(event.auction as i64).int(event.bidder as i64).int(event.price as i64);
                    table.text(&event.channel).text(&event.url).int(at).text(&event.extra);
                }
            }
        }
        [person, auction, bid].map(|table| table.map(Table::finish))
    }
}

/// NEXMark events in arrival order, as record batches.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Nexmark {
    owner: Owner,
    cursor: Mutex<Cursor>,
}

#[pymethods]
impl Nexmark {
    #[new]
    #[pyo3(signature = (
        events_per_second=250, base_time_ms=1_436_918_400_000, *, start=0, stop=None, step=1, out_of_order=1
    ))]
    fn new(
        events_per_second: u64,
        base_time_ms: i64,
        start: u64,
        stop: Option<u64>,
        step: u64,
        out_of_order: u64,
    ) -> PyResult<Self> {
        let stop = stop.unwrap_or(MAX_EVENT);
        let refuse = |message: String| Err(errors::raise(Kind::Value, &message));
        if !(1..=MAX_RATE).contains(&events_per_second) {
            return refuse(format!("events_per_second must be in 1..={MAX_RATE}, got {events_per_second}"));
        }
        if start > MAX_EVENT || stop > MAX_EVENT {
            return refuse(format!("start and stop must be at most 2**53, got {start} and {stop}"));
        }
        if step == 0 || step > MAX_EVENT || out_of_order == 0 || out_of_order > 1 << 32 {
            return refuse(format!(
                "step and out_of_order must be at least 1 (and out_of_order at most 2**32), got {step} and \
                 {out_of_order}"
            ));
        }
        if base_time_ms.unsigned_abs() > 1 << 60 {
            return refuse(format!("base_time_ms must be at most 2**60, got {base_time_ms}"));
        }
        let source = Source::new(Clock::new(events_per_second, base_time_ms));
        let cursor = Mutex::new(Cursor { source, next: start, stop, step, out_of_order });
        Ok(Self { owner: Owner::here(), cursor })
    }

    /// Position of the next event in arrival order.
    #[getter]
    fn position(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |cursor| cursor.next)
    }

    /// The next `n` events as ``{"person": batch, "auction": batch, "bid": batch}``; fewer at `stop`.
    #[pyo3(signature = (n, tables=None))]
    fn next_batches<'py>(&self, py: Python<'py>, n: u64, tables: Option<Vec<String>>) -> PyResult<Bound<'py, PyDict>> {
        let mut wanted = Wanted { person: true, auction: true, bid: true };
        if let Some(tables) = tables {
            wanted = Wanted { person: false, auction: false, bid: false };
            for table in &tables {
                match table.as_str() {
                    "person" => wanted.person = true,
                    "auction" => wanted.auction = true,
                    "bid" => wanted.bid = true,
                    _ => {
                        let message = format!("tables are person, auction and bid, not {table:?}");
                        return Err(errors::raise(Kind::Value, &message));
                    }
                }
            }
        }
        // The texts of more do not fit into a column.
        if n > 10_000_000 {
            return Err(errors::raise(Kind::Value, &format!("at most 10000000 events at a time, not {n}")));
        }
        let batches = self.with(py, |cursor| cursor.take(n, wanted))?;
        let result = PyDict::new(py);
        for (name, batch) in ["person", "auction", "bid"].into_iter().zip(batches) {
            if let Some(batch) = batch {
                result.set_item(name, RecordBatch::new(batch).into_pyobject(py)?)?;
            }
        }
        Ok(result)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("Nexmark", "make one with the same arguments and start=position"))
    }
}

impl Nexmark {
    fn with<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Cursor) -> T + Send) -> PyResult<T> {
        self.owner.check(py, "Nexmark")?;
        // The lock is taken and released while detached: nothing waits for it holding the interpreter.
        py.detach(|| self.cursor.lock().map(|mut cursor| work(&mut cursor)).map_err(|_| ()))
            .map_err(|()| errors::raise(Kind::Engine, "this Nexmark generator is broken by an earlier panic"))
    }
}
