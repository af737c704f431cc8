"""`python -m longspan`, the same as `longspan`."""

from longspan.cli.main import main

if __name__ == "__main__":
    main()
