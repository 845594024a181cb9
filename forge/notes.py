"""Sentences for the person at the terminal, each said once a process."""

import logging

logger = logging.getLogger("forge")
_said: set[str] = set()


def say(sentence: str) -> None:
    """Tell the user which plain path a run took, or what a choice costs here. Repeats are dropped."""
    if sentence not in _said:
        _said.add(sentence)
        logger.warning(sentence)
