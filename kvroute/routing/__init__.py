"""Where a request goes: who the replicas are, what was promised to them, what a request costs there, what came of it.

This room sees no token id, text, URL body, clock or socket: token counts and `now` come in, a Lease goes out.
"""
