// Packs rows into panels. Rows are float32, float16, bfloat16 or GGUF's blocks (ggml-common.h). Rows of grouped types
// are a byte for each code [in], float32 scales, then float32 shifts [groups]. Rows of 4-bit floats are a byte for each
// code [in], a byte for each scale [groups], and for NVFP4 a float32 gain.

#pragma once

#include "cpu_panels.h"

// Packs codes of one row into a record, from its block `first` on, four at a time.
template <class R>
static void put_codes(const uint8_t* codes, int64_t inputs, int64_t blocks_of, int64_t row, int64_t first,
                      uint8_t* record) {
  const auto add = [](uint8_t* to, uint32_t bits) {
    uint32_t all;
    std::memcpy(&all, to, 4);
    all |= bits;
    std::memcpy(to, &all, 4);
  };
  for (int64_t i = 0; i < inputs; i += 4) {
    const int64_t block = first + i / kBlock, q = i % kBlock / 4;
    uint32_t four = 0;
    std::memcpy(&four, codes + i, std::min<int64_t>(4, inputs - i));
    uint8_t* to = record + R::kCodes + block * R::kStep + row * 4;
    if (R::kLow == 8) {
      std::memcpy(to + q * 64, &four, 4);
      continue;
    }
    if (R::kLow == 4) add(to + q % 4 * 64, (four & 0x0f0f0f0f) << q / 4 * 4);
    if (R::kLow == 2) add(to + q / 4 * 64, (four & 0x03030303) << q % 4 * 2);
    to = record + R::kCodes + blocks_of * R::kStep + block * 64 * R::kHigh + row * 4;
    if (R::kHigh == 1) add(to, (four >> R::kLow & 0x01010101) << q);
    if (R::kHigh == 2) add(to + q / 4 * 64, (four >> R::kLow & 0x03030303) << q % 4 * 2);
  }
}

// Bytes of a block of 32 in a file: a scale, a shift (some types), the bits of codes beyond 4, the other bits.
template <class R>
static constexpr int64_t small_bytes() {
  return R::kCodes / 32 + R::kHigh * 4 + (R::kLow == 8 ? 32 : 16);
}

// Packs GGUF's blocks, which begin at `from`, as codes and scales of one row of a record.
template <class R>
static void pack_record(const uint8_t* from, int64_t row, uint8_t* record, int64_t blocks) {
  uint8_t codes[256];
  if (R::kBlocks == 2) {
    for (int64_t b = 0; b < blocks; b++, from += small_bytes<R>()) {
      const uint8_t* at = from;
      std::memcpy(record + b * 32 + row * 2, at, 2), at += 2;
      if (R::kCodes == 128) std::memcpy(record + 64 + b * 32 + row * 2, at, 2), at += 2;
      uint32_t high = 0;
      if (R::kHigh) std::memcpy(&high, at, 4), at += 4;
      for (int i = 0; i < 32; i++)
        codes[i] = R::kLow == 8 ? at[i] ^ 0x80 : (i < 16 ? at[i] & 15 : at[i - 16] >> 4) | (high >> i & 1) << 4;
      put_codes<R>(codes, kBlock, R::kBlocks, row, b, record);
    }
    return;
  }
  if (R::kType == kQ6K) {
    const uint8_t *low = from, *high = from + 128, *scales = from + 192;
    for (int half = 0; half < 2; half++) {
      uint8_t* to = codes + 128 * half;
      for (int i = 0; i < 64; i++) to[i] = low[64 * half + i] & 15, to[64 + i] = low[64 * half + i] >> 4;
      for (int part = 0; part < 4; part++)
        for (int i = 0; i < 32; i++) to[32 * part + i] |= (high[32 * half + i] >> 2 * part & 3) << 4;
    }
    std::memcpy(record + row * 2, from + 208, 2);
    for (int g = 0; g < 16; g++) record[64 + g * kPanelRows + row] = scales[g];
  } else if (R::kLow == 2) {
    const uint8_t *low = from + (R::kType == kQ2K ? 16 : 32), *scales = R::kType == kQ2K ? from : from + 96;
    for (int i = 0; i < 256; i++) codes[i] = low[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
    for (int i = 0; R::kType == kQ3K && i < 256; i++) codes[i] |= (from[i % 32] >> i / 32 & 1) << 2;
    for (int g = 0; g < 16; g++) {
      const int nibble = scales[g % 8] >> g / 8 * 4 & 15, top = scales[8 + g % 4] >> g / 4 * 2 & 3;
      record[64 + g * kPanelRows + row] = R::kType == kQ2K ? scales[g] : (nibble | top << 4) - 32;
    }
    std::memcpy(record + row * 2, from + (R::kType == kQ2K ? 80 : 108), 2);
    if (R::kType == kQ2K) std::memcpy(record + 32 + row * 2, from + 82, 2);
  } else if (R::kType == kIq4Xs) {
    const uint8_t *low = from + 8, *nibbles = from + 4;
    for (int i = 0; i < 256; i++) codes[i] = low[i / 32 * 16 + i % 16] >> i / 16 % 2 * 4 & 15;
    std::memcpy(record + row * 2, from, 2);
    for (int g = 0; g < 8; g++) {
      const int nibble = nibbles[g / 2] >> g % 2 * 4 & 15, top = from[2 + g / 4] >> g % 4 * 2 & 3;
      record[64 + g * kPanelRows + row] = (nibble | top << 4) - 32;
    }
  } else {
    const uint8_t *six = from + 4, *high = from + 16, *low = from + (R::kType == kQ5K ? 48 : 16);
    for (int pair = 0; pair < 4; pair++) {
      uint8_t* to = codes + 64 * pair;
      for (int i = 0; i < 32; i++) to[i] = low[32 * pair + i] & 15, to[32 + i] = low[32 * pair + i] >> 4;
    }
    for (int group = 0; R::kType == kQ5K && group < 8; group++)
      for (int i = 0; i < 32; i++) codes[32 * group + i] |= (high[i] >> group & 1) << 4;
    std::memcpy(record + row * 2, from, 2);
    std::memcpy(record + 32 + row * 2, from + 2, 2);
    for (int g = 0; g < 8; g++) {
      const int scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
      const int least = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
      record[64 + g * kPanelRows + row] = scale, record[192 + g * kPanelRows + row] = least;
    }
  }
  put_codes<R>(codes, 256, 8, row, 0, record);
}

// Bytes of as many inputs in a file as a record has.
template <class R>
static constexpr int64_t block_bytes() {
  switch (R::kType) {
    case kQ2K: return 84;
    case kQ3K: return 110;
    case kIq4Xs: return 136;
    case kQ4K: return 144;
    case kQ5K: return 176;
    case kQ6K: return 210;
  }
  return 2 * small_bytes<R>();
}

template <class R>
static void pack_float4_row(const uint8_t* from, int64_t in, int64_t row, uint8_t* panel) {
  constexpr int64_t kInputs = R::kBlocks * kBlock;
  const uint8_t* scale = from + in;
  for (int64_t first = 0; first < in; first += kInputs, panel += R::bytes(R::kBlocks)) {
    const int64_t left = std::min(kInputs, in - first);
    put_codes<R>(from + first, left, R::kBlocks, row, 0, panel);
    for (int64_t g = 0; g * R::kSub < left; g++) panel[g * kPanelRows + row] = *scale++;
  }
  if (R::kType == kNvfp4) std::memcpy(panel + row * 4, scale, 4);
}

template <class R>
static void pack_row(const uint8_t* from, int64_t in, int64_t blocks_of, int64_t row, uint8_t* panel) {
  if (R::kFloat4) return pack_float4_row<R>(from, in, row, panel);
  const int64_t blocks = R::kBlocks ? R::kBlocks : blocks_of, inputs = blocks * kBlock, size = R::bytes(blocks);
  const int64_t groups = (in + inputs - 1) / inputs;
  for (int64_t g = 0; g < groups; g++, panel += size) {
    const int64_t left = std::min(inputs, in - g * inputs);
    if (R::kBlocks) {
      pack_record<R>(from + g * block_bytes<R>(), row, panel, left / kBlock);
      continue;
    }
    std::memcpy(panel + row * 4, from + in + 4 * g, 4);
    std::memcpy(panel + 64 + row * 4, from + in + 4 * (groups + g), 4);
    put_codes<R>(from + g * inputs, left, blocks, row, 0, panel);
  }
}

// Packs all rows of a panel of floats. Null rows stay zero. Item: kInputs inputs of one row.
template <class Item, int kInputs>
static void pack_floats(const uint8_t* const* rows, int64_t in, uint8_t* panel) {
  constexpr int64_t kSize = sizeof(Item) / kInputs;
  for (int64_t k = 0; k < in; k += kInputs, panel += kPanelRows * sizeof(Item))
    for (int row = 0; row < kPanelRows; row++)
      if (rows[row]) std::memcpy(panel + row * sizeof(Item), rows[row] + k * kSize, k + kInputs <= in ? sizeof(Item) : kSize);
}

extern "C" int64_t jaxserve_panel_bytes(int32_t type, int64_t in, int64_t blocks_of) {
  return panel_bytes(type, in, blocks_of);
}

// Packs `rows` [panels * 16]. Null rows are not written, and so stay zero. Panel p has types[p] and goes to
// to + offsets[p].
extern "C" void jaxserve_pack_panels(int64_t panels, int64_t in, int64_t blocks_of, const int32_t* types,
                                     const int64_t* offsets, const uint8_t* const* rows, uint8_t* to) {
  for (int64_t p = 0; p < panels; p++, rows += kPanelRows) {
    uint8_t* panel = to + offsets[p];
    if (types[p] == kFloat32) pack_floats<uint32_t, 1>(rows, in, panel);
    if (types[p] == kFloat16) pack_floats<uint16_t, 1>(rows, in, panel);
    if (types[p] == kBfloat16) pack_floats<uint32_t, 2>(rows, in, panel);
    with_record(types[p], [&](auto record) {
      for (int64_t row = 0; row < kPanelRows; row++)
        if (rows[row]) pack_row<decltype(record)>(rows[row], in, blocks_of, row, panel);
    });
  }
}
