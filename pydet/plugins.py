"""What pydet's plugins of engines and trainers share: their settings, and which versions they know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pydet._native import INVALID_VALUE, UNSUPPORTED, fail
from pydet.hooks import unknown
from pydet.ops import Arithmetic


@dataclass(frozen=True)
class Settings:
    """What decides bits, and whether a model of which something is left is refused.

    Attributes:
        arithmetic, k_chunk: as in :func:`pydet.torch.convert`.
        kv_chunk: as in :func:`pydet.torch.register_attention`.
        strict: refuse a model of which a module is left; otherwise a warning names what is left.
    """

    arithmetic: Arithmetic = "auto"
    k_chunk: int | None = None
    kv_chunk: int = 1024
    strict: bool = True

    def __str__(self) -> str:
        """What the environment variable holds for these."""
        given = {x.name: value for x in fields(self) if (value := getattr(self, x.name)) != x.default}
        return ",".join(f"{name}={int(x) if isinstance(x, bool) else x}" for name, x in given.items()) or "1"


def parse(text: str, variable: str) -> Settings | None:
    """The settings that an environment variable asks for; None where it asks for nothing.

    ``""`` and ``"0"``: nothing. ``"1"``: the defaults. Otherwise ``name=value`` of :class:`Settings`, with commas
    between: ``"arithmetic=sm90,kv_chunk=512,strict=0"``.
    """
    if text in ("", "0"):
        return None
    given: dict[str, str | int | bool] = {}
    for part in [] if text == "1" else text.split(","):
        name, equals, value = (x.strip() for x in part.partition("="))
        if name == "arithmetic" and equals:
            given[name] = value
        elif name in ("k_chunk", "kv_chunk") and value.isdecimal():
            given[name] = int(value)
        elif name == "strict" and value in ("0", "1"):
            given[name] = value == "1"
        else:
            fail(
                INVALID_VALUE,
                f"{variable}: {part!r} is no setting, want 0, 1, or arithmetic=NAME, k_chunk=NUMBER, kv_chunk=NUMBER "
                "and strict=0 or strict=1 with commas between",
            )
    settings = Settings(**given)  # type: ignore[arg-type]
    unknown(settings.arithmetic, variable, "arithmetic")
    if settings.k_chunk == 0:
        fail(INVALID_VALUE, f"{variable}: k_chunk is 0, want a positive number")
    if settings.kv_chunk <= 0 or settings.kv_chunk % 128:
        fail(INVALID_VALUE, f"{variable}: kv_chunk is {settings.kv_chunk}, want a positive multiple of 128")
    return settings


def known(plugin: str, name: str, version: str, versions: Sequence[str], variable: str) -> None:
    """Refuses a version that was not read and run.

    Args:
        plugin: its module.
        name: of the engine or trainer.
        version: which is here. What comes after a ``+`` says nothing.
        versions: that the plugin knows.
        variable: that asked for the plugin.

    Raises:
        Error: which version is here, and which are known.
    """
    if version.partition("+")[0] not in versions:
        fail(
            UNSUPPORTED,
            f"{plugin}: {name} is {version}, want {' or '.join(versions)}: of another version it is not known what "
            f"computes where; unset {variable} to run it without pydet",
        )
