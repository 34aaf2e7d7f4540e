"""An extension of mkdocstrings: it renders the rows of the house's docstrings as lists."""

from typing import Any

import griffe

from docs.docstrings import markdown


class Aligned(griffe.Extension):
    """Rewrites every docstring that mkdocstrings renders."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Griffe has read an object."""
        if obj.docstring is not None:
            parameters = getattr(obj, "parameters", ())
            names = frozenset(p.name for p in parameters) | frozenset(obj.members)
            obj.docstring.value = markdown(obj.docstring.value, names)
