// Products with weights in panels.
//
// The sum of an output is in the order of the inputs, for any number of rows of x and any division of the work. So a
// row's results do not depend on its neighbours.

#pragma once

#include "cpu_panel_pack.h"
#include "cpu_panel_tiles.h"

constexpr int64_t kShortChunk = 2048;  // inputs of four panels of bfloat16: 256 KiB
enum Arithmetic : int64_t { kExact, kInteger, kShort };  // see `cpu_panels.py`

struct Panels {
  const uint8_t* data;
  const int32_t* table;  // for each panel: its begin in units of 64 bytes, its type, blocks of a record
  int64_t out, in;

  // Of one weight, or of a stack of `experts` weights.
  Panels(const Call& call, int64_t argument, int64_t out, int64_t in, int64_t experts = 1)
      : data(::data<const uint8_t>(call.argument(argument))), table(::data<int32_t>(call.argument(argument + 1))),
        out(out), in(in) {
    if (!kChecked) return;
    check_index("the number of panels", experts * count(), 0, call.argument(argument + 1).dims[0] + 1);
    const int64_t bytes = element_count(call.argument(argument));
    for (int64_t p = 0; p < experts * count(); p++) {
      check_index("the type of panel", type(p), 0, kIq4Xs + 1, p);
      check_index("the begin of panel", int64_t{64} * table[3 * p], 0, bytes - panel_bytes(type(p), in, blocks(p)) + 1, p);
    }
  }
  // Returns one weight of a stack.
  Panels of(int64_t expert) const {
    Panels one = *this;
    one.table += 3 * count() * expert;
    return one;
  }
  const uint8_t* begin(int64_t panel) const { return data + int64_t{64} * table[3 * panel]; }
  int32_t type(int64_t panel) const { return table[3 * panel + 1]; }
  int64_t blocks(int64_t panel) const { return table[3 * panel + 2]; }
  // Gains of a panel's rows, only in NVFP4.
  const float* gains(int64_t panel) const {
    return reinterpret_cast<const float*>(begin(panel) + panel_bytes(kNvfp4, in, 0)) - kPanelRows;
  }
  int64_t count() const { return (out + kPanelRows - 1) / kPanelRows; }
};

// One matmul: rows x, the weight, and the rows' rounded forms, which begin at row `first_row` of `rounded`.
struct Product {
  const float* x;
  int64_t tokens;
  Panels w;
  const Rounded& rounded;
  int64_t first_row, arithmetic;
  float* y;
  Later* later = nullptr;

  // Writes sums of columns to y.
  void write(const float* sums, int64_t panel, int64_t panels) const {
    const int64_t first = panel * kPanelRows, count = std::min(panels * kPanelRows, w.out - first);
    for (int64_t m = 0; m < tokens; m++) std::copy_n(sums + m * kColumns * kWidth, count, y + m * w.out + first);
  }

  // `bytes` of each of the panels from this one to `end`, beginning at `from`, for tiles of all rows that fetch `steps`
  // times each, which are `tall`. Nothing if there is one tile, since memory is then busy with the panels that are used.
  Ahead following(int64_t panel, int64_t end, int64_t from, int64_t bytes, int64_t steps, int64_t tall) const {
    constexpr int64_t kTogether = kColumns / kParts;
    const int64_t fetches = steps * ((tokens + tall - 1) / tall);
    Ahead ahead;
    if (fetches <= steps || bytes < 64) return ahead;
    ahead.pieces = std::min(kTogether, end - panel);
    ahead.lines = (bytes / 64 + fetches - 1) / fetches, ahead.blocks = bytes / 64 / ahead.lines;
    for (int64_t p = 0; p < ahead.pieces; p++) ahead.from[p] = w.begin(panel + p) + from;
    return ahead;
  }

  template <class W, int C>
  void multiply_floats(const uint8_t* const* panels, int64_t first, int64_t inputs, Ahead& ahead, float* sums) const {
    for (int64_t m = 0; m < tokens;) {
      const int64_t height = next_height(tokens - m, W::kTall);
      by_height<W::kTall>(height, [&](auto tall) {
        float_tile<W, tall, C>(x + m * w.in + first, w.in, panels, inputs, ahead, later, sums + m * kColumns * kWidth);
      });
      m += height;
    }
  }

  template <class W>
  void float_panels(const uint8_t* const* panels, int64_t count, int64_t first, int64_t inputs, Ahead ahead,
                    float* sums) const {
    if (count * kParts == kColumns) return multiply_floats<W, kColumns>(panels, first, inputs, ahead, sums);
    for (int64_t p = 0; p < count; p++)
      multiply_floats<W, kParts>(panels + p, first, inputs, ahead, sums + p * kPanelRows);
  }

  // Panels of numbers as they are stored.
  template <class W>
  void stored_panels(int64_t panel, int64_t count, int64_t end, float* sums) const {
    const uint8_t* panels[kColumns];
    for (int64_t p = 0; p < count; p++) panels[p] = w.begin(panel + p);
    const int64_t bytes = w.in * W::kBytes / W::kInputs;
    const Ahead ahead = following(panel + count, end, 0, bytes, (w.in + kFloatStep - 1) / kFloatStep, W::kTall);
    float_panels<W>(panels, count, 0, w.in, ahead, sums);
  }

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  template <int C>
  void multiply_pairs(const uint8_t* const* panels, int64_t first, int64_t inputs, Ahead& ahead, float* sums) const {
    const int64_t row = rounded.inputs / 2;
    for (int64_t m = 0; m < tokens;) {
      const int64_t height = next_height(tokens - m, kFloatTall);
      by_height<kFloatTall>(height, [&](auto tall) {
        const int32_t* from = rounded.pairs.get() + (first_row + m) * row + first / 2;
        short_tile<tall, C>(from, row, panels, inputs, ahead, later, sums + m * kColumns * kWidth);
      });
      m += height;
    }
  }

  // Panels too large for the second-level cache are taken in chunks that stay there while more than two tiles use them.
  // The next chunk of these panels, or the first of those that follow before `end`, is prefetched meanwhile.
  void short_panels(int64_t panel, int64_t count, int64_t end, float* sums) const {
    constexpr int64_t kTogether = kColumns / kParts, kBytes = 2 * kPanelRows;  // bytes of an input
    const int64_t passes = (tokens + kFloatTall - 1) / kFloatTall, chunk = passes > 2 ? kShortChunk : w.in;
    for (int64_t first = 0; first < w.in; first += chunk) {
      const int64_t inputs = std::min(chunk, w.in - first), next = first + inputs < w.in ? first + inputs : 0;
      const int64_t bytes = std::min(chunk, w.in - next) * kBytes, steps = inputs / (2 * kShortStep);
      Ahead ahead = following(panel + (next ? 0 : count), next ? panel + count : end, next * kBytes, bytes, steps, kFloatTall);
      const uint8_t* panels[kColumns];
      for (int64_t p = 0; p < count; p++) panels[p] = w.begin(panel + p) + first * kBytes;
      if (count == kTogether) multiply_pairs<kColumns>(panels, first, inputs, ahead, sums);
      for (int64_t p = 0; p < count && count < kTogether; p++)
        multiply_pairs<kParts>(panels + p, first, inputs, ahead, sums + p * kPanelRows);
    }
  }
#else
  void short_panels(int64_t, int64_t, int64_t, float*) const {}
#endif

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
      float_panels<Float32>(panels, count, first, end - first, Ahead(), sums);
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
          int_tile<tall, C, R::kSub, R::kTop>(rounded, first_row + m, unpacked, first, end - first, ahead,
                                              sums + m * kColumns * kWidth);
        });
        m += height;
      }
    }
  }

  template <class R>
  void int_columns(int64_t panel, float* sums) const {
    const int64_t blocks_of = R::kBlocks ? R::kBlocks : w.blocks(panel);
    for (int64_t m = 0; m < tokens;) {
      const int64_t height = next_height(tokens - m, kColumnTall);
      for (int part = 0; part < kParts; part++)
        by_height<kColumnTall>(height, [&](auto tall) {
          int_column<R, tall>(rounded, first_row + m, w.begin(panel), blocks_of, part, m + part == 0,
                              sums + m * kColumns * kWidth + part * kWidth);
        });
      m += height;
    }
  }

  template <class R>
  void quantized_panels(int64_t panel, int64_t count, float* sums) const {
    if (arithmetic != kInteger) return exact_panels<R>(panel, count, sums);
    for (int64_t p = 0; p < count;) {
      float* to = sums + p * kPanelRows;
      if constexpr (kOnlyColumns) {
        int_columns<R>(panel + p++, to);
      } else if (tokens <= kColumnMost) {
        int_columns<R>(panel + p++, to);
      } else if (kIntColumns > kParts && p + kIntColumns / kParts <= count) {
        int_panels<R, kIntColumns>(panel + p, to);
        p += kIntColumns / kParts;
      } else {
        int_panels<R, kParts>(panel + p++, to);
      }
    }
  }

  // Computes panels of one type, at most kColumns of them. The thread's piece ends at `end`.
  void run(int64_t panel, int64_t count, int64_t end) const {
    static thread_local std::vector<float> sums;
    sums.assign(tokens * kColumns * kWidth, 0.f);
    const int32_t type = w.type(panel);
    if (type == kFloat32) stored_panels<Float32>(panel, count, end, sums.data());
    if (type == kFloat16) stored_panels<Float16>(panel, count, end, sums.data());
    const bool pairs = type == kBfloat16 && arithmetic == kShort && kHasShort;
    if (pairs) short_panels(panel, count, end, sums.data());
    if (type == kBfloat16 && !pairs) stored_panels<Bfloat16>(panel, count, end, sums.data());
    with_record(type, [&](auto record) { quantized_panels<decltype(record)>(panel, count, sums.data()); });
    for (int64_t i = 0; type == kNvfp4 && i < tokens * count; i++) {
      const float* gains = w.gains(panel + i % count);
      float* of = sums.data() + i / count * kColumns * kWidth + i % count * kPanelRows;
      for (int row = 0; row < kPanelRows; row++) of[row] *= gains[row];
    }
    write(sums.data(), panel, count);
  }

  // How often `later` is called for this many panels of floats.
  int64_t steps(int64_t panels) const {
    constexpr int64_t kTogether = kColumns / kParts;
    const int64_t passes = (tokens + kFloatTall - 1) / kFloatTall;
    return (panels + kTogether - 1) / kTogether * passes * ((w.in + kFloatStep - 1) / kFloatStep);
  }

  // Computes the panels [first, end).
  void run_all(int64_t first, int64_t end) const {
    constexpr int64_t kTogether = kColumns / kParts;
    for (int64_t next; first < end; first = next) {
      const int64_t most = std::min(end, first + kTogether);
      for (next = first + 1; next < most && w.type(next) == w.type(first);) next++;
      run(first, next - first, end);
    }
  }
};

// The forms of x that a weight's types and the arithmetic need.
struct Forms {
  bool floats = false, pairs = false, codes = false;
  Forms(const Panels& w, int64_t arithmetic) {
    for (int64_t p = 0; p < w.count(); p++) {
      const bool pair = w.type(p) == kBfloat16 && arithmetic == kShort && kHasShort;
      const bool code = w.type(p) > kBfloat16 && arithmetic == kInteger;
      pairs |= pair, codes |= code, floats |= !pair && !code;
    }
  }
};

// Rounds x on all threads, to those of the forms that are rounded. row(i): address of row i of x.
template <class F>
static void round_rows(const Call& call, const Forms& forms, int64_t in, int64_t rows, Rounded& r, F row) {
  r.reserve(rows, in, forms.pairs, forms.codes);
  if (!forms.pairs && !forms.codes) return;
  parallel_for(call, rows, [&r, &row, &forms, in](int64_t i) {
    const float* x = row(i);
    if (forms.pairs) r.round_pairs(x, i, in);
    for (int64_t b = 0; forms.codes && b < r.blocks; b++)
      r.round_block(x + b * kBlock, std::min(kBlock, in - b * kBlock), i, b);
  });
}

// How many of `panels` panels are a thread's piece. They are neighbours, so that a thread continues with the memory
// that follows.
static int64_t panels_at_once(const Call& call, int64_t panels) {
  constexpr int64_t kTogether = kColumns / kParts;
  const int64_t groups = (panels + kTogether - 1) / kTogether;
  return std::clamp<int64_t>(groups / (4 * call.num_threads()), 1, 8) * kTogether;
}

// Divides a product with x [tokens, w.in] into items, and calls run(product, item, items, first, end) on all threads for
// the panels [first, end) of each.
template <class F>
static void multiply(const Call& call, const Panels& w, int64_t tokens, int64_t arithmetic, F run) {
  const float* x = data<float>(call.argument(0));
  Rounded rounded;
  round_rows(call, Forms(w, arithmetic), w.in, tokens, rounded, [x, &w](int64_t row) { return x + row * w.in; });
  const Product product{x, tokens, w, rounded, 0, arithmetic, data<float>(call.result())};
  const int64_t panels = w.count(), piece = panels_at_once(call, panels);
  const int64_t items = (panels + piece - 1) / piece;
  parallel_for(call, items, [&product, &run, panels, piece, items](int64_t i) {
    run(product, i, items, i * piece, std::min(panels, (i + 1) * piece));
  });
}
