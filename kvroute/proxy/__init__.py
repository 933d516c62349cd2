"""The running service: listeners, the way of a request, feeds, admin."""
