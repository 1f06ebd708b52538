"""Error reports: what went wrong and how to fix it, or the traceback of an unexpected error."""

import difflib
import os
import pydoc
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml
from typing_extensions import override

from lightning_modules.utilities.errors import IncompleteError

_REMEDIES = {
    "DataLoader worker": (
        "A data loader process was killed, probably because memory ran out: lower `data.num_workers`."
    ),
    "Connection (closed|reset) by peer|gloo|NCCL": (
        "Another process of the run has ended or does not respond: see its output."
    ),
}
"""Advice for errors of torch, by a pattern of their message."""


_NOISE = (
    r"(- )?(Does not validate|Subtypes: |Errors:|Given value type|Given value: (.*Namespace\(|.{200})"
    r"|Subclass types expect|a class path|a dict |Expected a <class '(NoneType|bool|.*Iterable)'>)"
)
"""Lines of jsonargparse's errors that repeat the value, or list what else it could have been."""


_PACKAGES = ("lightning_modules", "datamodules", "callbacks", "benchmarks")
_CLASS_MODULES = ("datamodules", "callbacks", "lightning_modules.objectives")


class ConciseParser(jsonargparse.ArgumentParser):
    """Parser whose errors are one line: the unknown name, its config file and the nearest name, but no usage."""

    def __init__(self, *arguments: Any, allow_abbrev: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, allow_abbrev=allow_abbrev, **settings)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser of a class in a config: the one of the command reports it
            super().error(message, ex)
        short = _drop_noise(re.sub(r"\. Got value: Namespace\(.*", ".", message))
        short = re.sub(r"an? <class '(\w+)'>", r"\1", short)
        if key := re.match(r'Parser key "([\w.]+)":', short):
            short = f"{_find_in_configs(self.args, key[1])}`{key[1]}`:{short[key.end() :]}"
        stop_with_usage(self._describe_unknown_name(message) or short)

    def _describe_unknown_name(self, message: str) -> str | None:
        """Return an error for an unknown option, key, parameter or class, or None if the message is another one."""
        if found := re.search(r"dot import path string: (\w+)", message):
            paths = {name: f"{module}.{name}" for module in _CLASS_MODULES for name in _list_classes(module)}
            near = difflib.get_close_matches(found[1], paths, n=1)
            hint = f"Did you mean `{paths[near[0]]}`?" if near else "Write it with its module."
            return f"{_find_in_configs(self.args, found[1])}unknown class `{found[1]}`. {hint}"
        for pattern, list_known in (
            (r"class_path '(?P<owner>[\w.]+)':\s+Option '(?P<name>[\w.]+)'", _list_parameters),
            (r"Option '(?P<name>[\w.]+)' is not .*Namespace\(class_path='(?P<owner>[\w.]+)'", _list_parameters),
            (r"module '(?P<owner>[\w.]+)' has no attribute '(?P<name>\w+)'", _list_classes),
            (r"(?P<owner>)unrecognized arguments: --(?P<name>[\w.]+)", lambda _: _list_options(self)),
            (r"(?P<owner>)ption '(?P<name>[\w.]+)'( is not accepted|$)", lambda _: _list_options(self)),
        ):
            if found := re.search(pattern, message):
                owner, name = found["owner"], found["name"]
                key = re.match(r'Parser key "([\w.]+)"', message)
                place = _find_in_configs(self.args, name, below=key[1] if key else "")
                dashes = "" if owner or place else "--"
                what = f"`{owner}` has no" if owner else "unknown option"
                return f"{place}{what} `{dashes}{name}`.{suggest_nearest(name, list_known(owner), dashes)}"
        return None


def _drop_noise(message: str) -> str:
    """Return an error of jsonargparse in one line, without the lines that help nobody."""
    lines = [line.strip() for line in message.splitlines()]
    return " ".join([line.removeprefix("- ") for line in lines if not re.match(_NOISE, line)] or lines)


def suggest_nearest(name: str, known: Iterable[str], dashes: str = "") -> str:
    """Return a hint for an unknown name: the most similar known one with its last part, or at all, or a few names."""
    names = sorted(known)
    alike = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
    if near := difflib.get_close_matches(name, alike, n=1, cutoff=0) or difflib.get_close_matches(name, names, n=1):
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


def _find_in_configs(words: Sequence[str], name: str, *, below: str = "") -> str:
    """Return ``FILE, line N: `` if a config of a command line has a name below a key, otherwise an empty text."""
    if any(re.match(rf"--(.*\.)?{re.escape(name)}\b", word) for word in words):
        return ""
    for word in reversed(words):  # later configs override earlier ones
        file = Path(word.partition("=")[2] or word)
        if file.suffix in (".yaml", ".yml") and file.is_file():
            for path, line in _walk_yaml(yaml.compose(file.read_text(encoding="utf-8-sig"))):
                if path.startswith(f".{below}") and path.endswith(f".{name}"):
                    return f"{file}, line {line}: "
    return ""


def _walk_yaml(node: yaml.Node | None, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the line of each key and value by its path; a value is the last part of its path."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = f"{path}.{key.value.removesuffix('+')}"
            yield here, key.start_mark.line + 1
            yield from _walk_yaml(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _walk_yaml(item, path)
    elif node is not None:
        yield f"{path}.{node.value}", node.start_mark.line + 1


def stop_with(error: Exception) -> NoReturn:
    """Print an error and exit: with status 2 for a user error, and 1 for a failure during the run.

    ``LONGCE_TRACEBACK=1`` also prints the traceback. An unexpected error is raised again, with a note; the user's file
    and line are named if it is from there.
    """
    place = _find_user_line(error)
    # Compare by name: the classes of Lightning and torch may not be imported yet.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, ConnectionError):  # an OSError, but caused by another process and not by the user
        _exit_with_remedy(error)
    elif isinstance(error, ValueError | OSError | FloatingPointError) or "MisconfigurationException" in kinds:
        if place is not None:
            error.add_note(f"Raised in {place}; LONGCE_TRACEBACK=1 shows the traceback.")
        _exit_with_message(error, status=2)
    if isinstance(error, IncompleteError):
        _exit_with_message(error, status=1)
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds:
        error.add_note(
            "Memory is insufficient: `longce plan` estimates what these settings need and suggests cheaper ones."
        )
        _exit_with_message(error, status=1)
    if isinstance(error, RuntimeError):
        _exit_with_remedy(error)
    if place is not None:
        error.add_note(f"This error is from your own code: {place}.")
        raise error
    error.add_note(
        "This error is unexpected: either a dependency does not accept one of the settings, or it is a bug in longce."
        " The last lines of the traceback name the file. Please report it with the command and its configs."
    )
    raise error


def _find_user_line(error: BaseException) -> str | None:
    """Return file and line in the user's own code that an error is from, or None if it is from ours.

    Libraries do not count: a library that the user's code calls raises for what it was given.
    """
    libraries = [Path(path).resolve() for name, path in sysconfig.get_paths().items() if "lib" in name]
    elsewhere = {"site-packages", "dist-packages"}  # of the user, of a system, of another environment
    ours = [Path(__file__).resolve().parents[3] / name for name in _PACKAGES]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if any(file.is_relative_to(folder) for folder in ours):  # also where they are installed as a library
            return None
        in_library = elsewhere & set(file.parts) or any(file.is_relative_to(folder) for folder in libraries)
        if file.is_file() and not in_library:
            return f"{os.path.relpath(file)}, line {frame.lineno}, in {frame.name}"
    return None


def _exit_with_remedy(error: BaseException) -> None:
    """Exit with an explanation of a known error of torch; return for any other error."""
    found: BaseException | None = error
    while found is not None:  # torch reports a killed loader at any point, also while another error is handled
        for pattern, remedy in _REMEDIES.items():
            if re.search(pattern, str(found)):
                original = str(found).partition("\n")[0]
                known = RuntimeError(
                    f"{remedy} Then run the same command again; `fit` resumes with `--ckpt_path RUN_FOLDER`."
                    f" (Original error: {original})"
                )
                _exit_with_message(known, status=1)
        found = found.__cause__ or found.__context__


def _exit_with_message(error: BaseException, *, status: int) -> NoReturn:
    # The error that a class in a config raised, without the parser's list of the types it tried.
    while str(error).startswith("Does not validate") and (cause := error.__cause__ or error.__context__) is not None:
        if str(cause).startswith("Not a valid subclass"):  # the value is a list, and another type tells why it fails
            error = ValueError(_drop_noise(re.sub("- Not a valid subclass of .*\n", "", str(error))))
            break
        error = cause
    _exit_with("\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])]), status=status)


def _exit_with(message: str, *, status: int) -> NoReturn:
    if os.environ.get("LONGCE_TRACEBACK"):
        traceback.print_exc()
    sys.stderr.write(f"longce: error: {message}\n")
    sys.exit(status)
