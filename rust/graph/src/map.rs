//! Files in memory: the only module of this crate with `unsafe`.
//!
//! Mapping cannot be safe by itself: whoever truncates the file while it is mapped makes reads of it fail by a signal, and
//! whoever writes to it changes values under a reader. So an index file is written under another name, moved to its place
//! when it is whole, and never written again (`write`); readers hold it open by the map, so a deleted one stays whole.
#![allow(unsafe_code)] // see above

use std::fs::File;
use std::io;

use memmap2::{Mmap, UncheckedAdvice};

/// The bytes of a file, read only; pages are shared by all processes of a host that map it.
#[derive(Debug)]
pub(crate) struct Map(Mmap);

impl Map {
    pub(crate) fn open(file: &File) -> io::Result<Self> {
        // SAFETY: the file must not change while it is mapped. `write` upholds it for the files that it writes
        // (written under a temporary name, renamed when whole, never opened for writing again), `large` for the scratch file
        // that it maps (it has no name, and nothing is written to it after it is mapped); whoever else writes to an index
        // file breaks its own promise to the caller of `file::open`.
        unsafe { Mmap::map(file) }.map(Self)
    }

    /// Gives the pages back to the system; whoever reads them again has them from the file.
    pub(crate) fn release(&self) {
        // SAFETY: the map is shared and nobody writes through it (there is no such method), so a page that is dropped holds
        // nothing that the file does not, and comes back with the same bytes. That it may be refused costs memory only.
        let _ = unsafe { self.0.unchecked_advise(UncheckedAdvice::DontNeed) };
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
