"""Marked segments in a real vLLM: right answers on the recall task, exact names for nothing approximate, refusals."""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import httpx
from node_rig import Node, free_port
from pair_rig import Server, serving
from recall import asked, servable
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm_rig import BLOCK, Engine, engine, make_checkpoint, multi, prompt, tiers

from kvtier.connector import StepPlan
from kvtier.connector.segments import Blender, BlendResult
from kvtier.connector.vllm import blending
from kvtier.connector.vllm.messages import CopyReports

pytestmark = pytest.mark.timeout(300)

DOCUMENTS: Final = [prompt(seed, 2 * BLOCK) for seed in (1, 2, 3)]
QUESTION: Final = prompt(4, 9)
PROMPTS: Final = [[*DOCUMENTS[2], *DOCUMENTS[0], *prompt(5, 5), *DOCUMENTS[1], *QUESTION]]
MARKS: Final = [[64, 128], [133, 197]]
ANSWER: Final = 40  # tokens: more than a block
ON: Final[dict[str, Any]] = {"keys": "kvtier", "cache": {"segments": "on"}}
HARDLY: Final = {"rule": "first", "share": 0.05, "max_deviation": 1e9}  # weights are random, so the text is another

IN_FULL: Final = {"rule": "first", "share": 1.0}


def params(marks: Any = None, repair: dict[str, Any] | None = None, num_tokens: int = ANSWER, **more: Any) -> Any:
    given = {**more, **({} if marks is None else {"kvtier_segments": marks, "kvtier_repair": repair or HARDLY})}
    extra = {"kv_transfer_params": given} if given else None
    return SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False, ignore_eos=True, extra_args=extra)


def ask(vllm: Engine, tokens: list[int], marks: Any = None, *arguments: Any, **more: Any) -> Any:
    [output] = vllm.llm.generate([{"prompt_token_ids": tokens}], params(marks, *arguments, **more), use_tqdm=False)
    return output


def text(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def precompute(vllm: Engine, documents: Sequence[list[int]] = DOCUMENTS) -> None:
    for document in documents:
        ask(vllm, document, num_tokens=1)
    vllm.forget_l1()


def worker_half() -> Any:
    """The connector's half in vLLM's worker, in this process."""
    connector: Any = get_kv_transfer_group()
    return connector._worker_half


def outcomes(vllm: Engine) -> dict[str, float]:
    prefix = 'kvtier_blends_total{outcome="'
    return {name[len(prefix) : -2]: value for name, value in vllm.stats().items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What a vLLM without kvtier answers to the prompt."""
    with engine(model) as plain:
        return plain.text(PROMPTS, ANSWER)


@pytest.mark.timeout(600)
def test_blends_of_a_served_model_answer_as_a_full_prefill_does(tmp_path: Path) -> None:
    """Three of four documents are reused. Without repair the answers are wrong: the ruler measures."""
    questions = asked(25, 4, form=(4, BLOCK))
    config: dict[str, Any] = {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    config["kv_connector_extra_config"] = {**tiers(), **ON, "host": {"size": "64MiB"}}
    command = ["vllm", "serve", str(servable(tmp_path)), "--port", str(free_port())]
    marks = [[place * BLOCK, (place + 1) * BLOCK] for place in range(4)]
    with serving([*command, "--kv-transfer-config", json.dumps(config)], tmp_path / "log") as server:
        documents = [document for each in questions[::4] for document in each.documents[1:]]
        for _ in at_once(server, documents, None):
            pass
        server.forget_l1()
        full, _ = answers(server, questions, {"max_offload_tokens": 0})  # else its blocks would be an exact prefix
        right, repaired = {}, {}
        for share in (0.2, 0.0):
            server.forget_l1()
            told = {"kvtier_segments": marks, "kvtier_repair": {"share": share, "max_deviation": 1e9}}
            right[share], repaired[share] = answers(server, questions if share else questions[:40], told)
        metrics = httpx.get(f"{server.url}/metrics").text
    assert full >= 0.97
    assert right[0.2] >= 0.95 * full, (right, full)
    assert right[0.0] <= 0.85 * full, (right, full)
    assert repaired == {0.2: pytest.approx(0.2, abs=0.01), 0.0: 0.0}
    assert "vllm:kvtier_blends_total{" in metrics


def at_once(server: Server, prompts: Sequence[list[int]], told: dict[str, Any] | None) -> Iterator[Any]:
    """What the server answers, several at a time."""
    with ThreadPoolExecutor(4) as threads:
        yield from threads.map(lambda tokens: server.ask(tokens, 1, told), prompts)


def answers(server: Server, questions: Sequence[Any], told: dict[str, Any]) -> tuple[float, float]:
    """The share of right answers, and of the reused tokens those computed again."""
    right, counts = 0, {"segment": 0, "repaired": 0}
    found = at_once(server, [each.prompt for each in questions], told)
    for each, (answer, about) in zip(questions, found, strict=True):
        right += answer.tokens == [each.answer]
        if "kvtier_segments" in told:
            assert about is not None
            counts = {name: counts[name] + about["kvtier_approximate"][name] for name in counts}
    return right / len(questions), counts["repaired"] / max(1, counts["segment"])


def test_nothing_approximate_is_found_by_another_request(model: Path, expected: list[list[int]]) -> None:
    """Neither in vLLM's own cache nor in a tier; also where a later turn continues the blended one."""
    [right], [tokens] = expected, PROMPTS
    with engine(model, {**tiers(), **ON}) as vllm:
        precompute(vllm)
        first = ask(vllm, tokens, MARKS)
        blended = text(first)
        assert blended != right
        about = {"segment": 128, "repaired": 6, "repair_share": 0.0469}
        assert first.kv_transfer_params == {"kvtier_approximate": about}
        assert first.num_cached_tokens == 64  # the exact prefix, from L2: segments are not among them
        assert text(ask(vllm, tokens)) == right  # while vLLM has the blended blocks
        assert text(ask(vllm, tokens, MARKS)) == right  # all of its blocks are exact now
        vllm.forget_l1()
        assert text(ask(vllm, tokens)) == right
        vllm.half.reset()
        vllm.forget_l1()
        precompute(vllm)
        assert text(ask(vllm, tokens, MARKS)) == blended  # again
        turn = [*tokens, *blended]
        assert text(ask(vllm, turn, num_tokens=8)) == text(ask(vllm, turn, num_tokens=8, max_load_tokens=0))
        again = ask(vllm, turn, num_tokens=8)
        vllm.forget_l1()
        vllm.half.reset()
        fresh = ask(vllm, turn, num_tokens=8)
        assert fresh.num_cached_tokens == 0
        assert text(again) == text(fresh)
        assert outcomes(vllm) == {"blended": 2, "absent": 1}


def test_blended_requests_beside_exact_ones_of_the_same_prompt(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blended in pieces, and with too few blocks for both: the blended one loses its blocks and goes on."""
    [right], [tokens] = expected, PROMPTS
    with engine(
        model, {**tiers(), **ON}, num_gpu_blocks_override=18, max_num_batched_tokens=64, max_model_len=512
    ) as vllm:
        monkeypatch.setattr(vllm.half.segments, "_room", 18)
        precompute(vllm)
        llm, preempted = vllm.llm.llm_engine, 0
        for turn in range(3):
            exact = params(num_tokens=150, max_offload_tokens=0)
            for kind, about in (("exact", exact), ("marked", params(MARKS, num_tokens=150))):
                llm.add_request(f"{turn} {kind}", {"prompt_token_ids": tokens}, about)
            [_, marked], said = vllm.scheduler.requests.values(), dict[str, list[int]]()
            while llm.has_unfinished_requests():
                said |= {each.request_id: text(each) for each in llm.step() if each.finished}
            preempted += marked.num_preemptions
            assert [said[f"{turn} {kind}"][:ANSWER] == right for kind in ("exact", "marked")] == [True, False]
            assert text(ask(vllm, tokens, max_offload_tokens=0)) == right  # in vLLM's cache there are both
            vllm.forget_l1()
        assert preempted
        assert outcomes(vllm) == {"blended": 3}
        assert text(ask(vllm, tokens)) == right


def test_what_was_blended_stays_so_when_the_connector_forgets_the_request(
    model: Path, expected: list[list[int]]
) -> None:
    """As it does when weights change. Then vLLM preempts it, and it finds its blended blocks in vLLM's cache."""
    [right], [tokens] = expected, PROMPTS
    with engine(model, {**tiers(), **ON}) as vllm:
        precompute(vllm)
        llm = vllm.llm.llm_engine
        llm.add_request("blended", {"prompt_token_ids": tokens}, params(MARKS))
        [request] = vllm.scheduler.requests.values()
        while request.num_output_tokens < 3:
            llm.step()
        vllm.half.weights_change()
        vllm.scheduler.running.remove(request)
        vllm.scheduler._preempt_request(request, time.monotonic())
        while llm.has_unfinished_requests():
            llm.step()
        assert request.num_preemptions
        assert text(ask(vllm, tokens)) == right


def test_through_a_daemon(model: Path, expected: list[list[int]], daemon: Node) -> None:
    """Its memory has the segments, which another server computed."""
    told = {"service": daemon.section, "host": {"size": "16MiB"}, **ON}
    told["cache"] = {"segments": "on", "prefetch_deadline": "60s"}
    with engine(model, told) as first:
        precompute(first)
    with engine(model, told) as second:
        found = ask(second, PROMPTS[0], MARKS)
        assert found.kv_transfer_params["kvtier_approximate"]["segment"] == 128
        assert text(found) != expected[0]
        assert text(ask(second, PROMPTS[0])) == expected[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layers_of_each_family_compute_what_vllm_computes(family: str, tmp_path: Path) -> None:
    """With every token repaired a blend is a full prefill, through our attention."""
    path = make_checkpoint(family, tmp_path / "model")
    with engine(path, {**tiers(), **ON}) as vllm:
        right = text(ask(vllm, PROMPTS[0], max_offload_tokens=0))
        precompute(vllm)
        found = ask(vllm, PROMPTS[0], MARKS, IN_FULL)
        assert text(found) == right
        assert found.kv_transfer_params == {
            "kvtier_approximate": {"segment": 128, "repaired": 128, "repair_share": 1.0}
        }
        assert text(ask(vllm, PROMPTS[0], MARKS, HARDLY)) != right


def test_requests_that_are_computed_as_usual_say_why(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    [right], [tokens] = expected, PROMPTS
    with engine(model, {**tiers(), **ON}) as vllm:
        counted = dict[str, float]()

        def computes(why: str, *arguments: Any, **more: Any) -> None:
            found = ask(vllm, tokens, *arguments, max_offload_tokens=0, **more)
            assert (text(found), found.kv_transfer_params) == (right, None)
            counted[why] = counted.get(why, 0) + 1
            assert outcomes(vllm) == counted
            vllm.forget_l1()

        computes("absent", MARKS)
        precompute(vllm)
        for wrong in ([[0, 64], [60, 70]], [[64, 1000]], [[64]], "all", [["a", "b"]], [[64, 128, 3]]):
            computes("wrong_marks", wrong)
        for repair in ({"rule": "best"}, {"share": 2}, {"check_layer": 9}, {"no": 1}, 3):
            computes("wrong_marks", MARKS, repair)
        computes("handover", MARKS, do_remote_prefill=True)
        computes("absent", [[70, 100]])  # shorter than a block
        monkeypatch.setattr(vllm.half.segments, "_room", 7)
        computes("no_room", MARKS)
        monkeypatch.undo()
        advance = Blender.advance

        def fails(self: Blender, pieces: Any) -> list[int]:
            raise ValueError("the test failed this blend")

        monkeypatch.setattr(Blender, "advance", fails)
        monkeypatch.setattr(worker_half().blending, "_is_tested", True)
        computes("failed", MARKS)
        monkeypatch.setattr(Blender, "advance", advance)
        # what L2 has is not what is computed: from then on no request is blended
        monkeypatch.setattr(blending, "tolerance_of", lambda dtype: 0.0)
        monkeypatch.setattr(worker_half().blending, "_is_tested", False)
        computes("unsupported", MARKS)
        computes("unsupported", MARKS)


def test_set_ups_that_are_not_blended_say_why(
    model: Path, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sliding = make_checkpoint("mistral-window", tmp_path / "sliding")
    set_ups: list[tuple[str, Path, dict[str, Any]]] = [
        ('set "keys" to "kvtier"', model, {"kvtier": {**tiers(), **ON, "keys": "vllm"}}),
        ("kv_load_failure_policy", model, {"kvtier": {**tiers(), **ON}, "policy": "fail"}),
        ("beside another connector", model, {"transfer": multi({**tiers(), **ON}, kv_load_failure_policy="recompute")}),
        ("share_across_tp", model, {"kvtier": {**tiers(), **ON, "cache": {"segments": "on", "share_across_tp": 2}}}),
        ("sliding windows", sliding, {"kvtier": {**tiers(), **ON}}),
    ]
    for why, path, options in set_ups:
        caplog.clear()
        with engine(path, **options) as vllm:
            right = text(ask(vllm, PROMPTS[0], max_offload_tokens=0))
            assert path != model or right == expected[0]
            precompute(vllm)
            found = ask(vllm, PROMPTS[0], MARKS)
            assert (text(found), found.kv_transfer_params) == (right, None)
            assert outcomes(vllm) == {"unsupported": 1}
            assert why in caplog.text


def test_who_decodes_beside_a_blend_gets_a_token_in_every_step(model: Path) -> None:
    with engine(model, {**tiers(), **ON}, max_num_batched_tokens=BLOCK) as vllm:
        precompute(vllm)
        llm, steps, decoded = vllm.llm.llm_engine, 0, 0
        llm.add_request("decodes", {"prompt_token_ids": QUESTION}, params(num_tokens=200))
        for _ in range(3):
            llm.step()
        llm.add_request(
            "blended", {"prompt_token_ids": PROMPTS[0]}, params(MARKS, {"share": 0.3, "max_deviation": 1e9})
        )
        [request, _] = vllm.scheduler.requests.values()
        while not steps or vllm.half.segments:
            seen = request.num_output_tokens
            llm.step()
            steps, decoded = steps + 1, decoded + request.num_output_tokens - seen
        assert steps == decoded
        assert steps >= 3
        llm.abort_request(["decodes", "blended"])


def test_a_prefix_that_another_request_computes_in_the_same_step_is_read_behind_it(model: Path) -> None:
    """vLLM shares a block with others when the step that computes it is planned."""
    prefix = prompt(6, 2 * BLOCK)
    tokens, marks = [*prefix, *DOCUMENTS[0], *QUESTION], [[64, 128]]
    with engine(model, {**tiers(), **ON, "cache": {"segments": "on", "store_generated": False}}) as vllm:
        precompute(vllm)
        llm, said = vllm.llm.llm_engine, dict[str, list[int]]()
        llm.add_request("computes", {"prompt_token_ids": [*prefix, *QUESTION]}, params(num_tokens=4))
        llm.add_request("blended", {"prompt_token_ids": tokens}, params(marks))
        while llm.has_unfinished_requests():
            said |= {each.request_id.rpartition("-")[0] or each.request_id: text(each) for each in llm.step()}
        assert outcomes(vllm) == {"blended": 1}
        vllm.forget_l1()
        alone = ask(vllm, tokens, marks)
        assert alone.num_cached_tokens == 2 * BLOCK
        assert said["blended"] == text(alone)


def test_a_request_that_is_aborted_while_it_is_blended_gives_its_blocks_back(model: Path) -> None:
    with engine(model, {**tiers(), **ON}, max_num_batched_tokens=BLOCK) as vllm:
        precompute(vllm)
        llm, pool = vllm.llm.llm_engine, vllm.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        llm.add_request("guest", {"prompt_token_ids": PROMPTS[0]}, params(MARKS, IN_FULL))
        for _ in range(100):
            llm.step()
            if vllm.half.segments:
                break
        assert pool.get_num_free_blocks() < free
        llm.abort_request(["guest"])
        vllm.settle()
        assert pool.get_num_free_blocks() == free
        assert outcomes(vllm) == {"aborted": 1}


def test_with_steps_in_flight_vllm_shares_nothing_blended(model: Path) -> None:
    """vLLM's scheduler for asynchronous steps, which run on no CPU, and a worker that is played."""
    with engine(model, {**tiers(), **ON}) as vllm:
        precompute(vllm)
        plain = vllm.scheduler
        scheduler = AsyncScheduler(
            vllm_config=plain.vllm_config,
            kv_cache_config=plain.kv_cache_config,
            structured_output_manager=plain.structured_output_manager,
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        hasher, worker = get_request_block_hasher(BLOCK, sha256), PlayedWorker(scheduler)

        def request(name: str, tokens: list[int], about: Any) -> Request:
            return Request(name, tokens, about, None, block_hasher=hasher)

        for number, document in enumerate(DOCUMENTS):
            worker.run(request(str(number), document, params(num_tokens=1)))
        marked = request("marked", PROMPTS[0], params(MARKS))
        worker.run(marked)
        assert [len(order.parts) for order in worker.orders] == [2]
        again = request("again", PROMPTS[0], params())
        assert marked.num_computed_tokens > len(PROMPTS[0])
        assert not set(marked.block_hashes[2:]) & set(again.block_hashes)
        assert scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 64
        half = scheduler.connector._scheduler
        names = half.names.of(again).current().hashes
        found = half.side.tiers.locate(names, 1.0)
        assert found.blocks - found.miss == 2
        scheduler.connector.shutdown()


class PlayedWorker:
    """Runs steps two at a time: what is to be blended is, and what is to be copied."""

    def __init__(self, scheduler: Any) -> None:
        self.orders: list[Any] = []
        self._scheduler = scheduler
        self._computed = dict[str, int]()
        self._readiness: str | None = ""

    def run(self, request: Request) -> None:
        self._scheduler.add_request(request)
        under_way = deque[Any]()
        for _ in range(200):
            if self._scheduler.has_requests() or self._scheduler.connector.has_pending_push_work():
                output = self._scheduler.schedule()
                under_way.append((output, self._step(output, request.num_prompt_tokens)))
            if len(under_way) == 2 or (under_way and not self._scheduler.has_requests()):
                self._scheduler.update_from_output(*under_way.popleft())
        assert not self._scheduler.has_requests()

    def _step(self, output: Any, num_prompt_tokens: int) -> ModelRunnerOutput:
        message, readiness, self._readiness = output.kv_connector_metadata, self._readiness, None
        plans = StepPlan.decode(message.final_stores), StepPlan.decode(message.plan)
        ops = [op.op_id for plan in plans for op in (*plan.loads, *plan.stores)]
        ops += [source.op_id for order in message.blends.values() for source in order.sources]
        self.orders += message.blends.values()
        self._computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        sampled = []
        for name, number in output.num_scheduled_tokens.items():
            self._computed[name] += number
            sampled.append([7] if self._computed[name] >= num_prompt_tokens else [])
        blended = dict.fromkeys(message.blends, BlendResult(128, 6, 83))
        reports = CopyReports(dict.fromkeys(ops, (1, 0)), frozenset(), blended, readiness)
        return ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={name: index for index, name in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_recving=set(message.blends) or None, kv_connector_worker_meta=reports
            ),
        )
