"""The command line: its table of commands, configs and errors."""
