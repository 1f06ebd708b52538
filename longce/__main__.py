"""``python -m longce COMMAND ..`` is the command ``longce COMMAND ..``."""

from longce.cli.main import main

if __name__ == "__main__":
    main()
