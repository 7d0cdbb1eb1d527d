"""Inside Spark's tasks and beside them: where they run, slots, memory, users' functions, what went wrong."""
