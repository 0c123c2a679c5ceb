"""The order in which the hosts of a pipeline transfer arrays: nobody waits in a circle, whatever the engine does.

Devices compute nothing here. The transfers of each stage are recorded, and then run in a model of devices: a device
runs its calls in order, and a transfer ends when both of its ends have come to it.
"""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxserve.execution import host_transport
from jaxserve.execution.device_groups import DeviceGroups
from jaxserve.execution.host_transport import HostTransport
from jaxserve.execution.pipeline_runner import PipelineRunner
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.slots import SLOT_WORDS
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.stages import Stage
from jaxserve.scheduling.step_plan import Sampler

SLOTS = 6
NOTHING = SimpleNamespace(copy_to_host_async=lambda: None)
PROGRAM = StepProgram(StepShape.of(8, SLOTS, 8, decode_only=True), Sampler.GREEDY, 1, keeps_hidden=False)
KINDS = ["step", "take_all", "sample_deferred", "score_prompt", "set_slots"]


class NullStage:
    """A stage whose devices do nothing."""

    num_slots = padding_slot = SLOTS
    deferred_sizes = (4,)
    _on_cpu = True
    groups = DeviceGroups(1, SLOTS, 0, 1)
    programs = penalty_rows = None

    def __init__(self, number: int, count: int):
        self.mesh = SimpleNamespace(devices=np.array([SimpleNamespace(process_index=number)]), number=number)
        layer = SimpleNamespace(experts=None)
        self.model = SimpleNamespace(config=SimpleNamespace(hidden_size=4, layers=[layer] * count), dtype=np.float32)
        self.stage = Stage(number, number + 1, count)

    def step(self, program, packed, x):
        return host_transport.Sampled(np.zeros((1, SLOTS), np.int32), None), None

    def sample_deferred(self, draws, masks):
        words = host_transport.SCORE_WORDS
        drawn = host_transport.Sampled(np.zeros(4, np.int32), np.zeros((4, words), np.int32))
        return [(min(4, len(draws) - at), drawn) for at in range(0, len(draws), 4)]

    def advance(self, *_):
        return NOTHING

    score_prompt = advance

    def take(self, kind, slot, tokens):
        assert tokens is NOTHING

    def set_slots(self, rows):
        pass


class RecordedLink:
    """Notes each transfer under the numbers of both stages."""

    def __init__(self, source, target, log):
        self.name = (source.number, target.number)
        self._log = log

    def send(self, arrays):
        self._log.append(self.name)

    def receive(self, forms):
        self._log.append(self.name)
        return [NOTHING] * len(forms)


def pipeline(count, monkeypatch):
    """The runners of all hosts, and the transfers of each stage so far."""
    runners = []
    logs = [[] for _ in range(count)]
    for number, log in enumerate(logs):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        monkeypatch.setattr(host_transport, "MeshLink", lambda a, b, log=log: RecordedLink(a, b, log))
        stages = [NullStage(i, count) for i in range(count)]
        transport = HostTransport(stages)
        runners.append(PipelineRunner(stages, None, transport))
        transport.take_everywhere = runners[-1].take_all
    return runners, logs


def left(logs):
    """The transfers that never end."""
    logs = [list(log) for log in logs]
    while True:
        heads = [log[0] if log else None for log in logs]
        ready = {one for one in heads if one is not None and heads[one[0]] == heads[one[1]] == one}
        if not ready:
            return logs
        for one in ready:
            for end in one:
                del logs[end][0]


def step_of(slots):
    packed = PROGRAM.shape.empty(SLOTS)
    rows = len(slots)
    begins = np.minimum(np.arange(SLOTS + 1), rows)
    for name, values in {"q_start": begins, "slot": slots, "num_new": np.ones(rows, np.int32)}.items():
        at, _ = PROGRAM.shape.fields[name]
        packed[at : at + len(values)] = values
    return PROGRAM, packed


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_nobody_waits_in_a_circle(count, monkeypatch):
    """Steps of any sequences, with calls of every kind between them. When the first host reads tokens, it gets them
    with no further call."""
    rng = np.random.default_rng(count)
    for _ in range(30):
        runners, logs = pipeline(count, monkeypatch)
        for number in range(40):
            slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].astype(np.int32)
            kind = rng.choice(KINDS, p=[0.8, 0.08, 0.04, 0.04, 0.04]) if number else "step"
            zeros = np.zeros(len(slots), np.int32)
            draws = np.stack([slots, zeros, zeros, zeros], axis=1)
            row = np.zeros(SLOT_WORDS, np.int32)
            given = {
                "step": step_of(slots), "take_all": (), "sample_deferred": (draws, draws),
                "score_prompt": (slots, slots), "set_slots": ([row],),
            }[kind]  # fmt: skip
            for runner in runners:
                getattr(runner, kind)(*given)
            if kind in ("take_all", "score_prompt"):
                assert not left(logs)[0]
        for runner in runners:
            runner.take_all()
        assert not any(left(logs))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_stage_waits_for_tokens_while_it_could_compute(count, monkeypatch):
    """With as many sequences as stages, each transfer of tokens has steps of the other sequences before it."""
    runners, logs = pipeline(count, monkeypatch)
    for step in range(8 * count):
        for runner in runners:
            runner.step(*step_of(np.array([step % count], np.int32)))
    for number, log in enumerate(logs[:-1]):
        onward = [one for one in log if one == (number, number + 1)]
        tokens = [i for i, one in enumerate(log) if one == (count - 1, number)]
        assert len(onward) == 8 * count
        for nth, at in enumerate(tokens):
            assert log[:at].count((number, number + 1)) == nth + count - 1 - number
