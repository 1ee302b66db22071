"""SGLang's own server on a CPU: argv are its options."""

import multiprocessing
import sys

import sglang_on_cpu  # noqa: F401 -- before SGLang

# isort: split
from sglang.launch_server import run_server
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: F401 -- imported once, for all processes
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    get_hash_str(list(range(16)), None, page_size=16)  # builds SGLang's extension, before anything waits for it
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang asks for "spawn"
    run_server(prepare_server_args(sys.argv[1:]))
