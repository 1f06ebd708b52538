"""Error reports: what went wrong and how to fix it, or the traceback of an unexpected error."""

import difflib
import os
import pydoc
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jsonargparse
from typing_extensions import override

from lightning_modules.utilities.errors import IncompleteError
from lightning_modules.utilities.extras import name_missing_extra

_NOISE = (
    r"(- )?(Does not validate|Subtypes: |Errors:|Given value type|Given value: (.*Namespace\(|.{200})"
    r"|Subclass types expect|a class path|a dict |Expected a <class '(NoneType|bool|.*Iterable)'>)"
)
"""Lines of jsonargparse's errors that repeat the value, or list what else it could have been."""

_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-\.?inf(inity)?$", re.IGNORECASE)
_SIMILARITY = 0.7
"""Minimum similarity of an unknown name to the known name that it misspells."""


class ConciseParser(jsonargparse.ArgumentParser):
    """Parser whose errors are one line: the unknown name, its config file and the nearest name, but no usage."""

    def __init__(self, *arguments: Any, allow_abbrev: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, allow_abbrev=allow_abbrev, **settings)
        self._negative_number_matcher = _NEGATIVE_NUMBER  # argparse would take -inf and -1e3 for options

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser of a class in a config: the one of the command reports it
            super().error(message, ex)
        missing = name_missing_extra(message)
        if missing is not None:
            stop_with_usage(missing)
        unknown = self._describe_unknown_name(message) or self._describe_second_value(message)
        if unknown is not None:
            stop_with_usage(unknown)
        short = _drop_noise(re.sub(r"\. Got value: Namespace\(.*", ".", message))
        short = re.sub(r"an? <class '(\w+)'>", r"\1", short)
        key = re.match(r'Parser key "([\w.]+)":', short)
        if key is not None:
            short = f"{find_in_configs(self.args, key[1])}`{key[1]}`:{short[key.end() :]}"
        stop_with_usage(short)

    def _describe_unknown_name(self, message: str) -> str | None:
        """Return an error for an unknown option, key, parameter or class, or None if the message is another one."""
        found = re.search(r"dot import path string: (\w+)", message)
        if found is not None:
            return self._describe_unknown_class(found[1])
        found = re.search(r"([\w.]+) is abstract", message)
        if found is not None:
            path = found[1]
            methods = [f"`{name}`" for name in sorted(_import_named_class(path).__abstractmethods__)]
            return f"{find_in_configs(self.args, path)}`{path}` must define {', '.join(methods)}."
        for pattern in (
            r"class_path '(?P<owner>[\w.]+)':\s+Option '(?P<name>[\w.]+)'",
            r"Option '(?P<name>[\w.]+)' is not .*Namespace\(class_path='(?P<owner>[\w.]+)'",
        ):
            found = re.search(pattern, message)
            if found is not None:
                return self._describe_unknown_member(found["owner"], found["name"], _list_parameters(found["owner"]))
        found = re.search(r"module '(?P<owner>[\w.]+)' has no attribute '(?P<name>\w+)'", message)
        if found is not None:
            module = sys.modules[found["owner"]]  # its attribute was looked up, so it is imported
            return self._describe_unknown_member(found["owner"], found["name"], list_classes(module))
        found = re.search(r"unrecognized arguments: --([\w.]+)|ption '([\w.]+)'( is not accepted|$)", message)
        if found is not None:
            name = found[1] or found[2]
            place = find_in_configs(self.args, name)
            dashes = "" if place else "--"
            return f"{place}unknown option `{dashes}{name}`.{suggest_nearest(name, _list_options(self), dashes)}"
        return None

    def _describe_second_value(self, message: str) -> str | None:
        """Return an error for an option with several values where one is expected, or None for another message."""
        found = re.search(r"unrecognized arguments: ([^-].*)", message)
        if found is None:
            return None
        option = ""
        for previous, word in pairwise(self.args):
            is_option = previous.startswith("-")
            if is_option:
                option = previous.partition("=")[0]
            is_first_value = is_option and "=" not in previous
            if option and not is_first_value and f"{found[1]} ".startswith(f"{word} "):
                if any(not action.option_strings for action in self._actions):
                    return f"Put '{word}' before the options: `{option}` has one value."
                return (
                    f"`{option}` has one value, but '{word}' follows it. If the shell has expanded a pattern, quote the"
                    f" pattern: `{option} 'folder/*.txt'`."
                )
        return None

    def _describe_unknown_class(self, name: str) -> str:
        paths = []
        for module in import_choices().values():
            paths += [f"{module.__name__}.{known}" for known in list_classes(module)]
        near = find_nearest(name, paths)
        hint = "Write it with its module." if near is None else f"Did you mean `{near}`?"
        return f"{find_in_configs(self.args, name)}unknown class `{name}`. {hint}"

    def _describe_unknown_member(self, owner: str, name: str, known: Iterable[str]) -> str:
        """Return an error for a name that a class or a module does not have."""
        hint = suggest_nearest(name, known)
        if Path(owner, f"{name}.py").is_file():
            hint = f" Your folder '{owner}' has the name of a package of longce: rename it."
        return f"{find_in_configs(self.args, name)}`{owner}` has no `{name}`.{hint}"


def _drop_noise(message: str) -> str:
    """Return an error of jsonargparse in one line, without its unhelpful lines."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [line.removeprefix("- ") for line in lines if not re.match(_NOISE, line)]
    return " ".join(kept or lines)


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name with the most similar last part, or None if none is similar enough."""
    by_last_part: dict[str, list[str]] = {}
    for each in sorted(known):
        by_last_part.setdefault(each.rpartition(".")[2], []).append(each)
    near = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1, cutoff=_SIMILARITY)
    if not near:
        return None
    # Among names with the same last part, the rest decides.
    return difflib.get_close_matches(name, by_last_part[near[0]], n=1, cutoff=0)[0]


def suggest_nearest(name: str, known: Iterable[str], dashes: str = "") -> str:
    """Return a hint for an unknown name: the nearest known one, or all names if they are few."""
    names = sorted(known)
    near = find_nearest(name, names)
    if near is not None:
        return f" Did you mean `{dashes}{near}`?"
    if len(names) <= 30:
        return f" Known: {', '.join(names)}."
    return " `longce COMMAND --help` lists the options."


def stop_with_usage(message: str) -> NoReturn:
    """Print an error of the command line or a config in one line, and exit with status 2."""
    _exit_with(message, status=2)


def _list_options(parser: jsonargparse.ArgumentParser) -> set[str]:
    """Return the names of all options of a parser, its subcommands, and the classes in its defaults."""
    names: set[str] = set()
    for action in parser._actions:
        names.update(option[2:] for option in action.option_strings if option.startswith("--"))
        with suppress(TypeError, KeyError):  # only a class has a path
            names.update(f"{action.dest}.{name}" for name in _list_parameters(action.default["class_path"]))
        for subparser in getattr(action, "_name_parser_map", {}).values():
            names |= _list_options(subparser)
    return names


def _list_parameters(class_path: str) -> list[str]:
    """Return the names of the parameters of a class, including those that it passes on as keywords."""
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(_import_named_class(class_path), fail_untyped=False)
    return list(parser.get_defaults().keys())


def _import_named_class(class_path: str) -> Any:
    """Return a class that a config or an option names.

    Only its path is known here: it may be a class of the user, or nested in another class. The parser has imported it.
    """
    return pydoc.locate(class_path)


def import_choices() -> dict[str, ModuleType]:
    """Return the modules whose classes an experiment chooses from, by heading of the help; they import torch."""
    import callbacks
    import datamodules
    from lightning_modules import objectives

    return {
        "data modules: --data datamodules.NAME": datamodules,
        "callbacks: --trainer.callbacks+ callbacks.NAME": callbacks,
        "objectives: --model.objective NAME": objectives,
    }


def list_classes(module: ModuleType) -> list[str]:
    """Return the names of the classes that a module is used for: ``__all__``, or those defined in it."""
    names: list[str] = []
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__.startswith(module.__name__):
            names.append(name)
    return getattr(module, "__all__", names)


def find_in_configs(words: Sequence[str], name: str) -> str:
    """Return ``FILE, line N: `` of the first line of a config that has a name, otherwise an empty text."""
    if any(re.match(rf"--(.*\.)?{re.escape(name)}\b", word) for word in words):
        return ""
    last_part = name.rpartition(".")[2]
    for word in reversed(words):  # later configs override earlier ones
        file = Path(word.partition("=")[2] or word)
        if file.suffix not in (".yaml", ".yml") or not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), start=1):
            if re.search(rf"\b{re.escape(last_part)}\b", line):
                return f"{file}, line {number}: "
    return ""


def stop_with(error: Exception) -> NoReturn:
    """Print an error and exit: with status 2 for a user error, and 1 for a failure during the run.

    ``LONGCE_TRACEBACK=1`` also prints the traceback. An unexpected error is raised again, with a note.
    """
    missing = name_missing_extra(str(_find_import_error(error)))
    if missing is not None:
        _exit_with(missing, status=2)
    # Compare by name: the classes of Lightning and torch may not be imported yet.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # A ConnectionError is an OSError, but caused by another process and not by the user.
    is_user_error = isinstance(error, ValueError | OSError | FloatingPointError)
    if (is_user_error and not isinstance(error, ConnectionError)) or "MisconfigurationException" in kinds:
        _exit_with_message(error, status=2)
    if isinstance(error, IncompleteError):
        _exit_with_message(error, status=1)
    if kinds & {"MemoryError", "OutOfMemoryError"}:
        error.add_note("Memory is insufficient: `longce plan` estimates what these settings need.")
        _exit_with_message(error, status=1)
    if re.search("DataLoader worker .* killed", str(error)):
        error.add_note("A process that loads data was killed, probably because memory ran out: lower `num_workers`.")
        _exit_with_message(error, status=1)
    if re.search("Connection (closed|reset) by peer|gloo|NCCL", str(error)):
        error.add_note("Another process of the run has ended or does not respond: see its output.")
        _exit_with_message(error, status=1)
    error.add_note(
        "This error is unexpected: the last lines of the traceback name the file. If it is one of longce, please report"
        " it with the command and its configs."
    )
    raise error


def _find_import_error(error: BaseException | None) -> BaseException | None:
    """Return the missing module among an error and its causes."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    return error


def _exit_with_message(error: BaseException, *, status: int) -> NoReturn:
    # The error that a class in a config raised, without the parser's list of the types it tried.
    while str(error).startswith("Does not validate"):
        cause = error.__cause__ or error.__context__
        if cause is None:
            break
        error = cause
    message = str(error) or type(error).__name__
    _exit_with("\n".join([message, *getattr(error, "__notes__", [])]), status=status)


def _exit_with(message: str, *, status: int) -> NoReturn:
    if os.environ.get("LONGCE_TRACEBACK"):
        traceback.print_exc()
    sys.stderr.write(f"longce: error: {message}\n")
    sys.exit(status)
