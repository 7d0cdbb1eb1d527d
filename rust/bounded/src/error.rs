//! What went wrong with one input.

/// The expansion of an input failed midway.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the expansion of {input} at {time} failed after {drawn} items: {cause}")]
pub struct Failure {
    /// The input, as `Debug` shows it.
    pub input: String,
    /// Its outer time.
    pub time: String,
    /// Items that it had given before.
    pub drawn: u64,
    /// The error or the message of the panic.
    pub cause: String,
}

/// What to do when the expansion of an input fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// All workers stop, with the [`Failure`] as the cause.
    #[default]
    Stop,
    /// Its items so far stay, what is left of it is dropped, and the other inputs go on.
    GoOn,
}
