"""`python -m longspan`, the same as `longspan`."""

from longspan.cli.main import main

main()
