"""Operations that are tried on this machine's device. Plain XLA replaces those that are wrong there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels import selfcheck_stamps
from jaxserve.pallas_kernels.delta_net.reference import delta_net
from jaxserve.pallas_kernels.device_ops import grouped_floats
from jaxserve.pallas_kernels.kv_write import write_kv
from jaxserve.pallas_kernels.latent_attention import reference as latent
from jaxserve.pallas_kernels.lora import reference as lora
from jaxserve.pallas_kernels.mamba2.reference import mamba2
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.quant_matmul.ways import is_float, kernels
from jaxserve.pallas_kernels.registry import (
    AttentionProblem,
    BackendError,
    Device,
    LatentProblem,
    MatmulProblem,
    RecurrentProblem,
    SegmentProblem,
    choose,
    has_gated_matmul,
    load,
)
from jaxserve.pallas_kernels.segment_attention.reference import segment_attention
from jaxserve.pallas_kernels.short_conv.reference import short_conv
from jaxserve.pallas_kernels.types import QuantArray

if TYPE_CHECKING:  # imported only where a device is tried
    from jaxserve.pallas_kernels.selfcheck import Finding

log = logging.getLogger(__name__)
PLAIN = ("xla", "cpu")  # backends of products that are not tried


_checkers = ThreadPoolExecutor(32, "checks-kernels")  # each waits for compilers, or for its turn on the device


class Trial:
    """A check that runs in a thread, or that has passed before on such a device (`selfcheck_stamps`)."""

    def __init__(
        self, operation: str, backend: str, kernels: Sequence[Any], problem: Any, check: Callable[[], Iterable[Finding]]
    ):
        """kernels: the functions or modules that `check` runs."""
        from jaxserve.pallas_kernels import selfcheck

        self._operation = operation
        self._backend = backend
        self._check = check
        self._stamp = selfcheck_stamps.stamp_of(
            kernels, operation=operation, problem=problem, repeats=selfcheck.REPEATS
        )
        self.known = self._stamp is not None and selfcheck_stamps.has_passed(self._stamp)
        self.ended = 0.0  # time.perf_counter() when a check that is not known has ended
        self.result: Future[Finding | None] = Future()
        if self.known:
            self.result.set_result(None)
        else:
            self.result = _checkers.submit(self._run)

    def _run(self) -> Finding | None:
        """The first finding that is wrong."""
        try:
            wrong = next((finding for finding in self._check() if not finding.right), None)
        finally:
            self.ended = time.perf_counter()
        if wrong is None and self._stamp is not None:
            selfcheck_stamps.add([self._stamp])
        return wrong

    def is_right(self) -> bool:
        """Whether all findings are right. Otherwise warns of the first that is wrong, or raises BackendError if the
        kernel was requested by name."""
        try:
            wrong = self.result.result()
            if wrong is None:
                return True
            said = f"is wrong on this device: {wrong}"
        except Exception as failure:  # a compiler or driver may raise anything
            said = f"does not run: {failure}"
        if self._backend != "auto":
            raise BackendError(f"the {self._operation} backend {self._backend} {said}")
        log.warning("the %s kernel %s; plain XLA takes its place", self._operation, said)
        return False


class Trials:
    """The checks of a model's kernels on this machine's first device. They run in threads, all at once, from when their
    problems are known, while weights are loaded.

    Attributes:
      of_ops: the check of each kernel in `Ops`, by its field.
    """

    def __init__(self) -> None:
        self.of_ops: dict[str, Trial] = {}
        self._products: dict[tuple[bool, MatmulProblem, tuple[str, ...]], list[Trial]] = {}
        self._gates: dict[tuple[MatmulProblem, str], Trial] = {}
        self._lock = threading.Lock()
        self._begun = time.perf_counter()

    @property
    def all(self) -> list[Trial]:
        of_products = [trial for some in self._products.values() for trial in some]
        return [*self.of_ops.values(), *of_products, *self._gates.values()]

    def begin(self, field: str, backend: str, kernels: Sequence[Any], problem: Any, check: Callable[[], Any]) -> None:
        """Begins the check of a field of `Ops`."""
        operation = {"paged_attention": "attention", "latent_attention": "latent", "add_adapters": "adapters"}
        self.of_ops[field] = Trial(operation.get(field, field), backend, kernels, problem, check)

    def products(
        self, device: Device, problem: MatmulProblem, backend: str, *, grouped: bool = False
    ) -> Sequence[Trial]:
        """The checks of products with quantized weights of this form, or of `grouped` products with experts' weights,
        where floats have the form of `experts.as_codes`. Those that have not begun begin. Raises BackendError where a
        backend that was requested by name cannot do the form."""
        if not grouped and (backend != "auto" or w8a8.why_not(device, problem) is not None):
            # Where rounded inputs become floats again, the kernels are those of products without rounded inputs.
            problem = replace(problem, activations=None)
        # Other kernels may be the fastest since the last call (`tuning`).
        kernels = () if grouped or problem.activations is not None else tuple(_backends(device, problem, backend))
        key = grouped, problem, kernels
        with self._lock:
            if key not in self._products:
                checks = _grouped_checks if grouped else _product_checks
                self._products[key] = [
                    Trial("matmul", backend, [kernel], problem, check)
                    for kernel, check in checks(device, problem, backend)
                ]
            return self._products[key]

    def begin_gates(self, device: Device, problem: MatmulProblem, backend: str) -> None:
        """Begins the checks of gated products with weights of this form, whose activation the problem says, if a kernel
        computes these in one launch. Raises BackendError as `products`."""
        from jaxserve.pallas_kernels.selfcheck import check_gated

        if is_float(problem):  # kernels are used where they were measured to be faster
            names = kernels(device, problem) if backend == "auto" else []
        else:
            names = _backends(device, problem, backend)
        for name in names:
            module = load("matmul", name)
            if not has_gated_matmul(module, problem):
                continue
            with self._lock:
                if (problem, name) not in self._gates:
                    check = partial(check_gated, module.gated_matmul, problem)
                    self._gates[problem, name] = Trial("gated matmul", backend, [module.gated_matmul], problem, check)

    @property
    def gates_are_right(self) -> bool:
        """As `Trial.is_right`, for all gated products."""
        return all(trial.is_right() for trial in self._gates.values())

    def tell(self) -> None:
        """Says in the log how many checks have run, and how many were not repeated. All must be done."""
        ran = [trial for trial in self.all if not trial.known]
        if ran:
            seconds = max(trial.ended for trial in ran) - self._begun
            log.info("%d checks of kernels took %.1f s while weights were loaded", len(ran), seconds)
        if known := len(self.all) - len(ran):
            log.info("%d checks of kernels, which have passed on such a device before, are not repeated", known)


# What takes the place of a wrong kernel.
PLAIN_OPS: dict[str, Any] = {
    "paged_attention": reference.paged_attention,
    "write_kv": write_kv,
    "write_and_attend": None,
    "latent_attention": latent.latent_attention,
    "write_latent": latent.write_latent,
    "fused": None,
    "gated_matmul": None,
    "draw": None,
    "add_adapters": lora.add_adapters,
    "delta_net": delta_net,
    "mamba2": mamba2,
    "short_conv": short_conv,
    "segment_attention": segment_attention,
}


def on_trial(
    ops: Ops,
    problem: AttentionProblem | LatentProblem,
    backend: str,
    *,
    windows: bool = True,
    vocab: int = 0,
    recurrent: tuple[str, RecurrentProblem] | None = None,
    segments: SegmentProblem | None = None,
) -> Ops:
    """The operations with checks that have begun (`Ops.trials`); `passing` waits for them.

    Operations that are plain XLA already are not tried, as nothing could replace them. windows: whether the model has
    any. vocab: tokens of the rows that are drawn from. recurrent: the operation of its recurrent layers, if it has any,
    and their problem. segments: the attention of its image encoder, if it has one.
    """
    trials = Trials()
    if isinstance(problem, LatentProblem):
        _begin_latent(trials, ops, problem, backend)
    else:
        _begin_attention(trials, ops, problem, backend, windows)
        if ops.fused is not None:
            from jaxserve.pallas_kernels.selfcheck_fused import check_fused

            trials.begin("fused", "auto", [ops.fused], problem, partial(check_fused, ops.fused, problem))
    if ops.draw is not None and vocab:
        from jaxserve.pallas_kernels.selfcheck_draw import check_draw

        trials.begin("draw", "auto", [ops.draw], vocab, partial(check_draw, ops.draw, vocab))
    if recurrent is not None:
        _begin_recurrent(trials, *recurrent)
    if segments is not None:
        _begin_segments(trials, segments)
    return replace(ops, trials=trials)


def _begin_recurrent(trials: Trials, operation: str, problem: RecurrentProblem) -> None:
    name = choose(operation, Device.of(jax.devices()[0]), problem)
    if name not in PLAIN:
        from jaxserve.pallas_kernels.selfcheck_recurrent import check_recurrent

        run = getattr(load(operation, name), operation)
        trials.begin(operation, "auto", [run], problem, partial(check_recurrent, operation, run, problem))


def _begin_segments(trials: Trials, problem: SegmentProblem) -> None:
    name = choose("segment_attention", Device.of(jax.devices()[0]), problem)
    if name not in PLAIN:
        from jaxserve.pallas_kernels.selfcheck_segments import check_segments

        run = load("segment_attention", name).segment_attention
        trials.begin("segment_attention", "auto", [run], problem, partial(check_segments, run, problem))


def _begin_attention(trials: Trials, ops: Ops, problem: AttentionProblem, backend: str, windows: bool) -> None:
    from jaxserve.pallas_kernels.selfcheck import check_attention, check_write
    from jaxserve.pallas_kernels.selfcheck_fused import check_write_and_attend

    variants = ("mixed", "decode", "window") if windows else ("mixed", "decode")
    attend = ops.paged_attention
    write = ops.write_kv
    both = ops.write_and_attend
    if attend is not PLAIN_OPS["paged_attention"]:
        check = partial(check_attention, attend, problem, variants=variants)
        trials.begin("paged_attention", backend, [attend], (problem, variants), check)
    if write is not PLAIN_OPS["write_kv"]:
        trials.begin("write_kv", backend, [write], problem, partial(check_write, write, problem))
    if both is not None:
        check = partial(check_write_and_attend, both, attend, problem)
        trials.begin("write_and_attend", backend, [both, attend], problem, check)


def _begin_latent(trials: Trials, ops: Ops, problem: LatentProblem, backend: str) -> None:
    from jaxserve.pallas_kernels.selfcheck_latent import check_latent, check_write_latent

    attend = ops.latent_attention
    write = ops.write_latent
    if attend is not PLAIN_OPS["latent_attention"]:
        trials.begin("latent_attention", backend, [attend], problem, partial(check_latent, attend, problem))
    if write is not PLAIN_OPS["write_latent"]:
        trials.begin("write_latent", backend, [write], problem, partial(check_write_latent, write, problem))


def adapters_on_trial(ops: Ops, dtype: np.dtype) -> Ops:
    """The operations, which are on trial, with a check of `add_adapters`, products with LoRA adapters, too."""
    from jaxserve.pallas_kernels.selfcheck_lora import check_adapters

    if (add := ops.add_adapters) is not None and add is not PLAIN_OPS["add_adapters"]:
        ops.trials.begin("add_adapters", "auto", [add], dtype, partial(check_adapters, add, dtype))
    return ops


def passing(ops: Ops) -> Ops:
    """The operations after their checks, for which this waits. If a kernel is wrong, plain XLA replaces it, with a
    warning; if it was requested by name, BackendError is raised."""
    if ops.trials is None:
        return ops
    wrong = [field for field, trial in ops.trials.of_ops.items() if not trial.is_right()]
    if not ops.trials.gates_are_right:
        wrong.append("gated_matmul")
    if "paged_attention" in wrong or "write_kv" in wrong:
        wrong.append("write_and_attend")  # shares its code with the two others
    plain: Any = {field: PLAIN_OPS[field] for field in wrong}
    return replace(ops, trials=None, **plain)


def checked_matmul(
    trials: Trials,
    device: Device,
    problems: Iterable[MatmulProblem],
    backend: str,
    grouped: Iterable[MatmulProblem] = (),
) -> str:
    """Returns the backend for products with quantized weights of these forms: `backend`, or xla where `auto` is wrong;
    see `Trials.products`. Raises BackendError where a backend that was requested by name does a form wrong."""
    begun = [trials.products(device, problem, backend) for problem in problems]
    begun += [trials.products(device, problem, backend, grouped=True) for problem in grouped]
    return backend if all(trial.is_right() for some in begun for trial in some) else "xla"


Checks = Iterator[tuple[Any, Callable[[], Iterable["Finding"]]]]  # kernels, and what checks each


def _product_checks(device: Device, problem: MatmulProblem, backend: str) -> Checks:
    from jaxserve.pallas_kernels.selfcheck import MATMUL_ROWS, OTHER_ROWS, check_matmul, check_parts

    if problem.activations is not None:
        for as_partials in (False, True) if device.platform == "gpu" else (False,):
            product = partial(rounding_product, as_partials)
            yield product, partial(check_matmul, product, problem)
        return
    for name in _backends(device, problem, backend):
        if name in PLAIN:
            continue
        module = load("matmul", name)
        parts = getattr(module, "quant_matmul_parts", None)
        rows = MATMUL_ROWS if parts is None else OTHER_ROWS
        yield module.quant_matmul, partial(check_matmul, module.quant_matmul, problem, rows=rows)
        if parts is not None:
            yield parts, partial(check_parts, parts, problem)


def _grouped_checks(device: Device, problem: MatmulProblem, backend: str) -> Checks:
    from jaxserve.pallas_kernels.selfcheck import check_grouped

    if problem.codes_dtype == problem.x_dtype:
        multiply = grouped_floats(device, problem.x_dtype, backend)
    else:
        name = choose("matmul", device, problem, backend)
        multiply = getattr(load("matmul", name), "grouped_quant_matmul", None) if name not in PLAIN else None
    if multiply is not None:
        yield multiply, partial(check_grouped, multiply, problem)


def _backends(device: Device, problem: MatmulProblem, backend: str) -> list[str]:
    """Whose kernels multiply by weights of this form."""
    measured = kernels(device, problem) if backend == "auto" else []
    return measured or [choose("matmul", device, problem, backend)]


def rounding_product(partials: bool, x: jax.Array, w: QuantArray, *, count: jax.Array | None = None) -> jax.Array:
    del count
    rows = w8a8.quantize(x, w)
    return w8a8.quant_matmul_parts(rows, w).astype(jnp.float32).sum(0) if partials else w8a8.quant_matmul(rows, w)
