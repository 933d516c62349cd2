"""From what a URL says about itself to the replicas behind it. Today's list of URLs is static: the configuration's.

One URL is one replica, or one for each data-parallel rank where its metrics carry several engines.
"""

from __future__ import annotations

from kvroute.adapters.vllm_metrics import Page
from kvroute.routing.replica import ModelCard, Replica, ReplicaId


def replica_id(url: str, rank: int | None) -> ReplicaId:
    """Name a replica: its URL, and its rank where it has one."""
    return ReplicaId(url if rank is None else f"{url}#{rank}")


def replicas_behind(url: str, cards: tuple[ModelCard, ...], page: Page) -> dict[ReplicaId, Replica]:
    """Return the replicas of one URL, by id. A page without engine metrics stands for one replica of unknown size."""
    if len(page.engines) <= 1:
        report = page.engines[0] if page.engines else None
        only = Replica(
            id=replica_id(url, None),
            url=url,
            cards=cards,
            block_size=report.block_size if report else None,
            capacity_tokens=report.capacity_tokens if report else None,
        )
        return {only.id: only}
    ranks = (
        Replica(
            id=replica_id(url, report.engine),
            url=url,
            rank=report.engine,
            cards=cards,
            block_size=report.block_size,
            capacity_tokens=report.capacity_tokens,
        )
        for report in page.engines
    )
    return {replica.id: replica for replica in ranks}


def base_models(cards: tuple[ModelCard, ...]) -> list[ModelCard]:
    """Return the cards that are not adapters. Several base names of one server are aliases of one model."""
    return [card for card in cards if card.parent is None]
