// Products with weights in panels (cpu_panels.h) and rows of such weights, called by XLA through its foreign function
// interface. Results are float32.
//
// The sum of one output runs over the inputs in their order, whatever number of rows x has and however the work is cut:
// a row's results do not depend on its neighbours.

#include "cpu_panel_pack.h"

enum Arithmetic : int64_t { kExact, kInteger, kShort };  // see `cpu_panels.py`

struct Panels {
  const uint8_t* data;
  const int32_t* table;  // of each panel: where it begins, in units of 64 bytes; its type; blocks of a record
  int64_t out, in;

  Panels(const Call& call, int64_t argument)
      : data(::data<const uint8_t>(call.argument(argument))), table(::data<int32_t>(call.argument(argument + 1))),
        out(call.attribute<int64_t>("out")), in(call.attribute<int64_t>("inputs")) {}
  const uint8_t* begin(int64_t panel) const { return data + int64_t{64} * table[3 * panel]; }
  int32_t type(int64_t panel) const { return table[3 * panel + 1]; }
  int64_t blocks(int64_t panel) const { return table[3 * panel + 2]; }
  int64_t count() const { return (out + kPanelRows - 1) / kPanelRows; }
};

// Columns that are multiplied at once, and rows x: as many sums as registers hold beside the numbers that pass.
constexpr int kColumns = kWidth == 8 ? 2 : 4;
constexpr int kFloatTall = 6;
constexpr int kIntColumns = kWidth == 4 ? 4 : 2, kIntTall = kWidth == 16 ? 6 : kWidth == 8 ? 2 : 3;

// Heights of tiles, the tallest first: nearly even, from those that there are (1, 2, 3, 4 and 6).
static int64_t next_height(int64_t left, int64_t tallest) {
  const int64_t passes = (left + tallest - 1) / tallest, height = (left + passes - 1) / passes;
  return height == 5 ? 4 : height;
}

// Calls f(std::integral_constant<int, height>) for tiles of at most `kTallest` rows.
template <int kTallest, class F>
static void by_height(int64_t height, F f) {
  if (height == 1) f(std::integral_constant<int, 1>());
  if (kTallest >= 2 && height == 2) f(std::integral_constant<int, kTallest >= 2 ? 2 : 1>());
  if (kTallest >= 3 && height == 3) f(std::integral_constant<int, kTallest >= 3 ? 3 : 1>());
  if (kTallest >= 4 && height == 4) f(std::integral_constant<int, kTallest >= 4 ? 4 : 1>());
  if (kTallest >= 6 && height == 6) f(std::integral_constant<int, kTallest >= 6 ? 6 : 1>());
}

// Floats: how the vectors of one or two inputs come out of a panel.

struct Float32 {
  static constexpr int kInputs = 1, kType = kFloat32;
  static constexpr int64_t kBytes = 4 * kPanelRows, kVector = 4 * kWidth;
  static inline Floats widen(const uint8_t* from, int) { return load<Floats>(from); }
};
struct Float16 {
  static constexpr int kInputs = 1, kType = kFloat16;
  static constexpr int64_t kBytes = 2 * kPanelRows, kVector = 2 * kWidth;
  static inline Floats widen(const uint8_t* from, int) { return of_halves(from); }
};
struct Bfloat16 {
  static constexpr int kInputs = 2, kType = kBfloat16;
  static constexpr int64_t kBytes = 4 * kPanelRows, kVector = 4 * kWidth;
  static inline Floats widen(const uint8_t* from, int which) {
    const Ints both = load<Ints>(from);
    return (Floats)(which ? both & -65536 : both << 16);
  }
};

// to[m, c] += x[m, :in] . column c, for M rows x, `row` apart, and C columns of W, of which the kParts of a panel lie
// side by side; sums [.., kColumns * kWidth].
template <class W, int M, int C>
static void float_tile(const float* x, int64_t row, const uint8_t* const* panels, int64_t in, float* to) {
  Floats sums[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) sums[m][c] = load<Floats>(to + (m * kColumns + c) * kWidth);
  const uint8_t* from[C];
  for (int c = 0; c < C; c++) from[c] = panels[c / kParts] + c % kParts * W::kVector;
  const auto add = [&](int64_t k, int which) {
    Floats w[C];
    for (int c = 0; c < C; c++) keep(w[c] = W::widen(from[c], which));
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) sums[m][c] += w[c] * x[m * row + k + which];
  };
  int64_t k = 0;
  for (; k + W::kInputs <= in; k += W::kInputs) {
    for (int which = 0; which < W::kInputs; which++) add(k, which);
    for (int c = 0; c < C; c++) from[c] += W::kBytes;
  }
  if (k < in) add(k, 0);
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) std::memcpy(to + (m * kColumns + c) * kWidth, &sums[m][c], sizeof sums[m][c]);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// The same for bfloat16, with x rounded to it, in pairs [tokens, row]: products of pairs, sums in float32.
constexpr bool kHasShort = true;
template <int M, int C>
static void short_tile(const int32_t* x, int64_t row, const uint8_t* const* panels, int64_t in, float* to) {
  __m512 sums[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) sums[m][c] = load<__m512>(to + (m * kColumns + c) * kWidth);
  for (int64_t k = 0; k < (in + 1) / 2; k++) {
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

// x rounded: to bfloat16 in pairs, and to signed bytes with a scale for each block.
struct Rounded {
  int64_t inputs = 0, blocks = 0;       // inputs is a multiple of kBlock
  std::unique_ptr<int32_t[]> pairs;     // [tokens, inputs / 2]
  std::unique_ptr<int32_t[]> codes;     // [tokens, inputs / 4], four in each
  std::unique_ptr<float[]> scale, sum;  // [tokens, blocks]; sum is that of the block's codes, times its scale
  std::unique_ptr<float[]> half_sum;    // [tokens, 2 * blocks], of each 16 inputs

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
    constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to whole numbers, which the lowest bits hold
    float last[kBlock] = {};
    if (count < kBlock) std::memcpy(last, x, count * sizeof(float)), x = last;
    Floats v[kVectors], top = {}, all = {};
    for (int i = 0; i < kVectors; i++) {
      v[i] = load<Floats>(x + i * kWidth);
      const Floats size = (Floats)((Ints)v[i] & 0x7fffffff);
      top = size > top ? size : top;
      all += v[i] * 0.f;  // zero, or not a number where x is none or infinite, and so is the scale then
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

// total += (acc * scale of x) * scale + (sum of x) * shift: one group's part of a sum, in one order for all kernels.
static inline void add_group(Floats& total, Ints acc, float x_scale, float x_sum, const Floats& scale,
                             const Floats& shift) {
  total += __builtin_convertvector(acc, Floats) * x_scale * scale;
  total += shift * x_sum;
}

// Sums [M, kColumns * kWidth] of M rows x, from `token` on, with one column of a panel: codes are unpacked in registers.
template <class R, int M>
static void int_column(const Rounded& x, int64_t token, const uint8_t* record, int64_t blocks_of, int part, float* to) {
  constexpr int kSteps = R::kSub / 4;
  const int32_t* codes = x.codes.get() + token * x.inputs / 4;
  const float *scales = x.scale.get() + token * x.blocks, *sums = x.sum.get() + token * x.blocks;
  const float* half_sums = x.half_sum.get() + 2 * token * x.blocks;
  const int64_t size = R::bytes(blocks_of);
  Floats totals[M] = {};
  for (int64_t at = 0; at < x.blocks; record += size)
    for (int64_t b = 0; b < blocks_of && at < x.blocks; b++, at++)
      for (int sub = 0; sub < kBlock / R::kSub; sub++) {
        Ints acc[M] = {};
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; i++) {
          const int q = sub * kSteps + i;
          const Bytes w = R::codes(record, blocks_of, b, q, part);
          for (int m = 0; m < M; m++)
            acc[m] = dot_bytes<R::kEight>(acc[m], w, codes[m * x.inputs / 4 + at * 8 + q]);
        }
        Floats scale, shift;
        R::scales(record, R::kBlocks ? b * (kBlock / R::kSub) + sub : 0, part, scale, shift);
        for (int m = 0; m < M; m++)
          add_group(totals[m], acc[m], scales[m * x.blocks + at],
                    R::kSub == 16 ? half_sums[2 * (m * x.blocks + at) + sub] : sums[m * x.blocks + at], scale, shift);
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
    for (int q = 0; q < 8; q++) to.codes[column][at][q] = R::codes(record, blocks_of, b, q, part);
    for (int g = 0; g < kGroups; g++) {
      const int64_t group = at * kGroups + g;
      R::scales(record, R::kBlocks ? b * kGroups + g : 0, part, to.scale[column][group], to.shift[column][group]);
    }
    if (++b == blocks_of) b = 0, record += R::bytes(blocks_of);
  }
}

// What is to come into the second-level cache while something else is computed: some pieces of memory, so many lines of
// each for each block of the tiles.
struct Ahead {
  const uint8_t* from[kIntColumns / kParts + 1] = {};
  int64_t pieces = 0, lines = 0;
  void fetch() {
    for (int64_t p = 0; p < pieces; p++, from[p - 1] += 64 * lines)
      for (int64_t i = 0; i < lines; i++) __builtin_prefetch(from[p] + 64 * i, 0, 2);
  }
};

// to[m, c] += the same as `int_column` for blocks that are unpacked, from block `first` of x on.
template <int M, int C, int kSub, bool kEight>
static void int_tile(const Rounded& x, int64_t token, const Unpacked& w, int64_t first, int64_t count, Ahead& ahead,
                     float* to) {
  constexpr int kSteps = kSub / 4, kGroups = kBlock / kSub;
  Floats totals[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) totals[m][c] = load<Floats>(to + (m * kColumns + c) * kWidth);
  const int32_t* codes = x.codes.get() + token * x.inputs / 4 + first * 8;
  for (int64_t b = 0; b < count; b++, codes += 8) {
    ahead.fetch();
    for (int sub = 0; sub < kGroups; sub++) {
      Ints acc[M][C] = {};
#pragma GCC unroll 8
      for (int i = 0; i < kSteps; i++) {
        const int q = sub * kSteps + i;
        for (int m = 0; m < M; m++) {
          const int32_t four = codes[m * x.inputs / 4 + q];
          for (int c = 0; c < C; c++) acc[m][c] = dot_bytes<kEight>(acc[m][c], w.codes[c][b][q], four);
        }
      }
      const int64_t group = b * kGroups + sub;
      for (int m = 0; m < M; m++) {
        const int64_t at = (token + m) * x.blocks + first + b;
        const float sum = kSub == 16 ? x.half_sum[2 * at + sub] : x.sum[at];
        for (int c = 0; c < C; c++)
          add_group(totals[m][c], acc[m][c], x.scale[at], sum, w.scale[c][group], w.shift[c][group]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) std::memcpy(to + (m * kColumns + c) * kWidth, &totals[m][c], sizeof totals[m][c]);
}

// Some columns' inputs in float32, as panels of Float32 [inputs, kPanelRows].
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
          Floats value;
          for (int row = 0; row < kWidth; row++) value[row] = codes[4 * row + i];
          value = value * scale + shift;
          std::memcpy(to + ((at - first) * kBlock + q * 4 + i) * kPanelRows + part * kWidth, &value, sizeof value);
        }
      }
}

// One matmul: x, its rounded forms, and the weight.
struct Product {
  const float* x;
  int64_t tokens;
  Panels w;
  Rounded rounded;
  int64_t arithmetic;
  float* y;

  // The columns' sums in their places of y.
  void write(const float* sums, int64_t panel, int64_t panels) const {
    const int64_t first = panel * kPanelRows, count = std::min(panels * kPanelRows, w.out - first);
    for (int64_t m = 0; m < tokens; m++) std::copy_n(sums + m * kColumns * kWidth, count, y + m * w.out + first);
  }

  template <class W, int C>
  void multiply_floats(const uint8_t* const* panels, int64_t first, int64_t inputs, float* sums) const {
    for (int64_t m = 0; m < tokens;) {
      const int64_t height = next_height(tokens - m, kFloatTall);
      by_height<kFloatTall>(height, [&](auto tall) {
        float* to = sums + m * kColumns * kWidth;
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
        if constexpr (W::kType == kBfloat16)
          if (arithmetic == kShort)
            return short_tile<tall, C>(rounded.pairs.get() + m * rounded.inputs / 2, rounded.inputs / 2, panels, inputs, to);
#endif
        float_tile<W, tall, C>(x + m * w.in + first, w.in, panels, inputs, to);
      });
      m += height;
    }
  }

  template <class W>
  void float_panels(const uint8_t* const* panels, int64_t count, int64_t first, int64_t inputs, float* sums) const {
    if (count * kParts == kColumns) return multiply_floats<W, kColumns>(panels, first, inputs, sums);
    for (int64_t p = 0; p < count; p++)
      multiply_floats<W, kParts>(panels + p, first, inputs, sums + p * kPanelRows);
  }

  template <class R>
  void exact_panels(int64_t panel, int64_t count, float* sums) const {
    static thread_local std::vector<float> values;
    constexpr int64_t kInputs = kChunk * kBlock / 4;
    values.resize(count * kInputs * kPanelRows);
    const int64_t blocks_of = R::kBlocks ? R::kBlocks : w.blocks(panel);
    for (int64_t first = 0; first < w.in; first += kInputs) {
      const int64_t end = std::min(w.in, first + kInputs);
      const uint8_t* panels[kColumns];
      for (int64_t p = 0; p < count; p++) {
        float* to = values.data() + p * kInputs * kPanelRows;
        dequantize<R>(w.begin(panel + p), blocks_of, first / kBlock, (end + kBlock - 1) / kBlock, to);
        panels[p] = reinterpret_cast<const uint8_t*>(to);
      }
      float_panels<Float32>(panels, count, first, end - first, sums);
    }
  }

  template <class R, int C>
  void int_panels(int64_t panel, float* sums) const {
    alignas(64) static thread_local Unpacked unpacked;
    const int64_t blocks_of = R::kBlocks ? R::kBlocks : w.blocks(panel), panels = C / kParts;
    const int64_t passes = (tokens + kIntTall - 1) / kIntTall;
    for (int64_t first = 0; first < rounded.blocks; first += kChunk) {
      const int64_t end = std::min(rounded.blocks, first + kChunk);
      for (int c = 0; c < C; c++)
        unpack<R>(w.begin(panel + c / kParts), blocks_of, first, end, c % kParts, c, unpacked);
      // The next chunk of these panels, or the first one of those that follow.
      const int64_t per_block = R::bytes(blocks_of) / blocks_of, next = end < rounded.blocks ? end : 0;
      Ahead ahead;
      ahead.lines = per_block / 64 / passes + 1;
      for (int64_t p = 0; p < panels && panel + p + (next ? 0 : panels) < w.count(); p++)
        ahead.from[ahead.pieces++] = w.begin(panel + p + (next ? 0 : panels)) + next * per_block;
      for (int64_t m = 0; m < tokens;) {
        const int64_t height = next_height(tokens - m, kIntTall);
        by_height<kIntTall>(height, [&](auto tall) {
          int_tile<tall, C, R::kSub, R::kEight>(rounded, m, unpacked, first, end - first, ahead,
                                                sums + m * kColumns * kWidth);
        });
        m += height;
      }
    }
  }

  template <class R>
  void few_rows(int64_t panel, float* sums) const {
    const int64_t blocks_of = R::kBlocks ? R::kBlocks : w.blocks(panel);
    for (int part = 0; part < kParts; part++)
      by_height<3>(tokens, [&](auto tall) {
        int_column<R, tall>(rounded, 0, w.begin(panel), blocks_of, part, sums + part * kWidth);
      });
  }

  template <class R>
  void quantized_panels(int64_t panel, int64_t count, float* sums) const {
    if (arithmetic != kInteger) return exact_panels<R>(panel, count, sums);
    for (int64_t p = 0; p < count;) {
      float* to = sums + p * kPanelRows;
      if (tokens <= 3) {
        few_rows<R>(panel + p++, to);
      } else if (kIntColumns > kParts && p + kIntColumns / kParts <= count) {
        int_panels<R, kIntColumns>(panel + p, to);
        p += kIntColumns / kParts;
      } else {
        int_panels<R, kParts>(panel + p++, to);
      }
    }
  }

  // Panels of one type, at most as many as kColumns have.
  void run(int64_t panel, int64_t count) const {
    static thread_local std::vector<float> sums;
    sums.assign(tokens * kColumns * kWidth, 0.f);
    const int32_t type = w.type(panel);
    const uint8_t* panels[kColumns];
    for (int64_t p = 0; p < count; p++) panels[p] = w.begin(panel + p);
    if (type == kFloat32) float_panels<Float32>(panels, count, 0, w.in, sums.data());
    if (type == kFloat16) float_panels<Float16>(panels, count, 0, w.in, sums.data());
    if (type == kBfloat16) float_panels<Bfloat16>(panels, count, 0, w.in, sums.data());
    with_record(type, [&](auto record) { quantized_panels<decltype(record)>(panel, count, sums.data()); });
    write(sums.data(), panel, count);
  }
};

// What of x the types and the arithmetic ask for, rounded by all threads.
static void round_x(const Call& call, Product& product) {
  Rounded& r = product.rounded;
  const int64_t in = product.w.in, tokens = product.tokens;
  bool pairs = false, codes = false;
  for (int64_t p = 0; p < product.w.count(); p++) {
    pairs |= product.w.type(p) == kBfloat16 && product.arithmetic == kShort && kHasShort;
    codes |= product.w.type(p) > kBfloat16 && product.arithmetic == kInteger;
  }
  r.blocks = (in + kBlock - 1) / kBlock, r.inputs = r.blocks * kBlock;
  if (pairs) r.pairs.reset(new int32_t[tokens * r.inputs / 2]);
  if (codes) {
    r.codes.reset(new int32_t[tokens * r.inputs / 4]);
    r.scale.reset(new float[tokens * r.blocks]), r.sum.reset(new float[tokens * r.blocks]);
    r.half_sum.reset(new float[2 * tokens * r.blocks]);
  }
  if (!pairs && !codes) return;
  parallel_for(call, tokens, [&product, &r, in, pairs, codes](int64_t token) {
    const float* x = product.x + token * in;
    if (pairs) r.round_pairs(x, token, in);
    for (int64_t b = 0; codes && b < r.blocks; b++)
      r.round_block(x + b * kBlock, std::min(kBlock, in - b * kBlock), token, b);
  });
}

// y = x w^T for the first `count` rows of x [tokens, in]; the other rows of y are left as they are.
static void panel_matmul(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t tokens = std::min<int64_t>(x.dims[0], *data<int32_t>(call.argument(3)));
  if (tokens <= 0) return;
  Product product{data<float>(x), tokens, Panels(call, 1), {}, call.attribute<int64_t>("arithmetic"),
                  data<float>(call.result())};
  round_x(call, product);
  // Threads take pieces of neighbouring panels, so that what follows in memory is what a thread needs next.
  constexpr int64_t kTogether = kColumns / kParts;
  const int64_t panels = product.w.count(), groups = (panels + kTogether - 1) / kTogether;
  const int64_t piece = std::clamp<int64_t>(groups / (4 * call.num_threads()), 1, 8) * kTogether;
  parallel_for(call, (panels + piece - 1) / piece, [&product, panels, piece](int64_t i) {
    const int64_t end = std::min(panels, (i + 1) * piece);
    for (int64_t first = i * piece, next; first < end; first = next) {
      const int64_t most = std::min(end, first + kTogether);
      for (next = first + 1; next < most && product.w.type(next) == product.w.type(first);) next++;
      product.run(first, next - first);
    }
  });
}
DEFINE_HANDLER(PanelMatmul, panel_matmul, kF32, XLA_FFI_DataType_U8, kS32, kS32)

// y[i] = row ids[i] of the weight in float32; ids beyond its rows are brought among them.
static void panel_rows(const Call& call) {
  const Array& ids = call.argument(0);
  const Panels w(call, 1);
  const int32_t* id = data<int32_t>(ids);
  float* y = data<float>(call.result());
  parallel_for(call, ids.dims[0], [=](int64_t i) {
    const int64_t row = std::clamp<int64_t>(id[i], 0, w.out - 1), panel = row / kPanelRows, lane = row % kPanelRows;
    const uint8_t* from = w.begin(panel);
    const uint16_t* shorts = reinterpret_cast<const uint16_t*>(from);
    float* to = y + i * w.in;
    for (int64_t k = 0; k < w.in; k++) {
      if (w.type(panel) == kFloat32) to[k] = reinterpret_cast<const float*>(from)[k * kPanelRows + lane];
      if (w.type(panel) == kFloat16) to[k] = float_of_half(shorts[k * kPanelRows + lane]);
      if (w.type(panel) == kBfloat16)
        to[k] = __builtin_bit_cast(float, shorts[k / 2 * 32 + lane * 2 + k % 2] << 16);
    }
    with_record(w.type(panel), [&](auto record) {
      using R = decltype(record);
      float values[kBlock * kPanelRows];
      for (int64_t b = 0; b * kBlock < w.in; b++) {
        dequantize<R>(from, R::kBlocks ? R::kBlocks : w.blocks(panel), b, b + 1, values);
        const int64_t count = std::min(kBlock, w.in - b * kBlock);
        for (int64_t k = 0; k < count; k++) to[b * kBlock + k] = values[k * kPanelRows + lane];
      }
    });
  });
}
DEFINE_HANDLER(PanelRows, panel_rows, kS32, XLA_FFI_DataType_U8, kS32)
