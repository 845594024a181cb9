"""What every command does with its command line: take the words that are its own, and answer errors in sentences."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge.errors import ConfigError, Exit, ForgeError

OWN = ("allowed_packages", "from", "resume")     # consumed before composition; never read from a file


@contextmanager
def reporting(usage: str | None = None) -> Iterator[None]:
    """Print a ForgeError as sentences, without a traceback, and exit with its code. usage: what --help prints."""
    if usage and {"-h", "--help"} & set(sys.argv[1:]):
        print(usage)
        sys.exit(Exit.ANSWERED)
    try:
        yield
    except ForgeError as error:
        print(f"forge: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(Exit.CRASHED)
    except OSError as error:
        print(f"forge: {error.filename or 'a file'} cannot be used: {error.strerror}.", file=sys.stderr)
        sys.exit(Exit.ENVIRONMENT)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


def split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """(the words that are consumed before composition, the rest)."""
    own: dict[str, str] = {}
    rest = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key.lstrip("+") in OWN and equals:
            own[key.lstrip("+")] = value
        else:
            rest.append(argument)
    return own, rest


def packages(own: dict[str, str]) -> tuple[str, ...]:
    """The packages that `allowed_packages=` names: a, or [a,b]."""
    return tuple(re.findall(r"[\w.]+", own.get("allowed_packages", "")))


def take(known: dict[str, Any], arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(a command's own settings, as its defaults are typed; the rest). Raises ConfigError."""
    asked, rest = dict(known), []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in known or not equals:
            rest.append(argument)
            continue
        try:
            asked[key] = type(known[key])(value)
        except ValueError:
            kind = "a whole number" if isinstance(known[key], int) else "a number"
            raise ConfigError(f"{key}={value}: {kind} is wanted.") from None
    return asked, rest
