#!/bin/sh
# Make one cluster of the masters at HOST:PORT …, unless they are one; end when each of them says so.
# Usage: join.sh [--anew] HOST:PORT HOST:PORT HOST:PORT
# --anew: empty all of them first, and forget what cluster they were. They are a cache: what is lost is computed again.
# Where they do not become one it says so in one line, with what to do, and ends with 0 all the same: daemons start
# without them, and attach once they are there.
set -eu

cli=$(command -v valkey-cli || command -v redis-cli)
ask() {
    host=${1%:*} port=${1##*:}
    shift
    timeout 10 "$cli" -e -h "$host" -p "$port" "$@" 2>&1
}
known() { ask "$1" cluster info | sed -n 's/^cluster_known_nodes:\([0-9]*\).*/\1/p'; }
is_whole() { ask "$1" cluster info | grep -q '^cluster_state:ok' && [ "$(known "$1")" = "$count" ]; }
without() {
    echo "warning: $1; until then blocks are shared without it, or not at all" >&2
    exit 0
}
within_30s() {
    end=$(($(date +%s) + 30))
    until "$@"; do
        [ "$(date +%s)" -lt "$end" ] || return 1
        sleep 0.1
    done
}

anew=
[ "$1" != --anew ] || { anew=1 && shift; }
count=$#
again="sh $0 --anew $*"

alone=0
for master; do
    within_30s ask "$master" ping >/dev/null || without "$master does not answer: start it again, then this"
    [ -z "$anew" ] || { ask "$master" flushall && ask "$master" cluster reset hard; } || without "$master refuses that"
    [ "$(known "$master")" -gt 1 ] || { alone=$((alone + 1)) && lost=$master; }
done
if [ "$alone" -eq "$count" ]; then
    timeout 60 "$cli" --cluster create "$@" --cluster-yes || without "they make no cluster: empty them by: $again"
elif [ "$alone" -gt 0 ]; then
    without "$lost has lost its nodes.conf: make a new cluster of empty masters by: $again"
fi
for master; do
    within_30s is_whole "$master" || without "$master finds no cluster: make a new one of empty masters by: $again"
done
