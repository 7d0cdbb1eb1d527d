"""What Spark jobs of patterns need: rows at the driver in pieces, one file per host, a job that is watched."""
