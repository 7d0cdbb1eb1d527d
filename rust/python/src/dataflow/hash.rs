//! Stable hashes of Python keys: where an exchange sends an item.
//!
//! The same key has the same hash on every worker, process and machine, whatever `PYTHONHASHSEED` says, and the hash of the
//! project for an Arrow column of that kind: ints, bools, text, bytes and None agree with `hash_columns`. Keys that are equal in Python
//! have equal hashes, so `1`, `1.0` and `True` are one key. Types that this module does not know are brought into a known form
//! by `penstock._keys.plain`, which refuses those that have no stable form.

use std::fmt::Write as _;

use penstock_plan::{NULL_HASH, hash_bytes, hash_int};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyFloat, PyInt, PyList, PyString, PyTuple};

/// The hashes of keys, as exchanges have them.
#[pyfunction]
pub(crate) fn hash_keys(keys: &Bound<'_, PyList>) -> PyResult<Vec<u64>> {
    keys.iter().map(|key| of(&key)).collect()
}

/// How deep a key may be nested. One that refers to itself has no end.
const DEEPEST: usize = 100;

/// The hash of a key.
pub(crate) fn of(key: &Bound<'_, PyAny>) -> PyResult<u64> {
    at(key, 0)
}

fn at(key: &Bound<'_, PyAny>, depth: usize) -> PyResult<u64> {
    if depth > DEEPEST {
        return Err(PyTypeError::new_err(format!(
            "a key that is nested more than {DEEPEST} deep, or refers to itself, has no hash: return a part of it"
        )));
    }
    static PLAIN: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let Ok(text) = key.cast_exact::<PyString>() {
        // Text that is not UTF-8 (a lone surrogate) has no Arrow form; its escaped one is as stable.
        return Ok(match text.to_cow() {
            Ok(text) => hash_bytes(text.as_bytes()),
            Err(_) => {
                hash_bytes(text.call_method1("encode", ("utf-8", "surrogatepass"))?.cast::<PyBytes>()?.as_bytes())
            }
        });
    }
    if key.is_none() {
        return Ok(NULL_HASH);
    }
    if key.is_instance_of::<PyInt>() {
        return match key.extract::<i64>() {
            Ok(code) => Ok(hash_int(code)),
            // As a uint64 column for what fits one.
            Err(_) => match key.extract::<u64>() {
                Ok(code) => Ok(hash_int(code as i64)),
                Err(_) => Ok(hash_bytes(key.str()?.to_cow()?.as_bytes())),
            },
        };
    }
    if let Ok(bytes) = key.cast_exact::<PyBytes>() {
        return Ok(hash_bytes(bytes.as_bytes()));
    }
    if let Ok(float) = key.cast_exact::<PyFloat>() {
        return fraction(key, float.value());
    }
    if let Ok(tuple) = key.cast::<PyTuple>() {
        let mut bytes = Vec::with_capacity(8 * tuple.len() + 1);
        bytes.push(b'(');
        for part in tuple.iter_borrowed() {
            bytes.extend_from_slice(&at(&part, depth + 1)?.to_le_bytes());
        }
        return Ok(hash_bytes(&bytes));
    }
    let py = key.py();
    let plain =
        PLAIN.get_or_try_init(py, || Ok::<_, PyErr>(py.import("penstock._keys")?.getattr("plain")?.unbind()))?;
    at(&plain.bind(py).call1((key,))?, depth + 1)
}

/// A float: as the int that it equals, else by its bits.
fn fraction(key: &Bound<'_, PyAny>, value: f64) -> PyResult<u64> {
    if value.is_nan() {
        return Ok(hash_bytes(b"nan"));
    }
    if value.is_infinite() || value.fract() != 0.0 {
        let mut text = String::from("f");
        // Writing to a string cannot fail.
        let _ = write!(text, "{:016x}", value.to_bits());
        return Ok(hash_bytes(text.as_bytes()));
    }
    of(&key.call_method0("__int__")?)
}
