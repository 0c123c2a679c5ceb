"""Answers to prompts with pictures equal those of Hugging Face transformers, recorded in tests/goldens/images."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_models
from engines import generate, make_engine, request
from picture_prompts import (
    CLIP,
    PROCESSORS,
    PROMPTS,
    VIDEOS,
    Letters,
    Texts,
    build,
    build_for_videos,
    prompt_of,
    prompt_with_video,
    video_of,
)
from PIL import Image
from safetensors.numpy import load_file, save_file
from simulation import PICTURE, TOKENS_PER_CALL, Simulation
from tiny_models import fingerprint

from jaxserve.images.patches import Processed
from jaxserve.images.processing import ImageProcessor
from jaxserve.images.prompts import with_images
from jaxserve.images.videos import Clip, VideoProcessor
from jaxserve.types import ImageTokens

pytestmark = pytest.mark.compiles

GOLDENS = Path(__file__).parent.parent / "goldens" / "images"
MMPROJ = (
    "qwen2_vl_whole", "qwen2_5_vl_yarn", "qwen3_vl_wide", "qwen3_5_moe_whole", "llava_pixtral", "lighton_ocr_tied",
    "mistral3_seeing", "glm4v_half", "idefics3_hub", "gemma4_clipped", "gemma4_unified_older",
)  # fmt: skip
# Of a step, which must have room for all of a picture.
TOKENS = dict.fromkeys(("gemma4_joint", "gemma4_unified_wide", "gemma4_unified_older"), 76)


def asked(engine, case, golden, slot):
    """The request with the prompt of a slot and its pictures."""
    processor = ImageProcessor.of(engine.model_folder, engine.sees)
    tokens, pictures = prompt_of(case, slot, int(golden[f"seed_{slot}"]))
    processed = [processor(Image.fromarray(picture)) for picture in pictures]
    tokens, images = with_images(tokens, processed, engine.sees, Texts(case))
    made = request(str(slot), tokens, max_tokens=len(golden[f"tokens_{slot}"]), logprobs=0)
    made.images = images
    return made


def check(engine, case, golden, turn):
    """Returns the number of frames, which tiles are, of the pictures."""
    requests = [asked(engine, case, golden, slot) for slot in range(len(PROMPTS))]
    results = generate(engine, *requests)
    for slot, result in enumerate(results):
        assert result.token_ids == golden[f"tokens_{slot}"].tolist(), (turn, slot)
        ours = [entry.logprob for entry in result.logprobs]
        np.testing.assert_allclose(ours, golden[f"logprobs_{slot}"], atol=2e-3, err_msg=f"{turn} {slot}")
    return sum(image.grid[0] for one in requests for image in one.images)


@pytest.mark.parametrize("case", PROCESSORS)
def test_tokens_and_logprobs(case, tmp_path):
    """Most steps end within pictures; the second time all but the last tokens are in the prefix cache."""
    golden = np.load(GOLDENS / f"{case}.npz")
    assert str(golden["fingerprint"]) == fingerprint(case), "the weights differ from the recorded ones"
    engine = make_engine(build(case, tmp_path / "model"), tokens=TOKENS.get(case, 24))
    frames = check(engine, case, golden, "first")
    encoded = engine.stats().images_encoded
    assert encoded == sum(len(asked(engine, case, golden, slot).images) for slot in range(len(PROMPTS)))
    assert 0 < sum(engine.stats().step_seconds["encoder"].counts) <= frames  # several go through it together
    check(engine, case, golden, "cached")
    if engine.model.recurrent is None:  # else snapshots of states are too far apart
        # The last page of the first two prompts has a part of a picture, whose rows may have gone to others.
        assert engine.stats().images_encoded <= encoded + 2


@pytest.mark.parametrize("case", VIDEOS)
def test_videos(case, tmp_path):
    """Frames, their patches, the prompt and the answer; resized numbers differ by two steps of 255 at most."""
    golden = np.load(GOLDENS / f"video_{case}.npz")
    assert str(golden["fingerprint"]) == fingerprint(case), "the weights differ from the recorded ones"
    engine = make_engine(build_for_videos(case, tmp_path / "model"), tokens=24)
    kind = engine.sees
    processor = VideoProcessor.of(engine.model_folder, ImageProcessor.of(engine.model_folder, kind), kind.video)
    count, _, rate = CLIP
    assert processor.indices(count, rate) == golden["frames"].tolist()
    video = video_of(case)
    clip = Clip(count, rate, lambda wanted: (Image.fromarray(video[i]) for i in wanted), chosen=False)
    processed = processor(clip)
    patches = np.concatenate([frame.patches for frame in processed.frames])
    assert [len(processed.frames), *processed.frames[0].grid[1:]] == golden["grid"].tolist()
    assert np.abs(patches.astype(int) - golden["patches"]).max() <= 2
    tokens, images = with_images(prompt_with_video(case, int(golden["seed"])), [], kind, Letters(), [processed])
    assert tokens == np.where(golden["prompt"] == kind.video.token, kind.token, golden["prompt"]).tolist()
    shown = [replace_patches(one, own) for one, own in zip(images, split(golden, images), strict=True)]
    for turn in ("first", "cached"):
        asked = request(turn, tokens, max_tokens=len(golden["tokens"]), logprobs=0)
        asked.images = shown
        (result,) = generate(engine, asked)
        assert result.token_ids == golden["tokens"].tolist(), turn
        np.testing.assert_allclose([one.logprob for one in result.logprobs], golden["logprobs"], atol=2e-3)


def split(golden, images):
    return np.split(golden["patches"], np.cumsum([image.num_patches for image in images])[:-1])


def replace_patches(image, patches):
    """With the recorded numbers, so that answers are compared for equal ones."""
    return msgspec.structs.replace(image, patches=patches.tobytes())


@pytest.mark.parametrize("case", ["gemma3_wide", "llava_onevision_tied"])
def test_names_before_transformers_5(case, tmp_path):
    """Published files of SigLIP's towers have a longer name than transformers 5 writes."""
    path = build(case, tmp_path / "model") / "model.safetensors"
    tensors = load_file(path)
    longer = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
    assert longer.keys() != tensors.keys()
    save_file(longer, path)
    check(make_engine(path.parent, tokens=24), case, np.load(GOLDENS / f"{case}.npz"), "renamed")


def test_newlines_around_pictures():
    """They join those of the prompt, as a tokenizer does that has a token for any number of newlines."""
    kind = ImageTokens(1, 4, 2, placeholder=2, around=(2, 3), newlines=2)
    picture = Processed(np.zeros((8, 3), np.uint8), (1, 2, 4), b"")
    texts = Texts("gemma3_seeing", {"\n" * count: 10 + count for count in range(1, 9)})
    tokens, images = with_images([7, 11, 2, 2, 11, 12, 9, 2], [picture] * 3, kind, texts)
    picture_of = [2, 1, 1, 3]
    assert tokens == [7, 13, *picture_of, 14, *picture_of, 13, 12, 9, 12, *picture_of, 12]
    assert [tokens[image.first : image.first + image.count] for image in images] == [[1, 1]] * 3


def test_room_for_a_picture(tmp_path, caplog):
    folder = build("gemma3_seeing", tmp_path / "model")
    assert make_engine(folder, tokens=20).sees is not None
    with caplog.at_level("INFO"):
        assert make_engine(folder, tokens=19).sees is None
    assert "max_num_batched_tokens must be at least 20, got 19" in caplog.text


def test_settings_of_pictures(tmp_path, caplog):
    """Pictures of another size than the encoder's are not read; pan and scan is not used, and the log says so."""
    folder = build("gemma3_seeing", tmp_path / "model")
    path = folder / "preprocessor_config.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps(given | {"size": {"height": 48, "width": 48}}))
    assert make_engine(folder, tokens=24).sees is None
    path.write_text(json.dumps(given | {"do_pan_and_scan": True}))
    with caplog.at_level("WARNING"):
        kind = make_engine(folder, tokens=24).sees
    assert "pan and scan is not used" in caplog.text
    assert ImageProcessor.of(folder, kind)(Image.new("RGB", (400, 100))).grid == (1, 8, 8)


@pytest.mark.parametrize("case", ["gemma3_seeing", "gemma4_joint"])
def test_low_detail(case, tmp_path):
    """The settings of Gemma 4 know few numbers of tokens; all pictures of Gemma 3 have the same size."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[case] | {"max_soft_tokens": 280}))
    kind = ImageTokens(505, 4, 2, fixed=32 if case == "gemma3_seeing" else 0)
    processor = ImageProcessor.of(tmp_path, kind)
    sizes = [processor(Image.new("RGB", (300, 200)), most).grid for most in (None, 150 * 64, 10)]
    counts = [rows * columns // 4 for _, rows, columns in sizes]
    assert counts == ([16] * 3 if case == "gemma3_seeing" else [260, 126, 60])
    assert processor.most_pixels == (32 * 32 if case == "gemma3_seeing" else 280 * 64)


@pytest.mark.parametrize("case", MMPROJ)
def test_encoders_beside_gguf_files(case, tmp_path):
    """Files of llama.cpp's, with the text in one and the encoder in another."""
    gguf_families, mmproj_files = (
        pytest.importorskip(name, reason="needs gguf", exc_type=ImportError)
        for name in ("gguf_families", "mmproj_files")
    )
    golden = np.load(GOLDENS / f"{case}.npz")
    folder = build(case, tmp_path / "model")
    marks = mmproj_files.MARKS.get(case.split("_")[0], mmproj_files.QWEN)
    tiny_models.build_tokenizer(folder, 512, marks=[*marks, *(f"<m{i}>" for i in range(7 - len(marks)))])
    path = gguf_families.FamilyFile(folder, tmp_path / "model.gguf").write()
    mmproj_files.write_mmproj(folder, tmp_path / "mmproj-model-f32.gguf")
    check(make_engine(path, tokens=TOKENS.get(case, 24)), case, golden, "")


def as_published(folder):
    """A checkpoint of transformers' InternVL in the form of its authors' files."""
    config = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    vision = config["vision_config"]
    vision |= {"model_type": "intern_vit_6b", "architectures": ["InternVisionModel"], "drop_path_rate": 0.1}
    vision |= {"qkv_bias": vision.pop("attention_bias", False), "image_size": 16, "patch_size": 4, "use_moe": False}
    whole = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": config["text_config"],
        "vision_config": vision, "downsample_ratio": config["downsample_ratio"], "dynamic_image_size": True,
        "force_image_size": 16, "max_dynamic_patch": processor["max_patches"], "min_dynamic_patch": 1,
        "select_layer": -1, "ps_version": "v2", "use_thumbnail": True, "template": "internvl2_5",
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "added_tokens.json").write_text(json.dumps({"<IMG_CONTEXT>": config["image_token_id"]}))
    clip = {"feature_extractor_type": "CLIPFeatureExtractor", "crop_size": 16, "size": 16}
    clip |= {name: processor[name] for name in ("image_mean", "image_std", "resample")}
    (folder / "preprocessor_config.json").write_text(json.dumps(clip))
    names = {
        "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
        "embeddings.position_embeddings": "embeddings.position_embedding",
        "embeddings.cls_token": "embeddings.class_embedding", "encoder.layer.": "encoder.layers.",
        "layernorm_before": "norm1", "layernorm_after": "norm2", "attention.projection_layer": "attn.proj",
        "lambda_": "ls", "multi_modal_projector.layer_norm": "mlp1.0", "multi_modal_projector.linear_1": "mlp1.1",
        "multi_modal_projector.linear_2": "mlp1.3", "vision_tower": "vision_model", ".attention.": ".attn.",
    }  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if not name.startswith("language_model.")]:
        own = name
        for theirs, ours in names.items():
            own = own.replace(theirs, ours)
        tensors[own] = tensors.pop(name)
    for name in [name for name in tensors if ".attn.q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{role}_proj")) for role in "qkv"]
        tensors[name.replace("q_proj", "qkv")] = np.concatenate(parts)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_files_as_internvl_is_published(tmp_path):
    golden = np.load(GOLDENS / "internvl_qwen2.npz")
    engine = make_engine(as_published(build("internvl_qwen2", tmp_path / "model")), tokens=24)
    check(engine, "internvl_qwen2", golden, "")


OPTIONS = {
    "two devices": {"tensor_parallel_size": 2},
    "preempted": {"page_size": 16},
    "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "no prefix cache": {"prefix_caching": False},
    "one token at a time": {"decode_steps": 1},
}


FEW_PAGES = {"qwen3_vl_wide": 13, "internvl_qwen3_moe": 13, "gemma3_seeing": 24}
COMBINED = [
    *((case, name) for name in OPTIONS for case in ("qwen3_vl_wide", "gemma3_seeing")),
    ("gemma4_joint", "two devices"),
    ("internvl_qwen3_moe", "two devices"),
    ("internvl_qwen3_moe", "preempted"),
    ("llama4_seeing", "two devices"),
    ("llava_onevision_tied", "two devices"),
    ("llava_onevision_tied", "no prefix cache"),
]


@pytest.mark.parametrize(("case", "name"), COMBINED)
def test_with_other_features(case, name, tmp_path):
    golden = np.load(GOLDENS / f"{case}.npz")
    options = OPTIONS[name] | ({"kv_pages": FEW_PAGES[case]} if name == "preempted" else {})
    engine = make_engine(build(case, tmp_path / "model"), tokens=TOKENS.get(case, 24), **options)
    check(engine, case, golden, "first")
    check(engine, case, golden, "again")
    assert (engine.scheduler.num_preemptions > 0) == (name == "preempted")


@pytest.mark.parametrize("case", ["smolvlm_tied", "smolvlm_hub", "lfm2_vl_hub", "kimi_k25_groups", "lighton_ocr_hub"])
def test_tiles_on_two_devices(case, tmp_path):
    """Steps of 7 tokens end within tiles and within the texts between them. Two of the encoders have an odd number of
    heads, and each device has all of them."""
    golden = np.load(GOLDENS / f"{case}.npz")
    engine = make_engine(build(case, tmp_path / "model"), tokens=7, tensor_parallel_size=2)
    check(engine, case, golden, "first")
    check(engine, case, golden, "cached")


@pytest.mark.parametrize("whole", [0, 9])
@pytest.mark.parametrize("overlapped", [False, True])
def test_pictures_in_random_schedules(overlapped, whole):
    """The device asserts that each row reads the features of its own pictures, which share prefixes, rows and room; and
    that no step ends within a picture that is to be computed as a whole."""
    events = Counter()
    reused = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows = int(rng.integers(9, 24))
        sizes = {"num_pages": int(rng.integers(12, 22)), "page_size": 4, "max_num_seqs": int(rng.integers(2, 6))}
        budget = int(rng.integers(5, 20))
        if whole:
            budget = whole + sizes["max_num_seqs"] + budget % 4
        chunk = 4 if whole and seed % 2 else None
        simulation = Simulation(**sizes, budget=budget, image_rows=rows, whole=whole, chunk=chunk)
        for _ in range(8):
            prompt = []
            pictures = []
            for _ in range(rng.integers(0, 4)):
                prompt += [0, 1][: rng.integers(3)]
                count = int(rng.choice([2, 5, 9]))
                pictures.append((len(prompt), count, bytes([count, int(rng.integers(2))])))
                prompt += [PICTURE] * count
            prompt += rng.integers(0, 6, 2).tolist()
            most = min(int(rng.integers(1, 12)), simulation.longest - len(prompt))
            simulation.add(prompt, n=int(rng.integers(1, 3)), max_tokens=most, pictures=pictures)
            for tokens_per_call in rng.choice(TOKENS_PER_CALL, rng.integers(0, 6)).tolist():
                if rng.random() < 0.2:
                    simulation.propose(int(rng.integers(1, 4)), int(rng.integers(0, 4)))
                simulation.overlapped_step(tokens_per_call) if overlapped else simulation.step(tokens_per_call)
        simulation.drain(overlapped=overlapped)
        events += simulation.events
        reused += simulation.scheduler.images.num_reused
    least = {"preemptions": 20, "prefix hits": 60, "waits for rows": 40, "tokens of pictures": 2000}
    if whole:
        least["waits for room"] = 3
    assert {name: n for name, n in least.items() if events[name] < n} == {}, events
    assert reused > 50


def test_pictures_count_against_the_tokens_of_a_step():
    """Sequences that decode wait for the encoder: beside them a step encodes no more patches than it may have tokens,
    or one picture, and prompts get what is left."""
    chunk = 16
    simulation = Simulation(max_num_seqs=8, budget=64, chunk=chunk, image_rows=64)
    simulation.scheduler.limit_chunk(chunk, 2)
    simulation.scheduler._budget = replace(simulation.scheduler.budget, bursts=False)
    simulation.add([1, 2], max_tokens=60)
    simulation.step()
    for number in range(4):
        pictures = [(1 + 6 * i, 5, bytes([number, i])) for i in range(4)]
        simulation.add([0, *([PICTURE] * 5 + [3]) * 4], max_tokens=2, pictures=pictures)
    simulation.add([4, *[PICTURE] * 30, 5], max_tokens=2, pictures=[(1, 30, b"large")])
    encoded = []
    while simulation.scheduler.waiting or any(seq.images for seq in simulation.scheduler.running):
        plan = simulation.step()
        patches = [job.image.num_patches for job in plan.images]
        encoded.append(patches)
        decodes = int(np.count_nonzero((plan.rows.count == 1) & (plan.rows.num_new > 0)))
        prompts = int(plan.rows.count.sum()) - decodes
        if decodes:
            assert len(patches) <= 1 or sum(patches) <= chunk - decodes, patches
            assert prompts <= max(chunk - decodes - sum(patches), 2), (patches, prompts)
    assert sum(map(len, encoded)) == 17
    assert [30] in encoded
    assert [5, 5] in encoded
    simulation.drain()
