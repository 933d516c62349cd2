"""Sinks of event streams that remember."""

from __future__ import annotations


class Log:
    """A sink that writes down what it is told."""

    def __init__(self):
        self.told = []

    def batch(self, seq, payload):
        self.told.append((seq, payload.decode()))

    def new_life(self):
        self.told.append("new life")

    def gap(self, first, last):
        self.told.append(f"gap {first}-{last}")
