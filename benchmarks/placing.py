"""What a placement costs among many replicas, in processor time of the router alone.

    python benchmarks/placing.py [--quick]

1,000 replicas get 2,000 requests a second with the lengths and prefixes of Mooncake's conversation hour, played again
and again under new names, after a beginning that fills the fleet. Engines are imagined: prompts and answers take what
the router expects. `Router.admit` is timed; looking prefixes up and recognising tokens are other benchmarks' matter.
The same placements with a price for every replica are timed beside it, and must choose the same replicas.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from statistics import median

from msgspec import json
from report import Figure, conclude

from kvroute.adapters.sized import sized
from kvroute.adapters.trace_files import lines_of
from kvroute.kv.chain import PrefixChain
from kvroute.routing import shortlist
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.demand import Demand, Outcome, Usage
from kvroute.routing.fleet import Fleet
from kvroute.routing.lease import Lease
from kvroute.routing.replica import ModelCard, Replica, ReplicaId
from kvroute.routing.router import Router
from kvroute.sim.workload import name_of

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--quick", action="store_true", help="fewer requests")
TRACE = Path(__file__).resolve().parents[1] / "tests" / "data" / "mooncake_conversation_a.jsonl.gz"
REPLICAS, PER_S, BLOCK = 1_000, 2_000.0, 512
GPUS = 4  # H100 a replica of an 8B model: fewer could not keep up with two of these prompts a second
MEDIAN_US_MAX = 300.0


def demands() -> Iterator[tuple[Demand, int, list[int]]]:
    """Yield requests without end: each with the length of its answer, and the names of its blocks."""
    rows = [json.decode(line) for line in lines_of(TRACE)]
    round_ = 0
    while True:
        for row in rows:
            whole = row["input_length"] // BLOCK
            ids = row["hash_ids"][:whole]
            names = [name_of(round_ if at else 0, id) for at, id in enumerate(ids)]
            chain = PrefixChain(b"".join(name.to_bytes(8, "little") for name in names))
            tokens = row["input_length"]
            demand = Demand(model="m", prompt_tokens=tokens, longest_prompt=tokens, chain=chain, block_size=BLOCK)
            yield demand, row["output_length"], names
        round_ += 1


def fleet() -> Fleet:
    """Make the fleet."""
    sized_ = sized("llama-3.1-8b", "llama-3.1-8b", "h100", GPUS)
    assert sized_ is not None, "a preset"
    made = Fleet(sized_.rates)
    for number in range(REPLICAS):
        id = ReplicaId(f"r{number}")
        cards = (ModelCard("m", 131_072),)
        made.join(
            Replica(
                id=id,
                url=f"http://{id}",
                cards=cards,
                block_size=BLOCK,
                capacity_tokens=int(sized_.capacity_tokens),
                max_num_seqs=256,
            ),
            0.0,
        )
    return made


def play(count: int, warm: int) -> tuple[list[float], list[str]]:
    """Play requests; return what each placement took after the first `warm` ones, in us, and where each went."""
    router = Router(fleet(), admission=AdmissionSettings())
    holders: dict[int, dict[ReplicaId, None]] = {}  # of a block
    due: list[tuple[float, int, Lease, Usage | None]] = []
    spent, went, now_s = [], [], 0.0
    for number, (demand, output, names) in zip(range(count), demands(), strict=False):
        now_s += 1 / PER_S
        while due and due[0][0] <= now_s:
            at_s, _, lease, usage = heappop(due)
            if usage is None:
                lease.began(at_s)
            else:
                lease.finish(Outcome.DONE, at_s, usage)
        hits: dict[ReplicaId, int] = {}
        for depth, name in enumerate(names, 1):
            here = holders.get(name)
            if not here:
                break
            hits.update(dict.fromkeys(here, depth * BLOCK))
        begin = time.thread_time_ns()
        answer = router.admit(demand, hits, now_s)
        took = (time.thread_time_ns() - begin) / 1_000
        if number >= warm:
            spent.append(took)
        if not isinstance(answer, Lease):
            router.drop(answer, now_s)
            went.append("held")
            continue
        placed = answer.placement
        went.append(str(placed.replica))
        for name in names:
            holders.setdefault(name, {})[placed.replica] = None
        first_s = now_s + placed.first_token_s
        end_s = first_s + output * placed.rates.step_at(placed.view.sequences, placed.view.kv_tokens)
        heappush(due, (first_s, 2 * number, answer, None))
        heappush(due, (end_s, 2 * number + 1, answer, Usage(demand.prompt_tokens, output, placed.hit_tokens)))
    return spent, went


def main() -> int:
    count, warm = (8_000, 4_000) if PARSER.parse_args().quick else (24_000, 12_000)
    spent, went = play(count, warm)
    fewer = count // 4
    shortlist.REPLICAS_MIN, saved = REPLICAS + 1, shortlist.REPLICAS_MIN
    each, there = play(fewer, fewer // 2)
    shortlist.REPLICAS_MIN = saved
    ordered = sorted(spent)
    return conclude(
        [
            Figure("placing_us_median", median(spent), "us", at_most=MEDIAN_US_MAX),
            Figure("placing_us_p99", ordered[len(ordered) * 99 // 100], "us"),
            Figure("placing_us_median_with_every_price", median(each), "us"),
            Figure(
                "placing_elsewhere_than_with_every_price",
                sum(a != b for a, b in zip(went, there, strict=False)),
                "",
                at_most=0,
            ),
            Figure("placing_held_share", went.count("held") / count, ""),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
