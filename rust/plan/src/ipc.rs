//! Arrow streams that come from elsewhere: rows between members, rows that were spilled, schemas in plans and manifests.
//!
//! Invariant: whatever the bytes are, reading them ends with rows or an error, and takes no memory beyond them: Arrow's decoder slices
//! what is there, where its reader believes announced lengths. The decoder checks what it reads, yet it is written for honest input: it
//! panics where offsets point nowhere, which is one more way to be malformed here. A batch has at most [`BATCH_ROWS`] rows: columns that take no
//! bytes, of nulls or none at all, would have any number of them for nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::{ArrowError, SchemaRef};

/// Most rows of a batch that comes from elsewhere: what Spark's own have at most.
pub const BATCH_ROWS: usize = i32::MAX as usize;

const END_OF_STREAM: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Reads up to the first batch, or up to the schema; the rest is not looked at.
///
/// # Errors
/// What is wrong with it, in Arrow's words; nothing where the bytes end before.
pub(crate) fn batch(bytes: &[u8]) -> Result<Option<RecordBatch>, ArrowError> {
    read_batch(Buffer::from(bytes))
}

/// The same of bytes that the batch may keep: where they are aligned it is not copied.
///
/// # Errors
/// What is wrong with it, in Arrow's words; nothing where the bytes end before a batch.
pub fn read_batch(bytes: impl Into<Buffer>) -> Result<Option<RecordBatch>, ArrowError> {
    let batch = guarded(bytes.into(), |decoder, buffer| decoder.decode(buffer))?;
    batch.map(limited).transpose()
}

/// A batch of no more rows than [`BATCH_ROWS`].
///
/// # Errors
/// How many rows it says it has.
pub fn limited(batch: RecordBatch) -> Result<RecordBatch, ArrowError> {
    match batch.num_rows() {
        0..=BATCH_ROWS => Ok(batch),
        rows => Err(ArrowError::IpcError(format!("a batch of {rows} rows, at most {BATCH_ROWS} are read"))),
    }
}

/// The schema that a stream begins with.
///
/// # Errors
/// As [`batch`].
pub(crate) fn schema(bytes: &[u8]) -> Result<Option<SchemaRef>, ArrowError> {
    // The decoder looks at a message when something follows it; for a schema alone that is the end of a stream.
    let ended = [bytes, &END_OF_STREAM].concat();
    // A batch behind the schema is not needed, and what is wrong with it is nobody's concern.
    guarded(Buffer::from(ended), |decoder, buffer| {
        let read = decoder.decode(buffer);
        match decoder.schema() {
            Some(schema) => Ok(Some(schema)),
            None => read.map(|_| None),
        }
    })
}

fn guarded<T>(
    mut buffer: Buffer,
    mut step: impl FnMut(&mut StreamDecoder, &mut Buffer) -> Result<Option<T>, ArrowError>,
) -> Result<Option<T>, ArrowError> {
    let read = move || {
        let mut decoder = StreamDecoder::new();
        while !buffer.is_empty() {
            if let Some(found) = step(&mut decoder, &mut buffer)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    };
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| Err(ArrowError::IpcError("the stream is malformed".into())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FlowBlock;
    use crate::spec::{schema_from_text, schema_to_text};
    use arrow_array::{ArrayRef, Int64Array, StringArray};
    use arrow_schema::Schema;
    use penstock_dataflow::Wire;
    use std::sync::Arc;

    #[test]
    fn rows_that_take_no_bytes_are_limited() {
        use arrow_array::RecordBatchOptions;
        use arrow_ipc::writer::StreamWriter;
        let written = |rows: usize| {
            let options = RecordBatchOptions::new().with_row_count(Some(rows));
            let batch = RecordBatch::try_new_with_options(Arc::new(Schema::empty()), Vec::new(), &options).unwrap();
            let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
            writer.write(&batch).unwrap();
            writer.into_inner().unwrap()
        };
        assert_eq!(read_batch(written(BATCH_ROWS)).unwrap().unwrap().num_rows(), BATCH_ROWS);
        let refused = read_batch(written(BATCH_ROWS + 1)).unwrap_err().to_string();
        assert!(refused.contains("a batch of 2147483648 rows, at most 2147483647 are read"), "{refused}");
    }

    /// Found by fuzzing: buffers that begin behind the end of the message panicked in the worker that took the block.
    #[test]
    fn a_block_with_any_bit_wrong_is_an_error_and_no_panic() {
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None]));
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "größe"]));
        let batch = RecordBatch::try_from_iter_with_nullable([("n", numbers, true), ("t", texts, false)]).unwrap();
        let mut bytes = Vec::new();
        FlowBlock::keyed(batch, vec![1, 2]).encode(&mut bytes);
        let mut refused = 0;
        for at in 0..bytes.len() {
            for bit in 0..8 {
                bytes[at] ^= 1 << bit;
                refused += usize::from(FlowBlock::decode(&bytes).is_err());
                bytes[at] ^= 1 << bit;
            }
        }
        assert!(refused > 100 && FlowBlock::decode(&bytes).is_ok());
    }

    #[test]
    fn a_length_that_nothing_is_behind_takes_no_memory() {
        // The continuation, then metadata of 2 GiB.
        let bytes = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 1, 2, 3];
        assert!(matches!(batch(&bytes), Ok(None) | Err(_)));
        assert!(matches!(schema(&bytes), Ok(None) | Err(_)));
    }

    #[test]
    fn the_text_of_a_schema_with_any_character_wrong_is_an_error_or_a_schema() {
        let schema = arrow_schema::Schema::new(vec![arrow_schema::Field::new("k", arrow_schema::DataType::Utf8, true)]);
        let text = schema_to_text(&schema);
        assert_eq!(*schema_from_text(&text).unwrap(), schema);
        // The message alone, as other libraries give it.
        let mut alone = Vec::new();
        arrow_ipc::writer::StreamWriter::try_new(&mut alone, &schema).unwrap();
        assert_eq!(super::schema(&alone).unwrap().as_deref(), Some(&schema));
        for at in 0..text.len() {
            for other in ["A", "/", "7", "!"] {
                let _ = schema_from_text(&format!("{}{other}{}", &text[..at], &text[at + 1..]));
            }
            // Cut at or in the end of the stream, or in what the message is padded with, it is whole.
            assert!(schema_from_text(&text[..at]).is_err() || at > text.len() - 32, "cut at {at}");
        }
    }
}
