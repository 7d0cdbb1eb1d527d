//! Record batches as pieces of an Arrow IPC stream, one piece per data frame.
//!
//! Both ends count rows and keep a CRC-32 over all bytes, compared at the end. The decoder takes
//! any cut of the stream, so a large batch may span frames; what fits in one frame is not copied.
//! What is of no whole batch yet is at most [`UNFINISHED_BYTES`]: a sender that announces more, or never
//! ends a batch, takes no more memory than that. The encoder cuts a batch that would be longer, in bytes or in rows.

use std::panic::{AssertUnwindSafe, catch_unwind};

use arrow_array::{RecordBatch, RecordBatchOptions};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{Schema, SchemaRef};
use penstock_plan::{BATCH_ROWS, limited};

use crate::error::ClusterError;
use crate::message::StreamEnd;
use crate::session::{Kind, Session};
use crate::spill::size;

/// Longest data frame that we send.
const PIECE_BYTES: usize = 16 << 20;

/// Most bytes of a stream that belong to no whole batch yet.
pub(crate) const UNFINISHED_BYTES: usize = 512 << 20;
/// A batch of more bytes in memory is sent in halves: as sent it is little longer than that.
const BATCH_BYTES: u64 = UNFINISHED_BYTES as u64 / 4;

/// Writes one stream to a session.
pub(crate) struct Encoder {
    writer: StreamWriter<Vec<u8>>,
    crc: crc32fast::Hasher,
    rows: u64,
}

impl Encoder {
    pub(crate) fn new(schema: &Schema) -> Result<Self, ClusterError> {
        let writer = StreamWriter::try_new(Vec::new(), schema)?;
        Ok(Encoder { writer, crc: crc32fast::Hasher::new(), rows: 0 })
    }

    pub(crate) fn push(&mut self, session: &mut Session, batch: &RecordBatch) -> Result<(), ClusterError> {
        if batch.num_rows() > 1 && (size(batch) > BATCH_BYTES || batch.num_rows() > BATCH_ROWS) {
            let half = batch.num_rows() / 2;
            self.push(session, &batch.slice(0, half))?;
            return self.push(session, &batch.slice(half, batch.num_rows() - half));
        }
        self.writer.write(batch)?;
        self.rows += batch.num_rows() as u64;
        self.flush(session)
    }

    /// Ends the stream and says what was in it.
    pub(crate) fn finish(&mut self, session: &mut Session) -> Result<StreamEnd, ClusterError> {
        self.writer.finish()?;
        self.flush(session)?;
        let end = StreamEnd { rows: self.rows, checksum: self.crc.clone().finalize() };
        let body = serde_json::to_string(&end).expect("two numbers are JSON");
        session.send_body(Kind::End, 0, &body, &[])?;
        Ok(end)
    }

    fn flush(&mut self, session: &mut Session) -> Result<(), ClusterError> {
        let bytes = self.writer.get_mut();
        self.crc.update(bytes);
        let sent = bytes.chunks(PIECE_BYTES).try_for_each(|p| session.send(Kind::Data, &[p]));
        bytes.clear();
        sent
    }
}

/// Reads one stream.
#[derive(Default)]
pub(crate) struct Decoder {
    inner: StreamDecoder,
    crc: crc32fast::Hasher,
    rows: u64,
    /// Bytes since the last whole batch.
    unfinished: usize,
}

impl Decoder {
    /// The schema, once enough has arrived.
    pub(crate) fn schema(&self) -> Option<SchemaRef> {
        self.inner.schema()
    }

    /// Takes the payload of a data frame; appends the batches that are complete now.
    pub(crate) fn push(&mut self, payload: Vec<u8>, batches: &mut Vec<RecordBatch>) -> Result<(), ClusterError> {
        self.push_within(payload, UNFINISHED_BYTES, batches)
    }

    fn push_within(
        &mut self,
        payload: Vec<u8>,
        limit: usize,
        batches: &mut Vec<RecordBatch>,
    ) -> Result<(), ClusterError> {
        self.crc.update(&payload);
        let mut buffer = Buffer::from(payload);
        let (inner, unfinished) = (&mut self.inner, &mut self.unfinished);
        // The decoder checks what it reads, yet it is written for honest input: a panic in it must
        // not take more than this stream, which is not used again after an error.
        let decoded = catch_unwind(AssertUnwindSafe(|| {
            while !buffer.is_empty() {
                let before = buffer.len();
                let batch = inner.decode(&mut buffer)?;
                *unfinished = if batch.is_some() { 0 } else { *unfinished + before - buffer.len() };
                batches.extend(batch.map(limited).transpose()?);
            }
            Ok::<(), arrow_schema::ArrowError>(())
        }));
        match decoded {
            Ok(done) => done?,
            Err(_) => return Err(ClusterError::Arrow("the stream is malformed".into())),
        }
        if self.unfinished > limit {
            let found = self.unfinished;
            return Err(ClusterError::Protocol(format!("{found} bytes of one batch, at most {limit} are read")));
        }
        Ok(())
    }

    /// Counts rows of the batches it gave out.
    pub(crate) fn count(&mut self, rows: usize) {
        self.rows += rows as u64;
    }

    /// Checks that the stream is complete and as its sender describes it.
    pub(crate) fn finish(&mut self, end: StreamEnd) -> Result<StreamEnd, ClusterError> {
        self.inner.finish()?;
        let ours = StreamEnd { rows: self.rows, checksum: self.crc.clone().finalize() };
        if ours != end {
            let said = format!("{ours:?} arrived, the sender says {end:?}");
            return Err(ClusterError::Protocol(said));
        }
        Ok(ours)
    }
}

/// Reads a stream that comes in pieces; rows in it. For fuzzing: feeds and drains do the same with frames.
///
/// # Errors
/// What is wrong with it.
#[doc(hidden)]
pub fn fuzz_columns(pieces: impl Iterator<Item = Vec<u8>>) -> Result<usize, ClusterError> {
    let (mut decoder, mut batches) = (Decoder::default(), Vec::new());
    for piece in pieces {
        decoder.push(piece, &mut batches)?;
    }
    let rows = batches.iter().map(RecordBatch::num_rows).sum();
    decoder.count(rows);
    // What its sender says of it is not compared.
    let said = StreamEnd { rows: rows as u64, checksum: decoder.crc.clone().finalize() };
    decoder.finish(said)?;
    Ok(rows)
}

/// Says how the columns of a stream differ from the expected ones, in names, types or number.
pub(crate) fn difference(expected: &Schema, found: &Schema) -> Option<String> {
    let (left, right) = (expected.fields(), found.fields());
    if left.len() != right.len() {
        return Some(format!("{} columns instead of {}", right.len(), left.len()));
    }
    left.iter().zip(right).find_map(|(l, r)| {
        let same = l.name() == r.name() && l.data_type().equals_datatype(r.data_type());
        (!same).then(|| format!("column {} {} instead of {} {}", r.name(), r.data_type(), l.name(), l.data_type()))
    })
}

/// The same rows under the expected schema.
///
/// # Errors
/// When a column has nulls that it must not have.
pub(crate) fn under(expected: &SchemaRef, batch: RecordBatch) -> Result<RecordBatch, ClusterError> {
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let columns = batch.columns().to_vec();
    Ok(RecordBatch::try_new_with_options(SchemaRef::clone(expected), columns, &rows)?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::Int64Array;

    use super::*;

    fn stream(batch: &RecordBatch, times: usize) -> Vec<u8> {
        let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
        (0..times).for_each(|_| writer.write(batch).unwrap());
        writer.finish().unwrap();
        writer.into_inner().unwrap()
    }

    #[test]
    fn what_is_of_no_whole_batch_is_bounded() {
        let column = Arc::new(Int64Array::from_iter_values(0..1000));
        let batch = RecordBatch::try_from_iter([("k", column as _)]).unwrap();
        let bytes = stream(&batch, 20);
        let read = |piece: usize, limit: usize, bytes: &[u8]| {
            let (mut decoder, mut batches) = (Decoder::default(), Vec::new());
            for part in bytes.chunks(piece) {
                decoder.push_within(part.to_vec(), limit, &mut batches)?;
            }
            Ok::<_, ClusterError>(batches.len())
        };
        // Whatever the cut: of 160 kB never more than one batch of 8 kB waits.
        for piece in [1000, 7777, bytes.len()] {
            assert_eq!(read(piece, 10_000, &bytes).unwrap(), 20);
        }
        let refused = read(1000, 5000, &bytes).unwrap_err();
        assert!(matches!(&refused, ClusterError::Protocol(text) if text.contains("at most 5000")), "{refused}");
        // A batch that says that it is longer than anything: what comes of it is taken up to the limit only.
        let long = stream(
            &RecordBatch::try_from_iter([("k", Arc::new(Int64Array::from_iter_values(0..100_000)) as _)]).unwrap(),
            1,
        );
        assert!(read(1000, 100_000, &long[..long.len() / 2]).is_err());
    }
}
