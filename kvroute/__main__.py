"""`python -m kvroute` is `kvroute`."""

from kvroute.cli import main

main()
