"""Several processes of one router on one port: who is started and stopped, and how they look like one from outside."""
