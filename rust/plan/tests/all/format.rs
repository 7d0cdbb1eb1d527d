//! The parts of the format that other releases and other languages read: key hashes and chunks of state.

use std::slice::from_ref;
use std::sync::Arc;

use crate::common;
use arrow_array::types::Int8Type;
use arrow_array::*;
use penstock_bins::{BinState, BinTable, Encoding, Routing};
use penstock_plan::hash::decoded;
use penstock_plan::spec::schema_to_text;
use penstock_plan::{Callbacks, KeyedSpec, NULL_HASH, Plan, State, hash_bytes, hash_columns, hash_int};

#[test]
fn hashes_never_change() {
    let golden: [(u64, u64); 12] = [
        (hash_int(0), GOLDEN[0]),
        (hash_int(1), GOLDEN[1]),
        (hash_int(-1), GOLDEN[2]),
        (hash_int(i64::MAX), GOLDEN[3]),
        (hash_bytes(b""), GOLDEN[4]),
        (hash_bytes(b"a"), GOLDEN[5]),
        (hash_bytes(b"sixteen bytes ok"), GOLDEN[6]),
        (hash_bytes(b"seventeen bytes ok"), GOLDEN[7]),
        (hash_bytes(&[0; 40]), GOLDEN[8]),
        (NULL_HASH, GOLDEN[9]),
        (pair(), GOLDEN[10]),
        (float(), GOLDEN[11]),
    ];
    let found: Vec<String> = golden.iter().map(|(found, _)| format!("{found:#018x}")).collect();
    assert!(golden.iter().all(|(found, expected)| found == expected), "{found:#?}");
}

const GOLDEN: [u64; 12] = [
    0xe220_a839_7b1d_cdaf,
    0x910a_2dec_8902_5cc1,
    0xe4d9_7177_1b65_2c20,
    0x2a67_d755_2e03_9ea7,
    0x8b06_225d_30c6_84bd,
    0xe826_6007_87f0_4e3d,
    0x7b33_a81d_95f3_5dbe,
    0x41b1_48fc_65dd_d5e1,
    0xa142_0fc6_14c1_f1f3,
    0x5bf0_3635_dcf5_d1c7,
    0xbfe0_e086_5ba5_5575,
    0x8c3e_b2ec_8e89_e20c,
];

fn pair() -> u64 {
    let columns: [ArrayRef; 2] =
        [Arc::new(Int32Array::from(vec![Some(7)])), Arc::new(StringArray::from(vec![Some("penstock")]))];
    hash_columns(&columns).unwrap()[0]
}

fn float() -> u64 {
    hash_columns(&[Arc::new(Float64Array::from(vec![1.5])) as ArrayRef]).unwrap()[0]
}

#[test]
fn a_value_hashes_alike_in_every_type_that_holds_it() {
    let ints: Vec<ArrayRef> = vec![
        Arc::new(Int8Array::from(vec![Some(7), None])),
        Arc::new(UInt16Array::from(vec![Some(7), None])),
        Arc::new(Int32Array::from(vec![Some(7), None])),
        Arc::new(Int64Array::from(vec![Some(7), None])),
        Arc::new(Date32Array::from(vec![Some(7), None])),
        Arc::new(TimestampNanosecondArray::from(vec![Some(7), None]).with_timezone("UTC")),
    ];
    for array in ints {
        assert_eq!(hash_columns(&[array]).unwrap(), [hash_int(7), NULL_HASH]);
    }
    let texts: Vec<ArrayRef> = vec![
        Arc::new(StringArray::from(vec![Some("seven"), None])),
        Arc::new(LargeStringArray::from(vec![Some("seven"), None])),
        Arc::new(StringViewArray::from(vec![Some("seven"), None])),
        Arc::new(BinaryArray::from(vec![Some(&b"seven"[..]), None])),
    ];
    for array in texts {
        assert_eq!(hash_columns(&[array]).unwrap(), [hash_bytes(b"seven"), NULL_HASH]);
    }
    let floats = hash_columns(&[Arc::new(Float32Array::from(vec![Some(7.0), None])) as ArrayRef]).unwrap();
    assert_eq!(floats[1], NULL_HASH);
    assert!(hash_columns(&[]).is_err());
}

#[test]
fn a_key_that_is_decoded_hashes_as_its_values() {
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), Some("a"), None, Some("b"), None]));
    let dictionary: DictionaryArray<Int8Type> = [Some("a"), Some("a"), None, Some("b"), None].into_iter().collect();
    // A null of its values is one, too.
    let values = StringArray::from(vec![None, Some("b"), Some("a")]);
    let keys = Int32Array::from(vec![Some(2), Some(2), None, Some(1), Some(0)]);
    let nulls = DictionaryArray::try_new(keys, Arc::new(values.clone())).unwrap();
    let values = StringArray::from(vec![Some("a"), None, Some("b"), None]);
    let runs = RunArray::try_new(&Int16Array::from(vec![2, 3, 4, 5]), &values).unwrap();
    let within: DictionaryArray<Int8Type> = [Some("a"), None, Some("b"), None].into_iter().collect();
    let both = RunArray::try_new(&Int64Array::from(vec![2, 3, 4, 5]), &within).unwrap();
    let encoded: Vec<ArrayRef> =
        vec![Arc::new(dictionary), Arc::new(nulls), Arc::new(runs), Arc::new(both), texts.clone()];
    let other: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3, 4, 5]));
    for array in encoded {
        for (from, rows) in [(0, 5), (1, 3), (3, 2), (2, 0)] {
            let (array, texts, other) = (array.slice(from, rows), texts.slice(from, rows), other.slice(from, rows));
            let decoded = decoded(&array).unwrap();
            assert_eq!(hash_columns(from_ref(&decoded)).unwrap(), hash_columns(from_ref(&texts)).unwrap());
            assert_eq!(hash_columns(&[decoded, other.clone()]).unwrap(), hash_columns(&[texts, other]).unwrap());
        }
    }
    let nothing = decoded(&(Arc::new(NullArray::new(2)) as ArrayRef)).unwrap();
    assert_eq!(hash_columns(&[nothing]).unwrap(), [NULL_HASH, NULL_HASH]);
}

#[test]
fn top_and_low_bits_spread_small_integers_and_texts() {
    let counts = |hashes: &[u64], shift: u32| {
        let mut counts = [0u32; 256];
        hashes.iter().for_each(|hash| counts[(hash >> shift) as usize & 255] += 1);
        (*counts.iter().min().unwrap(), *counts.iter().max().unwrap())
    };
    let ints: Vec<u64> = (0..256_000).map(hash_int).collect();
    let texts: Vec<u64> = (0..256_000).map(|at| hash_bytes(format!("key {at}").as_bytes())).collect();
    for hashes in [ints, texts] {
        for shift in [0, 56] {
            let (least, most) = counts(&hashes, shift);
            assert!(least > 850 && most < 1_150, "{least} {most}");
        }
    }
}

fn keyed(steps: &str) -> KeyedSpec {
    let schema = schema_to_text(&batch().schema());
    let text = format!(r#"{{"version":2,"sources":[{{"schema":"{schema}","event_time":"t"}}],"steps":[{steps}]}}"#);
    Plan::from_json(&text).unwrap().keyed().next().unwrap().clone()
}

fn batch() -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable([
        ("k", Arc::new(StringArray::from(vec![Some("a"), None, Some("b")])) as ArrayRef, true),
        ("i", Arc::new(Int64Array::from(vec![Some(1), None, Some(2)])) as _, true),
        ("t", Arc::new(Int64Array::from(vec![1, 2, 30])) as _, false),
    ])
    .unwrap()
}

const PLANS: [&str; 4] = [
    r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"tumbling","size_us":10000},{"op":"agg","aggs":[{"name":"m","fn":"max","column":"k"}]}"#,
    r#"{"op":"key_by","columns":["i"]},{"op":"agg","emit":"update","aggs":[{"name":"m","fn":"sum","column":"i"}]}"#,
    r#"{"op":"key_by","columns":["i"]},{"op":"agg","emit":"final","aggs":[{"name":"m","fn":"sum","column":"i"}]}"#,
    r#"{"op":"window","kind":"tumbling","size_us":10000},{"op":"top","n":2,"by":"i","per":"window"}"#,
];

fn carried(keyed: &KeyedSpec) -> (RecordBatch, Vec<u64>) {
    let routed = keyed.assign(&batch()).unwrap();
    let hashes = keyed.hashes(&routed).unwrap();
    (keyed.carry(routed).unwrap(), hashes)
}

fn filled(keyed: &KeyedSpec) -> (Arc<dyn Callbacks>, BinTable<State>, Vec<Vec<u8>>) {
    let calls: Arc<dyn Callbacks> = Arc::new(common::TestCalls);
    let new_state = || keyed.new_state(&calls);
    let mut bins = BinTable::fresh(&Routing::new(0, 1).unwrap(), 0, &new_state);
    let mut op = keyed.operator(&calls).unwrap();
    let (routed, hashes) = carried(keyed);
    op.apply(&mut bins, 0, &routed, &hashes, &mut |_| {}).unwrap();
    op.watermark(&mut bins, 11_000, &mut |_| {}).unwrap();
    let mut encoding = Encoding::new();
    let chunks = std::iter::from_fn(|| bins.get(0).unwrap().encode(&mut encoding).unwrap()).collect();
    (calls, bins, chunks)
}

#[test]
fn bad_chunks_are_typed_errors_that_change_nothing() {
    for plan in PLANS {
        let keyed = keyed(plan);
        let (calls, bins, chunks) = filled(&keyed);
        assert!(!chunks.is_empty() && bins.get(0).unwrap().keys() > 0 && bins.get(0).unwrap().bytes() > 0, "{plan}");
        for chunk in &chunks {
            let mut state = keyed.new_state(&calls);
            for cut in 0..chunk.len() {
                // A cut between two ranked rows is a shorter chunk; any other is an error.
                if state.absorb(&chunk[..cut]).is_ok() {
                    assert!(chunk[0] == b'T', "{plan} cut at {cut}");
                    state = keyed.new_state(&calls);
                }
                assert!(state.is_empty());
            }
            let mut newer = chunk.clone();
            newer[1] = 9;
            assert!(state.absorb(&newer).unwrap_err().to_string().contains("state format 9"), "{plan}");
            assert!(state.absorb(&[chunk.as_slice(), &[0]].concat()).is_err(), "{plan}");
            assert!(state.is_empty());
            state.absorb(chunk).unwrap();
            if chunk[0] == b'P' && state.keys() > 0 {
                assert!(state.absorb(chunk).is_err(), "a key twice: {plan}");
            }
        }
    }
}

#[test]
fn state_of_another_step_is_refused() {
    for (at, from) in PLANS.iter().enumerate() {
        let (calls, _, chunks) = filled(&keyed(from));
        for (other, into) in PLANS.iter().enumerate() {
            let mut state = keyed(into).new_state(&calls);
            assert_eq!(state.absorb(&chunks[0]).is_ok(), at == other, "{from} into {into}");
        }
    }
}

#[test]
fn never_marked_states_roll_back_to_nothing() {
    for plan in PLANS {
        let (_, mut bins, _) = filled(&keyed(plan));
        bins.rollback_all().unwrap();
        assert!(bins.get(0).unwrap().is_empty());
    }
}

#[test]
fn a_bin_that_is_elsewhere_is_a_typed_error() {
    for plan in PLANS {
        let keyed = keyed(plan);
        let mut empty: BinTable<State> = BinTable::new(0).unwrap();
        let calls: Arc<dyn Callbacks> = Arc::new(common::TestCalls);
        let (routed, hashes) = carried(&keyed);
        let error = keyed.operator(&calls).unwrap().apply(&mut empty, 0, &routed, &hashes, &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains("bin 0 is not held"), "{error}");
        let error =
            keyed.operator(&calls).unwrap().apply(&mut empty, 0, &routed, &hashes[1..], &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains("hashes"), "{error}");
    }
}
