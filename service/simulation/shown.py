"""A simulation as people see it: one table, and hit shares by size and policy beside the optimum."""

from collections.abc import Sequence
from typing import Final

from kvtier.service.charts import Chart, Line, Table
from kvtier.service.simulation.value import RunValue
from kvtier.service.traces import RequestTrace
from kvtier.tiers.config import show_size

_GIB: Final = 1 << 30


def table_of_runs(values: Sequence[RunValue], requests: RequestTrace, assumed: Sequence[str]) -> Table:
    """A row for each run; columns of tiers and of money only where there are some."""
    with_disk, with_redis = any(each.disk_bytes for each in values), any(each.redis_bytes for each in values)
    with_money = any(each.money_saved is not None for each in values)
    heads = ["memory", *["disk"] * with_disk, *["redis"] * with_redis, "policy", "hits", "optimum", "tokens"]
    heads += [*["from disk"] * with_disk, *["from redis"] * with_redis, "saved", "TTFT", "without"]
    heads += ["money saved"] * with_money
    rows, share = [], "{:.2%}".format
    for each in values:
        cells = [show_size(each.memory_bytes)]
        cells += [show_size(each.disk_bytes)] * with_disk + [show_size(each.redis_bytes)] * with_redis
        cells += [each.policy, share(each.block_hit_share), share(each.optimum_block_hit_share)]
        cells += [share(each.token_hit_share)]
        cells += [share(each.file_hit_share)] * with_disk + [share(each.redis_hit_share)] * with_redis
        cells += [f"{each.seconds_saved:,.0f} s", f"{each.mean_ttft * 1e3:,.0f} ms"]
        cells += [f"{each.mean_ttft_without * 1e3:,.0f} ms"]
        cells += [f"{each.money_saved:,.2f}"] if each.money_saved is not None else ["–"] * with_money
        rows.append(cells)
    title = f"{len(requests):,} requests, {int(requests.num_tokens.sum()):,} prompt tokens"
    return Table(title, heads, rows, "assumed:\n" + "\n".join(f"- {each}" for each in assumed))


def charts_of_runs(values: Sequence[RunValue]) -> list[Chart]:
    """Hit share and time to the first token by memory: a line for each policy, and for each size of what lies below."""
    below = list(dict.fromkeys((each.disk_bytes, each.redis_bytes) for each in values))
    hits, times = [], []
    for rooms in below:
        runs = [each for each in values if (each.disk_bytes, each.redis_bytes) == rooms]
        suffix = "".join(
            f", {name} {show_size(room)}" for name, room in zip(("disk", "redis"), rooms, strict=True) if room
        )
        for policy in dict.fromkeys(each.policy for each in runs):
            own = sorted((each for each in runs if each.policy == policy), key=lambda each: each.memory_bytes)
            sizes = [each.memory_bytes / _GIB for each in own]
            hits.append(Line(policy + suffix, sizes, [100 * each.block_hit_share for each in own]))
            times.append(Line(policy + suffix, sizes, [1000 * each.mean_ttft for each in own]))
        best = {each.memory_bytes: each.optimum_block_hit_share for each in runs}
        sizes = [size / _GIB for size in sorted(best)]
        hits.append(Line("optimum" + suffix, sizes, [100 * best[size] for size in sorted(best)], is_dashed=True))
    sizes = sorted({each.memory_bytes / _GIB for each in values})
    times.append(Line("without", sizes, [1000 * values[0].mean_ttft_without] * len(sizes), is_dashed=True))
    return [
        Chart("Blocks that were found", "memory, GiB", "% of blocks asked for", hits, log_x=True),
        Chart("Time to the first token", "memory, GiB", "mean TTFT, ms", times, log_x=True),
    ]
