"""What all tests share: hypothesis draws the same examples in each run, so that a green run stays green.

HYPOTHESIS_PROFILE=explore looks at new ones; what it finds belongs into the code and, as an @example, into the test.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
