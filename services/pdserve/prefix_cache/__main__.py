"""`python -m pdserve.prefix_cache`: a prefix-cache service."""

from __future__ import annotations

from pdserve.prefix_cache.service import main

if __name__ == "__main__":
    raise SystemExit(main())
