//! Index files whose checksum is right and whose structure is not: what a file could be made to say, or a bug could write.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use penstock_graph::crew::{self, Crew};
use penstock_graph::{Builder, GraphError, Index, Loops, Pattern, Query, Repeats, file};
use proptest::prelude::*;

/// Where the sections of a file are described, and of what each description consists.
const HEAD: usize = 24;
const FIRST: usize = HEAD + 8;
const SECTION: usize = 32;
/// Kinds of sections.
const NUMBERS: u64 = 1;
const ENDS: u64 = 2;
const TEXTS: u64 = 3;
const LABELS: u64 = 4;
const NAME: u64 = 5;
const OFFSETS: u64 = 6;
const TARGETS: u64 = 7;
const BACK_OFFSETS: u64 = 8;
const BACK_TARGETS: u64 = 9;
const LOOPS: u64 = 10;

/// A folder that ends with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("penstock-damage-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An index file that can be changed so that nothing but its structure tells.
#[derive(Clone)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn of(index: &Index) -> Self {
        let folder = Folder::new();
        let path = folder.0.join("g");
        file::save(index, &path).unwrap();
        Bytes(std::fs::read(path).unwrap())
    }

    /// 0-1, 1-2, 0-2, 2-2 of the numbers 10, 20, 30.
    fn numbers() -> Self {
        let mut builder = Builder::numbers();
        builder.relation("e", Loops::Keep, Repeats::Drop);
        builder.numbers_in("e", &[10, 20, 10, 30], &[20, 30, 30, 30]).unwrap();
        Self::of(&builder.finish().unwrap())
    }

    fn texts() -> Self {
        let mut builder = Builder::texts();
        builder.text_in("knows", "ann", "bob").unwrap();
        Self::of(&builder.finish().unwrap())
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    fn set(&mut self, at: usize, word: u64) {
        self.0[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }

    fn set_half(&mut self, at: usize, half: u32) {
        self.0[at..at + 4].copy_from_slice(&half.to_le_bytes());
    }

    /// Where the description of a section is.
    fn description(&self, kind: u64) -> usize {
        let count = self.word(HEAD) as usize;
        let mut all = (0..count).map(|at| FIRST + at * SECTION);
        all.find(|at| self.word(*at) == kind).unwrap_or_else(|| panic!("no section of kind {kind}"))
    }

    /// Where its bytes begin.
    fn section(&self, kind: u64) -> usize {
        self.word(self.description(kind) + 16) as usize
    }

    /// Changes nothing but the length that a section says.
    fn lengthen(&mut self, kind: u64, by: i64) {
        let at = self.description(kind) + 24;
        self.set(at, self.word(at).wrapping_add_signed(by));
    }

    /// Renames a section to one that nobody looks for.
    fn hide(&mut self, kind: u64) {
        let at = self.description(kind);
        self.set(at, 99);
    }

    fn sealed(mut self) -> Self {
        let length = (self.0.len() - HEAD) as u64;
        self.set(16, length);
        let crc = crc32fast::hash(&self.0[HEAD..]);
        self.set_half(12, crc);
        self
    }

    fn open(self) -> Result<Index, GraphError> {
        let folder = Folder::new();
        let path = folder.0.join("g");
        std::fs::write(&path, self.sealed().0).unwrap();
        file::open(&path)
    }
}

type Change = fn(&mut Bytes);

#[test]
fn every_check_of_the_structure_is_reached_behind_the_checksum() {
    assert!(Bytes::numbers().open().is_ok() && Bytes::texts().open().is_ok(), "sealing changes nothing");
    let numbers: [(&str, Change); 20] = [
        ("it has more sections than fit", |file| file.set(HEAD, 7_000)),
        ("it has more sections than fit", |file| file.set(HEAD, u64::MAX)),
        ("a section is longer than the file", |file| file.lengthen(TARGETS, 1 << 20)),
        ("a section is longer than the file", |file| file.set(file.description(NAME) + 24, u64::MAX)),
        ("it has no nodes", |file| file.hide(NUMBERS)),
        ("its nodes are not in order", |file| file.set(file.section(NUMBERS) + 8, 10)),
        ("its nodes are not in order", |file| file.set(file.section(NUMBERS), 77)),
        ("its labels are no nodes", |file| file.set(file.description(LOOPS), LABELS)),
        ("a name is no text", |file| {
            let at = file.section(NAME);
            file.0[at] = 0xFF;
        }),
        ("a relation has no lists", |file| file.hide(TARGETS)),
        ("a relation does not say its self-loops", |file| file.hide(LOOPS)),
        ("its self-loops are no nodes", |file| file.set_half(file.section(LOOPS), 3)),
        ("a relation has not one list per node", |file| file.lengthen(OFFSETS, -8)),
        ("lists do not end where they should", |file| file.set(file.section(OFFSETS), 1)),
        ("lists do not end where they should", |file| file.set(file.section(OFFSETS) + 24, 9)),
        ("lists do not end where they should", |file| file.set(file.section(BACK_OFFSETS) + 8, 9)),
        ("a list is not in order", |file| file.set_half(file.section(TARGETS), 2)),
        ("a list is not in order", |file| file.set_half(file.section(BACK_TARGETS), 3)),
        ("it has more relations than fit", |file| {
            let at = file.description(BACK_TARGETS);
            file.set(at, NAME);
            file.set(at + 8, 4096);
        }),
        ("a section does not lie as its type needs", |file| {
            let at = file.description(OFFSETS) + 16;
            file.set(at, file.word(at) + 1);
            file.lengthen(OFFSETS, -8);
        }),
    ];
    let texts: [(&str, Change); 4] = [
        ("it has no texts", |file| file.hide(TEXTS)),
        ("its texts do not end where they should", |file| file.set(file.section(ENDS), 1)),
        ("its texts do not end where they should", |file| file.set(file.section(ENDS) + 8, 5_000)),
        ("its texts do not end where they should", |file| file.lengthen(TEXTS, -1)),
    ];
    let all = numbers.iter().map(|(problem, change)| (Bytes::numbers(), *problem, *change));
    for (mut file, problem, change) in
        all.chain(texts.iter().map(|(problem, change)| (Bytes::texts(), *problem, *change)))
    {
        change(&mut file);
        match file.open() {
            Err(GraphError::File { problem: found, .. }) => assert_eq!(found, problem),
            Err(error) => panic!("{problem}: {error}"),
            Ok(_) => panic!("{problem}: it was opened"),
        }
    }
}

#[test]
fn the_head_is_checked_before_the_checksum() {
    let refused = |change: Change| {
        let folder = Folder::new();
        let (path, mut file) = (folder.0.join("g"), Bytes::numbers());
        change(&mut file);
        std::fs::write(&path, file.0).unwrap();
        file::open(&path).map(drop).unwrap_err().to_string()
    };
    for (problem, change) in [
        ("it is no index of penstock", (|file| file.0[0] ^= 1) as Change),
        ("it was written by another release", |file| file.set_half(8, 2)),
        ("its length is not what it says", |file| file.0.truncate(file.0.len() - 8)),
        ("its checksum is wrong", |file| *file.0.last_mut().unwrap() ^= 1),
        ("it is too short for an index", |file| file.0.truncate(HEAD)),
    ] {
        let told = refused(change);
        assert!(told.contains(problem), "{told} instead of {problem}");
    }
}

proptest! {
    /// Whatever a file says, it is refused or can be searched: never a panic.
    #[test]
    fn a_file_that_says_anything_is_refused_or_can_be_searched(
        texts in any::<bool>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![0..16_u64, any::<u64>()], any::<bool>()), 1..4),
    ) {
        let mut file = if texts { Bytes::texts() } else { Bytes::numbers() };
        for (at, word, half) in changes {
            // In words of eight or four bytes, as everything in a file is.
            let place = HEAD + at.index((file.0.len() - HEAD - 8) / 4) * 4;
            if half { file.set_half(place, word as u32) } else { file.set(place, word) }
        }
        if let Ok(index) = file.open() {
            let index = Arc::new(index);
            let relation = if texts { "knows" } else { "e" };
            let pattern = Pattern::parse(&format!("p(a,b,c) :- {relation}(a,b), {relation}(c,b), {relation}(b,b)")).unwrap();
            // A name may have been changed: then the query says that there is no such relation.
            if let Ok(query) = Query::new(index, &pattern, None) {
                prop_assert!(crew::count(&query, &Crew::default()).is_ok());
            }
        }
    }
}
