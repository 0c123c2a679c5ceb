"""Train small sentencepiece models on a text of ours, and record what the sentencepiece package makes of some texts.

pip install sentencepiece==0.2.3
python tests/goldens/record_tokenizers.py
"""

import io
import json
from pathlib import Path

import sentencepiece as spm

FOLDER = Path(__file__).resolve().parent / "tokenizers"
TEXT = Path(__file__).resolve().parents[2] / "checkpoints" / "demo" / "calibration.txt"
TEXTS = [
    "",
    " ",
    "Hello world, hello there!",
    "  two  spaces and\ttabs\n\n\nlines \r\n end  ",
    "It's 1234567 o'clock; x1y22z333",
    "naïve café 你好世界 😀👍🏽 e\u0301 \u00a0 \u2003 ½ ﬁ Ａ ٣",
    "use <tool>call</tool>  <tool> a<sep>b",
    "def main():\n\treturn {'a': [1, 2.5e-3]}  # \\ stop",
]
MODELS = {
    # As Llama and Mistral have it.
    "bpe": {
        "model_type": "bpe",
        "vocab_size": 480,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>"],
    },
    # What the trainer does when nothing is said.
    "unigram": {"model_type": "unigram", "vocab_size": 300, "user_defined_symbols": ["<tool>"]},
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    lines = [line for line in TEXT.read_text(encoding="utf-8").splitlines() if line][:400]
    expected = {}
    for name, options in MODELS.items():
        made = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=made, character_coverage=1.0, hard_vocab_limit=False, **options
        )
        (FOLDER / f"{name}.model").write_bytes(made.getvalue())
        processor = spm.SentencePieceProcessor(model_proto=made.getvalue())
        expected[name] = {
            "size": processor.vocab_size(),
            "ids": [[text, processor.encode(text)] for text in TEXTS],
            "decoded": [processor.decode(processor.encode(text)) for text in TEXTS],
        }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
