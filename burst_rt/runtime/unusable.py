"""Why a runtime takes no call now: the errors of a rank's own misuse, and of an earlier failure."""

from __future__ import annotations

from burst_rt.errors import ConfigError, PeerLost

__all__ = ["after_close", "after_failure", "busy", "in_child"]


def busy(rank: int, *, by_this_thread: bool) -> ConfigError:
    """A thread is in a call."""
    if by_this_thread:
        return ConfigError(
            "a context takes one call at a time, and this thread is in a call of this context, "
            "such as an operation of a pipeline's run; make the call before or after it",
            rank=rank,
        )
    return ConfigError(
        "a context takes one call at a time, and another thread is in a call of this "
        "context; give each thread a context of its own",
        rank=rank,
    )


def in_child(rank: int) -> ConfigError:
    """This process is a child of the rank."""
    return ConfigError(
        "this process was forked from a rank, and the context belongs to that rank; make "
        "the call in the rank's own process (a child may compute, load data and exit)",
        rank=rank,
    )


def after_close(rank: int) -> ConfigError:
    """The rank has left."""
    return ConfigError("this context is closed; make another with burst_rt.init", rank=rank)


def after_failure(rank: int, error: BaseException) -> PeerLost:
    """An earlier call failed with this error."""
    return PeerLost(
        f"rank {rank}: this context broke in an earlier call ({str(error) or repr(error)}); start "
        "the job again",
        rank=rank,
    )
