"""Docstrings, written for Sphinx, in the form that griffe reads: formulas as MathML, which needs no script."""

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

_BLOCK = re.compile(r"^\.\. math:: *(.+?)(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r":math:`([^`]+)`")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth):(?=`)")


def convert_docstring(text: str) -> str:
    """Return a docstring with its formulas as MathML, its examples as code and without the names of Sphinx's roles."""
    text = _BLOCK.sub(lambda found: f"\n{_mathml(found[1], 'block')}\n", text)
    text = _INLINE.sub(lambda found: _mathml(found[1], "inline"), text)
    return _ROLE.sub("", _EXAMPLE.sub("Examples:", text))


def _mathml(formula: str, display: str) -> str:
    return convert(" ".join(formula.split()), display=display)


class SphinxDocstrings(griffe.Extension):
    """Extension of griffe that converts each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of a module, class, function or attribute that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = convert_docstring(obj.docstring.value)
