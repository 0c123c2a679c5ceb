// Tiles of products with weights in panels: some rows of x times some columns of a panel, in float32, in pairs of
// bfloat16, or in integers. Also the rounding of x for the latter two.

#pragma once

#include "cpu_panels.h"

// Columns and rows of x that are multiplied at once: as many sums as registers hold beside the operands. A type of
// floats may have fewer rows (kTall).
constexpr int kColumns = kWidth == 8 ? 2 : 4;
constexpr int kFloatTall = 6 * kColumns < kRegisters ? 6 : 3;
constexpr int kIntColumns = kWidth == 4 ? 4 : 2, kIntTall = kWidth == 8 ? 4 : 3;
// Rows of x that `int_column` multiplies at once, and the most rows for which it is the fastest. With 32 wide registers
// it is for any number of rows.
constexpr bool kOnlyColumns = kWidth == 16;
constexpr int kColumnTall = kOnlyColumns ? 8 : kWidth == 8 ? 4 : 3, kColumnMost = kWidth == 8 ? 8 : 3;

// The height of the next tile, of 1, 2, 3, 4, 6 and 8, such that tiles have nearly equal heights; the tallest come
// first.
static int64_t next_height(int64_t left, int64_t tallest) {
  const int64_t passes = (left + tallest - 1) / tallest, height = (left + passes - 1) / passes;
  return height == 5 || height == 7 ? height - 1 : height;
}

// Calls f(std::integral_constant<int, height>) for a tile of `height` rows, at most kTallest.
template <int kTallest, class F>
static void by_height(int64_t height, F f) {
  if (height == 1) f(std::integral_constant<int, 1>());
  if (kTallest >= 2 && height == 2) f(std::integral_constant<int, kTallest >= 2 ? 2 : 1>());
  if (kTallest >= 3 && height == 3) f(std::integral_constant<int, kTallest >= 3 ? 3 : 1>());
  if (kTallest >= 4 && height == 4) f(std::integral_constant<int, kTallest >= 4 ? 4 : 1>());
  if (kTallest >= 6 && height == 6) f(std::integral_constant<int, kTallest >= 6 ? 6 : 1>());
  if (kTallest >= 8 && height == 8) f(std::integral_constant<int, kTallest >= 8 ? 8 : 1>());
}

// Floats. Each struct unpacks the vectors of one or two inputs from a panel.

struct Float32 {
  static constexpr int kInputs = 1, kType = kFloat32, kTall = kFloatTall;
  static constexpr int64_t kBytes = 4 * kPanelRows, kVector = 4 * kWidth;
  static inline Floats widen(const uint8_t* from, int) { return load<Floats>(from); }
};
struct Float16 {
  static constexpr int kInputs = 1, kType = kFloat16, kTall = kFloatTall;
  static constexpr int64_t kBytes = 2 * kPanelRows, kVector = 2 * kWidth;
  static inline Floats widen(const uint8_t* from, int) { return of_halves(from); }
};
struct Bfloat16 {  // 16 registers hold the vectors of two inputs, and a mask, beside 4 rows' sums
  static constexpr int kInputs = 2, kType = kBfloat16, kTall = kRegisters == 16 ? std::min(4, kFloatTall) : kFloatTall;
  static constexpr int64_t kBytes = 4 * kPanelRows, kVector = 4 * kWidth;
  static inline Floats widen(const uint8_t* from, int which) {
    const Ints both = load<Ints>(from);
    return (Floats)(which ? both & -65536 : both << 16);
  }
};

// Memory that is needed when a product is done: ranges that are prefetched one after the other to the second-level cache,
// some cache lines in each step of the product.
struct Later {
  struct Range {
    const uint8_t *from, *end;
  };
  std::vector<Range> ranges;
  int64_t total = 0, lines = 0;  // bytes of all ranges; cache lines of a step
  size_t next = 0;               // the range that is prefetched

  void add(const uint8_t* from, int64_t bytes) {
    ranges.push_back({from, from + bytes});
    total += bytes;
  }
  // Sets how many steps there will be.
  void divide(int64_t steps) { lines = (total / 64 + steps - 1) / steps; }
  void fetch() {
    if (next == ranges.size()) return;
    Range& range = ranges[next];
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(range.from + 64 * i, 0, 2);
    range.from += 64 * lines;
    next += range.from >= range.end;
  }
};
// Memory to prefetch to the second-level cache during other work: some pieces, and how many cache lines of each to
// prefetch for each block of the tiles, `blocks` times.
struct Ahead {
  const uint8_t* from[std::max(kColumns, kIntColumns) / kParts + 1] = {};
  int64_t pieces = 0, lines = 0, blocks = INT64_MAX;
  void fetch() {
    if (blocks-- <= 0) return;
    for (int64_t p = 0; p < pieces; p++, from[p - 1] += 64 * lines)
      for (int64_t i = 0; i < lines; i++) __builtin_prefetch(from[p] + 64 * i, 0, 2);
  }
};

constexpr int64_t kFloatStep = 16;  // inputs of a step of `float_tile`

// to[m, c] += x[m, :in] . column c, for M rows x, `row` apart, and C columns of W, of whole panels. The kParts columns
// of a panel are adjacent. Sums are [.., kColumns * kWidth].
//
// GCC keeps an array in registers only if it unrolls all loops over it early, which it does with loops inside another
// one, and with others if told so. Otherwise it stores each sum at each input: with 16 registers four times as slow.
template <class W, int M, int C>
static void float_tile(const float* x, int64_t row, const uint8_t* const* panels, int64_t in, Ahead& ahead, Later* later,
                       float* to) {
  Floats sums[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) sums[m][c] = load<Floats>(to + (m * kColumns + c) * kWidth);
  const uint8_t* from[C / kParts];
#pragma GCC unroll 8
  for (int p = 0; p < C / kParts; p++) from[p] = panels[p];
  for (int64_t k = 0; k < in;) {
    ahead.fetch();
    if (later) later->fetch();
    for (const int64_t end = std::min(in, k + kFloatStep); k < end;) {
      for (int which = 0; which < W::kInputs && k < end; which++, k++) {
        Floats w[C];
        for (int c = 0; c < C; c++) w[c] = kept(W::widen(from[c / kParts] + c % kParts * W::kVector, which));
        for (int m = 0; m < M; m++)
          for (int c = 0; c < C; c++) sums[m][c] = fused(w[c], x[m * row + k] - Floats{}, sums[m][c]);
      }
      for (int p = 0; p < C / kParts; p++) from[p] += W::kBytes;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) reg(to + (m * kColumns + c) * kWidth) = sums[m][c];
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// float_tile for bfloat16, with x rounded to pairs [tokens, row]: products of pairs, sums in float32. Prefetches every
// kShortStep pairs.
constexpr bool kHasShort = true;
constexpr int64_t kShortStep = 8;
template <int M, int C>
static void short_tile(const int32_t* x, int64_t row, const uint8_t* const* panels, int64_t in, Ahead& ahead,
                       Later* later, float* to) {
  __m512 sums[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) sums[m][c] = load<__m512>(to + (m * kColumns + c) * kWidth);
  for (int64_t k = 0; k < (in + 1) / 2; k++) {
    if (k % kShortStep == 0) {
      ahead.fetch();
      if (later) later->fetch();
    }
    __m512i w[C];
    for (int c = 0; c < C; c++) {
      w[c] = load<__m512i>(panels[c] + k * 64);
      asm("" : "+v"(w[c]));
    }
    for (int m = 0; m < M; m++) {
      const __m512i pair = _mm512_set1_epi32(x[m * row + k]);
      for (int c = 0; c < C; c++) sums[m][c] = _mm512_dpbf16_ps(sums[m][c], (__m512bh)w[c], (__m512bh)pair);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) std::memcpy(to + (m * kColumns + c) * kWidth, &sums[m][c], sizeof sums[m][c]);
}
#else
constexpr bool kHasShort = false;
#endif

// x rounded to pairs of bfloat16, or to signed bytes with a scale for each block.
struct Rounded {
  int64_t inputs = 0, blocks = 0;       // inputs is a multiple of kBlock
  std::unique_ptr<int32_t[]> pairs;     // [tokens, inputs / 2]
  std::unique_ptr<int32_t[]> codes;     // [tokens, inputs / 4], four codes in each
  std::unique_ptr<float[]> scale, sum;  // [tokens, blocks]; sum of the block's codes, times its scale
  std::unique_ptr<float[]> half_sum;    // [tokens, 2 * blocks], sum of each 16 inputs

  void reserve(int64_t tokens, int64_t in, bool as_pairs, bool as_codes) {
    blocks = (in + kBlock - 1) / kBlock, inputs = blocks * kBlock;
    if (as_pairs) pairs.reset(new int32_t[tokens * inputs / 2]);
    if (!as_codes) return;
    codes.reset(new int32_t[tokens * inputs / 4]);
    scale.reset(new float[tokens * blocks]), sum.reset(new float[tokens * blocks]);
    half_sum.reset(new float[2 * tokens * blocks]);
  }

  // Copies a token of `from`, which has the same forms, to the place of a token here.
  void copy(const Rounded& from, int64_t source, int64_t token) {
    const auto copy = [=](const auto& values, const auto& to, int64_t size) {
      if (to) std::copy_n(values.get() + source * size, size, to.get() + token * size);
    };
    copy(from.pairs, pairs, inputs / 2), copy(from.codes, codes, inputs / 4);
    copy(from.scale, scale, blocks), copy(from.sum, sum, blocks), copy(from.half_sum, half_sum, 2 * blocks);
  }

  void round_pairs(const float* x, int64_t token, int64_t in) {
    uint16_t* to = reinterpret_cast<uint16_t*>(pairs.get()) + token * inputs;
    for (int64_t k = 0; k < in; k++) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, x[k]);
      const bool is_number = (bits & 0x7fffffff) <= 0x7f800000;
      to[k] = is_number ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 64;
    }
    std::fill(to + in, to + inputs, 0);
  }

  void round_block(const float* x, int64_t count, int64_t token, int64_t block) {
    constexpr int kVectors = kBlock / kWidth;
    constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the lowest bits
    float last[kBlock] = {};
    if (count < kBlock) std::memcpy(last, x, count * sizeof(float)), x = last;
    Floats v[kVectors], top = {}, all = {};
    for (int i = 0; i < kVectors; i++) {
      v[i] = load<Floats>(x + i * kWidth);
      const Floats size = (Floats)((Ints)v[i] & 0x7fffffff);
      top = size > top ? size : top;
      all += v[i] * 0.f;  // zero, or NaN if x is NaN or infinite; the scale is then NaN, too
    }
    float tops[kWidth], poison = 0;
    std::memcpy(tops, &top, sizeof tops);
    for (int half = kWidth / 2; half; half /= 2)
      for (int i = 0; i < half; i++) tops[i] = tops[i + half] > tops[i] ? tops[i + half] : tops[i];
    for (int i = 0; i < kWidth; i++) poison += all[i];
    const float peak = tops[0], factor = peak > 1e-30f ? 127.f / peak : 0.f, step = peak / 127.f + poison;
    int32_t whole[kBlock], halves[2] = {};
    for (int i = 0; i < kVectors; i++) {
      const Ints some = (Ints)(v[i] * factor + kMagic) - __builtin_bit_cast(int32_t, kMagic);
      std::memcpy(whole + i * kWidth, &some, sizeof some);
    }
    int8_t* to = reinterpret_cast<int8_t*>(codes.get()) + token * inputs + block * kBlock;
    for (int i = 0; i < kBlock; i++) to[i] = whole[i];
    for (int i = 0; i < kBlock / 2; i++) halves[0] += whole[i], halves[1] += whole[kBlock / 2 + i];
    const int64_t at = token * blocks + block;
    scale[at] = step, sum[at] = step * (halves[0] + halves[1]);
    half_sum[2 * at] = step * halves[0], half_sum[2 * at + 1] = step * halves[1];
  }
};

// total += (acc * scale of x) * scale + (sum of x) * shift. One group's part of a sum, in the same order in all
// kernels.
static inline void add_group(Floats& total, Ints acc, float x_scale, float x_sum, const Floats& scale,
                             const Floats& shift) {
  total = fused(__builtin_convertvector(acc, Floats) * x_scale, scale, total);
  total = fused(shift, x_sum - Floats{}, total);
}

// Sums [M, kColumns * kWidth] of M rows x, from `token` on, with one column of a panel. Unpacks codes in registers.
// With `fetches`, the memory kAhead bytes further on is prefetched. The processor's own prefetching loses records of
// codes and high bits, which are two streams (Q6_K comes from memory at two thirds of the rate without it).
constexpr int64_t kAhead = 4096;
template <class R, int M>
static void int_column(const Rounded& x, int64_t token, const uint8_t* record, int64_t blocks_of, int part,
                       bool fetches, float* to) {
  constexpr int kSteps = R::kSub / 4;
  const int32_t* codes = x.codes.get() + token * x.inputs / 4;
  const float *scales = x.scale.get() + token * x.blocks, *sums = x.sum.get() + token * x.blocks;
  const float* half_sums = x.half_sum.get() + 2 * token * x.blocks;
  const int64_t size = R::bytes(blocks_of), bytes = size / blocks_of, fetched = fetches ? bytes : 0;
  Floats totals[M] = {};
  for (int64_t at = 0; at < x.blocks; record += size)
    for (int64_t b = 0; b < blocks_of && at < x.blocks; b++, at++) {
      for (int64_t i = 0; i < fetched; i += 64) __builtin_prefetch(record + b * bytes + kAhead + i);
#pragma GCC unroll 2
      for (int sub = 0; sub < kBlock / R::kSub; sub++) {
        Dots<R::kTop> dots[M];
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; i++) {
          const int q = sub * kSteps + i;
          const Bytes w = R::dot_codes(record, blocks_of, b, q, part);
          for (int m = 0; m < M; m++) dots[m].add(w, codes[m * x.inputs / 4 + at * 8 + q], i, kSteps);
        }
        Floats scale, shift;
        R::dot_scales(record, R::kBlocks ? b * (kBlock / R::kSub) + sub : 0, part, scale, shift);
        for (int m = 0; m < M; m++)
          add_group(totals[m], dots[m].sum, scales[m * x.blocks + at],
                    R::kSub == 16 ? half_sums[2 * (m * x.blocks + at) + sub] : sums[m * x.blocks + at], scale, shift);
      }
    }
  for (int m = 0; m < M; m++) std::memcpy(to + m * kColumns * kWidth, &totals[m], sizeof totals[m]);
}

// Some blocks of columns, unpacked: codes [column][block][8], scale and shift [column][group].
constexpr int64_t kChunk = 32;  // blocks
struct Unpacked {
  Bytes codes[kIntColumns][kChunk][8];
  Floats scale[kIntColumns][2 * kChunk], shift[kIntColumns][2 * kChunk];
};

template <class R>
static void unpack(const uint8_t* panel, int64_t blocks_of, int64_t first, int64_t end, int part, int column,
                   Unpacked& to) {
  constexpr int kGroups = kBlock / R::kSub;
  const uint8_t* record = panel + first / blocks_of * R::bytes(blocks_of);
  for (int64_t at = 0, b = first % blocks_of; at < end - first; at++) {
#pragma GCC unroll 8
    for (int q = 0; q < 8; q++) to.codes[column][at][q] = R::dot_codes(record, blocks_of, b, q, part);
    for (int g = 0; g < kGroups; g++) {
      const int64_t group = at * kGroups + g;
      R::dot_scales(record, R::kBlocks ? b * kGroups + g : 0, part, to.scale[column][group], to.shift[column][group]);
    }
    if (++b == blocks_of) b = 0, record += R::bytes(blocks_of);
  }
}

// to[m, c] += the sums of `int_column`, for unpacked blocks, from block `first` of x on. The totals stay in `to`, so that
// the sums of a group have the registers. The addresses of the rows are hidden from GCC, which would otherwise keep one
// for each row and four inputs in memory.
template <int M, int C, int kSub, int kTop>
static void int_tile(const Rounded& x, int64_t token, const Unpacked& w, int64_t first, int64_t count, Ahead& ahead,
                     float* to) {
  constexpr int kSteps = kSub / 4, kGroups = kBlock / kSub;
  const int32_t* codes[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) codes[m] = x.codes.get() + (token + m) * x.inputs / 4 + first * 8;
  for (int64_t b = 0; b < count; b++) {
    ahead.fetch();
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) asm("" : "+r"(codes[m]));
    for (int sub = 0; sub < kGroups; sub++) {
      Dots<kTop> dots[M][C];
#pragma GCC unroll 8
      for (int i = 0; i < kSteps; i++) {
        const int q = sub * kSteps + i;
        for (int m = 0; m < M; m++) {
          const int32_t four = codes[m][q];
          for (int c = 0; c < C; c++) dots[m][c].add(w.codes[c][b][q], four, i, kSteps);
        }
      }
      const int64_t group = b * kGroups + sub;
      for (int m = 0; m < M; m++) {
        const int64_t at = (token + m) * x.blocks + first + b;
        const float sum = kSub == 16 ? x.half_sum[2 * at + sub] : x.sum[at];
        for (int c = 0; c < C; c++) {
          Floats total = load<Floats>(to + (m * kColumns + c) * kWidth);
          add_group(total, dots[m][c].sum, x.scale[at], sum, w.scale[c][group], w.shift[c][group]);
          reg(to + (m * kColumns + c) * kWidth) = total;
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) codes[m] += 8;
  }
}

// Dequantizes some inputs of the columns to float32, as panels of Float32 [inputs, kPanelRows].
template <class R>
static void dequantize(const uint8_t* panel, int64_t blocks_of, int64_t first, int64_t end, float* to) {
  for (int64_t at = first; at < end; at++)
    for (int part = 0; part < kParts; part++)
      for (int q = 0; q < 8; q++) {
        const uint8_t* record = panel + at / blocks_of * R::bytes(blocks_of);
        const int64_t b = at % blocks_of, group = R::kBlocks ? b * (kBlock / R::kSub) + q * 4 / R::kSub : 0;
        const Bytes codes = R::codes(record, blocks_of, b, q, part);
        Floats scale, shift;
        R::scales(record, group, part, scale, shift);
        for (int i = 0; i < 4; i++) {
          const Ints numbers = ((Ints)codes >> 8 * i) & 255;  // the i-th of four codes of each row
          const Floats value = fused(__builtin_convertvector(numbers, Floats), scale, shift);
          std::memcpy(to + ((at - first) * kBlock + q * 4 + i) * kPanelRows + part * kWidth, &value, sizeof value);
        }
      }
}
