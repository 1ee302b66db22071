"""Dynamo's KV indexer as a process: its own command line behind this file's name."""

import sys

from dynamo._core import run_kv_indexer

run_kv_indexer(sys.argv[1:])
