"""One vLLM in processes of its own, for test_vllm_processes.py: a JSON request on stdin, one line of JSON on stdout.

{"model", "kvtier", "options", "prompts", "num_tokens", "stay"} → {"text", "cached", "counted"}: the last are kvtier's
series that are not 0. With `stay` it then waits to be killed, so that nothing of a clean shutdown happens.
"""

import json
import signal
import sys


def main() -> None:
    """Answer one request."""
    asked = json.load(sys.stdin)
    from vllm_rig import Engine

    engine = Engine(asked["model"], asked["kvtier"], **asked["options"])
    outputs = engine.run(asked["prompts"], asked["num_tokens"])
    reply = {
        "text": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "counted": engine.reported(),
    }
    if asked["stay"]:
        print(json.dumps(reply), flush=True)
        signal.pause()
    engine.core.shutdown()
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
