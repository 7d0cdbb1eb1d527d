#!/bin/sh
# cargo test for the workspace, by default with the same cases of every property each time: PROPTEST_RNG_SEED names others.
# The binding crate has no tests of its own: it is tested through Python.
set -eu
cd "$(dirname "$0")/.."
export PROPTEST_RNG_SEED="${PROPTEST_RNG_SEED:-20}"
echo "properties: PROPTEST_RNG_SEED=$PROPTEST_RNG_SEED PROPTEST_CASES=${PROPTEST_CASES:-256}"
exec cargo test --workspace --locked --no-fail-fast "$@"
