"""All errors, as one tree.

    TandemError
      ConfigError      a knob, a flag or a file of knobs          (also ValueError)
      DataError        a row, a file or a data set                (also ValueError)
      ModelError       a model, tokenizer or adapter that cannot be used
      ShapeError       tensors that disagree                      (also ValueError)
      GenerationError  a rollout that cannot be made
        FullError      a conversation that leaves no room for an answer
      NumericsError    a number that is not what it must be: the run stops
        BadStepError   in one step, before it changed anything: that step is skipped
      OutOfMemoryError        a computation does not fit into memory
      CheckpointError  a folder that cannot be written, read or trusted
      RankError        another rank of the run died or hangs

A message says in one line where, what is expected, what was found and what to do:
`<where> must <rule>; got <value>. <what to do>.` The command line prints only that line and exits
with code 2; `--debug` shows the traceback. `Stopped` is not an error and not in the tree.
"""

import signal


class TandemError(Exception):
    """Any error that a user can do something about."""


class ConfigError(TandemError, ValueError):
    """One or more knobs are wrong; the message lists them all."""


class DataError(TandemError, ValueError):
    """A data file, or one of its rows, cannot be used."""


class RewrittenError(DataError):
    """A chat template writes an earlier answer, which is to be learned, otherwise than at first."""


class ModelError(TandemError):
    """A model, tokenizer or adapter is missing, unsupported or inconsistent."""


class ShapeError(TandemError, ValueError):
    """Tensors that must agree in shape do not."""


class GenerationError(TandemError):
    """A rollout cannot be made as asked."""


class FullError(GenerationError):
    """A conversation leaves no room for an answer; the message ends in what to do about it."""


class NumericsError(TandemError):
    """A number is not what it must be (a finite loss, a ratio of 1)."""


class BadStepError(NumericsError):
    """A step's loss, gradient or rewards are not usable; it changed nothing."""


class OutOfMemoryError(TandemError):
    """A step does not fit into memory; the message says what saves the most."""


class CheckpointError(TandemError):
    """A saved folder is missing, incomplete or inconsistent."""


class RankError(TandemError):
    """Another rank died or hangs, so this one cannot continue; the message names it."""


class Stopped(BaseException):
    """The run stopped because a signal asked it to.

    Like KeyboardInterrupt it can be raised anywhere and is not an `Exception`, so that code which
    catches all errors of a library does not catch it.
    """

    def __init__(self, number: int, where: str) -> None:
        """number: the signal's. where: how far it got, "after ppo step 12, which is saved"."""
        super().__init__(f"stopped by {signal.Signals(number).name} {where}")
        self.number, self.where = number, where
        self.exit_code = 128 + number


class StoppedWaiting(Stopped):
    """The same on the one rank that waits for something while the others wait for it, so that it
    must tell them."""
