"""`python -m pfedla` is the command line."""

from pfedla.cli import main

main()
