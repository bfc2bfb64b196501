"""`python -m pdserve.prefill`: a prefill worker."""

from __future__ import annotations

from pdserve.prefill.service import make_service
from pdserve.worker.front import run_worker

if __name__ == "__main__":
    raise SystemExit(run_worker("prefill", make_service))
