"""``python -m longce COMMAND ..`` is the command ``longce COMMAND ..``."""

from lightning_modules.commands.cli.main import main

if __name__ == "__main__":
    main()
