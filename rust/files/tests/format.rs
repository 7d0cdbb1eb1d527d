//! Files as they are written and read: golden ones stay readable, damaged ones are refused, many are one.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;

use penstock_files::{ChunkWriter, Damage, Entry, File, FileError, Range, ReadAt, Segment, merge, select, write};
use proptest::prelude::*;

const GOLDEN: &[u8] = include_bytes!("data/version-1");

fn chunk(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut writer = ChunkWriter::new(b"P\x01");
    entries.iter().for_each(|entry| writer.push(*entry));
    writer.finish()
}

fn segment(operator: &str, range: Range, base: bool, chunks: Vec<Vec<u8>>) -> Segment {
    Segment { operator: operator.into(), range, base, chunks }
}

fn bytes(segments: Vec<Segment>) -> Vec<u8> {
    let mut writing = write(segments.into_iter().map(Ok::<_, Infallible>));
    assert_eq!(writing.summary(), None);
    let bytes = writing.by_ref().map(Result::unwrap).collect::<Vec<_>>().concat();
    let summary = writing.summary().unwrap();
    assert_eq!((summary.length, summary.checksum), (bytes.len() as u64, crc32fast::hash(&bytes)));
    bytes
}

/// What the golden file holds.
fn known() -> Vec<Segment> {
    let [low, high] = Range::ALL.split().unwrap();
    let top = 1 << 63;
    vec![
        segment(
            "count",
            low,
            true,
            vec![
                chunk(&[Entry::Shared { value: b"10" }, Entry::Put { hash: 1, key: b"a", value: b"1" }]),
                chunk(&[Entry::Put { hash: 2, key: b"", value: &[7; 200] }]),
            ],
        ),
        segment(
            "count",
            high,
            false,
            vec![chunk(&[Entry::GoneAll { prefix: b"b" }, Entry::Gone { hash: top, key: b"c" }])],
        ),
        segment("größte", Range::ALL, false, vec![chunk(&[Entry::Put { hash: top | 5, key: b"k", value: b"" }])]),
    ]
}

/// Run with `PENSTOCK_GOLDEN=1` to write the file of a new version; those of old ones stay.
#[test]
fn version_1_stays_readable() {
    if std::env::var_os("PENSTOCK_GOLDEN").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/version-1"), bytes(known())).unwrap();
    }
    let file = File::open("version-1", GOLDEN).unwrap();
    for (at, segment) in known().into_iter().enumerate() {
        let placed = &file.segments()[at];
        assert_eq!((&*placed.operator, placed.range, placed.base), (&*segment.operator, segment.range, segment.base));
        assert_eq!(file.chunks(at).collect::<Result<Vec<_>, _>>().unwrap(), segment.chunks);
        assert_eq!(placed.length(), segment.chunks.concat().len() as u64);
    }
    assert_eq!(file.segments().len(), 3);
    assert_eq!(file.checksum(), crc32fast::hash(GOLDEN), "of all, by the index alone");
    let empty = bytes(Vec::new());
    assert_eq!(File::open("empty", &empty[..]).unwrap().checksum(), crc32fast::hash(&empty));
    assert_eq!(bytes(known()), GOLDEN, "this release writes version 1");
}

#[test]
fn a_selection_tells_the_file_of_each_chunk() {
    let [low, _] = Range::ALL.split().unwrap();
    let put = |value| chunk(&[Entry::Put { hash: 1, key: b"k", value }]);
    let file = |name: &str, range, value| {
        File::open(name, bytes(vec![segment("count", range, false, vec![put(value)])])).unwrap()
    };
    let files = [file("older", Range::ALL, b"1"), file("newer", Range::ALL, b"2")];
    let mut chunks = select(&files, "count", low);
    assert_eq!(chunks.file(), None);
    for (name, value) in [("older", b"1"), ("newer", b"2")] {
        assert_eq!((chunks.next().unwrap().unwrap(), chunks.file()), (put(value), Some(name)));
    }
    // Where they have to be merged, the newest.
    let files = [file("older", low, b"1"), file("newer", low, b"2")];
    let mut chunks = select(&files, "count", Range::ALL);
    assert_eq!((chunks.next().unwrap().unwrap(), chunks.file()), (put(b"2"), Some("newer")));
}

/// Everything that a file says, or why it does not.
fn read<R: ReadAt>(source: R) -> Result<Vec<Segment>, FileError> {
    let file = File::open("file", source)?;
    let segment = |(at, placed): (usize, &penstock_files::Placed)| {
        let chunks = file.chunks(at).collect::<Result<Vec<_>, _>>()?;
        Ok(segment(&placed.operator, placed.range, placed.base, chunks))
    };
    file.segments().iter().enumerate().map(segment).collect()
}

#[test]
fn every_cut_and_every_changed_byte_is_refused_by_name() {
    for cut in 0..GOLDEN.len() {
        assert!(matches!(read(&GOLDEN[..cut]), Err(FileError::Damage { name, .. }) if name == "file"), "cut at {cut}");
    }
    for at in 0..GOLDEN.len() {
        for bit in 0..8 {
            let mut changed = GOLDEN.to_vec();
            changed[at] ^= 1 << bit;
            assert!(matches!(read(changed), Err(FileError::Damage { .. })), "bit {bit} of byte {at}");
        }
    }
    assert!(read([GOLDEN, b"x"].concat()).is_err());
    let damage = |bytes: &[u8]| match read(bytes).unwrap_err() {
        FileError::Damage { damage, .. } => damage,
        other => panic!("{other}"),
    };
    assert_eq!(damage(b"a parquet file, surely, of some length"), Damage::Foreign);
    assert_eq!(damage(b""), Damage::Foreign);
    let mut newer = GOLDEN.to_vec();
    newer[8] = 2;
    assert_eq!(damage(&newer), Damage::Newer { found: 2 });
}

/// Storage that breaks its promises.
struct Short(Vec<u8>, u64);

impl ReadAt for Short {
    fn length(&self) -> io::Result<u64> {
        Ok(self.1)
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        assert!(length as u64 <= self.1, "nothing is asked for that is not announced");
        let from = self.0.len().min(offset as usize);
        Ok(self.0[from..self.0.len().min(from + length)].to_vec())
    }
}

#[test]
fn storage_that_gives_too_little_or_nothing_is_named() {
    for length in [GOLDEN.len() as u64 + 1, u64::MAX, 20] {
        assert!(matches!(read(Short(GOLDEN.to_vec(), length)), Err(FileError::Damage { .. })), "{length}");
    }
    struct Down;
    impl ReadAt for Down {
        fn length(&self) -> io::Result<u64> {
            Err(io::ErrorKind::ConnectionReset.into())
        }
        fn read_at(&self, _: u64, _: usize) -> io::Result<Vec<u8>> {
            unreachable!()
        }
    }
    assert!(matches!(read(Down), Err(FileError::Read { name, .. }) if name == "file"));
}

#[test]
fn a_failure_of_the_segments_ends_a_file() {
    let mut writing = write([Ok(known().remove(0)), Err("the state is gone")]);
    assert_eq!(writing.by_ref().find_map(Result::err), Some("the state is gone"));
    assert_eq!(writing.summary(), None);
}

#[test]
fn other_shapes_and_keys_of_other_ranges_are_refused() {
    let [low, high] = Range::ALL.split().unwrap();
    let put = Entry::Put { hash: 1, key: b"a", value: b"1" };
    let stray = [File::open("stray", bytes(vec![segment("op", high, false, vec![chunk(&[put])])])).unwrap()];
    let refused = |read: Result<Vec<u8>, FileError>| read.unwrap_err().to_string();
    assert!(refused(select(&stray, "op", high).next().unwrap()).contains("stray"));
    assert!(select(&stray, "op", low).next().is_none() && select(&stray, "other", high).next().is_none());
    assert!(merge(&stray).next().unwrap().is_err());
    let mut other = ChunkWriter::new(b"T\x01");
    other.push(put);
    let files =
        [vec![chunk(&[put])], vec![other.finish()]].map(|chunks| bytes(vec![segment("op", low, false, chunks)]));
    let files = files.map(|bytes| File::open("shapes", bytes).unwrap());
    let told = merge(&files).next().unwrap().unwrap_err().to_string();
    assert!(told.contains("\"op\" in another shape"), "{told}");
}

/// Two bits of a key's hash choose its range, the rest of it is the key.
fn hash(key: u8) -> u64 {
    u64::from(key).reverse_bits()
}

#[derive(Clone, Debug)]
enum Deed {
    Put(u8, u8),
    Gone(u8),
    /// All keys whose bytes begin with this digit.
    GoneAll(u8),
    Share(u8),
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        4 => (0u8..40, any::<u8>()).prop_map(|(key, value)| Deed::Put(key, value)),
        2 => (0u8..40).prop_map(Deed::Gone),
        1 => (0u8..4).prop_map(Deed::GoneAll),
        1 => any::<u8>().prop_map(Deed::Share),
    ]
}

/// A key's bytes: its last digit first.
fn name(key: u8) -> [u8; 2] {
    [key % 4, key / 4]
}

type Twin = BTreeMap<u8, u8>;

fn forget(twin: &mut Twin, digit: u8, range: Range) {
    twin.retain(|key, _| key % 4 != digit || !range.contains(hash(*key)));
}

fn told(chunks: impl Iterator<Item = Result<Vec<u8>, FileError>>, range: Range) -> (Twin, Option<u8>) {
    let (mut twin, mut shared) = (Twin::new(), None);
    for chunk in chunks.map(Result::unwrap) {
        for entry in penstock_files::Chunk::parse(&chunk).unwrap().entries() {
            match entry.unwrap() {
                Entry::Put { hash: hashed, key, value } => {
                    let key = key[1] * 4 + key[0];
                    assert!(range.contains(hashed) && hashed == hash(key));
                    twin.insert(key, value[0]);
                }
                Entry::Gone { key, .. } => _ = twin.remove(&(key[1] * 4 + key[0])),
                Entry::GoneAll { prefix } => forget(&mut twin, prefix[0], range),
                Entry::Shared { value } => shared = Some(value[0]),
            }
        }
    }
    (twin, shared)
}

proptest! {
    /// Files of deltas and bases of ranges of mixed lengths, beside a map of all keys.
    #[test]
    fn many_files_are_one(files in prop::collection::vec(prop::collection::vec(
        ((0u8..3, 0u32..4), prop::bool::weighted(0.1), prop::collection::vec(deed(), 1..8)), 0..4), 0..6),
    ) {
        let mut twin = Twin::new();
        let mut made = Vec::new();
        for (at, segments) in files.iter().enumerate() {
            let mut written = Vec::new();
            for ((length, prefix), base, deeds) in segments {
                let range = Range::new(prefix >> (2 - length), *length).unwrap();
                if *base {
                    twin.retain(|key, _| !range.contains(hash(*key)));
                }
                let mut writer = ChunkWriter::new(b"P\x01");
                for deed in deeds {
                    match deed {
                        Deed::Put(key, value) if range.contains(hash(*key)) => {
                            twin.insert(*key, *value);
                            writer.push(Entry::Put { hash: hash(*key), key: &name(*key), value: &[*value] });
                        }
                        Deed::Gone(key) if range.contains(hash(*key)) => {
                            twin.remove(key);
                            writer.push(Entry::Gone { hash: hash(*key), key: &name(*key) });
                        }
                        Deed::GoneAll(digit) => {
                            forget(&mut twin, *digit, range);
                            writer.push(Entry::GoneAll { prefix: &[*digit] });
                        }
                        Deed::Share(value) => writer.push(Entry::Shared { value: &[*value] }),
                        Deed::Put(..) | Deed::Gone(_) => {}
                    }
                }
                written.push(segment("op", range, *base, vec![writer.finish()]));
            }
            made.push(File::open(format!("file {at}"), bytes(written)).unwrap());
        }
        let merged = merge(&made).collect::<Result<Vec<_>, _>>().unwrap();
        for pair in merged.windows(2) {
            prop_assert!(!pair[0].range.intersects(pair[1].range) && pair[0].range.first() < pair[1].range.first());
        }
        prop_assert!(merged.iter().all(|segment| segment.base));
        let one = [File::open("merged", bytes(merged)).unwrap()];
        for length in 0..4 {
            for prefix in 0..1 << length {
                let range = Range::new(prefix, length).unwrap();
                let expected: Twin =
                    twin.iter().filter(|(key, _)| range.contains(hash(**key))).map(|(k, v)| (*k, *v)).collect();
                let shared = told(select(&made, "op", range), range);
                prop_assert_eq!(&shared.0, &expected, "{} of all", range);
                prop_assert_eq!(&told(select(&one, "op", range), range).0, &expected, "{} of one", range);
            }
        }
    }

    /// What passes the checksum of the index is still not trusted.
    #[test]
    fn wrong_indices_with_right_checksums_are_refused(changes in prop::collection::vec((any::<usize>(), any::<u8>()), 1..4)) {
        let at = GOLDEN.len() - 12;
        let index = u64::from_le_bytes(GOLDEN[at..at + 8].try_into().unwrap()) as usize;
        let mut changed = GOLDEN.to_vec();
        for (place, byte) in changes {
            changed[at - index + place % (index + 8)] = byte;
        }
        let tail = u64::from_le_bytes(changed[at..at + 8].try_into().unwrap());
        if tail <= at as u64 - 11 {
            let sum = crc32fast::hash(&[&changed[..11], &changed[at - tail as usize..at + 8]].concat());
            changed[at + 8..].copy_from_slice(&sum.to_le_bytes());
        }
        if let Ok(file) = File::open("changed", &changed) {
            let total: u64 = file.segments().iter().map(penstock_files::Placed::length).sum();
            prop_assert!(total <= changed.len() as u64);
            for segment in 0..file.segments().len() {
                _ = file.chunks(segment).count();
            }
        }
    }

    #[test]
    fn any_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(read(&bytes).is_err());
        let framed = [&GOLDEN[..11], &bytes].concat();
        _ = read(framed);
    }
}
