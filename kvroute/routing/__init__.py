"""Where a request goes: who the replicas are, what was promised to them, what placing a request costs, and what came of it.

This room sees no token, text, URL body, clock or socket: block counts, token counts and `now` come in, a Lease goes out.
"""
