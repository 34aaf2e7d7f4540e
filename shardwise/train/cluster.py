"""The file of `shardwise doctor --save`: the links of a cluster, for predictions of time."""

import tomllib
from pathlib import Path
from typing import Any

from shardwise.core.errors import bad
from shardwise.prediction.link_time import Cluster, Link

_ALLOWED = "a file that 'shardwise doctor --save' wrote"
_INSTEAD = "shardwise doctor --mesh 'dp2 tp2' --save cluster.toml"


def cluster_in(path: Path) -> Cluster:
    """The links in a file. Raises InputError for one that cannot be read, or has no links."""
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        found = {
            (axis, kind): _link(values)
            for axis, kinds in read["links"].items()
            for kind, values in kinds.items()
        }
    except (OSError, ValueError) as error:
        raise bad(f"--cluster {path} ({error})", _ALLOWED, _INSTEAD) from None
    except (KeyError, AttributeError, TypeError):
        raise bad(f"--cluster {path}, without links", _ALLOWED, _INSTEAD) from None
    if not found:
        raise bad(f"--cluster {path}, without links", _ALLOWED, _INSTEAD)
    return Cluster(found)


def _link(values: dict[str, Any]) -> Link:
    rate = values.get("bytes_per_s")
    link = Link(float(values["latency_s"]), None if rate is None else float(rate))
    if link.latency_s < 0 or (link.bytes_per_s is not None and link.bytes_per_s <= 0):
        raise ValueError(f"a link with {link}")
    return link
