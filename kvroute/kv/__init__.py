"""What a replica's KV cache is: prompts as chains of block hashes, and who holds which blocks.

This room knows no clock, no socket, no tokenizer and no vLLM wire format.
"""
