"""Tests mirror kvroute/: what kvroute/kv/chain.py promises is tested in tests/kv/test_chain.py."""
