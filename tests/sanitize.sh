#!/usr/bin/env bash
# The four tools of NVIDIA's compute-sanitizer over tests/sanitize_run.py: any finding in a kernel of this package, and
# the exit code is not 0. A first run, with a read out of bounds, must be found, or nothing else would mean anything.
#
# Needs a GPU, a Python that can import the package and its tests (`pip install -e ".[cu13,test]"`), and
# compute-sanitizer: of a CUDA toolkit on the PATH, or from `pip install nvidia-cuda-sanitizer-api` (of CUDA 13).
# Some two minutes. PYTHON names another interpreter than `python`.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python}

sanitizer=$(command -v compute-sanitizer || "$python" -c '
import importlib.util, pathlib
places = importlib.util.find_spec("nvidia").submodule_search_locations if importlib.util.find_spec("nvidia") else []
found = [p for place in places for p in pathlib.Path(place).glob("*/compute-sanitizer/compute-sanitizer")]
print(found[0] if found else "")')
if [[ -z $sanitizer ]]; then
    echo "compute-sanitizer was not found; install a CUDA toolkit, or: pip install nvidia-cuda-sanitizer-api" >&2
    exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Compiled once for all runs, and apart from the user's own.
export NUMBA_KVCACHE_CACHE_DIR="$work/cache" PYTHONPATH="$PWD:$PWD/..${PYTHONPATH:+:$PYTHONPATH}"

sanitize() { # tool, then the run's arguments; the sanitizer's exit code, 86 for findings
    local tool=$1 options=()
    shift
    # Bytes between allocations, so that a step past an end is seen. Numba and CUDA's own libraries try driver calls
    # that fail, as they may; those are no findings.
    [[ $tool == memcheck ]] && options=(--padding 512 --report-api-errors no)
    "$sanitizer" --tool "$tool" "${options[@]}" --kernel-name kns=store_kvcache --error-exitcode 86 \
        "$python" sanitize_run.py "$@" >"$work/$tool.log" 2>&1
}

result=0
sanitize memcheck --fault || result=$?
if [[ $result != 86 ]]; then
    cat "$work/memcheck.log"
    echo "a read out of bounds was not found (exit code $result, 86 expected)" >&2
    exit 1
fi
echo "control: a read out of bounds is found"

for tool in memcheck racecheck initcheck synccheck; do
    if ! sanitize "$tool"; then
        cat "$work/$tool.log"
        echo "$tool: findings, or the run failed" >&2
        exit 1
    fi
    echo "$tool: $(grep -E 'SUMMARY' "$work/$tool.log" | sed 's/^=* *//'); $(grep -E '^[0-9]+ stores' "$work/$tool.log")"
    if [[ -n ${NUMBA_KVCACHE_TALLY:-} ]]; then
        echo "{\"what\": \"compute-sanitizer\", \"tool\": \"$tool\", \"findings\": 0}" >>"$NUMBA_KVCACHE_TALLY"
    fi
done
