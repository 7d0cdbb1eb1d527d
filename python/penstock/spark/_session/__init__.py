"""Spark sessions: the Java below them, private ones, which kind serves which host, their rows as Arrow."""
