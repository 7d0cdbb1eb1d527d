//! The events of `nexmark` as both sides take them, and what their answers are compared by.
//!
//! Owns: reading the three tables from Arrow files, cutting them into epochs of event time (blocks of Arrow for us, plain structs of the
//! columns that queries use for the peer), and a checksum of rows that does not depend on their order. Invariant: both sides get the same
//! events in the same epochs, and only of the tables that the query reads.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::FileReader;
use arrow_schema::DataType;
use arrow_select::concat::concat_batches;
use serde::{Deserialize, Serialize};

/// The tables, in the order in which their epochs are.
pub(crate) const TABLES: [&str; 3] = ["person", "auction", "bid"];

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Bid {
    pub(crate) auction: i64,
    pub(crate) bidder: i64,
    pub(crate) price: i64,
    pub(crate) at: i64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Auction {
    pub(crate) id: i64,
    pub(crate) seller: i64,
    pub(crate) category: i64,
    pub(crate) reserve: i64,
    pub(crate) at: i64,
    pub(crate) expires: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Person {
    pub(crate) id: i64,
    pub(crate) name: String,
    pub(crate) city: String,
    pub(crate) state: String,
    pub(crate) at: i64,
}

/// Events of one epoch as plain structs, in the order of their time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plain {
    pub(crate) people: Vec<Person>,
    pub(crate) auctions: Vec<Auction>,
    pub(crate) bids: Vec<Bid>,
}

/// All events, sorted by time.
#[derive(Debug)]
pub(crate) struct Events {
    tables: [RecordBatch; 3],
    /// Event time at which the first epoch begins, and how long each is, ms.
    pub(crate) begin: i64,
    pub(crate) epoch_ms: i64,
    /// For each table the rows of each epoch.
    epochs: [Vec<Range<usize>>; 3],
}

impl Events {
    /// Reads `person.arrow`, `auction.arrow` and `bid.arrow` of a folder.
    ///
    /// # Errors
    /// What is wrong with which file.
    pub(crate) fn read(folder: &Path, epoch_ms: i64) -> Result<Self, String> {
        let [person, auction, bid] = TABLES.map(|table| read(&folder.join(format!("{table}.arrow"))));
        let tables = [person?, auction?, bid?];
        let times = |table: &RecordBatch| -> Result<Vec<i64>, String> {
            let column = table.column_by_name("date_time").ok_or("a table has no date_time")?;
            let times = column.as_primitive_opt::<Int64Type>().ok_or("date_time is not int64")?.values().to_vec();
            if times.is_sorted() { Ok(times) } else { Err("the rows are not in the order of date_time".into()) }
        };
        let all = [times(&tables[0])?, times(&tables[1])?, times(&tables[2])?];
        let first = all.iter().filter_map(|times| times.first()).min().ok_or("there are no events")?;
        let last = all.iter().filter_map(|times| times.last()).max().expect("there is a first one");
        let begin = first.div_euclid(epoch_ms) * epoch_ms;
        let count = (last - begin) / epoch_ms + 1;
        let epochs = all.map(|times| {
            let upto = |epoch: i64| times.partition_point(|&time| time < begin + epoch * epoch_ms);
            (0..count).map(|epoch| upto(epoch)..upto(epoch + 1)).collect()
        });
        Ok(Self { tables, begin, epoch_ms, epochs })
    }

    pub(crate) fn epochs(&self) -> usize {
        self.epochs[0].len()
    }

    /// How many there are of a table.
    pub(crate) fn rows(&self, table: usize) -> usize {
        self.tables[table].num_rows()
    }

    /// The blocks of a table, one for each epoch, of these columns.
    ///
    /// # Errors
    /// The column that is not there.
    pub(crate) fn blocks(&self, table: usize, columns: &[String]) -> Result<Vec<RecordBatch>, String> {
        let schema = self.tables[table].schema();
        let at = columns.iter().map(|name| schema.index_of(name).map_err(|error| error.to_string()));
        let at = at.collect::<Result<Vec<_>, _>>()?;
        let chosen = self.tables[table].project(&at).map_err(|error| error.to_string())?;
        Ok(self.epochs[table].iter().map(|rows| chosen.slice(rows.start, rows.len())).collect())
    }

    /// Greatest event time of a table's rows up to the end of each epoch; none before the first row.
    pub(crate) fn latest(&self, table: usize) -> Vec<Option<i64>> {
        let times = ints(&self.tables[table], "date_time");
        self.epochs[table].iter().map(|rows| rows.end.checked_sub(1).map(|last| times[last])).collect()
    }

    /// The epochs as plain structs, of the tables that are asked for.
    pub(crate) fn plain(&self, reads: [bool; 3]) -> Vec<Plain> {
        let [people, auctions, bids] = &self.tables;
        let text = |name: &str| people.column_by_name(name).expect("the tables are whole").as_string::<i32>();
        let (name, city, state) = (text("name"), text("city"), text("state"));
        let (id, joined) = (ints(people, "id"), ints(people, "date_time"));
        let person = |row: usize| Person {
            id: id[row],
            name: name.value(row).into(),
            city: city.value(row).into(),
            state: state.value(row).into(),
            at: joined[row],
        };
        let auction = ["id", "seller", "category", "reserve", "date_time", "expires"].map(|name| ints(auctions, name));
        let auction = |row: usize| {
            let [id, seller, category, reserve, at, expires] = auction.map(|column| column[row]);
            Auction { id, seller, category, reserve, at, expires }
        };
        let bid = ["auction", "bidder", "price", "date_time"].map(|name| ints(bids, name));
        let bid = |row: usize| {
            let [auction, bidder, price, at] = bid.map(|column| column[row]);
            Bid { auction, bidder, price, at }
        };
        let rows = |table: usize, epoch: usize| if reads[table] { self.epochs[table][epoch].clone() } else { 0..0 };
        let epoch = |epoch: usize| Plain {
            people: rows(0, epoch).map(person).collect(),
            auctions: rows(1, epoch).map(auction).collect(),
            bids: rows(2, epoch).map(bid).collect(),
        };
        (0..self.epochs()).map(epoch).collect()
    }
}

fn read(path: &Path) -> Result<RecordBatch, String> {
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let file = File::open(path).map_err(|error| told(&error))?;
    let reader = FileReader::try_new(file, None).map_err(|error| told(&error))?;
    let schema = reader.schema();
    let batches = reader.collect::<Result<Vec<_>, _>>().map_err(|error| told(&error))?;
    concat_batches(&schema, &batches).map_err(|error| told(&error))
}

pub(crate) fn ints<'a>(batch: &'a RecordBatch, name: &str) -> &'a [i64] {
    batch.column_by_name(name).expect("a column of the query").as_primitive::<Int64Type>().values()
}

/// How many rows came out, and the sum of their hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) rows: u64,
    pub(crate) sum: u64,
}

impl Answer {
    /// Takes a row in by the words of its cells.
    pub(crate) fn add(&mut self, cells: impl IntoIterator<Item = u64>) {
        let hash = cells.into_iter().fold(0x1234_5678_u64, |hash, cell| {
            let hash = (hash ^ cell).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            hash ^ (hash >> 29)
        });
        *self = Self { rows: self.rows + 1, sum: self.sum.wrapping_add(hash) };
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self { rows: self.rows + other.rows, sum: self.sum.wrapping_add(other.sum) }
    }

    /// Of blocks of integers and strings.
    pub(crate) fn of(blocks: &[RecordBatch]) -> Self {
        let mut answer = Self::default();
        for block in blocks {
            let columns = block.columns().iter().map(|column| {
                assert_eq!(column.null_count(), 0, "NEXMark has no nulls");
                match column.data_type() {
                    DataType::Int64 => column.as_primitive::<Int64Type>().values().iter().map(|v| *v as u64).collect(),
                    DataType::Utf8 => column.as_string::<i32>().iter().flatten().map(word).collect::<Vec<_>>(),
                    other => panic!("NEXMark has no {other}"),
                }
            });
            let columns: Vec<Vec<u64>> = columns.collect();
            (0..block.num_rows()).for_each(|row| answer.add(columns.iter().map(|column| column[row])));
        }
        answer
    }
}

/// The word of a string.
pub(crate) fn word(text: &str) -> u64 {
    text.bytes().fold(7, |word: u64, byte| word.wrapping_mul(31).wrapping_add(byte.into()))
}
