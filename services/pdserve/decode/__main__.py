"""`python -m pdserve.decode`: a decode worker."""

from __future__ import annotations

from pdserve.decode.service import make_service
from pdserve.worker.front import run_worker

if __name__ == "__main__":
    raise SystemExit(run_worker("decode", make_service))
