"""The place of each tensor of a mixture of experts in the decoder's parameters.

If a file stacks experts, `checkpoints.stacks` has cut the stacks into one tensor per expert, so that all files are read
in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from jaxserve.checkpoints.load import Piece, Pieces, Stack
from jaxserve.models.sources import name_of, rows
from jaxserve.models.spec import ExpertsSpec, MLPSpec

View = Callable[[np.ndarray], np.ndarray]


def expert_pieces(
    mlp: MLPSpec, hidden: int, names: Mapping[str, str], layer: int, has: Callable[[str], bool]
) -> dict[str, Pieces]:
    """Path within the layer -> the tensors that make it up. `has` tells whether the checkpoint has a named weight."""
    experts = mlp.experts
    assert experts is not None
    of_router = experts.routed, experts.router_size or hidden
    made: dict[str, Pieces] = {"mlp/router/kernel": [_piece(names, "router.weight", layer, of_router)]}
    if experts.router_bias:
        made["mlp/router/bias"] = [_piece(names, "router.bias", layer, (experts.routed,))]
    if experts.router.corrected:
        row = "correction_row" in names
        shape = (1, experts.routed) if row else (experts.routed,)
        role = "correction_row" if row else "correction"
        correction = _piece(names, role, layer, shape, lambda t: t.reshape(shape))
        absent = names.get("correction.absent") == "zeros" and not has(correction.name)
        made["mlp/correction"] = [] if absent else [correction]
    if latent := experts.latent_size:
        made["mlp/latent_in/kernel"] = [_piece(names, "latent_in.weight", layer, (latent, hidden))]
        made["mlp/latent_out/kernel"] = [_piece(names, "latent_out.weight", layer, (hidden, latent))]
    if experts.scaled:
        made["mlp/scales"] = [_piece(names, "expert_scales", layer, (experts.count,))]
    if experts.hashed:
        table = _piece(names, "expert_table", layer, (experts.hashed, experts.router.top_k))
        made["mlp/of_token"] = [replace(table, integers=True)]
    if experts.out_bias:
        made["mlp/out_bias"] = [_piece(names, "expert_out_bias", layer, (hidden,))]
    fused = "expert_gate_up.weight" in names
    if fused and "expert_gate.weight" in names:
        fused = not has(name_of(names, "expert_gate.weight", layer).format(i=layer, e=0))
    gate_up, down, bias = (_fused if fused else _apart)(mlp, experts, latent or hidden, names, layer)
    made |= {"mlp/experts_gate_up": gate_up, "mlp/experts_down": down} | bias
    if experts.shared_size:
        made |= _shared(mlp, experts, hidden, names, layer)
    return made


def _whole(target: np.ndarray) -> np.ndarray:
    return target


def _piece(
    names: Mapping[str, str], role: str, layer: int, shape: tuple[int, ...], view: View = _whole, expert: int = 0
) -> Piece:
    return Piece(name_of(names, role, layer).format(i=layer, e=expert), shape, view)


def _of(branch: int, size: int, target: np.ndarray) -> np.ndarray:
    """The view of the gate's rows (branch 0) or the up's rows (1) in a fused weight, whose rows alternate."""
    return target.reshape(size, 2, *target.shape[1:])[:, branch]


_Made = tuple[Stack, Stack, dict[str, Pieces]]


def _apart(mlp: MLPSpec, experts: ExpertsSpec, hidden: int, names: Mapping[str, str], layer: int) -> _Made:
    """For checkpoints in which gate and up are two tensors."""
    size = mlp.size
    numbers = range(experts.count)
    inner = (("expert_gate", 0), ("expert_up", 1))

    def of_expert(e: int) -> list[Piece]:
        if not mlp.gated:
            return [_piece(names, "expert_up.weight", layer, (size, hidden), expert=e)]
        return [
            _piece(names, f"{role}.weight", layer, (size, hidden), partial(_of, branch, size), e)
            for role, branch in inner
        ]

    def down_of(e: int) -> list[Piece]:
        turned = "expert_down.weight.T" in names
        role = "expert_down.weight.T" if turned else "expert_down.weight"
        return [replace(_piece(names, role, layer, (hidden, size), expert=e), transposed=turned)]

    gate_up, down = (Stack(tuple(made(e) for e in numbers)) for made in (of_expert, down_of))
    if not mlp.bias:
        return gate_up, down, {}

    def bias_view(e: int, branch: int) -> View:
        return lambda t: _of(branch, size, t[e])

    first = [
        _piece(names, f"{role}.bias", layer, (size,), bias_view(e, branch), e)
        for e in numbers
        for role, branch in inner
    ]
    return gate_up, down, _biases(first, "expert_down.bias", experts, hidden, names, layer)


def _fused(mlp: MLPSpec, experts: ExpertsSpec, hidden: int, names: Mapping[str, str], layer: int) -> _Made:
    """For checkpoints in which gate and up are one tensor. By the name "expert_gate_up.rows" of the family, the rows of
    gate and up alternate ("in turns"), or all rows of the gate come first. By "expert_gate_up.floats" floats are
    transposed ("transposed"), or where their shape says so ("either")."""
    size = mlp.size
    numbers = range(experts.count)
    in_turns = names.get("expert_gate_up.rows", "halves") == "in turns"
    transposed = {"transposed": True, "either": None}.get(names.get("expert_gate_up.floats", ""), False)

    def of_expert(e: int) -> list[Piece]:
        name = name_of(names, "expert_gate_up.weight", layer).format(i=layer, e=e)
        shape = (2 * size, hidden)
        if in_turns:
            return [Piece(name, shape, _whole, transposed=transposed)]
        return [
            Piece(name, shape, lambda t: t.reshape(size, 2, -1).swapaxes(0, 1), (2, size, -1), transposed=transposed)
        ]

    def down_of(e: int) -> list[Piece]:
        name = name_of(names, "expert_fused_down.weight", layer).format(i=layer, e=e)
        return [Piece(name, (hidden, size), _whole, transposed=transposed)]

    gate_up, down = (Stack(tuple(made(e) for e in numbers)) for made in (of_expert, down_of))
    if not mlp.bias:
        return gate_up, down, {}
    assert in_turns, "biases of gate and up beside each other"

    def entry(e: int) -> View:
        return lambda t: t[e]

    first = [_piece(names, "expert_gate_up.bias", layer, (2 * size,), entry(e), e) for e in numbers]
    return gate_up, down, _biases(first, "expert_fused_down.bias", experts, hidden, names, layer)


def _biases(
    first: list[Piece], role: str, experts: ExpertsSpec, hidden: int, names: Mapping[str, str], layer: int
) -> dict[str, Pieces]:
    def entry(e: int) -> View:
        return lambda t: t[e]

    last = [_piece(names, role, layer, (hidden,), entry(e), e) for e in range(experts.count)]
    return {"mlp/experts_gate_up_bias": first, "mlp/experts_down_bias": last}


def _shared(mlp: MLPSpec, experts: ExpertsSpec, hidden: int, names: Mapping[str, str], layer: int) -> dict[str, Pieces]:
    size = experts.shared_size
    fused = "shared_gate_up.weight" in names

    def branch(which: int) -> Piece:
        view = partial(_of, which, size)
        if fused:
            whole = _piece(names, "shared_gate_up.weight", layer, (2 * size, hidden), view)
            return replace(whole, take=rows(which * size, size))
        return _piece(names, f"shared_{('gate', 'up')[which]}.weight", layer, (size, hidden), view)

    first: dict[str, Pieces]
    if mlp.gated:
        first = {"mlp/shared/gate_up/kernel": [branch(0), branch(1)]}
    else:
        first = {"mlp/shared/up/kernel": [_piece(names, "shared_up.weight", layer, (size, hidden))]}
    made = first | {
        "mlp/shared/down/kernel": [_piece(names, "shared_down.weight", layer, (hidden, size))],
    }
    if experts.shared_gate:
        made["mlp/shared_gate/kernel"] = [_piece(names, "shared_expert_gate.weight", layer, (1, hidden))]
    return made
