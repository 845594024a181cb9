"""What the settings of a loss must keep to, in the user's words."""

from collections.abc import Iterator


def positive(name: str, value: int) -> Iterator[str]:
    if value < 1:
        yield f"loss.{name}={value}: at least 1 is wanted."
