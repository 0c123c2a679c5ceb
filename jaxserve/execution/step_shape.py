"""The buckets to which steps are padded, and the layout of their packed buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxserve.config import MAX_TOKENS_PER_CALL


@dataclass(frozen=True)
class StepShape:
    """A bucket: the padded sizes of one compiled step, and the place of each field in its packed buffer.

    Fields, int32:
      tokens [tokens]: -1 for a token that only the device knows (the slot's last), and for padding.
      q_start [rows + 1]: the index of each row's first token, and the end of the last row.
      slot [rows]: the padding slot for padding.
      num_new [rows]: how many new tokens the row samples; if negative, `sample_deferred` samples as many later.
      tokens_per_call [1]: the largest num_new, at least 1.
      num_decodes [1]: rows of one token, which come first.
      update_slot, update_index, update_page [table_updates]: new entries of block tables.
      positions [3 * tokens], if the model has three positions a token (`three_positions`): those that the host knows;
        -1 for a token whose positions follow from its place.

    The buffer does not say where a row's tokens lie in its sequence, because the slot knows the sequence's length.

    scored: prompts whose tokens' log-probabilities are wanted run in this bucket only, so that the programs of others
    do not return hidden states.
    """

    tokens: int
    rows: int
    table_updates: int
    decode_only: bool
    scored: bool = False
    three_positions: bool = False

    @classmethod
    def of(
        cls, tokens: int, rows: int, page_size: int, *, decode_only: bool, num_groups: int = 1, scored: bool = False,
        three_positions: bool = False,
    ) -> StepShape:  # fmt: skip
        """A bucket with room for the block-table entries that `tokens` tokens can add."""
        return cls(tokens, rows, (rows + tokens // page_size) * num_groups, decode_only, scored, three_positions)

    @cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Field name -> (offset, length) in the packed buffer."""
        sizes = {
            "tokens": self.tokens,
            "q_start": self.rows + 1,
            "slot": self.rows,
            "num_new": self.rows,
            "tokens_per_call": 1,
            "num_decodes": 1,
            "update_slot": self.table_updates,
            "update_index": self.table_updates,
            "update_page": self.table_updates,
            "positions": 3 * self.tokens if self.three_positions else 0,
        }
        fields = {}
        offset = 0
        for name, size in sizes.items():
            fields[name] = (offset, size)
            offset += size
        return fields

    def empty(self, num_slots: int) -> np.ndarray:
        """A buffer without rows: all slots are the padding slot, and no token is given."""
        packed = np.zeros(self.words, np.int32)
        for name, value in (("tokens", -1), ("slot", num_slots), ("update_slot", num_slots), ("positions", -1)):
            at, size = self.fields[name]
            packed[at : at + size] = value
        return packed

    @property
    def max_tokens_per_call(self) -> int:
        """The most tokens that a row can sample in one call of any program for this bucket."""
        return MAX_TOKENS_PER_CALL if self.decode_only else 1

    @property
    def words(self) -> int:
        offset, size = self.fields["positions"]
        return offset + size

    def __str__(self) -> str:
        """As profiles, dumps and logs name it: decode_32, or for 512 tokens of up to 64 rows mixed_512x64."""
        return f"decode_{self.rows}" if self.decode_only else f"mixed_{self.tokens}x{self.rows}"
