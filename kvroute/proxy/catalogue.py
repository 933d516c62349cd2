"""What the pool serves: per model name, how its prompts become chains and where their entries live in the index.

Feeds keep it current, the handler reads it. It does not know which replica is healthy; the fleet does.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from kvroute.adapters.index import Namespace
from kvroute.adapters.tokens import PromptReader
from kvroute.kv.chain import Root, root_of


class ModelEntry(Struct, frozen=True):
    """One base model of the pool."""

    base: str  # the name that replicas serve it under
    block_size: int  # tokens per KV block, learnt from its replicas
    namespace: Namespace
    reader: PromptReader


class ServedModel(Struct, frozen=True):
    """A name that a client may ask for: a base model, or one of its adapters."""

    entry: ModelEntry
    lora: str | None = None

    def root(self, cache_salt: str | None) -> Root:
        """Return the root of this model's chains under a client's salt."""
        if cache_salt is None:
            return _unsalted(self.entry.base, self.lora)
        return root_of(self.entry.base, self.lora, cache_salt)


_unsalted = lru_cache(maxsize=1024)(root_of)  # names are few; salts are as many as clients like


class Catalogue:
    """Names -> models. A dictionary with a fallback for requests that name no model."""

    def __init__(self) -> None:
        self._served: dict[str, ServedModel] = {}

    def replace(self, served: dict[str, ServedModel]) -> None:
        """Set what the pool serves now."""
        self._served = served

    def find(self, model: str | None) -> ServedModel | None:
        """Return the model of that name; without a name, the only base model, where there is only one."""
        if model is not None:
            return self._served.get(model)
        bases = [served for served in self._served.values() if served.lora is None]
        return bases[0] if len(bases) == 1 else None

    def names(self) -> list[str]:
        """Return every name that a client may ask for, sorted."""
        return sorted(self._served)

    def entries(self) -> list[ModelEntry]:
        """Return the base models."""
        return [served.entry for served in self._served.values() if served.lora is None]
