"""`python -m flowforge`: the command line."""

from flowforge.cli import main

if __name__ == "__main__":
    main()
