//! A table beside a map: keys with and without a position, growth, undo, lists of changes, and moves in chunks.

use std::collections::{BTreeMap, BTreeSet};

use arrow_buffer::NullBuffer;
use proptest::prelude::*;
use smallvec::smallvec;

use super::*;
use crate::acc::Kind;
use crate::bytes::ByteColumn;
use crate::column::Codes;
use crate::hash::{NULL_HASH, hash_bytes, hash_int, unhash_int};
use crate::key::KeyKind;
use crate::record::Records;
use crate::wire::Reader;

/// Keys by number; 0 is the null. The next two are those whose hashes are 0 and that of the null.
fn int(key: u16) -> Option<i64> {
    match key {
        0 => None,
        1 => Some(unhash_int(0)),
        2 => Some(unhash_int(NULL_HASH)),
        _ => Some(i64::from(key)),
    }
}

#[derive(Clone, Debug)]
enum Deed {
    Add(Vec<(u16, i64)>),
    Settle,
    Mark,
    Rollback,
    /// Through chunks of at most so many bytes.
    Move(usize),
}

fn deed() -> impl Strategy<Value = Deed> {
    let rows = |keys: u16, most: usize| prop::collection::vec((0..keys, -5i64..5), 0..most);
    prop_oneof![
        4 => rows(12, 30).prop_map(Deed::Add),
        2 => rows(400, 300).prop_map(Deed::Add),
        1 => Just(Deed::Settle),
        2 => Just(Deed::Mark),
        2 => Just(Deed::Rollback),
        1 => (0usize..2_000).prop_map(Deed::Move),
    ]
}

/// Count, sum, greatest text.
type Group = (u64, i64, String);

#[derive(Clone, Default)]
struct Twin {
    groups: BTreeMap<u16, Group>,
    changed: BTreeSet<u16>,
}

fn text(value: i64) -> String {
    "x".repeat((value + 5) as usize)
}

struct Rig {
    shape: Shape,
    table: Table,
    scratch: Scratch,
}

impl Rig {
    fn new(key: KeyKind) -> Self {
        let accs = smallvec![Kind::Rows, Kind::Int { unsigned: false }, Kind::Bytes { greatest: true }];
        let shape = Shape { key, accs, track: true };
        Self { table: Table::new(&shape), shape, scratch: Scratch::default() }
    }

    fn add(&mut self, rows: &[(u16, i64)]) {
        let nulls = Some(NullBuffer::from_iter(rows.iter().map(|row| row.0 != 0)));
        let names = arrow_array::StringArray::from_iter_values(rows.iter().map(|row| row.0.to_string()));
        let (keys, hashes): (_, Vec<u64>) = match self.shape.key {
            KeyKind::Bytes => (
                Keys::Bytes(ByteColumn::of(&names).unwrap(), nulls),
                rows.iter()
                    .map(|row| if row.0 < 3 { NULL_HASH } else { hash_bytes(row.0.to_string().as_bytes()) })
                    .collect(),
            ),
            _ => (Keys::Int(nulls), rows.iter().map(|row| int(row.0).map_or(NULL_HASH, hash_int)).collect()),
        };
        let values = rows.iter().map(|row| row.1).collect();
        let texts = arrow_array::StringArray::from_iter_values(rows.iter().map(|row| text(row.1)));
        let inputs = [
            Input::Rows,
            Input::Int(Codes { values, nulls: None }),
            Input::Bytes(ByteColumn::of(&texts).unwrap(), None),
        ];
        let numbers: Vec<u32> = (0..rows.len() as u32).collect();
        let done = self.table.update(&self.shape, &keys, &inputs, &hashes, &numbers, &mut self.scratch);
        assert!(done.is_ok());
    }

    fn moved(&mut self, limit: usize) {
        let mut copy = Table::new(&self.shape);
        for positions in self.table.cut(limit) {
            let mut chunk = Vec::new();
            self.table.encode(positions, None, &mut chunk);
            let before = (copy.len(), copy.changed().len());
            assert!(copy.absorb(&self.shape, &mut Reader::new(&chunk[..chunk.len() - 1])).is_err());
            assert_eq!((copy.len(), copy.changed().len()), before);
            copy.absorb(&self.shape, &mut Reader::new(&chunk)).unwrap();
            assert!(copy.absorb(&self.shape, &mut Reader::new(&chunk)).is_err(), "keys twice");
        }
        assert_eq!(copy.len(), self.table.len());
        if self.table.undo.is_some() {
            copy.mark();
        }
        self.table = copy;
    }

    fn read(&self, positions: impl Iterator<Item = usize>) -> BTreeMap<u16, Group> {
        let mut records = Records::new(&self.shape);
        positions.for_each(|position| records.push(&self.shape, &self.table, position));
        let offsets: Vec<usize> = self.shape.accs().map(|(_, at)| at).collect();
        let column = |at: usize| records.column(at).collect::<Vec<_>>();
        let (hash, n, low, best) = (column(0), column(offsets[0]), column(offsets[1] + 1), column(offsets[2] + 1));
        let mut groups = BTreeMap::new();
        for row in 0..records.len() {
            let key = match self.shape.key {
                _ if records.nulls.contains(&(row as u32)) => 0,
                KeyKind::Bytes => std::str::from_utf8(records.keys.get(row)).unwrap().parse().unwrap(),
                _ => {
                    (1..3).find(|&odd| int(odd) == Some(unhash_int(hash[row]))).unwrap_or(unhash_int(hash[row]) as u16)
                }
            };
            let best = String::from_utf8(records.blob(best[row]).to_vec()).unwrap();
            assert_eq!(groups.insert(key, (n[row], low[row] as i64, best)), None, "key {key} twice");
        }
        groups
    }
}

fn equals_a_map(key: KeyKind, deeds: Vec<Deed>) {
    let mut rig = Rig::new(key);
    let mut now = Twin::default();
    let mut marked: Option<Twin> = None;
    for deed in deeds {
        match deed {
            Deed::Add(rows) => {
                rig.add(&rows);
                for (key, value) in rows {
                    let group = now.groups.entry(key).or_default();
                    *group = (group.0 + 1, group.1 + value, text(value).max(std::mem::take(&mut group.2)));
                    now.changed.insert(key);
                }
            }
            Deed::Settle => {
                rig.table.settle();
                now.changed.clear();
            }
            Deed::Mark => {
                rig.table.mark();
                marked = Some(now.clone());
            }
            Deed::Rollback => {
                rig.table.rollback();
                now = marked.clone().unwrap_or(now);
            }
            Deed::Move(limit) => {
                rig.moved(limit);
                marked = marked.map(|_| now.clone());
            }
        }
        assert_eq!(rig.read(rig.table.taken()), now.groups);
        assert_eq!(rig.table.len(), now.groups.len());
        let changed = rig.read(rig.table.changed().iter().map(|&position| position as usize));
        assert_eq!(changed.into_keys().collect::<BTreeSet<_>>(), now.changed);
        // Merging into another table gives the same groups; what is there already is added up.
        let mut other = Rig::new(key);
        other.add(&[(0, 1), (1, 1), (2, 1), (7, 1)]);
        other.table.merge(&other.shape, &rig.table, &mut other.scratch).ok().unwrap();
        let mut expected = now.groups.clone();
        for key in [0, 1, 2, 7] {
            let group = expected.entry(key).or_default();
            *group = (group.0 + 1, group.1 + 1, text(1).max(std::mem::take(&mut group.2)));
        }
        assert_eq!(other.read(other.table.taken()), expected);
    }
}

proptest! {
    #![proptest_config(penstock_cases::cases(100))]

    #[test]
    fn integers(deeds in prop::collection::vec(deed(), 1..20)) {
        equals_a_map(KeyKind::Int, deeds);
    }

    #[test]
    fn texts(deeds in prop::collection::vec(deed(), 1..20)) {
        equals_a_map(KeyKind::Bytes, deeds);
    }
}

/// A value that gives way between marks is kept for the undo only, not for ever.
#[test]
fn byte_values_do_not_pile_up() {
    let mut rig = Rig::new(KeyKind::Int);
    for round in 0..1_000 {
        rig.add(&[(5, round % 10 - 5)]);
        rig.add(&[(6 + round as u16 % 4, round % 10 - 5)]);
        rig.table.mark();
    }
    assert!(rig.table.heap().blobs.len() < 100, "{}", rig.table.heap().blobs.len());
    assert!(rig.table.bytes() < 20_000, "{}", rig.table.bytes());
}
