"""A simulated replica behind vLLM's HTTP surface, for tests and demos without a GPU."""
