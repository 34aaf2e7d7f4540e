"""Property tests draw the same examples in every run, and are never judged by the clock."""

from hypothesis import settings

settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")
