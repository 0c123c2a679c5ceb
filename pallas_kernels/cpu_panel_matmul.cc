// Products with weights in panels (cpu_panels.h) and rows of such weights, called by XLA through its foreign function
// interface. Results are float32.
//
// The sum of an output is in the order of the inputs, for any number of rows of x and any division of the work. So a
// row's results do not depend on its neighbours.

#include "cpu_panel_pack.h"
#include "cpu_panel_tiles.h"

enum Arithmetic : int64_t { kExact, kInteger, kShort };  // see `cpu_panels.py`

struct Panels {
  const uint8_t* data;
  const int32_t* table;  // for each panel: its begin in units of 64 bytes, its type, blocks of a record
  int64_t out, in;

  Panels(const Call& call, int64_t argument)
      : data(::data<const uint8_t>(call.argument(argument))), table(::data<int32_t>(call.argument(argument + 1))),
        out(call.attribute<int64_t>("out")), in(call.attribute<int64_t>("inputs")) {}
  const uint8_t* begin(int64_t panel) const { return data + int64_t{64} * table[3 * panel]; }
  int32_t type(int64_t panel) const { return table[3 * panel + 1]; }
  int64_t blocks(int64_t panel) const { return table[3 * panel + 2]; }
  // Gains of a panel's rows, only in NVFP4.
  const float* gains(int64_t panel) const {
    return reinterpret_cast<const float*>(begin(panel) + panel_bytes(kNvfp4, in, 0)) - kPanelRows;
  }
  int64_t count() const { return (out + kPanelRows - 1) / kPanelRows; }
};

// One matmul: x, its rounded forms, and the weight.
struct Product {
  const float* x;
  int64_t tokens;
  Panels w;
  Rounded rounded;
  int64_t arithmetic;
  float* y;

  // Writes sums of columns to y.
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
      // Prefetch the next chunk of these panels, or the first chunk of the panels that follow.
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

  // Computes panels of one type, at most kColumns of them.
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
    for (int64_t i = 0; type == kNvfp4 && i < tokens * count; i++) {
      const float* gains = w.gains(panel + i % count);
      float* of = sums.data() + i / count * kColumns * kWidth + i % count * kPanelRows;
      for (int row = 0; row < kPanelRows; row++) of[row] *= gains[row];
    }
    write(sums.data(), panel, count);
  }
};

// Rounds x on all threads, to the forms that the types and the arithmetic need.
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

// y = x w^T for the first `count` rows of x [tokens, in]. Other rows of y are not written.
static void panel_matmul(const Call& call) {
  const Array& x = call.argument(0);
  const int64_t tokens = std::min<int64_t>(x.dims[0], *data<int32_t>(call.argument(3)));
  if (tokens <= 0) return;
  Product product{data<float>(x), tokens, Panels(call, 1), {}, call.attribute<int64_t>("arithmetic"),
                  data<float>(call.result())};
  round_x(call, product);
    // A thread's piece is several neighbouring panels, so that it continues with the memory that follows.
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

// y[i] = row ids[i] of the weight in float32. ids are clamped to its rows.
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
    const float gain = w.type(panel) == kNvfp4 ? w.gains(panel)[lane] : 1;
    for (int64_t k = 0; gain != 1 && k < w.in; k++) to[k] *= gain;
  });
}
DEFINE_HANDLER(PanelRows, panel_rows, kS32, XLA_FFI_DataType_U8, kS32)
