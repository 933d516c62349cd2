"""The engine's own rules on an imagined clock. This room is pure: time and randomness are arguments."""
