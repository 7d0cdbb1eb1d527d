//! The store over real directories, over media that fail, and over damaged ones.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};

use super::volume::{Medium, private};
use super::*;

/// A directory that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("penstock-test-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Memory that holds so many bytes, and may flip a bit of what it gives back.
#[derive(Default)]
struct Tiny {
    capacity: u64,
    bytes: Mutex<BTreeMap<u64, Vec<u8>>>,
    len: AtomicU64,
    flips: bool,
}

impl Medium for Arc<Tiny> {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        if at + bytes.len() as u64 > self.capacity {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.len.fetch_max(at + bytes.len() as u64, Relaxed);
        self.bytes.lock().unwrap().insert(at, bytes.to_vec());
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let held = self.bytes.lock().unwrap();
        let block = held.get(&at).filter(|block| block.len() == bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(block);
        bytes[block.len() / 2] ^= u8::from(self.flips);
        Ok(())
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.len.store(len, Relaxed);
        Ok(())
    }
}

fn over(budget: u64, media: &[&Arc<Tiny>]) -> Store {
    let store = Store::new(budget, &vec![PathBuf::from("/tiny"); media.len()]);
    for (place, medium) in store.places().iter_mut().zip(media) {
        place.volume = Some(Arc::new(Volume::over(&place.folder, Box::new(Arc::clone(medium)))));
    }
    store
}

fn tiny(capacity: u64, flips: bool) -> Arc<Tiny> {
    Arc::new(Tiny { capacity, flips, ..Tiny::default() })
}

fn batch(first: i64, rows: usize) -> RecordBatch {
    let values = first..first + rows as i64;
    let numbers: ArrayRef = Arc::new(values.clone().map(|v| (v % 3 > 0).then_some(v)).collect::<Int64Array>());
    let words: ArrayRef = Arc::new(values.map(|v| (v % 5 > 0).then(|| format!("word {v}"))).collect::<StringArray>());
    RecordBatch::try_from_iter([("v", numbers), ("word", words)]).unwrap()
}

fn read(kept: &[Rows]) -> Vec<RecordBatch> {
    kept.iter().map(|rows| rows.read().unwrap()).collect()
}

#[test]
fn what_fits_stays_as_it_is_and_the_rest_comes_back_in_pieces() {
    let folder = Folder::new("pieces");
    let whole = batch(0, 100);
    let store = Store::new(2 * size(&whole), std::slice::from_ref(&folder.0));
    let held = [store.keep(whole.clone(), 30).unwrap(), store.keep(whole.clone(), 30).unwrap()].concat();
    assert_eq!(held.len(), 2);
    assert_eq!(store.figures().disk_bytes, 0);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0, "no file before it is needed");
    let spilled = store.keep(whole.clone(), 30).unwrap();
    assert_eq!(spilled.iter().map(Rows::num_rows).collect::<Vec<_>>(), [30, 30, 30, 10]);
    let slices = (0..100).step_by(30).map(|at| whole.slice(at, 30.min(100 - at))).collect::<Vec<_>>();
    assert_eq!(read(&spilled), slices);
    assert_eq!(read(&spilled), slices, "again");
    let figures = store.figures();
    assert_eq!(figures.memory_bytes, 2 * size(&whole));
    assert!(figures.disk_bytes > 0 && figures.disk_bytes == figures.spilled_bytes);
    assert_eq!(figures.read_bytes, 2 * figures.disk_bytes);
    drop(held);
    assert_eq!(store.figures().memory_bytes, 0);
    assert_eq!(store.keep(whole.clone(), 30).unwrap().len(), 1, "there is room again");
    drop(spilled);
    assert_eq!((store.figures().disk_bytes, store.figures().spilled_bytes), (0, figures.spilled_bytes));
}

#[test]
fn the_file_has_no_name_and_shrinks() {
    let folder = Folder::new("nameless");
    let store = Store::new(0, std::slice::from_ref(&folder.0));
    let kept: Vec<Rows> = (0..10).flat_map(|i| store.keep(batch(i * 50, 50), 50).unwrap()).collect();
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0, "whatever ends the process, nothing is left");
    let volume = store.places()[0].volume.clone().unwrap();
    drop(store);
    assert_eq!(read(&kept[9..]), [batch(450, 50)], "rows keep what they need");
    drop(kept);
    assert_eq!(Arc::strong_count(&volume), 1);
}

#[test]
fn a_full_disk_is_an_error_that_names_it_and_keeps_nothing() {
    let medium = tiny(8_000, false);
    let store = over(0, &[&medium]);
    let mut kept = Vec::new();
    let error = loop {
        match store.keep(batch(0, 60), 20) {
            Ok(rows) => kept.push(rows),
            Err(error) => break error,
        }
        assert!(kept.len() < 100);
    };
    let text = error.to_string();
    for part in ["/tiny", "spark.local.dir", "SPARK_LOCAL_DIRS", "staging_memory"] {
        assert!(text.contains(part), "{text}");
    }
    let failure = error.to_failure();
    assert_eq!((failure.kind.as_str(), &failure.fields["paths"][0]), ("storage", &"/tiny".into()));
    let disk = store.figures().disk_bytes;
    assert!(disk > 0 && disk <= 8_000);
    let blocks = kept.len() as u64;
    assert_eq!(disk % blocks, 0, "no piece of the block that failed is left");
    kept.pop();
    assert!(store.keep(batch(0, 60), 20).is_ok(), "what went made room");
    kept.clear();
    assert_eq!(medium.len.load(Relaxed), 0);
}

#[test]
fn a_directory_that_fails_is_passed_over() {
    let (full, roomy) = (tiny(0, false), tiny(1 << 20, false));
    let store = over(0, &[&full, &roomy]);
    let kept: Vec<Rows> = (0..6).flat_map(|i| store.keep(batch(i, 9), 9).unwrap()).collect();
    assert_eq!(read(&kept[3..4]), [batch(3, 9)]);
    assert_eq!(full.bytes.lock().unwrap().len(), 0);
    let nowhere = Store::new(0, &[PathBuf::from("/nowhere/at/all"), PathBuf::from("/proc/self")]);
    let Err(SpillError::Full { folders, .. }) = nowhere.keep(batch(0, 1), 1) else { panic!("nowhere") };
    assert_eq!(folders.len(), 2);
    assert_eq!(nowhere.figures().disk_bytes, 0);
}

#[test]
fn damage_is_noticed() {
    let store = over(0, &[&tiny(1 << 20, true)]);
    let kept = store.keep(batch(0, 40), 40).unwrap();
    let error = kept[0].read().unwrap_err();
    let error = error.downcast_ref::<SpillError>().unwrap();
    assert!(matches!(error, SpillError::Damaged { at: 0, expected, found, .. } if expected != found), "{error}");
    assert_eq!(error.to_failure().kind, "storage");
    let medium = tiny(1 << 20, false);
    let store = over(0, &[&medium]);
    let kept = store.keep(batch(0, 40), 40).unwrap();
    medium.bytes.lock().unwrap().clear();
    let error = kept[0].read().unwrap_err();
    assert!(matches!(error.downcast_ref::<SpillError>(), Some(SpillError::Lost { .. })), "{error}");
}

#[test]
fn nobody_else_can_enter() {
    let folder = Folder::new("private");
    let (file, path, own) = private(&folder.0).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&own), mode(&path)), (0o700, 0o600));
    assert!(own.starts_with(&folder.0) && path.starts_with(&own));
    drop(file);
    let volume = Volume::create(&folder.0).unwrap();
    let at = volume.write(b"rows").unwrap();
    assert_eq!(volume.read(at, 4).unwrap(), b"rows");
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "the second one has no name");
}

#[test]
fn many_threads_share_the_budget() {
    let folder = Folder::new("threads");
    let one = size(&batch(0, 50));
    let store = Store::new(5 * one, std::slice::from_ref(&folder.0));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let store = &store;
            scope.spawn(move || {
                let mut kept = std::collections::VecDeque::new();
                for i in 0..100 {
                    let first = thread * 1_000_000 + i * 100;
                    kept.push_back((first, store.keep(batch(first, 50), 20).unwrap()));
                    if kept.len() > 7 {
                        let (first, rows) = kept.pop_front().unwrap();
                        let read = read(&rows);
                        let expected = batch(first, 50);
                        let mut at = 0;
                        for piece in read {
                            assert_eq!(piece, expected.slice(at, piece.num_rows()));
                            at += piece.num_rows();
                        }
                        assert_eq!(at, 50);
                    }
                }
            });
        }
    });
    let figures = store.figures();
    assert!(figures.memory_peak_bytes <= 5 * one + one && figures.spilled_bytes > 0, "{figures:?}");
    assert_eq!((figures.memory_bytes, figures.disk_bytes), (0, 0));
}
