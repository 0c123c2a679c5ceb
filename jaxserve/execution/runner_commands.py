"""The host's calls to the devices, as small typed messages.

Another process with the same model can run them (`Commanded.run`), and its devices then compute the same as here.
Messages are msgpack; arrays are sent as dtype, shape and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar

import msgspec
import numpy as np

from jaxserve.execution.programs import StepProgram
from jaxserve.execution.signatures import AuxProgram, ProgramName
from jaxserve.execution.step_shape import StepShape


class Step(msgspec.Struct, tag=True, frozen=True):
    """Runs a step. As in every command, `method` names a method of `ModelRunner`, and the fields are its arguments."""

    method: ClassVar = "step"
    program: StepProgram
    packed: np.ndarray


class SetSlots(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "set_slots"
    rows: list[np.ndarray]


class CountTokens(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "count_tokens"
    counted: np.ndarray


class SampleDeferred(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "sample_deferred"
    draws: np.ndarray
    masks: np.ndarray


class UpdateTables(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "update_tables"
    copies: list[tuple[int, int]]
    entries: np.ndarray


class CopyPages(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "copy_pages"
    pairs: list[tuple[int, int]]


class ReadPages(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "read_pages"
    pages: list[int]


class WritePages(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "write_pages"
    pages: list[int]
    contents: list[np.ndarray]


class CopyStates(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "copy_states"
    pairs: list[tuple[int, int]]


class ScorePrompt(msgspec.Struct, tag=True, frozen=True):
    """Scores rows of the hidden states that the latest step kept."""

    method: ClassVar = "score_prompt"
    rows: np.ndarray
    targets: np.ndarray
    places: np.ndarray | None = None


class Propose(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "propose"
    name: AuxProgram
    slots: np.ndarray
    count: int


class SetPages(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "set_pages"
    pages: int
    max_blocks: int


class Allocate(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "allocate"


class Release(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "release"


class Compile(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "compile"
    names: list[ProgramName]


class BeginPages(msgspec.Struct, tag=True, frozen=True):
    """Chooses the number of pages, with the other hosts of a pipeline. The next two, too, are for pipelines only."""

    method: ClassVar = "begin_pages"
    shapes: list[StepShape]


class FinishPages(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "finish_pages"
    shapes: list[StepShape]


class CompileStages(msgspec.Struct, tag=True, frozen=True):
    """Compiles programs of stages, by the stages' numbers."""

    method: ClassVar = "compile"
    names: list[tuple[int, ProgramName]]


class TakeAll(msgspec.Struct, tag=True, frozen=True):
    """Has all stages of a pipeline take the tokens that were sampled so far."""

    method: ClassVar = "take_all"


class WriteAdapter(msgspec.Struct, tag=True, frozen=True):
    """Writes an adapter's matrices for one product."""

    method: ClassVar = "write_adapter"
    target: int
    place: int
    a: np.ndarray
    b: np.ndarray


class WriteRanks(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "write_ranks"
    place: int
    ranks: np.ndarray


class KeepWeights(msgspec.Struct, tag=True, frozen=True):
    """Copies weights to host memory. This and the next commands are calls of `engine.held_weights.HeldWeights`."""

    method: ClassVar = "keep"
    level: int


class BringBackWeights(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "bring_back"


class CheckWeights(msgspec.Struct, tag=True, frozen=True):
    """folder: None is each host's own one, from which it started; as in the next command."""

    method: ClassVar = "check"
    folder: str | None


class ReadWeights(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "read"
    folder: str | None


class TakeWeights(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "take"


class DropWeights(msgspec.Struct, tag=True, frozen=True):
    method: ClassVar = "drop"


Copy = CopyPages | CopyStates | ReadPages | WritePages
Change = SetSlots | CountTokens | UpdateTables | Copy | WriteAdapter | WriteRanks
Answered = CheckWeights | ReadWeights  # these may fail, and then nothing has changed
OfWeights = KeepWeights | BringBackWeights | Answered | TakeWeights | DropWeights
Prepare = SetPages | Allocate | Release | Compile | BeginPages | FinishPages | CompileStages
Long = Prepare | OfWeights  # these may take long
Command = Step | SampleDeferred | ScorePrompt | Propose | Change | Long | TakeAll


OF_WEIGHTS = (KeepWeights, BringBackWeights, CheckWeights, ReadWeights, TakeWeights, DropWeights)
OF_MODELS = (
    Step, SampleDeferred, ScorePrompt, Propose, SetSlots, CountTokens, UpdateTables, CopyPages, CopyStates, ReadPages,
    WritePages, WriteAdapter, WriteRanks, SetPages, Allocate, Release, Compile,
)  # fmt: skip
OF_PIPELINES = (
    Step, SampleDeferred, ScorePrompt, TakeAll, SetSlots, CountTokens, UpdateTables, CopyPages, Allocate, Release,
    CompileStages,
)  # fmt: skip


class Commanded:
    """A runner whose calls are commands. A subclass names them (`calls`): each of these methods then passes its command
    to the listener before it does anything, unless the command asks for nothing.

    Attributes:
      listener: gets each command before it is dispatched; None: nobody listens.
    """

    listener: Callable[[Command], None] | None = None

    def __init_subclass__(cls, calls: Sequence[Any]) -> None:
        super().__init_subclass__()
        for kind in calls:
            setattr(cls, kind.method, _announced(kind, vars(cls)[kind.method]))

    def announce(self, command: Command) -> None:
        if self.listener is not None:
            self.listener(command)

    def run(self, command: Command) -> Any:
        """Repeats the call of another runner whose listener received this command. Returns what the method returns."""
        return getattr(self, command.method)(*(getattr(command, field) for field in command.__struct_fields__))


def _announced(kind: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    fields = kind.__struct_fields__

    @wraps(method)
    def call(self: Commanded, *arguments: Any, **named: Any) -> Any:
        if self.listener is not None:
            given = {name: value for name, value in named.items() if name in fields}
            command = kind(*arguments[: len(fields)], **given)
            if not _asks_for_nothing(command):
                self.announce(command)
        return method(self, *arguments, **named)

    return call


def _asks_for_nothing(command: Command) -> bool:
    """Whether a command has fields, all of which are empty."""
    values = [getattr(command, field) for field in command.__struct_fields__]
    return bool(values) and all(isinstance(one, list | np.ndarray) and not _size(one) for one in values)


def _size(values: list[Any] | np.ndarray) -> int:
    return values.size if isinstance(values, np.ndarray) else len(values)


def encode(command: Command) -> bytes:
    return msgspec.msgpack.encode(command, enc_hook=_as_message)


def decode(message: bytes) -> Command:
    """The command that a message holds. Raises msgspec.DecodeError or msgspec.ValidationError for other messages."""
    return msgspec.msgpack.decode(message, type=Command, dec_hook=_from_message)


def _as_message(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes()
    raise NotImplementedError(f"no command holds a {type(value).__name__}")


def _from_message(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    raise NotImplementedError(f"no command holds a {kind.__name__}")
