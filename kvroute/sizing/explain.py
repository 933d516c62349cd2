"""Why an engine's plan holds less, or more, than the plain arithmetic says: each reason with its size."""

from __future__ import annotations

from kvroute.sizing.capacity import kv_bytes_per_gpu
from kvroute.sizing.model import Model
from kvroute.sizing.planner import Plan, Settings
from kvroute.sizing.words import gb

NOTABLE = 0.001  # of the memory; less is not worth a sentence


def explain(model: Model, planned: Plan, settings: Settings, available_bytes: int) -> tuple[str, ...]:
    """Say why `planned` differs from the ideal for conversations of max_model_len."""
    length = settings.max_model_len
    ideal = available_bytes / max(1, kv_bytes_per_gpu(model, length, settings.parallel, settings.element_bytes))
    reasons = [
        f"ideal: {ideal:,.2f} conversations of {length:,} tokens; as vLLM plans them: {planned.max_concurrency:,.2f}"
    ]
    if settings.blocks_override is not None:
        return (*reasons, f"the number of blocks is overridden: {planned.blocks:,}")
    reasons += [*_windows(planned, settings), *_padding(planned), *_blocks(planned, settings)]
    left = available_bytes - planned.blocks * planned.bytes_per_block
    if left > NOTABLE * available_bytes:
        reasons.append(f"{gb(left)} are less than a block and stay unused")
    reasons.append(f"block 0 is never used: {gb(planned.bytes_per_block)}")
    return tuple(reasons)


def _windows(planned: Plan, settings: Settings) -> list[str]:
    """Window layers hold the batches in flight beside their window."""
    reasons = []
    for group in dict.fromkeys((one.specs[0], one.blocks_per_request) for one in planned.groups):
        spec, blocks = group
        if spec.kind in ("window", "chunk"):
            need = -(-min(spec.span, settings.max_model_len) // spec.block_size)
            flight = settings.batches_in_flight * settings.batched_tokens
            reasons.append(
                f"a {spec.kind} of {spec.span:,} tokens takes {blocks:,} blocks instead of {need:,}: up to {flight:,} "
                "tokens of batches in flight are kept beside it"
            )
        if spec.kind == "state":
            reasons.append(f"a recurrent state takes {blocks} block{'s' if blocks > 1 else ''} of every conversation")
    return reasons


def _padding(planned: Plan) -> list[str]:
    """Groups are as wide as the widest, states as large as an attention page."""
    reasons = []
    for group in planned.groups:
        held = sum(spec.page_bytes for spec in group.specs)
        if held < planned.bytes_per_block and group.specs[0].kind != "state":
            share = 1 - held / planned.bytes_per_block
            reasons.append(
                f"a group of {len(group.specs)} {group.specs[0].kind} layers fills {1 - share:.0%} of a block"
            )
    return list(dict.fromkeys(reasons))


def _blocks(planned: Plan, settings: Settings) -> list[str]:
    if planned.block_size != settings.block_size:
        return [
            f"blocks hold {planned.block_size:,} tokens instead of {settings.block_size}, so that a page holds a state"
        ]
    return []
