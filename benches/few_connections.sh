#!/bin/sh
# Answers a file on a fleet of six workers, an admin and a producer on a Postgres of 14 connections, with each of
# the given programs in turn, and prints tokens per second. Needs redis-server and Postgres (its bin folder in PATH or
# in /usr/lib/postgresql). Run as root, which Postgres refuses, it uses the user `postgres`.
#
#   benches/few_connections.sh [--connections N] [--rounds N] [--lines N] PROGRAM...
set -eu
connections=14 rounds=3 lines=2000
while [ $# -gt 0 ]; do
    case $1 in
        --connections) connections=$2; shift 2 ;;
        --rounds) rounds=$2; shift 2 ;;
        --lines) lines=$2; shift 2 ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || { sed -n '2,6p' "$0"; exit 1; }
PATH=$PATH:$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -1)
folder=$(mktemp -d)
pids=
stop() { [ -z "$pids" ] || kill $pids 2>/dev/null || :; wait 2>/dev/null || :; pids=; }
trap 'stop; rm -rf "$folder"' EXIT INT TERM
as() { if [ "$(id -u)" = 0 ]; then setpriv --reuid postgres --regid postgres --clear-groups "$@"; else "$@"; fi; }
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

python3 - "$lines" >"$folder/in.jsonl" <<'PY'
import json, sys
for i in range(int(sys.argv[1])):
    text = f"Invoice {i} was paid on the {1 + i % 28} of March, 2024"
    print(json.dumps({"custom_id": f"q{i}", "prompt": text, "max_tokens": 24, "temperature": 1.0}))
PY

run() {
    program=$1 data=$folder/data
    rm -rf "$data" "$folder"/out*
    mkdir "$data"
    [ "$(id -u)" != 0 ] || { chown postgres "$data"; chmod 755 "$folder"; }
    as initdb -D "$data" -U postgres -A trust >/dev/null
    database=$(port) redis=$(port)
    as postgres -D "$data" -p "$database" -h 127.0.0.1 -k "$data" -c max_connections="$connections" -c fsync=off >/dev/null 2>&1 &
    pids=$!
    redis-server --port "$redis" --save '' >/dev/null &
    pids="$pids $!"
    until pg_isready -q -h 127.0.0.1 -p "$database"; do sleep 0.1; done
    psql -q -h 127.0.0.1 -p "$database" -U postgres -c 'CREATE ROLE plain LOGIN; GRANT CREATE ON SCHEMA public TO plain'
    export REDIS_URL="redis://127.0.0.1:$redis" DATABASE_URL="postgres://plain@127.0.0.1:$database/postgres"
    export TRITMILL_FIRST_KEY_FILE="$folder/key"
    "$program" migrate 2>/dev/null
    for worker in 1 2 3 4 5 6; do
        "$program" worker --threads 1 --listen 127.0.0.1:0 >/dev/null 2>"$folder/worker$worker" &
        pids="$pids $!"
    done
    "$program" admin --listen 127.0.0.1:0 >/dev/null 2>"$folder/admin" &
    pids="$pids $!"
    sleep 10
    began=$(date +%s%N)
    timeout 300 "$program" batch run "$folder/in.jsonl" -o "$folder/out.jsonl" --json >"$folder/summary" 2>"$folder/batch" || :
    ended=$(date +%s%N)
    answered=$(cat "$folder/out.jsonl" 2>/dev/null | grep -c '"custom_id"' || :)
    timed_out=$(cat "$folder"/worker? "$folder/admin" "$folder/batch" | grep -c 'timed out\|no answer\|became free' || :)
    python3 - "$program" "$began" "$ended" "$answered" "$timed_out" "$folder/out.jsonl" <<'PY'
import json, sys
program, began, ended, answered, timed_out, out = sys.argv[1:]
seconds = (int(ended) - int(began)) / 1e9
tokens = 0
try:
    for line in open(out):
        usage = (json.loads(line).get("response") or {}).get("body", {}).get("usage") or {}
        tokens += usage.get("completion_tokens", 0)
except FileNotFoundError:
    pass
print(f"{program}: {answered} lines, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s; warnings of waits: {timed_out}")
PY
    stop
}

round=1
while [ "$round" -le "$rounds" ]; do
    for program in "$@"; do run "$program"; done
    round=$((round + 1))
done
