"""How we learn about replicas and how we send to them. Every adapter turns bytes into the values of the pure rooms.

Constructors start nothing; `start` and `close` do.
"""
