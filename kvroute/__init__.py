"""kvroute: one OpenAI-compatible endpoint before a pool of vLLM replicas.

Rooms, lowest first; each may import only the ones its line in tests/test_rooms.py names:

  errors    the failure tree: whose fault, may it be retried, which status
  kv        what a replica's KV cache is: prompts, chains of block hashes, residency, the block pool   (pure)
  sizing    how much it holds and how fast it can be                                                   (pure)
  routing   where a request goes: fleet, ledger, cost, router, account                                 (pure)
  adapters  how we learn and how we send: tokens, index, Redis, metrics, upstream                      (I/O)
  proxy     the running service                                                                        (I/O)
  sim       the engine's own rules on an imagined clock                                                (pure)
  fake      a simulated replica behind vLLM's HTTP surface                                             (I/O)
"""

__version__ = "0.1.0"
