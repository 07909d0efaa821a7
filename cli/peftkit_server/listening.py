"""The listening socket of a server. Imports no model code."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from peftkit.errors import ConfigError, install_extra

BACKLOG = 128


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket; clients that connect while the model loads wait.

    Raises:
        ConfigError: The port is in use, or the host is not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}.",
            found=getattr(error, "strerror", None) or str(error),
            fix="Choose another port with --port (0 picks a free port), or another --host.",
        ) from None


def require_extra() -> None:
    """Raise ConfigError if the extra `serve` is not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "cannot serve.",
            found=f"Not installed: {', '.join(missing)}.",
            fix=install_extra("serve"),
        )
