"""Trains an EAGLE-3 draft for a model (Li et al. 2025, arXiv:2503.01840), in the layout of published drafts.

The draft learns the target's distribution of the token behind each token of a text. It is trained as it is used: in
the first pass an entry reads the target's features, and in each further pass the features that the draft itself
computed for the token before, as it does when it proposes several tokens ("training-time test", section 3.2). A text
that the target wrote itself is the best one: `--generate` has it continue pieces of the given text, and trains on
these.

This is meant for small and middle-sized targets on few devices: target and draft are on the same devices in float32.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from jaxserve.checkpoints.hub import resolve_model
from jaxserve.config import ConfigError
from jaxserve.convert.calibration import read_windows
from jaxserve.convert.convert import take
from jaxserve.convert.settings import TrainConfig
from jaxserve.devices.mesh import make_mesh
from jaxserve.llm import LLM
from jaxserve.models.decoder import Decoder, added, angles
from jaxserve.models.draft_files import EAGLE_NAMES, draft_pieces
from jaxserve.models.drafter import Drafter, DraftSpec
from jaxserve.models.load import load_params, read_model
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec, RopeConfig
from jaxserve.models.weights import dummy_params
from jaxserve.pallas_kernels.operands import Heads, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import SamplingParams

log = logging.getLogger(__name__)

OPS = Ops()  # plain operations, which have derivatives
HELD_OUT = 16  # windows that are not trained on
DECAY = 0.8  # weight of each further pass in the loss, against the pass before
WARM_UP = 0.03  # part of the time in which the learning rate rises
DESCENT = 0.5  # part of the time in which it falls to zero
FIRST = 0.35  # part of the time in which only the first pass is trained, which costs a third


def train_eagle(model: str, data: Path, out: Path, config: TrainConfig) -> None:
    """Trains a draft for `model` on a text, or JSON lines with a "text" each, and writes it to the folder `out`.

    Raises ConfigError for models whose attention is not of queries, keys and values, and for a text that is too short.
    """
    folder = resolve_model(model)
    target = read_model(folder)
    known = len(target.specs) == target.num_layers and all(isinstance(spec, AttentionSpec) for spec in target.specs)
    if not known or target.passes_more or target.several_shapes:
        raise ConfigError(
            f"train-eagle needs a model whose layers all have keys and values of one shape, and no other inputs; "
            f"{model} has others"
        )
    windows = read_windows(data, load_tokenizer(folder), 2**31, config.length)
    if len(windows) < HELD_OUT + config.rows:
        raise ConfigError(
            f"{data} has {len(windows)} windows of {config.length} tokens; training needs at least "
            f"{HELD_OUT + config.rows}"
        )
    if config.generate:
        windows = np.concatenate([windows[:HELD_OUT], _continued(model, windows[HELD_OUT:], config)])
    training = Training(target, folder, windows, config)
    training.run()
    training.write(out)


def _continued(model: str, windows: np.ndarray, config: TrainConfig) -> np.ndarray:
    """Windows with a second half that the target wrote: a third of them greedily, others at temperatures up to 1."""
    half = config.length // 2
    rng = np.random.default_rng(config.seed)
    chosen = windows[rng.permutation(len(windows))[: config.generate]]
    llm = LLM(model, max_model_len=config.length)
    params = [
        SamplingParams(temperature=(0.0, 0.7, 1.0)[i % 3], seed=i, max_tokens=half, ignore_eos=True)
        for i in range(len(chosen))
    ]
    outputs = llm.generate([one[: config.length - half].tolist() for one in chosen], params)
    return np.stack(
        [
            np.concatenate([one[: config.length - half], out.outputs[0].token_ids]).astype(np.int32)
            for one, out in zip(chosen, outputs, strict=True)
        ]
    )


class Training:
    """A draft and its target on the devices.

    Attributes:
      drafter, params: the draft and its parameters, by path.
      ids: int32 [vocabulary], the target's token for each of the draft's, ascending.
    """

    def __init__(self, target: ModelConfig, folder: Path, windows: np.ndarray, config: TrainConfig):
        mesh = make_mesh(1)
        self.config = config
        self.windows = windows
        self.decoder = Decoder(target, target.num_kv_heads, target.vocab_size, jnp.float32, OPS)
        self.target_params = load_params(self.decoder, folder, mesh, dequantize=True, progress=False)
        size = min(config.vocabulary, target.vocab_size)
        counts = np.bincount(windows.ravel(), minlength=target.vocab_size)
        self.ids = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
        log.info("the draft's %d tokens are %.2f%% of the text", size, 100 * counts[self.ids].sum() / counts.sum())
        layers = (min(2, target.num_layers), target.num_layers // 2, max(target.num_layers - 3, 0))
        if target.num_layers < 8:  # the usual three would be nearly the same
            layers = (1, (target.num_layers + 1) // 2, target.num_layers)
        shape = _shape(target, size)
        spec = DraftSpec(layers, target.hidden_size, own_head=True)
        sizes = target.num_kv_heads, size, target.vocab_size, target.vocab_size
        self.drafter = Drafter(spec, shape, *sizes, jnp.float32, OPS)
        self.params = self._begin(flatten_dict(dummy_params(self.drafter, mesh, config.seed), sep="/"))
        labels = {path: _kind(path) for path in self.params}
        matrices = optax.contrib.muon(1.0, weight_decay=0.0)
        self._optimizer = optax.multi_transform({"matrix": matrices, "other": optax.adam(0.1, b2=0.95)}, labels)
        self._state = self._optimizer.init(self.params)

    def _begin(self, params: dict[str, Any]) -> dict[str, Any]:
        """The first parameters: the head is the target's, features are its last hidden states, the layer's results are
        zero, and its first projections are those of the target's layers where these have the same shape."""
        decoder = self.decoder
        hidden = self.decoder.config.hidden_size
        table = "embed/table" if decoder.config.tie_embeddings else "head/kernel"
        flat = flatten_dict(self.target_params, sep="/")
        changed = {"head/kernel": flat[table][self.ids], "norm/scale": flat.get("norm/scale", params["norm/scale"])}
        read = len(self.drafter.spec.layers)
        changed["fc/kernel"] = jnp.concatenate([jnp.zeros((hidden, (read - 1) * hidden)), jnp.eye(hidden)], axis=1)
        for path in ("layers_0/attention/out/kernel", "layers_0/mlp/down/kernel"):
            changed[path] = jnp.zeros_like(params[path])
        first = "layers_0/"
        last = f"layers_{decoder.config.num_layers - 1}/"
        qkv = "attention/qkv/kernel"
        gate_up = "mlp/gate_up/kernel"
        alike = {first + qkv: jnp.concatenate([flat[first + qkv], flat[last + qkv]], axis=1) / 2**0.5}
        alike |= {first + gate_up: flat[last + gate_up]} if last + gate_up in flat else {}
        changed |= {path: x for path, x in alike.items() if x.shape == params[path].shape}
        return params | changed

    def run(self) -> list[float]:
        """Trains until the time is over. Returns the loss of each step."""
        config = self.config
        losses = []
        some = jnp.asarray(self.windows[: config.rows])
        for passes in {1, config.passes}:  # compiles the steps, for the first and for later states
            params = self.params
            state = self._state
            for _ in range(2):
                params, state, _ = self._step(params, state, self.target_params, some, 0.0, passes)
        start = time.monotonic()
        for step, batch in enumerate(self._batches()):
            passed = (time.monotonic() - start) / (60 * config.minutes)
            if passed >= 1:
                break
            rate = config.rate * min(1.0, (passed + 0.002) / WARM_UP, (1 - passed) / DESCENT)
            passes = 1 if passed < FIRST else config.passes
            self.params, self._state, loss = self._step(
                self.params, self._state, self.target_params, batch, rate, passes
            )
            losses.append(float(loss))
            if step % 50 == 0:
                log.info("step %d, %.0f%%: loss %.3f", step, 100 * passed, np.mean(losses[-50:]))
        log.info("%d steps; %s", len(losses), self.describe())
        return losses

    def describe(self) -> str:
        """How often a draft token equals the target's most likely one on windows that were not trained on, for each
        pass if all before were right."""
        passes = self.config.passes
        agreed = self._loss(self.params, self.target_params, jnp.asarray(self.windows[:HELD_OUT]), passes)[1]
        chains = [np.asarray(agreed)[:, i, i : agreed.shape[2] - passes + i + 1] for i in range(passes)]
        kept = np.cumprod(np.stack(chains), axis=0).mean(axis=(1, 2))
        parts = ", ".join(f"{share:.1%}" for share in kept)
        return f"greedy proposals kept of held-out text: {parts}; {1 + kept.sum():.2f} tokens a check"

    def _batches(self) -> Iterator[jax.Array]:
        rng = np.random.default_rng(self.config.seed)
        while True:
            order = HELD_OUT + rng.permutation(len(self.windows) - HELD_OUT)
            for at in range(0, len(order) - self.config.rows + 1, self.config.rows):
                yield jnp.asarray(self.windows[order[at : at + self.config.rows]])

    @partial(jax.jit, static_argnums=(0, 6))
    def _step(
        self, params: Any, state: Any, target: Any, batch: jax.Array, rate: float, passes: int
    ) -> tuple[Any, Any, jax.Array]:
        (loss, _), grads = jax.value_and_grad(self._loss, has_aux=True)(params, target, batch, passes)
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies integers and floats
            updates, state = self._optimizer.update(grads, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: u * rate, updates)), state, loss

    @partial(jax.jit, static_argnums=(0, 4))
    def _loss(self, params: Any, target: Any, batch: jax.Array, passes: int) -> tuple[jax.Array, jax.Array]:
        """(cross entropy with the target's distribution, weighted over the passes; whether the draft's most likely
        token is the target's, bool [windows, passes, places])."""

        def one(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            states, logits = _states(self.decoder, target, tokens, self.drafter.spec.layers)
            wanted = jax.nn.softmax(logits[1:])[:, self.ids]  # behind tokens 1, 2, …: the draft knows one token more
            best = jnp.argmax(logits[1:], axis=-1)
            whole = {**unflatten_dict(params, sep="/"), "embed": target["embed"]}
            made = proposals(self.drafter, whole, states, tokens, passes)
            logs = jax.nn.log_softmax(made)
            losses = -(wanted * logs).sum(-1).mean(-1)
            weights = jnp.array([DECAY**i for i in range(passes)])
            return (losses * weights).sum() / weights.sum(), jnp.asarray(self.ids)[jnp.argmax(made, axis=-1)] == best

        losses, agreed = jax.vmap(one)(batch)
        return losses.mean(), agreed

    def write(self, out: Path) -> None:
        """Writes the draft as SafeAILab and SpecForge do, in bfloat16."""
        out.mkdir(parents=True, exist_ok=True)
        pieces = draft_pieces(self.drafter, EAGLE_NAMES, 0, lambda name: True)
        host = {path: np.asarray(value) for path, value in self.params.items()}
        tensors: dict[str, Any] = {one.name: take(host[path], one) for path, some in pieces.items() for one in some}
        tensors = {name: np.asarray(x).astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
        kept = np.zeros(self.drafter.target_vocab, bool)
        kept[self.ids] = True
        maps = {"d2t": self.ids.astype(np.int64) - np.arange(len(self.ids)), "t2d": kept}
        save_file(tensors | maps, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps(self._settings(), indent=2) + "\n")

    def _settings(self) -> dict[str, Any]:
        config = self.drafter.config
        attention = config.attentions[0]
        layer = config.layers[0]
        assert layer.mlp is not None
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": self.drafter.target_vocab,
            "draft_vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": layer.mlp.size,
            "num_hidden_layers": 1,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position,
            "rms_norm_eps": layer.norm.eps,
            "rope_theta": config.ropes["default"].theta,
            "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in self.drafter.spec.layers]},
        }


def _kind(path: str) -> str:
    return "matrix" if path.endswith("/kernel") and not path.startswith("head") else "other"


def _shape(target: ModelConfig, vocabulary: int) -> ModelConfig:
    """A Llama layer as wide as the target's."""
    like: Any = target.attentions[0]
    attention = AttentionSpec(num_heads=like.num_heads, num_kv_heads=like.num_kv_heads, head_dim=like.head_dim)
    norm = NormSpec(eps=1e-5)
    width = next((mlp.size for mlp in target.mlps if mlp.experts is None), 3 * target.hidden_size)
    layer = LayerSpec(attention=attention, mlp=MLPSpec(size=width), norm=norm)
    return ModelConfig(
        family="llama", vocab_size=vocabulary, hidden_size=target.hidden_size, layers=(layer,), norm=norm,
        ropes={"default": RopeConfig(theta=10000.0)}, max_position=target.max_position,
    )  # fmt: skip


def _states(
    decoder: Decoder, params: Any, tokens: jax.Array, layers: tuple[int, ...]
) -> tuple[list[jax.Array], jax.Array]:
    """The inputs of some of the target's layers, [tokens, hidden] each, and its logits [tokens, vocabulary]."""
    apply = partial(decoder.apply, {"params": params})
    x, ropes = apply(tokens, jnp.arange(len(tokens)), OPS, method="begin")
    y = None
    seen = {}
    for i, spec in enumerate(decoder.config.layers):
        seen[i] = added(x, y)
        module = decoder.layer(spec)
        attend = partial(_causal, module, [])
        (x, y), _ = module.apply({"params": params[f"layers_{i}"]}, x, y, ropes, attend, OPS, mutable=["routing"])
    seen[decoder.config.num_layers] = added(x, y)
    logits: Any = apply(apply(x, y, OPS, method="finish"), OPS, method="logits")
    return [jax.lax.stop_gradient(seen[i]) for i in layers], logits


def proposals(drafter: Drafter, params: Any, states: list[jax.Array], tokens: jax.Array, passes: int) -> jax.Array:
    """Logits [passes, tokens - 1, vocabulary] behind each token but the first. In the first pass features come from the
    target's states; in each further one from the pass before, at the place before."""
    apply = partial(drafter.apply, {"params": params})
    features: Any = apply(states, OPS, method="features")
    features = features[:-1]
    tokens = tokens[1:]
    layer = drafter.layer(drafter.config.layers[0])
    ropes = angles(drafter.config, jnp.arange(len(tokens)))
    earlier: list[tuple[jax.Array, jax.Array]] = []
    found: list[Any] = []
    for _ in range(passes):
        made, hidden = apply(features, tokens, ropes, partial(_causal, layer, earlier), OPS, method="entries")
        found.append(apply(hidden, OPS, method="logits"))
        features = jnp.concatenate(
            [made[:1], made[:-1]]
        )  # the first place has no place before; a wrong one is no matter
    return jnp.stack(found)


def _causal(layer: Any, earlier: list[tuple[jax.Array, jax.Array]], heads: Heads) -> jax.Array:
    """Attention of one sequence, without a cache. `earlier`: keys and values of the passes before, to which this one's
    are added. In pass i, an entry sees those of pass 0 that are at least i places before it, and of each further pass
    the one entry that was its own past when it proposed."""
    q, k, v = OPS.rotate(heads, layer.norm_eps, jnp.float32)
    earlier.append((k, v))
    spec = layer.spec.attention
    count = len(q)
    turn = len(earlier) - 1
    index = jnp.arange(count)
    back = index[:, None] - index
    seen = (back >= turn) & (back < (spec.window or count)) if turn or spec.window else back >= 0
    if getattr(spec, "chunk", None):
        seen &= index[:, None] // spec.chunk == index // spec.chunk
    keys, values = earlier[0]
    scores = jnp.einsum("tkgd,skd->tkgs", q, keys) * spec.softmax_scale
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    own = [
        jnp.einsum("tkgd,tkd->tkg", q, _shifted(k, turn - i)) * spec.softmax_scale for i, (k, _) in enumerate(earlier)
    ]
    scores = jnp.concatenate([scores, *(one[..., None] for one in own[1:])], axis=-1)
    if spec.softcap:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    if heads.sinks is not None:
        sinks = jnp.broadcast_to(value_of(heads.sinks)[None, :, :, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores)
    out = jnp.einsum("tkgs,skd->tkgd", weights[..., :count], values)
    for i, (_, v) in enumerate(earlier[1:], start=1):
        out += weights[..., count + i - 1, None] * _shifted(v, turn - i)[:, :, None]
    return out


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """Each place's row of x [places, …] that is `by` places before."""
    return x if by == 0 else jnp.concatenate([x[:by], x[:-by]])
