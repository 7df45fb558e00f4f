"""What can go wrong, as one tree.

    TandemError
      ConfigError      a knob, a flag or a file of knobs          (also ValueError)
      DataError        a row, a file or a data set                (also ValueError)
      ModelError       a model, tokenizer or adapter that cannot be used
      ShapeError       tensors that disagree                      (also ValueError)
      GenerationError  a rollout that cannot be made
      NumericsError    a number that must hold and does not: stop before it does harm
        BadStepError   one that a step brought, before it changed anything: leave that step out
      OutOfMemoryError        what is to be computed at once does not fit into memory
      CheckpointError  a folder that cannot be written, read or trusted
      RankError        another rank of the run died or hangs

A message says where, what was found, what is expected and what to do, in one line:
`<where> must <rule>; got <value>. <what to do>.` The command line prints that line alone and
exits with code 2; `--debug` shows the traceback. `Stopped` is no error and apart from the tree.
"""

import signal


class TandemError(Exception):
    """Any error that a user can do something about."""


class ConfigError(TandemError, ValueError):
    """One or more knobs are wrong; the message lists every one of them."""


class DataError(TandemError, ValueError):
    """A data file, or one of its rows, cannot be used."""


class ModelError(TandemError):
    """A model, tokenizer or adapter is missing, unsupported or inconsistent."""


class ShapeError(TandemError, ValueError):
    """Tensors that must agree in shape do not."""


class GenerationError(TandemError):
    """A rollout cannot be made as asked."""


class NumericsError(TandemError):
    """A number that must hold (a finite loss, a ratio of 1) does not."""


class BadStepError(NumericsError):
    """A step's loss, gradient or rewards are not sound; nothing was changed by it."""


class OutOfMemoryError(TandemError):
    """A step does not fit into memory; the message names what frees the most."""


class CheckpointError(TandemError):
    """A saved folder is missing, incomplete or not what it says it is."""


class RankError(TandemError):
    """Another rank died or hangs, so that this one cannot go on; the message names it."""


class Stopped(BaseException):
    """The run was asked to stop by a signal, and did; no error of anyone's.

    It can come in the middle of anything, like KeyboardInterrupt; and like that, it is no
    `Exception`, for whoever catches every mistake of a library would take it for one.
    """

    def __init__(self, number: int, where: str) -> None:
        """number: the signal's. where: what was reached, "after ppo step 12, which is saved"."""
        super().__init__(f"stopped by {signal.Signals(number).name} {where}")
        self.exit_code = 128 + number
