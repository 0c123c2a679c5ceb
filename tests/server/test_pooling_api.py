"""Embeddings, scores and reranking over HTTP, with the real engine and OpenAI's client."""

import base64

import httpx
import numpy as np
import openai
import pooling_models
import pytest
from serving import DEMO, running_server, wait_until

from jaxserve import LLM
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import InvalidRequestError

MODEL = "test-model"
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_pages": 60, "forbid_compile": True}
TEXTS = ["all happy families", "the sea", "every unhappy family is unhappy in its own way"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: pooling_models.build(name, tmp_path_factory.mktemp(name)) for name in ("embed_last", "score_one")}


@pytest.fixture(scope="module")
def embedder(folders, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "embed.log"
    with running_server(folders["embed_last"], log, engine=None, config=SIZES) as server:
        yield server


@pytest.fixture(scope="module")
def scorer(folders, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "score.log"
    with running_server(folders["score_one"], log, engine=None, config=SIZES) as server:
        yield server


@pytest.fixture(scope="module")
def offline(folders):
    return LLM(folders["embed_last"], **SIZES | {"forbid_compile": False})


def vectors(answer):
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data], np.float32)


@pytest.mark.slow
def test_all_forms_of_input(embedder, folders, offline):
    client = embedder.openai()
    tokenizer = load_tokenizer(folders["embed_last"])
    ids = [tokenizer.encode(text) for text in TEXTS]
    texts = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    np.testing.assert_allclose(vectors(texts), offline.embed(TEXTS, progress=False), rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors(texts), axis=1), 1, rtol=1e-5)
    assert texts.usage.prompt_tokens == texts.usage.total_tokens == sum(map(len, ids))
    one = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    tokens = client.embeddings.create(model=MODEL, input=ids[0], encoding_format="float")
    lists = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
    for answer in (one, tokens):
        np.testing.assert_allclose(vectors(answer)[0], vectors(texts)[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors(lists), vectors(texts), rtol=0, atol=1e-5)
    wait_until(lambda: embedder.metric("prompt_tokens_total") >= 2 * sum(map(len, ids)))
    assert embedder.metric("request_success_total", "length") >= 8


def test_recorded_results(embedder):
    """The same as in tests/engine/test_pooling.py, through HTTP."""
    golden = np.load(pooling_models.GOLDEN)
    prompts = [prompt.tolist() for prompt in pooling_models.prompts_of("embed_last")]
    answer = embedder.openai().embeddings.create(model=MODEL, input=prompts, encoding_format="float")
    for i, vector in enumerate(vectors(answer)):
        np.testing.assert_allclose(vector, golden[f"embed_last_{i}"], rtol=0, atol=1e-4)
    again = embedder.http().post("/v1/embeddings", json={"input": prompts}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128


def test_base64_is_the_same(embedder):
    """Without encoding_format the client itself asks for base64."""
    client = embedder.openai()
    http = embedder.http()
    floats = client.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="float")
    decoded = client.embeddings.create(model=MODEL, input=TEXTS[1])
    raw = http.post("/v1/embeddings", json={"input": TEXTS[1], "encoding_format": "base64"}).json()
    data = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(data, vectors(floats)[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(vectors(decoded)[0], data, rtol=0, atol=1e-6)


def test_dimensions(embedder, offline):
    client = embedder.openai()
    whole = vectors(client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float"))
    short = vectors(client.embeddings.create(model=MODEL, input=TEXTS, dimensions=10, encoding_format="float"))
    expected = whole[:, :10] / np.linalg.norm(whole[:, :10], axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(offline.embed(TEXTS, dimensions=10, progress=False), expected, rtol=0, atol=1e-5)
    with pytest.raises(InvalidRequestError, match="dimensions"):
        offline.embed(TEXTS, dimensions=1000, progress=False)


def test_errors_in_openai_shape(embedder):
    client = embedder.openai()
    for body, param in (
        ({"input": []}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": "a", "dimensions": 1000}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": [10**6]}, "input"),
        ({"input": [9] * 257}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ):
        error = embedder.http().post("/v1/embeddings", json=body)
        assert error.status_code == 400, body
        assert error.json()["error"]["param"] == param, error.text
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="a")
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        client.completions.create(model=MODEL, prompt="a", max_tokens=3)
    cut = embedder.http().post("/v1/embeddings", json={"input": [9] * 300, "truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 256
    assert embedder.http().post("/v1/score", json={"text_1": "a", "text_2": "b"}).status_code == 400


@pytest.mark.slow
def test_scores_and_ranks(scorer, folders):
    http = scorer.http()
    query = "happy families"
    documents = TEXTS
    scores = http.post("/v1/score", json={"model": MODEL, "text_1": query, "text_2": documents}).json()
    values = [item["score"] for item in scores["data"]]
    tokenizer = load_tokenizer(folders["score_one"])
    golden_head = pooling_models.matrix("score_one", "score", 1, 128)
    assert golden_head.shape == (1, 128)
    assert scores["usage"]["prompt_tokens"] == sum(
        len(tokenizer.encode(query)) + len(tokenizer.encode(text)) for text in documents
    )
    llm = LLM(folders["score_one"], **SIZES | {"forbid_compile": False})
    np.testing.assert_allclose(values, llm.score(query, documents, progress=False), rtol=0, atol=1e-5)
    odds = http.post("/score", json={"text_1": query, "text_2": documents, "use_activation": False}).json()
    expected = [1 / (1 + np.exp(-item["score"])) for item in odds["data"]]
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-6)
    pairs = http.post("/v1/score", json={"text_1": [query, "x"], "text_2": documents[:2]}).json()
    assert abs(pairs["data"][0]["score"] - values[0]) < 1e-5
    best = sorted(range(3), key=lambda i: -values[i])
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        body = {"query": query, "documents": [documents[0], {"text": documents[1]}, documents[2]], "top_n": 2}
        answer = http.post(path, json=body).json()
        assert [result["index"] for result in answer["results"]] == best[:2]
        assert all(abs(one["relevance_score"] - values[one["index"]]) < 1e-5 for one in answer["results"])
        assert ("document" in answer["results"][0]) == (path != "/v2/rerank")
    wrong = http.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "text_1"
    long = http.post("/v1/rerank", json={"query": query, "documents": ["a " * 400]})
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    cut = http.post("/v1/rerank", json={"query": query, "documents": ["a " * 400], "truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 256


@pytest.mark.slow
def test_descriptions(embedder, scorer):
    """/openapi.json has the endpoints that the model is for, and /server_info its task."""
    for server, task, path in ((embedder, "embed", "/v1/embeddings"), (scorer, "score", "/v2/rerank")):
        document = server.http().get("/openapi.json").json()
        assert path in document["paths"]
        assert ("/v1/rerank" in document["paths"]) == (task == "score")
        assert server.http().get("/server_info").json()["task"] == task


@pytest.mark.skipif(not DEMO.is_dir(), reason="the bundled model is missing")
def test_a_model_that_generates_refuses(demo_server):
    answer = httpx.post(f"{demo_server.url}/v1/embeddings", json={"input": "a"}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_task"
    assert "/v1/embeddings" not in httpx.get(f"{demo_server.url}/openapi.json", timeout=30).json()["paths"]
