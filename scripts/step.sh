#!/bin/sh
# Usage: step.sh TITLE COMMAND [ARGUMENT...]: runs the command under a heading and tells how long it took.
title=$1
shift
echo
echo "== $title"
started=$(date +%s)
"$@"
status=$?
elapsed=$(($(date +%s) - started))
if [ "$status" -eq 0 ]; then
    echo "== $title: ok, $elapsed s"
else
    echo "== $title: FAILED with exit status $status after $elapsed s" >&2
fi
exit "$status"
