"""One vLLM in processes of its own, for test_vllm_processes.py: a JSON request on stdin, one line of JSON on stdout.

{"model", "kvtier", "options", "prompts", "num_tokens", "die"} → {"text", "cached"}; with `die` the process then kills
itself, so that nothing of a clean shutdown happens.
"""

import json
import os
import signal
import sys
import time


def main() -> None:
    """Answer one request."""
    asked = json.load(sys.stdin)
    from vllm_rig import Engine

    engine = Engine(asked["model"], asked["kvtier"], **asked["options"])
    outputs = engine.run(asked["prompts"], asked["num_tokens"])
    reply = {
        "text": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }
    if asked["die"]:
        time.sleep(3)  # what was stored is on its way to the disk; nobody tells the engine to hurry
        print(json.dumps(reply), flush=True)
        os.killpg(0, signal.SIGKILL)
    engine.core.shutdown()
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
