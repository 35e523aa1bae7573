#!/usr/bin/env bash
# N processes of one run on this machine, joined over 127.0.0.1 as torchrun would join them:
#
#   scripts/launch/local.sh 2 configs/runs/demo.yaml --set train.steps=40
#
# On CPU `train.cpu_devices` is over all processes. On GPUs each process takes that of its local rank, so N is their number.
# SIGTERM and Ctrl-C reach every process: the run saves and leaves. If one process fails the others are ended, and this ends with its code.
# PYTHON names another interpreter than the clone's .venv/bin/python.

set -uo pipefail

if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 N RUN.yaml [--set a.b=c]..." >&2
    exit 2
fi
count=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || { echo "$0: no $python: make venv, or set PYTHON" >&2; exit 2; }

# A variable of another launcher must not win over those set below.
unset "${!JAX_COORDINATOR_@}" JAX_NUM_PROCESSES JAX_PROCESS_ID TORCHELASTIC_USE_AGENT_STORE
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export MASTER_ADDR=127.0.0.1 WORLD_SIZE=$count LOCAL_WORLD_SIZE=$count
MASTER_PORT=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])') || exit
export MASTER_PORT

pids=()
end_all() { [ ${#pids[@]} -eq 0 ] || kill "-$1" "${pids[@]}" 2>/dev/null; }
trap 'end_all TERM' TERM INT HUP

for ((rank = 0; rank < count; rank++)); do
    RANK=$rank LOCAL_RANK=$rank "$python" -m jaxpar train "$@" &
    pids+=($!)
done

failed=0
while [ ${#pids[@]} -gt 0 ]; do
    sleep 0.2
    for rank in "${!pids[@]}"; do
        kill -0 "${pids[rank]}" 2>/dev/null && continue
        code=0
        wait "${pids[rank]}" || code=$?
        unset "pids[rank]"
        if [ "$code" -ne 0 ] && [ "$failed" -eq 0 ]; then
            failed=$code
            echo "$0: process $rank of $count ended with $code" >&2
            # The others may be inside a collective that never ends.
            end_all TERM
            deadline=$((SECONDS + 10))
        fi
    done
    if [ "$failed" -ne 0 ] && [ "$SECONDS" -ge "$deadline" ]; then
        end_all KILL
    fi
done
exit "$failed"
