#!/usr/bin/env bash
# Run the project's GPU checks or measurements, each step in a process of its own with a time limit.
#
#   tools/gpu/run.sh check                # correctness: versions, runs, tests/gpu (about 4 minutes on one H100)
#   tools/gpu/run.sh measure              # speed: rows of benchmarks/gpu.py, profiles, the demo (about 8 minutes)
#   ... --seconds 300 --only tests-engine,run-grpo --smallest
#
# A step that fails is recorded and the next one starts. Results and logs are written to $OUT (build/gpu): CALL.json and
# CALL.log. Packages that the machine lacks are installed from the wheels in $WHEELS (.whl); README.md lists them.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
export OUT="${OUT:-$PWD/build/gpu}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"
# Some rows save a model and load it again: in memory, where there is room for 40 GB.
if [ "$(df --output=avail -k /dev/shm 2>/dev/null | tail -1)" -gt 40000000 ] 2>/dev/null; then export TMPDIR=/dev/shm; fi
PYTHON="${PYTHON:-python3}"
if compgen -G "${WHEELS:-.whl}/*.whl" >/dev/null; then
    site="$(mktemp -d)"
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        "${WHEELS:-.whl}"/*.whl || exit
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" tools/gpu/steps.py "$@"
