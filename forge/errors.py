"""What can go wrong, in the user's words, and the exit code that says which kind it was."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command."""

    ANSWERED = 0
    CRASHED = 1
    USAGE = 2               # something the user wrote: configuration or command line
    ASSERTION_FAILED = 3    # a check that was asked for found a difference
    CANNOT_JUDGE = 4        # the input does not allow an answer (a damaged or foreign file)
    ENVIRONMENT = 5         # this machine cannot run it (no GPU, no disk space, a missing package)
    STOPPED = 75            # stopped on request, state saved: please requeue (EX_TEMPFAIL)
    INTERRUPTED = 130       # Ctrl-C, state saved


class ForgeError(Exception):
    """An error whose message is written for the user: shown without a traceback."""

    exit_code = Exit.CRASHED


class ConfigError(ForgeError):
    """Something the user wrote: names the setting, its value and the mend."""

    exit_code = Exit.USAGE


class UnreadableError(ForgeError):
    """A file that is damaged, foreign or unsafe to read: nothing can be concluded from it."""

    exit_code = Exit.CANNOT_JUDGE


class UnusableEnvironment(ForgeError):
    """This machine lacks what the run needs: a device, a package, disk space."""

    exit_code = Exit.ENVIRONMENT
