#!/bin/sh
# Make one cluster of the masters at HOST:PORT …, unless they are one; end when each of them says so.
# Usage: join.sh HOST:PORT HOST:PORT HOST:PORT
set -eu

cli=$(command -v valkey-cli || command -v redis-cli)
info() { "$cli" -h "${1%:*}" -p "${1##*:}" cluster info; }
is_whole() { info "$1" | grep -q '^cluster_state:ok' && info "$1" | grep -q "^cluster_known_nodes:$count"; }

count=$#
is_whole "$1" || "$cli" --cluster create "$@" --cluster-yes

for master; do
    left=300 # tenths of a second
    until is_whole "$master"; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || { echo "$master is not part of the cluster after 30 s" >&2; exit 1; }
        sleep 0.1
    done
done
