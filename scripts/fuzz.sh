#!/bin/sh
# Every fuzz target, or those that are named, for SECONDS_PER_TARGET (60) seconds each or RUNS_PER_TARGET executions, whichever
# ends first, one after the other. What is new goes to target/fuzz, what breaks a target to fuzz/artifacts. Coverage needs no
# sanitizer, so the stable toolchain does.
set -eu
cd "$(dirname "$0")/.."
cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --version 0.13.2 --locked
cargo fuzz build --sanitizer none
failed=""
for target in ${*:-$(cargo fuzz list)}; do
    mkdir -p "target/fuzz/$target"
    log="target/fuzz/$target.log"
    if cargo fuzz run --sanitizer none "$target" "target/fuzz/$target" "fuzz/corpus/$target" -- \
        -max_total_time="${SECONDS_PER_TARGET:-60}" -runs="${RUNS_PER_TARGET:--1}" -max_len="${MAX_LEN:-8192}" -timeout=20 -rss_limit_mb=2048 -malloc_limit_mb=512 \
        -print_final_stats=1 >"$log" 2>&1; then
        echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") executions"
    else
        failed="$failed $target"
        tail -n 40 "$log"
        echo "$target: FAILED, see $log"
    fi
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
