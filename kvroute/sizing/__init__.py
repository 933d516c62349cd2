"""How much a KV cache holds and how fast an engine can be, from published shapes. Pure: callers read the files."""
