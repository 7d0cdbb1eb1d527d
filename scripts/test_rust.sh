#!/bin/sh
# cargo test for the workspace, by default with the same cases of every property each time: PROPTEST_RNG_SEED names others.
# The binding crate's unit tests link libpython; where the Python in .venv comes without a shared one (some distributions split it off),
# that crate is left to the Python tests alone.
set -eu
cd "$(dirname "$0")/.."
export PROPTEST_RNG_SEED="${PROPTEST_RNG_SEED:-20}"
echo "properties: PROPTEST_RNG_SEED=$PROPTEST_RNG_SEED PROPTEST_CASES=${PROPTEST_CASES:-256}"
library=$(.venv/bin/python - <<'PY'
import os, sysconfig
directory = sysconfig.get_config_var("LIBDIR") or ""
name = sysconfig.get_config_var("LDLIBRARY") or ""
shared = sysconfig.get_config_var("Py_ENABLE_SHARED") and os.path.exists(os.path.join(directory, name))
print(directory if shared else "")
PY
)
if [ -n "$library" ]; then
    export LD_LIBRARY_PATH="$library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    exec cargo test --workspace --locked --no-fail-fast "$@"
fi
echo "no shared libpython beside $(.venv/bin/python --version): the binding crate is tested through Python only"
exec cargo test --workspace --exclude penstock-python --locked --no-fail-fast "$@"
