"""These tests need the extra `hf`; where it is missing they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = ["*"] if None in map(find_spec, ("accelerate", "transformers")) else []
