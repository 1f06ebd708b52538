"""Error reports: what went wrong and how to fix it, or the traceback of an unexpected error."""

import difflib
import inspect
import os
import pydoc
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
from typing_extensions import override

from lightning_modules.utilities.errors import IncompleteError

_NOISE = (
    r"(- )?(Does not validate|Subtypes: |Errors:|Given value type|Given value: (.*Namespace\(|.{200})"
    r"|Subclass types expect|a class path|a dict |Expected a <class '(NoneType|bool|.*Iterable)'>)"
)
"""Lines of jsonargparse's errors that repeat the value, or list what else it could have been."""


class ConciseParser(jsonargparse.ArgumentParser):
    """Parser whose errors are one line: the unknown name, its config file and the nearest name, but no usage."""

    def __init__(self, *arguments: Any, allow_abbrev: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, allow_abbrev=allow_abbrev, **settings)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser of a class in a config: the one of the command reports it
            super().error(message, ex)
        unknown = self._describe_unknown_name(message)
        if unknown is not None:
            stop_with_usage(unknown)
        short = _drop_noise(re.sub(r"\. Got value: Namespace\(.*", ".", message))
        short = re.sub(r"an? <class '(\w+)'>", r"\1", short)
        if key := re.match(r'Parser key "([\w.]+)":', short):
            short = f"{find_in_configs(self.args, key[1])}`{key[1]}`:{short[key.end() :]}"
        stop_with_usage(short)

    def _describe_unknown_name(self, message: str) -> str | None:
        """Return an error for an unknown option, key, parameter or class, or None if the message is another one."""
        if found := re.search(r"dot import path string: (\w+)", message):
            modules = ("datamodules", "callbacks", "lightning_modules.objectives")
            paths = {name: f"{module}.{name}" for module in modules for name in _list_classes(module)}
            near = difflib.get_close_matches(found[1], paths, n=1)
            hint = f"Did you mean `{paths[near[0]]}`?" if near else "Write it with its module."
            return f"{find_in_configs(self.args, found[1])}unknown class `{found[1]}`. {hint}"
        if found := re.search(r"([\w.]+) is abstract", message):
            return f"{find_in_configs(self.args, found[1])}{_describe_abstract(found[1])}"
        for pattern, list_known in (
            (r"class_path '(?P<owner>[\w.]+)':\s+Option '(?P<name>[\w.]+)'", _list_parameters),
            (r"Option '(?P<name>[\w.]+)' is not .*Namespace\(class_path='(?P<owner>[\w.]+)'", _list_parameters),
            (r"module '(?P<owner>[\w.]+)' has no attribute '(?P<name>\w+)'", _list_classes),
            (r"(?P<owner>)unrecognized arguments: --(?P<name>[\w.]+)", lambda _: _list_options(self)),
            (r"(?P<owner>)ption '(?P<name>[\w.]+)'( is not accepted|$)", lambda _: _list_options(self)),
        ):
            if found := re.search(pattern, message):
                owner, name = found["owner"], found["name"]
                place = find_in_configs(self.args, name)
                dashes = "" if owner or place else "--"
                what = f"`{owner}` has no" if owner else "unknown option"
                hint = suggest_nearest(name, list_known(owner), dashes)
                if owner and Path(owner, f"{name}.py").is_file():
                    hint = f" Your folder '{owner}' has the name of a package of longce: rename it."
                return f"{place}{what} `{dashes}{name}`.{hint}"
        return None


def _describe_abstract(class_path: str) -> str:
    """Return which methods a class must define, each with the nearest name that it defines instead."""
    kind: Any = pydoc.locate(class_path)
    own = [name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("__")]
    sentences = []
    for name in sorted(kind.__abstractmethods__):
        near = difflib.get_close_matches(name, own, n=1)
        rename = f" It defines `{near[0]}`: rename it to `{name}`." if near else ""
        parameters = ", ".join(inspect.signature(getattr(kind, name)).parameters)
        sentences.append(f"`{class_path}` must define the method `{name}({parameters})`.{rename}")
    return " ".join(sentences)


def _drop_noise(message: str) -> str:
    """Return an error of jsonargparse in one line, without the lines that help nobody."""
    lines = [line.strip() for line in message.splitlines()]
    return " ".join([line.removeprefix("- ") for line in lines if not re.match(_NOISE, line)] or lines)


def suggest_nearest(name: str, known: Iterable[str], dashes: str = "") -> str:
    """Return a hint for an unknown name: the most similar known one with its last part, or at all, or a few names."""
    names = sorted(known)
    alike = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
    near = difflib.get_close_matches(name, alike, n=1, cutoff=0)
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.61)
    if near:
        return f" Did you mean `{dashes}{near[0]}`?"
    return f" Known: {', '.join(names)}." if len(names) <= 30 else " `longce COMMAND --help` lists the options."


def stop_with_usage(message: str) -> NoReturn:
    """Print an error of the command line or a config in one line, and exit with status 2."""
    _exit_with(message, status=2)


def _list_options(parser: jsonargparse.ArgumentParser) -> set[str]:
    """Return the names of all options of a parser and of its subcommands, also of the classes in its defaults."""
    names = {option.removeprefix("--") for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        with suppress(TypeError, KeyError):  # only a class has a path
            names |= {f"{action.dest}.{name}" for name in _list_parameters(action.default["class_path"])}
    for action in parser._actions:
        for subparser in getattr(action, "_name_parser_map", {}).values():
            names |= _list_options(subparser)
    return names


def _list_parameters(class_path: str) -> list[str]:
    """Return the names of the parameters of a class, also of those that it passes on as keywords."""
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(pydoc.locate(class_path), fail_untyped=False)
    return list(parser.get_defaults().keys())


def _list_classes(module: str) -> list[str]:
    found: Any = pydoc.locate(module)
    defined = [name for name, one in vars(found).items() if getattr(one, "__module__", "").startswith(module)]
    return getattr(found, "__all__", None) or [name for name in defined if name[:1].isupper()]


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
    # Compare by name: the classes of Lightning and torch may not be imported yet.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # A ConnectionError is an OSError, but caused by another process and not by the user.
    if isinstance(error, ValueError | OSError | FloatingPointError) and not isinstance(error, ConnectionError):
        _exit_with_message(error, status=2)
    if "MisconfigurationException" in kinds:
        _exit_with_message(error, status=2)
    if isinstance(error, IncompleteError):
        _exit_with_message(error, status=1)
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds:
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


def _exit_with_message(error: BaseException, *, status: int) -> NoReturn:
    # The error that a class in a config raised, without the parser's list of the types it tried.
    while str(error).startswith("Does not validate") and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    _exit_with("\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])]), status=status)


def _exit_with(message: str, *, status: int) -> NoReturn:
    if os.environ.get("LONGCE_TRACEBACK"):
        traceback.print_exc()
    sys.stderr.write(f"longce: error: {message}\n")
    sys.exit(status)
