"""What is installed only when asked for."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


def installing(extra: str) -> str:
    """The command that installs an extra besides, from where this package came."""
    with suppress(metadata.PackageNotFoundError, ValueError, KeyError, TypeError, OSError):
        # Written by the installer of a checkout or a wheel.
        came = json.loads(metadata.distribution("flowforge").read_text("direct_url.json") or "")
        place = Path(unquote(urlsplit(came["url"]).path))
        if came["url"].startswith("file:") and place.exists():
            return f"pip install {shlex.quote(f'{place}[{extra}]')}"
    return f"pip install 'flowforge[{extra}]', with the path of its checkout or wheel in place of the name"
