"""What runs users' functions: called with blocks by the native workers; keyed state, groups, iterators, frames."""
